"""The page's tables of presets: whose values each has, and what the values of `best` rest on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from workbench.report.tables import markdown
from workbench.toggles import best_rows, fixed_presets


def presets(_: Path) -> str:
    """A row for each fixed preset: its toggles that are not as in the baseline."""
    rows = [
        {
            "preset": f"`{name}`",
            "what it is": values.about,
            "toggles": ", ".join(f"`{k}={v}`" for k, v in values.items()) or "every one off",
        }
        for name, values in fixed_presets().items()
    ]
    return markdown(pd.DataFrame(rows))


def best(_: Path) -> str:
    """A row for each toggle of `best` on each kind of device: its value, how it won, and where."""
    rows = [
        {
            "device": kind,
            "toggle": f"`{name}={row['value']}`",
            "won by": row["by"],
            "runs": ", ".join(f"`{run}`" for run in row["runs"]),
        }
        for kind, every in best_rows().items()
        for name, row in every.items()
    ]
    return markdown(pd.DataFrame(rows))


BLOCKS: dict[str, Callable[[Path], str]] = {"presets": presets, "best": best}
