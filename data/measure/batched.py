"""Sequences side by side, and llama.cpp's batched bench: on one card and file, in turn.

    python -m data.measure.batched [MODELS] [--peer DIR] [--widths 1,8,32,128] [--rounds N]

Each model has a run folder `data/results/batched/MODEL/`. A test is llama-batched-bench's: a number
of sequences have a prompt each, and then a token each in every step. Token ids are drawn before,
the cache is empty, nothing is sampled, and every step's logits reach the host. `--peer` names a
folder with llama.cpp's programs, or an archive of the folder, as for `make peer-cuda`. Without
`--peer` our side runs alone.

* A round runs every arm once with all widths, in an order that turns. The last arm is our first arm
  once more: the A/A control.
* llama.cpp's turn is one process, `llama-batched-bench`, which reports the sum over its steps.
* Our arms run what `workbench bench -npl WIDTHS -p 1024 -n 128` runs: preset `best`, for one
  sequence or for several.

`result` has the `launches` of a generating step by arm and test, `cell_bytes` of K and V in all
layers, the `answers` of our arms beside our first arm's, and `rates`, the most that the device can
do:

    read_gbps      the fastest of several reading kernels (`session.rates`)
    to_host_gbps   a copy of COPIED bytes from the device to page-locked memory, the fastest of some
    launch_us      a launch of an empty kernel in a graph, as the run's toggles launch; 0 where a
                   device has no graphs
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cyclopts import App

import workbench as wb
from data.measure.command import (
    PAD,
    USUAL,
    Call,
    Options,
    Recording,
    at_least_one,
    numbers,
    same_answers,
    start,
)
from data.measure.launches import graph_us
from data.measure.peer import LLAMA, OURS
from data.measure.recorded import PHASES, Arms, Recorded, Share, spread
from data.measure.session import cell_bytes, memory, parsed, toggles_of
from data.measure.tables import Folder, Line, Part, Table, caption, filled
from tests.peer.llama_bench import LlamaBench, find, last_line
from workbench.backend.base import open_backend
from workbench.benchmarks import workload as w
from workbench.benchmarks.kernels.kernel_rigs import PDL, PLAIN, rig_of
from workbench.benchmarks.runs import provenance
from workbench.benchmarks.times.gaps import CONTROL
from workbench.common.devices import is_gpu
from workbench.common.errors import UsageError
from workbench.common.sizes import round_up
from workbench.config import BEST
from workbench.program.commands import COMPUTE_STREAM, Launch, Space

PROGRAM = "llama-batched-bench"
WIDTHS, N_PROMPT, N_GEN, N_UBATCH = "1,2,4,8,16,32,64,128", 1024, 128, 512
SEED = 0
COPIED, TIMES = 64 << 20, 9  # bytes that are copied to the host, and how often
MODELS = ("llama-3.2-1b-q4_k_m", "llama-3-8b-q4_0")  # that are recorded

app = App(help=__doc__, result_action="return_none")


class Wanted(NamedTuple):
    """The tests of both sides.

    widths: numbers of sequences.
    n_ubatch: tokens computed at once.
    """

    widths: Sequence[int]
    n_prompt: int = N_PROMPT
    n_gen: int = N_GEN
    n_ubatch: int = N_UBATCH

    @property
    def tests(self) -> list[w.Workload]:
        return [w.Workload(self.n_prompt, self.n_gen, 0, n) for n in self.widths]

    @property
    def n_ctx(self) -> int:
        """Cells of all sequences. Each sequence has room for one step more than its test, rounded
        up to a multiple of PAD."""
        return max(self.widths) * round_up(self.n_prompt + self.n_gen + 1, PAD)


class Own:
    """An arm of ours: an engine for each set of toggles that its tests have. widest: the engine of
    the test with the most sequences."""

    def __init__(
        self, stack: ExitStack, opened: wb.Engine, config: wb.EngineConfig, setting: str,
        wanted: Wanted,
    ):  # fmt: skip
        """stack: closes the engines. setting: as rows of the matrix name it."""
        self._of = {test: toggles_of(setting, opened, test.width) for test in wanted.tests}
        self.toggles = self._of[max(wanted.tests, key=lambda test: test.width)]
        self._engines = {
            toggles: stack.enter_context(wb.Engine(opened._open, config, toggles))
            for toggles in dict.fromkeys(self._of.values())
        }
        self.widest = self._engines[self.toggles]

    def of(self, test: w.Workload) -> wb.Engine:
        return self._engines[self._of[test]]

    @property
    def counters(self) -> dict[str, int]:
        found = Counter[str]()
        for engine in self._engines.values():
            found.update(engine.counters)
        return dict(found)

    def warm_up(self, wanted: Wanted) -> dict[str, int]:
        """Runs every test once, untimed, and returns the launches of a generating step by test. The
        widest test comes first: where the arena grows, programs are made anew."""
        found, bos = dict[str, int](), w.bos_token(self.widest)
        for test in sorted(wanted.tests, key=lambda test: -test.width):
            engine, most = self.of(test), wanted.n_ubatch
            w.warm_up([engine], test, SEED, bos, once=True)
            found[test.name] = sum(
                isinstance(command, Launch)
                for n in (min(most, test.width - i) for i in range(0, test.width, most))
                for command in engine.program(n, n, test.n_prompt + test.n_gen, n).singly()
            )
        return found

    def take(self, test: w.Workload, round_: int) -> w.Sample:
        engine, bos = self.of(test), w.bos_token(self.widest)
        tokens = w.draw_tokens(test, engine.model.n_vocab, SEED, round_, bos)
        return w.take_sample(engine, test, tokens)


def about_peer(bench: LlamaBench | None) -> dict[str, Any] | None:
    """What a run says of llama.cpp's programs."""
    return None if bench is None else bench.about | {"program": PROGRAM}


def batched_rows(bench: LlamaBench, path: Path, wanted: Wanted) -> list[dict[str, Any]]:
    """What llama-batched-bench reports for every width. Raises RuntimeError where a width is
    missing."""
    command = [
        str(bench.program.with_name(PROGRAM)), "-m", str(path), "-ngl", "99", "-fa", "on",
        "-c", str(wanted.n_ctx), "-b", "2048", "-ub", str(wanted.n_ubatch),
        "-npp", str(wanted.n_prompt), "-ntg", str(wanted.n_gen),
        "-npl", ",".join(map(str, wanted.widths)), "--output-format", "jsonl",
    ]  # fmt: skip
    done = bench.call(command)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or [row["pl"] for row in rows] != list(wanted.widths):
        raise RuntimeError(
            f"{PROGRAM} ended with {done.returncode} and {len(rows)} of {len(wanted.widths)} "
            f"widths: {last_line(done)}"
        )
    return rows


def bench_of(peer: Path | None) -> LlamaBench | None:
    """llama.cpp's programs at `peer`; None without a path. Raises UsageError where
    llama-batched-bench is not among them."""
    bench = find(peer) if peer is not None else None
    if bench is not None and not bench.program.with_name(PROGRAM).is_file():
        raise UsageError(f"{bench.program.parent}: no {PROGRAM} beside {bench.program.name}")
    return bench


def device_rates(engine: wb.Engine, quick: bool = False) -> dict[str, float]:
    """The figures of `rates`, for an engine's device and toggles."""
    backend: Any = engine.backend
    pdl = PDL if engine.toggles.pdl == "on" else PLAIN
    return {
        "read_gbps": max(rig_of(backend, quick).read_rates().values()),
        "to_host_gbps": to_host_gbps(backend, COPIED // 64 if quick else COPIED),
        "launch_us": graph_us(backend, pdl) if backend.name == "cuda" else 0.0,
    }


def to_host_gbps(backend: Any, nbytes: int) -> float:
    """GB/s of the fastest of TIMES copies to page-locked memory, each to its end."""
    took = []
    with memory(backend, (nbytes, Space.DEVICE), (nbytes, Space.PINNED)) as (source, target):
        copy = backend.copy(target.address, source.address, nbytes, COMPUTE_STREAM, True)
        for _ in range(TIMES):
            backend.synchronize()
            begin = time.perf_counter_ns()
            copy()
            backend.synchronize()
            took.append(time.perf_counter_ns() - begin)
    return nbytes / min(took)


@app.default
def main(
    *models: str,
    peer: Path | None = None,
    widths: str = WIDTHS,
    rounds: int = 3,
    ours: str = BEST,
    n_prompt: int = N_PROMPT,
    n_gen: int = N_GEN,
    n_ubatch: int = N_UBATCH,
    quick: bool = False,
    options: Options = USUAL,
) -> None:
    """Measures each model, and prints its table.

    Parameters
    ----------
    models: as folders name them; without any, llama-3.2-1b-q4_k_m.
    peer: a folder with llama.cpp's programs, or an archive of one.
    widths: numbers of sequences.
    rounds: how often each arm has its turn.
    ours: settings of ours with commas between them: best, or best skip_masked_kv=off, or serving.
    n_prompt, n_gen: tokens of each sequence.
    n_ubatch: tokens computed at once, on both sides.
    quick: little is read and copied to find the device's rates; no figures.
    """
    wanted = Wanted(numbers("--widths", widths), n_prompt, n_gen, n_ubatch)
    at_least_one(*wanted.widths, rounds, n_prompt, n_gen,
                 flags="widths, rounds, --n-prompt and --n-gen")  # fmt: skip
    names = models or MODELS[:1]
    for name in names:
        parsed(name)
    open_backend(options.device).close()
    bench, call = bench_of(peer), Call(RUNS.name, options)
    if bench is None and is_gpu(options.device):
        print("no --peer: ours alone", file=sys.stderr)
    for name in names:
        given = call, name, bench, wanted, ours.split(","), rounds, quick
        call.make(name, call.out / name, partial(_measured, *given), RUNS.shown)


def _measured(
    call: Call, name: str, bench: LlamaBench | None, wanted: Wanted, ours: Sequence[str],
    rounds: int, quick: bool,
) -> None:  # fmt: skip
    """Measures both sides on the file of a model, into its run folder."""
    path, tests = call.model_file(name), wanted.tests
    with ExitStack() as stack:
        # this engine holds the weights alone: the arms' caches fill the memory
        engine = stack.enter_context(
            wb.Engine.load(
                path, device=call.options.device, n_ctx=PAD, n_seqs=1, n_ubatch=1, n_kv_pad=PAD,
                toggles=wb.Toggles(graph_reuse="set_rows"),
            )
        )  # fmt: skip
        config = dataclasses.replace(
            engine.config, n_ctx=wanted.n_ctx, n_seqs=max(wanted.widths), n_ubatch=wanted.n_ubatch
        )
        settings = {f"{OURS} {setting}": setting for setting in ours}
        first = next(iter(settings))
        every = {
            arm: Own(stack, engine, config, setting, wanted)
            for arm, setting in (settings | {first + CONTROL: settings[first]}).items()
        }
        arms: dict[str, dict[str, str]] = {LLAMA: {}} if bench is not None else {}
        arms |= {arm: own.toggles.to_dict() for arm, own in every.items()}
        recording = Recording(
            "batched", call.out / name, provenance.collect(every[first].widest), arms,
            [test.name for test in tests], rounds, f"{LLAMA}'s batched bench beside {OURS}",
        )  # fmt: skip
        result = recording.result
        result |= {
            "peer": about_peer(bench), "cell_bytes": cell_bytes(engine),
            "n_vocab": engine.model.n_vocab, "launches": {}, "rates": {}, "answers": {},
        }  # fmt: skip

        def take(round_: int, arm: str) -> None:
            if bench is not None and arm == LLAMA:
                for test, row in zip(tests, batched_rows(bench, path, wanted), strict=True):
                    ns = np.array([row["t_pp"], row["t_tg"]]) * 1e9
                    n = [test.n_prompt_tokens, test.width * test.n_gen]
                    recording.add(arm, test.name, round_, ns, n)
                return
            for test in tests:
                sample = every[arm].take(test, round_)
                recording.add(arm, test.name, round_, sample.token_ns, sample.token_n)

        def whole(round_: int, _: dict[str, None]) -> None:
            said = f"round {round_ + 1}/{rounds}, {call.seconds:.0f} s"
            print(f"  {path.stem}: {said}", flush=True)

        with recording.kept():
            for arm, own in every.items():
                result["launches"][arm] = own.warm_up(wanted)
                recording.arm(arm)["sync_mode"] = own.widest.sync_mode
                result["sides"] = {test.name: own.of(test).chosen for test in tests}
            result["rates"] = device_rates(every[first].widest, quick)
            widest = {arm: own.widest for arm, own in every.items()}
            result["answers"] = same_answers(widest, SEED)
            recording.take(take, call.rounds(rounds), whole)
            for arm, own in every.items():
                recording.arm(arm)["counters"] = own.counters


class Bounds(NamedTuple):
    """The least time of a generating step, us, by cause.

    weights, cache: to read them once.
    logits: to bring them to the host.
    launches: one after the other.
    """

    weights: float
    cache: float
    logits: float
    launches: float

    @property
    def total(self) -> float:
        return sum(self)


class BatchedRun(Arms):
    """A run of kind `batched`, as read."""

    def about(self) -> str:
        run, first, peer = self.run, self.tests[0], self.run["result"]["peer"]
        rates = run["result"]["rates"]
        said = (
            f"prompts of {first.n_prompt} tokens, {first.n_gen} generated; in turn in one run, "
            f"{run['repetitions']} rounds; reads {rates['read_gbps']:.0f} GB/s, copies "
            f"{rates['to_host_gbps']:.1f} GB/s to the host, {rates['launch_us']:.2f} us a launch"
        )
        return said + (f"; llama.cpp {peer['version']}" if peer else "")

    @property
    def tests(self) -> list[w.Workload]:
        return [w.parse(name) for name in self.run["tests"]]

    def best(self, test: str) -> str:
        """Our arm with the fastest generation, by its median."""
        return str(self.rates(test, PHASES[1])[self.side(OURS)].median().idxmax())

    def bounds(self, test: w.Workload, arm: str) -> Bounds:
        """The bounds of a generating step, the mean over the test."""
        result, rates = self.run["result"], self.run["result"]["rates"]
        weights = self.run["model"]["weight_bytes_per_token"]
        cache = test.step_bytes(0, result["cell_bytes"])
        logits = 4 * result["n_vocab"] * test.width
        return Bounds(
            weights / rates["read_gbps"] / 1e3, cache / rates["read_gbps"] / 1e3,
            logits / rates["to_host_gbps"] / 1e3,
            result["launches"][arm][test.name] * rates["launch_us"],
        )  # fmt: skip

    def lines(self) -> Iterator[Line]:
        """A line for each width: both sides' rates, the ratio, and the bounds of a step of ours."""
        for test in self.tests:
            name, arm = test.name, self.best(test.name)
            fastest = self.bounds(test, arm)
            prompt, made = (self.rates(name, phase).median() for phase in PHASES)
            took = 1e6 * test.width / made[arm]  # the median over rounds of a step's mean
            ratios: dict[str, Any] = dict.fromkeys(("pp_ratio", "ratio"))
            if LLAMA in self.names:
                of_prompts, of_made = (self.ratio(name, LLAMA, arm, phase) for phase in PHASES)
                ratios = {"pp_ratio": of_prompts.value, "ratio": spread(of_made)}
            values = {
                "model": self.model, "n": test.width, "arm": arm.removeprefix(f"{OURS} "),
                "pp_theirs": prompt.get(LLAMA), "pp": prompt[arm],
                "tg_theirs": made.get(LLAMA), "tg": made[arm], **ratios,
                "step": took / 1e3, **{k: us / 1e3 for k, us in fastest._asdict().items()},
                "total": fastest.total / 1e3, "share": Share(fastest.total / took),
            }  # fmt: skip
            yield Line(values, [self])


RUNS = Folder("batched", "Sequences side by side on a GPU", BatchedRun, {
    "Model": "{model}", "sequences": "{n}",
    "pp t/s llama.cpp": "{pp_theirs:.0f}", "pp t/s": "{pp:.0f}", "pp ratio": "{pp_ratio:.2f}",
    "tg t/s llama.cpp": "{tg_theirs:.0f}", "tg t/s": "{tg:.0f}", "tg ratio": "{ratio}",
    "ms a step": "{step:.3f}", "weights": "{weights:.3f}", "cache": "{cache:.3f}",
    "logits": "{logits:.3f}", "launches": "{launches:.3f}", "sum": "{total:.3f}",
    "sum % of step": "{share:.0f}", "With": "{arm}",
})  # fmt: skip
TYPED = RUNS._replace(name="plain-batched")  # what `workbench bench -npl` itself recorded


def beside_llama(recorded: Recorded) -> list[BatchedRun]:
    """The first run that has llama.cpp's batched bench as an arm."""
    return [found for found in RUNS.runs(recorded) if found.side(LLAMA)][:1]


def in_short(recorded: Recorded) -> Iterator[Line]:
    """Generated t/s of the first model, ours beside llama.cpp's; a column for each width."""
    for found in beside_llama(recorded):
        of = [line.values for line in found.lines()]
        for name, cell in (
            (f"{LLAMA}, t/s", "{tg_theirs:.0f}"), (f"{OURS}, t/s", "{tg:.0f}"), ("ratio", "{ratio}")
        ):  # fmt: skip
            values = {str(v["n"]): filled(cell, v) for v in of}
            yield Line({f"{found.model}, sequences": name} | values, [found])


def first(recorded: Recorded) -> str:
    """The commands that print our figures and both sides' figures, and then the caption."""
    both = "`python -m data.measure.batched --peer DIR` both"
    return "".join(
        f"{_typed(found)} prints ours; {both}. {caption([found], found.about())}"
        for found in beside_llama(recorded)
    )


def as_typed(recorded: Recorded) -> Iterator[Line]:
    """A line for each width of the runs that `bench -npl` itself wrote."""
    for found in TYPED.runs(recorded):
        for test in found.tests:
            values = {"Model": found.model, "sequences": str(test.width)}
            for name, phase in zip(("pp t/s", "tg t/s"), PHASES, strict=True):
                middle = found.interval(test.name, "engine", phase)
                values[name] = "{:.0f} ({:.0f}..{:.0f})".format(*middle)
            yield Line(values, [found])


def typed(recorded: Recorded) -> str:
    """A caption for each run, with the command that made it."""
    return " ".join(
        f"{_typed(found)}, {found.run['repetitions']} repetitions. {caption([found])}"
        for found in TYPED.runs(recorded)
    )


def _typed(found: BatchedRun) -> str:
    test, widths = found.tests[0], ",".join(str(test.width) for test in found.tests)
    return f"`workbench bench -m 1b.gguf -npl {widths} -p {test.n_prompt} -n {test.n_gen}`"


BLOCKS: dict[str, list[Part]] = {
    TYPED.name: [Table("`bench -npl` as it is typed", as_typed, said=typed)],
    "batched-short": [Table("Many sequences beside llama.cpp", in_short, said=first)],
    RUNS.name: [
        RUNS.table,
        "Beside a generating step stand the ms that it cannot take less than, each by itself: to "
        "read the weights once, to read every cell once, to bring the logits to the host, and its "
        "launches one behind the other. Logits travel while the next step runs, so a step can be "
        "shorter than the sum.",
    ],
}

if __name__ == "__main__":
    start(app)
