"""What only Jupyter needs: the `%%wb_profile` magic (`magics`) and the toggle panel (`widgets`).

    %load_ext workbench            # adds %%wb_profile
    wb.lab.panel(engine)           # drop-downs for every toggle, and a Run button

Each has another way to the same result: the magic is `wb.profile` around a cell, and the panel is
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

    The drop-downs begin with the engine's own toggles. The engine is neither stepped nor closed:
    each run uses variants of it, which are closed afterwards. During a run no cell can use an
    engine. `result` of the panel is the last comparison, a `jupyter.pair.Pair`.

    workload: a llama-bench test name.
    rounds: timed repetitions of each side; with fewer than 5 there is no verdict.
    baseline: toggles or a preset's name, by default everything off. Another can be chosen at any
        time.

    Returns the panel, a widget that shows itself as the last line of a cell.

    Raises UsageError for a workload that does not exist or does not fit the context, for fewer
    rounds than 1, for a negative seed, for a preset that does not exist, for a closed engine, and
    where ipywidgets is not installed.
    """
    try:
        from workbench.jupyter.widgets import Panel
    except ModuleNotFoundError as error:
        if not (refusal := refusal_of(error)):
            raise
        raise UsageError(refusal) from error
    return Panel(engine, workload, rounds, seed, baseline)


class Lab:
    """`wb.lab`: functions for notebooks.

    `panel` is a widget that compares toggles on an engine; it raises UsageError for what cannot be
    measured, and without ipywidgets. `differing` says what two sets of toggles differ in.
    """

    panel = staticmethod(panel)
    differing = staticmethod(differing)


lab = Lab()
