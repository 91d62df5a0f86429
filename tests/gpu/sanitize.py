"""Runs parts of the GPU tests under compute-sanitizer: `python -m tests.gpu.sanitize [--out FILE]`.

What runs under which tool, and why, is the table below; shapes are small, for kernels are slow
there. First the whole of it runs without a tool, which compiles the kernels and shows that the
tests pass; last come the poisoned repetitions: no tool sees ordering through global memory.

Writes data/results/gpu-sanitizer.json (or FILE): date, device, driver, the tool's version, hash of
the sources (`data/measure/sources.py`), and for each run tests, errors and seconds. Exits with
1 where a tool reports anything or a test fails, and with 2 where there is no compute-sanitizer.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from data.measure.sources import ROOT, source_hash
from workbench.backend.cuda.device.backend import probe
from workbench.common.errors import WorkbenchError
from workbench.common.output import write_text

PYTEST = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
OUT = ROOT / "data" / "results" / "gpu-sanitizer.json"
LIMIT_S = 480  # for everything


class Entry(NamedTuple):
    node: str  # as pytest names tests
    why: str


# tools, a file and a test of it, and why
_EVERY, _BOTH = "memcheck racecheck synccheck", "racecheck synccheck"
_ROWS = (
    ("memcheck", "debug_arena", "steps[exact-*]", "whole steps, each tensor just its bytes, fused "
     "and not, cuBLAS included; freed after the last use"),
    ("memcheck", "debug_arena", "alone[exact-*]", "every op, weight type and fused node; no "
     "multiples of a tile; shares, and partial sums combined by the last block"),
    ("initcheck", "debug_arena", "steps[bare-*-few]", "memory that only kernels wrote"),
    ("initcheck", "debug_arena", "steps[bare-tiny-llama-Q4_0-*-many]", "tiles of tensor_product"),
    ("initcheck", "debug_arena", "steps[bare-*-most]", "its tallest tiles, gate and up with them"),
    ("initcheck", "debug_arena", "alone[bare-every op]", "every op, weight type and fused node"),
    ("initcheck racecheck", "debug_arena", "alone[{mode}-quantised *]", "padding of "
     "converted rows; shared tiles, several stages in flight"),
    (f"initcheck {_BOTH}", "debug_arena", "alone[{mode}-attention *]", "shares with "
     "nothing to combine; shared tiles; barriers of shares of other lengths"),
    (f"initcheck {_BOTH}", "debug_arena", "alone[{mode}-split *]", "partial sums in "
     "scratch; counters; the flag that says which block is the last"),
    (_BOTH, "debug_arena", "steps[guarded-tiny-llama-Q4_0-fused-few]", "epilogues of product"),
    (_BOTH, "debug_arena", "steps[guarded-tiny-llama-Q4_0-fused-most]", "results of the tallest "
     "tiles quantised in shared memory; registers handed over"),
    (_BOTH, "debug_arena", "steps[guarded-tiny-qwen3-Q4_K-fused-few]", "heads normed through the "
     "shared memory of a cluster, bulk copies"),
    (_BOTH, "debug_arena", "steps[guarded-tiny-qwen3-Q4_K-fused-many]", "rope_store, norms, "
     "barriers of the warps of a tile that multiply"),
    ("synccheck", "debug_arena", "steps[guarded-tiny-qwen3-Q4_K-fused-most]", "tallest tiles"),
    ("memcheck", "overlap", "a_step_that_notes_computes_the_same_bits[*any, in a plan*]",
     "branches of a graph on several streams, where each kernel notes its begin and end"),
    (_BOTH, "overlap", "a_step_that_notes_computes_the_same_bits[*inside bran*]",
     "products that note, after their own barriers"),
    (_EVERY, "attention_ways", "it_is_its_twin_and_skipping_changes_no_bit[odd-*]", "sequences "
     "with cells of their own, every way to share the cells and to leave masked ones out"),
    (_EVERY, "attention_ways", "every_pair_of_types[* Q8_0 BF16 *]", "attention without tensor "
     "cores"),
    (_EVERY, "tiles", "every_build[Q5_K-*]", "builds that only wide weights get"),
    ("memcheck", "backend", "all_types_through_a_ring_that_is_used_again",
     "every repacking kernel, blocks in odd numbers, slots used again"),
)  # fmt: skip
# of tests/gpu/debug_arena.py
MODES = {"memcheck": "exact", "initcheck": "bare", "racecheck": "guarded", "synccheck": "guarded"}
SUBSETS: dict[str, tuple[Entry, ...]] = {
    tool: tuple(
        Entry(f"tests/gpu/test_cuda_{file}.py::test_{test.format(mode=mode)}", why)
        for tools, file, test, why in _ROWS
        if tool in tools
    )
    for tool, mode in MODES.items()
}
# Of every tool: the interpreter and its libraries load before the first call of CUDA.
OPTIONS = ("--error-exitcode", "86", "--target-processes", "all", "--launch-timeout", "60")
# padding beside every allocation; calls that fail raise in the tests themselves
MORE_OPTIONS = {"memcheck": ("--padding", "512", "--report-api-errors", "no")}


class Run(NamedTuple):
    """What came of one run. errors: reported by the tool, None where it gave no summary."""

    tests: int
    errors: int | None
    seconds: float
    exit: int
    clean = property(lambda run: run.exit == 0 and run.errors == 0 and run.tests > 0)


def find_tool() -> Path:
    """compute-sanitizer on the PATH, of an installed CUDA toolkit, or of NVIDIA's wheels. Those
    before 13.5 lack a helper (TreeLauncherSubreaper) without which no target starts."""
    files = [Path(shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer")]
    for folder in sys.path:
        files += Path(folder).glob("nvidia/*/compute-sanitizer/compute-sanitizer")
    if found := next((file for file in files if file.is_file()), None):
        return found
    raise WorkbenchError(
        "compute-sanitizer is neither on the PATH nor in /usr/local/cuda/bin nor a wheel; "
        "pip install 'nvidia-cuda-sanitizer-api>=13.5'"
    )


def collected(nodes: list[str]) -> list[str]:
    """Node ids for `nodes`, in which `*` stands for anything, in pytest's order."""
    files = list(dict.fromkeys(node.partition("::")[0] for node in nodes))
    shown = subprocess.run(
        [*PYTEST, "--collect-only", *files], cwd=ROOT, capture_output=True, text=True
    )
    ids = shown.stdout.splitlines()
    patterns = [re.compile(re.escape(node).replace(r"\*", ".*") + r"(\[.*\])?") for node in nodes]
    for node, pattern in zip(nodes, patterns, strict=True):
        if not any(pattern.fullmatch(i) for i in ids):
            raise SystemExit(f"{node} names no test; {shown.stdout[-300:]}{shown.stderr[-300:]}")
    return [i for i in ids if any(pattern.fullmatch(i) for pattern in patterns)]


def run(tool: str, sanitizer: Path, ids: list[str], limit_s: float) -> Run:
    """Runs `ids` under `tool` (plain: under none); prints what is needed where it is not clean."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        log, under = Path(folder) / "log", list[str]()
        if tool != "plain":
            under = [str(sanitizer), "--tool", tool, "--log-file", str(log), *OPTIONS]
            under += MORE_OPTIONS.get(tool, ())
        try:
            done = subprocess.run(
                [*under, *PYTEST, *ids], cwd=ROOT, timeout=max(limit_s, 1),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            said, status = done.stdout, done.returncode
        except subprocess.TimeoutExpired as late:
            said, status = (late.stdout or b"") + f"\nstopped after {limit_s:.0f} s".encode(), 124
        report = log.read_text(errors="replace") if log.is_file() else ""
    seconds, output = round(time.perf_counter() - start, 1), said.decode(errors="replace")
    # of racecheck hazards, warnings too
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", report)
    errors = sum(map(int, found)) if found else None
    lines = re.findall(r"^[= ]*((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s", output, re.MULTILINE)
    ran = re.findall(r"(\d+) (?:passed|failed|errors?)\b", lines[-1] if lines else "")
    made = Run(sum(map(int, ran)), int(status != 0) if tool == "plain" else errors, seconds, status)
    if not made.clean:
        print(f"--- {tool}: exit {status}", output[-3000:], report[:6000], sep="\n", flush=True)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--tools", nargs="*", choices=list(SUBSETS), default=list(SUBSETS))
    args = parser.parse_args()
    try:
        sanitizer = find_tool()
        device, _, driver = probe().partition(", driver ")
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return 2
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout
    begin = time.perf_counter()
    subsets = {tool: collected([e.node for e in SUBSETS[tool]]) for tool in args.tools}
    passes = {"before": ("plain", list(dict.fromkeys(i for ids in subsets.values() for i in ids)))}
    passes |= {tool: (tool, ids) for tool, ids in subsets.items()}
    passes["repetitions"] = ("plain", ["tests/gpu/test_cuda_repetitions.py"])
    runs: dict[str, Run] = {}
    print(f"{'run':12} {'tests':>6} {'errors':>7} {'seconds':>8}")
    for name, (tool, ids) in passes.items():
        left = LIMIT_S - (time.perf_counter() - begin)
        made = runs[name] = run(tool, sanitizer, ids, left)
        errors = "none told" if made.errors is None else str(made.errors)
        print(f"{name:12} {made.tests:6} {errors:>7} {made.seconds:8.1f}", flush=True)
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "driver": driver,
        "tool": " ".join(re.findall(r"Version \S+", version)),
        "source_hash": source_hash(),
        "runs": {name: made._asdict() for name, made in runs.items()},
        "subsets": {tool: [e._asdict() for e in SUBSETS[tool]] for tool in args.tools},
        "duration_s": round(time.perf_counter() - begin, 1),
    }
    write_text(args.out, json.dumps(record, indent=1) + "\n", parents=True)
    print(f"{record['duration_s']} s of {LIMIT_S} in all; {args.out}")
    return int(not all(made.clean for made in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
