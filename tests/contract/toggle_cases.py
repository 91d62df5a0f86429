"""One case for each value of each toggle, made of the table (`workbench/config/table.py`).

A case is legal: what the value's facts say of other toggles stands beside it. Some values do
nothing unless another toggle is on (`ON_WITH`). A device that lacks what a value needs refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from workbench.config import ROUNDING, Toggles
from workbench.config.table import CLASHES, ROWS, Need, Want, facts_of
from workbench.program.capabilities import Capabilities

# what must be on before a toggle does anything; the values that a Want asks for come of the table
ON_WITH: dict[str, dict[str, str]] = {
    "skip_gate": {"skip_masked_kv": "classes"},
    "skip_masked_kv": {"skip_gate": "always"},
    "fork": {"streams": "3"},
    "branch_fusion": {"fuse": "on"},
    "lifetimes": {"streams": "3"},
    "validate": {"streams": "3"},
    "plan_scope": {"plans": "ours"},
    "plan_warmup": {"plans": "ours", "graph_reuse": "set_rows"},
    "plan_evict": {"plans": "ours"},
    "plan_batch": {"plans": "ours"},
    "fuse_product_norm": {"defer_norm": "on"},
}


class Case(NamedTuple):
    """toggles: the case. without: the same, with the toggle off, and what it alone wants too."""

    name: str
    value: str
    toggles: Toggles
    without: Toggles

    def __str__(self) -> str:
        return f"{self.name}={self.value}"

    @property
    def answer(self) -> str:
        """The class of the whole case against the baseline: rounding where any value rounds."""
        return self.answer_of(Toggles())

    def answer_of(self, other: Toggles) -> str:
        """The class against other toggles."""
        pairs = zip(self.toggles.to_dict().items(), other.to_dict().values(), strict=True)
        rounds = any(v != o and ROUNDING in (ROWS[n].answer_of(v), ROWS[n].answer_of(o))
                     for (n, v), o in pairs)  # fmt: skip
        return ROUNDING if rounds else "exact"

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


def spread(values: Mapping[str, str]) -> dict[str, str]:
    """Families as their members."""
    return {member: v for name, v in values.items() for member in Toggles.members(name)}


def cases() -> list[Case]:
    """Every value but the baseline's, in the order of the table."""
    made = []
    for name, row in ROWS.items():
        for value in row.values:
            if value != row.off:
                on = spread(ON_WITH.get(name, {})) | {name: str(value)}
                whole = beside(on)
                base = {n: v for n, v in whole.items() if n not in (name, row.refines)}
                made.append(Case(name, str(value), Toggles(**whole), Toggles(**beside(base))))
    return made
