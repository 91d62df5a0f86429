"""Records the GPU runs of data/results, each into a folder of its own.

    python -m data.measure [NAMES] [--out DIR] [--models DIR] [--most-gb N] [--only MODELS]
                             [--like FOLDER] [--at-most-s N]

NAMES are steps (`matrix.STEPS`, the most important first); without names all steps are made in that
order. A folder that holds a complete run of this commit is kept, so a call that was cut off goes on
where it ended. The tree must be committed, because a run names its commit. The steps need a GPU,
and 45 GB of disk for all models.

--most-gb leaves out models with larger files. --only takes some models alone, with commas between
their names: llama-3-8b-q8_0. --like takes rows with such folders alone: 'plans-*,fresh-*'. A row
that would not end within --at-most-s seconds is left for the next call. The seconds that a step
takes on one H100 are printed beside its name, and after each row the seconds that it took.
Rows of `pipeline` over two GPUs are left out where there is one. Step `cpu` is for `--device
embedded` and `--device host`.
"""

from __future__ import annotations

import math
import time
from fnmatch import fnmatch
from pathlib import Path

from cyclopts import App

from data.measure.command import start
from data.measure.matrix import CPU_STEP, STEPS, rows
from data.measure.session import ROOT, Session, parsed
from data.measure.steps import run
from workbench.common.errors import UsageError, WorkbenchError

CPU_SECONDS = 400

app = App(help=__doc__, result_action="return_none")


@app.default
def measure(
    *names: str,
    out: Path = ROOT / "data" / "results",
    models: Path = ROOT / "data" / "models",
    most_gb: float = 20.0,
    only: str = "",
    like: str = "*",
    device: str = "cuda",
    quick: bool = False,
    at_most_s: float = math.inf,
) -> None:
    """Makes the runs of the steps. Raises UsageError for a step or a model that does not exist, and
    at the end WorkbenchError where runs failed."""
    for name in set(names) - {*STEPS, CPU_STEP}:
        known = ", ".join((*STEPS, CPU_STEP))
        raise UsageError(f"step {name!r} does not exist; choose from {known}")
    for model in filter(None, only.split(",")):
        parsed(model)
    if CPU_STEP in names and device == "cuda":
        raise UsageError(f"step {CPU_STEP} measures a CPU; give --device embedded or host")
    begun = time.monotonic()
    session = Session(out, models, device, most_gb, quick, only, begun + at_most_s)
    failed = list[str]()
    for name in names or STEPS:
        begin = time.monotonic()
        print(f"== {name}: about {STEPS.get(name, CPU_SECONDS)} s", flush=True)
        wanted = [
            row for row in rows(name)
            if (name != CPU_STEP or row.device == device)
            and any(fnmatch(row.folder, pattern) for pattern in like.split(","))
        ]  # fmt: skip
        failed += run(session, wanted)
        now = time.monotonic()
        print(f"== {name}: {now - begin:.0f} s, {now - begun:.0f} s in all", flush=True)
    if failed:
        raise WorkbenchError(f"{len(failed)} failed: {', '.join(failed)}")


if __name__ == "__main__":
    start(app)
