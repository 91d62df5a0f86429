"""Comparisons of the campaign: `wb.ab` of a row, and runs whose repetitions are not `wb.ab`'s.

`Turns` is for the second kind: what a repetition does, its kind says; arms, rounds, order, run
folder and answers are as in `wb.ab`, and `AB` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import workbench as wb
from data.measure.matrix import Row
from data.measure.session import Session, toggles_of
from workbench.bench import answers, provenance
from workbench.bench.ab import describe
from workbench.bench.arms import Arm, arms_of
from workbench.bench.comparison import AB
from workbench.bench.draft import Draft, kept, new_arm, new_run
from workbench.bench.rounds import interleave
from workbench.bench.workload import Sample, Workload

Samples = Mapping[str, Sample]  # of one repetition, by test


def compared(session: Session, engine: wb.Engine, row: Row) -> AB:
    """The comparison of a row, in its folder. Raises KeyboardInterrupt where it was interrupted."""
    folder = session.emptied(row)
    found = wb.ab(
        engine, row.compared, tests="tg8" if session.quick else row.test,
        rounds=1 if session.quick else row.rounds,
        background=toggles_of(row.toggles, engine), out=folder, name=folder.name,
        smoke=session.quick,
    )  # fmt: skip
    print(found.table().to_string(index=False), found.verdict, sep="\n", flush=True)
    if found.interrupted:
        raise KeyboardInterrupt
    return found


class Turns:
    """The run of a row, while every arm takes its turn in every round."""

    def __init__(self, session: Session, engine: wb.Engine, row: Row, tests: Sequence[Workload]):
        toggle, self.arms = arms_of(row.compared, toggles_of(row.toggles, engine))
        self.rounds = 1 if session.quick else row.rounds
        name = session.emptied(row).name
        made = [new_arm(arm.name, arm.toggles.to_dict(), arm.is_control) for arm in self.arms]
        run = new_run(
            row.kind, name, name, provenance.collect(engine), made, [t.name for t in tests],
            self.rounds, seed=0,
        )  # fmt: skip
        run["result"] |= {"toggle": toggle, "smoke": session.quick, "answers": {}, "counters": {}}
        run["result"] |= {"warm_up": {}, "until": None}
        self.run = run
        self._answers: dict[str, list[answers.Answer]] = {}
        self.draft = Draft(run, session.at(row), self._complete)

    def note(self, arm: Arm, engine: wb.Engine, *tests: Workload) -> None:
        """At the end of a repetition: what an arm's engine issues for tests, and counted since it
        was made. Of the counters the latest stand in the run's result, by arm and test."""
        record = self.run["arms"][self.arms.index(arm)]
        record["sync_mode"] = engine.sync_mode
        for test in tests:
            self.run["result"]["counters"].setdefault(arm.name, {})[test.name] = engine.counters
            if test.name not in record["program"]:
                record["program"][test.name] = describe(engine, test)

    def take(self, one: Callable[[int, Arm], Samples]) -> AB:
        """Measures all rounds. one(round, arm) is a repetition; round -1 warms up and does not
        count."""

        def measure(round_: int, i: int) -> Samples:
            return one(round_, self.arms[i])

        def whole(round_: int, found: dict[int, Samples]) -> None:
            for i, samples in found.items():
                self._add(round_, i, samples, found[0])
            self.draft.checkpoint()

        with kept(self.draft, raises=True):
            for arm in self.arms:
                one(-1, arm)
            interleave(range(self.rounds), len(self.arms), measure, whole)
        return AB(self.run, self.draft.samples.frame())

    def _add(self, round_: int, i: int, samples: Samples, first: Samples) -> None:
        arm = self.arms[i]
        for test, sample in samples.items():
            self.draft.samples.add(
                arm.name, arm.is_control, test, round_, sample.token_ns, sample.token_n
            )
            if i:
                before, after = (s.last_logits[None] for s in (first[test], sample))
                found = answers.compare_logits(before, after, arm.answer)
                self._answers.setdefault(arm.name, []).append(found)

    def _complete(self) -> dict[str, Any]:
        merged = {name: answers.merge(of).to_dict() for name, of in self._answers.items()}
        self.run["result"]["answers"] = merged
        return {}


def variants(stack: ExitStack, engine: wb.Engine, arms: Sequence[Arm]) -> dict[str, wb.Engine]:
    """An engine for each arm, by name, until `stack` ends."""
    return {arm.name: stack.enter_context(engine.variant(arm.toggles)) for arm in arms}
