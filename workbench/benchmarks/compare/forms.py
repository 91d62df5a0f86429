"""The forms in which `ab` may be asked: a toggle and its values, sets of toggles, several toggles.

Each form becomes one or more `Asked`: a spec as the command takes it (`sync=per_copy,packed`, or
sets with `|`), and the background that its arms share. So there is one way to measure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.benchmarks.compare.arms import NAMED, SETS
from workbench.benchmarks.workload import parse_tests
from workbench.common.errors import UsageError, WorkbenchError
from workbench.config import BASELINE, TogglePreset, Toggles, asked_toggles
from workbench.config.toggles import as_value, names_that_differ

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

ToggleSet = Toggles | TogglePreset | Mapping[str, Any]  # a mapping changes the background
# one comparison: a toggle, or a spec; a set, with the other set as `values`; or a list of sets
One = str | ToggleSet | Sequence[ToggleSet]
FEW = 2  # toggles of a set; one of more is named by its preset
FORMS = (
    "'sync=per_copy,packed', 'plans=off | plans=ours pdl=on', ('sync', ['per_copy', 'packed']), "
    "two Toggles, a list of Toggles, or a list of names as ['sync', 'fuse']"
)


class Asked(NamedTuple):
    """One comparison. spec: as the command takes it."""

    spec: str
    background: Toggles


def background_of(engine: Engine, background: Any) -> Toggles:
    """The background that `ab` was given: Toggles, or as `Engine.variant` takes them; by default
    the engine's own."""
    if background is None:
        return engine.toggles
    return background if isinstance(background, Toggles) else engine.resolve(background)


def named_twice(toggle: str, changes: Collection[str]) -> str:
    """The toggle that a spec compares, where `changes` of the background give it, too; otherwise
    empty. Members may have values of their own beside a family: `fuse=on` and `fuse_qkv=off,on`."""
    name = toggle.partition("=")[0].strip()
    if SETS in toggle or not {*changes}.issuperset(members := Toggles.members(name)):
        return ""
    return "" if members == [name] and Toggles.row(name).family else name


def names_in(toggle: object) -> list[str]:
    """The toggles that are to be compared each by itself; empty for any other form."""
    names = (
        [one for one in toggle if isinstance(one, str)] if isinstance(toggle, list | tuple) else []
    )
    return names if isinstance(toggle, list | tuple) and len(names) == len(toggle) else []


def one_comparison(engine: Engine, toggle: Any, values: Any, background: Any) -> Asked:
    """The comparison that is asked for by `toggle` and `values` of `ab`. Raises UsageError for
    anything that is no form of a comparison."""
    if isinstance(toggle, str):
        if _is_set(values):
            raise UsageError(f"{toggle!r} beside {values!r} is no comparison; give {FORMS}")
        if values is not None and "=" in toggle:
            raise UsageError(
                f"{toggle!r} has its values already, so {values!r} cannot be them; a test is given "
                f"as tests={as_tests(values)}"
            )
        beneath = background_of(engine, background)
        spec = toggle if values is None else _of_values(toggle, values)
        _check_background(spec, background)
        return Asked(spec, beneath)
    sets = [toggle, values] if _is_set(toggle) and _is_set(values) else toggle
    if not isinstance(sets, list | tuple) or not sets or not all(map(_is_set, sets)):
        raise UsageError(f"{toggle!r} is no comparison; give {FORMS}")
    if values is not None and sets is toggle:
        raise UsageError("sets of toggles have no values; leave the second argument out")
    if background is not None and not all(isinstance(one, Mapping) for one in sets):
        raise UsageError(
            "Toggles and presets say what every toggle is, so there is no background; leave it out "
            "or give changes of it, as {'sync': 'packed'}"
        )
    return _of_sets([_resolved(engine, one, background) for one in sets], [*map(_name_of, sets)])


def as_tests(values: Any) -> list[str]:
    """The tests that were given in place of values; where they are none, an example."""
    try:
        return [test.name for test in parse_tests(values)]
    except (UsageError, TypeError):  # a number is not iterable
        return ["tg32"]


def comparison_of(engine: Engine, name: str, background: Any) -> tuple[Asked | None, list[str]]:
    """The comparison of one toggle of a list of names: the background's value first, then every
    other value that the device can honour beside the background. A spec with values stays as it is.
    Also a line for each value that was left out. None: no value is left."""
    beneath = background_of(engine, background)
    if "=" in name:
        _check_background(name, background)
        return Asked(name, beneath), []
    values, own = Toggles.values(name), beneath.value_of(name)
    taken, left = [own] if own in values else [], list[str]()
    for value in values:
        try:
            engine.resolve(beneath.switched(name, value))
        except WorkbenchError as refusal:
            left.append(f"{name}={value} is left out: {refusal}")
        else:
            taken += [value] if value not in taken else []
    return (Asked(_of_values(name, taken), beneath) if len(taken) > 1 else None), left


def _check_background(spec: str, background: Any) -> None:
    """Raises UsageError where the background gives what several values are compared of. A single
    value is compared with the background's, which may give it then."""
    asked = asked_toggles(background, TogglePreset(BASELINE))
    changes = asked.changes if isinstance(asked, TogglePreset) else {}
    if "," in spec and (name := named_twice(spec, changes)):
        raise UsageError(
            f"{name} is what is compared; leave it out of background, and put the baseline first "
            f"in {name}=..."
        )


def _is_set(one: object) -> bool:
    return isinstance(one, Toggles | TogglePreset | Mapping)


def _resolved(engine: Engine, one: Any, background: Any) -> Toggles:
    if isinstance(one, Mapping):
        changed = asked_toggles(one, background_of(engine, background))
        assert isinstance(changed, Toggles)
        return changed
    return one if isinstance(one, Toggles) else engine.resolve(one)


def _of_values(toggle: str, values: Any) -> str:
    """`sync=per_copy,packed`. Numbers and booleans become the toggle's words."""
    every = [values] if isinstance(values, str | int) else list(values)
    known = Toggles.values(toggle)
    return f"{toggle}={','.join(as_value(toggle, value, known) for value in every)}"


def _name_of(one: ToggleSet) -> str:
    """The short name of a set: that of its preset, or empty."""
    if isinstance(one, TogglePreset):
        return str(one)
    return BASELINE if one == Toggles() else ""


def _of_sets(sets: Sequence[Toggles], known: Sequence[str]) -> Asked:
    """The spec of sets that say everything: their differences, on the first of them. Where one
    toggle alone differs, the comparison is that toggle's. known: the sets' short names, which stand
    for sets of many toggles."""
    names = names_that_differ(*sets)
    if len(sets) < 2 or len({*sets}) < len(sets):
        raise UsageError(
            f"{len(sets)} sets of toggles, of which {len({*sets})} differ, are no comparison; give "
            "two or more that differ (the A/A control is added anyway)"
        )
    if len(names) == 1:
        (name,) = names
        return Asked(_of_values(name, [one.value_of(name) for one in sets]), sets[0])
    parts = [" ".join(f"{name}={one.value_of(name)}" for name in names) for one in sets]
    if len(names) > FEW:
        parts = [f"{own}{NAMED} {part}" if own else part
                 for own, part in zip(known, parts, strict=True)]  # fmt: skip
    return Asked(f" {SETS} ".join(parts), sets[0])
