"""What binds where a target is missed: from kernels' own times, launches and ablated steps.

Pure functions of what `tests.gpu.measure` recorded: `cuda-kernels` and `cuda-kernels-batches` say
what a product took, `cuda-launches.json` what launches and plain reading take on the same card,
`cuda-ablation-MODEL[-N].json` where the time of a step goes. Every bandwidth is the one of the file
that a time stands in, so that nothing is compared across processes but the cost of a launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from workbench.report.recorded import NOT_MEASURED, Recorded

LEAST_SHARE = 0.03  # of a step, from which a kind of launch is named


class Bind(NamedTuple):
    """One line of the table: what is missed, and what binds it."""

    missed: str
    measured: str
    binds: str


def read_us(nbytes: float, gbps: float) -> float:
    return nbytes / gbps / 1e3


def launch_us(launches: dict[str, Any] | None, kind: str) -> float | None:
    """What each empty launch of a graph takes; kind: `plain` or `pdl`."""
    found = (launches or {}).get("graph_us", {}).get(kind)
    return None if found is None else float(found["median"])


def reading_us(launches: dict[str, Any] | None, nbytes: int) -> float | None:
    """What the fastest reading kernel takes for so many bytes, launched plainly; None where that
    size was not measured."""
    for row in (launches or {}).get("reads", ()):
        if row["bytes"] == nbytes:
            return float(row["us"]["median"])
    return None


def product(row: dict[str, Any], gbps: float, launches: dict[str, Any] | None) -> str:
    """What the launches of one row of `bench-kernels` cannot do without, and what is left.

    Reading takes its time at the full bandwidth, and an empty launch takes its own; launched
    plainly, one hardly overlaps the other. Reading kernels, which have nothing else to do, say what
    filling and draining the memory system adds to that; what the product takes beyond the longer
    of the two is its own.
    """
    cost = launch_us(launches, row["launch"])
    if cost is None:
        return NOT_MEASURED
    n = row["launches"]
    each = row["bytes"] // n
    read, us = read_us(each, gbps), row["us"] / n
    best = read + cost
    said = [
        f"a launch takes {us:.2f} us; reading {each / 1e6:.1f} MB {read:.2f} and an empty launch "
        f"{cost:.2f}, one after the other, would be {_percent(read / best)}"
    ]
    reading = reading_us(launches, each) if row["launch"] == "plain" else None
    if reading is not None and launches is not None:
        share = read_us(each, launches["read_gbps"]) / reading
        said.append(f"a kernel that only reads takes {reading:.2f} ({_percent(share)})")
    floor = best if reading is None else max(best, reading)
    said.append(f"the product's own {us - floor:.2f} us")
    return "; ".join(said)


def batched_product(row: dict[str, Any], gbps: float, tflops: float) -> str:
    """The two bounds of a product of many tokens, and what it took."""
    flops = 2 * row["rows"] * row["cols"] * row["batch"]
    return (
        f"{row['us']:.1f} us; reading {read_us(row['bytes'], gbps):.1f}, "
        f"tensor cores {flops / tflops / 1e6:.1f}"
    )


def step(found: dict[str, Any] | None) -> str:
    """Where the time of a step goes: host, launches, and the kinds of launch by what leaving each
    out saves, the most first; beside a kind with weights how long reading those takes. Kinds
    without which the rest takes longer are named as well: they say how far costs do not add up."""
    if found is None:
        return NOT_MEASURED
    whole, graph = found["step_us"]["median"], found["graph_us"]["median"]
    gbps, tflops = found["read_gbps"], found.get("product_tflops")
    bounds = [f"reading weights {read_us(found['weight_bytes'], gbps):.0f}"]
    if tflops and found["n_tokens"] > 1:
        bounds.append(f"tensor cores {found['product_flops'] / tflops / 1e6:.0f}")
    kinds: dict[str, dict[str, Any]] = found["kinds"]
    order = sorted(kinds, key=lambda kind: -kinds[kind]["us"]["median"])
    named = [kind for kind in order if kinds[kind]["us"]["median"] >= LEAST_SHARE * graph]
    rest = graph - sum(kinds[kind]["us"]["median"] for kind in named)
    said = [_kind(kind, kinds[kind], graph, gbps) for kind in named]
    slower = [
        kind for kind in reversed(order) if kinds[kind]["us"]["median"] <= -LEAST_SHARE * graph
    ]
    longer = ", ".join(f"{kind} {-kinds[kind]['us']['median']:.0f}" for kind in slower)
    return (
        f"step {whole:.0f} us, its {found['launches']} launches as one graph {graph:.0f} "
        f"({', '.join(bounds)}); left out, they save: {', '.join(said)}; "
        f"not of any one of these {rest:.0f}"
        + (f"; without these the graph takes longer: {longer}" if longer else "")
    )


def _kind(name: str, kind: dict[str, Any], graph: float, gbps: float) -> str:
    us, nbytes = kind["us"]["median"], kind["weight_bytes"]
    reads = f", reads for {read_us(nbytes, gbps):.0f}" if nbytes else ""
    return f"{name} {us:.0f} ({_percent(us / graph)}{reads})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# by target ----------------------------------------------------------------------------------------


def of_products(
    recorded: Recorded, dtypes: Iterable[str], shapes: Iterable[str], launch: str, least: float
) -> list[Bind]:
    """A line for each product of `bench-kernels` below `least` of the read bandwidth."""
    run, launches = recorded.run("kernels"), recorded.file("launches")
    if run is None:
        return []
    wanted, types = set(shapes), set(dtypes)
    return [
        Bind(
            f"{row['type']} {row['shape']}, {launch}", f"{_percent(row['share'])}",
            product(row, run.run["result"]["read_gbps"], launches),
        )
        for row in run.run["result"]["rows"]
        if row["batch"] == 1 and row["launch"] == launch and row["share"] < least
        and row["type"] in types and row["shape"] in wanted
    ]  # fmt: skip


def of_batched_product(recorded: Recorded, dtype: str, shape: str, batch: int) -> list[Bind]:
    """The line of one product of many tokens, launched as the engine does."""
    run = recorded.run("kernels-batches")
    if run is None:
        return []
    result = run.run["result"]
    rows = [
        row for row in result["rows"]
        if row["type"] == dtype and row["shape"] == shape and row["batch"] == batch
    ]  # fmt: skip
    return [
        Bind(
            f"{dtype} {shape}, {batch} tokens", f"{row['us']:.1f} us",
            batched_product(row, result["read_gbps"], result["product_tflops"]),
        )
        for row in rows[-1:]  # plain, then pdl
    ]  # fmt: skip


def of_step(recorded: Recorded, model: str, n_tokens: int, measured: str) -> Bind:
    """The line of a model's step. Where steps of n_tokens were not taken apart, the number taken
    apart that is nearest stands for them, and is named."""
    sizes = {1: ""} if n_tokens == 1 else _sizes(recorded, model)
    if not sizes:
        return Bind(f"{model}, {n_tokens} tokens", measured, NOT_MEASURED)
    size = min(sizes, key=lambda n: (abs(n - n_tokens), n))
    found = step(recorded.file(f"ablation-{model}{sizes[size]}"))
    instead = "" if size == n_tokens or found == NOT_MEASURED else f"of {size} tokens: "
    what = f"{model}, {n_tokens} tokens" if n_tokens > 1 else f"{model}, tg128"
    return Bind(what, measured, instead + found)


def _sizes(recorded: Recorded, model: str) -> dict[int, str]:
    """Tokens of the steps of a model that were taken apart, more than one: to the name's suffix."""
    start = f"{recorded.device}-ablation-{model}-"
    stems = (path.stem.removeprefix(start) for path in recorded.folder.glob(f"{start}*.json"))
    return {int(stem): f"-{stem}" for stem in stems if stem.isdigit()}
