"""Comparisons of the campaign: `wb.ab` of a row, and runs whose repetitions are not `wb.ab`'s.

`Recording` is for the second kind: a run folder that grows while arms take their turns. What a
repetition does, its kind says; arms, rounds, order and run folder are as in `wb.ab`. `Turns` is a
recording of a row, whose arms are engines: their answers are checked, and `AB` reads it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import workbench as wb
from data.measure.matrix import Row
from data.measure.session import Session, toggles_of
from workbench.benchmarks.compare import answers
from workbench.benchmarks.compare.ab import describe
from workbench.benchmarks.compare.arms import Arm, answer_between, arms_of
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.rounds import interleave
from workbench.benchmarks.runs import provenance
from workbench.benchmarks.runs.draft import Draft, kept, new_arm, new_run
from workbench.benchmarks.times.gaps import CONTROL
from workbench.benchmarks.workload import Sample, Workload

Found = TypeVar("Found")
Samples = Mapping[str, Sample]  # of one repetition, by test


class Recording:
    """A run folder that grows by the turns of its arms. run: its run.json. arms: their names."""

    def __init__(
        self,
        kind: str,
        out: Path,
        found: Mapping[str, Any],
        arms: Mapping[str, Mapping[str, str]],
        tests: Iterable[str],
        rounds: int,
        name: str = "",
        complete: Callable[[], Mapping[str, Any]] = dict,
    ):
        """out: the run folder, which is emptied. found: what `provenance.collect` says. arms:
        toggles by name, the baseline's first. name: of the run; else its kind. complete: as `Draft`
        has it."""
        shutil.rmtree(out, ignore_errors=True)
        made = [new_arm(arm, dict(toggles), arm.endswith(CONTROL)) for arm, toggles in arms.items()]
        self.run = new_run(kind, out.name, name or kind, found, made, list(tests), rounds, seed=0)
        self.arms, self.rounds = list(arms), rounds
        self.result: dict[str, Any] = self.run["result"]
        self.draft = Draft(self.run, out, complete)

    def arm(self, name: str) -> dict[str, Any]:
        """An arm as run.json has it."""
        found: dict[str, Any] = self.run["arms"][self.arms.index(name)]
        return found

    def add(self, arm: str, test: str, round_: int, ns: Any, n_tokens: Any) -> None:
        """Adds what the parts of a repetition took, ns, and how many tokens each had."""
        taken, n = np.rint(ns).astype(np.int64), np.array(n_tokens, np.int64)
        self.draft.samples.add(arm, arm.endswith(CONTROL), test, round_, taken, n)
        self.draft.checkpoint()

    def kept(self) -> AbstractContextManager[None]:
        """In the body the run is measured; at its end it is saved, whatever ended it."""
        return kept(self.draft, raises=True)

    def take(
        self,
        turn: Callable[[int, str], Found],
        rounds: Iterable[int] | None = None,
        whole: Callable[[int, dict[str, Found]], None] = lambda round_, found: None,
    ) -> None:
        """Every arm has its turn in every round. rounds: those that there is time for.
        whole(round, found) is called after each round with what each arm found."""

        def ended(round_: int, found: dict[int, Found]) -> None:
            if rounds is not None:
                self.run["repetitions"] = round_ + 1
            whole(round_, {self.arms[i]: found[i] for i in sorted(found)})

        wanted = range(self.rounds) if rounds is None else rounds
        interleave(wanted, len(self.arms), lambda round_, i: turn(round_, self.arms[i]), ended)


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
    """The recording of a row whose arms are engines."""

    def __init__(self, session: Session, engine: wb.Engine, row: Row, tests: Sequence[Workload]):
        toggle, self.arms = arms_of(row.compared, toggles_of(row.toggles, engine))
        self._by_name = {arm.name: arm for arm in self.arms}
        toggles = {arm.name: arm.toggles.to_dict() for arm in self.arms}
        out, rounds = session.at(row), 1 if session.quick else row.rounds
        self._recording = Recording(
            row.kind, out, provenance.collect(engine), toggles, [test.name for test in tests],
            rounds, out.name, self._complete,
        )  # fmt: skip
        self._result = self._recording.result
        self._result |= {"toggle": toggle, "smoke": session.quick, "answers": {}, "counters": {}}
        self._result |= {"warm_up": {}, "until": None}
        self._answers: dict[str, list[answers.Answer]] = {}

    def note(self, arm: Arm, engine: wb.Engine, *tests: Workload) -> None:
        """At the end of a repetition: what an arm's engine issues for tests, and counted since it
        was made. Of the counters the latest stand in the run's result, by arm and test."""
        record = self._recording.arm(arm.name)
        record["sync_mode"] = engine.sync_mode
        for test in tests:
            self._result["counters"].setdefault(arm.name, {})[test.name] = engine.counters
            if test.name not in record["program"]:
                record["program"][test.name] = describe(engine, test)

    def take(self, one: Callable[[int, Arm], Samples]) -> AB:
        """Measures all rounds. one(round, arm) is a repetition; round -1 warms up and does not
        count."""
        recording = self._recording
        with recording.kept():
            for arm in self.arms:
                one(-1, arm)
            recording.take(lambda round_, name: one(round_, self._by_name[name]), whole=self._add)
        return AB(recording.run, recording.draft.samples.frame())

    def _add(self, round_: int, found: dict[str, Samples]) -> None:
        """The samples of a round, and the answers beside the baseline's."""
        baseline = found[self.arms[0].name]
        for name, samples in found.items():
            for test, sample in samples.items():
                self._recording.add(name, test, round_, sample.token_ns, sample.token_n)
                if samples is not baseline:
                    before, after = (s.last_logits[None] for s in (baseline[test], sample))
                    answer = answers.compare_logits(before, after, self._by_name[name].answer)
                    self._answers.setdefault(name, []).append(answer)

    def _complete(self) -> dict[str, Any]:
        merged = {name: answers.merge(of).to_dict() for name, of in self._answers.items()}
        self._result["answers"] = merged
        return {}


def same_answers(engines: Mapping[str, wb.Engine], seed: int) -> dict[str, Any]:
    """The answers of the engines of arms beside the first one's, by name. The last is the first
    one's control, `A/A`."""
    first, *others = engines.values()
    kinds = [answer_between(first.toggles, other.toggles) for other in others]
    found = answers.compare_engines([first, *others], kinds, seed)
    names = [*list(engines)[1:-1], "A/A"]
    return {name: answer.to_dict() for name, answer in zip(names, found, strict=True)}


def variants(stack: ExitStack, engine: wb.Engine, arms: Sequence[Arm]) -> dict[str, wb.Engine]:
    """An engine for each arm, by name, until `stack` ends."""
    return {arm.name: stack.enter_context(engine.variant(arm.toggles)) for arm in arms}
