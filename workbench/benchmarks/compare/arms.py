"""The arms and tests of a comparison, parsed and checked before there is an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from workbench.benchmarks.compare.stats import MIN_REPETITIONS
from workbench.benchmarks.workload import Workload, check_fits, parse_tests
from workbench.common.errors import UsageError
from workbench.common.nearest import choices
from workbench.config import (
    EXACT,
    ROUNDING,
    BranchFusion,
    EngineConfig,
    GraphReuse,
    Switch,
    Toggles,
)


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
    for value in values:
        if value not in known:
            raise UsageError(f"toggle {name}={value!r} does not exist; {choices(value, known)}")
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


def arms_of(spec: str, background: Toggles) -> tuple[str, list[Arm]]:
    """The toggle that a spec compares, and the arms in order, the A/A control last.

    A spec of sets compares no single toggle: its name is empty. The first set is the baseline, and
    an arm is named by its set. Raises UsageError as `parse_toggle_spec` and `make_arms` do.
    """
    if SETS not in spec:
        toggle, values = parse_toggle_spec(spec)
        return toggle, make_arms(toggle, values, background)
    sets = [" ".join(part.split()) for part in spec.split(SETS)]
    if len(set(sets)) < len(sets):
        raise UsageError(f"{spec!r} has a set of toggles twice; the A/A control is added anyway")
    every = [switched(background, part) for part in sets]
    first = every[0]
    if same := [part for part, made in zip(sets[1:], every[1:], strict=True) if made == first]:
        raise UsageError(f"{same[0]!r} and {sets[0]!r} are the same toggles on this background")
    arms = [Arm(part, made, False, answer_between(first, made))
            for part, made in zip(sets, every, strict=True)]  # fmt: skip
    return "", [*arms, Arm(f"{sets[0]} (A/A)", first, True, EXACT)]


def switched(background: Toggles, changes: str) -> Toggles:
    """The background with the changes `NAME=VALUE NAME=VALUE...`. Raises UsageError for an unknown
    toggle or value."""
    given: dict[str, str] = {}
    for name, value in parse_changes(changes).items():
        given |= dict.fromkeys(Toggles.members(name), value)
    return dataclasses.replace(background, **given)


def parse_changes(changes: str) -> dict[str, str]:
    """`NAME=VALUE NAME=VALUE...` as value by name. Raises UsageError for an unknown name, and for a
    name without a value."""
    given: dict[str, str] = {}
    for change in changes.split():
        name, equals, value = change.partition("=")
        known = Toggles.values(name)
        if not equals:
            raise UsageError(f"toggle {name} has no value; write {name}={known[-1]}")
        given[name] = value
    return given


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
    if rounds < MIN_REPETITIONS and not (smoke and rounds > 0):
        raise UsageError(
            f"rounds={rounds} is too few to compare anything; take {MIN_REPETITIONS} or more"
        )
    return ComparisonSpec(spec, *arms_of(spec, background), parse_tests(tests))
