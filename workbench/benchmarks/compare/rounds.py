"""The loop of all experiments in rounds: every arm once a round, in an order that favours no arm.

    round 0   A B A'        Every arm is measured once per round. Each second round runs backwards
    round 1   A' B A        (ABBA), and each pair of rounds starts one arm further on. So no arm
    round 2   B A' A        always follows the same arm. A' is the A/A control: the baseline again,
    round 3   A A' B        on an engine of its own.

`interleave` is this loop. `Trials` measures workloads on engines with it: first the warm-up, then a
fixed number of rounds, or rounds until the interval is narrow enough (`until`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from workbench.benchmarks import workload as w
from workbench.benchmarks.compare import pace
from workbench.benchmarks.compare import until as stopping
from workbench.benchmarks.compare.until import Until
from workbench.benchmarks.runs import results
from workbench.common.collector import nothing_collected
from workbench.common.progress import HIDDEN, Bar, bar

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

Found = TypeVar("Found")


def order_of(round_: int, n_arms: int) -> list[int]:
    """The order in which round number `round_` runs the arms: rotated, and backwards if odd."""
    first = (round_ // 2) % n_arms
    order = [(first + i) % n_arms for i in range(n_arms)]
    return order[::-1] if round_ % 2 else order


def interleave(
    rounds: Iterable[int],
    n_arms: int,
    measure: Callable[[int, int], Found | None],
    whole: Callable[[int, dict[int, Found]], None] = lambda round_, found: None,
) -> None:
    """Measures every arm once in every round, in the order of `order_of`. Python's collector is off
    while an arm is measured.

    measure(round, arm): one repetition; returns None where it was skipped.
    whole(round, found): called after each round, with the results by arm.
    """
    for round_ in rounds:
        found: dict[int, Found] = {}
        for arm in order_of(round_, n_arms):
            with nothing_collected():
                one = measure(round_, arm)
            if one is not None:
                found[arm] = one
        whole(round_, found)


class Repetition(NamedTuple):
    """One arm's part in one round of a test. n_rounds: the expected number of rounds."""

    workload: w.Workload
    round_: int
    n_rounds: int
    arm: int


class Trials:
    """Measures workloads on engines, one engine for each arm; the first is the baseline.

    rates: t/s by test, round and arm. Repetitions with a rate (of a resumed run) are not measured
        again.
    warm_ups, ended: by test, as in run.json (`workload.WarmUp`, `until.RepeatEnd`).
    host_us: of the host's loop in each whole round, by test, where it tells (`pace.py`).
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        workloads: Sequence[w.Workload],
        rounds: int,
        seed: int,
        until: Until | None = None,
        once: bool = False,
    ):
        """rounds: of each test; with `until` the minimum. once: the warm-up is a single round."""
        self.engines, self.workloads = engines, workloads
        self.rounds, self.seed, self.until, self.once = rounds, seed, until, once
        self.rates: dict[tuple[str, int, int], float] = {}
        self.warm_ups: dict[str, dict[str, Any]] = {}
        self.ended: dict[str, dict[str, Any]] = {}
        self.host_us: dict[str, dict[int, float]] = {}
        self._pace_before = math.inf  # the fastest loop of a resumed run
        self._rows: dict[str, list[list[float]]] = {}  # `rates` of whole rounds, by test
        self._spent_s = 0.0  # of `until.at_most_s`
        self._each_s = 0.0  # the time of a repetition in the warm-up

    def take_over(self, earlier: results.Run, arms: Sequence[str]) -> None:
        """Takes the rates of a resumed run. arms: the arm's name of each engine."""
        number, found = {name: i for i, name in enumerate(arms)}, earlier.run["result"]
        cells = results.rates(earlier.samples)[["arm", "test", "repetition", "tps"]]
        self.rates = {
            (test, round_, number[arm]): tps
            for arm, test, round_, tps in cells.itertuples(index=False)
        }
        self.warm_ups = dict(found["warm_up"])
        self._pace_before, rounds = pace.Noted.of(earlier.run)
        self.host_us = {test: dict(us) for test, us in rounds.items()}
        self.ended = dict((found.get("until") or {}).get("tests", {}))

    def measure(
        self,
        workload: w.Workload,
        taken: Callable[[Repetition, w.Sample], None] = lambda one, sample: None,
        begins: Callable[[Repetition], None] = lambda one: None,
        whole: Callable[[int, dict[int, w.Sample]], None] = lambda round_, found: None,
    ) -> None:
        """Measures the missing rounds of one workload.

        begins(one): called before a repetition. taken(one, sample): called after it.
        whole(round, samples): called after each round, with the samples by arm.
        All arms of a round are fed the same tokens.
        """
        test, n_arms = workload.name, len(self.engines)
        told = n_arms > 1 and pace.tells(self.engines[0])  # one arm alone has all its rounds
        us: dict[int, float] = {}  # of a round, by arm
        n_vocab, bos = self.engines[0].model.n_vocab, w.bos_token(self.engines[0])
        with ExitStack() as stack:
            left, n_rounds, tokens = HIDDEN, 0, w.Tokens([], [], [])

            def rounds() -> Iterator[int]:
                nonlocal left, n_rounds, tokens
                for round_, n_rounds in self._rounds(workload):
                    n_left = (n_rounds - round_) * n_arms
                    if left is HIDDEN:
                        left = stack.enter_context(self._bar(workload, n_left))
                    left.total = left.done + n_left * workload.n_cells
                    left.detail = stopping.reached(self.ended.get(test))
                    tokens = w.draw_tokens(workload, n_vocab, self.seed, round_, bos)
                    yield round_

            def measure(round_: int, arm: int) -> w.Sample | None:
                if (test, round_, arm) in self.rates:
                    return None
                one = Repetition(workload, round_, n_rounds, arm)
                begins(one)
                sample = w.take_sample(self.engines[arm], workload, tokens, left)
                self.rates[test, round_, arm] = sample.tokens_per_second
                if told:
                    us[arm] = pace.HOST.loop_us()
                taken(one, sample)
                return sample

            def ended(round_: int, found: dict[int, w.Sample]) -> None:
                if us:
                    self.host_us.setdefault(test, {})[round_] = max(us.values())
                    us.clear()
                whole(round_, found)

            interleave(rounds(), n_arms, measure, ended)

    def finished(self, test: str) -> list[list[float]]:
        """t/s of the rounds that every arm has run, (rounds, arms)."""
        rows, n = self._rows.setdefault(test, []), len(self.engines)
        while all((test, len(rows), arm) in self.rates for arm in range(n)):
            rows.append([self.rates[test, len(rows), arm] for arm in range(n)])
        return rows

    @property
    def pace(self) -> pace.Noted:
        """What is noted of the host so far."""
        return pace.Noted(min(self._pace_before, pace.HOST.least_us), self.host_us)

    def counted(self, test: str) -> list[list[float]]:
        """Those of them that count: the host was not slow."""
        slow = self.pace.uncounted(test)
        return [row for n, row in enumerate(self.finished(test)) if n not in slow]

    def _bar(self, workload: w.Workload, n_left: int) -> AbstractContextManager[Bar]:
        """Labelled `tg128`, or `tg128 (test 2 of 3)` where there are several tests."""
        number, n = self.workloads.index(workload) + 1, len(self.workloads)
        label = f"{workload} (test {number} of {n})" if n > 1 else workload.name
        return bar(label, n_left * workload.n_cells, "tokens", n_left * self._each_s)

    def _rounds(self, workload: w.Workload) -> Iterator[tuple[int, int]]:
        """The rounds to run, each with the expected number of rounds. The engines are warmed up
        before the first round.

        The tests that are left share the rest of `at_most_s`. A resumed run has all of this time
        again.
        """
        test, n_arms = workload.name, len(self.engines)

        def warm() -> None:
            w.make_ready(self.engines, self.workloads)  # of all tests together, at the first
            begun = time.monotonic()
            bos = w.bos_token(self.engines[0])
            warm = w.warm_up(self.engines, workload, self.seed, bos, once=self.once)
            self.warm_ups[test] = warm._asdict()
            self._each_s = (time.monotonic() - begun) / warm.rounds / n_arms

        if self.until is None:
            missing = [
                r for r in range(self.rounds)
                if any((test, r, arm) not in self.rates for arm in range(n_arms))
            ]  # fmt: skip
            if missing:
                warm()
            yield from ((r, self.rounds) for r in missing)
            return
        before = self.ended.get(test, {}).get("seconds", 0.0)
        tests_left = len(self.workloads) - self.workloads.index(workload)
        yield from stopping.rounds_of(
            stopping.share_of(self.until, self._spent_s, tests_left),
            lambda: self.finished(test),
            lambda ended: self.ended.update({test: ended._asdict()}),
            counted=lambda: self.counted(test),
            prepare=warm,
            seed=self.seed,
            least=self.rounds,
            seconds_before=before,
        )
        self._spent_s += self.ended[test]["seconds"] - before
