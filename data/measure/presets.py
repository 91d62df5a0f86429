"""The page's tables of presets: whose values each has, and what the values of `best` rest on."""

from __future__ import annotations

from collections.abc import Iterator

from data.measure.recorded import Recorded
from data.measure.tables import Line, Part, Table
from workbench.presets import best_rows, fixed_presets


def presets(_: Recorded) -> Iterator[Line]:
    """A fixed preset: its toggles that are not as in the baseline."""
    for name, values in fixed_presets().items():
        toggles = ", ".join(f"`{k}={v}`" for k, v in values.items()) or "every one off"
        yield Line({"preset": f"`{name}`", "what it is": values.about, "toggles": toggles})


def best(_: Recorded) -> Iterator[Line]:
    """A toggle of `best` on a kind of device: its value, how it won, and where."""
    for kind, every in best_rows().items():
        for name, row in every.items():
            runs = ", ".join(f"`{run}`" for run in row["runs"])
            value = f"`{name}={row['value']}`"
            yield Line({"device": kind, "toggle": value, "won by": row["by"], "runs": runs})


BLOCKS: dict[str, list[Part]] = {
    "presets": [Table("Presets", presets)],
    "best": [Table("Best", best)],
}
