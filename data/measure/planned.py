"""Comparisons that rows of the matrix name: by `wb.ab`, with the parts of a token, of engines that
are made anew, and by depth.

`plans` adds `parts` to the result of a comparison: the parts of a token by arm (`token_parts`). Its
engines are made anew, and count what their plans did from the first token on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

import workbench as wb
from data.measure.command import Recording
from data.measure.matrix import PARTS_ROUNDS, PARTS_TOKENS, SWEPT, Row
from data.measure.session import Session, add_to_result, toggles_of
from workbench.benchmarks.compare import answers
from workbench.benchmarks.compare.ab import describe
from workbench.benchmarks.compare.arms import Arm, arms_of
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.runs import provenance
from workbench.benchmarks.times.token_parts import token_parts
from workbench.benchmarks.workload import Sample, Workload, draw_tokens, parse_tests, take_sample
from workbench.config import Toggles
from workbench.trace.spans import now_ns

N_PROMPT, N_GEN = 512, 32  # of a row of the sweep
QUICK_FRESH = {False: "tg4", True: "tg4,pp16"}
Samples = Mapping[str, Sample]  # of one repetition, by test
QUICK_SWEPT, QUICK_PROMPT, QUICK_GEN = (0, 256), 128, 4


def compared(session: Session, engine: wb.Engine, row: Row) -> AB:
    """Makes the comparison of a row in its folder."""
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
        """Notes, after a repetition, what the engine of an arm issues for tests, and its counters.
        Later counters replace earlier ones."""
        record = self._recording.arm(arm.name)
        record["sync_mode"] = engine.sync_mode
        for test in tests:
            self._result["counters"].setdefault(arm.name, {})[test.name] = engine.counters
            if test.name not in record["program"]:
                record["program"][test.name] = describe(engine, test)

    def take(self, one: Callable[[int, Arm], Samples]) -> AB:
        """Measures all rounds. one(round, arm) makes a repetition; round -1 warms up and does not
        count."""
        recording = self._recording
        with recording.kept():
            for arm in self.arms:
                one(-1, arm)
            recording.take(lambda round_, name: one(round_, self._by_name[name]), whole=self._add)
        return AB(recording.run, recording.draft.samples.frame())

    def _add(self, round_: int, found: dict[str, Samples]) -> None:
        """Adds the samples of a round, and compares the answers with the baseline's."""
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


def plans(session: Session, engine: wb.Engine, rows: list[Row]) -> None:
    """Measures t/s of each arm, and then, in turns again, the parts of a token."""
    for row in rows:
        ab = compared(session, engine, row)
        sides = {arm["name"]: Toggles(**arm["toggles"]) for arm in ab.run["arms"][:-1]}
        rounds = (2, 4) if session.quick else (PARTS_ROUNDS, PARTS_TOKENS)
        found = token_parts(engine, sides, *rounds)
        add_to_result(session.at(row), parts=found)
        print(f"{session.at(row).name}: us of a token", flush=True)
        for arm, of in found.items():
            said = (f"{part} {np.median(of[part]):.0f}" for part in ("host", "gap", "device"))
            print(f"  {', '.join(said)}: {arm}", flush=True)


def fresh(session: Session, engine: wb.Engine, rows: list[Row]) -> None:
    """Measures the first tokens of engines that are made anew for every test of every repetition:
    they build programs and capture plans. Python's collector would go through all new objects at a
    token of some arm, so it runs before the test."""
    for row in rows:
        tests = parse_tests(QUICK_FRESH["pp" in row.test] if session.quick else row.test)
        turns = Turns(session, engine, row, tests)

        def first(
            round_: int, arm: Arm, tests: list[Workload] = tests, turns: Turns = turns
        ) -> Samples:
            found = dict[str, Sample]()
            for test in tests:
                tokens = draw_tokens(test, engine.model.n_vocab, 0, max(round_, 0))
                with engine.variant(arm.toggles) as side:
                    gc.collect()
                    found[test.name] = take_sample(side, test, tokens)
                    turns.note(arm, side, test)
            return found

        print(turns.take(first).verdict, flush=True)


def sweep(session: Session, engine: wb.Engine, rows: list[Row]) -> None:
    """Measures as llama.cpp's sweep-bench: at each depth tokens one by one, which are removed
    again, and then a prompt, on which the next depth builds."""
    full = SWEPT, N_PROMPT, N_GEN
    depths, n_prompt, n_gen = (QUICK_SWEPT, QUICK_PROMPT, QUICK_GEN) if session.quick else full
    tests = [Workload(*pair, depth) for depth in depths for pair in ((n_prompt, 0), (0, n_gen))]
    cells = Workload(depths[-1] + n_prompt, n_gen)
    for row in rows:
        with ExitStack() as stack:
            turns = Turns(session, engine, row, tests)
            sides = {
                arm.name: stack.enter_context(engine.variant(arm.toggles)) for arm in turns.arms
            }

            def swept(
                round_: int, arm: Arm, turns: Turns = turns, sides: dict[str, wb.Engine] = sides
            ) -> Samples:
                side, found = sides[arm.name], dict[str, Sample]()
                ids = draw_tokens(cells, engine.model.n_vocab, 0, max(round_, 0))
                side.reset()
                for depth in range(0, depths[-1] + 1, n_prompt):
                    if depth in depths:
                        found[Workload(0, n_gen, depth).name] = _decoded(side, ids.gen)
                        side.cache.remove(0, depth)
                    sample = _prefilled(side, ids.prompt[depth : depth + n_prompt])
                    if depth in depths:
                        found[Workload(n_prompt, 0, depth).name] = sample
                turns.note(arm, side, *tests)
                return found

            print(turns.take(swept).verdict, flush=True)


def _decoded(engine: wb.Engine, tokens: list[int]) -> Sample:
    stamps, logits = [now_ns()], np.empty(0, np.float32)
    for token in tokens:
        logits = engine.step((token,))
        stamps.append(now_ns())
    engine.synchronize()  # so no step launched ahead delays a prompt
    return _sample(np.diff(stamps), np.ones(len(tokens), np.int64), logits)


def _prefilled(engine: wb.Engine, tokens: list[int]) -> Sample:
    start = now_ns()
    logits = engine.prefill(tokens)
    return _sample(np.array([now_ns() - start]), np.array([len(tokens)]), logits)


def _sample(ns: np.ndarray, n: np.ndarray, logits: np.ndarray) -> Sample:
    return Sample(int(ns.sum()), ns, n, np.array(logits, np.float32)[-1])
