"""Tables and traces of many requests on one engine: settings under a steady load, a step that
serves a prompt beside tokens, and requests that come at once or one by one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import workbench as wb
from workbench.answers import claims, recorded
from workbench.answers.effort import fastest, until_built
from workbench.answers.skipped import MEASURED
from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.arms import switched
from workbench.benchmarks.llama import batched
from workbench.benchmarks.runs import results
from workbench.benchmarks.runs.results import REQUESTS
from workbench.benchmarks.workload import make_ready, parse
from workbench.common.sizes import round_up
from workbench.common.tables import Table
from workbench.config import BEST, TogglePreset, Toggles, parse_changes
from workbench.engine.slots.asks import Ask
from workbench.engine.slots.first_steps import first_steps
from workbench.engine.slots.slots import Slots
from workbench.server.serving import serving
from workbench.trace.profile import Profile, profile
from workbench.traffic.bench import ServeBench, load_served
from workbench.traffic.bench_text import points, step_figures

FIGURES = ("output_throughput", "mean_tpot_ms", "mean_ttft_ms")
SERVING = "serving"  # the toggles of `workbench serve`
CONTROL = "serving (A/A)"
# each takes one thing away from `serving`, or adds one, that the thread suspects
SUSPECTS = (
    "serving sampling=host", "serving slot_choice=lowest_free", "serving kv_cache=unified",
    "serving kv_cache=unified defrag=cells",
)  # fmt: skip
PER_SLOT = 40  # requests for each in flight
BUILDING_PER_SLOT = 2  # of a load before it counts
WINDOWS = 20  # of the steady part of a load, each with a rate of tokens
# of the throughput under a constant load: the rate of a Poisson process. By Erlang's formula (C) of
# 100 requests 6 find all of 8 slots in use then; at 0.8 it would be 46.
CAPACITY = 0.5
ARRIVING_S = 2.0  # at least so long requests come one by one
ONE_BY_ONE, AT_ONCE = "one by one (Poisson)", "all at once"


def settings(engine: wb.Engine, *names: str) -> dict[str, Toggles]:
    """Toggles by name: `start` (the engine's own), `serving`, `serving sampling=host`, and
    CONTROL."""
    found = {}
    for name in names:
        background, _, changes = name.removesuffix(" (A/A)").partition(" ")
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
    """Of llama-batched-bench's table, without a server, requests or sampling: a row for each number
    of sequences B, with the t/s of prompts (S_PP) and of generated tokens (S_TG) in each setting,
    and the tokens a second of each sequence in the last (S_TG / B)."""
    (n_prompt, n_gen), rows = lengths(workload), dict[int, dict[str, Any]]()
    sizes = [n_prompt], [n_gen], [int(n) for n in widths.split(",")]
    with ExitStack() as stack:
        sides = {name: stack.enter_context(engine.variant(of)) for name, of in arms.items()}
        make_ready([*sides.values()], batched.workloads(*sizes))
        by_setting = {
            name: batched.batched(
                side, *sizes, repeats, seed=seed,
                out=wb.new_run_folder(runs, f"together-{slug(name)}"),
            )
            for name, side in sides.items()
        }  # fmt: skip
    for name, made in by_setting.items():
        for found in map(batched.values, made):
            row = rows.setdefault(found["pl"], {"B": found["pl"]})
            row[f"S_PP {name}"], row[f"S_TG {name}"] = found["speed_pp"], found["speed_tg"]
            row["S_TG / B"] = found["speed_tg"] / found["pl"]
    table = Table(list(rows.values()))
    table = Table(table[[c for c in table if c != "S_TG / B"] + ["S_TG / B"]])
    return table.shown(
        keys=["B"], digits=dict.fromkeys(table.columns[1:], 0),
        constant={"PP": str(n_prompt), "TG": str(n_gen), "the speeds are": "tokens a second"},
    )  # fmt: skip


def slug(name: str) -> str:
    """A setting in the name of a folder: `serving sampling=host` is `serving-sampling-host`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


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


class Steady(NamedTuple):
    """A load for one setting, measured.

    served: its figures, a row for each number of requests in flight.
    rates: output tokens a second in each window of the steady part, with the most in flight: from
        the first request that ends to the last that starts, so that no slot is empty; (n,).
    """

    served: ServeBench
    rates: np.ndarray


def measured(
    engine: wb.Engine,
    arms: Mapping[str, Toggles],
    workload: str,
    concurrency: str,
    per_slot: int,
    seed: int,
    runs: str,
) -> dict[str, Steady]:
    """The same load for each setting, served by this process: per_slot requests for each that is in
    flight. A run folder for each.

    A smaller load is served before, so that most programs exist (`effort.until_built`). All
    settings take turns, and of each the fastest turn counts (`effort.fastest`)."""
    n_prompt, n_gen = lengths(workload)
    asked: dict[str, Any] = {
        "slots": most(concurrency), "concurrency": concurrency, "n_prompt": str(n_prompt),
        "n_gen": str(n_gen), "n_requests": 1, "per_slot": per_slot, "n_warm_up": 1, "seed": seed,
    }  # fmt: skip
    folders = {name: wb.new_run_folder(runs, f"served-{slug(name)}") for name in arms}
    with ExitStack() as stack:
        sides = {name: stack.enter_context(engine.variant(of)) for name, of in arms.items()}
        beside = [*sides.values()]
        loads = {
            folders[name]: partial(wb.serve_bench, side, beside=beside, **asked)
            for name, side in sides.items()
        }
        for side, serve in zip(beside, loads.values(), strict=True):
            until_built(side, partial(serve, per_slot=min(per_slot, BUILDING_PER_SLOT)))
        fastest(engine, loads)
    return {name: load_steady(folder) for name, folder in folders.items()}


def load_steady(folder: str | Path) -> Steady:
    """Reads a run folder of `measured`."""
    served = load_served(folder)
    return Steady(served, rates(folder, served.rows[-1].setting.name))


def rates(folder: str | Path, arm: str) -> np.ndarray:
    """`Steady.rates` of a setting of a run folder. Fewer windows where tokens are few."""
    run, (requests,) = results.load_tables(folder, REQUESTS)
    requests = requests[requests["arm"] == arm]
    samples = run.samples[run.samples["arm"] == arm]
    due = requests.assign(key=requests["request"].astype(int)).set_index("key")["due_ns"]
    gone = samples.groupby("repetition", sort=False)["ns"].cumsum()
    at = np.sort((gone + samples["repetition"].astype(int).map(due)).to_numpy())
    begin, end = requests["end_ns"].min(), requests["sent_ns"].max()
    inside = at[(at >= begin) & (at <= end)]
    n = min(WINDOWS, len(inside) // 2)
    if n < 1:
        return np.empty(0)
    counts, _ = np.histogram(inside, bins=n, range=(begin, end))
    found = counts * 1e9 * n / (end - begin)
    return np.asarray(found[found > 0], float)


def most(concurrency: str) -> int:
    """The most requests in flight."""
    return max(int(n) for n in concurrency.split(","))


def curves(found: Mapping[str, Steady], latency: str = "mean_tpot_ms") -> pd.DataFrame:
    """For `plots.throughput_against_latency`: a curve for each setting but the control."""
    parts = [
        points(made.served.rows, name, latency) for name, made in found.items() if name != CONTROL
    ]
    frame = pd.concat(parts, ignore_index=True)
    frame.attrs = parts[0].attrs
    return frame


def speedups(found: Mapping[str, Steady]) -> pd.DataFrame:
    """A row for each setting but the first: its steady tokens a second over the first's.

    Columns: setting, tps, speedup, low, high (95 % interval), verdict; `attrs`: first, tps and band
    of the first setting. The A/A control is the first setting, served once more.
    """
    first = next(iter(found))
    ratios = {name: _ratio(found[first].rates, made.rates) for name, made in found.items()}
    band = stats.aa_band(ratios[CONTROL])
    rows = [
        {
            "setting": name, "tps": _median(found[name].rates), "speedup": ratio.value,
            "low": ratio.low, "high": ratio.high,
            "verdict": "A/A control" if name == CONTROL else stats.verdict(ratio, band),
        }
        for name, ratio in ratios.items()
        if name != first
    ]  # fmt: skip
    made = pd.DataFrame(rows)
    made.attrs |= {"first": first, "tps": _median(found[first].rates), "band": band}
    return made


def _ratio(before: np.ndarray, after: np.ndarray) -> stats.Ratio:
    if not (len(before) and len(after)):
        return stats.Ratio(math.nan, math.nan, math.nan, 0)
    return stats.independent_ratio(before, after)


def _median(rates: np.ndarray) -> float:
    return float(np.median(rates)) if len(rates) else math.nan


def settings_table(found: Mapping[str, Steady]) -> Table:
    """Steady tokens a second of each setting with the most in flight, beside the first setting."""
    frame = speedups(found)
    made = frame[["setting", "tps", "speedup"]].rename(columns={"tps": "out t/s"})
    made["95% CI"] = [stats.interval(*of) for of in frame[["low", "high"]].to_numpy()]
    made["verdict"] = frame["verdict"]
    setting = next(iter(found.values())).served.rows[-1].setting
    about = {frame.attrs["first"]: f"{frame.attrs['tps']:.0f} t/s", "load": setting.name}
    about[MEASURED] = results.taken(next(iter(found.values())).served.run)
    return Table(made).shown(keys=["setting"], digits={"out t/s": 0, "speedup": 3}, constant=about)


def latency_table(found: Mapping[str, Steady]) -> Table:
    """What requests see with the most in flight, and the share of all the time in which tokens are
    chosen."""
    rows = []
    for name, made in found.items():
        row = made.served.rows[-1]
        rows.append(
            {
                "setting": name, "TTFT ms": row.figures["mean_ttft_ms"],
                "TPOT ms": row.figures["mean_tpot_ms"], "P99 ITL ms": row.figures["p99_itl_ms"],
                "E2EL ms": row.figures["mean_e2el_ms"],
                "choosing": f"{step_figures(row)['sampling_share']:.1%}",
            }
        )  # fmt: skip
    return Table(rows).shown(keys=["setting"], right=["choosing"])


def arriving(
    engine: wb.Engine,
    toggles: Toggles,
    capacity: float,
    workload: str,
    concurrency: str,
    per_slot: int,
    seed: int,
    runs: str,
) -> dict[str, ServeBench]:
    """The same requests, all at once and one by one, as a Poisson process of CAPACITY times the
    requests a second that the engine can serve. capacity: those requests a second.

    Before them every step is taken that such requests can have (`slots/first_steps.py`): a request
    that is held up by a build holds up those behind it. Steps of prompts in parts are seen by
    serving per_slot requests for each slot. Then as many as come in ARRIVING_S one by one are
    served, and count."""
    (n_prompt, n_gen), slots = lengths(workload), most(concurrency)
    a_second = CAPACITY * capacity
    asked: dict[str, Any] = {
        "slots": slots, "n_prompt": str(n_prompt), "n_gen": str(n_gen), "n_warm_up": slots,
        "seed": seed,
    }  # fmt: skip
    few = per_slot * slots
    many = max(few, math.ceil(ARRIVING_S * a_second))
    found = {}
    with engine.variant(toggles) as side:
        first_steps(side, slots, (n_prompt, n_gen))
        for name, rate in ((ONE_BY_ONE, f"{a_second:.4g}"), (AT_ONCE, "inf")):
            serve = partial(wb.serve_bench, side, rate=rate, **asked)
            until_built(side, partial(serve, n_requests=few))
            folder = wb.new_run_folder(runs, f"arriving-{slug(name)}")
            found[name] = serve(n_requests=many, out=folder)
    return found


def arrivals_table(steady: Steady, arrived: Mapping[str, ServeBench]) -> Table:
    """What requests see by how they come: as many in flight as there are slots; one by one; all at
    once. A request's times count from when it was due."""
    row = steady.served.rows[-1]
    rows = [
        {
            "requests come": name, "out t/s": row.figures["output_throughput"],
            "TTFT ms": row.figures["mean_ttft_ms"], "P99 TTFT ms": row.figures["p99_ttft_ms"],
            "TPOT ms": row.figures["mean_tpot_ms"], "E2EL ms": row.figures["mean_e2el_ms"],
        }
        for name, row in {
            f"{row.setting.value:g} in flight": row,
            **{name: made.rows[0] for name, made in arrived.items()},
        }.items()
    ]  # fmt: skip
    (*_, last) = arrived.values()
    return Table(rows).shown(
        keys=["requests come"], digits={"out t/s": 0, "P99 TTFT ms": 1},
        constant={MEASURED: results.taken(last.run)},
    )  # fmt: skip


SHOWN = (1, 4, 8, 16, 32, 64, 128)  # in flight, of the thread's table
LLAMA, VLLM, OURS, HERE = (
    "llama.cpp (#14924)", "vLLM (#14924)", "this engine, recorded", "this engine, here",
)  # fmt: skip


def scaling(found: Mapping[str, Steady], page: str | Path | None = None) -> pd.DataFrame:
    """For `plots.scaling`: by requests in flight, how many times the tokens a second of one: in the
    thread of #14924, of this engine as the results page has it, and here. Labels of the thread's
    points are its seconds; `attrs["load"]` has the tokens of a request here. page: as for
    `recorded.block`."""
    rows = [
        {"curve": curve, "x": n, "y": claims.SERVED_S[1][i] / seconds[i], "label": seconds[i]}
        for i, curve in enumerate((LLAMA, VLLM))
        for n, seconds in claims.SERVED_S.items()
    ]
    own = recorded.block("over-http", page)
    if own is not None:
        tps = own.rows[["in flight", "t/s in process"]].astype(float).to_numpy()
        rows += [{"curve": OURS, "x": int(n), "y": t / tps[0, 1], "label": ""} for n, t in tps]
    here = figures_of(found)
    here = here[here["setting"] == next(iter(found))].sort_values("in_flight")
    one = here[FIGURES[0]].iloc[0] if here["in_flight"].iloc[0] == 1 else math.nan
    rows += [
        {"curve": HERE, "x": n, "y": t / one, "label": ""}
        for n, t in here[["in_flight", FIGURES[0]]].to_numpy()
    ]
    made = next(iter(found.values())).served.rows[-1].figures
    tokens = (made[f"total_{what}_tokens"] / made["completed"] for what in ("input", "output"))
    frame = pd.DataFrame(rows)
    frame.attrs["load"] = f"{' and '.join(f'{n:.0f}' for n in tokens)} tokens a request"
    frame.attrs |= {"recorded": "" if own is None else f"{own.rows['Model'][0]}; {own.words[0]}"}
    return frame


def thread_table(frame: pd.DataFrame) -> Table:
    """The thread's table beside ours: seconds of 989 requests of 1024 and 128 tokens, and how many
    times the tokens a second of one in flight. The picture also has 2 and 3 in flight. frame: of
    `scaling`."""
    by = frame.set_index(["curve", "x"])["y"]
    rows = []
    for n in SHOWN:
        llama_s, vllm_s = claims.SERVED_S[n]
        times = {curve: by.get((curve, n), math.nan) for curve in (LLAMA, VLLM, OURS)}
        rows.append(
            {
                "in flight": n, "llama.cpp s": llama_s, "vLLM s": vllm_s,
                "llama.cpp, times": times[LLAMA], "vLLM, times": times[VLLM],
                "ours, times": times[OURS],
            }
        )  # fmt: skip
    return Table(rows).shown(
        keys=["in flight"], digits={"llama.cpp s": 1, "vLLM s": 1},
        constant={"ours": str(frame.attrs["recorded"])},
    )  # fmt: skip


def figures_of(found: Mapping[str, Steady]) -> pd.DataFrame:
    """Figures for sentences, by setting and number of requests in flight: tokens a second, mean
    TPOT and TTFT, under vLLM's names."""
    return pd.DataFrame(
        {"setting": name, "in_flight": int(row.setting.value)}
        | {key: float(row.figures[key]) for key in FIGURES}
        for name, made in found.items()
        for row in made.served.rows
    )
