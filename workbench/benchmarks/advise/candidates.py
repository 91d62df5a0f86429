"""Which values an advice asks about, and between which two sets of toggles each is read.

    alone     the background, and the background with the value
    the rest  what is best with all other switches: with the value, and without

A value may need others (`Want` and `refines` in the table of toggles). Then `alone` has the others
on both sides, and `the rest` adds them to `best` with the value. Without a value, those that need
it are off as well. A reading says all of this. Pure data: nothing is opened.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from workbench.common.errors import UsageError
from workbench.common.nearest import choices
from workbench.config import FAMILIES, Toggles
from workbench.config.presets import best_sets
from workbench.config.table import ROWS, Want, facts_of

AUTO = "auto"
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
    """Two sets of toggles that differ by a candidate, by `added` and by `gone`.

    beside: what both sides have because the candidate needs it.
    added: what comes with it on one side, because it needs that there.
    gone: toggles that are off with it on one side, since they cannot be on there.
    """

    before: Toggles
    after: Toggles
    beside: dict[str, str]
    added: dict[str, str]
    gone: tuple[str, ...]

    @property
    def words(self) -> str:
        """`plans=ours on both sides`, `together with plans=ours`, `plan_scope is off where it
        changes`; empty where the candidate stands alone."""
        parts = []
        if self.beside:
            parts.append(f"{_said(self.beside)} on both sides")
        if self.added:
            parts.append(f"together with {_said(self.added)}")
        if self.gone:
            are = "is" if len(self.gone) == 1 else "are"
            parts.append(f"{', '.join(self.gone)} {are} off where it changes")
        return "; ".join(parts)


def _said(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def candidates(background: Toggles, names: Collection[str] = ()) -> list[Candidate]:
    """Every value that the background does not have, of every toggle, or of those in `names`. A
    family is one toggle unless its members are named. Raises UsageError for an unknown name."""
    known = [n for n in (*FAMILIES, *Toggles.names()) if n in FAMILIES or not ROWS[n].family]
    for name in names:
        if "=" in name:
            toggle = name.partition("=")[0]
            raise UsageError(f"an advice asks about every value of a toggle; write {toggle}")
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
    beside = _needs(one, background, best)
    before = background.changed_by(beside)
    return Reading(before, before.switched(one.name, one.value), beside, {}, ())


def with_the_rest(one: Candidate, background: Toggles, best: Toggles) -> Reading:
    """The candidate with all that is best. Raises UsageError where it cannot be there.

    A value that `best` has is compared with the background's value there. Any other value is
    compared with `best` itself: `best` with the value, and with what the value needs. Toggles that
    need what is taken away go with it.
    """
    if best.value_of(one.name) == one.value:
        without, gone = _repaired(best, {one.name: background.value_of(one.name)})
        return Reading(without, best, {}, {}, gone)
    added = _needs(one, best, best)
    changed, gone = _repaired(best, added | {one.name: one.value})
    return Reading(best, changed, {}, added, gone)


def _needs(one: Candidate, toggles: Toggles, best: Toggles) -> dict[str, str]:
    """What a candidate needs that `toggles` do not have, as `best` or a recorded best has it, else
    the first value that serves."""
    needs: dict[str, str] = {}
    own = set(Toggles.members(one.name))
    while True:
        changes = needs | dict.fromkeys(own, one.value)
        missing = next(_unmet([*own, *needs], toggles.to_dict() | changes, auto=False), None)
        if missing is None:
            return needs
        toggle, wanted = missing
        if toggle in changes:
            raise UsageError(f"{one} needs {toggle} to have two values at once")
        known = [best.value_of(toggle), *_recorded(toggle), *wanted]
        serve = [v for v in known if v in wanted or not (wanted or v == ROWS[toggle].off)]
        if not serve:
            raise UsageError(f"{one.name} changes nothing while {toggle}={ROWS[toggle].off}")
        needs[toggle] = serve[0]


def _recorded(toggle: str) -> list[str]:
    """The values of a toggle in the recorded sets of `best`, of any device."""
    return [found.values[toggle] for _, _, found in best_sets() if toggle in found.values]


def _repaired(toggles: Toggles, changes: Mapping[str, str]) -> tuple[Toggles, tuple[str, ...]]:
    """`toggles` with changes, and without those that cannot be on beside them; also their names."""
    made = {member: value for name, value in changes.items() for member in Toggles.members(name)}
    gone = list[str]()
    while True:
        values = toggles.to_dict() | made
        others = (name for name in values if name not in made)
        broken = next((name for name in others if next(_unmet([name], values), None)), None)
        if broken is None:
            return toggles.changed_by(made), tuple(gone)
        gone.append(broken)
        made[broken] = str(ROWS[broken].off)


def _unmet(
    names: Collection[str], values: Mapping[str, str], auto: bool = True
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What toggles need and do not have: another toggle, and the values that it may have. No value:
    any but off. auto: the other's `auto` may stand for what is needed."""
    for name in names:
        row, value = ROWS[name], values[name]
        if value == row.off:
            continue
        if row.refines and values[row.refines] == ROWS[row.refines].off:
            yield row.refines, ()
        for want in facts_of(name, value, Want):
            counts = not want.beside or values[want.beside] != ROWS[want.beside].off
            if counts and values[want.toggle] not in (*want.values, *[AUTO] * auto):
                yield want.toggle, tuple(map(str, want.values))
