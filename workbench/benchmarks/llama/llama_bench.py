"""`workbench bench`: llama-bench's measurement, reported under its field names.

An option without a counterpart in this engine has the value that llama-bench prints when the option
is off. For compare-llama-bench.py, two of our files need different values of `build` (default: the
commit), since the script tells its two sides apart by build_commit alone.

n_gpu_layers is the number that was given, as in llama-bench; else the number of layers on the
device. n_batch is n_ubatch: a prompt of any length is submitted by ubatch, and the engine has no
larger batch.

Preset `best` has a set of toggles for one sequence and a set for several. An engine takes the set
for the largest number of sequences in its tests. A test with another number runs on a variant of
the engine, with the set for this number (`Sides`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.benchmarks.compare.ab import describe
from workbench.benchmarks.compare.rounds import Repetition, Trials
from workbench.benchmarks.compare.until import AT_MOST_S, optional_until
from workbench.benchmarks.energy import joules
from workbench.benchmarks.energy.windows import EnergyAsked, energy_of, take_over_windows
from workbench.benchmarks.llama.llama_format import FIELDS, FORMATS, BenchRow, format_rows
from workbench.benchmarks.runs import provenance
from workbench.benchmarks.runs.draft import (
    Draft,
    check_same,
    kept,
    new_arm,
    new_run,
    open_out,
    session_of,
    take_over,
)
from workbench.benchmarks.runs.results import Run, new_run_folder
from workbench.benchmarks.workload import Sample, Workload, check_fits, check_untraced
from workbench.common.cores import usable_cores
from workbench.common.devices import DEVICES, HOST, is_gpu
from workbench.common.errors import UsageError
from workbench.config import TogglePreset, Toggles

if TYPE_CHECKING:
    from workbench.engine.engine import Engine
    from workbench.model.decoder import Model

__all__ = ["FIELDS", "FORMATS", "BenchRow", "format_rows", "measured", "workloads"]

# llama-bench's values for options that are off, or that this engine does not have
_OFF: dict[str, Any] = {
    "cpu_mask": "0x0", "cpu_strict": False, "poll": 0,
    "n_cpu_moe": 0, "split_mode": "none", "main_gpu": 0, "no_kv_offload": False, "flash_attn": 1,
    "tensor_split": "0.00", "tensor_buft_overrides": "none", "load_mode": "mmap",
    "lazy_mode": "off", "embeddings": False, "no_op_offload": 0, "no_host": False, "repack": True,
    "fit_target": 0, "fit_min_ctx": 0,
}  # fmt: skip


ARM = "engine"
NO_LOGITS = np.empty(0, np.float32)  # logits are not needed, and would fill memory


def workloads(
    n_prompt: Sequence[int] = (512,),
    n_gen: Sequence[int] = (128,),
    depth: Sequence[int] = (0,),
    pg: Sequence[tuple[int, int]] = (),
) -> list[Workload]:
    """llama-bench's test matrix in its order: per depth the prompts, the generations, the pairs.

    A 0 leaves its test out. Raises UsageError for a negative number and for no test at all.
    """
    for value in (*n_prompt, *n_gen, *depth, *(n for pair in pg for n in pair)):
        if value < 0:
            raise UsageError(f"{value} tokens cannot be measured; give 0 or more")
    tests: list[Workload] = []
    for d in depth:
        tests += [Workload(p, 0, d) for p in n_prompt if p]
        tests += [Workload(0, g, d) for g in n_gen if g]
        tests += [Workload(p, g, d) for p, g in pg if p or g]
    if not tests:
        raise UsageError("there is no test to run; give -p or -n a number above 0")
    return list(dict.fromkeys(tests))


def measured(
    engine: Engine,
    tests: Sequence[Workload],
    repetitions: int,
    *,
    seed: int = 0,
    build: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    until: float | str | None = None,
    at_most_s: float | str = AT_MOST_S,
    energy: EnergyAsked = False,
    on_row: Callable[[BenchRow], None] | None = None,
    on_end: Callable[[dict[str, int]], None] = lambda counters: None,
) -> list[BenchRow]:
    """Measures every test on `engine`, as llama-bench does; returns a row per test. `wb.bench` says
    what the other arguments are.

    build: the value of build_commit, in place of the commit.
    on_row(row): called as soon as a test is finished.
    on_end(counters): called at the end, with the counters of the engine and its variants.

    On Ctrl-C the run folder is written with the finished repetitions, and the interrupt is raised.
    Raises UsageError for tests that do not fit and for fewer than 1 repetition.
    """
    return recorded(
        engine, tests, repetitions, seed=seed, build=build, out=out, resume=resume, until=until,
        at_most_s=at_most_s, energy=energy, on_row=on_row, on_end=on_end,
    )[0]  # fmt: skip


def recorded(
    engine: Engine,
    tests: Sequence[Workload],
    repetitions: int,
    *,
    seed: int = 0,
    build: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    until: float | str | None = None,
    at_most_s: float | str = AT_MOST_S,
    energy: EnergyAsked = False,
    on_row: Callable[[BenchRow], None] | None = None,
    on_end: Callable[[dict[str, int]], None] = lambda counters: None,
) -> tuple[list[BenchRow], Draft]:
    """As `measured`, with the run beside the rows, whether it is saved or not."""
    if repetitions < 1:
        raise UsageError(f"repetitions={repetitions}: give 1 or more")
    check_untraced(engine)
    sides = Sides(engine)
    for test in tests:
        check_fits(sides.toggles_of(test), engine.config, test)
    asked = optional_until(until, at_most_s)
    counted = energy_of(energy, engine, tests)
    earlier = open_out(None if out is None else Path(out), resume)
    trials = Trials([engine], tests, repetitions, seed, asked, once=repetitions == 1)
    commit, rows = provenance.commit(), list[BenchRow]()
    name = new_run_folder(name=f"bench-{tests[0]}").name if out is None else Path(out).name
    run = _new_run(engine, tests, repetitions, seed, name)
    run["result"]["energy"] = counted and counted.record
    before = NOTHING
    if earlier is not None:
        before = _take_over(earlier, run, trials, Path(out or ""))
        take_over_windows(counted, earlier.run, run)

    def complete() -> dict[str, pd.DataFrame]:
        run["result"]["warm_up"] = trials.warm_ups
        run["arms"][0]["counters"] = {
            name: n + before.counters.get(name, 0) for name, n in sides.counters.items()
        }
        if asked is not None:
            run["result"]["until"] = asked._asdict() | {"tests": trials.ended}
            run["repetitions"] = max([before.most, *(len(row.samples) for row in rows)])
        return {}

    held = None if earlier is None else earlier.samples
    draft = Draft(run, None if out is None else Path(out), complete, held, new=earlier is None)

    def taken(one: Repetition, sample: Sample) -> None:
        rows[-1].samples.append(sample._replace(last_logits=NO_LOGITS))
        draft.samples.add(
            ARM, False, one.workload.name, one.round_, sample.token_ns, sample.token_n
        )
        draft.checkpoint()

    with closing(sides), kept(draft, raises=True):
        for test in tests:
            side = sides.engine_of(test)
            trials.engines = [side]
            fields = describe_engine(side, test, commit, build)
            samples = before.samples.get(test.name, [])
            if samples:
                fields["test_time"] = run["started"]
            rows.append(BenchRow(test, [*samples], fields, side.toggles.to_dict(), {}, {}))
            trials.measure(test, taken)
            rows[-1].ended.update(trials.ended.get(test.name, {}))
            run["arms"][0]["program"][test.name] = describe(side, test)
            run["result"]["sides"][test.name] = side.chosen
            if counted is not None:
                arms = [(ARM, False), (f"{ARM} (A/A)", True)]
                counted.measure([side, side], arms, test, seed, draft.checkpoint)
            rows[-1].energy.update(joules.of_test(run, test.name, ARM))
            if on_row is not None:
                on_row(rows[-1])
        on_end(sides.counters)
    return rows, draft


class Sides:
    """The engine and, while a test needs it, one variant."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._variant: Engine | None = None
        self._closed: Counter[str] = Counter()  # counters of variants that are closed

    def _wanted(self, test: Workload) -> Toggles | TogglePreset:
        wanted = self._engine.wanted
        if wanted is None or not wanted.of_device:
            return self._engine.toggles
        return wanted.for_sequences(test.width)

    def toggles_of(self, test: Workload) -> Toggles:
        """The toggles for `test`."""
        return self._engine.resolve(self._wanted(test))

    def engine_of(self, test: Workload) -> Engine:
        """The engine for `test`. The variant of an earlier test is closed where `test` needs
        another variant."""
        toggles = self.toggles_of(test)
        if toggles == self._engine.toggles:
            return self._engine
        if self._variant is None or self._variant.toggles != toggles:
            self.close()
            self._variant = self._engine.variant(self._wanted(test))
        return self._variant

    @property
    def counters(self) -> dict[str, int]:
        """The sums of the counters of the engine and its variants."""
        found = Counter(self._engine.counters)
        found.update(self._closed)
        if self._variant is not None:
            found.update(self._variant.counters)
        return dict(found)

    def close(self) -> None:
        """Closes the variant; the owner of the engine closes the engine."""
        if self._variant is not None:
            self._closed.update(self._variant.counters)
            self._variant.close()
            self._variant = None


def _new_run(
    engine: Engine, tests: Sequence[Workload], repetitions: int, seed: int, name: str
) -> dict[str, Any]:
    arm = new_arm(ARM, engine.toggles.to_dict(), sync_mode=engine.sync_mode)
    names, found = [test.name for test in tests], provenance.collect(engine)
    made = new_run("bench", name, name, found, [arm], names, repetitions, seed)
    made["result"] |= {"warm_up": {}, "until": None, "sides": {}, "sessions": [session_of(made)]}
    return made


class _Before(NamedTuple):
    """Measurements of a run's earlier sessions.

    samples: the repetitions by test.
    counters: the engine's.
    most: the largest number of repetitions of a test.
    """

    samples: dict[str, list[Sample]]
    counters: dict[str, int]
    most: int


NOTHING = _Before({}, {}, 0)


def _take_over(earlier: Run, run: dict[str, Any], trials: Trials, out: Path) -> _Before:
    """Makes `run` continue `earlier`. Raises UsageError as `check_same`."""
    check_same(earlier.run, run, out)
    take_over(earlier.run, run)
    trials.take_over(earlier, [ARM])
    arm = earlier.run["arms"][0]
    run["arms"][0]["program"] = arm["program"]
    samples: dict[str, list[Sample]] = {}
    for (test, _), part in earlier.samples.groupby(["test", "repetition"], sort=False):
        ns, n = part["ns"].to_numpy(), part["n_tokens"].to_numpy().astype(np.int64)
        samples.setdefault(str(test), []).append(Sample(int(ns.sum()), ns, n, NO_LOGITS))
    return _Before(samples, arm["counters"], max(map(len, samples.values()), default=0))


def describe_engine(
    engine: Engine, test: Workload, commit: dict[str, Any], build: str | None = None
) -> dict[str, Any]:
    """The fields of a row that are known before the test is measured; also n_kv_max, for
    `batched`."""
    model, gpu = engine.model, is_gpu(engine.device)
    cuda_names = ", ".join(str(g["name"]) for g in provenance.gpus())
    return _OFF | {
        "build_commit": build or commit["hash"][:8],
        "build_number": commit["number"],
        "cpu_info": provenance.cpu_name(),
        "gpu_info": (cuda_names or engine.backend.description) if gpu else "",
        "backends": DEVICES[engine.device].peer_name or engine.device,
        "model_filename": str(model.path),
        "model_type": model_type(model),
        "model_size": sum(t.nbytes for t in model.weights),
        "model_n_params": model.n_params,
        "n_kv_max": engine.config.n_ctx,
        "n_batch": engine.config.n_ubatch,
        "n_ubatch": engine.config.n_ubatch,
        "n_threads": engine.config.threads or usable_cores(),
        "type_k": engine.config.cache_type_k,
        "type_v": engine.config.cache_type_v,
        "n_gpu_layers": _gpu_layers(engine),
        "devices": engine.device,
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.n_depth,
        "test_time": provenance.utc_now(),
    }


def _gpu_layers(engine: Engine) -> int:
    """The number that was given; else every layer and the output. The host device has none."""
    if engine.device == HOST:
        return 0
    given = engine.config.n_gpu_layers
    return engine.model.n_layer + 1 if given < 0 else given


def model_type(model: Model) -> str:
    """`llama 1B Q4_0`: architecture, size and type, as of `llama_model_desc`."""
    n = model.n_params
    size = f"{n / 1e9:.0f}B" if n >= 0.95e9 else f"{n / 1e6:.0f}M" if n >= 0.95e6 else "?B"
    return f"{model.architecture} {size} {model.quant}"
