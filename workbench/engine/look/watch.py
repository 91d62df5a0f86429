"""Who watches while a step is issued: nobody, the stamps of `Engine.stamped`, or a recorder.

A watch is chosen once, outside of the step (`chosen` in `ranged.py`). It hands out the calls of a
program one after the other (`backend/issue/prepared.py`), so one loop of calls serves every watch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

from workbench.backend.base import Issue
from workbench.backend.issue.prepared import Prepared
from workbench.engine.batch import Batch, Work, n_tokens
from workbench.engine.look.command_times import ByMarks, CommandTime
from workbench.program import commands as c
from workbench.trace.spans import LOGITS_WAIT, Recorder, Span, now_ns


class Watch:
    """Watches nothing and costs nothing. A child says what it does at each point of a step."""

    counts = True  # the engine's counters include the step's phases
    looks_at_batches = False  # whether `batch` is called
    alone = False  # whether no other step may be made or launched while one is under way

    def of(self, prepared: Prepared) -> Prepared:
        """What is issued for a program: itself, or the same program with something to watch."""
        return prepared

    def begin(self, step: int, work: Work, n_past: int) -> None:
        """A step begins. Its batch is not made yet."""

    def batch(self, batch: Batch, program: c.Program) -> None:
        """The step is about to be issued. Called only where `looks_at_batches`. The inputs must not
        be kept, because the next step overwrites them."""

    def arm(self, prepared: Prepared) -> None:
        """Launches the plan of a coming step, which can be launched ahead."""
        assert prepared.ahead is not None, "the plan can be launched ahead"
        prepared.ahead.arm()

    def head(self, prepared: Prepared) -> Iterable[Issue]:
        """The calls of a program before the wait for its results, first to last. The watch acts
        between them."""
        return prepared.head

    def late(self, prepared: Prepared) -> Iterable[Issue]:
        """As `head`, without the writes that `Prepared.write_ahead` has done."""
        return prepared.late

    def tail(self, prepared: Prepared) -> Iterable[Issue]:
        """The wait for the results, and their reads."""
        return prepared.tail

    def end(self, waited: bool) -> None:
        """The step has ended. waited: the host has waited for its results."""

    def fail(self) -> None:
        """The step that is being made or issued ends with an error."""

    def lost(self) -> None:
        """The newest of the steps under way has no results."""
        self.fail()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None:
        if kind is not None:
            self.fail()


PLAIN = Watch()


class Trace(Watch):
    """Gives a recorder the spans of the step, of its splits and commands on the host, and of its
    commands on devices."""

    counts = False

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._step = 0
        self._span: AbstractContextManager[None] = nullcontext()
        self._times = ByMarks()

    def begin(self, step: int, work: Work, n_past: int) -> None:
        self._step = step
        self._span = self._recorder.span(
            f"step {step}", "step", step=step, n_tokens=n_tokens(work), n_past=n_past
        )
        self._span.__enter__()

    def end(self, waited: bool) -> None:
        self.fail()
        begun = now_ns()  # reading is no part of a step
        for time in self._times.read(self._step, waited):
            span = span_of(time)
            self._recorder.add(
                span.name, span.category, span.lane, span.start_ns, span.end_ns, **span.args
            )
        self._recorder.read(now_ns() - begun)

    def fail(self) -> None:
        self._span.__exit__(None, None, None)

    def head(self, prepared: Prepared) -> Iterator[Issue]:
        self._recorder.runs(prepared.program, self._step)
        return self._spans(prepared, prepared.head, count())

    def tail(self, prepared: Prepared) -> Iterator[Issue]:
        return self._spans(prepared, prepared.tail, count(len(prepared.head)))

    def _spans(
        self, prepared: Prepared, calls: Iterable[Issue], numbers: Iterable[int]
    ) -> Iterator[Issue]:
        """Hands out each call between the begin and the end of its span. numbers: the numbers of
        the calls' commands."""
        recorder, step, commands = self._recorder, self._step, prepared.program.commands
        split, split_handle, split_start = c.RESULT, None, 0
        for call, number in zip(calls, numbers, strict=False):
            command = commands[number]
            if command.split != split:
                self._end_split(prepared, split, split_handle, split_start)
                split, split_start = command.split, now_ns()
                split_handle = (
                    None if split == c.RESULT else recorder.begin(split_name(prepared, split))
                )
            name, args = described(prepared, number, step)
            marks = recorder.marks
            begun = self._times.before(prepared, number) if marks else None
            handle = recorder.begin(name)
            start = now_ns()
            yield call
            recorder.end(handle, name, command.kind, start, args)
            if isinstance(command, c.Replay):
                plan = prepared.replayed(number)
                recorder.replayed(step, number, None if plan is None else plan.nodes)
            if marks:
                self._times.after(prepared, step, number, begun)
        self._end_split(prepared, split, split_handle, split_start)

    def _end_split(self, prepared: Prepared, split: int, handle: Any, start: int) -> None:
        if split != c.RESULT:
            program = prepared.program
            backend = program.backends[program.splits[split]]
            args = {"step": self._step, "split": split, "backend": backend}
            self._recorder.end(handle, split_name(prepared, split), "split", start, args)


class Untraced(Watch):
    """Watches a step outside of a recorder's window: tells the recorder how long the step took."""

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

    def lost(self) -> None:
        self._inner.lost()

    def end(self, waited: bool) -> None:
        self._inner.end(waited)
        self._recorder.untraced(self._n_tokens, now_ns() - self._start)


# commands in words ------------------------------------------------------------------------------


def described(
    prepared: Prepared, number: int, step: int, part: int | None = None
) -> tuple[str, dict[str, Any]]:
    """The name of a command's span, and its arguments. part: the command's number in its plan."""
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
            # the copy is the command right before its wait
            return f"wait {name}", args | {"event": command.event, "blocks": number - 1}
        case c.Sync():
            name = "wait stream" if command.event is None else f"wait {command.event}"
            ends = number >= len(prepared.head)
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


def split_name(prepared: Prepared, split: int) -> str:
    program = prepared.program
    return f"split {split} ({program.backends[program.splits[split]]})"


def _lane(prepared: Prepared, stream: c.Stream) -> str:
    return f"{prepared.backends[stream.backend].name} stream {stream.id}"


def span_of(time: CommandTime) -> Span:
    """The span of a command on its device."""
    name, args = described(time.prepared, time.number, time.step, time.part)
    args["kind"] = _command_at(time.prepared, time.number, time.part).kind
    if time.kernel is not None:
        args["kernel"] = time.kernel
    return Span(name, "device", args.pop("on"), time.begin_ns, time.end_ns, args)
