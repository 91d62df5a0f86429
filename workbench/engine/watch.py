"""Who looks on while a step is issued: nobody, the stamps of `Engine.stamped`, a recorder.

A watch is chosen once, outside of the step (`chosen`). It hands out the calls of a program one
after the other (`backend/issue.py`), so the loop that calls them is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from workbench.backend.base import Backend, Captured, Issue
from workbench.backend.issue import Prepared, Unwatched
from workbench.backend.stamps import StampedWork, StampRing
from workbench.engine.batch import Work, n_tokens
from workbench.program import commands as c
from workbench.trace.spans import LOGITS_WAIT, Recorder, now_ns

Stamp = tuple[int, int]


class Watch(Unwatched):
    """Looks at nothing and costs nothing. Others say what they do at each point of a step."""

    counts = True  # the engine's counters include the step's phases

    def of(self, prepared: Prepared) -> Prepared:
        """What is issued for a program: itself, or the same with something to watch it by."""
        return prepared

    def begin(self, step: int, work: Work, n_past: int) -> None:
        """A step begins; before its batch is made."""

    def end(self, waited: bool) -> None:
        """The step has ended. waited: with a wait of the host for its results."""

    def fail(self) -> None:
        """The step ends with an error."""

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None:
        if kind is not None:
            self.fail()


PLAIN = Watch()


class _Work(NamedTuple):
    """The call that has a device's launch, and where its marks are made. plan: what it calls, where
    that has stamps of its own."""

    number: int
    device: Backend
    stream: int
    plan: StampedWork | None

    def mark(self) -> Any:
        return self.device.mark(self.stream)

    @property
    def told_by(self) -> _Told:
        """Of its latest call."""
        if self.plan is None:
            return _Told(self.device)
        return _Told(self.device, self.plan.ring, self.plan.number)


class _Told(NamedTuple):
    """What tells when a work began or ended: a pair of a ring, or without one marks of the device.
    It does not keep the work: plans of works that are gone are taken over."""

    device: Backend
    ring: StampRing | None = None
    pair: int = 0


class _Ran(NamedTuple):
    """What a device was asked in one call. plan: what it replayed, in launch number `launch`."""

    prepared: Prepared
    step: int
    number: int
    begin: Any
    end: Any
    plan: Captured | None
    launch: int


class _StampedStep(NamedTuple):
    """marks: in front of a step's first work and behind it, and behind its last, unless these are
    plans. told: of the first work and the last; empty until the step has ended."""

    marks: list[Any]
    told: list[_Told]


class Stamps(Watch):
    """Of each step: when its first kernel began, and when its last one ended.

    Plans have stamps of their own, by the device's clock (`backend/stamps.py`). Where a step begins
    or ends with a launch outside of any plan, there are marks: in front of the launch, behind it,
    and behind the last. On CUDA such a mark is passed when the stream comes to it, before the
    launch is issued, and costs the host a microsecond or two. Only programs that launch on a device
    can be stamped. with_stamps: gives a program plans with stamps (`Plans.stamped`).
    """

    def __init__(self, with_stamps: Callable[[Prepared], Prepared]) -> None:
        self.found: list[Stamp] = []
        self._with_stamps = with_stamps
        self._steps: list[_StampedStep] = []
        self._works: tuple[_Work, ...] = ()  # first and last of the step under way
        self._calls: WeakKeyDictionary[Prepared, tuple[_Work, _Work, list[Issue]]]
        self._calls = WeakKeyDictionary()

    def of(self, prepared: Prepared) -> Prepared:
        return self._with_stamps(prepared)

    def head(self, prepared: Prepared) -> Iterable[Issue]:
        # Made once: a search in every step would be part of what is measured there.
        if prepared not in self._calls:
            self._calls[prepared] = self._marked(prepared)
        first, last, calls = self._calls[prepared]
        self._works = first, last
        self._steps.append(_StampedStep([], []))
        return calls

    def _marked(self, prepared: Prepared) -> tuple[_Work, _Work, list[Issue]]:
        work = list(_device_work(prepared))
        first, last = work[0], work[-1]
        calls = list(prepared.head)
        # No cycle through self: a mark's event goes back to its pool when the mark is let go, and
        # the collector would destroy the event with it.
        steps = self._steps
        if last.plan is None:
            calls.insert(last.number + 1, lambda: steps[-1].marks.append(last.mark()))
        if first.plan is None:
            calls.insert(first.number + 1, lambda: steps[-1].marks.append(first.mark()))
            calls.insert(first.number, lambda: steps[-1].marks.append(first.mark()))
        return first, last, calls

    def end(self, waited: bool) -> None:
        self._steps[-1].told.extend([work.told_by for work in self._works])
        self._works = ()

    def fail(self) -> None:
        if self._works:
            self._steps.pop()
            self._works = ()

    def find(self) -> None:
        """Makes `found`: the stamps of all steps that have ended, in ns. Differences are by the
        device's clock, which is set to the host's. Call it once, when nothing is under way."""
        ended = [step for step in self._steps if step.told]
        rings = {told.ring for step in ended for told in step.told if told.ring is not None}
        ahead = {ring: _ahead_ns(ring) for ring in rings}
        for marks, (first, last) in ended:
            if first.ring is None:
                begin = first.device.resolve(*marks[:2])[0]
            else:
                begin = first.ring.pair(first.pair)[0] + ahead[first.ring]
            if last.ring is None:
                end = last.device.resolve(marks[-1], marks[-1])[1]
            else:
                end = last.ring.pair(last.pair)[1] + ahead[last.ring]
            self.found.append((begin, end))
        for ring in rings:
            ring.forget()


class Trace(Watch):
    """Spans of a recorder: of the step, its splits and commands on the host, and of the commands on
    devices."""

    counts = False

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._step = 0
        self._span: AbstractContextManager[None] = nullcontext()
        self._marks: list[_Ran] = []  # of steps not waited for, too

    def begin(self, step: int, work: Work, n_past: int) -> None:
        self._step = step
        self._span = self._recorder.span(
            f"step {step}", "step", step=step, n_tokens=n_tokens(work), n_past=n_past
        )
        self._span.__enter__()

    def end(self, waited: bool) -> None:
        self.fail()
        if waited:
            # only now: reading the devices' clocks takes time that is not the step's
            marks, self._marks = self._marks, []
            for ran in marks:
                self._device_spans(ran)

    def fail(self) -> None:
        self._span.__exit__(None, None, None)

    def head(self, prepared: Prepared) -> Iterator[Issue]:
        self._recorder.runs(prepared.program, self._step)
        return self._spans(prepared, prepared.head, prepared.firsts)

    def tail(self, prepared: Prepared) -> Iterator[Issue]:
        return self._spans(prepared, prepared.tail, prepared.firsts[len(prepared.head) :])

    def _spans(
        self, prepared: Prepared, calls: Iterable[Issue], firsts: Iterable[int]
    ) -> Iterator[Issue]:
        """Hands out each call between the begin and the end of its span. firsts: the number of
        the command that each call begins with."""
        recorder, step, commands = self._recorder, self._step, prepared.program.commands
        split, split_handle, split_start = c.RESULT, None, 0
        for call, number in zip(calls, firsts, strict=False):
            command = commands[number]
            if command.split != split:
                self._end_split(prepared, split, split_handle, split_start)
                split, split_start = command.split, now_ns()
                split_handle = (
                    None if split == c.RESULT else recorder.begin(_split_name(prepared, split))
                )
            name, args = described(prepared, number, step)
            device = _device_of(prepared, command) if recorder.marks else None
            stream = command.stream
            begin = device.mark(stream.id) if device and stream else None
            handle = recorder.begin(name)
            start = now_ns()
            yield call
            recorder.end(handle, name, command.kind, start, args)
            plan = None
            if isinstance(command, c.Replay):
                plan = prepared.replayed(number)
                recorder.replayed(step, number, None if plan is None else plan.nodes)
            if device and stream:
                end, launch = device.mark(stream.id), 0 if plan is None else plan.launches - 1
                self._marks.append(_Ran(prepared, step, number, begin, end, plan, launch))
        self._end_split(prepared, split, split_handle, split_start)

    def _end_split(self, prepared: Prepared, split: int, handle: Any, start: int) -> None:
        if split != c.RESULT:
            program = prepared.program
            backend = program.backends[program.splits[split]]
            args = {"step": self._step, "split": split, "backend": backend}
            self._recorder.end(handle, _split_name(prepared, split), "split", start, args)

    def _device_spans(self, ran: _Ran) -> None:
        """A span of the command; of a plan one for each of its parts, where the device knows."""
        prepared, number = ran.prepared, ran.number
        command = prepared.program.commands[number]
        found: list[tuple[int | None, tuple[int, int]]] = []
        if ran.plan is not None:
            found += zip(ran.plan.nodes, ran.plan.spans(ran.launch), strict=False)
        if not found:
            device = _device_of(prepared, command)
            assert device is not None
            found = [(None, device.resolve(ran.begin, ran.end))]
        for part, times in found:
            name, args = described(prepared, number, ran.step, part)
            kind = _command_at(prepared, number, part).kind
            self._recorder.add(name, "device", args.pop("on"), *times, kind=kind, **args)


class Untraced(Watch):
    """A step outside a recorder's window: the recorder is told how long it took."""

    def __init__(self, recorder: Recorder, inner: Watch):
        self._recorder, self._inner = recorder, inner
        self._n_tokens = self._start = 0

    def begin(self, step: int, work: Work, n_past: int) -> None:
        self._n_tokens, self._start = n_tokens(work), now_ns()

    def head(self, prepared: Prepared) -> Iterable[Issue]:
        return self._inner.head(prepared)

    def tail(self, prepared: Prepared) -> Iterable[Issue]:
        return self._inner.tail(prepared)

    def of(self, prepared: Prepared) -> Prepared:
        return self._inner.of(prepared)

    def fail(self) -> None:
        self._inner.fail()

    def end(self, waited: bool) -> None:
        self._inner.end(waited)
        self._recorder.untraced(self._n_tokens, now_ns() - self._start)


def chosen(recorder: Recorder | None, stamps: Stamps | None) -> Callable[[int], Watch]:
    """The watch of step number n, for an engine with this recorder and these stamps."""
    plain: Watch = PLAIN if stamps is None else stamps
    if recorder is None:
        return lambda step: plain
    trace, untraced = Trace(recorder), Untraced(recorder, plain)
    return lambda step: trace if recorder.wants(step) else untraced


# commands in words ------------------------------------------------------------------------------


def described(
    prepared: Prepared, number: int, step: int, part: int | None = None
) -> tuple[str, dict[str, Any]]:
    """The name of a command's span, and its arguments. part: of a plan, its number there."""
    command = _command_at(prepared, number, part)
    stream = command.stream
    args: dict[str, Any] = {
        "index": number,
        **({} if part is None else {"part": part}),
        "step": step,
        "split": command.split,
        "stream": None if stream is None else stream.id,
        "on": None if stream is None else _lane(prepared, stream),
    }
    match command:
        case c.Launch():
            return command.node.name, args | {"op": command.node.op}
        case c.Copy():
            return command.name, args | {"bytes": command.src.nbytes}
        case c.Write() | c.Read():
            return command.value, args | {"bytes": command.staging.nbytes}
        case c.Sync(blocks=c.Copy(name=name)):
            # the copy, right in front of its wait
            return f"wait {name}", args | {"event": command.event, "blocks": number - 1}
        case c.Sync():
            name = "wait stream" if command.event is None else f"wait {command.event}"
            ends = number >= prepared.firsts[len(prepared.head)]
            return (LOGITS_WAIT if ends else name), args | {"event": command.event}
        case c.Replay():
            before = prepared.program.commands[:number]
            args["plan"] = sum(isinstance(other, c.Replay) for other in before)
            copied = sum(p.src.nbytes for p in command.parts if isinstance(p, c.Copy))
            about = {"parts": len(command.parts), "bytes": copied or None}
            return f"plan of {len(command.parts)}", args | about
    assert isinstance(command, c.Record | c.Wait)
    return command.kind, args | {"event": command.event}


def _command_at(prepared: Prepared, number: int, part: int | None) -> c.Command:
    command = prepared.program.commands[number]
    if part is None or not isinstance(command, c.Replay):
        return command
    return command.parts[part]


def _split_name(prepared: Prepared, split: int) -> str:
    program = prepared.program
    return f"split {split} ({program.backends[program.splits[split]]})"


def _lane(prepared: Prepared, stream: c.Stream) -> str:
    return f"{prepared.backends[stream.backend].name} stream {stream.id}"


def _device_of(prepared: Prepared, command: c.Command) -> Backend | None:
    """The device that runs a copy or a launch later than the host issues it; None for others."""
    if not isinstance(command, c.Copy | c.Launch | c.Replay):
        return None
    backend = prepared.backends[command.stream.backend]
    return None if backend.capabilities.synchronous else backend


def _ahead_ns(ring: StampRing) -> int:
    clock = ring.backend.clock()
    assert clock is not None, "who writes stamps has a clock"
    return clock.ahead_ns


def _device_work(prepared: Prepared) -> Iterator[_Work]:
    firsts = prepared.firsts
    for number in range(len(prepared.head)):
        for command in prepared.program.commands[firsts[number] : firsts[number + 1]]:
            if isinstance(command, c.Launch | c.Replay) and (
                device := _device_of(prepared, command)
            ):
                plan = prepared.issued.get(firsts[number])
                yield _Work(
                    number, device, command.stream.id,
                    plan if isinstance(plan, StampedWork) else None,
                )  # fmt: skip
                break
