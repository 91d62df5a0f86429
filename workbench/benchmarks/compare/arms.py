"""The arms and tests of a comparison, parsed and checked before there is an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from workbench.benchmarks.compare.stats import MIN_REPETITIONS
from workbench.benchmarks.workload import Workload, check_fits, parse_tests
from workbench.common.errors import UsageError
from workbench.common.whole import check_whole
from workbench.config import (
    EXACT,
    ROUNDING,
    BranchFusion,
    EngineConfig,
    GraphReuse,
    Switch,
    Toggles,
    parse_changes,
)
from workbench.config.table import idle
from workbench.config.toggles import as_value


class Arm(NamedTuple):
    """One side of the comparison. answer: the class that its logits must satisfy."""

    name: str
    toggles: Toggles
    is_control: bool
    answer: str


def parse_toggle_spec(spec: str) -> tuple[str, list[str]]:
    """`sync=per_copy,copy_boundary` -> ("sync", ["per_copy", "copy_boundary"]); the first is the
    baseline. Raises UsageError for an unknown toggle or value, and for a value given twice."""
    name, equals, rest = spec.partition("=")
    name, values = name.strip(), [v.strip() for v in rest.split(",") if v.strip()]
    known = Toggles.values(name)
    if not equals or not values:
        raise UsageError(f"toggle {spec!r} has no values; write {name}={known[0]},{known[-1]}")
    values = [as_value(name, value, known) for value in values]
    if len(set(values)) < len(values):
        raise UsageError(f"toggle {spec!r} names a value twice; the A/A control is added anyway")
    return name, values


def make_arms(toggle: str, values: Sequence[str], background: Toggles) -> list[Arm]:
    """The arms in order: baseline (the first value), the toggled ones, the A/A control.

    A single value is compared with the background's value. Raises UsageError where both are the
    same, and for toggles that clash.
    """
    own = background.value_of(toggle)
    values = list(values) if len(values) > 1 else [own, *values]
    if len(set(values)) < len(values):
        raise UsageError(
            f"toggle {toggle}={values[0]} is what the background has; name another value"
        )
    sides = [background.switched(toggle, value) for value in values]
    kinds = [Toggles.answer_class(toggle), *(answer_between(sides[0], s) for s in sides[1:])]
    arms = [Arm(*arm) for arm in zip(values, sides, [False] * len(sides), kinds, strict=True)]
    return [*arms, Arm(f"{values[0]} (A/A)", arms[0].toggles, True, EXACT)]


SETS = "|"  # separates sets of toggles: `plans=off | plans=ours plan_scope=step`
NAMED = ":"  # ends the name that a set may have: `baseline: plans=off | best: plans=ours pdl=on`


def arms_of(spec: str, background: Toggles) -> tuple[str, list[Arm]]:
    """The toggle that a spec compares, and the arms in order, the A/A control last.

    A spec of sets compares no single toggle: its name is empty. The first set is the baseline. An
    arm has the name before its set, or is named by the set itself. Raises UsageError as
    `parse_toggle_spec` and `make_arms` do.
    """
    if SETS not in spec:
        toggle, values = parse_toggle_spec(spec)
        return toggle, make_arms(toggle, values, background)
    parts = [" ".join(part.split()) for part in spec.split(SETS)]
    if "" in parts:
        raise UsageError(
            f"{spec!r} has an empty set of toggles; name the background itself, as 'plain: | ...'"
        )
    sets = [part.partition(NAMED)[2] if NAMED in part else part for part in parts]
    names = [part.partition(NAMED)[0] for part in parts]
    if len(set(sets)) < len(sets) or len(set(names)) < len(names):
        raise UsageError(f"{spec!r} has a set of toggles twice; the A/A control is added anyway")
    every = [switched(background, part) for part in sets]
    first = every[0]
    if same := [name for name, made in zip(names[1:], every[1:], strict=True) if made == first]:
        raise UsageError(f"{same[0]!r} and {names[0]!r} are the same toggles on this background")
    arms = [Arm(name, made, False, answer_between(first, made))
            for name, made in zip(names, every, strict=True)]  # fmt: skip
    return "", [*arms, Arm(f"{names[0]} (A/A)", first, True, EXACT)]


def switched(background: Toggles, changes: str) -> Toggles:
    """The background with the changes `NAME=VALUE NAME=VALUE...`. Raises UsageError for an unknown
    toggle or value."""
    return background.changed_by(parse_changes(changes))


def answer_between(before: Toggles, after: Toggles) -> str:
    """The class for the logits of `after`: `rounding` where a toggle of that class differs, or
    where only one side can have a fused launch. Otherwise `exact`."""
    was, now = before.to_dict(), after.to_dict()
    rounds = any(was[name] != now[name] and Toggles.answer_class(name) == ROUNDING for name in was)
    return ROUNDING if rounds or _joins(was) != _joins(now) or _splits(was, now) else EXACT


# A cache store by copies is never joined with RoPE. On CUDA the joined launch sums the squares of a
# head (of qwen3, up to 8 tokens) in another order than a separate norm.
JOINED, NEVER_JOINED = "fuse_rope_store", (GraphReuse.PATCH_POINTERS, GraphReuse.POINTER_TABLE)


def _joins(toggles: Mapping[str, str]) -> bool:
    """Whether RoPE and the cache store are one launch, on a backend that has such a launch."""
    return toggles[JOINED] == Switch.ON and toggles["graph_reuse"] not in NEVER_JOINED


def _splits(was: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether costs may keep fused nodes inside branches on only one side."""
    fused = any(was[name] == Switch.ON for name in Toggles.members("fuse"))
    auto = was["branch_fusion"] == BranchFusion.AUTO
    return fused and auto and any(was[name] != now[name] for name in ("streams", "fork"))


class IdleToggles(UsageError):
    """A comparison whose arms do the same work (`idle.py`)."""


def idle_refusal(toggle: str, arms: Sequence[Arm], why: Sequence[str]) -> str:
    """The line on arms that do the baseline's work, each for a reason. arms: the baseline first.
    toggle: empty where sets are compared."""
    baseline, *others = (f"{toggle}={arm.name}" if toggle else arm.name for arm in arms)
    does = "does" if len(others) == 1 else "do"
    return (
        f"{' and '.join(others)} {does} what {baseline} does, so there is nothing to measure: "
        f"{'; '.join(dict.fromkeys(why))}"
    )


def check_acting(toggle: str, arms: Sequence[Arm]) -> None:
    """Raises IdleToggles where the table of toggles says that no arm differs from the baseline in
    any test. No engine is needed for that."""
    own = [arm for arm in arms if not arm.is_control]
    was = own[0].toggles.to_dict()
    why = [idle(was, arm.toggles.to_dict()) for arm in own[1:]]
    if all(why):
        raise IdleToggles(idle_refusal(toggle, own, why))


class ComparisonSpec(NamedTuple):
    """The arms and tests of a comparison. toggle: empty where sets of toggles are compared."""

    spec: str
    toggle: str
    arms: list[Arm]
    workloads: list[Workload]

    def check_arms(self, config: EngineConfig) -> None:
        """Raises UsageError for a test that does not fit an arm's engine of this `config`."""
        for workload, arm in product(self.workloads, self.arms):
            check_fits(arm.toggles, config, workload)


def comparison_spec(
    toggle: str,
    values: Sequence[str] | None,
    tests: str | Workload | Sequence[str | Workload],
    rounds: int,
    background: Toggles,
    smoke: bool = False,
) -> ComparisonSpec:
    """The comparison for these arguments of `ab`. Raises UsageError as `ab` does."""
    spec = toggle if values is None else f"{toggle}={','.join(values)}"
    check_whole(rounds=rounds)
    if rounds < MIN_REPETITIONS and not (smoke and rounds > 0):
        raise UsageError(
            f"rounds={rounds} is too few to compare anything; take {MIN_REPETITIONS} or more"
        )
    name, arms = arms_of(spec, background)
    check_acting(name, arms)
    return ComparisonSpec(spec, name, arms, parse_tests(tests))
