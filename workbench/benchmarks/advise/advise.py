"""`wb.advise`: which switches help on this card and this model, within a budget of time.

Best beside everything off comes first. Then every candidate is read twice (`candidates.py`): with
the rest of what is best, and alone. Readings are arms of comparisons (`chunks.py`). The engine room
of `ab` measures each: interleaved rounds, an A/A control, answers. A comparison is repeated until
its intervals are as narrow as asked, or until its share of the time is over. Time that is left over
goes to the comparison with the widest interval, again and again.

A graph that is built anew for each token can take many times a token, and hide all else. Then the
readings alone start from everything off with the graph kept, and comparisons that need a rebuilt
graph come last. `graph_reuse` itself is read from everything off.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from workbench.benchmarks import workload as w
from workbench.benchmarks.advise import record
from workbench.benchmarks.advise.advice import (
    EQUAL,
    IDLE,
    NOT_REACHED,
    REFUSED,
    Advice,
    Effect,
    Reason,
    effects_of,
)
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
from workbench.benchmarks.compare.stats import FASTER, SAME, SLOWER
from workbench.benchmarks.compare.until import Until, make_until
from workbench.benchmarks.given import EngineOrPath, given_engine
from workbench.benchmarks.runs import results
from workbench.benchmarks.workload import (
    Workload,
    bos_token,
    check_fits,
    draw_tokens,
    parse_tests,
)
from workbench.common.errors import UsageError, WorkbenchError
from workbench.common.output import check_folder
from workbench.common.progress import bar, duration, note
from workbench.common.sizes import counted
from workbench.config import BEST, GraphReuse, TogglePreset, Toggles
from workbench.config.table import idle
from workbench.engine.engine import Engine

HALF_WIDTH = 0.01
AT_MOST_S = 300.0
LEAST_ROUNDS = 6  # of a comparison that is begun: a verdict needs 5, and rounds come in pairs
WARM_ROUNDS = 4  # that a warm-up is expected to have: at least 2, at most 8
SLACK = 1.5  # an arm may be slower than the arm that was timed
HEADLINE_SHARE = 0.05  # of the time, beyond its least: best beside everything off
LOOK_SHARE = 0.25  # of the time that is left: finding the switches that act
# a test so many times longer is estimated by one of so many tokens, before it is run at all
SHORT_GEN, SHORT_PROMPT, MUCH_LONGER = 16, 512, 8.0
HIDES = 3.0  # a graph built anew takes so many times a token: no other switch can be told beside it


def advise(
    engine: EngineOrPath,
    test: str | Workload = "tg32",
    *,
    toggles: str | Sequence[str] = (),
    at_most_s: float | str = AT_MOST_S,
    until: float | str = HALF_WIDTH,
    seed: int = 0,
    out: str | Path | None = None,
    **settings: Any,
) -> Advice:
    """Finds the switches that help on this machine and this model, and ranks them.

    engine: an Engine, or the path of a GGUF file.
    test: one llama-bench test name.
    toggles: ask about these (or families) only; default: all but a few (`LEFT_ALONE`).
    at_most_s: seconds (or `"60s"`), all in all but for loading the model.
    until: a comparison ends once the half-width of its intervals is at most this share (0.01, or
        `"1%"`).
    seed: of the random tokens, and of the intervals.
    out: a folder for the run folders, each a comparison; default: a new one in data/runs.
    settings: fields of EngineConfig, for a file.

    First `best` is measured beside everything off. Then each value is measured with the rest of
    `best` on: best minus it, or, where best has another value, best with it; and alone, from
    everything off. (Where building the graph for each token hides all else, alone starts with the
    graph kept; the result says so.) At the end the recommended set is measured beside `best`.
    Values that cannot act in this test, or that the device refuses, are not measured; the result
    says why. So it does of what the time did not suffice for.

    Returns an `Advice`: `table` is ranked, `to_frame` has every reading, `flags` and `python` are
    to copy. `wb.load(folder)` reads it again. Ctrl-C keeps what is finished. Raises UsageError for
    a wrong request, and what `Engine.load` raises.
    """
    workloads, asked, named = wanted(test, toggles, out)
    limit = make_until(until, at_most_s)
    if limit is None:
        raise UsageError("an advice ends by its width; give until=0.01")
    folder = Path(out) if out is not None else results.new_run_folder(name="advise")
    with given_engine(engine, advise, settings, BEST, workloads) as opened:
        check_fits(opened.toggles, opened.config, workloads[0])
        left_alone = {} if named else LEFT_ALONE
        adviser = _Adviser(opened, workloads[0], asked, limit, seed, folder, left_alone)
        adviser.run()
        made = adviser.advice()
        record.write(made)
        return made


def wanted(
    test: str | Workload, toggles: str | Sequence[str], out: str | Path | None
) -> tuple[list[Workload], list[Candidate], bool]:
    """What an advice is asked, checked before a model is loaded: the test as a list, what is read,
    and whether toggles are named. Raises UsageError for a wrong request."""
    workloads = parse_tests(test)
    if len(workloads) > 1:
        raise UsageError(f"an advice is for one test, not {len(workloads)}; ask for each")
    given = [toggles] if isinstance(toggles, str) else list(toggles)
    names = [part.strip() for name in given for part in name.split(",") if part.strip()]
    if given and not names:
        raise UsageError(
            "no toggle is named; name toggles or families, as sync,plans, or leave them out to ask "
            "about nearly all"
        )
    asked = candidates(Toggles(), names)
    if out is not None:
        check_folder(out, new=True)
    return workloads, asked, bool(names)


class _Adviser:
    """An advice while it is measured."""

    def __init__(
        self, engine: Engine, workload: Workload, asked: list[Candidate],
        limit: Until, seed: int, folder: Path, left_alone: Mapping[str, str],
    ):  # fmt: skip
        self.engine, self.workload, self.left_alone = engine, workload, left_alone
        self.until, self.seed, self.folder = limit.half_width, seed, folder
        self.preset = TogglePreset(BEST).for_sequences(workload.width)
        self.off, self.best = Toggles(), engine.resolve(self.preset)
        self.start, self.rebuilding = self.off, 1.0  # of readings alone; what a rebuilt graph costs
        # what is best first: it decides which flags to copy
        self.asked = sorted(asked, key=lambda one: not self._of_best(one))
        self.begun = time.monotonic()
        self.deadline, self.at_most_s = self.begun + limit.at_most_s, limit.at_most_s
        self.readings: dict[Asked, Reading] = {}
        self.reasons: dict[Asked, Reason] = {}  # why something is not measured
        self.effects: dict[Asked, Effect] = {}
        self.chunks: list[Chunk] = []
        self.runs: dict[int, AB] = {}  # by the number of the chunk
        self.opening_s = 0.0  # of an arm of a comparison, beside its warm-up and its rounds
        self.each_s: dict[Toggles, float] = {}  # of a repetition: off, start and best
        self.interrupted = False

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def run(self) -> None:
        """Measures as much as the time suffices for, and first what tells most. Ctrl-C ends it."""
        try:
            self._time_repetitions()
            if self.best != self.off:
                # the base is best, so that only a single arm is as slow as everything off
                headline = Reading(self.off, self.best, {}, {}, ())
                self._measure([Chunk(self.best, {(None, TOGETHER): headline})], HEADLINE_SHARE)
            self._look()
            chunks = self._in_order()
            for kind in (THE_REST, ALONE):
                own = [chunk for chunk in chunks if any(k == kind for _, k in chunk.readings)]
                later_s = sum(self._cost_s(chunk) for chunk in chunks if chunk not in own)
                self._measure(own, reserved_s=self._last_s, later_s=later_s * (kind == THE_REST))
                self._narrow(reserved_s=self._last_s, only_few=True)
            self._narrow(reserved_s=self._last_s)
            recommended = self.engine.resolve(self.preset.changed_by(self.changes()))
            if recommended != self.best:
                together = Reading(self.best, recommended, {}, {}, ())
                self._measure([Chunk(self.best, {(None, BEST): together})])
            self._narrow()
        except KeyboardInterrupt:
            self.interrupted = True

    def _all_reasons(self) -> dict[Asked, Reason]:
        """Why anything is not measured; now, for what may still be reached."""
        looked = {*self.readings, *self.reasons}
        missing = [a for a in kinds_in_turn(self.asked) if a not in looked]
        late = [asked for asked in (*missing, *self.readings) if asked not in self.effects]
        return self.reasons | dict.fromkeys(late, NOT_REACHED)

    def _of_best(self, one: Candidate) -> bool:
        return self.best.value_of(one.name) == one.value

    # what can be read ---------------------------------------------------------------------------

    def _time_repetitions(self) -> None:
        """How long a repetition takes with everything off, with the graph kept, and with best. It
        decides where readings alone start."""
        reuse = self.best.value_of("graph_reuse")
        keeps = GraphReuse.SET_ROWS if reuse == GraphReuse.REBUILD else reuse
        kept = self.off.changed_by({"graph_reuse": str(keeps)})
        for made in (self.best, kept, self.off):
            if made not in self.each_s:
                with closing(self.engine.variant(made)) as side:
                    self.each_s[made] = self._repetition_s(side)
        self.rebuilding = self.each_s[self.off] / self.each_s[kept]
        if self.rebuilding > HIDES:
            self.start = kept

    def _repetition_s(self, side: Engine) -> float:
        """How long a repetition of the test takes: the second of two, or a single long one. Raises
        UsageError where it would be longer than all the time that is left."""
        short = self.workload._replace(
            n_gen=min(self.workload.n_gen, SHORT_GEN),
            n_prompt=min(self.workload.n_prompt, SHORT_PROMPT),
        )
        longer = self.workload.n_tokens / short.n_tokens
        if longer > MUCH_LONGER:
            about_s = self._second_s(side, short) * longer
            if about_s > self.left_s:
                raise UsageError(
                    f"a repetition of {self.workload.name} takes about {duration(about_s)}, and an "
                    f"advice of {duration(self.at_most_s)} needs many; give it more time, or a "
                    "shorter test"
                )
        return self._second_s(side, self.workload)

    def _second_s(self, side: Engine, workload: Workload) -> float:
        """How long the second of two repetitions takes, or a single long one."""
        bos, n_vocab = bos_token(side), side.model.n_vocab
        for repetition in range(2):
            tokens = draw_tokens(workload, n_vocab, self.seed, repetition, bos)
            taken = w.take_sample(side, workload, tokens)
            if taken.ns_total / 1e9 > self.at_most_s / 100:
                break
        return taken.ns_total / 1e9

    def _look(self) -> None:
        """Finds the readings, and why others cannot be taken: refusals, and values that are idle.
        A value that stands for the same as another value is read once. Ends after a share of the
        time."""
        known: dict[tuple[str, str], Candidate] = {}
        ends = time.monotonic() + LOOK_SHARE * self.left_s
        with ExitStack() as stack, bar(
            "looking for switches that act", 2 * len(self.asked), "speedups"
        ) as left:  # fmt: skip
            sides = {made: stack.enter_context(closing(self.engine.variant(made)))
                     for made in dict.fromkeys([self.off, self.start, self.best])}  # fmt: skip
            for asked in kinds_in_turn(self.asked):
                if time.monotonic() > ends:
                    return
                if why := self._why_not(asked, known, sides):
                    self.reasons[asked] = why
                left.update()

    def _reading(self, one: Candidate, kind: str) -> Reading:
        if kind == THE_REST:
            return with_the_rest(one, self.off, self.best)
        return alone(one, self.off if one.name == "graph_reuse" else self.start, self.best)

    def _why_not(
        self, asked: Asked, known: dict[tuple[str, str], Candidate], sides: dict[Toggles, Engine]
    ) -> Reason | None:
        """Why a reading cannot be taken; else it is among the readings, and this is None.

        known: the candidates so far, by what their readings stand for on this device.
        sides: engines that are open already.
        """
        one, kind = asked
        assert one is not None
        try:
            reading = self._reading(one, kind)
            if why := idle(reading.before.to_dict(), reading.after.to_dict()):
                return Reason(IDLE, why)
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
            return Reason(REFUSED, str(error))
        if why:
            return Reason(IDLE, why)
        same = known.setdefault((kind, stands_for), one)
        if same != one:
            return Reason(EQUAL, f"stands for {same} here")
        self.readings[asked] = reading
        return None

    # measuring ----------------------------------------------------------------------------------

    def _in_order(self) -> list[Chunk]:
        """The comparisons of all readings, and first what tells most a second: with the rest
        (values of best, then other values), then alone; those with a slow arm after the others.
        A reading that the headline has measured is taken from there."""
        groups: dict[tuple[bool, bool], dict[Asked, Reading]] = {}
        base_of = {ALONE: self.start, THE_REST: self.best}
        for asked, reading in self.readings.items():
            if self.runs and (reading.before, reading.after) == (self.off, self.best):
                self.chunks[0].readings[asked] = reading
                self.effects |= effects_of(self.runs[0], self.chunks[0])
                continue
            slow = any(self._is_slow(side) for side in (reading.before, reading.after))
            groups.setdefault((asked[1] == ALONE, slow), {})[asked] = reading
        return [chunk for key in sorted(groups) for chunk in chunked(groups[key], base_of)]

    def _is_slow(self, side: Toggles) -> bool:
        """Whether building the graph anew hides everything else there."""
        return self.start != self.off and side.value_of("graph_reuse") == GraphReuse.REBUILD

    def _round_s(self, chunk: Chunk) -> float:
        """The expected time of a round: every arm, and the A/A control."""
        arms = [*chunk.toggles, chunk.base]
        return sum(self.each_s[self.off if self._is_slow(a) else chunk.base] for a in arms)

    def _cost_s(self, chunk: Chunk) -> float:
        """The least time of a comparison that ends in verdicts."""
        return self._beside_s(chunk) + self._least_s(chunk)

    @property
    def _last_s(self) -> float:
        """The time to keep for the last comparison, of the recommended set beside best. It has
        three arms; a chunk without readings has two."""
        return 2 * self._cost_s(Chunk(self.best, {}))

    def _beside_s(self, chunk: Chunk) -> float:
        """The expected time to open the arms of a comparison and to warm them up."""
        return WARM_ROUNDS * self._round_s(chunk) + self.opening_s * (len(chunk.toggles) + 1)

    def _least_s(self, chunk: Chunk) -> float:
        """The least time of the rounds of a comparison."""
        slack = 1.0 if any(map(self._is_slow, chunk.toggles)) else SLACK
        return slack * LEAST_ROUNDS * self._round_s(chunk)

    def _measure(
        self, chunks: Sequence[Chunk], share: float = 1.0, reserved_s: float = 0.0,
        later_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Measures chunks in turn. Each has its least time, and as much as the others of the time
        that is left over. A chunk that the time does not suffice for is left out.

        share: of the time that may be left over.
        reserved_s: the time that others need later.
        later_s: the time that others get if it is there.
        """
        for n, chunk in enumerate(chunks):
            left = self.left_s - reserved_s
            cost = self._cost_s(chunk)
            if cost > left:
                continue
            spare = max(0.0, left - later_s - sum(map(self._cost_s, chunks[n:])))
            self.chunks.append(chunk)
            self._compare(
                len(self.chunks) - 1, self._least_s(chunk) + share * spare / (len(chunks) - n)
            )

    def _compare(self, number: int, at_most_s: float, resume: bool = False) -> None:
        """Measures a chunk, or goes on with it."""
        chunk = self.chunks[number]
        begun, out = time.monotonic(), self.folder / f"{number:03}"
        spent = self._spent(number)
        made = compare_arms(
            self.engine, chunk.spec(self.workload), 1, self.seed, out, name=f"advise {number}",
            resume=resume, until=self.until, at_most_s=at_most_s,
        )  # fmt: skip
        self.runs[number] = made
        rounds_s = self._spent(number) - spent + WARM_ROUNDS * self._round_s(chunk)
        beside = (time.monotonic() - begun - rounds_s) / (len(chunk.toggles) + 1)
        self.opening_s = max(0.0, (self.opening_s + beside) / 2 if self.opening_s else beside)
        self.effects |= effects_of(made, chunk)
        if made.interrupted:
            raise KeyboardInterrupt
        record.write(dataclasses.replace(self.advice(), interrupted=True))  # until it has ended
        left = duration(max(self.left_s, 0))
        note(f"{counted(len(self.effects), 'speedup')} measured, {left} left")

    def _ended(self, number: int) -> dict[str, Any]:
        """How repeating a chunk ended; empty where it was not measured."""
        made = self.runs.get(number)
        ended: dict[str, dict[str, Any]] = made.run["result"]["until"]["tests"] if made else {}
        return ended.get(self.workload.name, {})

    def _spent(self, number: int) -> float:
        return float(self._ended(number).get("seconds", 0.0))

    def _narrow(self, reserved_s: float = 0.0, only_few: bool = False) -> None:
        """Spends the time that is left on comparisons with too few rounds, then on the widest
        intervals.

        reserved_s: the time that others need. only_few: it ends once each has rounds enough.
        """
        tried = set[int]()
        while True:
            left = self.left_s - reserved_s
            wide = {
                n: self._ended(n)["half_width"] or math.inf
                for n, chunk in enumerate(self.chunks)
                if n not in tried and self._ended(n).get("stopped") == "time"
                and self._cost_s(chunk) < left
            }  # fmt: skip
            if not wide:
                return
            few = {n: wide[n] for n in wide if self._ended(n)["rounds"] < LEAST_ROUNDS}
            if only_few and not few:
                return
            widest = max(few or wide, key=lambda n: wide[n])
            tried.add(widest)
            chunk = self.chunks[widest]
            share = (left - self._beside_s(chunk)) / min(2, len(wide))
            self._compare(widest, self._least_s(chunk) if few else share, resume=True)

    # what is recommended ------------------------------------------------------------------------

    def changes(self) -> dict[str, str]:
        """Changes of `best` that were faster with the rest, and gave the right answer: the fastest
        value of each toggle, the largest gain first. A change is left out that contradicts a larger
        one, that the device refuses beside it, or that gains no more than what comes with it."""
        found: dict[str, tuple[float, dict[str, str]]] = {}
        for (one, kind), effect in self.effects.items():
            if one is None or kind != THE_REST or not effect.holds:
                continue
            ours = self._of_best(one)
            if effect.verdict == (SLOWER if ours else FASTER):
                gain = 1 / effect.ratio.value if ours else effect.ratio.value
                if effect.ratio.low <= self._gain_of(self.readings[one, kind].added):
                    continue
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

    def recommended(self) -> dict[str, str]:
        """`changes`; none where they were measured together, and are not faster than `best` or give
        another answer. Too few rounds tell nothing against them."""
        together = self.effects.get((None, BEST))
        fails = together is not None and (together.verdict in (SAME, SLOWER) or not together.holds)
        return {} if fails else self.changes()

    def _gain_of(self, added: dict[str, str]) -> float:
        """The largest speedup of values that come with a candidate, each by itself with the rest;
        0 where none was measured. A candidate is worth a change only beyond it."""
        found = (self.effects.get((Candidate(*one), THE_REST)) for one in added.items())
        return max((effect.ratio.value for effect in found if effect), default=0.0)

    def _changes_of(self, one: Candidate) -> dict[str, str]:
        """What a reading with the rest changes of `best`: the candidate, what comes with it, and
        what has to go."""
        reading = self.readings[one, THE_REST]
        value = self.off.value_of(one.name) if self._of_best(one) else one.value
        off = {name: self.off.value_of(name) for name in reading.gone}
        return reading.added | off | {one.name: value}

    def advice(self) -> Advice:
        """What is known so far."""
        return Advice(
            model=str(self.engine.model.path), device=self.engine.backend.description,
            test=self.workload.name, best=self.best, asked=self.asked, effects=self.effects,
            readings=self.readings, reasons=self._all_reasons(), changes=self.recommended(),
            left_alone=self.left_alone, folder=self.folder, interrupted=self.interrupted,
            seconds=time.monotonic() - self.begun, at_most_s=self.at_most_s,
            start=self.start, rebuilding=self.rebuilding,
        )  # fmt: skip
