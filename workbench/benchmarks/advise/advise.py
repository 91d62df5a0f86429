"""`wb.advise`: which switches help on this card and this model, within a budget of time.

Every candidate is read twice (`candidates.py`): alone, and with the rest of what is best. Readings
are arms of comparisons (`chunks.py`), each measured by the engine room of `ab`: interleaved rounds,
an A/A control, answers. A comparison is repeated until its intervals are as narrow as asked, or
until its share of the time is over. Time that is left over goes to the comparison with the widest
interval, again and again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from workbench.benchmarks.advise.advice import Advice, Effect, effects_of
from workbench.benchmarks.advise.candidates import (
    LEFT_ALONE,
    Candidate,
    Reading,
    alone,
    candidates,
    with_the_rest,
)
from workbench.benchmarks.advise.chunks import (
    ALONE,
    THE_REST,
    TOGETHER,
    Asked,
    Chunk,
    chunked,
    kinds_in_turn,
)
from workbench.benchmarks.compare.ab import compare_arms
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.idle import why_same
from workbench.benchmarks.compare.stats import FASTER, SLOWER
from workbench.benchmarks.given import EngineOrPath, given_engine
from workbench.benchmarks.runs import results
from workbench.benchmarks.workload import (
    Workload,
    bos_token,
    check_fits,
    draw_tokens,
    parse_tests,
    take_sample,
)
from workbench.common.errors import UsageError, WorkbenchError
from workbench.common.output import check_folder
from workbench.common.progress import bar, duration, note
from workbench.config import BEST, TogglePreset, Toggles
from workbench.config.table import idle
from workbench.engine.engine import Engine

HALF_WIDTH = 0.01
AT_MOST_S = 300.0
LEAST_ROUNDS = 6  # of a comparison that is begun: a verdict needs 5, and rounds come in pairs


def advise(
    engine: EngineOrPath,
    test: str | Workload = "tg32",
    *,
    toggles: str | Sequence[str] = (),
    at_most_s: float = AT_MOST_S,
    until: float = HALF_WIDTH,
    seed: int = 0,
    out: str | Path | None = None,
    **settings: Any,
) -> Advice:
    """Finds the switches that help on this machine and this model, and ranks them.

    engine: an Engine, or the path of a GGUF file.
    test: one llama-bench test name.
    toggles: ask about these (or families) only; default: all but a few (`LEFT_ALONE`).
    at_most_s: seconds, all in all but for loading the model.
    until: a comparison ends once the half-width of its intervals is at most this share.
    seed: of the random tokens, and of the intervals.
    out: a folder for the run folders, each a comparison; default: a new one in data/runs.
    settings: fields of EngineConfig, for a file.

    Each value is measured alone, from everything off, and with the rest of preset `best` on: best
    minus it, or, where best has another value, best with it. At the end the recommended set is
    measured beside `best` and beside everything off. Values that cannot act in this test, or that
    the device refuses, are not measured; the result says why. So it does of what the time did not
    suffice for.

    Returns an `Advice`: `table` is ranked, `to_frame` has every reading, `flags` and `python` are
    to copy. Ctrl-C keeps what is finished. Raises UsageError for a wrong request, and what
    `Engine.load` raises.
    """
    workloads = parse_tests(test)
    if len(workloads) > 1:
        raise UsageError(f"an advice is for one test, not {len(workloads)}; ask for each")
    if not 0 < at_most_s < math.inf:
        raise UsageError(f"at_most_s={at_most_s} must be above 0 seconds")
    if not 0 < until < 1:
        raise UsageError(f"until={until} is no share; give one between 0 and 1, such as 0.01")
    names = [toggles] if isinstance(toggles, str) else list(toggles)
    names = [part.strip() for name in names for part in name.split(",") if part.strip()]
    asked = candidates(Toggles(), names)
    folder = Path(out) if out is not None else results.new_run_folder(name="advise")
    check_folder(folder, new=True)
    with given_engine(engine, advise, settings, BEST, workloads) as opened:
        check_fits(opened.toggles, opened.config, workloads[0])
        adviser = _Adviser(opened, workloads[0], asked, at_most_s, until, seed, folder)
        adviser.run()
        return adviser.advice(opened, named=bool(names))


class _Adviser:
    """An advice while it is measured."""

    def __init__(
        self, engine: Engine, workload: Workload, asked: list[Candidate], at_most_s: float,
        until: float, seed: int, folder: Path,
    ):  # fmt: skip
        self.engine, self.workload = engine, workload
        self.until, self.seed, self.folder = until, seed, folder
        self.preset = TogglePreset(BEST).for_sequences(workload.width)
        self.off, self.best = Toggles(), engine.resolve(self.preset)
        # what is best first: it decides which flags to copy
        self.asked = sorted(asked, key=lambda one: not self._of_best(one))
        self.begun = time.monotonic()
        self.deadline, self.at_most_s = self.begun + at_most_s, at_most_s
        self.readings: dict[Asked, Reading] = {}
        self.reasons: dict[Asked, str] = {}  # why something is not measured
        self.effects: dict[Asked, Effect] = {}
        self.runs: dict[int, AB] = {}  # by the number of the chunk
        self.overhead_s = 0.0  # of a comparison, beside its rounds
        self.each_s: dict[str, float] = {}  # of a repetition, by ALONE and THE_REST
        self.interrupted = False

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def run(self) -> None:
        """Measures as much as the time suffices for. Ctrl-C ends it."""
        try:
            self._look()
            chunks = chunked(self.readings, {ALONE: self.off, THE_REST: self.best})
            self._measure(chunks, reserved=1)
            self._narrow(chunks, reserved=1)
            last = self._together()
            self._measure([last], first=len(chunks))
            self._narrow([*chunks, last])
        except KeyboardInterrupt:
            self.interrupted = True
        for asked in self.readings:
            if asked not in self.effects:
                self.reasons[asked] = "not reached in the time"

    def _of_best(self, one: Candidate) -> bool:
        return self.best.value_of(one.name) == one.value

    # what can be read ---------------------------------------------------------------------------

    def _look(self) -> None:
        """Finds the readings, and why others cannot be taken: refusals, and values that are idle.
        A value that stands for the same as another value is read once."""
        known: dict[tuple[str, str], Candidate] = {}
        with ExitStack() as stack, bar(
            "looking for switches that act", 2 * len(self.asked), "readings"
        ) as left:  # fmt: skip
            sides = {made: stack.enter_context(closing(self.engine.variant(made)))
                     for made in dict.fromkeys([self.off, self.best])}  # fmt: skip
            for kind, made in ((ALONE, self.off), (THE_REST, self.best)):
                self.each_s[kind] = self._repetition_s(sides[made])
            for asked in kinds_in_turn(self.asked):
                why = "not reached in the time"
                if self.left_s > 0:
                    why = self._why_not(asked, known, sides)
                if why:
                    self.reasons[asked] = why
                left.update()

    def _repetition_s(self, side: Engine) -> float:
        """How long a repetition of the test takes: the second of two."""
        bos, n_vocab = bos_token(side), side.model.n_vocab
        for repetition in range(2):
            tokens = draw_tokens(self.workload, n_vocab, self.seed, repetition, bos)
            taken = take_sample(side, self.workload, tokens)
        return taken.ns_total / 1e9

    def _why_not(
        self, asked: Asked, known: dict[tuple[str, str], Candidate], sides: dict[Toggles, Engine]
    ) -> str:
        """Why a reading cannot be taken; else it is among the readings, and this is empty.

        known: the candidates so far, by what their readings stand for on this device.
        sides: engines that are open already.
        """
        one, kind = asked
        assert one is not None
        try:
            reading = (alone if kind == ALONE else with_the_rest)(one, self.off, self.best)
            if why := idle(reading.before.to_dict(), reading.after.to_dict()):
                return why
            with ExitStack() as stack:
                before, after = (
                    sides.get(side) or stack.enter_context(closing(self.engine.variant(side)))
                    for side in (reading.before, reading.after)
                )
                for side in (before, after):
                    check_fits(side.toggles, side.config, self.workload)
                stands_for = f"{before.settled.to_dict()} {after.settled.to_dict()}"
                why = why_same(before, after, self.workload)
        except WorkbenchError as error:
            return str(error)
        same = known.setdefault((kind, stands_for), one)
        if not why and same != one:
            why = f"stands for {same} here"
        if not why:
            self.readings[asked] = reading
        return why

    # measuring ----------------------------------------------------------------------------------

    def _measure(self, chunks: Sequence[Chunk], first: int = 0, reserved: int = 0) -> None:
        """Measures chunks, each with its share of the time. first: the number of the first.
        reserved: comparisons that come later, with as large a share."""
        for n, chunk in enumerate(chunks):
            left = self.left_s - self.overhead_s
            share = self.left_s / (len(chunks) - n + reserved) - self.overhead_s
            kinds = [self.each_s[THE_REST if kind == THE_REST else ALONE]
                     for _, kind in chunk.readings]  # fmt: skip
            enough = max(kinds, default=0.0) * (len(chunk.toggles) + 1) * LEAST_ROUNDS
            if left < enough:  # a verdict needs so many rounds
                return
            self._compare(first + n, chunk, max(share, enough))

    def _compare(self, number: int, chunk: Chunk, at_most_s: float, resume: bool = False) -> None:
        """Measures a chunk, or goes on with it."""
        begun, out = time.monotonic(), self.folder / f"{number:03}"
        spent = self._spent(number)
        made = compare_arms(
            self.engine, chunk.spec(self.workload), 1, self.seed, out, name=f"advise {number}",
            resume=resume, until=self.until, at_most_s=at_most_s,
        )  # fmt: skip
        self.runs[number] = made
        measured = self._spent(number) - spent
        self.overhead_s = max(self.overhead_s, time.monotonic() - begun - measured)
        self.effects |= effects_of(made, chunk)
        if made.interrupted:
            raise KeyboardInterrupt
        note(f"{len(self.effects)} readings, {duration(max(self.left_s, 0))} left")

    def _ended(self, number: int) -> dict[str, Any]:
        """How repeating a chunk ended; empty where it was not measured."""
        made = self.runs.get(number)
        ended: dict[str, dict[str, Any]] = made.run["result"]["until"]["tests"] if made else {}
        return ended.get(self.workload.name, {})

    def _spent(self, number: int) -> float:
        return float(self._ended(number).get("seconds", 0.0))

    def _narrow(self, chunks: Sequence[Chunk], reserved: int = 0) -> None:
        """Spends the time that is left on the widest intervals. reserved: comparisons that come
        later, and get as much of it."""
        tried = set[int]()
        while True:
            wide = {
                n: self._ended(n)["half_width"] or math.inf
                for n in range(len(chunks))
                if n not in tried and self._ended(n).get("stopped") == "time"
            }
            share = (self.left_s - self.overhead_s) / (1 + reserved) - self.overhead_s * reserved
            if not wide or share < max(self.overhead_s, 0.1):
                return
            widest = max(wide, key=lambda n: wide[n])
            tried.add(widest)
            self._compare(widest, chunks[widest], share / min(2, len(wide)), resume=True)

    def _together(self) -> Chunk:
        """Everything off, best, and the recommended set: what all of it is worth together."""
        recommended = self.engine.resolve(self.preset.changed_by(self.changes()))
        readings: dict[Asked, Reading] = {}
        if self.best != self.off:
            readings[None, TOGETHER] = Reading(self.off, self.best, {}, {}, ())
        if recommended != self.best:
            readings[None, BEST] = Reading(self.best, recommended, {}, {}, ())
        return Chunk(self.off, readings)

    # what is recommended ------------------------------------------------------------------------

    def changes(self) -> dict[str, str]:
        """Changes of `best` that were faster with the rest, and gave the right answer: the fastest
        value of each toggle, the largest gain first. A change that contradicts a larger one, or
        that the device refuses beside it, is left out."""
        found: dict[str, tuple[float, dict[str, str]]] = {}
        for (one, kind), effect in self.effects.items():
            if one is None or kind != THE_REST or not effect.holds:
                continue
            ours = self._of_best(one)
            if effect.verdict == (SLOWER if ours else FASTER):
                gain = 1 / effect.ratio.value if ours else effect.ratio.value
                more = self._changes_of(one)
                if one.name not in found or gain > found[one.name][0]:
                    found[one.name] = gain, more
        changes: dict[str, str] = {}
        for _, more in sorted(found.values(), key=lambda one: -one[0]):
            if any(changes.get(name, value) != value for name, value in more.items()):
                continue
            try:
                self.engine.resolve(self.preset.changed_by(changes | more))
            except WorkbenchError:
                continue
            changes |= more
        return changes

    def _changes_of(self, one: Candidate) -> dict[str, str]:
        """What a reading with the rest changes of `best`: the candidate, what comes with it, and
        what has to go."""
        reading = self.readings[one, THE_REST]
        value = self.off.value_of(one.name) if self._of_best(one) else one.value
        off = {name: self.off.value_of(name) for name in reading.gone}
        return reading.added | off | {one.name: value}

    def advice(self, engine: Engine, named: bool) -> Advice:
        left_alone = {} if named else LEFT_ALONE
        return Advice(
            model=str(engine.model.path), device=engine.backend.description,
            test=self.workload.name, best=self.best, asked=self.asked, effects=self.effects,
            readings=self.readings, reasons=self.reasons, changes=self.changes(),
            left_alone=left_alone, folder=self.folder, interrupted=self.interrupted,
            seconds=time.monotonic() - self.begun, at_most_s=self.at_most_s,
        )  # fmt: skip
