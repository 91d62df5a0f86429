"""What the runs of `data.measure.batched` say: sequences side by side, and beside llama.cpp's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from data.measure.peer import LLAMA, OURS
from data.measure.recorded import Recorded, Share, model_of
from data.measure.tables import Line, Part, Table, caption, filled
from workbench.bench import results
from workbench.bench.stats import Ratio, median_interval, speedup
from workbench.bench.workload import Workload, parse
from workbench.frames import markdown

FOLDER, PLAIN = "batched", "plain-batched"
MODELS = ("llama-3.2-1b-q4_k_m", "llama-3-8b-q4_0")


class Bounds(NamedTuple):
    """What a generating step cannot take less than, us, each by itself. weights, cache: to read
    them once. logits: to bring them to the host. launches: one behind the other."""

    weights: float
    cache: float
    logits: float
    launches: float

    @property
    def total(self) -> float:
        """One behind the other. Logits that travel while the next step runs hide some of it."""
        return sum(self)


def bounds(
    rates: dict[str, float], weight_bytes: float, cache_bytes: float, logit_bytes: float,
    n_launches: int,
) -> Bounds:  # fmt: skip
    """Of a step that reads and writes so many bytes with so many launches."""
    return Bounds(
        weight_bytes / rates["read_gbps"] / 1e3,
        cache_bytes / rates["read_gbps"] / 1e3,
        logit_bytes / rates["to_host_gbps"] / 1e3,
        n_launches * rates["launch_us"],
    )


class BatchedRun:
    """A run of kind `batched`, read. Everything follows from its samples."""

    def __init__(self, found: results.Run):
        self.run, self._samples = found.run, found.samples

    @property
    def model(self) -> str:
        return model_of(self.run)

    @property
    def tests(self) -> list[Workload]:
        return [parse(name) for name in self.run["tests"]]

    def rates(self, test: str, prompts: bool) -> pd.DataFrame:
        """t/s of all sequences together, of prompts or generated: a row for each round, a column
        for each arm."""
        rows = self._samples[self._samples["test"] == test]
        rows = rows[(rows["token"] == 0) == prompts]
        sums = rows.groupby(["repetition", "arm"])[["n_tokens", "ns"]].sum()
        table = (sums["n_tokens"] * 1e9 / sums["ns"]).unstack().dropna()
        return table[[arm["name"] for arm in self.run["arms"] if arm["name"] in table]]

    def side(self, name: str) -> list[str]:
        """The arms of a side, without the A/A control."""
        arms = (arm["name"] for arm in self.run["arms"] if not arm["is_control"])
        return [arm for arm in arms if arm.split()[0] == name]

    def best(self, test: str, prompts: bool = False) -> str:
        """Our arm that is the fastest, by its median."""
        return str(self.rates(test, prompts)[self.side(OURS)].median().idxmax())

    def interval(self, test: str, arm: str, prompts: bool = False) -> tuple[float, float, float]:
        return median_interval(self.rates(test, prompts)[arm].to_numpy(), self.run["seed"])

    def ratio(self, test: str, arm: str, other: str = LLAMA, prompts: bool = False) -> Ratio | None:
        """How many times faster an arm is than another, paired by round; None without the other."""
        table = self.rates(test, prompts)
        if other not in table:
            return None
        return speedup(table[other].to_numpy(), table[arm].to_numpy(), self.run["seed"])

    def bounds(self, test: Workload, arm: str) -> Bounds:
        """Of a generating step, the mean over the test."""
        result = self.run["result"]
        weights = self.run["model"]["weight_bytes_per_token"]
        cache = test.step_bytes(0, result["cell_bytes"])
        logits = 4 * result["n_vocab"] * test.width
        return bounds(result["rates"], weights, cache, logits, result["launches"][arm][test.name])

    def step_us(self, test: Workload, arm: str) -> float:
        """The median over rounds of a generating step's mean."""
        return 1e6 * test.width / float(self.rates(test.name, False)[arm].median())

    def lines(self) -> Iterator[Line]:
        """A width: both sides' rates, the ratio, and what a step of ours is bound by."""
        for test in self.tests:
            arm = self.best(test.name)
            fastest = self.bounds(test, arm)
            took = self.step_us(test, arm)
            prompt, made = (self.rates(test.name, p).median() for p in (True, False))
            ratio = self.ratio(test.name, arm)
            of_prompt = self.ratio(test.name, arm, prompts=True)
            values = {
                "model": self.model, "n": test.width, "arm": arm.removeprefix(f"{OURS} "),
                "pp_theirs": prompt.get(LLAMA), "pp": prompt[arm],
                "pp_ratio": of_prompt and of_prompt.value,
                "tg_theirs": made.get(LLAMA), "tg": made[arm], "ratio": ratio and _said(ratio),
                "step": took / 1e3, **{k: us / 1e3 for k, us in fastest._asdict().items()},
                "total": fastest.total / 1e3, "share": Share(fastest.total / took),
            }  # fmt: skip
            yield Line(values, [self])


def _said(ratio: Ratio) -> str:
    spread = "" if np.isnan(ratio.low) else f" ({ratio.low:.2f}..{ratio.high:.2f})"
    return f"{ratio.value:.2f}{spread}"


def recorded_batched(recorded: Recorded, named: str = FOLDER) -> Iterator[BatchedRun]:
    for model in MODELS:
        folder = recorded.folder / named / model
        if (folder / results.RUN_JSON).is_file():
            found = results.load_run(folder)
            if found.run["status"] == results.COMPLETE:
                yield BatchedRun(found)


def every(recorded: Recorded) -> Iterator[Line]:
    for found in recorded_batched(recorded):
        yield from found.lines()


def in_short(recorded: Recorded) -> Iterator[Line]:
    """Generated t/s of the first model beside llama.cpp: a column for each width."""
    for found in recorded_batched(recorded):
        if not found.side(LLAMA):
            continue
        of = [line.values for line in found.lines()]
        for name, cell in (
            (f"{LLAMA}, t/s", "{tg_theirs:.0f}"), (f"{OURS}, t/s", "{tg:.0f}"), ("ratio", "{ratio}")
        ):  # fmt: skip
            values = {str(v["n"]): filled(cell, v) for v in of}
            yield Line({f"{found.model}, sequences": name} | values, [found])
        return


def as_typed(recorded: Recorded) -> Iterator[Line]:
    """What `bench -npl` itself measured, with no flag but the tests: a line for each width."""
    for found in recorded_batched(recorded, PLAIN):
        for test in found.tests:
            prompt, made = (
                "{:.0f} ({:.0f}..{:.0f})".format(*found.interval(test.name, "engine", p))
                for p in (True, False)
            )
            values = {"model": found.model, "n": test.width, "prompt": prompt, "made": made}
            yield Line(values, [found])


def typed(recorded: Recorded) -> str:
    """A caption for each run, with the command that made it."""
    return " ".join(
        f"{_typed(found)}, {found.run['repetitions']} repetitions. {caption([found])}"
        for found in recorded_batched(recorded, PLAIN)
    )


def _typed(found: BatchedRun) -> str:
    test, widths = found.tests[0], ",".join(str(test.width) for test in found.tests)
    return f"`workbench bench -m 1b.gguf -npl {widths} -p {test.n_prompt} -n {test.n_gen}`"


def first(recorded: Recorded) -> str:
    """The caption; before it the commands that print our figures, and both sides'."""
    found = next((f for f in recorded_batched(recorded) if f.side(LLAMA)), None)
    if found is None:
        return ""
    both = "`python -m data.measure.batched --peer DIR` both"
    return f"{_typed(found)} prints ours; {both}. " + caption([found], about(found))


def where(recorded: Recorded) -> str:
    """A caption for each run: rounds, the device's rates, and whose programs."""
    return " ".join(caption([found], about(found)) for found in recorded_batched(recorded))


def about(found: BatchedRun) -> str:
    run, rates = found.run, found.run["result"]["rates"]
    peer = run["result"]["peer"]
    first = found.tests[0]
    said = f"prompts of {first.n_prompt} tokens, {first.n_gen} generated; in turn in one run, "
    said += f"{run['repetitions']} rounds; reads {rates['read_gbps']:.0f} GB/s, copies "
    said += f"{rates['to_host_gbps']:.1f} GB/s to the host, {rates['launch_us']:.2f} us a launch"
    return said + (f"; llama.cpp {peer['version']}" if peer else "")


CELLS = {
    "Model": "{model}", "sequences": "{n}",
    "pp t/s llama.cpp": "{pp_theirs:.0f}", "pp t/s": "{pp:.0f}", "pp ratio": "{pp_ratio:.2f}",
    "tg t/s llama.cpp": "{tg_theirs:.0f}", "tg t/s": "{tg:.0f}", "tg ratio": "{ratio}",
    "ms a step": "{step:.3f}", "weights": "{weights:.3f}", "cache": "{cache:.3f}",
    "logits": "{logits:.3f}", "launches": "{launches:.3f}", "sum": "{total:.3f}",
    "sum % of step": "{share:.0f}", "With": "{arm}",
}  # fmt: skip

TYPED = {"Model": "{model}", "sequences": "{n}", "pp t/s": "{prompt}", "tg t/s": "{made}"}


def shown(folder: Path) -> str:
    """The table of one run folder, as text."""
    found = BatchedRun(results.load_run(folder))
    rows = [{k: filled(t, line.values) for k, t in CELLS.items()} for line in found.lines()]
    return markdown(pd.DataFrame(rows))


BLOCKS: dict[str, list[Part]] = {
    PLAIN: [Table("`bench -npl` as it is typed", as_typed, TYPED, said=typed)],
    "batched-short": [Table("Many sequences beside llama.cpp", in_short, said=first)],
    "batched": [
        Table("Sequences side by side on a GPU", every, CELLS, said=where),
        "Beside a generating step stand the ms that it cannot take less than, each by itself: to "
        "read the weights once, to read every cell once, to bring the logits to the host, and its "
        "launches one behind the other. Logits travel while the next step runs, so a step can be "
        "shorter than the sum.",
    ],
}
