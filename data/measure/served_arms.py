"""Loads that a measuring command gives to engine processes and servers, point by point.

A point is one setting of one arm in one round: requests are kept in flight until all have ended.
`samples.parquet` has a row for each point: its generated tokens, and the ns of all its requests.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from data.measure.in_rounds import Recording
from workbench.backend.base import open_backend
from workbench.benchmarks.runs import provenance
from workbench.traffic.bench import BenchSpec, ServedRow, finite, serve_bench
from workbench.traffic.load import CLOSED, Arrivals
from workbench.traffic.served import model_facts
from workbench.traffic.targets import LoadTarget

KEPT = (
    "completed", "failed", "duration", "total_input_tokens", "total_output_tokens",
    "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms",
    "mean_e2el_ms", "tokens_per_chunk",
)  # fmt: skip


class Point(NamedTuple):
    """A setting.

    test: its name.
    n_in_flight: requests in flight together.
    spec: the requests.
    """

    test: str
    n_in_flight: int
    spec: BenchSpec


def offer(target: LoadTarget, point: Point) -> ServedRow:
    """Offers a point's load to a target, and returns its figures."""
    return serve_bench(target, [Arrivals(CLOSED, point.n_in_flight)], point.spec).rows[0]


def about_engine(path: Path, device: str) -> dict[str, Any]:
    """The facts of a run about the machine, the model, and an engine of another process."""
    with contextlib.closing(open_backend(device)) as backend:
        engine = {"device": device, "device_description": backend.description}
    return provenance.collect() | {"model": model_facts(path), "engine": engine}


def measure(
    recording: Recording, arm: str, round_: int, target: LoadTarget, point: Point
) -> ServedRow:
    """Offers a point's load, and adds its figures to the `points` of the run's result."""
    row = offer(target, point)
    entry = {"arm": arm, "test": point.test, "round": round_, "in_flight": point.n_in_flight}
    figures = {name: row.figures[name] for name in KEPT}
    recording.result["points"].append(entry | finite(figures) | {"client": row.client})
    n_generated = row.figures["total_output_tokens"]
    add_load(recording, arm, round_, point.test, row.figures["duration"], n_generated)
    return row


def add_load(
    recording: Recording, arm: str, round_: int, test: str, seconds: float, n_generated: float
) -> None:
    """Adds a sample: the generated tokens, and the seconds that they took with their prompts."""
    recording.add(arm, test, round_, [seconds * 1e9], [n_generated])


class ProcessTime(NamedTuple):
    """The processes of a server except the engine's.

    cpu_s: their CPU time, s.
    n_fronts: their number.
    """

    cpu_s: float
    n_fronts: int


def front_time(pid: int) -> ProcessTime | None:
    """The time of a server's processes: the first, and those that it began. The process with the
    most memory is taken for the engine's. None without /proc."""
    tree = [pid]
    for other in tree:
        tree += children_of(other)
    try:
        stats = {each: Path(f"/proc/{each}/stat").read_text() for each in tree}
        words = {each: Path(f"/proc/{each}/cmdline").read_text() for each in tree}
    except OSError:
        return None
    fields = {each: stat.rpartition(")")[2].split() for each, stat in stats.items()}
    others = [each for each in tree if "resource_tracker" not in words[each]]
    engine = max(others, key=lambda each: int(fields[each][21])) if len(others) > 1 else None
    fronts = [each for each in others if each != engine]
    ticks = sum(int(fields[each][11]) + int(fields[each][12]) for each in fronts)
    return ProcessTime(ticks / os.sysconf("SC_CLK_TCK"), len(fronts))


def children_of(pid: int) -> set[int]:
    """The processes that a process has begun and that have not ended; empty without /proc."""
    found = set[int]()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found |= {int(each) for each in (task / "children").read_text().split()}
    return found
