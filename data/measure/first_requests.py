"""The first requests of a server beside the next: what is left to pay once `/health` says 200?

    python -m data.measure.first_requests [MODEL] [--starts N] [--device DEVICE]

Each start is a new server, which finds the kernels of earlier starts on disk. As soon as it is
healthy, 128 requests are sent, with a fixed number in flight. A start records the slowest of the
first 64 requests beside the slowest of the next 64, each from when it was due to its end. One start
that is not counted comes first, so that all kernels are on disk. The run folder
`data/results/first-requests/MODEL` has a sample for each request, and in `result` the `starts`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cyclopts import App

from data.measure.command import PAD, USUAL, Call, Options, Recording, at_least_one, start
from data.measure.over_http import about_engine
from data.measure.recorded import model_of
from data.measure.tables import Folder, Line, Part
from workbench.benchmarks.runs import results
from workbench.common.errors import WorkbenchError
from workbench.common.sizes import round_up
from workbench.config import BEST, TogglePreset
from workbench.server.serving import serving
from workbench.traffic.bench import BenchSpec
from workbench.traffic.load import CLOSED, Arrivals, normal_ids
from workbench.traffic.records import OK
from workbench.traffic.served import ServeCommand, reached
from workbench.traffic.targets import Asking

ARM = "served"

app = App(help=__doc__, result_action="return_none")


class Start(NamedTuple):
    """One start of a server.

    begin_s: from the command to a healthy server.
    first_ms, next_ms: the slowest of the first and of the next requests, from when it was due to
        its end.
    """

    begin_s: float
    first_ms: float
    next_ms: float

    @property
    def ratio(self) -> float:
        return self.first_ms / self.next_ms


def started(command: ServeCommand, spec: BenchSpec, in_flight: int) -> tuple[Start, np.ndarray]:
    """Starts a server and sends spec.n_requests. Returns the start, and the ns of each request in
    the order of sending. Raises WorkbenchError where a request fails."""
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
    options: Options = USUAL,
) -> None:
    """Measures the starts, and prints the table.

    Parameters
    ----------
    model: as folders name it.
    starts: counted starts of the server; one more comes before them.
    requests: number of first requests; as many follow them.
    in_flight: requests in flight together, and slots.
    n_prompt, n_gen: tokens of each request.
    """
    at_least_one(starts, requests, in_flight, n_prompt, n_gen,
                 flags="--starts, --requests, --in-flight, --n-prompt and --n-gen")  # fmt: skip
    call = Call(RUNS.name, options)
    folder = call.out / model

    def measured() -> None:
        path, n_ctx = call.model_file(model), in_flight * round_up(n_prompt + n_gen, PAD)
        flags = ("--device", options.device, "--n-ctx", str(n_ctx))
        command = ServeCommand(path, in_flight, options.device, flags)
        test = f"pp{n_prompt}+tg{n_gen}@b{in_flight}"
        arms = {ARM: serving(options.device, TogglePreset(BEST)).changes}
        about = about_engine(path, options.device)
        recording = Recording(RUNS.name, folder, about, arms, [test], starts)
        result = recording.result
        result |= {"starts": [], "requests": requests, "in_flight": in_flight}
        with recording.kept():
            for number in itertools.chain([-1], call.rounds(starts)):
                spec = BenchSpec.of(
                    str(n_prompt), str(n_gen), normal_ids(path), n_requests=2 * requests,
                    n_warm_up=0, seed=max(number, 0), parallel=in_flight, asking=Asking(),
                )  # fmt: skip
                one, took = started(command, spec, in_flight)
                said = f"healthy after {one.begin_s:.1f} s; {one.first_ms:.0f} ms, then"
                print(f"  start {number + 1}: {said} {one.next_ms:.0f} ms", flush=True)
                if number < 0:
                    result["uncounted"] = one._asdict()
                    continue
                result["starts"].append(one._asdict())
                recording.add(ARM, test, number, took, np.full(len(took), n_gen))

    call.make(model, folder, measured, shown)


class FirstRun:
    """A run, as read. ratio: the median over the starts."""

    def __init__(self, found: results.Run):
        self.run = found.run
        self.starts = [Start(**one) for one in found.run["result"]["starts"]]
        self.ratio = float(np.median([one.ratio for one in self.starts]))

    def about(self) -> str:
        return (
            f"{self.run['tests'][0].partition('@')[0]} a request, "
            f"{self.run['result']['in_flight']} in flight; {len(self.starts)} starts, kernels "
            f"kept; median ratio {self.ratio:.2f}"
        )

    def lines(self) -> Iterator[Line]:
        for number, one in enumerate(self.starts, 1):
            values: dict[str, Any] = {"start": number, "ratio": one.ratio, **one._asdict()}
            yield Line(values | {"model": model_of(self.run)}, [self])


def shown(folder: Path) -> str:
    found = RUNS.load(folder)
    median = f"median ratio of {len(found.starts)} starts: {found.ratio:.2f}"
    return f"{RUNS.shown(folder)}\n\n{median}"


RUNS = Folder("first-requests", "First requests of a server", FirstRun, {
    "Model": "{model}", "start": "{start}", "healthy after s": "{begin_s:.1f}",
    "slowest of the first 64, ms": "{first_ms:.0f}", "of the next 64, ms": "{next_ms:.0f}",
    "ratio": "{ratio:.2f}",
})  # fmt: skip
BLOCKS: dict[str, list[Part]] = {RUNS.name: [RUNS.table]}

if __name__ == "__main__":
    start(app)
