"""The share of the memory's bandwidth that the products of a model reach: `workbench
bench-kernels`.

Each measurement is one weight type, shape and batch (`kernel_cases.py`). Caches are cold: launches
rotate over copies of the weights that together have more than four times the size of the last
cache. A *replay* is a series of launches over one copy after the other, timed as a whole; each
device replays in its best way (`kernel_rigs.py`). The time of a replay divided by its number of
launches is one sample. Plain and programmatic launches (`pdl`) alternate, ABBA. The read bandwidth
of the memory is measured in the same run, as the best of several reading kernels.

The run folder has kind `kernels` (`runs/results.py`). An arm is a way to launch, a test is a
measurement: `Q4_0 8b.o b1`. In samples.parquet a row is a replay, and `n_tokens` is how often it
reads all weights of the shape. `result` has the rows of the table (`KernelRow`), the skipped
measurements with reasons, and

    read_gbps     the read bandwidth: the fastest replay of the fastest reading kernel
    read_rates    the fastest replay of each reading kernel
    read_after    the same as read_rates after all measurements: shows the device's drift
    void          why the run is not valid; empty where it is valid
    cache_bytes, rotating_bytes, how, quick
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.backend import compiled
from workbench.backend.base import Backend
from workbench.benchmarks.compare.rounds import interleave
from workbench.benchmarks.kernels.kernel_cases import KernelCase, WeightShape
from workbench.benchmarks.kernels.kernel_memory import Copies, Launches
from workbench.benchmarks.kernels.kernel_rigs import PDL, Repeats, Rig, rig_of, rotating_bytes
from workbench.benchmarks.runs import provenance, results
from workbench.benchmarks.runs.draft import Draft, kept, new_arm, new_run
from workbench.common.errors import UsageError
from workbench.common.output import check_folder
from workbench.common.progress import Bar, bar
from workbench.engine.look.nvtx_ranges import OFF, NoRanges
from workbench.graph import ops
from workbench.graph.ir import DType

ROUNDS, REPLAYS = 5, 3  # rounds over the ways to launch, replays of each in a round
QUICK_ROUNDS, QUICK_REPLAYS = 2, 1


@dataclass(frozen=True)
class KernelMatrix:
    """The measurements: every type by every shape by every batch. quick: a trial run, too short and
    with too warm caches for valid figures."""

    types: Sequence[DType]
    shapes: Sequence[WeightShape]
    batches: Sequence[int]
    quick: bool = False
    seed: int = 0

    @property
    def cases(self) -> list[KernelCase]:
        return [KernelCase(dtype, shape) for shape in self.shapes for dtype in self.types]

    def to_dict(self) -> dict[str, Any]:
        return {
            "types": [dtype.name for dtype in self.types],
            "shapes": [shape.name for shape in self.shapes],
            "batches": list(self.batches),
            "quick": self.quick,
        }


class KernelRow(NamedTuple):
    """One measurement of one way to launch.

    rows: of all weights together.
    us, us_min: time of the launches that read the shape's weights once: median, and minimum.
    spread: (slowest - fastest) / median replay.
    share: of the read bandwidth, by the median.
    intensity: arithmetic operations per byte of weights.
    """

    type: str
    shape: str
    rows: int
    cols: int
    batch: int
    launch: str
    us: float
    us_min: float
    spread: float
    gbps: float
    share: float
    gflops: float
    intensity: float
    bytes: int
    launches: int  # nodes for one activation
    copies: int  # of the weights
    per_replay: int  # how often one replay reads the weights
    replays: int

    def __str__(self) -> str:
        """`Q4_0 8b.o batch 1 pdl: 4.20 us, 2246.3 GB/s, 72.5 % of the read bandwidth`"""
        return (
            f"{self.type} {self.shape} batch {self.batch} {self.launch}: {self.us:.2f} us, "
            f"{self.gbps:.1f} GB/s, {100 * self.share:.1f} % of the read bandwidth"
        )


class KernelRun(NamedTuple):
    """A finished or interrupted run: `run.json` as a dict, and the samples."""

    run: dict[str, Any]
    samples: pd.DataFrame

    @property
    def rows(self) -> list[KernelRow]:
        return [KernelRow(**row) for row in self.run["result"]["rows"]]

    @property
    def interrupted(self) -> bool:
        return self.run["status"] == results.INTERRUPTED

    @classmethod
    def load(cls, folder: str | Path) -> KernelRun:
        """Reads a run folder of kind `kernels`; raises UsageError for any other folder."""
        found = results.load_run(folder)
        if found.run["kind"] != "kernels":
            raise UsageError(f"{folder} is a run of kind {found.run['kind']!r}, not 'kernels'")
        return cls(found.run, found.samples)


def bench_kernels(
    backend: Backend,
    matrix: KernelMatrix,
    out: str | Path | None = None,
    *,
    reason: str = "as asked",
    rig: Rig | None = None,
    on_row: Callable[[KernelRow], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    ranges: NoRanges = OFF,
) -> KernelRun:
    """Measures `matrix` on an open backend.

    out: a run folder, written whole at the end and every 10 s on the way.
    reason: why this device was chosen.
    rig: replaces the device's own rig.
    on_row(row): called as soon as a row is measured.
    on_note(line): called with each note on the run.
    ranges: NVTX ranges; each measurement has a range in each round.

    Ctrl-C ends the measuring: finished rows are saved and returned, marked interrupted. They are
    saved, too, when the device fails, before the error is raised. Raises UsageError where nothing
    is left to measure or `out` exists.
    """
    if out is not None:
        check_folder(out, new=True)
    folder = Path(out) if out else None
    return _Bench(backend, matrix, folder, reason, rig, on_row, on_note, ranges).measure()


class _Bench:
    """The state of one call of `bench_kernels`."""

    def __init__(
        self,
        backend: Backend,
        matrix: KernelMatrix,
        out: Path | None,
        reason: str,
        rig: Rig | None,
        on_row: Callable[[KernelRow], None] | None,
        on_note: Callable[[str], None] | None,
        ranges: NoRanges,
    ):
        self.backend, self.matrix, self.ranges = backend, matrix, ranges
        self.rig = rig or rig_of(backend, matrix.quick)
        self.on_row, self.note = on_row, on_note or (lambda line: None)
        self.rotating = rotating_bytes(self.rig.cache_bytes, matrix.quick)
        self.rounds = QUICK_ROUNDS if matrix.quick else ROUNDS
        self.replays = QUICK_REPLAYS if matrix.quick else REPLAYS
        self.cases = [case for case in matrix.cases if not case.misfit]
        if not self.cases:
            raise UsageError(f"nothing to measure: {matrix.cases[0].misfit}; choose another type")
        run_id = (out or results.new_run_folder(name="bench-kernels")).name
        self.draft = Draft(self._new_run(run_id, reason), out, new=True)
        self.result = self.draft.run["result"]

    def _new_run(self, run_id: str, reason: str) -> dict[str, Any]:
        matrix, backend = self.matrix, self.backend
        found = provenance.collect() | {
            "model": {"name": "kernels", "quant": " ".join(dtype.name for dtype in matrix.types)},
            "engine": provenance.device(matrix.to_dict(), backend.name, reason, backend)
            | {"nvtx": self.ranges.words},
        }
        toggles = {kind: {"pdl": "on" if kind == PDL else "off"} for kind in self.rig.kinds}
        arms = [new_arm(kind, toggles[kind]) for kind in self.rig.kinds]
        tests = [_test(case, batch) for case in self.cases for batch in matrix.batches]
        made = new_run("kernels", run_id, run_id, found, arms, tests, self.rounds, matrix.seed)
        made["result"] |= {
            "rows": [],
            "skipped": [
                {"type": case.dtype.name, "shape": case.shape.name, "why": case.misfit}
                for case in matrix.cases
                if case.misfit
            ],
            "read_gbps": 0.0,
            "read_rates": {},
            "read_after": {},
            "void": "",
            "cache_bytes": self.rig.cache_bytes,
            "rotating_bytes": self.rotating,
            "how": self.rig.how,
            "quick": matrix.quick,
        }
        return made

    def measure(self) -> KernelRun:
        with kept(self.draft):
            for left_out in self.result["skipped"]:
                self.note("skipped {type} {shape}: {why}".format(**left_out))
            self._prepare()
            rates = self.result["read_rates"] = self.rig.read_rates()
            best = max(rates, key=rates.__getitem__)
            self.result["read_gbps"] = rates[best]
            self.note(f"read bandwidth {rates[best]:.1f} GB/s ({best}, the best of {len(rates)})")
            self.result["void"] = self.rig.void(rates[best])
            if self.result["void"]:
                self.note(self.result["void"])
            with bar("kernels", len(self.cases) * len(self.matrix.batches), "measurements") as left:
                for case in self.cases:
                    self._measure_case(case, left)
            self.result["read_after"] = self.rig.read_rates()
            self.result["state_after"] = provenance.state()
        return KernelRun(self.draft.run, self.draft.samples.frame())

    def _prepare(self) -> None:
        before = compiled.so_far()
        nodes = [
            node
            for case in self.cases
            for batch in self.matrix.batches
            for node in case.nodes(case.weights(), batch)
        ]
        with bar("compiling kernels", len(nodes), "launches", alike=False) as left:
            self.backend.make_ready(nodes, left)
        if (new := compiled.so_far().since(before)).ns > compiled.WORTH_SAYING_NS:
            self.note(str(new))

    def _measure_case(self, case: KernelCase, left: Bar) -> None:
        weights = Copies(self.backend, case, self.rotating, self.matrix.seed)
        try:
            for batch in self.matrix.batches:
                for row in self._measure_batch(case, weights, batch):
                    self.result["rows"].append(row._asdict())
                    if self.on_row is not None:
                        self.on_row(row)
                left.update()
                self.draft.checkpoint()
        finally:
            weights.free()

    def _measure_batch(self, case: KernelCase, weights: Copies, batch: int) -> list[KernelRow]:
        nodes = case.nodes(weights.tensors, batch)
        launched = Launches(self.backend, nodes, weights, self.matrix.seed)
        n_copies = len(weights.addresses)
        times_round = max(
            math.ceil(self.rig.pass_bytes / (n_copies * case.nbytes)),
            math.ceil(self.rig.least_launches / (n_copies * len(nodes))),
        )
        early = all(self.backend.begins_early(node) for node in nodes)
        kinds = [kind for kind in self.rig.kinds if kind != PDL or early]
        repeats: list[Repeats] = []
        try:
            for kind in kinds:
                issues = launched.issues(programmatic=kind == PDL)
                repeats.append(self.rig.repeats(issues * times_round))
            us: list[list[float]] = [[] for _ in kinds]

            def measure(round_: int, i: int) -> None:
                name = f"{_test(case, batch)} {kinds[i]}"
                with self.ranges.scope(name, "case", round_):
                    taken = repeats[i].time_us(self.replays)
                us[i] += [t / (n_copies * times_round) for t in taken]
                self.draft.samples.add(
                    kinds[i], False, _test(case, batch), round_,
                    np.rint(np.array(taken) * 1e3).astype(np.int64),
                    np.full(len(taken), n_copies * times_round, np.int64),
                )  # fmt: skip

            interleave(range(self.rounds), len(kinds), measure)
        finally:
            for one in repeats:
                one.close()
            launched.free()
        flops = sum(ops.flops(node) for node in nodes)
        return [
            make_row(
                case, batch, kind, np.array(found), flops, self.result["read_gbps"],
                launches=len(nodes), copies=n_copies, per_replay=n_copies * times_round,
            )
            for kind, found in zip(kinds, us, strict=True)
        ]  # fmt: skip


def make_row(
    case: KernelCase,
    batch: int,
    launch: str,
    us: np.ndarray,
    flops: int,
    read_gbps: float,
    *,
    launches: int,
    copies: int,
    per_replay: int,
) -> KernelRow:
    """The row of one measurement. us: float64 (replays,), the time for reading the weights of the
    case once, by replay."""
    median = float(np.median(us))
    gbps = case.nbytes / median / 1e3
    return KernelRow(
        case.dtype.name, case.shape.name, sum(case.shape.rows), case.shape.cols, batch, launch,
        us=median, us_min=float(us.min()), spread=float(np.ptp(us)) / median,
        gbps=gbps, share=gbps / read_gbps, gflops=flops / median / 1e3,
        intensity=flops / case.nbytes, bytes=case.nbytes, launches=launches, copies=copies,
        per_replay=per_replay, replays=len(us),
    )  # fmt: skip


def _test(case: KernelCase, batch: int) -> str:
    return f"{case.dtype.name} {case.shape.name} b{batch}"
