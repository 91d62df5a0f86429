"""What the hardware counts while products run, for data/results: DEVICE-counters.json.

Nsight Compute (`ncu`) runs this module as a child. The child launches each case plainly, on one
copy of its weights after the other. ncu empties the caches before each launch, leaves the clocks
alone, and repeats a launch until it has read every counter. The quickest kernels that only read as
many bytes are counted, too: they show what memory gives to so short a launch.

    cases   for each: type, shape, batch, bytes of weights, kernel; us; the counters of COUNTERS
            that the device has, as percentages of what the device can do while the kernel runs;
            stalls: cycles that a warp waited between two instructions by reason, the most first

All figures are medians over LAUNCHES launches. A launch that stands alone takes more us than in a
graph.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.measure.binds import READ
from data.measure.launches import fastest_reads, reading
from data.measure.matrix import Row
from data.measure.session import ROOT, Session, memory
from workbench.backend.base import open_backend
from workbench.benchmarks.kernels.kernel_cases import SHAPES, TYPES, KernelCase, WeightShape
from workbench.benchmarks.kernels.kernel_memory import Copies, Launches
from workbench.benchmarks.runs import provenance
from workbench.common.progress import bar
from workbench.graph.ir import Node
from workbench.program.commands import COMPUTE_STREAM, Space

LAUNCHES = 2  # counted launches of each case; one more comes before them
LIMIT_S, MOST_TRIES = 75, 5  # seconds of one run of ncu; runs to find the metrics that it has
MODULE = "data.measure.counters"

# gate alone; `bench-kernels` launches it within gate_up
GATE = SHAPES["8b.gate_up"]
ALL_SHAPES = SHAPES | {"8b.gate": WeightShape("8b.gate", GATE.rows[:1], GATE.cols)}
FILES = ("product", "tensor_product")  # source files of the counted kernels
# shape -> types, batches
FEW = {
    "8b.gate": (("Q4_0", "Q4_K", "Q5_K", "MXFP4"), (1,)),
    "8b.glu": (("Q4_0", "Q4_K", "Q5_K", "MXFP4"), (1,)),
    "8b.o": (("Q4_K", "MXFP4"), (1,)),
}
MANY = {
    "8b.glu": (("Q4_0", "Q8_0"), (16, 64, 128)),
    "8b.down": (("Q4_0", "Q8_0"), (16, 64, 128)),
}
QUICK = {"qwen3-30b-a3b.gate": (("Q4_0",), (1, 16))}

# figure of a launch -> its metrics; the first metric that the device has is taken
COUNTERS: dict[str, tuple[str, ...]] = {
    "us": ("gpu__time_duration.sum",),
    "dram_bytes": ("dram__bytes_read.sum",),
    "memory_pct": ("dram__throughput.avg.pct_of_peak_sustained_elapsed",
                   "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct",),
    "instructions": ("sm__inst_executed.sum", "smsp__inst_executed.sum"),
    "issue_pct": ("sm__issue_active.avg.pct_of_peak_sustained_elapsed",
                  "smsp__issue_active.avg.pct_of_peak_sustained_elapsed"),
    "alu_pct": ("sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_elapsed",
                "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_elapsed"),
    "fma_pct": ("sm__pipe_fmaheavy_cycles_active.avg.pct_of_peak_sustained_elapsed",
                "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_elapsed"),
    "lsu_pct": ("sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_elapsed",),
    "tensor_pct": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
                   "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed"),
    "active_pct": ("sm__cycles_active.avg.pct_of_peak_sustained_elapsed",),
    "warps_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "registers": ("launch__registers_per_thread",),
}  # fmt: skip
# reasons for which a warp that could not issue waited, as sm_90 names them
REASONS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle",
    "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction",
    "not_selected", "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
KEPT_STALLS = 3
Launched = dict[str, str]  # a launch in ncu's log, by column; times in ns, sizes in bytes


class NoCounters(Exception):
    """There are no counters; the message says why, in one line."""


class Counted(NamedTuple):
    """A launch that is counted.

    type: the weights' type, or READ.
    shape: the shape of a product, or the label of a reading kernel.
    bytes: bytes of weights that it reads.
    kernel: the function that is counted.
    """

    type: str
    shape: str
    batch: int
    bytes: int
    kernel: str

    @property
    def case(self) -> KernelCase:
        dtype = next(dtype for dtype in TYPES if dtype.name == self.type)
        return KernelCase(dtype, ALL_SHAPES[self.shape])

    def nodes(self) -> list[Node]:
        return self.case.nodes(self.case.weights(), self.batch)


def products(quick: bool) -> list[Counted]:
    """The products of FEW and MANY, each with the one of its kernels that is counted."""
    from workbench.backend.cuda.kernels import op_table
    from workbench.backend.cuda.kernels.kernel import Kernel

    nowhere, found = op_table.Operands(lambda tensor: 0, 0, 0), []
    for table in (QUICK,) if quick else (FEW, MANY):
        for shape, (types, batches) in table.items():
            for dtype, batch in product(types, batches):
                one = Counted(dtype, shape, batch, 0, "")
                works = [w for node in one.nodes() for w in op_table.launches(node, nowhere)]
                (kernel,) = (w for w in works if isinstance(w, Kernel) and w.file in FILES)
                found.append(one._replace(bytes=one.case.nbytes, kernel=kernel.function))
    return found


def figures(launch: Launched) -> dict[str, Any]:
    """Every counter of COUNTERS that was counted (times in us, sizes in bytes), and every stall."""
    found: dict[str, Any] = {}
    for key, metrics in COUNTERS.items():
        for metric in metrics:
            if (value := number(launch, metric)) is not None:
                found[key] = value / 1e3 if key == "us" else value
                break
    stalls = {reason: number(launch, STALL.format(reason)) for reason in REASONS}
    return found | {"stalls": {reason: v for reason, v in stalls.items() if v is not None}}


def summary(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the figures of some launches, the KEPT_STALLS longest stalls, and the number of
    launches."""
    found: dict[str, Any] = {"launches": len(each)}
    for key in COUNTERS:
        values = [one[key] for one in each if key in one]
        if values:
            found[key] = round(float(np.median(values)), 3)
    stalls = {
        reason: round(float(np.median([one["stalls"].get(reason, 0.0) for one in each])), 3)
        for reason in dict.fromkeys(r for one in each for r in one["stalls"])
    }
    longest = sorted(stalls, key=lambda reason: -stalls[reason])[:KEPT_STALLS]
    return found | {"stalls": {reason: stalls[reason] for reason in longest}}


def find_ncu() -> Path | None:
    """The path of ncu: on the PATH, or in an installed CUDA toolkit."""
    paths = [Path(shutil.which("ncu") or "ncu"), Path("/usr/local/cuda/bin/ncu")]
    return next((path for path in paths if path.is_file()), None)


def command(
    tool: Path, metrics: Sequence[str], functions: Iterable[str], log: Path, child: Sequence[str]
) -> list[str]:
    """The command line with which `tool` counts the launches of `functions` that `child` makes
    between cuProfilerStart and cuProfilerStop. ncu writes to `log`."""
    wanted = "|".join(sorted(set(functions)))
    return [
        str(tool), "--clock-control", "none", "--cache-control", "all", "--target-processes", "all",
        "--profile-from-start", "off", "--kernel-name-base", "function",
        "--kernel-name", f"regex:^({wanted})$", "--metrics", ",".join(metrics),
        "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log), *child,
    ]  # fmt: skip


def launches_counted(log: str) -> list[Launched]:
    """The launches in ncu's log, each as column to value and unit. The log has a line of names, a
    line of units, and a line for each launch; other lines are passed over."""
    table = [line for line in log.splitlines() if not line.startswith("==")]
    begin = next((i for i, line in enumerate(table) if line.startswith('"ID"')), len(table))
    rows = list(csv.reader(table[begin:]))
    if len(rows) < 3:
        return []
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:] if len(row) == len(rows[0])]


def number(launch: Launched, metric: str) -> float | None:
    """The value of a metric (`1,234.5`); None where it is no finite number (`n/a`, `nan`)."""
    try:
        found = float(launch.get(metric, "").replace(",", ""))
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def refusal(log: str, output: str) -> str:
    """The line that says why not all launches were counted: ncu's own error, or the child's last
    line."""
    errors = re.findall(r"^==ERROR== (.*\S)", log + "\n" + output, re.MULTILINE)
    own = [line for line in errors if "application returned" not in line]
    lines = [line for line in output.strip().splitlines() if not line.startswith("==")]
    return next(iter(own or lines[-1:] or errors), "ncu gave no reason")


def counters(session: Session, _: None, rows: list[Row]) -> None:
    """Writes DEVICE-counters.json. Where there is no ncu, or ncu may not count, a line says so."""
    tool = find_ncu()
    if session.device != "cuda":
        print("counters: a GPU alone has them; left out", flush=True)
        return
    if tool is None:
        print("counters: no ncu on the PATH nor in /usr/local/cuda/bin; left out", flush=True)
        return
    chosen = products(session.quick)
    with closing[Any](open_backend("cuda")) as backend:
        found: dict[str, Any] = {"device_description": backend.description, "quick": session.quick}
        found |= session.rates(backend)
        sizes = sorted({one.bytes for one in chosen if one.batch == 1})
        reads = [
            Counted(READ, row["kernel"], 1, row["bytes"], row["kernel"].split()[0])
            for row in fastest_reads(backend, sizes, session.quick)
        ]
        nodes = [node for one in chosen for node in one.nodes()]
        with bar("compiling kernels", len(nodes), "launches") as left:
            backend.make_ready(nodes, left)
    try:
        metrics = available(tool, reads[:1])
        cases = count(tool, metrics, [*reads, *chosen])
    except NoCounters as why:
        print(f"counters: {why}; left out", flush=True)
        return
    version = subprocess.run([str(tool), "--version"], capture_output=True, text=True, check=False)
    found |= {"ncu": (version.stdout.strip().splitlines() or [""])[-1], "metrics": metrics}
    session.write(rows[0], provenance.collect() | found | {"cases": cases})
    for case in cases:
        name = f"{case['type']} {case['shape']} batch {case['batch']}, {case['bytes'] / 1e6:.1f} MB"
        values = ", ".join(f"{key} {case[key]:g}" for key in COUNTERS if key in case)
        stalls = ", ".join(f"{reason} {cycles:.1f}" for reason, cycles in case["stalls"].items())
        print(f"counters: {name}: {values}; {stalls}", flush=True)


def available(tool: Path, small: Sequence[Counted]) -> list[str]:
    """The metrics that ncu can count here: the first of each figure in COUNTERS, and the stalls.
    Found by counting one small launch. ncu may refuse several metrics before it counts any."""
    stalls = [STALL.format(reason) for reason in REASONS]
    metrics = [*(m for names in COUNTERS.values() for m in names), *stalls]
    for _ in range(MOST_TRIES):
        log, output, rows = run(tool, metrics, small)
        if rows:
            there = [m for m in metrics if number(rows[0], m) is not None]
            firsts = (next((m for m in names if m in there), "") for names in COUNTERS.values())
            return [*filter(None, firsts), *(m for m in stalls if m in there)]
        complaints = re.findall(r"^==(?:ERROR|WARNING)== .*$", f"{log}\n{output}", re.MULTILINE)
        absent = [
            m for m in metrics
            if re.search(rf"(?<![\w.]){re.escape(m)}(?!\.?\w)", " ".join(complaints))
        ]  # fmt: skip
        if not absent:
            raise NoCounters(f"ncu counts nothing: {refusal(log, output)}")
        metrics = [m for m in metrics if m not in absent]
    raise NoCounters(f"ncu does not know {', '.join(absent)}")


def count(tool: Path, metrics: Sequence[str], chosen: Sequence[Counted]) -> list[dict[str, Any]]:
    """The cases of the module's docstring, in the order of their launches."""
    log, output, rows = run(tool, metrics, chosen)
    n = LAUNCHES * len(chosen)
    if len(rows) != n:
        raise NoCounters(f"ncu counted {len(rows)} launches of {n}: {refusal(log, output)}")
    cases = []
    for i, one in enumerate(chosen):
        own = rows[LAUNCHES * i : LAUNCHES * (i + 1)]
        names = {row.get("Kernel Name", "").partition("(")[0] for row in own}
        if names != {one.kernel}:
            raise NoCounters(f"ncu counted {', '.join(sorted(names))} in place of {one.kernel}")
        cases.append(one._asdict() | summary([figures(row) for row in own]))
    return cases


def run(
    tool: Path, metrics: Sequence[str], chosen: Sequence[Counted]
) -> tuple[str, str, list[Launched]]:
    """ncu's log, the other output of ncu and the child, and the counted launches."""
    with tempfile.TemporaryDirectory() as folder:
        log, asked = Path(folder) / "ncu.csv", Path(folder) / "cases.json"
        asked.write_text(json.dumps(list(chosen)))
        child = [sys.executable, "-m", MODULE, "--child", str(asked)]
        process = subprocess.Popen(
            command(tool, metrics, (one.kernel for one in chosen), log, child), cwd=ROOT, text=True,
            start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the child too
            process.communicate()
            raise NoCounters(f"ncu took more than {LIMIT_S} s") from None
        text = log.read_text() if log.is_file() else ""
    return text, output, launches_counted(text)


def launch_all(backend: Any, chosen: Sequence[Counted]) -> None:
    """Launches each case once, and then LAUNCHES times between cuProfilerStart and cuProfilerStop,
    on one copy of its weights after the other."""
    n_sm, stream = (
        backend._driver.properties["multiProcessorCount"],
        backend._stream(COMPUTE_STREAM),
    )
    for one in chosen:
        with ExitStack() as stack:
            if one.type == READ:
                blocks = ((n, Space.DEVICE) for n in (4, one.bytes, one.bytes))
                sink, *copies = stack.enter_context(memory(backend, *blocks))
                works = [
                    reading(one.shape, c.address, one.bytes, sink.address, n_sm) for c in copies
                ]
                issues = [backend._prepare(work, stream, one.shape) for work in works]
            else:
                weights = Copies(backend, one.case, 1, 0)
                stack.callback(weights.free)
                launched = Launches(backend, one.case.nodes(weights.tensors, one.batch), weights, 0)
                stack.callback(launched.free)
                stack.callback(backend.synchronize)
                issues = launched.issues(programmatic=False)
            issues[-1]()
            backend.synchronize()
            backend._driver.call("cuProfilerStart", "counters")
            for i in range(LAUNCHES):
                issues[i % len(issues)]()
            backend.synchronize()
            backend._driver.call("cuProfilerStop", "counters")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--child":
        sys.exit("error: this runs under ncu; use python -m data.measure counters")
    with closing(open_backend("cuda")) as opened:
        launch_all(opened, [Counted(*one) for one in json.loads(Path(sys.argv[2]).read_text())])
