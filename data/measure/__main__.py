"""Records the GPU runs of data/results, each into a folder of its own.

    python -m data.measure [NAMES] [--out DIR] [--models DIR] [--most-gb N] [--only MODEL]

NAMES are steps (below), the most important first; without any, all of them run in that order. A
folder that holds a complete run of this commit is kept, so that a run cut off goes on where it was.
The tree must be committed: a run names its commit. Needs a GPU, 45 GB of disk for every model
(--most-gb leaves the larger ones out, --only llama-3-8b-q8_0 all but one), and the seconds named
here, on one H100. `pipeline` needs two GPUs and is left out where there is one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cyclopts import App

from data.measure import ablation, counters, kernels, models, sync
from data.measure.session import Session
from workbench.errors import UsageError, WorkbenchError
from workbench.model.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]


class Step(NamedTuple):
    """budget_s: about what it takes on one H100, models written included."""

    run: Callable[[Session], None]
    budget_s: int


STEPS = {
    "decode": Step(models.decode, 150),
    "kernels": Step(kernels.kernels, 110),
    "depth": Step(models.depth, 35),
    "load": Step(models.load, 15),
    "perplexity": Step(models.perplexities, 150),
    "batches": Step(models.batches, 40),
    "kernels-batches": Step(kernels.kernels_batches, 110),
    "fusion": Step(models.fusion, 85),
    "ablation": Step(ablation.ablation, 60),
    "counters": Step(counters.counters, 80),
    "gaps": Step(sync.gaps, 60),
    "sync": Step(sync.sync, 480),
    "pipeline": Step(sync.pipeline, 60),
}

app = App(help=__doc__, result_action="return_none")


@app.default
def measure(
    *names: str,
    out: Path = ROOT / "data" / "results",
    models: Path = ROOT / "data" / "models",
    most_gb: float = 20.0,
    only: str = "",
    device: str = "cuda",
    quick: bool = False,
) -> None:
    """Runs the steps; raises UsageError for a name that is none."""
    for name in names:
        if name not in STEPS:
            raise UsageError(f"step {name!r} does not exist; choose from {', '.join(STEPS)}")
    if only and not any(only.startswith(f"{preset}-") for preset in PRESETS):
        raise UsageError(f"--only {only}: no such model; give one as folders do, llama-3-8b-q8_0")
    session, begun = Session(out, models, device, most_gb, quick, only), time.monotonic()
    for name in names or STEPS:
        step, begin = STEPS[name], time.monotonic()
        print(f"== {name}: about {step.budget_s} s", flush=True)
        step.run(session)
        now = time.monotonic()
        print(f"== {name}: {now - begin:.0f} s, {now - begun:.0f} s in all", flush=True)


if __name__ == "__main__":
    try:
        app()
    except WorkbenchError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
