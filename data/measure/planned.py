"""What measures graph plans: comparisons with the parts of a token, fresh engines, depth.

`plans` adds to the result of a comparison `parts` (see `token_parts`), by arm. Its engines are made
anew and count what their plans did from the first token on.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack

import numpy as np

import workbench as wb
from data.measure.in_rounds import Samples, Turns, compared, variants
from data.measure.matrix import PARTS_ROUNDS, PARTS_TOKENS, SWEPT, Row
from data.measure.session import Session, add_to_result
from workbench.benchmarks.compare.arms import Arm
from workbench.benchmarks.times.token_parts import token_parts
from workbench.benchmarks.workload import Sample, Workload, draw_tokens, parse_tests, take_sample
from workbench.config import Toggles
from workbench.trace.spans import now_ns

N_PROMPT, N_GEN = 512, 32  # of a row of the sweep
QUICK_FRESH = {False: "tg4", True: "tg4,pp16"}
QUICK_SWEPT, QUICK_PROMPT, QUICK_GEN = (0, 256), 128, 4


def plans(session: Session, engine: wb.Engine, rows: list[Row]) -> None:
    """t/s of each arm; then, in turns again, the parts of a token."""
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
    """The first tokens of engines that are made anew for every test of every repetition: programs
    are built and plans captured in them. To make an engine, its memory among it, takes no time
    here. Behind so many new objects Python's collector looks through all there are, which may take
    longer than the test. So it does before the test, and not at a token of whichever arm."""
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
    """As llama.cpp's sweep-bench: at each depth tokens one by one, which are removed again, and
    then a prompt, on which the next depth builds."""
    full = SWEPT, N_PROMPT, N_GEN
    depths, n_prompt, n_gen = (QUICK_SWEPT, QUICK_PROMPT, QUICK_GEN) if session.quick else full
    tests = [Workload(*pair, depth) for depth in depths for pair in ((n_prompt, 0), (0, n_gen))]
    cells = Workload(depths[-1] + n_prompt, n_gen)
    for row in rows:
        with ExitStack() as stack:
            turns = Turns(session, engine, row, tests)
            sides = variants(stack, engine, turns.arms)

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
    engine.synchronize()  # what was launched ahead holds up no prompt
    return _sample(np.diff(np.array(stamps, np.int64)), np.ones(len(tokens), np.int64), logits)


def _prefilled(engine: wb.Engine, tokens: list[int]) -> Sample:
    start = now_ns()
    logits = engine.prefill(tokens)
    ns = np.array([now_ns() - start], np.int64)
    return _sample(ns, np.array([len(tokens)], np.int64), logits)


def _sample(ns: np.ndarray, n: np.ndarray, logits: np.ndarray) -> Sample:
    return Sample(int(ns.sum()), ns, n, np.array(logits, np.float32)[-1])
