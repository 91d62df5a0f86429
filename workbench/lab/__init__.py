"""What only Jupyter needs: the `%%wb_profile` magic (`magics`) and the toggle panel (`widgets`).

    %load_ext workbench            # adds %%wb_profile
    wb.lab.panel(engine)           # drop-downs for every toggle, and a Run button

Nothing here is the only way to a result: the magic is `wb.profile` around a cell, and the panel is
`lab.pair.compare`. Importing this package imports neither IPython nor ipywidgets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.config import FAMILIES, Toggles
from workbench.errors import UsageError

if TYPE_CHECKING:
    from workbench.engine.engine import Engine
    from workbench.lab.widgets import Panel


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
    on, no cell can use an engine. `result` of the panel is the last comparison, a `lab.pair.Pair`.

    Raises UsageError for a workload that is none or does not fit the context, for rounds below 1
    and for a negative seed. Also for a preset that does not exist, for a closed engine, and where
    ipywidgets is not installed.
    """
    try:
        from workbench.lab.widgets import Panel
    except ModuleNotFoundError as error:
        if error.name != "ipywidgets":
            raise
        raise UsageError(
            "the panel needs ipywidgets, which is not installed; pip install 'workbench[lab]'"
        ) from error
    return Panel(engine, workload, rounds, seed, baseline)


def differing(before: Toggles, after: Toggles) -> tuple[str, str]:
    """What each has where the two differ: `sync=per_copy` and `sync=packed`. A family is named once
    where all of it differs and each side has it at one value. Twice `the same toggles` for two that
    are equal."""
    names = [n for n in before.names() if before.value_of(n) != after.value_of(n)]
    for family in FAMILIES:
        members = before.members(family)
        whole = all(len({side.value_of(n) for n in members}) == 1 for side in (before, after))
        if whole and set(members) <= set(names):
            names = [family if n == members[0] else n for n in names if n not in members[1:]]
    sides = (", ".join(f"{n}={side.value_of(n)}" for n in names) for side in (before, after))
    first, second = (side or "the same toggles" for side in sides)
    return first, second
