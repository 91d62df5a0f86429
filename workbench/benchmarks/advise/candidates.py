"""Which values an advice asks about, and between which two sets of toggles each is read.

    alone     the background, and the background with the value
    the rest  what is best with all other switches: with the value, and without

A value may need others (`Want` and `refines` in the table of toggles). Then `alone` has the others
on both sides, and says so. Without a value, those that need it are off as well, and `the rest` says
so. Pure data: nothing is opened.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from workbench.common.errors import UsageError
from workbench.common.nearest import choices
from workbench.config import FAMILIES, Toggles
from workbench.config.table import ROWS, Want, facts_of

AUTO = "auto"  # of another toggle: it may stand for what is wanted
# toggles that no advice asks about unless they are named, and why
LEFT_ALONE = {
    "redo": "a step only costs more with it: it shows what reuse saves",
    "validate": "a check costs time; it makes nothing faster",
    "lifetimes": "other values than the baseline's are wrong with concurrent streams",
    "activations": "float is a yardstick for rounding",
}


class Candidate(NamedTuple):
    """A value of a toggle, or of a family."""

    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


class Reading(NamedTuple):
    """Two sets of toggles that differ by a candidate, and by `gone`.

    beside: what both sides have because the candidate needs it.
    gone: toggles that are off with it on one side, since they cannot be on there.
    """

    before: Toggles
    after: Toggles
    beside: dict[str, str]
    gone: tuple[str, ...]

    @property
    def words(self) -> str:
        """`with plans=ours`, `without plan_scope, too`; empty where the candidate stands alone."""
        parts = []
        if self.beside:
            parts.append("with " + " ".join(f"{k}={v}" for k, v in self.beside.items()))
        if self.gone:
            parts.append(f"without {', '.join(self.gone)}, too")
        return "; ".join(parts)


def candidates(background: Toggles, names: Collection[str] = ()) -> list[Candidate]:
    """Every value that the background does not have, of every toggle, or of those in `names`. A
    family is one toggle unless its members are named. Raises UsageError for an unknown name."""
    known = [n for n in (*FAMILIES, *Toggles.names()) if n in FAMILIES or not ROWS[n].family]
    for name in names:
        if name not in (*FAMILIES, *Toggles.names()):
            raise UsageError(f"toggle {name!r} does not exist; {choices(name, known)}")
    order = [n for n in Toggles.names() if not ROWS[n].family]
    order[order.index("pdl") : order.index("pdl")] = FAMILIES
    asked = names or [name for name in order if name not in LEFT_ALONE]
    return [
        Candidate(name, value)
        for name in asked
        for value in Toggles.values(name)
        if value != background.value_of(name)
    ]


def alone(one: Candidate, background: Toggles, best: Toggles) -> Reading:
    """The candidate on the background. Raises UsageError where it cannot be there."""
    beside: dict[str, str] = {}
    own = set(Toggles.members(one.name))
    while True:
        values = background.changed_by(beside | {one.name: one.value}).to_dict()
        missing = next(_unmet([*own, *beside], values), None)
        if missing is None:
            before = background.changed_by(beside)
            return Reading(before, before.switched(one.name, one.value), beside, ())
        toggle, wanted = missing
        have = best.value_of(toggle)
        if not wanted and have == ROWS[toggle].off:
            raise UsageError(f"{one.name} changes nothing while {toggle}={have}")
        if toggle in own or toggle in beside:
            raise UsageError(f"{one} needs {toggle} to have two values at once")
        beside[toggle] = have if not wanted or have in wanted else wanted[0]


def with_the_rest(one: Candidate, background: Toggles, best: Toggles) -> Reading:
    """The candidate with all that is best. Raises UsageError where it cannot be there.

    A value that `best` has is compared with the background's value there; any other value with the
    value that `best` has. Toggles that need what is taken away go with it.
    """
    if best.value_of(one.name) == one.value:
        without, gone = _repaired(best, one.name, background.value_of(one.name), background)
        return Reading(without, best, {}, gone)
    changed, gone = _repaired(best, one.name, one.value, background)
    return Reading(best, changed, {}, gone)


def _repaired(
    toggles: Toggles, name: str, value: str, background: Toggles
) -> tuple[Toggles, tuple[str, ...]]:
    """`toggles` with a value, and without those that cannot be on beside it; also their names."""
    own = set(Toggles.members(name))
    changes, gone = dict.fromkeys(own, value), list[str]()
    while True:
        values = toggles.to_dict() | changes
        broken = next(
            (n for n in values if n not in changes and next(_unmet([n], values), None)), None
        )
        if broken is None:
            break
        gone.append(broken)
        changes[broken] = str(ROWS[broken].off)
    if missing := next(_unmet(own, toggles.to_dict() | changes), None):
        other, wanted = missing
        has = f"{other}={toggles.value_of(other)}"
        raise UsageError(
            f"{name}={value} needs {other}={wanted[0]}, not {has}"
            if wanted
            else f"{name} changes nothing while {has}"
        )
    return toggles.changed_by(changes), tuple(gone)


def _unmet(
    names: Collection[str], values: Mapping[str, str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What toggles need and do not have: another toggle, and the values that it may have. No value:
    any but off."""
    for name in names:
        row, value = ROWS[name], values[name]
        if value == row.off:
            continue
        if row.refines and values[row.refines] == ROWS[row.refines].off:
            yield row.refines, ()
        for want in facts_of(name, value, Want):
            counts = not want.beside or values[want.beside] != ROWS[want.beside].off
            if counts and values[want.toggle] not in (*want.values, AUTO):
                yield want.toggle, tuple(map(str, want.values))
