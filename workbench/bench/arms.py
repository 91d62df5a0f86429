"""What a comparison will measure: its arms and its tests, before there is an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from workbench.bench.stats import MIN_REPETITIONS
from workbench.bench.workload import Workload, check_fits, parse_tests
from workbench.config import EXACT, Toggles
from workbench.errors import UsageError

if TYPE_CHECKING:
    from workbench.engine.engine import Engine
    from workbench.engine.loaded import Loaded


class Arm(NamedTuple):
    """One side of the comparison. `answer` is the class its logits are held to."""

    name: str
    toggles: Toggles
    is_control: bool
    answer: str


def parse_toggle_spec(spec: str) -> tuple[str, list[str]]:
    """`sync=per_copy,copy_boundary` -> ("sync", ["per_copy", "copy_boundary"]); the first is the
    baseline. Raises UsageError for a toggle or a value that does not exist, or one given twice."""
    name, equals, rest = spec.partition("=")
    name, values = name.strip(), [v.strip() for v in rest.split(",") if v.strip()]
    known = Toggles.values(name)
    if not equals or not values:
        raise UsageError(f"toggle {spec!r} has no values; write {name}={known[0]},{known[-1]}")
    for value in values:
        if value not in known:
            raise UsageError(
                f"toggle {name}={value!r} does not exist; choose one of {', '.join(known)}"
            )
    if len(set(values)) < len(values):
        raise UsageError(f"toggle {spec!r} names a value twice; the A/A control is added anyway")
    return name, values


def make_arms(toggle: str, values: Sequence[str], background: Toggles) -> list[Arm]:
    """The arms in order: baseline (the first value), the toggled ones, the A/A control.

    A single value is compared with the background's own. Raises UsageError where that leaves
    nothing to compare, and for toggles that clash.
    """
    own = background.value_of(toggle)
    values = list(values) if len(values) > 1 else [own, *values]
    if len(set(values)) < len(values):
        raise UsageError(
            f"toggle {toggle}={values[0]} is what the background has; name another value"
        )
    kind = Toggles.answer_class(toggle)
    arms = [Arm(value, background.switched(toggle, value), False, kind) for value in values]
    return [*arms, Arm(f"{values[0]} (A/A)", arms[0].toggles, True, EXACT)]


class ComparisonSpec(NamedTuple):
    """What a comparison will measure, before there is an engine to measure it on."""

    spec: str
    toggle: str
    arms: list[Arm]
    workloads: list[Workload]

    def check(self, opened: Engine | Loaded) -> None:
        """Raises UsageError for a test longer than the context of `opened`, an engine or Loaded."""
        for workload in self.workloads:
            check_fits(opened, workload)


def comparison_spec(
    toggle: str,
    values: Sequence[str] | None,
    tests: str | Workload | Sequence[str | Workload],
    rounds: int,
    background: Toggles,
    smoke: bool = False,
) -> ComparisonSpec:
    """The arms and tests that these arguments of `ab` mean. Raises UsageError as `ab` does."""
    spec = toggle if values is None else f"{toggle}={','.join(values)}"
    if rounds < MIN_REPETITIONS and not (smoke and rounds > 0):
        raise UsageError(
            f"rounds={rounds} is too few to compare anything; take {MIN_REPETITIONS} or more"
        )
    name, chosen = parse_toggle_spec(spec)
    return ComparisonSpec(spec, name, make_arms(name, chosen, background), parse_tests(tests))
