"""The result of an advice: every reading, ranked; what could not be told; and the flags to copy."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from workbench.benchmarks.advise.candidates import Candidate, Reading
from workbench.benchmarks.advise.chunks import ALONE, THE_REST, TOGETHER, Asked, Chunk
from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.stats import FASTER, SAME, SLOWER, TOO_FEW, Band, Ratio
from workbench.benchmarks.runs import results
from workbench.common.framed import Framed
from workbench.common.progress import duration
from workbench.common.sizes import counted
from workbench.common.tables import Table, markdown, terminal_columns, to_html
from workbench.config import BEST, Toggles, differing

WORDS = {THE_REST: "with the rest", ALONE: "alone"}
SHORT = {SAME: "?", TOO_FEW: "few"}  # verdicts in a table
IN_BEST = "*"  # after a value that preset best has
MOST_NAMES = 3  # in a line that counts readings
ORDER = {FASTER: 0, SAME: 1, TOO_FEW: 2, SLOWER: 3}  # of the ranking; within: the larger first


class Reason(NamedTuple):
    """Why a reading is not measured. kind: the few words that such reasons share. why: in full."""

    kind: str
    why: str


REFUSED, EQUAL = "refused here", "the same as another value here"
IDLE, LATE = "changes nothing in {test}", "not reached in the time"
CUT = "not reached before the interruption"  # LATE, of an advice that was interrupted
NOT_REACHED = Reason(LATE, LATE)


class Effect(NamedTuple):
    """What a candidate does between two arms of a comparison.

    ratio: t/s with it / t/s without it.
    band: the A/A control's.
    answer: what became of the logits, in words. holds: they are as the toggles declare.
    """

    ratio: Ratio
    band: Band
    verdict: str
    answer: str
    holds: bool


def effects_of(made: AB, chunk: Chunk) -> dict[Asked, Effect]:
    """The effects that a comparison has measured, by what was asked."""
    rates = results.rates(made.samples)
    tps = rates.pivot(index="repetition", columns="arm", values="tps")
    seed, names = made.run["seed"], [arm["name"] for arm in made.run["arms"]]
    first, control = names[0], names[-1]

    def ratio(before: str, after: str) -> Ratio:
        if not {before, after} <= {*tps}:
            return Ratio(float("nan"), float("nan"), float("nan"), 0)
        pairs = tps[[before, after]].dropna()
        if pairs.empty:
            return Ratio(float("nan"), float("nan"), float("nan"), 0)
        return stats.speedup(pairs[before].to_numpy(), pairs[after].to_numpy(), seed)

    band, found = stats.aa_band(ratio(first, control)), dict[Asked, Effect]()
    for asked, reading in chunk.readings.items():
        before, after = chunk.name_of(reading.before), chunk.name_of(reading.after)
        one = ratio(before, after)
        if one.n == 0:
            continue
        answers = [made.answer(name) for name in {before, after} if name != first]
        holds = all(answer is not None and answer.holds for answer in answers)
        said = "; ".join(dict.fromkeys(str(a).partition(" (")[0] for a in answers if a))
        found[asked] = Effect(one, band, stats.verdict(one, band), said, holds)
    return found


@dataclass(frozen=True, repr=False)
class Advice(Framed):
    """Which switches help on a model and a device.

    model, device, test: what it is about.
    best: the toggles of preset `best` there.
    changes: what it recommends to change of `best`.
    folder: a run folder for each comparison.
    interrupted: it ended with Ctrl-C.
    start: the toggles from which values are read alone; `graph_reuse` from everything off.
    rebuilding: how many times as long a token takes where its graph is built anew.

    `to_frame` has every reading, `table` is ranked, `flags` and `python` are to copy.
    """

    model: str
    device: str
    test: str
    best: Toggles
    asked: list[Candidate]
    effects: dict[Asked, Effect]
    readings: dict[Asked, Reading]
    reasons: dict[Asked, Reason]
    changes: dict[str, str]
    left_alone: Mapping[str, str]
    folder: Path
    interrupted: bool
    seconds: float
    at_most_s: float
    start: Toggles
    rebuilding: float

    def to_frame(self) -> pd.DataFrame:
        """A row for each candidate and reading, ranked.

        Columns: model, device, test, toggle, value, in_best (preset best has the value), reading
        (alone, or the rest), speedup (t/s with the value / without), low, high (95 % interval), n
        (rounds), band_low, band_high (A/A), verdict, answer, beside (what it needed, or what went
        with it), reason (why it is not measured).
        """
        rows = []
        for one in self.ranked():
            for kind in WORDS:
                effect, reading = self.effects.get((one, kind)), self.readings.get((one, kind))
                reason = self.reasons.get((one, kind))
                row: dict[str, Any] = {
                    "model": Path(self.model).stem, "device": self.device, "test": self.test,
                    "toggle": one.name, "value": one.value,
                    "in_best": self.best.value_of(one.name) == one.value, "reading": kind,
                    "beside": self._beside(one, kind, reading) if reading else "",
                    "reason": reason.why if reason else "",
                }  # fmt: skip
                if effect is not None:
                    row |= _numbers(effect)
                rows.append(row)
        return pd.DataFrame(rows, columns=_COLUMNS)

    def ranked(self) -> list[Candidate]:
        """The candidates: those that help first, by their effect with the rest (or alone, where
        that is all there is); those that were not measured last."""

        def rank(one: Candidate) -> tuple[int, float]:
            effect = self.effects.get((one, THE_REST)) or self.effects.get((one, ALONE))
            if effect is None:
                return len(ORDER), 0.0
            return ORDER[effect.verdict], -effect.ratio.value

        return sorted(self.asked, key=rank)

    def _beside(self, one: Candidate, kind: str, reading: Reading) -> str:
        words = [reading.words] if reading.words else []
        if kind == ALONE and reading.before != Toggles() and self._kept:
            words.insert(0, f"{self._kept} on both sides")
        return "; ".join(words)

    @property
    def _kept(self) -> str:
        """What readings alone have beside everything off: `graph_reuse=set_rows`, or nothing."""
        return differing(Toggles(), self.start)[1] if self.start != Toggles() else ""

    def table(self) -> Table:
        """The candidates that were measured, ranked: each with the rest and alone. A cell has the
        speedup, its interval and the verdict."""
        rows = []
        for one in self.ranked():
            own = {kind: self.effects.get((one, kind)) for kind in WORDS}
            if not any(own.values()):
                continue
            row = {"switch": f"{one}{IN_BEST if self._in_best(one) else ''}"}
            for kind, effect in own.items():
                row[WORDS[kind]] = "" if effect is None else _in_a_cell(effect)
            words = {kind: self.readings[one, kind].words for kind, e in own.items() if e}
            row["notes"] = "; ".join(f"{WORDS[k]}: {w}" for k, w in words.items() if w)
            rows.append(row)
        columns = ["switch", *WORDS.values(), "notes"]
        return Table(rows, columns=columns).shown(keys=["switch"])

    def _in_best(self, one: Candidate) -> bool:
        return self.best.value_of(one.name) == one.value

    @property
    def flags(self) -> str:
        """The flags of any command: `--preset best --sync packed`."""
        return " ".join([f"--preset {BEST}", *(
            f"--{name.replace('_', '-')} {value}" for name, value in self.changes.items()
        )])  # fmt: skip

    @property
    def python(self) -> str:
        """The same in Python."""
        changes = "".join(f", {name}={value!r}" for name, value in self.changes.items())
        toggles = f'wb.Toggles.preset("{BEST}"{changes})'
        return f'wb.Engine.load("{self.model}", toggles={toggles})'

    @property
    def summary(self) -> str:
        """Sentences: what all is worth together, what could not be told, how much was not measured
        for which kind of reason, and the flags to copy."""
        return self._said(self._not_measured())

    @property
    def details(self) -> str:
        """As `summary`, with the reason of each value that was not measured."""
        return self._said(self._each_not_measured())

    def _said(self, not_measured: list[str]) -> str:
        lines = [
            *self._legend(),
            f"preset {BEST} here: {self.best}",
            *self._together(),
            *self._not_told(),
            *not_measured,
            f"{duration(self.seconds)} of {duration(self.at_most_s)}; {self.folder}",
        ]
        if self.interrupted:
            lines.append(
                "interrupted: what was finished is above"
                if self.effects
                else "interrupted: no comparison was finished"
            )
        if self.effects:  # else nothing is advised
            lines += [f"flags: {self.flags}", f"python: {self.python}"]
        return "\n".join(lines)

    def _legend(self) -> list[str]:
        lines = []
        if any(one is not None for one, _ in self.effects):
            lines.append(
                f"a cell: times as fast, its 95 % interval, the verdict ({SHORT[SAME]}: within the "
                f"noise, {SHORT[TOO_FEW]}: too few rounds); {IN_BEST}: preset {BEST} has it"
            )
        if self._kept and any(kind == ALONE for _, kind in self.effects):
            lines.append(
                f"alone: beside {self._kept}, because building the graph takes "
                f"{self.rebuilding:.0f} times a token; graph_reuse itself: from everything off"
            )
        return lines

    def _together(self) -> list[str]:
        if not self.effects:
            why = "the time did not suffice, or nothing acts here"
            return [f"no comparison was measured: {'interrupted' if self.interrupted else why}"]
        lines = []
        for key, words in (
            ((None, TOGETHER), f"preset {BEST} beside everything off"),
            ((None, BEST), f"with the changes beside {BEST}"),
        ):
            effect = self.effects.get(key)
            if effect is not None:
                band = stats.interval(*effect.band)
                lines.append(
                    f"{words}: {effect.verdict}, {_shown(effect)} (A/A band {band}); "
                    f"{effect.answer}"
                )
        measured = (None, BEST) in self.effects
        if self.changes and not measured:
            lines.append("the changes were measured one by one, and not together")
        if not self.changes and measured:
            lines.append(
                "what was faster by itself did not hold, measured again and all together: keep "
                f"{BEST}"
            )
        if not self.changes and not measured:
            lines.append(self._none_faster())
        return lines

    def _none_faster(self) -> str:
        """Why no change is recommended. Values that were not measured to an end tell nothing."""
        told, pending = list[Candidate](), list[Candidate]()
        for one in self.asked:
            effect, reason = self.effects.get((one, THE_REST)), self.reasons.get((one, THE_REST))
            if effect is not None:
                (pending if effect.verdict == TOO_FEW else told).append(one)
            elif reason is not None and reason.kind == LATE:
                pending.append(one)
        if not pending:
            return f"no change of {BEST} was faster, so there is none to make"
        if not told:
            return f"no change of {BEST} was measured to an end, so none is recommended"
        were = "was" if len(pending) == 1 else "were"
        return (
            f"of the {counted(len(told), 'value')} measured to an end no change of {BEST} was "
            f"faster; {len(pending)} {were} not measured to an end"
        )

    def _not_told(self) -> list[str]:
        lines = []
        for verdict, words in ((SAME, "within the noise"), (TOO_FEW, "too few rounds")):
            own = [(one, kind) for one in self.ranked() for kind in WORDS
                   if (e := self.effects.get((one, kind))) and e.verdict == verdict]  # fmt: skip
            if own:
                lines.append(f"could not be told, {words}{self._noise(own)}: {_counted(own)}")
        wrong = [f"{one} {WORDS[kind]} ({effect.answer})"
                 for (one, kind), effect in self.effects.items()
                 if one is not None and not effect.holds]  # fmt: skip
        if wrong:
            lines.append(f"never recommended, since answers differ: {', '.join(wrong)}")
        return lines

    def _noise(self, of: Sequence[Asked]) -> str:
        """`, A/A bands 0.97..1.03 to 0.93..1.08`: the narrowest and the widest of the effects'."""
        bands = [self.effects[asked].band for asked in of]
        known = sorted({band for band in bands if band.high == band.high}, key=lambda b: b.high)
        ends = dict.fromkeys(stats.interval(*band) for band in (*known[:1], *known[-1:]))
        return f", A/A band{'s' * (len(ends) > 1)} {' to '.join(ends)}" if ends else ""

    def _not_measured(self) -> list[str]:
        """A short line for each kind of reason."""
        lines = []
        for kind in (LATE, IDLE, EQUAL, REFUSED):
            own = [asked for asked, reason in self.reasons.items() if reason.kind == kind]
            if not own:
                continue
            words = self._in_words(kind).format(test=self.test)
            lines.append(f"not measured, {words}: {_counted(own)}")
        if self.left_alone:
            lines.append(f"not asked about: {', '.join(self.left_alone)}")
        if lines:
            lines.append("the reason of each: --all, or -o json (in Python: details, to_frame)")
        return lines

    def _in_words(self, why: str) -> str:
        return CUT if self.interrupted and why == LATE else why

    def _each_not_measured(self) -> list[str]:
        lines = []
        by_reason: dict[str, dict[str, list[str]]] = {}
        for (one, kind), reason in self.reasons.items():
            by_reason.setdefault(reason.why, {}).setdefault(str(one), []).append(WORDS[kind])
        for why, names in by_reason.items():
            said = [
                name if len(kinds) > 1 else f"{name} {kinds[0]}" for name, kinds in names.items()
            ]
            lines.append(f"not measured: {', '.join(said)}: {self._in_words(why)}")
        if self.left_alone:
            others = "; ".join(f"{name} ({why})" for name, why in self.left_alone.items())
            lines.append(f"not asked about: {others}")
        return lines

    def __repr__(self) -> str:
        head = f"{Path(self.model).stem}, {self.test}; {self.device}"
        table = self.table()
        shown = "" if table.empty else f"{markdown(table, terminal_columns())}\n\n"
        return f"{head}\n\n{shown}{self.summary}"

    def _repr_html_(self) -> str:
        lines = "<br>".join(map(html.escape, self.summary.splitlines()))
        table = self.table()
        return ("" if table.empty else to_html(table)) + f"<p>{lines}</p>"


_COLUMNS = [
    "model", "device", "test", "toggle", "value", "in_best", "reading", "speedup", "low", "high",
    "n", "band_low", "band_high", "verdict", "answer", "beside", "reason",
]  # fmt: skip


def _counted(asked: Sequence[Asked]) -> str:
    """`14 with the rest and 17 alone (sync=implicit, kv_growth=full, pdl=on, 12 more)`"""
    counts = " and ".join(
        f"{n} {words}" for kind, words in WORDS.items() if (n := sum(kind == k for _, k in asked))
    )
    names = list(dict.fromkeys(str(one) for one, _ in asked))
    more = len(names) - MOST_NAMES
    return f"{counts} ({', '.join(names[:MOST_NAMES])}{f', {more} more' if more > 0 else ''})"


def _numbers(effect: Effect) -> dict[str, Any]:
    ratio, band = effect.ratio, effect.band
    return {
        "speedup": ratio.value, "low": ratio.low, "high": ratio.high, "n": ratio.n,
        "band_low": band.low, "band_high": band.high, "verdict": effect.verdict,
        "answer": effect.answer,
    }  # fmt: skip


def _shown(effect: Effect) -> str:
    """`1.08 (1.07..1.09)`"""
    ratio = effect.ratio
    span = "" if ratio.low != ratio.low else f" ({_short(ratio.low)}..{_short(ratio.high)})"
    return f"{_short(ratio.value)}{span}"


def _in_a_cell(effect: Effect) -> str:
    """`1.08 1.07..1.09 faster`: short, so that a table of two fits 80 columns."""
    verdict = SHORT.get(effect.verdict, effect.verdict) if effect.holds else "WRONG"
    return f"{_shown(effect)} {verdict}".replace("(", "").replace(")", "")


def _short(times: float) -> str:
    """`1.08`, `25.1` or `123`."""
    return f"{times:.{2 if times < 9.995 else 1 if times < 99.95 else 0}f}"
