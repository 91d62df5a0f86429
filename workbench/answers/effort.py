"""How often a notebook repeats what it measures, and how often before it measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.benchmarks.compare.stats import MIN_REPETITIONS
from workbench.common.devices import is_gpu
from workbench.engine.engine import Engine

GPU_S, CPU_S = 8.0, 3.0  # of a comparison; a CPU's times only show how it is done
MOST_PASSES = 3


def effort(engine: Engine, repeats: int, until: float | str) -> dict[str, Any]:
    """Arguments of `wb.ab`: at least `repeats` rounds, and then more until the half-width of every
    interval is at most the share `until`, or the time is over. So an effect larger than `until` can
    be told on a noisy host, too. With fewer than 5 rounds nothing is told: they are run, and no
    more."""
    if repeats < MIN_REPETITIONS:
        return {"rounds": repeats, "smoke": True}
    at_most_s = GPU_S if is_gpu(engine.device) else CPU_S
    return {"rounds": repeats, "until": until, "at_most_s": at_most_s}


def until_built(engine: Engine, serve: Callable[[], object]) -> None:
    """Serves a load until the engine builds no program for it, at most MOST_PASSES times. Requests
    come together in other ways each time, so one pass does not see every shape; and a shape that
    comes first in the measured pass holds up all its requests while its program is built."""
    for _ in range(MOST_PASSES):
        before = engine.counters["programs_built"]
        serve()
        if engine.counters["programs_built"] == before:
            return
