"""README's tables of what was recorded on a GPU machine, each with where its numbers are from.

`recorded.py` has the numbers. A table without runs is a line that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from data.measure import proofs, sources
from data.measure.recorded import (
    BATCHED,
    DECODED,
    LARGE,
    NOT_MEASURED,
    SCORED,
    SMALL,
    TYPES,
    Answer,
    Recorded,
    batch_steps,
    commit_of,
    decode,
    kernel_rows,
    model_of,
    percent,
    product_shares,
    scored,
)
from data.measure.sources import age, mark
from workbench.bench.bounds import FEW, FEW_BOUNDS, MANY_BOUNDS, Bound
from workbench.bench.comparison import AB
from workbench.report.tables import markdown


class OfARun(Protocol):
    """A run, or what was made of one: a comparison, gaps."""

    @property
    def run(self) -> dict[str, Any]: ...


def caption(runs: Iterable[OfARun], more: str = "") -> str:
    """Device, commits and date of runs that stand in one table."""
    found = [run.run for run in runs]
    devices = dict.fromkeys(str(run["engine"].get("device_description")) for run in found)
    commits = dict.fromkeys(commit_of(run) for run in found)
    date = min(run["started"][:10] for run in found)
    parts = [" and ".join(devices), *([more] if more else [])]
    return "; ".join([*parts, f"commit {', '.join(commits)}", date]) + f"{mark(*found)}."


def _span(values: Iterable[float]) -> str:
    """The least and the most, rounded; one number where they are the same."""
    texts = [f"{value:.0f}" for value in sorted(values)]
    return " to ".join(dict.fromkeys((texts[0], texts[-1])))


def decode_table(folder: Path, device: str = "cuda") -> str:
    """A row per model: decode with everything on but plans, without fusion, without pdl; pp512."""
    recorded, rows, runs = Recorded(folder, device), [], []
    for name in DECODED:
        full = decode(recorded, name)
        if full is None:
            continue
        others = [decode(recorded, f"{name}-{suffix}") for suffix in ("unfused", "plain")]
        unfused, plain = (f"{d.tg:.1f}" if d else "" for d in others)
        runs += [full.run, *(d.run for d in others if d)]
        rows.append(
            {
                "Model": full.model,
                "GB a token": f"{full.gb:.2f}",
                "t/s tg128": f"{full.tg:.1f}",
                "% of read": percent(full.share),
                "unfused": unfused,
                "no pdl": plain,
                "launches": str(full.launches),
                "t/s pp512": f"{full.pp:.0f}",
                "% of product": percent(full.product_share),
            }
        )
    if not rows:
        return f"Decode: {NOT_MEASURED}."
    read = [run.run["result"]["read_gbps"] for run in runs]
    said = f"read bandwidth {_span(read)} GB/s, medians of 5 repetitions"
    return markdown(pd.DataFrame(rows)) + "\n\n" + caption(runs, said)


def kernels_table(folder: Path, device: str = "cuda") -> str:
    """Share of the read bandwidth by type and shape of llama-3-8b, one token: plain / pdl."""
    run = Recorded(folder, device).run("kernels")
    if run is None:
        return f"Kernels: {NOT_MEASURED}."
    shapes = (*LARGE, *SMALL)
    cells: dict[str, dict[str, list[str]]] = {}
    for row in kernel_rows(run):
        if row["shape"] in shapes and row["batch"] == 1:
            line = cells.setdefault(row["type"], {})
            line.setdefault(row["shape"], []).append(f"{100 * row['share']:.0f}")
    rows = [
        {"type": dtype} | {shape[3:]: " / ".join(line.get(shape, [])) for shape in shapes}
        for dtype, line in cells.items()
    ]
    said = f"% of {run.run['result']['read_gbps']:.0f} GB/s, launched plainly / with pdl"
    return markdown(pd.DataFrame(rows)) + "\n\n" + caption([run], said)


def batches_table(folder: Path, device: str = "cuda") -> str:
    """A row per model and tokens computed at once: speed, and the share of either bound."""
    recorded, rows, runs = Recorded(folder, device), [], []
    for name in BATCHED:
        run = recorded.run(f"batches-{name}")
        if run is None:
            continue
        steps = batch_steps(recorded, name)
        runs += [run] if steps else []
        rows += [
            {
                "Model": model_of(run.run),
                "tokens": str(step.n_tokens),
                "t/s": f"{step.tps:.0f}",
                "% of read": percent(step.read),
                "% of product": percent(step.product),
                "bound": step.bound,
                "% of bound": percent(step.share),
            }
            for step in steps
        ]
    if not rows:
        return f"Batches: {NOT_MEASURED}."
    every = [run.run["result"] for run in runs]
    read, peak = ([result[key] for result in every] for key in ("read_gbps", "product_tflops"))
    said = f"read bandwidth {_span(read)} GB/s, large product {_span(peak)} TFLOP/s"
    return markdown(pd.DataFrame(rows)) + "\n\n" + caption(runs, said)


def kernels_batches_table(folder: Path, device: str = "cuda") -> str:
    """Share of the bound by type and tokens, the least and the most of the shapes of llama-3-8b."""
    run = Recorded(folder, device).run("kernels-batches")
    if run is None:
        return f"Kernels of many tokens: {NOT_MEASURED}."
    rows = []
    for dtype in TYPES:
        by_batch: dict[int, list[float]] = {}
        for (_, batch), share in product_shares(run, dtype).items():
            by_batch.setdefault(batch, []).append(100 * share)
        if by_batch:
            cells = {str(n): f"{min(of):.0f}..{max(of):.0f}" for n, of in sorted(by_batch.items())}
            rows.append({"type": dtype} | cells)
    result = run.run["result"]
    shapes = dict.fromkeys(row["shape"][3:] for row in kernel_rows(run))
    said = (
        f"% of the bound by tokens, the worst and the best of {', '.join(shapes)}; "
        f"{result['read_gbps']:.0f} GB/s, {result['product_tflops']:.0f} TFLOP/s"
    )
    return markdown(pd.DataFrame(rows)) + "\n\n" + caption([run], said)


def fusion_table(folder: Path, device: str = "cuda") -> str:
    """A row per toggle and model: what it brings alone, and what it brings to all the others."""
    recorded = Recorded(folder, device)
    cells: dict[tuple[str, str], dict[str, str]] = {}
    runs = []
    for name in recorded.names("fusion-"):
        run = recorded.run(name)
        if run is None:
            continue
        ab = AB(run.run, run.samples)
        row = next(r for r in ab.summary().to_dict("records") if not r["is_control"])
        background = "alone" if "-alone-" in name else "with all"
        counts = [
            next(iter(arm["program"].values()))["counts"]["launches"] for arm in run.run["arms"][:2]
        ]
        line = cells.setdefault((model_of(run.run), run.run["result"]["toggle"]), {})
        runs.append(run)
        line |= {
            f"launches {background}": f"{counts[0]} -> {counts[1]}",
            f"speedup {background}": f"{row['speedup']:.3f} ({row['low']:.3f}..{row['high']:.3f})",
            f"verdict {background}": row["verdict"],
        }
    if not cells:
        return f"Fusion: {NOT_MEASURED}."
    rows = [{"Model": m, "toggle": toggle} | line for (m, toggle), line in sorted(cells.items())]
    table = pd.DataFrame(rows).fillna("")
    n = sorted({run.run["repetitions"] for run in runs})
    tests = dict.fromkeys(test for run in runs for test in run.run["tests"])
    said = f"off -> on, {', '.join(tests)}, {' and '.join(map(str, n))} interleaved repetitions"
    return markdown(table) + "\n\n" + caption(runs, said)


def perplexity_table(folder: Path, device: str = "cuda") -> str:
    """A row per type: the fast path against the float path on tokens drawn from the model, by how
    many of them the fast path computed at once."""
    recorded = Recorded(folder, device)
    every = {quant: found for quant in SCORED if (found := scored(recorded, quant))}
    if not every:
        return f"Perplexity: {NOT_MEASURED}."
    sizes = sorted({a.n_ubatch for found in every.values() for a in found}, reverse=True)
    rows, runs = [], []
    for found in every.values():
        by_size, first = {a.n_ubatch: a for a in found}, found[0].run.run
        runs += [a.run for a in found]
        bounds = [table[first["model"]["quant"]] for table in (MANY_BOUNDS, FEW_BOUNDS)]
        same = min(a.run.run["result"]["agreement"]["same_argmax"] for a in found)
        rows.append(
            {"Model": model_of(first)}
            | {f"{n} at once": _both(by_size.get(n)) for n in sizes}
            | {"bound": _both(bounds[0], 0), f"bound to {FEW}": _both(bounds[1], 0)}
            | {"same argmax": f"{100 * same:.2f} %"}
        )
    tokens = dict.fromkeys(str(run.run["result"]["engine"]["n"]) for run in runs)
    said = f"{' or '.join(tokens)} tokens: mean KL in nats a token / NMSE of the logits"
    return markdown(pd.DataFrame(rows)) + "\n\n" + caption(runs, said)


def _both(found: Answer | Bound | None, digits: int = 1) -> str:
    """KL / NMSE."""
    if found is None:
        return ""
    values = (found.kl, found.nmse)
    return " / ".join("no number" if v is None else f"{v:.{digits}e}" for v in values)


# what each run of gpu-sanitizer.json looks for
CHECKS = {
    "before": "the tests that the tools run, without a tool",
    "memcheck": "reads and writes outside a tensor, or of one that was freed",
    "initcheck": "reads of device memory that nothing has written",
    "racecheck": "shared memory written and read without a barrier between",
    "synccheck": "barriers that not every thread reaches",
    "repetitions": "results that change, over poisoned repetitions: ordering through global memory",
}


# what ran the GPU tests of each file, and what they look at
GPU_TESTS = {
    "gpu-tests": (
        "make test-gpu",
        "`tests/gpu`: every kernel beside its slow twin, every op, the engine",
    ),
    "gpu-tests-two": (
        "record.py --two",
        "layers over two GPUs: bit-equal under every safe ordering, CUPTI of both",
    ),
}


def correctness_table(folder: Path) -> str:
    """The GPU tests, and what compute-sanitizer and the poisoned repetitions found."""
    recorded, rows, said = Recorded(folder), [], []
    tools = recorded.alone("gpu-sanitizer")
    for name, (run, what) in GPU_TESTS.items():
        tests = recorded.alone(name)
        if tests is None:
            continue
        n = tests["passed"] + tests["failed"]
        rows.append(_checked(run, what, n, tests["failed"], tests["duration_s"]))
        skipped = f", {tests['skipped']} skipped" if tests["skipped"] else ""
        said.append(f"{run}: {tests['device']}, {age(tests)}{skipped}")
    if tools is not None:
        for name, run in tools["runs"].items():
            what = CHECKS.get(name, "")
            rows.append(_checked(name, what, run["tests"], run["errors"], run["seconds"]))
        said.append(f"tools: {tools['device']}, {tools['duration_s']:.0f} s in all, {age(tools)}")
        said.append(f"compute-sanitizer {tools['tool']}")
    if not rows:
        return f"Correctness: {NOT_MEASURED}."
    return markdown(pd.DataFrame(rows)) + f"\n\n{'; '.join(said)}."


def _checked(run: str, what: str, tests: int, errors: int | None, seconds: float) -> dict[str, str]:
    told = "none told" if errors is None else str(errors)
    return {
        "run": run, "looks for": what, "tests": str(tests), "errors": told,
        "seconds": f"{seconds:.1f}",
    }  # fmt: skip


BLOCKS: dict[str, Callable[[Path], str]] = {
    "decode-cuda": decode_table,
    "batches-cuda": batches_table,
    "kernels-cuda": kernels_table,
    "kernels-batches-cuda": kernels_batches_table,
    "fusion-cuda": fusion_table,
    "perplexity-cuda": perplexity_table,
    "correctness-cuda": correctness_table,
    "proofs": proofs.table,
    "exhaustive": proofs.exhaustive,
    "sources": sources.table,
}
