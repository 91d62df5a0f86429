"""Runs a program command by command (eager issue).

`prepare` binds a program to backends and memory once: every command becomes a callable. `run`
calls them in order. What a step produces asynchronously is returned with what guards it: a
`Pending`, whose `wait` performs the program's last waits and reads. A result that lands in a
`Landing` is handed out where it landed; any other is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from workbench.backend.base import Backend, Issue, Memory
from workbench.backend.landing import Landing
from workbench.program.commands import (
    HOST,
    RESULT,
    Buffer,
    Command,
    Copy,
    Launch,
    Program,
    Range,
    Read,
    Record,
    Space,
    Stream,
    Sync,
    Wait,
    Write,
)
from workbench.trace.spans import LOGITS_WAIT, Recorder, now_ns


def _nothing() -> None:
    """Of a backend that needs not be attached."""


class Pending:
    """Results on their way. They may be read after `wait`, which is when the step ends."""

    def __init__(self, finish: Callable[[], dict[str, np.ndarray]]):
        self._finish = finish

    def wait(self) -> dict[str, np.ndarray]:
        """Result arrays by name, uint8; the caller owns them."""
        return self._finish()


class _Work(NamedTuple):
    """A launch on a device: its place among the commands, and where its marks are made."""

    place: int
    device: Any
    stream: int

    def mark(self) -> Any:
        return self.device.mark(self.stream)


class Prepared:
    """A program bound to addresses. Lives as long as the memory it was bound to."""

    def __init__(
        self,
        program: Program,
        backends: Sequence[Backend],
        memory: Mapping[Buffer, Memory],
        events: dict[str, Any] | None = None,
    ):
        """events: those of other programs of the same engine by name, for a step may wait for
        what one before it recorded; new ones are added."""
        self.program = program
        self._backends = backends
        # another engine's device may be the thread's; where there are several, commands say which
        self._attach_device: Issue = getattr(backends[-1], "attach", _nothing)
        self._attach_device()
        self._memory = memory
        self._events: dict[str, Any] = {} if events is None else events
        self._recorded_by: dict[str, Backend] = {}
        for command in program.commands:
            if isinstance(command, Record):
                backend = backends[command.stream.backend]
                self._recorded_by[command.event] = backend
                if command.event not in self._events:
                    getattr(backend, "attach", _nothing)()
                    self._events[command.event] = backend.event()
        self._values: dict[str, np.ndarray] = {}
        self._results: dict[str, np.ndarray] = {}
        issue = [self._prepare(command) for command in program.commands]
        end = len(issue)
        while (
            end
            and isinstance(program.commands[end - 1], Read | Sync)
            and (program.commands[end - 1].split == RESULT)
        ):
            end -= 1
        self._calls = issue
        self._head, self._tail = issue[:end], issue[end:]
        self._end = end

    def run(self, values: Mapping[str, np.ndarray]) -> Pending:
        """Issues everything up to the last wait. values: each input's array, of one dtype and
        shape for all runs."""
        self._values.update(values)
        self._attach_device()
        for call in self._head:
            call()
        return Pending(self._finish)

    def _finish(self) -> dict[str, np.ndarray]:
        for call in self._tail:
            call()
        results = dict(self._results)
        self._results.clear()
        return results

    def run_stamped(
        self, values: Mapping[str, np.ndarray]
    ) -> tuple[Pending, Callable[[], tuple[int, int]]]:
        """As `run`, with marks in front of the first launch on a device, behind it, and behind the
        last. The second result, called once the step is over, is when the stream came to the first
        (on CUDA before that is issued) and when the last ended: ns on the host's clock. A mark
        costs the host a microsecond or two on CUDA, nothing on the embedded device. Only programs
        that launch on a device can be stamped."""
        first, last = self._ends
        self._values.update(values)
        self._attach_device()
        for call in self._head[: first.place]:
            call()
        begin = first.mark()
        self._head[first.place]()
        begun = first.mark()
        for call in self._head[first.place + 1 : last.place + 1]:
            call()
        end = last.mark()
        for call in self._head[last.place + 1 :]:
            call()

        def when() -> tuple[int, int]:
            return first.device.resolve(begin, begun)[0], last.device.resolve(end, end)[1]

        return Pending(self._finish), when

    @cached_property
    def _ends(self) -> tuple[_Work, _Work]:
        """The first and the last launch on a device. Found once: a search in every step would be
        part of what is measured there."""
        work = [
            _Work(i, device, command.stream.id)
            for i, command in enumerate(self.program.commands)
            if isinstance(command, Launch) and (device := self._device_of(command)) is not None
        ]
        return work[0], work[-1]

    def run_traced(
        self, values: Mapping[str, np.ndarray], recorder: Recorder, step: int
    ) -> tuple[Pending, Callable[[], None]]:
        """As `run`, with a host span for each command and a device span for asynchronous ones.

        The second result adds the device spans; call it once the step is over, for reading the
        device's clocks takes time that is not the step's.
        """
        self._values.update(values)
        self._attach_device()
        recorder.runs(self.program, step)
        marks: list[tuple[int, Any, Any]] = []
        self._traced(range(self._end), recorder, step, marks)

        def finish() -> dict[str, np.ndarray]:
            self._traced(range(self._end, len(self._calls)), recorder, step, marks)
            results = dict(self._results)
            self._results.clear()
            return results

        return Pending(finish), lambda: self._device_spans(marks, recorder, step)

    def _traced(self, indices: range, recorder: Recorder, step: int, marks: list) -> None:
        split, handle, split_start = RESULT, None, 0
        for i in indices:
            command = self.program.commands[i]
            if command.split != split:
                self._end_split(recorder, step, split, handle, split_start)
                split, split_start = command.split, now_ns()
                handle = None if split == RESULT else recorder.begin(self._split_name(split))
            name, args = self._describe(command, i, step)
            backend = self._device_of(command) if recorder.marks else None
            begin = backend.mark(command.stream.id) if backend else None  # type: ignore[union-attr]
            command_handle = recorder.begin(name)
            start = now_ns()
            self._calls[i]()
            recorder.end(command_handle, name, command.kind, start, args)
            if backend:
                marks.append((i, begin, backend.mark(command.stream.id)))  # type: ignore[union-attr]
        self._end_split(recorder, step, split, handle, split_start)

    def _split_name(self, split: int) -> str:
        return f"split {split} ({self.program.backends[self.program.splits[split]]})"

    def _end_split(
        self, recorder: Recorder, step: int, split: int, handle: Any, start: int
    ) -> None:
        if split != RESULT:
            backend = self.program.backends[self.program.splits[split]]
            args = {"step": step, "split": split, "backend": backend}
            recorder.end(handle, self._split_name(split), "split", start, args)

    def _device_of(self, command: Command) -> Backend | None:
        """The backend that runs `command` later than the host issues it, if any."""
        if not isinstance(command, Copy | Launch):
            return None
        backend = self._backends[command.stream.backend]
        return None if backend.capabilities.synchronous else backend

    def _lane(self, stream: Stream) -> str:
        return f"{self._backends[stream.backend].name} stream {stream.id}"

    def _describe(self, command: Command, index: int, step: int) -> tuple[str, dict[str, Any]]:
        args: dict[str, Any] = {"index": index, "step": step, "split": command.split}
        stream = getattr(command, "stream", None)
        args["stream"] = None if stream is None else stream.id
        args["on"] = None if stream is None else self._lane(stream)
        if isinstance(command, Record | Wait | Sync):
            args["event"] = command.event
        match command:
            case Launch():
                args["op"] = command.node.op
                return command.node.name, args
            case Copy():
                args["bytes"] = command.src.nbytes
                return command.name, args
            case Write() | Read():
                args["bytes"] = command.staging.nbytes
                return command.value, args
            case Sync():
                blocks = command.blocks
                if blocks is not None:
                    args["blocks"] = index - 1  # the copy, right in front of its wait
                    return f"wait {blocks.name}", args
                if index >= self._end:
                    return LOGITS_WAIT, args
                return ("wait stream" if command.event is None else f"wait {command.event}"), args
        return command.kind, args

    def _device_spans(self, marks: list, recorder: Recorder, step: int) -> None:
        for i, begin, end in marks:
            command = self.program.commands[i]
            backend = self._device_of(command)
            assert backend is not None
            name, args = self._describe(command, i, step)
            start_ns, end_ns = backend.resolve(begin, end)
            lane = args.pop("on")
            recorder.add(name, "device", lane, start_ns, end_ns, kind=command.kind, **args)

    # preparing -------------------------------------------------------------------------------

    def _address(self, r: Range) -> int:
        return self._memory[r.buffer].address + r.offset

    def _host_view(self, r: Range) -> np.ndarray:
        array = self._memory[r.buffer].array
        assert array is not None, f"{r} is not host memory"
        return array[r.offset : r.offset + r.nbytes]

    def _prepare(self, command: Command) -> Issue:
        """Where there are several devices, what is issued on one of them is so with it attached."""
        attach = None if len(self._backends) < 3 else self._attach(command)
        if attach is None:
            return _PREPARE[type(command)](self, command)
        attach()
        call = _PREPARE[type(command)](self, command)

        def attached() -> None:
            attach()
            call()

        return attached

    def _attach(self, command: Command) -> Issue | None:
        """What makes the device of a command the calling thread's; None where none is needed."""
        stream = getattr(command, "stream", None)
        if stream is not None:
            return getattr(self._backends[stream.backend], "attach", None)
        if isinstance(command, Sync) and command.event is not None:
            return getattr(self._recorded_by[command.event], "attach", None)
        return None

    def _write(self, c: Write) -> Issue:
        there, values, name = self._host_view(c.staging), self._values, c.value
        view: np.ndarray | None = None

        def write() -> None:
            nonlocal view
            value = values[name]
            if view is None:
                view = there.view(value.dtype).reshape(value.shape)
            view[...] = value

        return write

    def _read(self, c: Read) -> Issue:
        results, name, nbytes = self._results, c.value, c.staging.nbytes
        landing = self._memory[c.staging.buffer]
        if isinstance(landing, Landing):
            take = landing.take

            def hand_out() -> None:
                results[name] = take(nbytes)

            return hand_out
        there = self._host_view(c.staging)

        def read() -> None:
            results[name] = there.copy()

        return read

    def _copy(self, c: Copy) -> Issue:
        backend, stream, nbytes = self._backends[c.stream.backend], c.stream.id, c.src.nbytes
        to_host = c.dst.buffer.space != Space.DEVICE
        source, landing = self._address(c.src), self._memory[c.dst.buffer]
        if c.src.buffer.space == Space.DEVICE and not to_host:
            peer = self._backends[c.dst.buffer.backend]
            return backend.copy_to_peer(peer, self._address(c.dst), source, nbytes, stream)
        if not isinstance(landing, Landing):
            return backend.copy(self._address(c.dst), source, nbytes, stream, to_host)
        copies = [
            backend.copy(block.address, source, nbytes, stream, to_host) for block in landing.blocks
        ]

        def copy() -> None:
            copies[landing.now]()

        return copy

    def _launch(self, c: Launch) -> Issue:
        place = self.program.placement[c.stream.backend]

        def address_of(tensor) -> int:
            return self._address(place[tensor.storage])

        scratch = 0 if c.scratch is None else self._address(c.scratch)
        backend, stream = self._backends[c.stream.backend], c.stream.id
        return backend.launch(c.node, address_of, scratch, stream, c.programmatic)

    def _record(self, c: Record) -> Issue:
        return self._backends[c.stream.backend].record(self._events[c.event], c.stream.id)

    def _wait(self, c: Wait) -> Issue:
        return self._backends[c.stream.backend].wait(self._events[c.event], c.stream.id)

    def _sync(self, c: Sync) -> Issue:
        if c.event is not None:
            return self._recorded_by[c.event].sync_event(self._events[c.event])
        assert c.stream is not None and c.stream.backend != HOST
        return self._backends[c.stream.backend].sync_stream(c.stream.id)


_PREPARE: dict[type[Command], Callable[[Prepared, Any], Issue]] = {
    Write: Prepared._write,
    Copy: Prepared._copy,
    Launch: Prepared._launch,
    Record: Prepared._record,
    Wait: Prepared._wait,
    Sync: Prepared._sync,
    Read: Prepared._read,
}
