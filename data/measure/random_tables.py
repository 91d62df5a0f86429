"""What the runs of `data.measure.random_lengths` say: runtimes, and what they tend to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from data.measure.fits import Quadratic, asymptotic_ratio, quadratic
from data.measure.recorded import Recorded, model_of
from data.measure.tables import Line, Part, Table, caption, filled
from workbench.bench import results
from workbench.frames import markdown

FOLDER = "random-lengths"
OFF, ON = "off", "tail"


class RandomRun:
    """A run, read. points: a row for each arm, length and round."""

    def __init__(self, found: results.Run):
        self.run = found.run
        self.points = pd.DataFrame(found.run["result"]["points"])
        self.points["mean"] = self.points["total_input_tokens"] / self.points["completed"]

    @property
    def model(self) -> str:
        return model_of(self.run)

    def fit(self, arm: str) -> Quadratic | None:
        """Runtime in s by the mean length of prompts; None for fewer than three lengths."""
        own = self.points[self.points["arm"] == arm]
        if own["test"].nunique() < 3:
            return None
        return quadratic(own["mean"].to_numpy(), own["duration"].to_numpy())

    def lines(self) -> Iterator[Line]:
        """A mean length: runtimes, medians over rounds, and what skipping gains."""
        for test in dict.fromkeys(self.points["test"]):
            of = self.points[self.points["test"] == test].groupby("arm").median(numeric_only=True)
            if not {OFF, ON} <= set(of.index):
                continue
            values: dict[str, Any] = {
                "model": self.model, "slots": self.run["result"]["slots"],
                "mean": of.loc[OFF, "mean"], "n": int(of.loc[OFF, "completed"]),
                "off": of.loc[OFF, "duration"], "on": of.loc[ON, "duration"],
                "ratio": of.loc[OFF, "duration"] / of.loc[ON, "duration"],
                "tps_off": of.loc[OFF, "output_throughput"],
                "tps_on": of.loc[ON, "output_throughput"],
                "ttft_off": of.loc[OFF, "mean_ttft_ms"], "ttft_on": of.loc[ON, "mean_ttft_ms"],
            }  # fmt: skip
            yield Line(values, [self])

    def said(self) -> str:
        """The fits, in words, and the ratio for prompts without end."""
        fits = {arm: self.fit(arm) for arm in (OFF, ON)}
        off, on = fits[OFF], fits[ON]
        if off is None or on is None:
            return ""
        texts = [f"skip_masked_kv={arm}: {_words(fit)}" for arm, fit in fits.items() if fit]
        ratio, error = asymptotic_ratio(off, on)
        tends = (
            "the points show no limit"
            if math.isnan(ratio)
            else f"for prompts without end {ratio:.2f}"
            + ("" if math.isnan(error) else f" (standard error {error:.2f})")
        )
        return f"{self.model}: seconds by the mean length x: {'; '.join(texts)}; {tends}."


def _words(fit: Quadratic) -> str:
    return f"{fit.a:.3g} {_signed(fit.b)} x {_signed(fit.c)} x²"


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'} {abs(value):.3g}"


def recorded_random(recorded: Recorded) -> Iterator[RandomRun]:
    """The complete runs, by folder."""
    for path in sorted((recorded.folder / FOLDER).glob(f"*/{results.RUN_JSON}")):
        found = results.load_run(path.parent)
        if found.run["status"] == results.COMPLETE:
            yield RandomRun(found)


def every(recorded: Recorded) -> Iterator[Line]:
    for found in recorded_random(recorded):
        yield from found.lines()


def fits(recorded: Recorded) -> str:
    return "\n\n".join(filter(None, (found.said() for found in recorded_random(recorded))))


def where(recorded: Recorded) -> str:
    return " ".join(
        caption([one], f"rounds: {one.run['repetitions']}") for one in recorded_random(recorded)
    )


CELLS = {
    "Model": "{model}", "slots": "{slots}", "mean prompt": "{mean:.0f}", "requests": "{n}",
    "s off": "{off:.2f}", "s tail": "{on:.2f}", "ratio": "{ratio:.3f}",
    "t/s off": "{tps_off:.0f}", "t/s tail": "{tps_on:.0f}", "TTFT ms off": "{ttft_off:.0f}",
    "TTFT ms tail": "{ttft_on:.0f}",
}  # fmt: skip


def shown(folder: Path) -> str:
    """The table and the fits of one run folder, as text."""
    found = RandomRun(results.load_run(folder))
    rows = [{k: filled(t, line.values) for k, t in CELLS.items()} for line in found.lines()]
    return "\n\n".join(filter(None, (markdown(pd.DataFrame(rows)), found.said())))


BLOCKS: dict[str, list[Part]] = {
    "random-lengths": [Table("Prompts of random lengths", every, CELLS, said=where), fits],
}
