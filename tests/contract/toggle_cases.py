"""One case for each value of each toggle, made of the table (`workbench/config/table.py`).

A case is legal: what the value's facts say of other toggles stands beside it. Some values do
nothing unless another toggle is on (`ON_WITH`). A device that lacks what a value needs refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from workbench.config import EXACT, ROUNDING, Toggles
from workbench.config.table import CLASHES, ROWS, Need, Want, facts_of
from workbench.program.capabilities import Capabilities

# what must be on before a toggle does anything; the values that a Want asks for come of the table
ON_WITH: dict[str, dict[str, str]] = {
    "skip_gate": {"skip_masked_kv": "classes"},
    "skip_masked_kv": {"skip_gate": "always"},
    "branch_fusion": {"fuse": "on"},
    "plan_warmup": {"plans": "ours", "graph_reuse": "set_rows"},
    "fuse_product_norm": {"defer_norm": "on"},
    **{name: {"streams": "3"} for name in ("fork", "lifetimes", "validate")},
    **{name: {"plans": "ours"} for name in ("plan_scope", "plan_evict", "plan_batch")},
}
PARTS = "fuse_", "branch_fusion"  # on a CPU a fused node is its parts: even what may round is exact


class Case(NamedTuple):
    """toggles: the case. without: the same, with the toggle off, and what it alone wants too."""

    name: str
    value: str
    toggles: Toggles
    without: Toggles

    def __str__(self) -> str:
        return f"{self.name}={self.value}"

    def answer_of(self, other: Toggles) -> str:
        """The class of the whole case against other toggles: rounding where any value rounds."""
        pairs = zip(self.toggles.to_dict().items(), other.to_dict().values(), strict=True)
        rounds = any(v != o and ROUNDING in (ROWS[n].answer_of(v), ROWS[n].answer_of(o))
                     for (n, v), o in pairs)  # fmt: skip
        return ROUNDING if rounds else EXACT

    def lacks(self, able: Capabilities) -> Need | None:
        """The first thing that the case needs and a device has not."""
        for name, value in self.toggles.to_dict().items():
            for need in facts_of(name, value, Need):
                if getattr(able, need.capability) < need.least:
                    return need
        return None


def beside(values: Mapping[str, str]) -> dict[str, str]:
    """The values with those that they want, and without a clash."""
    made = Toggles().to_dict() | dict(values)
    for name, value in values.items():
        for want in facts_of(name, value, Want):
            off = want.beside and made[want.beside] == ROWS[want.beside].off
            if not off and made[want.toggle] not in want.values:
                return beside({**values, want.toggle: want.values[0]})
    for name, value, fact in CLASHES:
        if made[name] == value and made[fact.toggle] == fact.value:
            free = fact.toggle if name in values else name
            assert free not in values, f"{name}={value} is never beside {fact.toggle}={fact.value}"
            return beside({**values, free: str(ROWS[free].values.__members__["SET_ROWS"])})
    return dict(values)


def rounding(toggles: Toggles) -> Toggles:
    """What of them rounds on a CPU, alone."""
    return Toggles(**beside({
        name: value for name, value in toggles.to_dict().items()
        if ROWS[name].answer_of(value) == ROUNDING and not name.startswith(PARTS)
    }))  # fmt: skip


def cases() -> list[Case]:
    """Every value but the baseline's, in the order of the table."""
    made = []
    for name, row in ROWS.items():
        for value in row.values:
            if value != row.off:
                on = {m: v for n, v in ON_WITH.get(name, {}).items() for m in Toggles.members(n)}
                whole = beside(on | {name: str(value)})
                wanted = {want.toggle for want in facts_of(name, str(value), Want)}
                base = {n: v for n, v in whole.items() if n not in {name, *wanted & {row.refines}}}
                made.append(Case(name, str(value), Toggles(**whole), Toggles(**beside(base))))
    return made
