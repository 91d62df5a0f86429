"""Python's garbage collector, kept from work for a while."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Within, no cyclic garbage is collected. Afterwards the collector is as it was before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def only_new_collected() -> Iterator[None]:
    """Within, the collector looks only at objects that were made within.

    A full collection looks at every object of the process. A notebook has hundreds of thousands of
    them, so what is timed would pay for what was imported. Where the caller has frozen objects
    already (`gc.freeze`), nothing is changed.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
