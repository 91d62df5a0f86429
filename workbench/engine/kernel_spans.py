"""When each kernel of a step ran, without a trace (`kernel_spans`).

On a device whose kernels can note that (`Backend.launch_noted`), a step's program is bound once
more, with kernels that do. The host reads what they noted behind each step, when nothing runs. A
device that marks every command anyway, as the embedded one does, is asked for its marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from workbench.backend.base import Issue
from workbench.backend.issue import Prepared
from workbench.backend.launch_notes import LaunchNotes, NotedSpan
from workbench.engine.watch import PLAIN, Watch, described
from workbench.errors import UsageError
from workbench.program import commands as c
from workbench.trace.spans import Recorder, Span

if TYPE_CHECKING:
    from workbench.engine.engine import Engine


class KernelSpans:
    """What was found: of each step its launches, in the order of their issue, as device spans (args
    `index`, `part`, `op`, `stream`; `kernel` where kernels note). n_silent: of each step, kernels
    of libraries, which are in no span."""

    def __init__(self) -> None:
        self.steps: list[list[Span]] = []
        self.n_silent: list[int] = []


@contextmanager
def kernel_spans(engine: Engine) -> Iterator[KernelSpans]:
    """Finds when every kernel of the body's steps ran, in ns of the host's clock; ready at its end.

    Differences are by the device's clock. Raises UsageError where steps are launched ahead: a next
    step would write over what this one noted. And where no device computes.
    """
    backends = engine.backends
    if engine.issuer.launches_ahead:
        raise UsageError(
            "kernels note when they ran in one step at a time, and launch_ahead=on queues the "
            "next; use launch_ahead=off plan_end=event"
        )
    if all(backend.capabilities.synchronous for backend in backends):
        raise UsageError(f"the {engine.device} device has no kernels of its own; use another")
    found, before = KernelSpans(), engine.recorder
    looking: _Noting | _ByMarks
    if engine.backend.note_bytes:
        looking = watch = _Noting(engine, found)
        engine.look(None, watch)
    else:
        looking = recorder = _ByMarks()
        engine.look(recorder, PLAIN)
    try:
        yield found
        engine.issuer.end_all_but(0)
    finally:
        engine.look(before, PLAIN)
        engine.synchronize()
        looking.close(found)


class _ByMarks(Recorder):
    """By marks around every command."""

    def __init__(self) -> None:
        super().__init__(nvtx=False)

    def close(self, found: KernelSpans) -> None:
        """Fills `found`."""
        of_step: dict[int, list[Span]] = {}
        for span in self.spans:
            if span.category == "device" and span.args["kind"] == c.Launch.kind:
                of_step.setdefault(span.args["step"], []).append(span)
        for _, spans in sorted(of_step.items()):
            found.steps.append(sorted(spans, key=number_of))
            found.n_silent.append(0)


class _Twin(NamedTuple):
    """A program whose kernels note, and their notes."""

    prepared: Prepared
    notes: LaunchNotes


class _Noting(Watch):
    """By what kernels note. A step waits for the device, and is read, before the next begins."""

    def __init__(self, engine: Engine, found: KernelSpans):
        self._engine, self._found = engine, found
        clocks = [backend.clock() for backend in engine.backends]
        self._ahead_ns = [0 if clock is None else clock.ahead_ns for clock in clocks]
        self._twins = WeakKeyDictionary[Prepared, _Twin]()
        self._notes_of = WeakKeyDictionary[Prepared, LaunchNotes]()
        self._now: Prepared | None = None

    def of(self, prepared: Prepared) -> Prepared:
        twin = self._twins.get(prepared)
        if twin is None:
            self._twins[prepared] = twin = self._made(prepared)
            self._notes_of[twin.prepared] = twin.notes
        cell = prepared.binding.cell
        if cell is not None:
            twin.prepared.store_at(cell)
        return twin.prepared

    def _made(self, prepared: Prepared) -> _Twin:
        engine, program = self._engine, prepared.program
        notes = LaunchNotes(program, prepared.backends)
        twin = engine.bound.again(prepared, notes)
        notes.reset()
        return _Twin(twin, notes)

    def head(self, prepared: Prepared) -> Iterable[Issue]:
        if self._now is not None:  # that step ended with an error: what it noted is no step's
            self._synchronize()
            self._notes_of[self._now].reset()
        self._now = prepared  # not in `of`, which a coming step asks before this one ends
        return prepared.head

    def end(self, waited: bool) -> None:
        prepared, self._now = self._now, None
        assert prepared is not None, "a step that ends has begun"
        self._synchronize()
        notes, step = self._notes_of[prepared], len(self._found.steps)
        try:
            noted = notes.read()
        finally:
            notes.reset()
        self._found.steps.append([self._span(prepared, step, one) for one in noted])
        self._found.n_silent.append(notes.n_silent)

    def _synchronize(self) -> None:
        for backend in self._engine.backends:
            backend.synchronize()

    def _span(self, prepared: Prepared, step: int, noted: NotedSpan) -> Span:
        kernel = noted.kernel
        name, args = described(prepared, kernel.number, step, kernel.part)
        ahead = self._ahead_ns[kernel.command.stream.backend]
        args |= {"kind": kernel.command.kind, "kernel": kernel.function}
        times = noted.begin_ns + ahead, noted.end_ns + ahead
        return Span(name, "device", args.pop("on"), *times, args)

    def close(self, found: KernelSpans) -> None:
        """`found` is full; nothing is queued any more."""
        for notes in self._notes_of.values():
            notes.free()


def number_of(span: Span) -> tuple[int, int]:
    """Where a launch stands among its program's commands, and in its plan."""
    return span.args["index"], span.args.get("part", 0)
