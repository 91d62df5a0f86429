"""Tables and traces of many requests on one engine: settings under load, a step that serves a
prompt beside tokens, and the cost of a process and of HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

import workbench as wb
from workbench.benchmarks.compare.arms import parse_changes, switched
from workbench.benchmarks.llama import batched
from workbench.benchmarks.workload import parse
from workbench.common.sizes import round_up
from workbench.common.tables import Table
from workbench.config import BEST, TogglePreset, Toggles
from workbench.engine.slots.asks import Ask
from workbench.engine.slots.slots import Slots
from workbench.server.serving import serving
from workbench.server.wire.worker import WorkerSettings
from workbench.trace.profile import Profile, profile
from workbench.traffic.bench import ServeBench
from workbench.traffic.bench_text import points, step_figures
from workbench.traffic.served import ServeCommand, reached
from workbench.traffic.targets import Asking

FIGURES = ("output_throughput", "mean_tpot_ms", "mean_ttft_ms")
SERVING = "serving"  # the toggles of `workbench serve`
IN_PROCESS, PROCESS, WHOLE, STREAMED = (
    "this process", "an engine process", "HTTP, whole answers", "HTTP, streamed",
)  # fmt: skip


def settings(engine: wb.Engine, *names: str) -> dict[str, Toggles]:
    """Toggles by name: `baseline`, `serving`, `serving sampling=host`."""
    found = {}
    for name in names:
        background, _, changes = name.partition(" ")
        if background == SERVING:
            wanted = TogglePreset(BEST, parse_changes(changes))
            found[name] = engine.resolve(serving(engine.device, wanted))
        else:
            found[name] = switched(engine.toggles, changes)
    return found


def lengths(workload: str) -> tuple[int, int]:
    """Tokens of a prompt and of an answer: `pp64+tg16`."""
    shape = parse(workload)
    return max(1, shape.n_prompt), max(1, shape.n_gen)


def config(device: str, workload: str, concurrency: str) -> wb.EngineConfig:
    """The config of an engine that holds the most requests in flight, with cells for all their
    tokens, and a prompt that fills a step."""
    each = max(1024, round_up(sum(lengths(workload)) + 1, 256))
    n_seqs = most(concurrency)
    return wb.EngineConfig(device, n_ctx=n_seqs * each, n_seqs=n_seqs)


def together_table(
    engine: wb.Engine,
    arms: Mapping[str, Toggles],
    workload: str,
    widths: str,
    repeats: int,
    seed: int,
    runs: str,
) -> pd.DataFrame:
    """llama-batched-bench's table for each setting: without a server, requests or sampling."""
    (n_prompt, n_gen), rows = lengths(workload), []
    for name, toggles in arms.items():
        with engine.variant(toggles) as side:
            made = batched.batched(
                side, [n_prompt], [n_gen], [int(n) for n in widths.split(",")], repeats, seed=seed,
                out=wb.new_run_folder(runs, f"together-{slug(name)}"),
            )  # fmt: skip
        for found in map(batched.values, made):
            rows.append(
                {
                    "setting": name, "PP": found["pp"], "TG": found["tg"], "B": found["pl"],
                    "N_KV": found["n_kv"], "T_PP s": found["t_pp"], "S_PP t/s": found["speed_pp"],
                    "T_TG s": found["t_tg"], "S_TG t/s": found["speed_tg"], "S t/s": found["speed"],
                }
            )  # fmt: skip
    return Table(rows).shown(
        keys=["setting", "B"],
        digits={"T_PP s": 4, "T_TG s": 4, "S_PP t/s": 0, "S_TG t/s": 0, "S t/s": 0},
    )


def slug(name: str) -> str:
    """A setting in the name of a folder: `serving sampling=host` is `serving-sampling-host`."""
    return name.replace("=", "-").replace(" ", "-").replace("_", "-")


def step_traces(
    engine: wb.Engine, toggles: Toggles, n_running: int = 4, n_steps: int = 4
) -> dict[str, Profile]:
    """Traces of steps that only generate, and of steps that compute a part of a prompt as well.

    n_running requests generate. Then two more requests come, whose prompts take up to n_steps steps
    each. All is done twice, and the second time is shown: its programs exist by then. The first
    half of each kind of steps is not traced, so the trace can report its own cost.
    """
    room, found = engine.config.n_ubatch - n_running, dict[str, Profile]()
    with engine.variant(toggles) as side:
        for time in range(2):
            side.reset()
            slots = Slots(side, n_running + 2)
            for i in range(n_running):
                slots.ask(_ask(side, i, 3, 6 * n_steps))
            _steps(slots, 3)
            with profile(side, window=(n_steps, n_steps)) as alone:
                _steps(slots, 2 * n_steps)
            most = min(n_steps, max(1, (slots.room - 1) // room))
            n_prompt = min(most * room, slots.room - 1)
            for i in range(2):
                slots.ask(_ask(side, n_running + i, n_prompt, 1))
            with profile(side, window=(most, most)) as mixed:
                _steps(slots, 2 * most)
            while not slots.idle:
                slots.step()
            if time:
                found[f"a token of each of {n_running} requests"] = alone
                found[f"{min(room, n_prompt)} tokens of a prompt beside them"] = mixed
    return found


def _steps(slots: Slots, n: int) -> None:
    for _ in range(n):
        slots.step()


def _ask(engine: wb.Engine, number: int, n_prompt: int, n_made: int) -> Ask:
    """A request whose prompt begins like no other."""
    ids = (np.arange(n_prompt) * 7 + 31 * number) % (engine.model.n_vocab - 1) + 1
    return Ask(number, ids.astype(np.int32), n_made)


def measured(
    engine: wb.Engine,
    arms: Mapping[str, Toggles],
    workload: str,
    concurrency: str,
    n_requests: int,
    seed: int,
    runs: str,
) -> dict[str, ServeBench]:
    """The same load for each setting, served by this process. A run folder for each."""
    (n_prompt, n_gen), found = lengths(workload), dict[str, ServeBench]()
    slots = most(concurrency)
    for name, toggles in arms.items():
        with engine.variant(toggles) as side:
            found[name] = wb.serve_bench(
                side, slots=slots, concurrency=concurrency, n_prompt=str(n_prompt),
                n_gen=str(n_gen), n_requests=n_requests, n_warm_up=slots, seed=seed,
                out=wb.new_run_folder(runs, f"served-{slug(name)}"),
            )  # fmt: skip
    return found


def most(concurrency: str) -> int:
    """The most requests in flight."""
    return max(int(n) for n in concurrency.split(","))


def ends(concurrency: str) -> str:
    """The fewest and the most requests in flight: `1,128`."""
    numbers = sorted({int(n) for n in concurrency.split(",")})
    return ",".join(str(n) for n in dict.fromkeys((numbers[0], numbers[-1])))


def curves(served: Mapping[str, ServeBench], latency: str = "mean_tpot_ms") -> pd.DataFrame:
    """For `plots.throughput_against_latency`: a curve for each setting."""
    parts = [points(made.rows, name, latency) for name, made in served.items()]
    frame = pd.concat(parts, ignore_index=True)
    frame.attrs = parts[0].attrs
    return frame


def latency_table(served: Mapping[str, ServeBench]) -> pd.DataFrame:
    """Throughput and latencies for every setting and number of requests in flight."""
    rows = [
        {
            "setting": name, "in flight": int(row.setting.value),
            "req/s": row.figures["request_throughput"],
            "out t/s": row.figures["output_throughput"],
            "TTFT ms": row.figures["mean_ttft_ms"], "P99 TTFT": row.figures["p99_ttft_ms"],
            "TPOT ms": row.figures["mean_tpot_ms"], "P99 TPOT": row.figures["p99_tpot_ms"],
            "ITL ms": row.figures["mean_itl_ms"], "P99 ITL": row.figures["p99_itl_ms"],
            "E2EL ms": row.figures["mean_e2el_ms"], "failed": row.figures["failed"],
        }
        for name, made in served.items()
        for row in made.rows
    ]  # fmt: skip
    return Table(rows).shown(keys=["setting", "in flight"], digits={"req/s": 1, "out t/s": 0})


def sampling_table(served: Mapping[str, ServeBench]) -> pd.DataFrame:
    """The time to choose tokens, with the most requests in flight of each setting."""
    rows = []
    for name, made in served.items():
        row = made.rows[-1]
        found = step_figures(row)
        toggles = made.run["engine"]["toggles"]
        rows.append(
            {
                "setting": name, "sampling": toggles["sampling"], "results": toggles["results"],
                "in flight": int(row.setting.value), "steps": found["n_steps"],
                "tokens a step": found["tokens_per_step"],
                "sampling us a step": 1e3 * found["sampling_ms"],
                "of all the time": f"{found['sampling_share']:.1%}",
            }
        )  # fmt: skip
    return Table(rows).shown(keys=["setting"], digits={"tokens a step": 1, "sampling us a step": 1})


def ways_in(
    engine: wb.Engine,
    workload: str,
    concurrency: str,
    n_requests: int,
    seed: int,
    runs: str,
) -> dict[str, ServeBench]:
    """The load of `serving` over four ways to the engine, with the fewest and the most requests in
    flight."""
    n_prompt, n_gen = lengths(workload)
    slots, config, path = most(concurrency), engine.config, engine.model.path
    asked: dict[str, Any] = {
        "concurrency": ends(concurrency), "n_prompt": str(n_prompt), "n_gen": str(n_gen),
        "n_requests": n_requests, "n_warm_up": slots,
    }  # fmt: skip
    found = {}
    with engine.variant(settings(engine, SERVING)[SERVING]) as side:
        found[IN_PROCESS] = wb.serve_bench(
            side, slots=slots, seed=seed, out=wb.new_run_folder(runs, "ways-own"), **asked
        )
    process = WorkerSettings(str(path), config, slots)
    found[PROCESS] = wb.serve_bench(
        process, seed=seed, out=wb.new_run_folder(runs, "ways-process"), **asked
    )
    flags = {
        "--device": config.device, "--n-ctx": config.n_ctx, "--n-ubatch": config.n_ubatch,
        "--n-kv-pad": config.n_kv_pad,
    }  # fmt: skip
    typed = tuple(str(word) for pair in flags.items() for word in pair)
    with reached(ServeCommand(path, slots, config.device, typed)) as server:
        for i, (name, streamed) in enumerate({WHOLE: False, STREAMED: True}.items()):
            # prompts that the server has not seen: it keeps the cells of prompts that it has seen
            found[name] = wb.serve_bench(
                server, asking=Asking(streamed=streamed), seed=seed + 1 + i,
                out=wb.new_run_folder(runs, f"ways-http-{'streamed' if streamed else 'whole'}"),
                **asked,
            )  # fmt: skip
    return found


def ways_table(found: Mapping[str, ServeBench]) -> pd.DataFrame:
    """Output tokens a second for each way to the engine, and their share of those in this
    process."""
    first = {row.setting.name: _rate(row) for row in next(iter(found.values())).rows}
    rows = []
    for name, made in found.items():
        for row in made.rows:
            client = row.client.get("us_per_chunk")
            rows.append(
                {
                    "way": name, "in flight": int(row.setting.value), "out t/s": _rate(row),
                    "of this process": f"{_rate(row) / first[row.setting.name]:.0%}",
                    "E2EL ms": row.figures["mean_e2el_ms"],
                    "client us a chunk": "" if client is None else f"{client:.0f}",
                }
            )  # fmt: skip
    return Table(rows).shown(keys=["way", "in flight"], digits={"out t/s": 0, "E2EL ms": 1})


def _rate(row: Any) -> float:
    return float(row.figures["output_throughput"])


def figures_of(served: Mapping[str, ServeBench]) -> pd.DataFrame:
    """Figures for sentences, by setting and number of requests in flight: tokens a second, mean
    TPOT and TTFT, under vLLM's names."""
    return pd.DataFrame(
        {"setting": name, "in_flight": int(row.setting.value)}
        | {key: float(row.figures[key]) for key in FIGURES}
        for name, made in served.items()
        for row in made.rows
    )
