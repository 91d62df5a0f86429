"""The functions that measure each kind of row of the matrix: `KINDS`.

Every function takes the session, an engine with the rows' model, and the rows that are still to be
made. The engine is None for kinds that load their own.

Comparisons are by `wb.ab`; of engines that are made anew, and by depth, by `Turns`. `plans` adds
the parts of a token by arm (`token_parts`) to the result, and what plans did from the first token.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

import workbench as wb
from data.measure.ablation import ablation
from data.measure.command import Recording
from data.measure.counters import counters
from data.measure.launches import launches
from data.measure.matrix import FIRST, PARTS_ROUNDS, PARTS_TOKENS, SWEPT, Row, modes_on
from data.measure.racing import racing
from data.measure.session import (
    Session,
    add_to_result,
    cell_bytes,
    is_complete,
    product_flops,
    product_tflops,
    toggles_of,
)
from workbench.backend.base import choose_device, open_backend
from workbench.benchmarks import workload
from workbench.benchmarks.compare import answers
from workbench.benchmarks.compare.ab import describe
from workbench.benchmarks.compare.arms import Arm, arms_of
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.until import AT_MOST_S
from workbench.benchmarks.kernels.kernel_bench import KernelMatrix, bench_kernels
from workbench.benchmarks.kernels.kernel_cases import TYPES, parse_shapes
from workbench.benchmarks.llama import batched
from workbench.benchmarks.llama.llama_bench import measured, workloads
from workbench.benchmarks.runs import provenance
from workbench.benchmarks.scores.perplexity import parse_against, perplexity_by_size
from workbench.benchmarks.scores.token_source import ask
from workbench.benchmarks.times.gaps import host_gaps
from workbench.benchmarks.times.token_parts import token_parts
from workbench.benchmarks.workload import Sample, Workload, draw_tokens, parse_tests, take_sample
from workbench.config import CopyStream, Toggles
from workbench.report import roofline
from workbench.trace.spans import now_ns

QUICK_PROMPT, QUICK_GEN, QUICK_DEPTH, QUICK_SCORED = 128, 8, 512, 64
LOADS = 3
TRACE = "timeline.pftrace.gz"


class Kind(NamedTuple):
    """A kind of row.

    measure: makes the runs of some rows.
    needs: a key of `result` that a complete run has.
    loads: whether it takes an engine.
    at_once: rows of a model share what is measured first.
    """

    measure: Callable[[Session, Any, list[Row]], None]
    needs: str = ""
    loads: bool = True
    at_once: bool = False


def bench(session: Session, engine: wb.Engine, rows: list[Row]) -> None:
    """llama-bench's tests. The folder also has the operations of a step and the rates of the
    device."""
    rates, cache = session.rates(engine.backend), cell_bytes(engine)
    for row in rows:
        folder, tests = session.emptied(row), workload.parse_tests(row.test)
        prompts, gens, depths = (
            tuple(dict.fromkeys(min(n, most) if session.quick else n for n in wanted))
            for wanted, most in (
                ([t.n_prompt for t in tests if t.n_prompt], QUICK_PROMPT),
                ([t.n_gen for t in tests if t.n_gen], QUICK_GEN),
                ([t.n_depth for t in tests], QUICK_DEPTH),
            )
        )
        with session.variant(engine, row) as side:
            rounds = 2 if session.quick else row.rounds
            made = measured(side, workloads(prompts, gens, depths), rounds, out=folder)
            flops = {f"pp{n}": product_flops(side, n) for n in prompts}
        add_to_result(folder, **rates, product_flops=flops, cache_bytes_per_token=cache)
        said = ", ".join(f"{one.workload.name} {one.values()['avg_ts']:.1f} t/s" for one in made)
        print(f"{folder.name}: {said}; {rates['read_gbps']:.0f} GB/s read", flush=True)


def together(session: Session, engine: wb.Engine, rows: list[Row]) -> None:
    """llama-batched-bench's tests. The folder also has the bytes that a step reads."""
    rates, cache = session.rates(engine.backend), cell_bytes(engine)
    for row in rows:
        folder, test = session.emptied(row), workload.parse(row.test)
        if session.quick:
            test = test._replace(n_prompt=4, n_gen=2)
        with session.variant(engine, row) as side:
            sizes = [test.n_prompt], [test.n_gen], [test.n_seqs]
            (made,) = batched.batched(side, *sizes, row.rounds, out=folder)
        add_to_result(folder, **rates, cache_bytes_per_token=cache)
        said = f"{batched.line(made)}; {rates['read_gbps']:.0f} GB/s read"
        print(f"{folder.name}: {said}", flush=True)


def compare(session: Session, engine: wb.Engine, rows: list[Row]) -> None:
    """A/B comparisons, each in a folder of its own; pdl only where the device has it."""
    for row in rows:
        if not row.compared.startswith("pdl=") or engine.backend.capabilities.programmatic:
            compared(session, engine, row)


def energies(session: Session, engine: wb.Engine, rows: list[Row]) -> None:
    """A/B comparisons with joules a token. Quick ones have no joules: a CPU does not count them."""
    for row in rows:
        compared(session, engine, row, energy=not session.quick)


def gaps(session: Session, engine: wb.Engine, rows: list[Row]) -> None:
    """The time between a token's last kernel and the next one's first, by mode and copy stream, and
    what one wait adds to it."""
    some = {"rounds": 2} if session.quick else {}
    for row in rows:
        folder = session.emptied(row)
        arms = {}
        for stream in (CopyStream.OWN, CopyStream.COMPUTE):
            for mode in modes_on(stream):
                spec = f"{row.toggles} copy_stream={stream} sync={mode}"
                arms[f"{mode}, {stream}"] = toggles_of(spec, engine)
        found = host_gaps(engine, arms, out=folder, name=folder.name, **some)
        print(f"{folder.name}:\n{found}", flush=True)


def trace(session: Session, engine: wb.Engine, rows: list[Row]) -> None:
    """Saves a trace of a few tokens in the row's folder."""
    for row in rows:
        with session.variant(engine, row) as side:
            side.generate(tokens=[1, 2, 3], max_tokens=8)
            with wb.profile(side, window=(8, 8)) as traced:
                side.generate(tokens=[1, 2, 3], max_tokens=20)
            traced.save(session.at(row) / TRACE)


def perplexities(session: Session, engine: wb.Engine, rows: list[Row]) -> None:
    """Scores tokens that the model draws and is fed: everything on against the float path with
    everything off, for every number of tokens computed at once."""
    begin, first = time.monotonic(), rows[0]
    source_name = f"sample:{QUICK_SCORED}" if session.quick else first.test
    with session.variant(engine, first) as fast:
        source = ask(None, source_name).open(fast)
        folders = {row.sizes[0]: session.emptied(row) for row in rows}
        runs = perplexity_by_size(fast, source, folders, against=parse_against(first.compared))
    for made in runs:
        print("\n".join([made.folder.name, *made.lines()]), flush=True)
        if made.agreement is not None:
            outside = made.agreement.outside(engine.model.quant, made.n_ubatch)
            print(outside or "within the bounds")
    print(f"{first.folder}: {time.monotonic() - begin:.0f} s", flush=True)
    if any(made.interrupted for made in runs):
        raise KeyboardInterrupt


def kernels(session: Session, _: None, rows: list[Row]) -> None:
    """`bench-kernels` of every type, with its picture. A product of several tokens is bound by
    memory or by tensor cores: `product_tflops` of the run says what tensor cores reach on a large
    product."""
    chosen, reason = choose_device(session.device)
    for row in rows:
        folder, shapes, batches = session.emptied(row), parse_shapes(row.test), row.sizes
        if session.quick:
            shapes, batches = parse_shapes("qwen3-30b-a3b.gate"), batches[:2]
        with closing(open_backend(chosen, 0)) as backend:
            rate = {"product_tflops": product_tflops(backend)} if chosen == "cuda" else {}
            made = bench_kernels(
                backend, KernelMatrix(TYPES, shapes, batches, session.quick), folder, reason=reason,
                on_row=lambda row: print(row, flush=True), on_note=lambda s: print(s, flush=True),
            )  # fmt: skip
        if made.interrupted:
            raise KeyboardInterrupt
        roofline.save(made.run, folder)
        add_to_result(folder, **rate)


def load(session: Session, engine: None, rows: list[Row]) -> None:
    """Measures the seconds until a model is ready, LOADS times, with its file in the page cache."""
    for row in rows:
        path, seconds = session.path(row.model), list[float]()
        with open(path, "rb", buffering=0) as file:
            while file.read(64 << 20):
                pass  # what is read is then in the page cache
        for _ in range(LOADS):
            begin = time.perf_counter()
            with wb.Engine.load(
                path, device=session.device, n_ctx=row.n_ctx, toggles=wb.Toggles()
            ) as loaded:
                seconds.append(round(time.perf_counter() - begin, 3))
                found = {**provenance.collect(loaded), "seconds": seconds}
        session.write(row, found)
        print(f"{session.at(row).name}: {seconds} s", flush=True)


N_PROMPT, N_GEN = 512, 32  # of a row of the sweep
QUICK_FRESH = {False: "tg4", True: "tg4,pp16"}
Samples = Mapping[str, Sample]  # of one repetition, by test
QUICK_SWEPT, QUICK_AFTER = (0, 256), 4


def compared(session: Session, engine: wb.Engine, row: Row, energy: bool = False) -> AB:
    """Makes the comparison of a row in its folder."""
    folder = session.emptied(row)
    half_width, at_most_s = (None if session.quick else row.until) or (None, AT_MOST_S)
    found = wb.ab(
        engine, row.compared, tests="tg8" if session.quick else row.test,
        rounds=1 if session.quick else row.rounds,
        background=toggles_of(row.toggles, engine), out=folder, name=folder.name,
        smoke=session.quick, energy=energy,
        until=half_width, at_most_s=at_most_s,
    )  # fmt: skip
    print(found.table().to_string(index=False), found.verdict, sep="\n", flush=True)
    if found.interrupted:
        raise KeyboardInterrupt
    return found


class Turns:
    """The recording of a row whose arms are engines. Answers are checked, and `AB` reads the
    run."""

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
    they build programs and capture plans. Making the engine is not timed. After so many new
    objects, Python's collector goes through all objects, which may take longer than the test. So it
    runs before the test, and not at a token of some arm."""
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
    depths, n_prompt, n_gen = (QUICK_SWEPT, QUICK_PROMPT, QUICK_AFTER) if session.quick else full
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


KINDS: dict[str, Kind] = {
    "bench": Kind(bench, needs="read_gbps", at_once=True),
    "together": Kind(together, needs="read_gbps", at_once=True),
    "ab": Kind(compare),
    "plans": Kind(plans, needs="parts"),
    "fresh": Kind(fresh),
    "sweep": Kind(sweep),
    "energy": Kind(energies, needs="energy"),
    "gaps": Kind(gaps),
    "trace": Kind(trace),
    "perplexity": Kind(perplexities, needs="n_ubatch", at_once=True),
    "kernels": Kind(kernels, loads=False),
    "load": Kind(load, loads=False),
    "ablation": Kind(ablation),
    "launches": Kind(launches, loads=False),
    "counters": Kind(counters, loads=False),
    "races": Kind(racing, loads=False),
}


def is_there(session: Session, row: Row) -> bool:
    """Whether a complete run of a row, of this commit, is there."""
    if row.kind == "trace":
        return (session.at(row) / TRACE).is_file()
    on_gpu = row.kind == "kernels" and session.device == "cuda"
    return is_complete(session.at(row), "product_tflops" if on_gpu else KINDS[row.kind].needs)


def run(session: Session, rows: Sequence[Row]) -> list[str]:
    """Makes the missing runs of some rows, and loads each model once. A row that would end after
    the session's deadline is left, and a line names it. Returns the folders of rows that failed;
    other rows go on after a failure."""
    failed = list[str]()
    rows = sorted(rows, key=lambda row: row.model not in FIRST)
    for row in rows:
        if is_there(session, row):
            print(f"{session.at(row).name}: there already, of this commit", flush=True)
    # what rows share that one engine serves
    loaded = attrgetter("model", "n_ctx", "n_ubatch", "n_seqs", "n_kv_pad", "n_devices")
    for _, alike in groupby(rows, key=loaded):
        group = [row for row in alike if not (is_there(session, row) or session.late(row))]
        if not group:
            continue
        first = group[0]
        if (first.model and not session.takes(first.model)) or not session.has(first):
            continue
        with ExitStack() as stack:
            loads = KINDS[first.kind].loads
            engine = stack.enter_context(session.engine(first)) if loads else None
            for name, of_kind in groupby(group, key=lambda row: row.kind):
                failed += _measure(session, engine, KINDS[name], list(of_kind))
    return failed


def _measure(session: Session, engine: Any, kind: Kind, rows: list[Row]) -> list[str]:
    """Measures rows of a kind, and prints how long each took. Returns the rows that failed."""
    failed = list[str]()
    for part in [rows] if kind.at_once else [[row] for row in rows]:
        if session.late(part[0]):
            continue
        begin = time.monotonic()
        names, about = ", ".join(session.at(row).name for row in part), sum(r.seconds for r in part)
        try:
            kind.measure(session, engine, part)
        except Exception:
            traceback.print_exc()
            failed.append(names)
        expected = f", about {about} expected" if about else ""
        print(f"== {names}: {time.monotonic() - begin:.1f} s{expected}", flush=True)
    return failed
