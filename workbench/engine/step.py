"""A step on its way: what `Engine.submit` does, in three parts.

    Steps.next     work -> NextStep: the inputs and the program, made ahead or made now
    Issuer.run     NextStep -> Pending: the program is issued, and somebody may watch
    Steps.store    the step's cells belong to its sequences from now on

While a device computes a step, the host has nothing to do. After the step, the device has nothing
to do until the host has issued the next step. Where each sequence goes on by one token, everything
in the next step but its tokens is known in advance. So it is made while the device computes:

    inputs     `Batches.look_ahead` makes them
    program    is looked up, where it is kept as it is
    launch     with launch_ahead=on the plan is launched, and waits at its gate
               (`backend/plan/gate.py`)
    writes     the inputs are written to staging memory, once the device has read the inputs of the
               step under way. Only a gate says so. Other programs write when they are submitted

A step that is launched ahead has the same shape as the step under way, so its inputs lie where that
step's inputs lie. If nobody opens the gate, the device computes the step under way once more.

With results=behind two steps may be under way: the next step is issued before the results of the
step before are there. Steps end in the order in which they were issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from workbench.backend.base import Backend, Memory
from workbench.backend.clock.stamps import StampRings, StepStamps
from workbench.backend.issue.bind import Launching
from workbench.backend.issue.prepared import Prepared
from workbench.backend.plan.gate import Gate
from workbench.backend.plan.life import Plans, gate_of, plans_of
from workbench.common.errors import UsageError
from workbench.engine.batch import Batch, Batches, Work, copy_batch, shift_batch
from workbench.engine.cache.kv_cache import KVCache
from workbench.engine.choose import Chosen
from workbench.engine.load import Loaded
from workbench.engine.look.phases import PhaseCounts
from workbench.engine.look.watch import Watch
from workbench.engine.programs import Key, Rebuild
from workbench.model.inputs import TOKENS
from workbench.program.commands import Buffer, Program
from workbench.program.sync_modes import Ordering
from workbench.trace.spans import Recorder, now_ns

LATE = frozenset((TOKENS,))  # inputs that are known only when a step is submitted

Meanwhile = Callable[["NextStep"], int]  # the host's work while a step is computed; returns its ns


class NextStep:
    """A step that is ready to be issued.

    work: the sequences and their tokens.
    batch: the inputs.
    program: the program to issue; with stamps, where the watch wants them.
    watch: watches the step.
    is_written: whether the inputs, except the tokens, are in staging memory.
    spent: (phase, ns) of work that was done ahead. It is counted once the step is issued, because
        the device stands still until then.
    undo: frees the cells of the step again.
    """

    __slots__ = ("batch", "is_written", "program", "spent", "undo", "watch", "work")

    def __init__(self, work: Work, batch: Batch, program: Prepared, watch: Watch):
        self.work, self.batch, self.watch = work, batch, watch
        self.program = watch.of(program)
        self.is_written = False
        self.spent: list[tuple[str, int]] = []
        self.undo: Callable[[], None] = _nothing


def _nothing() -> None:
    """Undoes a step whose cells were not stored."""


class Pending:
    """Logits on their way to the host. They may be read when `wait` returns.

    A later `submit` of the engine ends this step first (the next one, or with results=behind the
    one after that). The results are kept here until they are waited for.
    """

    __slots__ = ("_end", "failed", "logits", "meanwhile", "step")

    def __init__(self, step: NextStep, end: Callable[[Pending], None], meanwhile: Meanwhile | None):
        """end: waits for the results of a step, and fills `logits`. meanwhile: the host's work
        before it waits."""
        self.step, self._end, self.meanwhile = step, end, meanwhile
        self.logits: np.ndarray | None = None
        self.failed = False

    @property
    def done(self) -> bool:
        """Whether the step has ended: the results are here."""
        return self.logits is not None

    def wait(self) -> np.ndarray:
        """The step's logits, float32 (n_outputs, n_vocab), in the order of the work. Where the
        device draws: int32 (n_outputs, 2), of each output the token and the nanoseconds that the
        draw took. The token is -1 where logits are not finite.

        Where the wait fails or is interrupted, the step's cells are free again, and a second wait
        raises UsageError.
        """
        if self.logits is None and not self.failed:
            self._end(self)
        if self.logits is None:
            raise UsageError(
                "this step has no results, for its wait failed or its engine was closed; submit "
                "its tokens again"
            )
        return self.logits

    def each(self) -> list[np.ndarray]:
        """The logits of each entry of the work: float32 (the entry's outputs, n_vocab)."""
        return np.split(self.wait(), np.cumsum(self.step.batch.counts)[:-1])

    def fail(self) -> None:
        """The step has no results. Its cells are free again."""
        self.step.undo()
        self.step.watch.lost()
        self.failed = True


class Issuer:
    """Binds the programs of an engine, issues its steps, and ends them in their order.

    plans: the engine's plans.
    gate: of an engine that launches ahead, once a program was bound.
    rings: the rings of its stamps.
    launches_ahead: whether the next step's plan is launched before the step is submitted.
    n_steps: steps that have ended.
    n_untraced: those of them that no recorder saw.
    under_way: the steps that are issued and have not ended, oldest first.
    turn: which copy of the rings the next step takes (`program/layout.py`). Unless results=behind,
        it is the turn of the step under way until that step ends.
    recorder: collects the spans of steps; None for nothing.
    alone: as `look` has it.
    """

    def __init__(
        self,
        plans: Plans,
        gate_of: Callable[[], Gate] | None,
        ordering: Ordering,
        counts: PhaseCounts,
        n_vocab: int,
    ):
        """gate_of: makes the gate of an engine that launches ahead; None for other engines."""
        self.plans, self._ordering, self._counts = plans, ordering, counts
        self._result_ring = ordering.result_ring
        self._n_vocab = n_vocab
        self.launches_ahead = gate_of is not None
        self._gate_of = gate_of
        self.gate: Gate | None = None
        self.rings = StampRings()
        self.under_way: deque[Pending] = deque()
        self.n_steps = self.n_untraced = self.turn = 0
        self.recorder: Recorder | None = None
        self.alone = False
        self._watch_of: Callable[[int], Watch]

    def look(
        self, recorder: Recorder | None, watch_of: Callable[[int], Watch], alone: bool = False
    ) -> None:
        """Chooses who watches from the next step on.

        watch_of: from the number of a step to its watch.
        alone: no other step is made or launched while a step is under way.
        """
        self.recorder, self._watch_of, self.alone = recorder, watch_of, alone

    # programs ---------------------------------------------------------------------------------

    def prepare(
        self,
        program: Program,
        backends: Sequence[Backend],
        memory: Mapping[Buffer, Memory],
        events: dict[str, Any],
        launches: Launching | None = None,
    ) -> Prepared:
        """The program bound to addresses, as `Prepared` has it. launches: how its launches are
        asked for, if not as they are."""
        if self.gate is None and self._gate_of is not None:
            self.gate = self._gate_of()
        return Prepared(
            program, backends, memory, events, self.plans, self.gate, launches, late=LATE
        )

    def stamps(self, program: Program, backends: Sequence[Backend]) -> StepStamps:
        """The stamps of a program, with which it is prepared once more."""
        self.release()  # rings are new memory
        return StepStamps(program, backends, self.rings)

    @property
    def replays(self) -> bool:
        """Whether steps are captured and replayed."""
        return self.plans.policy is not None

    def release(self) -> None:
        """Cancels a plan that was launched ahead. Call it before a wait for the device, which would
        otherwise take as long as the limit of a gate."""
        if self.gate is not None:
            self.gate.cancel()

    def forget(self) -> None:
        """Destroys all plans, because they hold addresses of memory that is about to change."""
        self.plans.clear(self.gate)

    def free(self) -> None:
        """Gives everything back. Call it when nothing is queued any more."""
        self.plans.clear(self.gate)
        self.rings.free()
        if self.gate is not None:
            self.gate.free()
            self.gate = None

    # steps ------------------------------------------------------------------------------------

    @property
    def _most(self) -> int:
        """How many steps may be under way."""
        return 1 if self.alone else self._result_ring

    @property
    def is_ahead(self) -> bool:
        """Whether the next step is made ready when a step is submitted, not when it is waited
        for."""
        return self._most > 1

    def make_room(self) -> None:
        """Waits until another step may be issued."""
        self.end_all_but(self._most - 1)

    def end_all_but(self, n: int) -> None:
        """Waits until no more than n steps are under way."""
        while len(self.under_way) > n:
            self.under_way[0].wait()

    def begin(self, work: Work, n_past: int) -> Watch:
        """The watch of the step that begins. n_past: the cells in use."""
        watch = self._watch_of(self.n_steps)
        if self.alone:  # the step's marks would come after a plan that is launched ahead
            self.release()
        watch.begin(self.n_steps, work, n_past)
        return watch

    def run(self, step: NextStep, meanwhile: Meanwhile | None = None) -> Pending:
        """Issues a step: its commands one by one, or the replay of its plan, or the opening of the
        gate that its plan waits at. meanwhile: the host's work before it waits for the results."""
        program, watch = step.program, step.watch
        try:
            if watch.looks_at_batches:
                watch.batch(step.batch, program.program)
            start = now_ns()
            if step.is_written:
                program.run_late(watch.late(program))
            else:
                program.run(step.batch.values, watch.head(program))
            if watch.counts:
                self._counts.add("issue", now_ns() - start)
            pending = Pending(step, self._end, meanwhile)
            self.under_way.append(pending)
        except BaseException:
            watch.fail()
            raise
        if self._result_ring > 1:
            self.turn = self._ordering.turn_after(self.turn, False)
        return pending

    def arm(self, now: NextStep, coming: NextStep) -> None:
        """Launches the plan of the coming step, where it can wait at a gate. Writes the step's
        inputs, where the device has read the inputs of the step under way."""
        if coming.program.ahead is None or coming.batch.shape != now.batch.shape:
            return
        now.watch.arm(coming.program)
        before = now.program.ahead
        if before is not None and before.has_read:
            coming.program.write_ahead(coming.batch.values)
            coming.is_written = True

    def _end(self, pending: Pending) -> None:
        """Ends the steps before this one, then waits for its results."""
        step, under_way = pending.step, self.under_way
        program, watch = step.program, step.watch
        waits = bool(program.tail)
        while under_way and under_way[0] is not pending:
            under_way[0].wait()
        if under_way:
            under_way.popleft()
        if self._result_ring == 1:
            self.turn = self._ordering.turn_after(self.turn, waits)
        if pending.failed:  # with a step before it
            return
        start, ahead_ns = now_ns(), 0
        try:
            if waits and pending.meanwhile is not None and not self.is_ahead:
                ahead_ns = pending.meanwhile(step)
            early = program.early()
            logits = None if early is None else self._logits(step, early)
            results = program.finish(watch.tail(program))
            pending.logits = self._logits(step, results) if logits is None else logits
        except BaseException:
            self.fail()
            pending.fail()
            raise
        if watch.counts:
            self._counts.add("wait", now_ns() - start - ahead_ns)
            self.n_untraced += 1
        self.n_steps += 1
        watch.end(waits)

    def _logits(self, step: NextStep, results: dict[str, np.ndarray]) -> np.ndarray:
        """The results as `Pending.wait` returns them. They may still be on their way."""
        shape, n = step.batch.shape, sum(step.batch.counts)
        row = 2 if shape.draws else self._n_vocab
        kind = np.dtype(np.int32 if shape.draws else np.float32)
        if not n:
            return np.empty((0, row), kind)
        (raw,) = results.values()
        found: np.ndarray = raw.view(kind).reshape(shape.n_outputs, row)
        return found[:n]

    def fail(self) -> None:
        """A step has failed, so the steps after it have no results either. Or the engine is closed,
        so nobody waits for steps any more."""
        while self.under_way:
            self.under_way.pop().fail()


def issuer_of(have: Chosen, loaded: Loaded, counts: PhaseCounts) -> Issuer:
    """The Issuer of an engine with these toggles."""
    plans = plans_of(have.settled)
    gate = gate_of(have.toggles, loaded.backend, plans)
    return Issuer(plans, gate, have.ordering, counts, loaded.model.n_vocab)


class Steps:
    """Makes the next step of an engine: its batch, its program, its turn; in advance where it can.

    programs: builds or keeps the programs of step shapes (`programs.py`).
    """

    def __init__(self, cache: KVCache, batches: Batches, programs: Rebuild, issuer: Issuer):
        self._cache, self.batches, self.programs = cache, batches, programs
        self._issuer = issuer
        self._coming: NextStep | None = None  # made ahead

    def next(self, work: Work, draws: bool = False) -> NextStep:
        """The step of some work, once there is room for it. draws: as `Engine.submit` has it.

        Raises UsageError for work that the model or the cache cannot take. Nothing has changed
        then."""
        coming, self._coming = self._coming, None
        if coming is not None and self._is(coming, work, draws):
            return coming
        self._issuer.make_room()
        if self._cache.copied or self._cache.moved is not None:
            self.batches.check(work, draws)  # a refusal comes before cells change
            self._change_cells()
        with self._issuer.begin(work, self._cache.n_used) as watch:
            return self._made(work, self.batches.take(work, draws), watch)

    def _made(self, work: Work, batch: Batch, watch: Watch) -> NextStep:
        key = Key(batch.shape, self._issuer.turn)
        return NextStep(work, batch, self.programs.get(key, batch.first_cell), watch)

    def _is(self, coming: NextStep, work: Work, draws: bool) -> bool:
        """Whether the step that was made ahead is the step of `work`. If so, its tokens are put
        in."""
        start = now_ns()
        if self._issuer.under_way or self.batches.made_ahead(work, draws) is not coming.batch:
            return False
        coming.work = work
        coming.spent.append(("batch", now_ns() - start))
        return True

    def store(self, step: NextStep, counts: PhaseCounts) -> None:
        """Gives the cells of an issued step to its sequences; undone where the step fails. With
        results=behind, the next batch is made now."""
        batch = step.batch
        step.undo = self._cache.store(batch.sequences, batch.positions, batch.cells)
        for phase, ns in step.spent:
            counts.add(phase, ns)
        if step.spent:
            self.programs.reused += 1
        elif self._issuer.is_ahead:
            self.batches.look_ahead(step.work, batch.shape.draws)

    # ahead --------------------------------------------------------------------------------------

    def look_ahead(self, now: NextStep) -> int:
        """Makes what is already known of a step like the one under way. Returns the ns it took.
        Only the inputs are made where a watch wants each step alone, because its marks would come
        after a launch."""
        start = now_ns()
        self.batches.look_ahead(now.work, now.batch.shape.draws)
        self._coming = None if self._issuer.alone else self._following(now)
        return now_ns() - start

    def _following(self, now: NextStep) -> NextStep | None:
        start, batch = now_ns(), self.batches.next
        kept = batch and self.programs.peek(Key(batch.shape, self._issuer.turn))
        if batch is None or kept is None or batch.shape.draws:  # draws are late, too
            return None
        coming = NextStep(now.work, batch, kept, now.watch)
        coming.spent.append(("reuse", now_ns() - start))
        self._issuer.arm(now, coming)
        return coming

    def forget_coming(self) -> None:
        """Drops what was made ahead."""
        self._coming = None

    # steps without tokens -------------------------------------------------------------------------

    def _change_cells(self) -> None:
        """Copies cells, and rotates the stored K to the positions that cells were shifted to, by
        steps without tokens. Cells that an interrupted step has changed are lost."""
        cache = self._cache
        while cache.copied:
            self._change(copy_batch(cache.copied[0]), cache.are_copied)
        if cache.moved is not None:
            self._change(shift_batch(cache), cache.rotated)

    def _change(self, batch: Batch, done: Callable[[], None]) -> None:
        """Issues a step without tokens. done: tells the cache that it is issued."""
        self._issuer.make_room()
        with self._issuer.begin((), self._cache.n_used) as watch:
            step = self._made((), batch, watch)
        try:
            pending = self._issuer.run(step)
        except BaseException:
            self._cache.lost()  # cells, where it was interrupted midway
            raise
        done()
        pending.wait()
