"""What only Jupyter needs: the `%%wb_profile` magic (`magics`) and the toggle panel (`widgets`).

    %load_ext workbench            # adds %%wb_profile
    wb.lab.panel(engine)           # drop-downs for every toggle, and a Run button

Nothing here is the only way to a result: the magic is `wb.profile` around a cell, and the panel is
`jupyter.pair.compare`. Importing this package imports neither IPython nor ipywidgets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.common.errors import UsageError
from workbench.common.extras import refusal_of
from workbench.config import Toggles
from workbench.config import differing as differing

if TYPE_CHECKING:
    from workbench.engine.engine import Engine
    from workbench.jupyter.widgets import Panel


def panel(
    engine: Engine,
    workload: str = "tg16",
    *,
    rounds: int = 5,
    seed: int = 0,
    baseline: Toggles | str | None = None,
) -> Panel:
    """Drop-downs for every toggle, and a button that compares them with a baseline on `engine`.

    The drop-downs begin at the engine's own toggles. baseline: toggles or a preset's name, by
    default everything off; another can be chosen any time. workload: a llama-bench test name.
    rounds: timed repetitions of each side; below 5 there is no verdict. The engine is neither
    stepped nor closed: each run is made on variants of it, which are closed after. While a run is
    on, no cell can use an engine. `result` of the panel is the last comparison: a
    `jupyter.pair.Pair`.

    Raises UsageError for a workload that is none or does not fit the context, for rounds below 1
    and for a negative seed. Also for a preset that does not exist, for a closed engine, and where
    ipywidgets is not installed.
    """
    try:
        from workbench.jupyter.widgets import Panel
    except ModuleNotFoundError as error:
        if not (refusal := refusal_of(error)):
            raise
        raise UsageError(refusal) from error
    return Panel(engine, workload, rounds, seed, baseline)


class Lab:
    """`wb.lab`: what a notebook calls."""

    panel = staticmethod(panel)
    differing = staticmethod(differing)


lab = Lab()
