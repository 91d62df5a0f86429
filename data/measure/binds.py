"""What binds where a target is missed: from kernels' own times, launches, ablated steps, counters.

Pure functions of what `data.measure` recorded:

    cuda-kernels, cuda-kernels-batches   what a product took
    cuda-launches.json                   what launches and plain reading take on the same card
    cuda-ablation-MODEL[-N].json         where the time of a step goes
    cuda-counters.json                   how busy a product keeps each part of the device

A time and the bandwidth beside it come from one file. Only the cost of a launch is compared across
processes.

A token of a plan is the device's time and a gap. The gap is the time until the host has the logits,
and then the host's time to the next token's first kernel. `benchmarks/times/token_parts.py`
measures both by the device's clock. The phases of the host come from an arm's counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from data.measure import peer, plan_tables
from data.measure.plan_tables import (
    KINDS,
    OFF,
    OURS,
    Planned,
    captured,
    kind_of,
    planned,
    plans_of,
)
from data.measure.recorded import NOT_MEASURED, Recorded, Toggled, as_launched, commit_of, title_of
from data.measure.tables import span
from workbench.answers import kept
from workbench.benchmarks.compare.stats import SLOWER
from workbench.benchmarks.kernels.kernel_cases import MODELS
from workbench.benchmarks.runs.results import Run
from workbench.config import Pdl, PlanScope

READ = "read"  # the type that counters give to kernels that only read
LEAST_SHARE = 0.03  # of a step, from which a kind of launch is named

# A part of the device binds from FULL percent on. Memory also binds from LIKE_READING times the
# percentage of a kernel that only reads as many bytes.
FULL, LIKE_READING = 80.0, 0.95
PARTS = {
    "issue_pct": "issue slots", "alu_pct": "integer units", "fma_pct": "multiply-add units",
    "lsu_pct": "load-store units", "tensor_pct": "tensor cores",
}  # fmt: skip
MOST_PARTS, MOST_WAITS = 2, 2  # that are named
WAITS = {
    "barrier": "barriers", "branch_resolving": "branches", "dispatch_stall": "dispatch",
    "drain": "stores to leave", "gmma": "warpgroup products", "imc_miss": "constants",
    "lg_throttle": "room in the queue of loads", "long_scoreboard": "memory",
    "math_pipe_throttle": "a busy unit", "membar": "fences",
    "misc": "other things", "mio_throttle": "room in the queue of shared memory",
    "no_instruction": "instructions to come",
    "not_selected": "other warps' turn", "short_scoreboard": "shared memory", "sleeping": "sleep",
    "tex_throttle": "room in the texture queue", "wait": "fixed latencies",
}  # fmt: skip


class Bind(NamedTuple):
    """A missed target."""

    missed: str
    measured: str
    binds: tuple[str, ...]


def read_us(nbytes: float, gbps: float) -> float:
    return nbytes / gbps / 1e3


def product(row: dict[str, Any], gbps: float, launches: dict[str, Any] | None) -> str:
    """The least time of the launches in one row of `bench-kernels`, and the time that is left."""
    if launches is None or row["launch"] not in launches["graph_us"]:
        return NOT_MEASURED
    cost = launches["graph_us"][row["launch"]]["median"]
    alone = {of["bytes"]: of["us"]["median"] for of in launches["reads"]}
    n = row["launches"]
    each = row["bytes"] // n
    read, us = read_us(each, gbps), row["us"] / n
    best = read + cost
    said = [
        f"a launch takes {us:.2f} us; reading {each / 1e6:.1f} MB {read:.2f} and an empty launch "
        f"{cost:.2f}, one after the other, would be {_percent(read / best)}"
    ]
    reading = alone.get(each) if row["launch"] == "plain" else None
    if reading is not None:
        share = read_us(each, launches["read_gbps"]) / reading
        said.append(f"a kernel that only reads takes {reading:.2f} ({_percent(share)})")
    floor = best if reading is None else max(best, reading)
    said.append(f"the product's own {us - floor:.2f} us")
    return "; ".join(said)


def batched_product(row: dict[str, Any], gbps: float, tflops: float) -> str:
    """The two bounds of a product of many tokens, and what it took."""
    flops = 2 * row["rows"] * row["cols"] * row["batch"]
    return (
        f"{row['us']:.1f} us, of which reading alone would take "
        f"{read_us(row['bytes'], gbps):.1f}, tensor cores alone {flops / tflops / 1e6:.1f}"
    )


def step(found: dict[str, Any] | None) -> tuple[str, ...]:
    """Where the time of a step goes: the host, the launches, and the kinds of launch that save most
    when they are left out."""
    if found is None:
        return (NOT_MEASURED,)
    whole, graph = found["step_us"]["median"], found["graph_us"]["median"]
    # costs are differences to the graph whose tensors share no memory
    apart = found["apart_us"]["median"]
    gbps, tflops = found["read_gbps"], found.get("product_tflops")
    bounds = [f"reading weights {read_us(found['weight_bytes'], gbps):.0f}"]
    if tflops and found["n_tokens"] > 1:
        bounds.append(f"tensor cores {found['product_flops'] / tflops / 1e6:.0f}")
    kinds: dict[str, dict[str, Any]] = found["kinds"]
    order = sorted(kinds, key=lambda kind: -kinds[kind]["us"]["median"])
    named = [kind for kind in order if kinds[kind]["us"]["median"] >= LEAST_SHARE * apart]
    rest = apart - sum(kinds[kind]["us"]["median"] for kind in named)
    said = [
        f"step {whole:.0f} us, its {found['launches']} launches as one graph {graph:.0f} "
        f"({', '.join(bounds)}), no two tensors in the same memory {apart:.0f}",
        f"left out, they save: {', '.join(_kind(kind, kinds[kind], apart, gbps) for kind in named)}"
        f"; not of any one of these {rest:.0f}",
    ]
    slower = [
        kind for kind in reversed(order) if kinds[kind]["us"]["median"] <= -LEAST_SHARE * apart
    ]
    longer = ", ".join(f"{kind} {-kinds[kind]['us']['median']:.0f}" for kind in slower)
    said += [f"without these the graph takes longer: {longer}"] if longer else []
    if not found["unchanged"]:
        said.append("void: the others computed on other values")
    return tuple(said)


def _kind(name: str, kind: dict[str, Any], graph: float, gbps: float) -> str:
    us, nbytes = kind["us"]["median"], kind["weight_bytes"]
    reads = f", reads for {read_us(nbytes, gbps):.0f}" if nbytes else ""
    return f"{name} {us:.0f} ({_percent(us / graph)}{reads})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def counted(case: dict[str, Any], reading: dict[str, Any] | None = None) -> str:
    """What a launch kept busy, by hardware counters, and what binds it: memory, or parts of a
    multiprocessor that are full."""
    memory = case.get("memory_pct")
    parts = sorted((key for key in PARTS if key in case), key=lambda key: -case[key])[:MOST_PARTS]
    if memory is None or not parts:
        return NOT_MEASURED
    most = reading.get("memory_pct") if reading else None
    said = [f"memory {memory:.0f} % busy" + (f" (reading alone {most:.0f} %)" if most else "")]
    said += [f"{PARTS[key]} {case[key]:.0f} %" for key in parts]
    full = [PARTS[key] for key in parts if case[key] >= FULL]
    if memory >= (FULL if most is None else min(FULL, LIKE_READING * most)):
        full.insert(0, "memory")
    waits = [
        f"{WAITS.get(reason, reason)} ({cycles:.1f})"
        for reason, cycles in sorted(case["stalls"].items(), key=lambda item: -item[1])
    ][:MOST_WAITS]
    verdict = f"{' and '.join(full)} bind" + ("s" if full == ["memory"] else "")
    if not full:
        warps = case.get("warps_pct")
        room = f" with {warps:.0f} % of the warps there is room for" if warps is not None else ""
        verdict = f"none is full{room}: latency binds"
    waited = f"; a warp waits longest (cycles an instruction) for {', '.join(waits)}"
    return f"{', '.join(said)}: {verdict}" + (waited if waits else "")


def _case(
    counters: dict[str, Any] | None, dtype: str, nbytes: int, batch: int
) -> dict[str, Any] | None:
    """The counted launch of a type that reads so many bytes for so many tokens."""
    wanted = {"type": dtype, "bytes": nbytes, "batch": batch}
    cases = (counters or {}).get("cases", ())
    return next((case for case in cases if wanted.items() <= case.items()), None)


def by_counters(counters: dict[str, Any] | None, row: dict[str, Any]) -> str:
    """What the counters say of a launch in a row of `bench-kernels`; empty where it was not
    counted. A row of several launches with equal weights is read as each of them."""
    nbytes = row["bytes"] // row.get("launches", 1)
    case = _case(counters, row["type"], nbytes, row["batch"])
    return f"by counters: {counted(case, _case(counters, READ, nbytes, 1))}" if case else ""


def step_by_counters(counters: dict[str, Any] | None, model: str, n_tokens: int) -> tuple[str, ...]:
    """What the counters say of each product in a model's step of n_tokens, or of the nearest number
    of tokens that was counted; empty where no product of the model was counted."""
    ours = [
        case for case in (counters or {}).get("cases", ()) if case["batch"] > 1
        and f"{MODELS.get(case['shape'].partition('.')[0])}-{case['type'].lower()}" == model
    ]  # fmt: skip
    if not ours:
        return ()
    size = min((case["batch"] for case in ours), key=lambda n: (abs(n - n_tokens), n))
    return tuple(
        f"by counters, {case['shape'].partition('.')[2]} of {size} tokens: "
        f"{case.get('us', 0.0):.1f} us, {counted(case)}"
        for case in ours if case["batch"] == size
    )  # fmt: skip


# by target ----------------------------------------------------------------------------------------


def of_products(
    recorded: Recorded, dtypes: Iterable[str], shapes: Iterable[str], launch: str, least: float
) -> list[Bind]:
    """A line for each product of `bench-kernels` below `least` of the read bandwidth."""
    run, launches = recorded.run("kernels"), recorded.file("launches")
    counters = recorded.file("counters")
    if run is None:
        return []
    wanted, types = set(shapes), set(dtypes)
    return [
        Bind(
            f"{row['type']} {row['shape']}, {launch}", f"{_percent(row['share'])}",
            tuple(filter(None, (product(row, run.run["result"]["read_gbps"], launches),
                                by_counters(counters, row)))),
        )
        for row in run.run["result"]["rows"]
        if row["batch"] == 1 and row["launch"] == launch and row["share"] < least
        and row["type"] in types and row["shape"] in wanted
    ]  # fmt: skip


def of_batched_product(
    recorded: Recorded, dtype: str, share: float, shape: str, batch: int
) -> list[Bind]:
    """The line of one product of many tokens, launched as the engine does. share: of its bound."""
    run = recorded.run("kernels-batches")
    if run is None:
        return []
    result, rows = run.run["result"], as_launched(run, dtype)
    (row,) = rows[(rows["shape"] == shape) & (rows["batch"] == batch)].to_dict("records")
    said = (
        batched_product(row, result["read_gbps"], result["product_tflops"]),
        by_counters(recorded.file("counters"), row),
    )
    return [Bind(f"{dtype} {shape}, {batch} tokens", _percent(share), tuple(filter(None, said)))]


def of_step(recorded: Recorded, run: str, model: str, n_tokens: int, measured: str) -> Bind:
    """The line of a model's step of `run`."""
    what, sizes = f"{model}, tg128", {1: ""}
    counters: tuple[str, ...] = ()
    if n_tokens > 1:
        what, sizes = model, _sizes(recorded, model)
        counters = step_by_counters(recorded.file("counters"), model, n_tokens)
    if not sizes:
        return Bind(what, measured, counters or (NOT_MEASURED,))
    size = min(sizes, key=lambda n: (abs(n - n_tokens), n))
    found = recorded.file(f"ablation-{model}{sizes[size]}")
    first, *rest = step(found)
    first = f"of {size} tokens: {first}" if n_tokens > 1 and found else first
    rest += _commits(found, recorded.run(run))
    return Bind(what, measured, (first, *rest, *counters))


def _commits(found: dict[str, Any] | None, run: Run | None) -> list[str]:
    """The commit at which a step was taken apart, and the run's commit where it is another."""
    if found is None or "commit" not in found:
        return []
    apart, ours = commit_of(found), commit_of(run.run) if run else ""
    return [f"taken apart at commit {apart}" + (f", the run is of {ours}" if ours != apart else "")]


def origins(recorded: Recorded) -> list[str]:
    """The files with launches and counters, each with its commit."""
    found = {name: recorded.file(name) for name in ("launches", "counters")}
    return [
        f"`{recorded.device}-{name}.json` is of commit {commit_of(file)}"
        for name, file in found.items()
        if file is not None and "commit" in file
    ]


def _sizes(recorded: Recorded, model: str) -> dict[int, str]:
    """The steps of more than one token that were taken apart: their number of tokens to the suffix
    of their file."""
    start = f"{recorded.device}-ablation-{model}-"
    stems = (path.stem.removeprefix(start) for path in recorded.folder.glob(f"{start}*.json"))
    return {int(stem): f"-{stem}" for stem in stems if stem.isdigit()}


# by target: plans ---------------------------------------------------------------------------------

PHASES = {"batch": "inputs", "reuse": "looking the program up", "issue": "issuing"}


def _above(us: float, bound: float) -> str:
    return f"{us:.0f} us, {100 * (us / bound - 1):.1f} % above {bound:.0f}"


def token_parts(one: Planned) -> str:
    """A token as a sum, and its gap as one; medians over the rounds need not add up."""
    us = one.us
    return (
        f"token {us['token']:.0f} = device {us['device']:.0f} + gap {us['gap']:.0f}; of the gap, "
        f"{us['gap'] - us['host']:.0f} until the host has the logits, {us['host']:.0f} the host"
    )


def host_phases(one: Planned) -> str:
    """The host's work for a token, without waiting, us; from the arm's timed repetitions."""
    found = kept.phases_us(one.arm["counters"])
    return ", ".join(f"{name} {found[phase]:.0f}" for phase, name in PHASES.items())


def plan_gaps(recorded: Recorded, most_gap: float, most_host: float) -> Iterator[Bind]:
    """An item for each kind of plan with plans=ours: how many rows miss a target, and the parts of
    the worst and of the best row."""
    ours = [one for one in planned(recorded) if one.rule == OURS]
    for kind in KINDS:
        rows = sorted((one for one in ours if one.kind == kind), key=lambda one: one.us["gap"])
        over = {part: sum(one.us[part] > most for one in rows)
                for part, most in (("gap", most_gap), ("host", most_host))}  # fmt: skip
        if not any(over.values()):
            continue
        said = {part: span([one.us[part] for one in rows]) for part in over}
        yield Bind(
            f"plans=ours, {kind}",
            f"gap {said['gap']} us, {over['gap']} of {len(rows)} rows above {most_gap:.0f}; host "
            f"{said['host']} us, {over['host']} above {most_host:.0f}",
            tuple(
                f"{name}, {one.named}: {token_parts(one)}; the host's phases: {host_phases(one)}"
                for name, one in dict(zip(("the longest gap", "the shortest"), (rows[-1], rows[0]),
                                          strict=True)).items()
            ),
        )  # fmt: skip


def plan_kernels(recorded: Recorded, bounds: Mapping[str, Mapping[str, float]]) -> Iterator[Bind]:
    """An item for each model whose kernels take longer than they did as captured. bounds: us by
    model, for each value of `pdl`."""
    for one in planned(recorded):
        bound = bounds.get(one.toggles["pdl"], {}).get(one.model)
        if bound is None or (one.rule, one.kind) != (OURS, KINDS[1]):
            continue
        us = one.us["device"]
        if us <= bound:
            continue
        same = [
            other.us["device"]
            for other in planned(recorded)
            if other.rule != OFF and (other.model, other.toggles["pdl"])
            == (one.model, one.toggles["pdl"])
        ]  # fmt: skip
        yield Bind(
            f"{one.named}, a token's kernels",
            _above(us, bound),
            (
                f"the same kernels as plans of any rule in the same run: {span(same)} us; its "
                f"rounds {span(one.ab.run['result']['parts'][one.arm['name']]['device'])}",
            ),
        )


def replayed_launches(recorded: Recorded, bounds: Mapping[str, float]) -> Iterator[Bind]:
    """An item for each model whose launches take longer, as a plan replayed one replay after the
    other, than they did as captured."""
    for row in plan_tables.timed_rows(recorded):
        bound, us = bounds.get(row["model"]), row["device_us"]
        if row["scope"] == PlanScope.SPLIT and bound is not None and us["median"] > bound:
            yield Bind(
                f"{title_of(row['model'])}, replayed one behind the other",
                _above(us["median"], bound),
                (f"rounds of {us['min']:.0f} to {us['max']:.0f} us; {row['nodes']} nodes, "
                 f"{row['programmatic_edges']} of {row['edges']} edges programmatic",),
            )  # fmt: skip


def beside(recorded: Recorded, bounds: Mapping[str, float], most_gap: float) -> Iterator[Bind]:
    """An item for each model whose tg128 misses its target against llama.cpp's best: by how much a
    token is too long, where its time goes, and how long it would be with the target's gap."""
    parted = {
        (one.model, one.kind): one
        for one in planned(recorded)
        if (one.rule, one.toggles["pdl"]) == (OURS, Pdl.ON.value)
    }
    for model, bound in bounds.items():
        run = peer.recorded_peer(recorded, model)
        if run is None or (best := run.best(peer.SHOWN)).beside.ratio.value >= bound:
            continue
        found = best.beside
        us, wanted = 1e6 / found.after, 1e6 / (found.before * bound)
        said = [f"a token takes {us:.0f} us, {us - wanted:.0f} more than {bound:g} times allow"]
        if one := parted.get((model, kind_of(run.toggles(best.arm_ours)))):
            short = us - max(0.0, one.us["gap"] - most_gap)
            alone = 1e6 / one.row["tps_toggled"]
            said += [
                f"with a gap of {most_gap:.0f} us it would be {1e6 / short / found.before:.2f}",
                f"in `{recorded.device}-plans-{model}`, without llama.cpp in turn, a token took "
                f"{alone:.0f} us, which would be {1e6 / alone / found.before:.2f}",
                f"there {token_parts(one)}",
            ]
        yield Bind(f"{run.model}, tg128 beside llama.cpp", f"{found.ratio.value:.2f}", tuple(said))


def first_tokens(recorded: Recorded) -> Iterator[Bind]:
    """An item for each kind of plan whose first tokens take longer than without plans: which tokens
    cost more, and how much the others save."""
    warm = {row["model"]: row for row in plan_tables.timed_rows(recorded)
            if row["scope"] == PlanScope.STEP}  # fmt: skip
    for one in recorded.toggled("plans", "fresh"):
        if one.found["verdict"] == SLOWER:
            yield _first_tokens(one, warm.get(one.row.model))


def _first_tokens(one: Toggled, warm: Mapping[str, Any] | None) -> Bind:
    plans = plans_of(one)
    ms = one.ab.samples.groupby(["arm", "token"])["ns"].median() / 1e6
    more = ms[one.arm["name"]] - ms[one.ab.run["arms"][0]["name"]]
    n = plans["plans_captured"] + plans.get("plans_twinned", 0)
    making = (plans["plans_capture_ns"] + plans["plans_instantiate_ns"]) / 1e6
    dear = more.nlargest(n).sort_index()
    others = more.drop(dear.index)
    said = [
        f"captured: {captured(plans)}; tokens {', '.join(map(str, dear.index))} take "
        f"{', '.join(f'{value:.1f}' for value in dear)} ms more than without plans, the "
        f"other {len(others)} together {-others.sum():.1f} ms less",
        f"capturing and making launchable take {making:.1f} ms of it; what else a first use costs, "
        "these runs do not tell apart",
    ]
    if warm is not None:
        each = sum(warm[call]["median"] for call in ("capture_us", "instantiate_us", "upload_us"))
        said.append(
            f"in a warm engine {n} plans of a step, their uploads included, take "
            f"{n * each / 1e3:.1f} ms"
        )
    name = f"{one.model}, first {len(more)} tokens, {kind_of(one.arm['toggles'])}"
    return Bind(name, f"{one.found['speedup']:.3f} times as fast", tuple(said))
