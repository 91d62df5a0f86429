"""What the runs recorded on a GPU machine say, as numbers and as README's tables.

`tests.gpu.measure` writes the run folders; every share here is of the read bandwidth (or the rate
of a large matrix product) that the process of that very run measured. Nothing here measures, and
what is not recorded is None, or a line that says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from workbench.bench import results
from workbench.bench.bounds import FEW, FEW_BOUNDS, MANY_BOUNDS, Bound, bound_of
from workbench.bench.comparison import AB
from workbench.report.tables import markdown

NOT_MEASURED = "not measured"
DECODED = (
    "llama-3-8b-f16", "llama-3-8b-q8_0", "llama-3-8b-q4_0", "llama-3.2-1b-bf16", "qwen3-4b-q4_k_m",
)  # fmt: skip
SCORED = ("f16", "bf16", "q8_0", "q4_0", "q4_k_m", "q5_k_m", "q6_k", "mxfp4")
TYPES = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
LARGE, SMALL = ("8b.glu", "8b.gate_up", "8b.head"), ("8b.qkv", "8b.o", "8b.down")


class Recorded:
    """The runs of one device in a folder of results; each is read once."""

    def __init__(self, folder: Path, device: str = "cuda"):
        self.folder, self.device = folder, device
        self._runs: dict[str, results.Run | None] = {}

    def run(self, name: str) -> results.Run | None:
        """The run in `DEVICE-NAME`; None where there is none, or one that counts for nothing
        (`left_out` says why)."""
        if name not in self._runs:
            folder = self.folder / f"{self.device}-{name}"
            found = results.load_run(folder) if (folder / results.RUN_JSON).is_file() else None
            self._runs[name] = None if found and _useless(found.run) else found
        return self._runs[name]

    def left_out(self) -> list[str]:
        """A line for each run that counts for nothing."""
        said = []
        for name in self.names(""):
            folder = self.folder / f"{self.device}-{name}"
            why = _useless(json.loads((folder / results.RUN_JSON).read_text()))
            said += [f"{folder.name} {why}"] if why else []
        return said

    def names(self, prefix: str) -> list[str]:
        """Names of the runs that begin with `prefix`."""
        start = f"{self.device}-"
        found = sorted(p.parent.name for p in self.folder.glob(f"{start}{prefix}*/run.json"))
        return [name.removeprefix(start) for name in found]

    def file(self, name: str) -> dict[str, Any] | None:
        """What `DEVICE-name.json` holds; None where there is none."""
        path = self.folder / f"{self.device}-{name}.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def load_seconds(self) -> list[float] | None:
        """How long each load of llama-3-8b Q4_0 took."""
        found = self.file("load-llama-3-8b-q4_0")
        return found["seconds"] if found else None


def _useless(run: dict[str, Any]) -> str:
    """Why a run counts for nothing; empty where it counts."""
    if run["status"] != results.COMPLETE:
        return f"is {run['status']}"
    return f"is {run['result']['void']}" if run["result"].get("void") else ""


def tps(run: results.Run, test: str) -> float | None:
    """The median over repetitions of a test's tokens per second."""
    rates = results.rates(run.samples)
    found = rates.loc[rates["test"] == test, "tps"]
    return float(found.median()) if len(found) else None


class Decode(NamedTuple):
    """A model's decode and prompt. share: of the read bandwidth that tg128 reads weights at;
    product_share: of the large product's rate that pp512 computes at, None where not measured."""

    model: str
    gb: float
    tg: float
    share: float
    pp: float
    product_share: float | None
    launches: int
    n_layer: int
    run: results.Run


def decode(recorded: Recorded, name: str) -> Decode | None:
    """What run `decode-NAME` says."""
    run = recorded.run(f"decode-{name}")
    if run is None:
        return None
    tg, pp = tps(run, "tg128"), tps(run, "pp512")
    if tg is None or pp is None:
        return None
    model, result = run.run["model"], run.run["result"]
    peak = result.get("product_tflops")
    done = result["product_flops"]["pp512"] * pp / 512 / 1e12
    return Decode(
        _model(run.run), model["weight_bytes_per_token"] / 1e9, tg,
        model["weight_bytes_per_token"] * tg / 1e9 / result["read_gbps"],
        pp, done / peak if peak else None,
        run.run["arms"][0]["program"]["tg128"]["counts"]["launches"], model["n_layer"], run,
    )  # fmt: skip


def _model(run: dict[str, Any]) -> str:
    name = run["model"]["name"].replace(" with random weights", "")
    return f"{name} {run['model']['quant']}"


def depth_ratio(recorded: Recorded) -> float | None:
    """What the deepest test of `depth-llama-3-8b-q4_0` adds to a token over an empty cache, in
    times that reading the cache takes at the run's read bandwidth."""
    run = recorded.run("depth-llama-3-8b-q4_0")
    if run is None:
        return None
    ns = run.samples.groupby("test")["ns"].median()
    depths = {int(test.partition("@d")[2] or 0): test for test in ns.index}
    cells = max(depths)
    if not cells or 0 not in depths:
        return None
    cache = cells * run.run["result"]["cache_bytes_per_token"]
    added = float(ns[depths[cells]] - ns[depths[0]])
    return added / (cache / run.run["result"]["read_gbps"])  # bytes / (GB/s) is ns


def batch_shares(recorded: Recorded, name: str) -> dict[int, float] | None:
    """Of run `batches-NAME`: tokens at once to the share that a step reaches of its bound, the
    longer of reading the weights once and computing the products at the large product's rate."""
    run = recorded.run(f"batches-{name}")
    if run is None or "product_tflops" not in run.run["result"]:
        return None
    result, shares = run.run["result"], {}
    reading = run.run["model"]["weight_bytes_per_token"] / result["read_gbps"]
    ns = run.samples.groupby("test")["ns"].median()
    for test, flops in result["product_flops"].items():
        bound = max(reading, flops / result["product_tflops"] / 1e3)
        shares[int(test.removeprefix("pp"))] = bound / float(ns[test])
    return shares


def kernel_rows(run: results.Run | None) -> list[dict[str, Any]]:
    return [] if run is None else run.run["result"]["rows"]


def worst_share(
    rows: Iterable[dict[str, Any]], dtype: str, shapes: Iterable[str], launch: str
) -> tuple[float, str] | None:
    """The least share of the read bandwidth of a type, and the shape that has it; None unless every
    one of `shapes` was measured."""
    wanted = set(shapes)
    found = {
        row["shape"]: row["share"]
        for row in rows
        if row["type"] == dtype and row["launch"] == launch and row["batch"] == 1
        and row["shape"] in wanted
    }  # fmt: skip
    if set(found) != wanted:
        return None
    shape = min(found, key=found.__getitem__)
    return found[shape], shape


def worst_batch(
    run: results.Run | None, dtype: str, least: int = 9
) -> tuple[float, str, int] | None:
    """Of the products of `least` and more tokens, launched as the engine does (programmatically
    where the kernels can be): the least share of the bound, its shape and batch. The bound is the
    longer of reading the weights and computing at the large product's rate."""
    if run is None or "product_tflops" not in run.run["result"]:
        return None
    result, found = run.run["result"], {}
    for row in result["rows"]:  # of one shape and batch: plain, then pdl
        if row["type"] == dtype and row["batch"] >= least:
            flops = 2 * row["rows"] * row["cols"] * row["batch"]
            bound_us = max(
                row["bytes"] / result["read_gbps"] / 1e3, flops / result["product_tflops"] / 1e6
            )
            found[row["shape"], row["batch"]] = bound_us / row["us"]
    if not found:
        return None
    shape, batch = min(found, key=found.__getitem__)
    return found[shape, batch], shape, batch


class Answer(NamedTuple):
    """The fast path against the float path. n_ubatch: tokens that the fast path computed at once;
    kl, nmse: None where they are no finite numbers."""

    n_ubatch: int
    kl: float | None
    nmse: float | None
    bound: Bound
    run: results.Run

    @property
    def holds(self) -> bool:
        both = ((self.kl, self.bound.kl), (self.nmse, self.bound.nmse))
        return all(value is not None and value <= most for value, most in both)


def scored(recorded: Recorded, quant: str) -> list[Answer]:
    """What the runs of a type of llama-3.2-1b say, most tokens at once first.

    A run without n_ubatch computed as many as its engine's n_ubatch. One whose logits are equal to
    the last bit is left out: both of its sides took the same path, so that it compares nothing.
    """
    found, name = [], f"perplexity-llama-3.2-1b-{quant}"
    for run in (recorded.run(each) for each in (name, *recorded.names(f"{name}-ub"))):
        if run is None or run.run["result"]["agreement"]["nmse"] == 0:
            continue
        result = run.run["result"]
        size = result.get("n_ubatch") or run.run["engine"]["config"]["n_ubatch"]
        bound = bound_of(run.run["model"]["quant"], size)
        agreement = result["agreement"]
        found.append(Answer(size, agreement["kl_mean"], agreement["nmse"], bound, run))
    return sorted(found, key=lambda answer: -answer.n_ubatch)


# README's tables ---------------------------------------------------------------------------------


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def caption(runs: Iterable[results.Run], more: str = "") -> str:
    """Device, commits and date of runs that stand in one table."""
    found = [run.run for run in runs]
    devices = dict.fromkeys(str(run["engine"].get("device_description")) for run in found)
    commits = dict.fromkeys(str(run["commit"]["hash"])[:8] for run in found)
    date = min(run["started"][:10] for run in found)
    parts = [" and ".join(devices), *([more] if more else [])]
    return "; ".join([*parts, f"commit {', '.join(commits)}", date]) + "."


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
    said = f"read bandwidth {min(read):.0f} to {max(read):.0f} GB/s, medians of 5 repetitions"
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
        line = cells.setdefault((_model(run.run), run.run["result"]["toggle"]), {})
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
            {"Model": _model(first)}
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


BLOCKS: dict[str, Callable[[Path], str]] = {
    "decode-cuda": decode_table,
    "kernels-cuda": kernels_table,
    "fusion-cuda": fusion_table,
    "perplexity-cuda": perplexity_table,
}
