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
from data.measure.plan_tables import KINDS, OFF, OURS, Planned, kind_of, planned
from data.measure.recorded import NOT_MEASURED, Recorded, Toggled, as_launched, commit_of, title_of
from data.measure.tables import span
from workbench.answers import kept
from workbench.benchmarks.compare.stats import SLOWER
from workbench.benchmarks.kernels.kernel_cases import MODELS
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
    "math_pipe_throttle": "a busy unit", "membar": "fences", "misc": "other things",
    "mio_throttle": "room in the queue of shared memory", "no_instruction": "instructions to come",
    "not_selected": "other warps' turn", "short_scoreboard": "shared memory", "sleeping": "sleep",
    "tex_throttle": "room in the texture queue", "wait": "fixed latencies",
}  # fmt: skip


class Bind(NamedTuple):
    """A missed target.

    missed: what is missed.
    measured: the figure that was reached.
    binds: the reasons, a statement each.
    """

    missed: str
    measured: str
    binds: Iterable[str]


def read_us(nbytes: float, gbps: float) -> float:
    return nbytes / gbps / 1e3


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def product(row: dict[str, Any], gbps: float, launches: dict[str, Any] | None) -> str:
    """The least time of the launches in one row of `bench-kernels`, and the time that is left.

    Reading takes its time at the full bandwidth, and an empty launch takes its own time. Launched
    plainly, the two hardly overlap. A kernel that only reads shows what filling and draining the
    memory system adds. The rest of the product's time is the product's own.
    """
    if launches is None or row["launch"] not in launches["graph_us"]:
        return NOT_MEASURED
    cost = launches["graph_us"][row["launch"]]["median"]
    alone = {of["bytes"]: of["us"]["median"] for of in launches["reads"]}
    each = row["bytes"] // row["launches"]
    read, us = read_us(each, gbps), row["us"] / row["launches"]
    best = floor = read + cost
    said = (
        f"a launch takes {us:.2f} us; reading {each / 1e6:.1f} MB {read:.2f} and an empty launch "
        f"{cost:.2f}, one after the other, would be {_percent(read / best)}"
    )
    if row["launch"] == "plain" and each in alone:
        share, floor = read_us(each, launches["read_gbps"]) / alone[each], max(best, alone[each])
        said += f"; a kernel that only reads takes {alone[each]:.2f} ({_percent(share)})"
    return f"{said}; the product's own {us - floor:.2f} us"


def step(found: dict[str, Any] | None) -> list[str]:
    """Where the time of a step goes: the host, the launches, and the kinds of launch that save most
    when they are left out. For a kind with weights, also the time that reading the weights takes.
    Kinds without which the rest takes longer are named: they show how far the costs do not add up.
    """
    if found is None:
        return [NOT_MEASURED]
    # costs are differences to the graph whose tensors share no memory
    whole, graph, apart = (found[f"{way}_us"]["median"] for way in ("step", "graph", "apart"))
    gbps, tflops = found["read_gbps"], found.get("product_tflops")
    bounds = [f"reading weights {read_us(found['weight_bytes'], gbps):.0f}"]
    if tflops and found["n_tokens"] > 1:
        bounds.append(f"tensor cores {found['product_flops'] / tflops / 1e6:.0f}")
    us = {kind: of["us"]["median"] for kind, of in found["kinds"].items()}
    order = sorted(us, key=lambda kind: -us[kind])
    saved = []
    for kind in order:
        nbytes = found["kinds"][kind]["weight_bytes"]
        reads = f", reads for {read_us(nbytes, gbps):.0f}" if nbytes else ""
        if us[kind] >= LEAST_SHARE * apart:
            saved.append(f"{kind} {us[kind]:.0f} ({_percent(us[kind] / apart)}{reads})")
    rest = apart - sum(us[kind] for kind in order[: len(saved)])
    said = [
        f"step {whole:.0f} us, its {found['launches']} launches as one graph {graph:.0f} "
        f"({', '.join(bounds)}), no two tensors in the same memory {apart:.0f}",
        f"left out, they save: {', '.join(saved)}; not of any one of these {rest:.0f}",
    ]
    longer = [f"{k} {-us[k]:.0f}" for k in reversed(order) if us[k] <= -LEAST_SHARE * apart]
    said += [f"without these the graph takes longer: {', '.join(longer)}"] if longer else []
    return said + ([] if found["unchanged"] else ["void: the others computed on other values"])


def counted(case: dict[str, Any], reading: dict[str, Any] | None = None) -> str:
    """What a launch kept busy, by hardware counters, and what binds it: memory, or parts of a
    multiprocessor that are full. Where none is full, the reasons for which warps waited are named.
    reading: the launch that only reads as many bytes."""
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


def cases(recorded: Recorded) -> list[dict[str, Any]]:
    """The launches that were counted."""
    return (recorded.file("counters") or {}).get("cases", [])


def by_counters(recorded: Recorded, row: dict[str, Any]) -> list[str]:
    """What the counters say of a launch in a row of `bench-kernels`; empty where it was not
    counted. A row of several launches with equal weights is read as each of them."""
    nbytes = row["bytes"] // row.get("launches", 1)
    case, reading = (
        next((c for c in cases(recorded) if (c["type"], c["bytes"], c["batch"]) == wanted), None)
        for wanted in ((row["type"], nbytes, row["batch"]), (READ, nbytes, 1))
    )
    return [f"by counters: {counted(case, reading)}"] if case else []


def step_by_counters(recorded: Recorded, model: str, n_tokens: int) -> list[str]:
    """What the counters say of each product in a model's step of n_tokens, or of the nearest number
    of tokens that was counted; empty where no product of the model was counted."""
    ours = [
        case for case in cases(recorded) if case["batch"] > 1
        and f"{MODELS.get(case['shape'].partition('.')[0])}-{case['type'].lower()}" == model
    ]  # fmt: skip
    size = min({case["batch"] for case in ours}, key=lambda n: (abs(n - n_tokens), n), default=0)
    return [
        f"by counters, {case['shape'].partition('.')[2]} of {size} tokens: "
        f"{case.get('us', 0.0):.1f} us, {counted(case)}"
        for case in ours if case["batch"] == size
    ]  # fmt: skip


def of_products(
    recorded: Recorded, dtypes: Iterable[str], shapes: Iterable[str], launch: str, least: float
) -> Iterator[Bind]:
    """An item for each product of `bench-kernels` below `least` of the read bandwidth."""
    run, launches = recorded.run("kernels"), recorded.file("launches")
    for row in run.run["result"]["rows"] if run else ():
        below = (row["batch"], row["launch"]) == (1, launch) and row["share"] < least
        if below and row["type"] in dtypes and row["shape"] in shapes:
            assert run is not None
            said = product(row, run.run["result"]["read_gbps"], launches)
            name = f"{row['type']} {row['shape']}, {launch}"
            yield Bind(name, _percent(row["share"]), [said, *by_counters(recorded, row)])


def of_batched_product(
    recorded: Recorded, dtype: str, share: float, shape: str, batch: int
) -> Iterator[Bind]:
    """The item of one product of many tokens, launched as the engine does: its two bounds, and what
    it took. share: of its bound."""
    if run := recorded.run("kernels-batches"):
        result, rows = run.run["result"], as_launched(run, dtype)
        (row,) = rows[(rows["shape"] == shape) & (rows["batch"] == batch)].to_dict("records")
        flops = 2 * row["rows"] * row["cols"] * batch
        said = (
            f"{row['us']:.1f} us, of which reading alone would take "
            f"{read_us(row['bytes'], result['read_gbps']):.1f}, tensor cores alone "
            f"{flops / result['product_tflops'] / 1e6:.1f}"
        )
        named = f"{dtype} {shape}, {batch} tokens"
        yield Bind(named, _percent(share), [said, *by_counters(recorded, row)])


def of_step(recorded: Recorded, run: str, model: str, n_tokens: int, measured: str) -> Bind:
    """The item of a model's step of `run`, from the step of a number of tokens nearest to it that
    was taken apart. Said is the commit at which it was, and the run's where it is another."""
    what, sizes, counters = f"{model}, tg128", {1: ""}, list[str]()
    if n_tokens > 1:
        start = f"{recorded.device}-ablation-{model}-"
        stems = (path.stem.removeprefix(start) for path in recorded.folder.glob(f"{start}*.json"))
        what, sizes = model, {int(stem): f"-{stem}" for stem in stems if stem.isdigit()}
        counters = step_by_counters(recorded, model, n_tokens)
    if not sizes:
        return Bind(what, measured, counters or [NOT_MEASURED])
    size = min(sizes, key=lambda n: (abs(n - n_tokens), n))
    found = recorded.file(f"ablation-{model}{sizes[size]}")
    said = step(found)
    if n_tokens > 1 and found:
        said[0] = f"of {size} tokens: {said[0]}"
    if found and "commit" in found:
        of = recorded.run(run)
        apart, ours = commit_of(found), commit_of(of.run) if of else ""
        other = f", the run is of {ours}" if ours != apart else ""
        said.append(f"taken apart at commit {apart}{other}")
    return Bind(what, measured, [*said, *counters])


def origins(recorded: Recorded) -> list[str]:
    """The files with launches and counters, each with its commit."""
    found = {name: recorded.file(name) for name in ("launches", "counters")}
    return [
        f"`{recorded.device}-{name}.json` is of commit {commit_of(file)}"
        for name, file in found.items()
        if file is not None and "commit" in file
    ]


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


def plan_gaps(recorded: Recorded, most_gap: float, most_host: float) -> Iterator[Bind]:
    """An item for each kind of plan with plans=ours: how many rows miss a target, and the parts of
    the worst and of the best row."""
    for kind in KINDS:
        ours = [one for one in planned(recorded) if (one.rule, one.kind) == (OURS, kind)]
        rows = sorted(ours, key=lambda one: one.us["gap"])
        over = {part: sum(one.us[part] > most for one in rows)
                for part, most in (("gap", most_gap), ("host", most_host))}  # fmt: skip
        if not any(over.values()):
            continue
        gap, host = (span([one.us[part] for one in rows]) for part in over)
        said = []
        for name, one in (("the longest gap", rows[-1]), ("the shortest", rows[0])):
            us = kept.phases_us(one.arm["counters"])  # without waiting
            phases = ", ".join(f"{what} {us[phase]:.0f}" for phase, what in PHASES.items())
            said.append(f"{name}, {one.named}: {token_parts(one)}; the host's phases: {phases}")
        yield Bind(
            f"plans=ours, {kind}",
            f"gap {gap} us, {over['gap']} of {len(rows)} rows above {most_gap:.0f}; host "
            f"{host} us, {over['host']} above {most_host:.0f}",
            said,
        )


def plan_kernels(recorded: Recorded, bounds: Mapping[str, Mapping[str, float]]) -> Iterator[Bind]:
    """An item for each model whose kernels take longer than they did as captured. bounds: us by
    model, for each value of `pdl`."""
    for one in planned(recorded):
        pdl, us = one.toggles["pdl"], one.us["device"]
        bound = bounds.get(pdl, {}).get(one.model)
        if bound is None or (one.rule, one.kind) != (OURS, KINDS[1]) or us <= bound:
            continue
        same = [
            other.us["device"] for other in planned(recorded)
            if other.rule != OFF and (other.model, other.toggles["pdl"]) == (one.model, pdl)
        ]  # fmt: skip
        said = (
            f"the same kernels as plans of any rule in the same run: {span(same)} us; its "
            f"rounds {span(one.ab.run['result']['parts'][one.arm['name']]['device'])}"
        )
        yield Bind(f"{one.named}, a token's kernels", _above(us, bound), [said])


def replayed_launches(recorded: Recorded, bounds: Mapping[str, float]) -> Iterator[Bind]:
    """An item for each model whose launches take longer, as a plan replayed one replay after the
    other, than they did as captured."""
    for row in plan_tables.timed_rows(recorded):
        bound, us = bounds.get(row["model"]), row["device_us"]
        if row["scope"] == PlanScope.SPLIT and bound is not None and us["median"] > bound:
            said = (
                f"rounds of {us['min']:.0f} to {us['max']:.0f} us; {row['nodes']} nodes, "
                f"{row['programmatic_edges']} of {row['edges']} edges programmatic"
            )
            named = f"{title_of(row['model'])}, replayed one behind the other"
            yield Bind(named, _above(us["median"], bound), [said])


def beside(recorded: Recorded, bounds: Mapping[str, float], most_gap: float) -> Iterator[Bind]:
    """An item for each model whose tg128 misses its target against llama.cpp's best: by how much a
    token is too long, where its time goes, and how long it would be with the target's gap. The
    parts come from the model's comparison of plans, of the same kind of plan."""
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
        yield Bind(f"{run.model}, tg128 beside llama.cpp", f"{found.ratio.value:.2f}", said)


def first_tokens(recorded: Recorded) -> Iterator[Bind]:
    """An item for each kind of plan whose first tokens take longer than without plans: which tokens
    cost more, and how much the others save."""
    warm = {row["model"]: row for row in plan_tables.timed_rows(recorded)
            if row["scope"] == PlanScope.STEP}  # fmt: skip
    for one in recorded.toggled("plans", "fresh"):
        if one.found["verdict"] == SLOWER:
            yield _first_tokens(one, warm.get(one.row.model))


def _first_tokens(one: Toggled, warm: Mapping[str, Any] | None) -> Bind:
    plans = plan_tables.plans_of(one)
    ms = one.ab.samples.groupby(["arm", "token"])["ns"].median() / 1e6
    more = ms[one.arm["name"]] - ms[one.ab.run["arms"][0]["name"]]
    n = plans["plans_captured"] + plans.get("plans_twinned", 0)
    making = (plans["plans_capture_ns"] + plans["plans_instantiate_ns"]) / 1e6
    dear = more.nlargest(n).sort_index()
    others = more.drop(dear.index)
    said = [
        f"captured: {plan_tables.captured(plans)}; tokens {', '.join(map(str, dear.index))} take "
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
    return Bind(name, f"{one.found['speedup']:.3f} times as fast", said)
