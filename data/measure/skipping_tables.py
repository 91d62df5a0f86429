"""What the runs of `data.measure.skipping` say: prompts by ubatch size, skipping masked cells."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from data.measure.recorded import Recorded, Share, model_of
from data.measure.tables import Line, Part, Table, filled
from workbench.bench import results
from workbench.bench.stats import Ratio, aa_band, speedup, verdict
from workbench.bench.workload import parse
from workbench.frames import markdown

FOLDER = "skipping"
WAYS = {
    "in_loop": "skip_masked_kv=in_loop",
    "tail": "skip_masked_kv=tail",
    "classes": "skip_masked_kv=classes",
    "tail, gate open": "skip_masked_kv=tail skip_gate=always",
    "classes, gate open": "skip_masked_kv=classes skip_gate=always",
}
PHASES = ("prompts", "generated")


class SkipRun:
    """A comparison, read: rates of prompts and of generated tokens apart."""

    def __init__(self, found: results.Run):
        self.run, self._samples = found.run, found.samples
        self.folder = found.folder.name

    @property
    def arms(self) -> list[str]:
        return [arm["name"] for arm in self.run["arms"] if not arm["is_control"]]

    def phases(self, test: str) -> list[str]:
        """Which of PHASES a test has."""
        one = parse(test)
        return [name for name, n in zip(PHASES, (one.n_prompt, one.n_gen), strict=True) if n]

    def rates(self, test: str, phase: str) -> pd.DataFrame:
        """t/s: a row for each round, a column for each arm, the control among them."""
        rows = self._samples[self._samples["test"] == test]
        if len(self.phases(test)) > 1:
            rows = rows[(rows["token"] == 0) == (phase == PHASES[0])]
        sums = rows.groupby(["repetition", "arm"])[["n_tokens", "ns"]].sum()
        return (sums["n_tokens"] * 1e9 / sums["ns"]).unstack().dropna()

    def ratio(self, test: str, phase: str, arm: str, before: str = "") -> Ratio:
        """An arm's speed over the baseline's, or over that of `before`; paired by round."""
        table = self.rates(test, phase)
        base, own = (table[name].to_numpy() for name in (before or self.arms[0], arm))
        return speedup(base, own, self.run["seed"])

    def verdict(self, test: str, phase: str, arm: str, before: str = "") -> str:
        control = next(arm["name"] for arm in self.run["arms"] if arm["is_control"])
        band = aa_band(self.ratio(test, phase, control))
        return verdict(self.ratio(test, phase, arm, before), band)

    def skipped(self, test: str, phase: str, arm: str) -> Share | None:
        """The share of blocks that an arm leaves unread; None where they were not counted."""
        visited, skipped = self._visits(arm)[test][phase]
        return Share(skipped / (visited + skipped)) if visited + skipped else None

    def _visits(self, arm: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.run["result"]["visits"][arm]
        return found


class Cell(NamedTuple):
    """An arm of a run, test and phase."""

    run: SkipRun
    test: str
    phase: str
    arm: str
    before: str = ""

    @property
    def said(self) -> str:
        """The speedup, its interval where there is one, and the share of blocks that is skipped."""
        ratio = self.run.ratio(self.test, self.phase, self.arm, self.before)
        spread = f" ({ratio.low:.2f}..{ratio.high:.2f})" if ratio.low == ratio.low else ""
        return f"{ratio.value:.2f}{spread}"

    @property
    def share(self) -> Share | None:
        return self.run.skipped(self.test, self.phase, self.arm)


def runs(recorded: Recorded, model: str) -> dict[str, SkipRun]:
    """The complete runs of a model by folder, large ubatches last."""
    found = {}
    for path in (recorded.folder / FOLDER / model).glob(f"*/{results.RUN_JSON}"):
        one = results.load_run(path.parent)
        if one.run["status"] == results.COMPLETE and "visits" in one.run["result"]:
            found[path.parent.name] = SkipRun(one)
    return dict(sorted(found.items(), key=lambda item: item[1].run["result"]["n_ubatch"]))


def every(recorded: Recorded) -> Iterator[tuple[str, SkipRun]]:
    """The runs of all models with their folders, small models first."""
    models = (path.name for path in (recorded.folder / FOLDER).glob("*"))
    by_model = [list(runs(recorded, model).items()) for model in models]
    for of in sorted(filter(None, by_model), key=lambda of: of[0][1].run["model"]["n_params"]):
        yield from of


def by_ubatch(recorded: Recorded) -> Iterator[Line]:
    """A ubatch size: t/s without skipping, and what each way gains; the blocks that are skipped."""
    for folder, run in every(recorded):
        if not re.fullmatch(r"ub\d+", folder):
            continue
        (test,) = run.run["tests"]
        cells = {name: Cell(run, test, PHASES[0], arm) for name, arm in WAYS.items()
                 if arm in run.arms}  # fmt: skip
        values: dict[str, Any] = {
            "model": model_of(run.run), "test": test, "n": run.run["result"]["n_ubatch"],
            "off": float(run.rates(test, PHASES[0])[run.arms[0]].median()),
        }  # fmt: skip
        for name in WAYS:
            known = cells.get(name)
            values[name] = known and known.said
            values[f"{name} blocks"] = known and known.share
        best = max(cells.values(), key=lambda one: one.share or 0.0)
        values["verdict"] = run.verdict(test, PHASES[0], best.arm)
        yield Line(values, [run])


def side_by_side(recorded: Recorded) -> Iterator[Line]:
    """Several sequences: an arm of `together-...`, beside the same cache without skipping."""
    for folder, run in every(recorded):
        if folder.startswith("together-"):
            for arm in run.arms:
                cache, _, way = arm.partition(" ")
                yield _line(run, arm, f"{cache} skip_masked_kv=off", {"cache": cache, "way": way})


def parts(recorded: Recorded) -> Iterator[Line]:
    """kv_parts, beside `off` with the same skipping; one sequence at depth behind them."""
    for run in (run for name in ("parts", "depth") for of, run in every(recorded) if of == name):
        for test in run.run["tests"]:
            for arm in run.arms:
                kind, _, way = arm.partition(" ")
                before = " ".join(filter(None, ("kv_parts=off", way)))
                yield _line(run, arm, before, {"cache": kind, "way": way}, test)


def _line(run: SkipRun, arm: str, before: str, named: dict[str, str], test: str = "") -> Line:
    (test, *_) = [test] if test else run.run["tests"]
    values: dict[str, Any] = {
        "model": model_of(run.run), "test": test, "n": run.run["result"]["n_ubatch"], **named,
    }  # fmt: skip
    for phase in PHASES:
        has = phase in run.phases(test)
        cell = Cell(run, test, phase, arm, before)
        values[phase] = float(run.rates(test, phase)[arm].median()) if has else None
        values[f"{phase} gain"] = cell.said if has and arm != before else None
        values[f"{phase} blocks"] = cell.share if has else None
        values[f"{phase} verdict"] = run.verdict(test, phase, arm, before) if has else None
    return Line(values, [run])


BY_UBATCH = {
    "Model": "{model}", "Test": "{test}", "ubatch": "{n}", "t/s off": "{off:.0f}",
    **{name: f"{{{name}}}" for name in WAYS},
    **{f"{name} skips %": f"{{{name} blocks:.0f}}" for name in WAYS},
    "verdict of most skipped": "{verdict}",
}  # fmt: skip
TOGETHER = {
    "Model": "{model}", "Test": "{test}", "ubatch": "{n}", "Cache": "{cache}", "Skipping": "{way}",
    "pp t/s": "{prompts:.0f}", "gain": "{prompts gain}", "skips %": "{prompts blocks:.0f}",
    "tg t/s": "{generated:.0f}", "tg gain": "{generated gain}",
    "tg skips %": "{generated blocks:.0f}", "tg": "{generated verdict}",
}  # fmt: skip
PARTS = {("Parts" if k == "Cache" else k): v for k, v in TOGETHER.items()}
TABLES = (
    Table("Prompts by ubatch size, skipping masked cells", by_ubatch, BY_UBATCH, "rounds: {n}"),
    Table("Sequences side by side, skipping masked cells", side_by_side, TOGETHER, "rounds: {n}"),
    Table("Parts of the cells, apart from skipping", parts, PARTS, "rounds: {n}"),
)


def shown(folder: Path) -> str:
    """The tables of a folder of runs, as text."""
    recorded, texts = Recorded(folder.parent), []
    for table in TABLES:
        cells = table.cells or {}
        rows = [
            {name: filled(text, line.values) for name, text in cells.items()}
            for line in table.lines(recorded)
        ]
        texts += [markdown(pd.DataFrame(rows))] if rows else []
    return "\n\n".join(texts)


BLOCKS: dict[str, list[Part]] = {
    "skipping": [
        TABLES[0],
        "A gain is the speed over that of the same ubatch size without skipping. The gate of the "
        "proposal is open from 1024 tokens at once on, or where a step has several regions. Blocks "
        "of 16 cells for 8 tokens, counted from the masks of all steps.",
        TABLES[1],
        "With one region for all sequences the gate stays closed to steps of fewer than 1024 "
        "tokens. A gain is over the same cache without skipping.",
        TABLES[2],
        "A gain is over kv_parts=off with the same skipping.",
    ],
}
