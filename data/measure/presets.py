"""The page's tables of presets: whose values each has, and what the values of `best` rest on."""

from __future__ import annotations

from collections.abc import Iterator

from data.measure.recorded import Recorded
from data.measure.tables import Line, Part, Table
from workbench.config import Toggles
from workbench.config.presets import best_rows, fixed_presets


def presets(_: Recorded) -> Iterator[Line]:
    """A fixed preset: its toggles that are not as in the baseline."""
    for name, values in fixed_presets().items():
        toggles = ", ".join(f"`{k}={v}`" for k, v in values.items()) or "every one off"
        yield Line({"preset": f"`{name}`", "what it is": values.about, "toggles": toggles})


def best(_: Recorded) -> Iterator[Line]:
    """A toggle of `best` on a kind of device, for one sequence or several: its value, how it won,
    and where. Of values that won together also what stands for each where a device cannot have them
    all."""
    rows = [
        (kind, wanted, *row)
        for kind, sets in best_rows().items()
        for wanted, every in sets.items()
        for row in every.items()
    ]
    together = any("alone" in row for *_, row in rows)
    for kind, wanted, name, row in rows:
        runs = ", ".join(f"`{run}`" for run in row["runs"])
        cells = {"device": kind, "sequences": wanted, "toggle": f"`{name}={row['value']}`",
                 "won by": row["by"]}  # fmt: skip
        if together:
            alone = row.get("alone") or {"value": Toggles().value_of(name)}
            cells["alone"] = f"`{name}={alone['value']}`" if "alone" in row else ""
        yield Line(cells | {"runs": runs})


BLOCKS: dict[str, list[Part]] = {
    "presets": [Table("Presets", presets)],
    "best": [Table("Best", best)],
}
