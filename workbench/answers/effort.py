"""How often a notebook repeats what it measures, and how often before it measures.

On a GPU an effect is to be told from noise, on a noisy host, too. A CPU's times only show how it is
done, and a page on a CPU is to come soon.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.benchmarks.compare.stats import MIN_REPETITIONS
from workbench.benchmarks.runs import results
from workbench.benchmarks.runs.results import REQUESTS
from workbench.common.devices import is_gpu
from workbench.engine.engine import Engine
from workbench.traffic.bench import ServeBench

AT_MOST_S = 4.0  # of a comparison on a GPU
GPU_PASSES, CPU_PASSES = 2, 1  # of a load, at most, before it counts
GPU_TURNS, CPU_TURNS = 2, 1  # of loads that are compared


def effort(
    engine: Engine, repeats: int, until: float | str, at_most_s: float = AT_MOST_S
) -> dict[str, Any]:
    """Arguments of `wb.ab`: `repeats` rounds; on a GPU more of them, until the half-width of every
    interval is at most the share `until`, or the time is over. With fewer than 5 rounds nothing is
    told: they are run, and no more.

    at_most_s: that time, of the whole comparison."""
    if repeats < MIN_REPETITIONS:
        return {"rounds": repeats, "smoke": True}
    if not is_gpu(engine.device):
        return {"rounds": repeats}
    return {"rounds": repeats, "until": until, "at_most_s": at_most_s}


def until_built(engine: Engine, serve: Callable[[], object], most: int | None = None) -> None:
    """Serves a load until the engine builds no program for it, once or twice at most. Requests come
    together in other ways each time, so one pass does not see every shape; and a shape that comes
    first in the measured pass holds up all its requests while its program is built.

    most: None for GPU_PASSES or CPU_PASSES, by the engine's device."""
    for _ in range(most or (GPU_PASSES if is_gpu(engine.device) else CPU_PASSES)):
        before = engine.counters["programs_built"]
        serve()
        if engine.counters["programs_built"] == before:
            return


def fastest(engine: Engine, loads: Mapping[Path, Callable[..., ServeBench]]) -> None:
    """Serves loads in turn, GPU_TURNS or CPU_TURNS times by the engine's device, and keeps of each
    the turn with the most tokens a second at its last setting. A load is one long measurement, and
    other work on the host makes it slower for seconds, never faster.

    loads: what serves a load into the run folder `out=`, by the folder where it is kept in the end.
    """
    found = {folder: serve(out=folder) for folder, serve in loads.items()}
    for _ in range((GPU_TURNS if is_gpu(engine.device) else CPU_TURNS) - 1):
        for folder, serve in loads.items():
            with tempfile.TemporaryDirectory() as turn:
                made = serve(out=Path(turn, folder.name))
                if _rate(made) > _rate(found[folder]):
                    kept, tables = results.load_tables(Path(turn, folder.name), REQUESTS)
                    results.write_run(folder, kept.run, kept.samples, {REQUESTS: tables[0]})
                    found[folder] = made


def _rate(made: ServeBench) -> float:
    return float(made.rows[-1].figures["output_throughput"])
