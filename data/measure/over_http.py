"""A server's throughput, in process and through HTTP: what do the front and its events cost?

    python -m data.measure.over_http [MODEL] [--peer DIR] [--in-flight 1,8,32,128] [--rounds N]

Three arms take turns with every number of requests in flight: an engine process over its pipe, as
the server's own front uses it; `workbench serve` with whole answers; and `workbench serve` with
answers streamed by server-sent events. The client of the last two is a process of its own. With
`--peer`, as in `data.measure.batched`, llama.cpp's batched bench is the fourth arm. It runs as many
sequences as requests are in flight, all at once. The run folder is `data/results/over-http/MODEL`.

`result` has `points`: figures of one arm in one round. Each has `front_cpu_s`, the CPU time of the
server's processes except the engine's, and `n_fronts`, the number of these processes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from cyclopts import App

from data.measure import batched
from data.measure.command import PAD, USUAL, Call, Options, Recording, at_least_one, numbers, start
from data.measure.peer import LLAMA
from data.measure.recorded import Arms, Share
from data.measure.tables import Folder, Line, Part
from workbench.backend.base import open_backend
from workbench.benchmarks.runs import provenance, results
from workbench.common.sizes import round_up
from workbench.config import BEST, EngineConfig, TogglePreset
from workbench.server.serving import serving
from workbench.server.wire.worker import WorkerSettings
from workbench.traffic import served
from workbench.traffic.bench import BenchSpec, ServedRow, finite, serve_bench
from workbench.traffic.load import CLOSED, Arrivals, normal_ids
from workbench.traffic.served import ServeCommand, model_facts
from workbench.traffic.targets import Asking, LoadTarget

PIPE, WHOLE, STREAMED = "in process", "HTTP whole", "HTTP streamed"
OURS = (PIPE, WHOLE, STREAMED)
LEAST_REQUESTS = 16
UNCOUNTED = 1 << 20  # seeds of requests that warm up begin here
KEPT = (
    "completed", "failed", "duration", "total_input_tokens", "total_output_tokens",
    "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms",
    "mean_e2el_ms", "tokens_per_chunk",
)  # fmt: skip

app = App(help=__doc__, result_action="return_none")


class Point(NamedTuple):
    """A setting of an arm in a round: so many requests are in flight until all have ended."""

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
    ns, n_generated = row.figures["duration"] * 1e9, row.figures["total_output_tokens"]
    recording.add(arm, point.test, round_, [ns], [n_generated])
    return row


def front_time(pid: int) -> tuple[float, int] | None:
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
    return ticks / os.sysconf("SC_CLK_TCK"), len(fronts)


def children_of(pid: int) -> set[int]:
    """The processes that a process has begun and that have not ended; empty without /proc."""
    found = set[int]()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found |= {int(each) for each in (task / "children").read_text().split()}
    return found


class Reached(NamedTuple):
    """A target.

    pid: its server's first process; None for an engine process.
    streamed: whether its answers are streamed.
    """

    target: LoadTarget
    pid: int | None
    streamed: bool


@contextmanager
def reached(
    path: Path, config: EngineConfig, slots: int, processes: int
) -> Iterator[dict[str, Reached]]:
    """Our arms by name: an engine process, and a server for the other two."""
    flags = (
        "--device", config.device, "--n-ctx", str(config.n_ctx), "--n-ubatch", str(config.n_ubatch),
        "--n-kv-pad", str(config.n_kv_pad),
    )  # fmt: skip
    with ExitStack() as stack:
        settings = WorkerSettings(str(path), config, slots, TogglePreset(BEST))
        pipe = stack.enter_context(served.reached(settings))
        before = children_of(os.getpid())
        command = ServeCommand(path, slots, config.device, flags)
        http = stack.enter_context(served.reached(command, processes=processes))
        pid = next(iter(children_of(os.getpid()) - before), None)
        arms = Reached(pipe, None, True), Reached(http, pid, False), Reached(http, pid, True)
        yield dict(zip(OURS, arms, strict=True))


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
    options: Options = USUAL,
) -> None:
    """Measures the arms, and prints the table.

    Parameters
    ----------
    model: as folders name it.
    peer: a folder with llama.cpp's programs, or an archive of one.
    in_flight: requests in flight together.
    n_prompt, n_gen: tokens of each request.
    each: requests of a point, as a multiple of those in flight; at least 16 requests.
    n_ubatch: tokens computed at once.
    rounds: how often each point is measured.
    client_processes: processes that send the HTTP requests.
    """
    wanted = batched.Wanted(
        sorted(set(numbers("--in-flight", in_flight))), n_prompt, n_gen, n_ubatch
    )
    at_least_one(wanted.widths[0], n_prompt, n_gen, each, rounds,
                 flags="--in-flight, --n-prompt, --n-gen, --each and --rounds")  # fmt: skip
    call = Call(RUNS.name, options)
    folder, slots, bench = call.out / model, wanted.widths[-1], batched.bench_of(peer)

    def measured() -> None:
        path = call.model_file(model)
        config = EngineConfig(
            device=options.device, n_ctx=slots * round_up(n_prompt + n_gen, PAD), n_seqs=slots,
            n_ubatch=n_ubatch, n_kv_pad=PAD,
        )  # fmt: skip
        ids, toggles = normal_ids(path), serving(options.device, TogglePreset(BEST)).changes
        points = [
            Point(f"pp{n_prompt}+tg{n_gen}@b{n}", n, BenchSpec.of(
                str(n_prompt), str(n_gen), ids, n_requests=max(LEAST_REQUESTS, each * n),
                n_warm_up=n, parallel=slots,
            ))
            for n in wanted.widths
        ]  # fmt: skip
        arms = dict.fromkeys(OURS, toggles) | ({LLAMA: {}} if bench is not None else {})
        recording = Recording(
            RUNS.name, folder, about_engine(path, options.device), arms, [p.test for p in points],
            rounds,
        )  # fmt: skip
        recording.result |= {"points": [], "slots": slots, "peer": batched.about_peer(bench)}

        def asked(point: Point, own: Reached, seed: int) -> Point:
            return point._replace(spec=point.spec._replace(seed=seed, asking=Asking(own.streamed)))

        with recording.kept(), reached(path, config, slots, client_processes) as by:
            # the steps of a load have shapes that the warm-up before a point does not have
            for n, (own, point) in enumerate(itertools.product(by.values(), points)):
                offer(own.target, asked(point, own, UNCOUNTED + n))
            print(f"  warmed up: {call.seconds:.0f} s", flush=True)

            def take(round_: int, arm: str) -> None:
                if bench is not None and arm == LLAMA:
                    rows = batched.batched_rows(bench, path, wanted)
                    for point, one in zip(points, rows, strict=True):
                        seconds, n = one["t_pp"] + one["t_tg"], point.n_in_flight * n_gen
                        recording.add(arm, point.test, round_, [seconds * 1e9], [n])
                        print(f"  {point.test} {arm}: {n / seconds:.1f} t/s", flush=True)
                    return
                own = by[arm]
                for number, point in enumerate(points):
                    # prompts that no arm has sent before: no cache has their beginnings
                    seed = (round_ * len(OURS) + OURS.index(arm)) * len(points) + number
                    before = front_time(own.pid) if own.pid else None
                    row = measure(recording, arm, round_, own.target, asked(point, own, seed))
                    after = front_time(own.pid) if own.pid else None
                    spent = None if before is None or after is None else after[0] - before[0]
                    recording.result["points"][-1] |= {
                        "front_cpu_s": spent, "n_fronts": after[1] if after else None,
                        "n_warm_up": point.spec.n_warm_up,
                    }  # fmt: skip
                    tps = row.figures["output_throughput"]
                    print(f"  {point.test} {arm}: {tps:.1f} t/s", flush=True)

            recording.take(take, call.rounds(rounds))

    call.make(model, folder, measured, RUNS.shown)


class HttpRun(Arms):
    """A run, as read.

    points: a row for each arm, number of requests in flight, and round.
    """

    def __init__(self, found: results.Run):
        super().__init__(found)
        self.points = pd.DataFrame(found.run["result"]["points"])

    def about(self) -> str:
        shape, peer = self.run["tests"][0].partition("@")[0], self.run["result"].get("peer")
        said = f"{shape} a request, rounds in turn: {self.run['repetitions']}"
        return said + (f"; llama.cpp {peer['version']}" if peer else "")

    def event_us(self, test: str) -> dict[str, Any]:
        """CPU time of an event, us: of the server's processes except the engine's, and of the
        client. Requests that warm up are left out."""
        own = self.points[(self.points["test"] == test) & (self.points["arm"] == STREAMED)]
        n = own["total_output_tokens"] / own["tokens_per_chunk"]
        warm = 1 + own["n_warm_up"] / own["completed"]  # with the share of requests that warm up
        known = own["front_cpu_s"].notna().all()
        client = pd.DataFrame(list(own["client"]))
        return {
            "front_us": float((own["front_cpu_s"] / warm / n).median() * 1e6) if known else None,
            "client_us": float(client["us_per_chunk"].median()) if len(client.columns) else None,
            "busy": Share(client["busy"].max()) if len(client.columns) else None,
            "n_fronts": int(own["n_fronts"].max()) if known else None,
            "per_event": float(own["tokens_per_chunk"].median()),
        }

    def lines(self) -> Iterator[Line]:
        for test in self.run["tests"]:
            medians = self.rates(test).median()
            first = self.points[self.points["test"] == test].iloc[0]
            values: dict[str, Any] = {
                "model": self.model, "n": int(first["in_flight"]), "n_requests": first["completed"],
                "pipe": medians[PIPE], "whole": medians[WHOLE], "streamed": medians[STREAMED],
                "whole_ratio": self.ratio(test, PIPE, WHOLE).value, "theirs": medians.get(LLAMA),
                "streamed_ratio": self.ratio(test, PIPE, STREAMED).value,
                "of_theirs": self.ratio(test, LLAMA, PIPE).value if LLAMA in medians else None,
                **self.event_us(test),
            }  # fmt: skip
            yield Line(values, [self])


RUNS = Folder("over-http", "Throughput through HTTP", HttpRun, {
    "Model": "{model}", "in flight": "{n}", "requests": "{n_requests}",
    "llama.cpp's batched bench": "{theirs:.0f}", "t/s in process": "{pipe:.0f}",
    "times llama.cpp's": "{of_theirs:.2f}",
    "HTTP whole": "{whole:.0f}", "of it": "{whole_ratio:.2f}",
    "HTTP streamed": "{streamed:.0f}", "of that": "{streamed_ratio:.2f}",
    "tokens an event": "{per_event:.2f}", "front us an event": "{front_us:.1f}",
    "client us": "{client_us:.1f}", "client busy %": "{busy:.0f}", "processes": "{n_fronts}",
})  # fmt: skip
BLOCKS: dict[str, list[Part]] = {
    RUNS.name: [
        RUNS.table,
        "Tokens that are generated in a second, their prompts' time included. A request that ends "
        "makes room for the next; llama.cpp's batched bench has as many sequences, all at once. "
        "*of it* and *of that*: of what the same load reaches in process. The CPU time of an event "
        "is that of the server's processes but the engine's.",
    ],
}

if __name__ == "__main__":
    start(app)
