"""The first requests of a server beside the next: what is left to pay once `/health` says 200?

    python -m data.measure.first_requests [MODEL] [--starts N] [--device DEVICE]

Each start is a new server with the kernels of the starts before it. As soon as it is healthy, so
many requests are kept in flight, 64 and another 64 of them. A start says how long the slowest of
the first 64 took, from when it was due to its end, beside the slowest of the next 64. One start
that nobody counts comes first, so that kernels are kept. The run folder is
`data/results/first-requests/MODEL`: a sample for each request, and in `result` the `starts`.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
from cyclopts import App

from data.measure.first_tables import CELLS, FOLDER, FirstRun, Start
from data.measure.served_arms import Recording
from data.measure.tables import filled
from tests.peer.cuda import is_there, model_file
from workbench.bench import results
from workbench.bench.draft import kept
from workbench.config import BEST, TogglePreset
from workbench.errors import UsageError, WorkbenchError
from workbench.frames import markdown
from workbench.serve.bench import BenchSpec
from workbench.serve.load import CLOSED, Arrivals, normal_ids
from workbench.serve.records import OK
from workbench.serve.served import ServeCommand, reached
from workbench.serve.serving import serving
from workbench.serve.targets import Asking
from workbench.sizes import round_up

ROOT = Path(__file__).resolve().parents[2]
ARM, PAD = "served", 256

app = App(help=__doc__, result_action="return_none")


def started(command: ServeCommand, spec: BenchSpec, in_flight: int) -> tuple[Start, np.ndarray]:
    """Starts a server and asks it spec.n_requests; and what each request took, ns, in the order in
    which they were sent. Raises WorkbenchError where one fails."""
    begun = time.monotonic()
    with reached(command) as target:
        begin_s = time.monotonic() - begun
        load = spec.load(Arrivals(CLOSED, in_flight), 0)
        records = [one for part in target.offer(load, spec.asking) for one in part]
    bad = next((one for one in records if one.status != OK), None)
    if bad is not None:
        raise WorkbenchError(f"request {bad.request}: {bad.status}: {bad.why}; mend that first")
    took = np.array([one.end_ns - one.due_ns for one in sorted(records)], np.int64)
    first, then = np.split(took, 2)
    return Start(begin_s, first.max() / 1e6, then.max() / 1e6), took


@app.default
def main(
    model: str = "llama-3.2-1b-q4_k_m",
    *,
    starts: int = 5,
    requests: int = 64,
    in_flight: int = 8,
    n_prompt: int = 512,
    n_gen: int = 128,
    device: str = "cuda",
    out: Path = ROOT / "data" / "results" / FOLDER,
    files: Path = ROOT / "data" / "models",
    again: bool = False,
) -> None:
    """Measures the starts, and prints the table.

    Parameters
    ----------
    model: as folders name it.
    starts: of the server; one more comes before them.
    requests: the first ones, and as many behind them.
    in_flight: requests in flight together, and slots.
    n_prompt, n_gen: tokens of each request.
    out: where the run folder goes.
    files: where model files are, and where missing ones are written.
    again: measure what was measured, too.
    """
    if min(starts, requests, in_flight, n_prompt, n_gen) < 1:
        raise UsageError("--starts, --requests, --in-flight, --n-prompt and --n-gen are 1 or more")
    folder = out / model
    if is_there(folder) and not again:
        print(f"{model}: there already, of this commit", flush=True)
        return
    path = model_file(model, files)
    shutil.rmtree(folder, ignore_errors=True)
    n_ctx = in_flight * round_up(n_prompt + n_gen, PAD)
    flags = ("--device", device, "--n-ctx", str(n_ctx))
    command = ServeCommand(path, in_flight, device, flags)
    test = f"pp{n_prompt}+tg{n_gen}@b{in_flight}"
    toggles = serving(device, TogglePreset(BEST)).changes
    recording = Recording(FOLDER, path, folder, {ARM: toggles}, [test], starts, device)
    result = recording.run["result"]
    del result["points"]
    result |= {"starts": [], "requests": requests, "in_flight": in_flight}
    with kept(recording.draft, raises=True):
        for number in range(-1, starts):
            spec = BenchSpec.of(
                str(n_prompt), str(n_gen), normal_ids(path), n_requests=2 * requests,
                n_warm_up=0, seed=max(number, 0), parallel=in_flight, asking=Asking(),
            )  # fmt: skip
            start, took = started(command, spec, in_flight)
            said = f"{start.first_ms:.0f} ms, then {start.next_ms:.0f} ms"
            print(f"  start {number + 1}: healthy after {start.begin_s:.1f} s; {said}", flush=True)
            if number < 0:
                result["uncounted"] = start._asdict()
                continue
            result["starts"].append(start._asdict())
            n = np.full(len(took), n_gen, np.int64)
            recording.draft.samples.add(ARM, False, test, number, took, n)
            recording.draft.checkpoint()
    print(shown(folder), flush=True)


def shown(folder: Path) -> str:
    """The starts of a run folder as a table, and the median of their ratios."""
    found = FirstRun(results.load_run(folder))
    rows = [{k: filled(t, line.values) for k, t in CELLS.items()} for line in found.lines()]
    median = f"median ratio of {len(found.starts)} starts: {found.ratio:.2f}"
    return f"{markdown(pd.DataFrame(rows))}\n\n{median}"


if __name__ == "__main__":
    try:
        app()
    except (RuntimeError, WorkbenchError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
