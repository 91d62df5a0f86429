"""The figures of the runs that were recorded on a GPU machine; `blocks.py` makes tables of them.

`data.measure` writes the run folders, and nothing here measures. A share is of the read bandwidth,
or of the rate of a large matrix product, that the run's own process measured. A figure that was not
recorded is None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from data.measure.matrix import CPU_STEP, SIZES, Row, rows
from workbench.benchmarks.compare import pace, stats
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.stats import Band, Ratio
from workbench.benchmarks.runs import results
from workbench.benchmarks.scores.bounds import Bound, bound_of
from workbench.benchmarks.times.gaps import CONTROL
from workbench.benchmarks.workload import parse

NOT_MEASURED = "not measured"
TYPES = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
PHASES = ("prompts", "generated")  # of a test
MANY = 9  # tokens, and more
LARGE, SMALL = ("8b.glu", "8b.gate_up", "8b.head"), ("8b.qkv", "8b.o", "8b.down")


class Share(float):
    """A fraction that is written as a percentage: `f"{Share(0.5):.1f}"` is `50.0`."""

    def __format__(self, spec: str) -> str:
        return format(100 * float(self), spec)


def complete_run(folder: Path) -> results.Run | None:
    """The run in a folder. None without a run, or where the run was cut off."""
    found = results.load_run(folder) if (folder / results.RUN_JSON).is_file() else None
    return found if found and found.run["status"] == results.COMPLETE else None


def complete_runs(folder: Path) -> list[results.Run]:
    """The complete runs in the folders of a folder, small models first."""
    every = (complete_run(path.parent) for path in sorted(folder.glob(f"*/{results.RUN_JSON}")))
    return sorted(filter(None, every), key=lambda found: found.run["model"].get("n_params", 0))


class Recorded:
    """The runs of one device in a folder of results. Each run is read once, and each comparison is
    judged once: many tables show it."""

    def __init__(self, folder: Path, device: str = "cuda"):
        self.folder, self.device = folder, device
        self._runs: dict[str, results.Run | None] = {}
        self._compared: dict[str, AB] = {}

    def run(self, name: str) -> results.Run | None:
        """The run in `DEVICE-NAME`. None where there is none, or where the run does not count
        (`left_out` says why)."""
        if name not in self._runs:
            folder = self.folder / f"{self.device}-{name}"
            found = results.load_run(folder) if (folder / results.RUN_JSON).is_file() else None
            self._runs[name] = None if found and _useless(found.run) else found
        return self._runs[name]

    def of(self, step: str, kind: str = "", toggle: str = "") -> Iterator[tuple[Row, results.Run]]:
        """The measured rows of the matrix, each with its run."""
        for row in rows(step, kind, toggle):
            run = self.run(row.folder)
            if run is not None and (step != CPU_STEP or row.device == self.device):
                yield row, run

    def toggled(self, step: str, kind: str = "", toggle: str = "") -> Iterator[Toggled]:
        """The arms of a step's comparisons except baseline and control, each in every test."""
        for row, run in self.of(step, kind, toggle):
            ab = self._compared.setdefault(row.folder, AB(run.run, run.samples))
            arms = {arm["name"]: arm for arm in ab.run["arms"]}
            for found in ab.summary().to_dict("records"):
                if not found["is_control"]:
                    yield Toggled(row, ab, arms[found["arm"]], found)

    def left_out(self) -> list[str]:
        """A line for each run that does not count."""
        said = []
        for path in sorted(self.folder.glob(f"{self.device}-*/{results.RUN_JSON}")):
            why = _useless(json.loads(path.read_text()))
            said += [f"{path.parent.name} {why}"] if why else []
        return said

    def file(self, name: str) -> dict[str, Any] | None:
        """The content of `DEVICE-name.json`; None without the file."""
        return self.alone(f"{self.device}-{name}")

    def alone(self, name: str) -> dict[str, Any] | None:
        """The content of `name.json`, a file of no device; None without the file."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.is_file() else None


def _useless(run: dict[str, Any]) -> str:
    """Why a run does not count; empty where it counts."""
    if run["status"] != results.COMPLETE:
        return f"is {run['status']}"
    return f"is {run['result']['void']}" if run["result"].get("void") else ""


class Toggled(NamedTuple):
    """An arm of a comparison beside its baseline, in one test.

    row: of the matrix.
    arm: its record in run.json.
    found: its row of `AB.summary`.
    """

    row: Row
    ab: AB
    arm: dict[str, Any]
    found: dict[str, Any]

    @property
    def model(self) -> str:
        return model_of(self.ab.run)

    def speedup(self, digits: int = 3) -> str:
        of = self.found
        return f"{of['speedup']:.{digits}f} ({of['low']:.{digits}f}..{of['high']:.{digits}f})"

    @property
    def band(self) -> str:
        return f"{self.found['band_low']:.3f}..{self.found['band_high']:.3f}"


class Between(NamedTuple):
    """An arm beside another arm of the same run.

    before, after: t/s of both, medians of the same rounds.
    band: the band of the run's A/A control.
    """

    before: float
    after: float
    ratio: Ratio
    band: Band

    @property
    def verdict(self) -> str:
        return stats.verdict(self.ratio, self.band)


class Arms:
    """A run, read arm by arm.

    names: of its arms except the control, the baseline's first.
    """

    def __init__(self, found: results.Run):
        self.run, self.samples = found.run, pace.counted(found.run, found.samples)
        self.names = [arm["name"] for arm in self.run["arms"] if not arm["is_control"]]
        self._rates: dict[tuple[str, str], pd.DataFrame] = {}

    @property
    def model(self) -> str:
        return model_of(self.run)

    def side(self, name: str) -> list[str]:
        """The arms whose names begin with a word."""
        return [arm for arm in self.names if arm.split()[0] == name]

    def toggles(self, arm: str) -> dict[str, str]:
        found: dict[str, str] = next(a["toggles"] for a in self.run["arms"] if a["name"] == arm)
        return found

    def phases(self, test: str) -> list[str]:
        """Which of PHASES a test has."""
        one = parse(test)
        return [name for name, n in zip(PHASES, (one.n_prompt, one.n_gen), strict=True) if n]

    def rates(self, test: str, phase: str = "") -> pd.DataFrame:
        """t/s of a test, or of one of its phases: a row for each round, a column for each arm, the
        control included. The speed of a round is that of all its tokens together."""
        if (test, phase) not in self._rates:
            self._rates[test, phase] = self._rates_of(test, phase)
        return self._rates[test, phase]

    def _rates_of(self, test: str, phase: str) -> pd.DataFrame:
        rows = self.samples[self.samples["test"] == test]
        if phase and len(self.phases(test)) > 1:
            rows = rows[(rows["token"] == 0) == (phase == PHASES[0])]
        sums = rows.groupby(["repetition", "arm"], observed=True)[["n_tokens", "ns"]].sum()
        table = (sums["n_tokens"] * 1e9 / sums["ns"]).unstack()
        return table[[arm["name"] for arm in self.run["arms"] if arm["name"] in table]]

    def interval(self, test: str, arm: str, phase: str = "") -> tuple[float, float, float]:
        """Median t/s and its 95 % interval."""
        return stats.median_interval(self.rates(test, phase)[arm].dropna(), self.run["seed"])

    def ratio(self, test: str, before: str, after: str, phase: str = "") -> Ratio:
        """How many times faster an arm is than another, paired by round."""
        pairs = self.rates(test, phase).dropna(subset=[before, after])
        return stats.speedup(pairs[before].to_numpy(), pairs[after].to_numpy(), self.run["seed"])

    def band(self, test: str, phase: str = "") -> Band:
        """The band of the A/A control."""
        control = next(arm["name"] for arm in self.run["arms"] if arm["is_control"])
        return stats.aa_band(self.ratio(test, control.removesuffix(CONTROL), control, phase))

    def between(self, test: str, before: str, after: str, phase: str = "") -> Between:
        middle = self.rates(test, phase).dropna(subset=[before, after]).median()
        ratio, band = self.ratio(test, before, after, phase), self.band(test, phase)
        return Between(float(middle[before]), float(middle[after]), ratio, band)


def spread(ratio: Ratio, digits: int = 2) -> str:
    """A ratio with its interval, where it has one."""
    low, high = (f"{bound:.{digits}f}" for bound in (ratio.low, ratio.high))
    return f"{ratio.value:.{digits}f}" + (f" ({low}..{high})" if ratio.low == ratio.low else "")


def decode(recorded: Recorded, name: str) -> dict[str, Any] | None:
    """Decode and prompt of run `decode-NAME`, by name.

    share: of the read bandwidth, at which tg128 reads the weights.
    product_share: of the large product's rate, at which pp512 computes; None where the rate was not
        measured.
    of_product: product_share in words.
    per_layer: launches of a layer; the remaining launches are the embedding, the last norm and the
        head.
    """
    run = recorded.run(f"decode-{name}")
    if run is None or not {"tg128", "pp512"} <= set(run.samples["test"]):
        return None
    tg, pp = (float(Arms(run).rates(test).iloc[:, 0].median()) for test in ("tg128", "pp512"))
    model, result = run.run["model"], run.run["result"]
    read, peak = model["weight_bytes_per_token"] / 1e9, result.get("product_tflops")
    done = result["product_flops"]["pp512"] * pp / 512 / 1e12
    launches = run.run["arms"][0]["program"]["tg128"]["counts"]["launches"]
    product = Share(done / peak) if peak else None
    return {
        "model": model_of(run.run), "gb": read, "tg": tg, "pp": pp, "launches": launches,
        "share": Share(read * tg / result["read_gbps"]), "product_share": product,
        "of_product": f", {product:.1f} % of a large product's rate" if product else "",
        "per_layer": launches // model["n_layer"],
    }  # fmt: skip


def card_of(run: dict[str, Any]) -> str:
    """The card of a run: `NVIDIA H200`."""
    return str(run["engine"].get("device_description")).partition(" (")[0]


def model_of(run: dict[str, Any]) -> str:
    name = run["model"]["name"].replace(" with random weights", "")
    return f"{name} {run['model']['quant']}"


def title_of(name: str) -> str:
    """The result of `model_of` for a model by its name in folders."""
    preset, _, quant = name.rpartition("-")
    return f"{preset} {quant.upper().removesuffix('_M')}"


def depth_ratio(recorded: Recorded, _: str = "") -> dict[str, float] | None:
    """ratio: what the deepest test of `depth-llama-3-8b-q4_0` adds to a token over an empty cache,
    as a multiple of the time that reading the cache takes at the run's read bandwidth."""
    run = recorded.run("depth-llama-3-8b-q4_0")
    ns = run.samples.groupby("test")["ns"].median() if run else {}
    depths = {int(test.partition("@d")[2] or 0): us for test, us in ns.items()}
    if run is None or 0 not in depths or not max(depths):
        return None
    cache = max(depths) * run.run["result"]["cache_bytes_per_token"]
    reading = cache / run.run["result"]["read_gbps"]  # bytes / (GB/s) is ns
    return {"ratio": float(depths[max(depths)] - depths[0]) / reading}


class Step(NamedTuple):
    """A step of many tokens.

    read: share of the read bandwidth, at which it reads the weights once.
    product: share of the large product's rate, at which it computes the products.
    """

    n_tokens: int
    tps: float
    read: Share
    product: Share

    @property
    def share(self) -> Share:
        """The share of the bound that applies: the longer of reading and computing alone."""
        return max(self.read, self.product)

    @property
    def bound(self) -> str:
        return "memory" if self.read >= self.product else "tensor cores"


def batch_steps(recorded: Recorded, name: str) -> list[Step]:
    """The steps of run `batches-NAME`, fewest tokens first; empty where there is no such run."""
    run = recorded.run(f"batches-{name}")
    if run is None or "product_tflops" not in run.run["result"]:
        return []
    result, found = run.run["result"], []
    reading = run.run["model"]["weight_bytes_per_token"] / result["read_gbps"]  # ns
    ns = run.samples.groupby("test")["ns"].median()
    for test, flops in result["product_flops"].items():
        n, took = int(test.removeprefix("pp")), float(ns[test])
        computing = flops / result["product_tflops"] / 1e3
        found.append(Step(n, n / took * 1e9, Share(reading / took), Share(computing / took)))
    return sorted(found)


def together(run: results.Run) -> dict[str, Any]:
    """The figures of a run of sequences side by side; medians of steps and of repetitions.

    pp, tg: tokens of all sequences per second, of prompts and generated.
    each: generated tokens of a sequence per second.
    bound: tg of a step that takes no longer than to read the weights and the used cells once.
    share: of the bound.
    """
    (name,), result = run.run["tests"], run.run["result"]
    test, samples = parse(name), run.samples
    prompts, steps = samples[samples["token"] == 0], samples[samples["token"] > 0]
    step_ns = float(steps["ns"].median())
    weights = run.run["model"]["weight_bytes_per_token"]
    read = test.step_bytes(weights, result["cache_bytes_per_token"])
    tg, bound = test.n_seqs * 1e9 / step_ns, test.n_seqs * result["read_gbps"] * 1e9 / read
    return {
        "model": model_of(run.run), "n_seqs": test.n_seqs, "tg": tg, "each": tg / test.n_seqs,
        "pp": test.n_prompt_tokens * 1e9 / float(prompts["ns"].median()),
        "step_ms": step_ns / 1e6, "step_gb": read / 1e9, "bound": bound, "share": Share(tg / bound),
    }  # fmt: skip


def kernel_rows(run: results.Run | None, dtype: str = "") -> pd.DataFrame:
    """The rows that `bench-kernels` measured, of a type where one is named.

    share: of the read bandwidth.
    of_bound: share of the bound, the longer of reading the weights and computing at the large
        product's rate; NaN where that rate was not measured.
    """
    if run is None:
        return pd.DataFrame({"type": [], "shape": [], "launch": [], "batch": [], "share": []})
    result = run.run["result"]
    rows = pd.DataFrame(result["rows"])
    reading = rows["bytes"] / result["read_gbps"] / 1e3
    flops = 2 * rows["rows"] * rows["cols"] * rows["batch"]
    computing = flops / result.get("product_tflops", math.nan) / 1e6
    rows["of_bound"] = np.maximum(reading, computing) / rows["us"]  # NaN spreads
    return rows[rows["type"] == dtype] if dtype else rows


def worst_share(
    run: results.Run | None, dtype: str, shapes: Sequence[str], launch: str
) -> tuple[float, str] | None:
    """The least share of the read bandwidth of a type for one token, and its shape. None unless
    every one of `shapes` was measured."""
    rows = kernel_rows(run, dtype)
    ours = rows[(rows["launch"] == launch) & (rows["batch"] == 1) & rows["shape"].isin(shapes)]
    if set(ours["shape"]) != set(shapes):
        return None
    worst = ours.loc[ours["share"].idxmin()]
    return worst["share"], worst["shape"]


def as_launched(run: results.Run | None, dtype: str) -> pd.DataFrame:
    """The products of a type with a known share of the bound, each launched as the engine does:
    programmatically where the kernels can be."""
    rows = kernel_rows(run, dtype).dropna(subset=["of_bound"] if run else None)
    return rows.drop_duplicates(["shape", "batch"], keep="last")  # plain, then pdl


def worst_batch(run: results.Run | None, dtype: str) -> tuple[float, str, int] | None:
    """The product of many tokens with the least share of the bound: share, shape, batch."""
    rows = as_launched(run, dtype)
    rows = rows[rows["batch"] >= MANY]
    if rows.empty:
        return None
    worst = rows.loc[rows["of_bound"].idxmin()]
    return worst["of_bound"], worst["shape"], int(worst["batch"])


class Answer(NamedTuple):
    """The fast path against the float path.

    n_ubatch: tokens that the fast path computed at once.
    kl, nmse: None where they are not finite.
    """

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
    """The answers of a type of llama-3.2-1b, most tokens at once first.

    A run with bit-equal logits is left out: both of its sides took the same path, so it compares
    nothing.
    """
    found = []
    for suffix in SIZES.values():
        run = recorded.run(f"perplexity-llama-3.2-1b-{quant}{suffix}")
        if run and (agreement := run.run["result"]["agreement"])["nmse"] != 0:
            size = run.run["result"]["n_ubatch"]
            bound = bound_of(run.run["model"]["quant"], size)
            found.append(Answer(size, agreement["kl_mean"], agreement["nmse"], bound, run))
    return sorted(found, key=lambda answer: -answer.n_ubatch)


def told(found: dict[str, Any], *said: str) -> str:
    """A caption: what is said, the commit of a file, and its date."""
    date = (found.get("date") or found["started"])[:10]
    return f"{'; '.join(said)}; commit {commit_of(found)}; {date}."


def commit_of(found: dict[str, Any]) -> str:
    """The short commit of a run or a file, with a note where changes were not committed."""
    commit = found["commit"]
    return str(commit["hash"])[:8] + (" with uncommitted changes" if commit.get("dirty") else "")
