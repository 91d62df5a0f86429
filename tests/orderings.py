"""Every ordering of copies and waits, and the placements that they are tried on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from workbench.common.errors import UsageError
from workbench.config import Toggles

NAMES = ("sync", "copy_stream", "host_source", "n_copies", "step_wait")
PLACED: dict[str, dict[str, Any]] = {
    "one device": {},
    "two devices": {"n_devices": 2},
    "feed-forward on the host": {"override_tensor": ("ffn_.*=host",)},
    "a device split behind the host's": {"override_tensor": (r"blk\.1\.ffn_=host",)},
    "the host, and the output alone on the second device": {"n_devices": 2, "n_gpu_layers": 2},
    "two devices and the host": {"n_devices": 2, "override_tensor": (r"blk\.0\.ffn_=host",)},
}


def every_ordering(**others: str) -> Iterator[Toggles]:
    """Every combination but those that clash, with `others` set alike; `auto` is one of the
    others."""
    for values in itertools.product(*(Toggles.values(name) for name in NAMES)):
        try:
            toggles = Toggles(**dict(zip(NAMES, values, strict=True)), **others)
        except UsageError:
            continue
        if "auto" not in (toggles.sync, toggles.copy_stream):
            yield toggles
