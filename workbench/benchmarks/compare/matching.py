"""Pairs of repetitions in two run folders that measured the same: by test, model and toggles.

Nothing is dropped: repetitions without a counterpart are listed. Older runs lack newer toggles. A
missing toggle counts as off, since an older engine did what the toggle does when it is off.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from workbench.benchmarks.compare import pace
from workbench.benchmarks.runs import results
from workbench.config import Toggles, folded, said_toggles

OURS = "workbench"  # the name of our engine


class Repeated(NamedTuple):
    """One arm's repetitions of one test.

    model: hash, name and type.
    toggles: all toggles of today, and the run's further toggles that no longer exist.
    tps: t/s, float (n,), in the order taken.
    shape: parameters of the model and its type, which files of llama-bench tell, too.
    foreign: what is known of an engine whose toggles are not; else empty.
    stddev: where tps is an average alone: its standard deviation, NaN where unknown; else None.
    """

    test: str
    arm: str
    model: tuple[str | None, str, str]
    toggles: dict[str, str]
    tps: np.ndarray
    shape: tuple[int | None, str] = (None, "")
    foreign: str = ""
    stddev: float | None = None

    @property
    def label(self) -> str:
        """The toggles that are not off: `sync=packed, fuse=on, all else off`. Empty for an engine
        without toggles."""
        return "" if self.foreign else said_toggles(self.toggles)

    @property
    def engine(self) -> str:
        """Whose engine was measured."""
        return self.foreign or OURS

    @property
    def n(self) -> int:
        """The number of repetitions; 0 for an average, whose file does not tell it."""
        return len(self.tps) if self.stddev is None else 0


class Matched(NamedTuple):
    """A pair, and the toggles in which its sides differ, as (name, before, after)."""

    before: Repeated
    after: Repeated
    differ: list[tuple[str, str, str]]


class Matching(NamedTuple):
    """The pairs, in the order of the first folder, and the repetitions without a counterpart."""

    matched: list[Matched]
    only_before: list[Repeated]
    only_after: list[Repeated]


def repeated(run: results.Run) -> Iterator[Repeated]:
    """Every test and arm of a run folder, except the A/A control."""
    model = run.run["model"]
    identity = (model.get("hash"), str(model.get("name")), str(model.get("quant")))
    shape = (model.get("n_params"), identity[2])
    toggles = {arm["name"]: arm["toggles"] for arm in run.run["arms"]}
    rates = results.rates(pace.counted(run.run, run.samples))
    rates = rates[~rates["is_control"]]
    for (test, arm), rows in rates.groupby(["test", "arm"], sort=False):
        own = Toggles().to_dict() | {k: str(v) for k, v in toggles.get(str(arm), {}).items()}
        yield Repeated(str(test), str(arm), identity, own, rows["tps"].to_numpy(float), shape)


def match(before: Sequence[Repeated], after: Sequence[Repeated]) -> Matching:
    """Pairs of the same test, model and toggles. A model is the same by its hash, else by name and
    type, else by its number of parameters and type.

    Then arms of one test and model are a pair if they have the same name, or if they are the only
    arm of their side: two runs of other toggles. Such a pair differs in toggles only, and names
    them. An arm that is left over among several is no counterpart of another.
    """
    found: dict[int, int] = {}
    for rule in _RULES:
        every = _left(before, after, {}, rule)
        for key, (ours, theirs) in _left(before, after, found, rule).items():
            several = max(map(len, every[key] if rule in _ALONE else (ours, theirs))) > 1
            if None not in key and (rule in _EXACT or (ours and theirs and not several)):
                pairs = zip(ours, theirs, strict=False)
                found |= {i: j for i, j in pairs if _may_be_one(before[i], after[j], rule)}
    taken = set(found.values())
    return Matching(
        [Matched(before[i], after[j], _differ(before[i], after[j]))
         for i, j in sorted(found.items())],
        [side for i, side in enumerate(before) if i not in found],
        [side for j, side in enumerate(after) if j not in taken],
    )  # fmt: skip


def _frozen(repeated: Repeated) -> frozenset[tuple[str, str]] | None:
    return None if repeated.foreign else frozenset(repeated.toggles.items())


# the strictest rule first; a key with None (an unknown hash) matches nothing
_Rule = Callable[[Repeated], tuple[Hashable, ...]]
_MODELS: list[_Rule] = [lambda r: (r.model[0],), lambda r: r.model[1:], lambda r: r.shape]


def _with(model: _Rule, more: _Rule) -> _Rule:
    return lambda r: (r.test, *model(r), *more(r))


_EXACT = [_with(model, lambda r: (_frozen(r),)) for model in _MODELS]
_BY_ARM = [_with(model, lambda r: (r.arm,)) for model in _MODELS]
_ALONE = [_with(model, lambda r: ()) for model in _MODELS]
_RULES = [*_EXACT, *_BY_ARM, *_ALONE]
_BY_SHAPE = [_EXACT[-1], _BY_ARM[-1], _ALONE[-1]]


def _may_be_one(before: Repeated, after: Repeated, rule: _Rule) -> bool:
    """Models are told by their shape only where a file does not tell their hash: other models may
    have as many parameters."""
    return rule not in _BY_SHAPE or None in (before.model[0], after.model[0])


def _left(
    before: Sequence[Repeated],
    after: Sequence[Repeated],
    found: dict[int, int],
    rule: _Rule,
) -> dict[Any, tuple[list[int], list[int]]]:
    """The indices without a counterpart yet, on both sides, by the key that the rule gives."""
    groups: dict[Any, tuple[list[int], list[int]]] = {}
    taken = set(found.values())
    for side, (sides, done) in enumerate(((before, set(found)), (after, taken))):
        for i, item in enumerate(sides):
            if i not in done:
                groups.setdefault(rule(item), ([], []))[side].append(i)
    return groups


def _differ(before: Repeated, after: Repeated) -> list[tuple[str, str, str]]:
    """The differing toggles, by name. A family is named once where each side has one value for
    all its members. Engines without our toggles differ in none."""
    if before.foreign or after.foreign:
        return []
    old, new = folded(before.toggles), folded(after.toggles)
    if old.keys() != new.keys():
        old, new = before.toggles, after.toggles
    names = dict.fromkeys([*old, *new])
    pairs = ((n, str(old.get(n, "unknown")), str(new.get(n, "unknown"))) for n in names)
    return [(name, a, b) for name, a, b in pairs if a != b]
