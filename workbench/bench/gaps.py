"""How long no kernel runs between two tokens, and what one wait adds to that.

The *host gap* is the time from the end of a token's last kernel to the start of the next one's
first, by the device's own clock (`Engine.stamped`), in untraced steps: the logits' way to the host,
what the host does, the inputs' way to the device, and the waits around them. Orderings that differ
in their waits differ in their gaps; a line through gap over waits gives the cost of one wait
without the noise of everything else that a token takes.

A host that slows down for a tenth of a second doubles the gaps of that time. So every arm decodes
only a few tokens before it is the next one's turn, a line is drawn through each round, in which all
arms meet the same host, and the cost of a wait is the median of the rounds' slopes.
"""

from __future__ import annotations

import html
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.bench import provenance, results
from workbench.bench.comparison import order_of
from workbench.bench.stats import median_interval
from workbench.bench.workload import Tokens, Workload, draw_tokens
from workbench.config import Toggles
from workbench.errors import UsageError

CONTROL = " (A/A)"
COUNTED = ("waits", "stream_waits", "copies")  # of a token's commands
WARM_UP = 2  # tokens of every turn that are not counted: the arm before has left its own behind


class Fit(NamedTuple):
    """gap = base_us + wait_us * waits, by least squares through the medians of a round's arms;
    medians over the rounds. low_us, high_us: 95 % interval of wait_us, a bootstrap over rounds, NaN
    with one round."""

    wait_us: float
    low_us: float
    high_us: float
    base_us: float


_ONE_DIGIT = "{:,.1f}".format


class Gaps(NamedTuple):
    """A run of `host_gaps`: run.json and a row for each gap, its ns in column `ns`."""

    run: dict[str, Any]
    samples: pd.DataFrame

    def table(self) -> pd.DataFrame:
        """A row for each arm: pattern, waits, copies and bytes of a token, and the gap: median and
        quartiles, us."""
        rows = []
        for arm in self.run["arms"]:
            (program,) = arm["program"].values()
            us = self.samples.loc[self.samples["arm"] == arm["name"], "ns"] / 1e3
            low, mid, high = us.quantile([0.25, 0.5, 0.75])
            rows.append(
                {
                    "arm": arm["name"],
                    "pattern": program["folded_pattern"],
                    **{name: program["counts"][name] for name in COUNTED},
                    "bytes": program["counts"]["copied_bytes"],
                    "gap_us": mid,
                    "low_us": low,
                    "high_us": high,
                }
            )
        return pd.DataFrame(rows)

    @property
    def fit(self) -> Fit:
        """Of the arms that copy as often as the first, and whose device waits as often."""
        table = self.table().set_index("arm")
        others = [name for name in COUNTED if name != "waits"]
        waits = table.loc[(table[others] == table[others].iloc[0]).all(axis=1), "waits"]
        rounds = self.samples.pivot_table(
            index="repetition", columns="arm", values="ns", aggfunc="median"
        )
        return fit_line(waits.to_numpy(float), rounds[waits.index].to_numpy(float) / 1e3)

    @property
    def verdict(self) -> str:
        """One line: what a wait adds, and on what device."""
        fit, device = self.fit, self.run["engine"].get("device_description")
        return (
            f"one wait adds {fit.wait_us:.2f} us to the gap (95% CI {fit.low_us:.2f} to "
            f"{fit.high_us:.2f}, n={self.run['repetitions']}), which is {fit.base_us:.1f} us "
            f"without any; {device}"
        )

    def __repr__(self) -> str:
        return f"{self.table().to_string(float_format=_ONE_DIGIT)}\n{self.verdict}"

    def _repr_html_(self) -> str:
        shown = self.table().to_html(index=False, float_format=_ONE_DIGIT)
        return f"{shown}<p>{html.escape(self.verdict)}</p>"


def fit_line(waits: np.ndarray, gap_us: np.ndarray) -> Fit:
    """waits: of each arm, (arms,). gap_us: medians, (rounds, arms). Raises UsageError where all
    arms have as many waits: nothing tells what one costs."""
    if len(set(waits.tolist())) < 2:
        raise UsageError("every arm waits as often; compare orderings with different waits")
    slopes, bases = np.polyfit(waits, gap_us.T, 1)
    return Fit(*median_interval(slopes), float(np.median(bases)))


def host_gaps(
    engine: Any,
    arms: Mapping[str, Toggles],
    *,
    n_tokens: int = 5,
    rounds: int = 60,
    seed: int = 0,
    out: str | Path | None = None,
    name: str = "gaps",
) -> Gaps:
    """Decodes n_tokens random tokens with each arm in turn, `rounds` times, the first arm once more
    as its own control; a turn gives n_tokens - 1 gaps. A run folder is written to `out` where it is
    given.

    Raises UsageError for a device without a clock or streams (the host), for tokens that do not fit
    the context and for fewer than two.
    """
    if engine.backend.capabilities.synchronous:
        raise UsageError(f"the {engine.device} device has no gap: it computes when it is called")
    if n_tokens < 2 or rounds < 1:
        raise UsageError(f"n_tokens={n_tokens} and rounds={rounds} leave no gap to measure")
    if n_tokens + WARM_UP > engine.config.n_ctx:
        raise UsageError(f"{n_tokens + WARM_UP} tokens do not fit n_ctx={engine.config.n_ctx}")
    baseline = next(iter(arms))
    every = {**arms, baseline + CONTROL: arms[baseline]}
    test = Workload(0, n_tokens + WARM_UP)
    run = _record(engine, every, f"tg{n_tokens}", rounds, seed, name)
    samples, begun = results.SampleTable(name), time.monotonic()
    with ExitStack() as stack:
        sides = [stack.enter_context(engine.variant(toggles)) for toggles in every.values()]
        for arm, side in zip(run["arms"], sides, strict=True):
            program = side.program()
            arm["sync_mode"] = side.sync_mode
            arm["program"] = {f"tg{n_tokens}": {
                "n_tokens": 1, "pattern": program.pattern(),
                "folded_pattern": program.pattern(fold=True), "counts": program.counts(),
            }}  # fmt: skip
        for side in sides:  # whatever is made at the first step
            _gaps_of(side, draw_tokens(test, engine.model.n_vocab, seed, 0))
        for round_ in range(rounds):
            tokens = draw_tokens(test, engine.model.n_vocab, seed, round_)
            for i in order_of(round_, len(sides)):
                arm = run["arms"][i]
                ns = _gaps_of(sides[i], tokens)
                samples.add(
                    arm["name"], arm["is_control"], f"tg{n_tokens}", round_, ns, np.ones_like(ns)
                )
    run |= {"status": results.COMPLETE, "duration_s": round(time.monotonic() - begun, 3)}
    made = Gaps(run, samples.frame())
    if out is not None:
        results.write_run(out, run, made.samples)
    return made


def load(folder: str | Path) -> Gaps:
    """A run folder that `host_gaps` wrote."""
    found = results.load_run(folder)
    return Gaps(found.run, found.samples)


def _gaps_of(engine: Any, tokens: Tokens) -> np.ndarray:
    """Gaps between the tokens behind the warm-up, ns, int64."""
    engine.reset()
    for token in tokens.gen[:WARM_UP]:
        engine.step([token])
    with engine.stamped() as stamps:
        for token in tokens.gen[WARM_UP:]:
            engine.step([token])
    begun, ended = np.array(stamps, np.int64).T
    return begun[1:] - ended[:-1]


def _record(
    engine: Any, arms: Mapping[str, Toggles], test: str, rounds: int, seed: int, name: str
) -> dict[str, Any]:
    return {
        "schema": results.SCHEMA,
        "run_id": name,
        "kind": "gaps",
        "name": name,
        "status": results.INTERRUPTED,
        "started": provenance.utc_now(),
        "duration_s": 0.0,
        **provenance.collect(engine),
        "seed": seed,
        "tests": [test],
        "repetitions": rounds,
        "arms": [
            {
                "name": arm, "is_control": arm.endswith(CONTROL), "toggles": toggles.to_dict(),
                "sync_mode": "", "program": {}, "counters": {},
            }
            for arm, toggles in arms.items()
        ],
        "result": {},
    }  # fmt: skip
