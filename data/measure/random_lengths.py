"""Slots with prompts of random lengths, masked cells skipped or not (llama.cpp #14924).

    python -m data.measure.random_lengths [MODEL] [--means 1024,..] [--prompts 200] [--slots 32]

As llama.cpp's `server-bench.py` has it: as many requests in flight as there are slots, prompts of 0
to twice a mean length, and 256 tokens each. Each arm is an engine process of its own, and both take
every mean length in turn. Runtime is fitted by a quadratic in the mean length: products cost as
much for each token, attention as much as there are tokens before it. Runtime is a + b x + c x^2
in the mean length x. The ratio of two c is the gain for prompts without end, by which llama.cpp
#14924 judges the skipping of masked cache.
The run folder is `data/results/random-lengths/MODEL`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from cyclopts import App

from data.measure.command import PAD, USUAL, Call, Options, Recording, at_least_one, numbers, start
from data.measure.over_http import Point, about_engine, measure
from data.measure.recorded import Recorded, model_of
from data.measure.tables import Folder, Line, Part
from workbench.benchmarks.compare.rounds import interleave
from workbench.benchmarks.runs import results
from workbench.common.errors import UsageError
from workbench.common.sizes import round_up
from workbench.config import BEST, EngineConfig, TogglePreset
from workbench.server.serving import serving
from workbench.server.wire.worker import WorkerSettings
from workbench.traffic.bench import BenchSpec
from workbench.traffic.load import normal_ids
from workbench.traffic.served import reached

OFF, ON = "off", "tail"
# both with llama.cpp's extents of the cache: a server's own extents would make reading all longer
ARMS = {way: TogglePreset(BEST, {"skip_masked_kv": way, "kv_growth": "step"}) for way in (OFF, ON)}

app = App(help=__doc__, result_action="return_none")


@app.default
def main(
    model: str = "llama-3.2-1b-q4_k_m",
    *,
    means: str = "1024,2048,4096,6144,8192",
    prompts: int = 200,
    slots: int = 32,
    n_gen: int = 256,
    n_ubatch: int = 512,
    rounds: int = 1,
    options: Options = USUAL,
) -> None:
    """Measures both arms at every mean length, and prints the table.

    Parameters
    ----------
    model: as folders name it.
    means: mean lengths of prompts; a quadratic needs three or more.
    prompts: requests of each point.
    slots: requests served at once, and in flight.
    n_gen: tokens that each request generates.
    n_ubatch: tokens computed at once.
    rounds: how often each point is measured.
    """
    lengths = sorted(set(numbers("--means", means)))
    at_least_one(lengths[0], prompts, slots, n_gen, rounds,
                 flags="--means, --prompts, --slots, --n-gen and --rounds")  # fmt: skip
    call = Call(RUNS.name, options)
    folder = call.out / model

    def measured() -> None:
        path = call.model_file(model)
        config = EngineConfig(
            device=options.device, n_ctx=slots * round_up(2 * lengths[-1] + n_gen, PAD),
            n_seqs=slots, n_ubatch=n_ubatch, n_kv_pad=PAD,
        )  # fmt: skip
        ids, warm_up = normal_ids(path), min(slots, prompts)
        points = [  # each with prompts of its own, which both arms are sent
            Point(f"mean {mean}", slots, BenchSpec.of(
                f"rng-0-{2 * mean}", str(n_gen), ids, n_requests=prompts, n_warm_up=warm_up,
                seed=seed, parallel=slots,
            ))
            for seed, mean in enumerate(lengths)
        ]  # fmt: skip
        toggles = {name: serving(options.device, arm).changes for name, arm in ARMS.items()}
        about, tests = about_engine(path, options.device), [point.test for point in points]
        recording = Recording(RUNS.name, folder, about, toggles, tests, rounds)
        recording.result |= {"points": [], "slots": slots, "n_ubatch": n_ubatch}
        with ExitStack() as stack, recording.kept():
            targets = [
                stack.enter_context(reached(WorkerSettings(str(path), config, slots, arm)))
                for arm in ARMS.values()
            ]

            def take(number: int, arm: int) -> None:
                round_, i = divmod(number, len(points))
                row = measure(recording, recording.arms[arm], round_, targets[arm], points[i])
                seconds = row.figures["duration"]
                print(f"  {points[i].test} {recording.arms[arm]}: {seconds:.2f} s", flush=True)

            interleave(call.rounds(rounds * len(points)), len(ARMS), take)

    call.make(model, folder, measured, shown)


class Quadratic(NamedTuple):
    """a + b x + c x^2. errors: standard errors of a, b, c; NaN where three points fix all three."""

    a: float
    b: float
    c: float
    errors: tuple[float, float, float]

    def __call__(self, x: float) -> float:
        return self.a + self.b * x + self.c * x * x

    def __str__(self) -> str:
        b, c = (f"{'-' if value < 0 else '+'} {abs(value):.3g}" for value in (self.b, self.c))
        return f"{self.a:.3g} {b} x {c} x²"


def quadratic(
    lengths: Sequence[float] | np.ndarray, seconds: Sequence[float] | np.ndarray
) -> Quadratic:
    """The least-squares fit of runtimes to mean lengths. Raises UsageError for fewer than three
    different lengths, and for runtimes that are no numbers."""
    x, y = np.asarray(lengths, float), np.asarray(seconds, float)
    if x.shape != y.shape or len(set(x.tolist())) < 3:
        raise UsageError(f"{len(set(x.tolist()))} lengths fix no quadratic; measure three or more")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise UsageError("a quadratic is fitted to finite numbers; leave the other points out")
    errors = np.full(3, math.nan)
    if len(x) > 3:
        found, covariance = np.polyfit(x, y, 2, cov=True)
        errors = np.sqrt(np.diag(covariance))
    else:
        found = np.polyfit(x, y, 2)
    (c, b, a), (of_c, of_b, of_a) = found.tolist(), errors.tolist()
    return Quadratic(a, b, c, (of_a, of_b, of_c))


def asymptotic_ratio(slower: Quadratic, faster: Quadratic) -> tuple[float, float]:
    """How many times faster `faster` is for prompts without end, and the standard error of that.

    Both are NaN where a fit has no growing quadratic part: then the points show no limit.
    """
    if slower.c <= 0 or faster.c <= 0:
        return math.nan, math.nan
    ratio = slower.c / faster.c
    return ratio, ratio * math.hypot(*(fit.errors[2] / fit.c for fit in (slower, faster)))


class RandomRun:
    """A run, as read.

    points: a row for each arm, length and round.
    """

    def __init__(self, found: results.Run):
        self.run = found.run
        self.points = pd.DataFrame(found.run["result"]["points"])
        self.points["mean"] = self.points["total_input_tokens"] / self.points["completed"]

    def about(self) -> str:
        return f"rounds: {self.run['repetitions']}"

    def lines(self) -> Iterator[Line]:
        """A line for each mean length: runtimes, medians over rounds, and the gain of skipping."""
        for test in dict.fromkeys(self.points["test"]):
            of = self.points[self.points["test"] == test].groupby("arm").median(numeric_only=True)
            if not {OFF, ON} <= set(of.index):
                continue
            off, on = of.loc[OFF], of.loc[ON]
            values: dict[str, Any] = {
                "model": model_of(self.run), "slots": self.run["result"]["slots"],
                "mean": off["mean"], "n": int(off["completed"]), "off": off["duration"],
                "on": on["duration"], "ratio": off["duration"] / on["duration"],
                "tps_off": off["output_throughput"], "tps_on": on["output_throughput"],
                "ttft_off": off["mean_ttft_ms"], "ttft_on": on["mean_ttft_ms"],
            }  # fmt: skip
            yield Line(values, [self])

    def said(self) -> str:
        """The fits of runtime by the mean length, and the ratio for prompts without end; empty for
        fewer than three lengths."""
        own = {arm: self.points[self.points["arm"] == arm] for arm in (OFF, ON)}
        if any(points["test"].nunique() < 3 for points in own.values()):
            return ""
        fits = {
            arm: quadratic(points["mean"].to_numpy(), points["duration"].to_numpy())
            for arm, points in own.items()
        }
        texts = [f"skip_masked_kv={arm}: {fit}" for arm, fit in fits.items()]
        ratio, error = asymptotic_ratio(fits[OFF], fits[ON])
        tends = "the points show no limit"
        if not math.isnan(ratio):
            tends = f"for prompts without end {ratio:.2f} times as fast"
            if not math.isnan(error):
                tends += f" (standard error {error:.2f}"
                tends += ": the limit is not known)" if abs(ratio - 1) < 2 * error else ")"
        name = model_of(self.run)
        return f"{name}: seconds by the mean length x: {'; '.join(texts)}; {tends}."


def fits(recorded: Recorded) -> str:
    return "\n\n".join(filter(None, (found.said() for found in RUNS.runs(recorded))))


def shown(folder: Path) -> str:
    """The table and the fits of one run folder."""
    return "\n\n".join(filter(None, (RUNS.shown(folder), RUNS.load(folder).said())))


RUNS = Folder("random-lengths", "Prompts of random lengths", RandomRun, {
    "Model": "{model}", "slots": "{slots}", "mean prompt": "{mean:.0f}", "requests": "{n}",
    "s off": "{off:.2f}", "s tail": "{on:.2f}", "ratio": "{ratio:.3f}",
    "t/s off": "{tps_off:.0f}", "t/s tail": "{tps_on:.0f}", "TTFT ms off": "{ttft_off:.0f}",
    "TTFT ms tail": "{ttft_on:.0f}",
})  # fmt: skip
BLOCKS: dict[str, list[Part]] = {RUNS.name: [RUNS.table, fits]}

if __name__ == "__main__":
    start(app)
