"""A server's throughput, in process and through HTTP: what do the front and its events cost?

    python -m data.measure.over_http [MODEL] [--peer DIR] [--in-flight 1,8,32,128] [--rounds N]

Three arms take every number of requests in flight in turn: an engine process over its pipe, as the
server's own front has it; `workbench serve` with answers that come whole; and with answers streamed
by server-sent events. The client of the last two is a process of its own. With `--peer`, as
`data.measure.batched` has it, llama.cpp's batched bench is the fourth arm. It has as many sequences
as requests are in flight, all at once. The run folder is `data/results/over-http/MODEL`.

`result`: `points` (`served_arms.py`), each with `front_cpu_s`, the CPU time of the server's
processes but the engine's, and `n_fronts`, how many these are.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from cyclopts import App

from data.measure import batched
from data.measure.http_tables import FOLDER, PIPE, STREAMED, WHOLE, shown
from data.measure.peer import LLAMA
from data.measure.served_arms import (
    Point,
    ProcessTime,
    Recording,
    children_of,
    front_time,
    offer,
)
from tests.peer.cuda import is_there, model_file
from workbench.bench.draft import kept
from workbench.bench.rounds import interleave
from workbench.config import BEST, EngineConfig, TogglePreset
from workbench.errors import UsageError, WorkbenchError
from workbench.serve import served
from workbench.serve.bench import BenchSpec
from workbench.serve.load import normal_ids
from workbench.serve.served import ServeCommand
from workbench.serve.serving import serving
from workbench.serve.targets import Asking, LoadTarget
from workbench.serve.worker import WorkerSettings
from workbench.sizes import round_up

ROOT = Path(__file__).resolve().parents[2]
PAD, LEAST_REQUESTS = 256, 16
UNCOUNTED = 1 << 20  # from here on: seeds of what is sent before anything counts

app = App(help=__doc__, result_action="return_none")


class Reached(NamedTuple):
    """A target, and its server's first process where there is one."""

    target: LoadTarget
    pid: int | None
    streamed: bool

    def time(self) -> ProcessTime | None:
        return None if self.pid is None else front_time(self.pid)


@contextmanager
def reached(
    path: Path, config: EngineConfig, slots: int, processes: int
) -> Iterator[list[Reached]]:
    """The three arms: an engine process, and a server for the other two."""
    toggles = TogglePreset(BEST)
    flags = (
        "--device", config.device, "--n-ctx", str(config.n_ctx), "--n-ubatch", str(config.n_ubatch),
        "--n-kv-pad", str(config.n_kv_pad),
    )  # fmt: skip
    with ExitStack() as stack:
        pipe = stack.enter_context(
            served.reached(WorkerSettings(str(path), config, slots, toggles))
        )
        before = children_of(os.getpid())
        command = ServeCommand(path, slots, config.device, flags)
        http = stack.enter_context(served.reached(command, processes=processes))
        pid = next(iter(children_of(os.getpid()) - before), None)
        yield [Reached(pipe, None, True), Reached(http, pid, False), Reached(http, pid, True)]


@app.default
def main(
    model: str = "llama-3.2-1b-q4_k_m",
    *,
    peer: Path | None = None,
    in_flight: str = batched.WIDTHS,
    n_prompt: int = batched.N_PROMPT,
    n_gen: int = batched.N_GEN,
    each: int = 4,
    n_ubatch: int = batched.N_UBATCH,
    rounds: int = 3,
    client_processes: int = 2,
    device: str = "cuda",
    out: Path = ROOT / "data" / "results" / FOLDER,
    files: Path = ROOT / "data" / "models",
    again: bool = False,
    at_most_s: float = math.inf,
) -> None:
    """Measures the arms, and prints the table.

    Parameters
    ----------
    model: as folders name it.
    peer: a folder with llama.cpp's programs, or an archive of one.
    in_flight: requests in flight together.
    n_prompt, n_gen: tokens of each request.
    each: requests of a point, in times of those in flight; at least 16.
    n_ubatch: tokens computed at once.
    rounds: how often each point is measured.
    client_processes: that send what goes through HTTP.
    out: where the run folder goes.
    files: where model files are, and where missing ones are written.
    again: measure what was measured, too.
    at_most_s: no round begins after so many seconds.
    """
    numbers = sorted({int(n) for n in in_flight.split(",")})
    if min(numbers[0], n_prompt, n_gen, each, rounds) < 1:
        raise UsageError("--in-flight, --n-prompt, --n-gen, --each and --rounds are 1 or more")
    folder, begun, slots = out / model, time.monotonic(), numbers[-1]
    if is_there(folder) and not again:
        print(f"{model}: there already, of this commit", flush=True)
        return
    bench, path = batched.bench_of(peer), model_file(model, files)
    shutil.rmtree(folder, ignore_errors=True)
    config = EngineConfig(
        device=device, n_ctx=slots * round_up(n_prompt + n_gen, PAD), n_seqs=slots,
        n_ubatch=n_ubatch, n_kv_pad=PAD,
    )  # fmt: skip
    ids, toggles = normal_ids(path), serving(device, TogglePreset(BEST)).changes
    points = [
        Point(f"pp{n_prompt}+tg{n_gen}@b{n}", n, BenchSpec.of(
            str(n_prompt), str(n_gen), ids, n_requests=max(LEAST_REQUESTS, each * n),
            n_warm_up=n, parallel=slots,
        ))
        for n in numbers
    ]  # fmt: skip
    ours = (PIPE, WHOLE, STREAMED)
    every = dict.fromkeys(ours, toggles) | ({LLAMA: {}} if bench is not None else {})
    arms = list(every)
    recording = Recording(FOLDER, path, folder, every, [p.test for p in points], rounds, device)
    recording.run["result"] |= {"slots": slots, "peer": batched.about_peer(bench)}
    side_by_side = batched.Wanted(numbers, (), n_prompt, n_gen, n_ubatch)

    def rounds_left() -> Iterator[int]:
        for round_ in range(rounds):
            if round_ and time.monotonic() - begun > at_most_s:
                return
            yield round_

    with kept(recording.draft, raises=True), reached(path, config, slots, client_processes) as by:
        # while requests come and go, steps have other shapes than in a warm-up before a point
        for n, (own, point) in enumerate(itertools.product(by, points)):
            spec = point.spec._replace(seed=UNCOUNTED + n, asking=Asking(own.streamed))
            offer(own.target, point._replace(spec=spec))
        print(f"  warmed up: {time.monotonic() - begun:.0f} s", flush=True)

        def take(round_: int, arm: int) -> None:
            if arms[arm] == LLAMA:
                theirs(round_)
                return
            own = by[arm]
            for number, point in enumerate(points):
                # other prompts than any arm has sent: no server finds their beginnings in its cache
                seed = (round_ * len(ours) + arm) * len(points) + number
                spec = point.spec._replace(seed=seed, asking=Asking(own.streamed))
                before = own.time()
                row = recording.measure(arms[arm], round_, own.target, point._replace(spec=spec))
                after = own.time()
                entry = recording.run["result"]["points"][-1]
                spent = None if before is None or after is None else after.cpu_s - before.cpu_s
                entry["front_cpu_s"] = spent
                entry["n_fronts"] = after.n_fronts if after else None
                entry["n_warm_up"] = spec.n_warm_up
                rate = row.figures["output_throughput"]
                print(f"  {point.test} {arms[arm]}: {rate:.1f} t/s", flush=True)

        def theirs(round_: int) -> None:
            assert bench is not None
            rows = batched.batched_rows(bench, path, side_by_side)
            for point, row in zip(points, rows, strict=True):
                seconds, n = row["t_pp"] + row["t_tg"], point.n_in_flight * n_gen
                recording.note(LLAMA, round_, point.test, seconds, n)
                print(f"  {point.test} {LLAMA}: {n / seconds:.1f} t/s", flush=True)

        def whole(round_: int, _: dict[int, None]) -> None:
            recording.run["repetitions"] = round_ + 1

        interleave(rounds_left(), len(arms), take, whole)
    print(shown(folder), flush=True)
    print(f"== {model}: {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        app()
    except (RuntimeError, WorkbenchError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
