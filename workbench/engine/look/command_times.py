"""When each command of a step ran on its device, without a tool of the vendor. There are two ways:

    marks    a point in the stream before each command, and a point after it: on the embedded
             device its own record, on CUDA timing events. The times in a plan come from its
             recording
    notes    each kernel notes when it ran (`backend/clock/launch_notes.py`). The program is
             prepared once more for this, and its plans keep their notes. So nothing stands between
             two commands

Steps are watched by `Trace` (`watch.py`) and by `kernel_spans`. Both read `CommandTimes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from workbench.backend.base import NO_PART, Backend, Captured
from workbench.backend.clock.launch_notes import LaunchNotes
from workbench.backend.issue.prepared import Prepared
from workbench.program import commands as c


class CommandTime(NamedTuple):
    """When a command ran, in ns of the host's clock.

    number: of the command in its program.
    part: its number in a plan; None outside of a plan, and for a plan whose parts have no times.
    kernel: the kernel of a launch that notes.
    """

    prepared: Prepared
    step: int
    number: int
    part: int | None
    begin_ns: int
    end_ns: int
    kernel: str | None = None


class CommandTimes(ABC):
    """A watch calls these methods while it watches. n_silent: how many kernels of the latest step
    are a library's, which have no times."""

    n_silent = 0

    def of(self, prepared: Prepared) -> Prepared:
        """The program to issue, so that its commands can be timed."""
        return prepared

    def begin_step(self, prepared: Prepared) -> None:  # noqa: B027, marks need nothing
        """The step's program is about to be issued."""

    def before(self, prepared: Prepared, number: int) -> Any:
        """Call it just before a command is issued, and give its result to `after`."""
        return None

    def after(self, prepared: Prepared, step: int, number: int, begun: Any) -> None:  # noqa: B027
        """Call it just after the command is issued."""

    @abstractmethod
    def read(self, step: int, waited: bool) -> Sequence[CommandTime]:
        """The commands that ran since the latest read, in the order of issue. Call it when step
        number `step` has ended. waited: the host has waited for the step's results."""

    def close(self) -> None:  # noqa: B027, marks need nothing
        """Gives memory back. Call it when nothing is queued any more."""


class _Marked(NamedTuple):
    """A command between its marks. plan: the recording that it launched; launch: which launch of
    that recording."""

    prepared: Prepared
    step: int
    number: int
    begin: Any
    end: Any
    plan: Captured | None
    launch: int


class ByMarks(CommandTimes):
    """By marks around every command."""

    def __init__(self) -> None:
        self._marked: list[_Marked] = []  # also of steps that were not waited for

    def before(self, prepared: Prepared, number: int) -> Any:
        command = prepared.program.commands[number]
        device = device_of(prepared, command)
        return None if device is None else device.mark(command.stream.id)  # type: ignore[union-attr]

    def after(self, prepared: Prepared, step: int, number: int, begun: Any) -> None:
        command = prepared.program.commands[number]
        device = device_of(prepared, command)
        if device is not None:
            plan = prepared.replayed(number)
            end = device.mark(command.stream.id)  # type: ignore[union-attr]
            launch = 0 if plan is None else plan.launches - 1
            self._marked.append(_Marked(prepared, step, number, begun, end, plan, launch))

    def read(self, step: int, waited: bool) -> Sequence[CommandTime]:
        if not waited:
            return []
        marked, self._marked = self._marked, []
        for device in {_device(m) for m in marked if m.prepared.ahead is not None}:
            device.synchronize()  # a plan tells of its end before its marks are passed
        return [time for m in marked for time in self._times(m)]

    def _times(self, m: _Marked) -> list[CommandTime]:
        """The time of the command; of a plan, the time of each part, where the device knows it."""
        found: list[tuple[int | None, tuple[int, int]]] = []
        if m.plan is not None:
            found += zip(m.plan.nodes, m.plan.spans(m.launch), strict=False)
        if not found:
            found = [(None, _device(m).resolve(m.begin, m.end))]
        return [
            CommandTime(m.prepared, m.step, m.number, part, *times)
            for part, times in found if part != NO_PART
        ]  # fmt: skip


def _device(m: _Marked) -> Backend:
    device = device_of(m.prepared, m.prepared.program.commands[m.number])
    assert device is not None, "what is marked runs on a device"
    return device


class ByNotes(CommandTimes):
    """By notes of kernels. Before the next step begins, the devices are waited for, and the notes
    read."""

    def __init__(
        self, backends: Sequence[Backend], again: Callable[[Prepared, LaunchNotes], Prepared]
    ):
        """again: prepares a program once more, with launches that note."""
        self._backends, self._again = backends, again
        clocks = [backend.clock() for backend in backends]
        self._ahead_ns = [0 if clock is None else clock.ahead_ns for clock in clocks]
        self._noting = WeakKeyDictionary[Prepared, Prepared]()
        self._now: Prepared | None = None

    def of(self, prepared: Prepared) -> Prepared:
        made = self._noting.get(prepared)
        if made is None:
            notes = LaunchNotes(prepared.program, prepared.backends)
            made = self._noting[prepared] = self._again(prepared, notes)
            notes.reset()
        if prepared.binding.cell is not None:
            made.store_at(prepared.binding.cell)
        return made

    def begin_step(self, prepared: Prepared) -> None:
        if self._now is not None:  # that step ended with an error, so its notes are dropped
            self._synchronize()
            _notes_of(self._now).reset()
        self._now = prepared  # not in `of`, which is called for a coming step while this one runs

    def read(self, step: int, waited: bool) -> Sequence[CommandTime]:
        prepared, self._now = self._now, None
        assert prepared is not None, "a step that ends has begun"
        self._synchronize()
        notes = _notes_of(prepared)
        try:
            noted = notes.read()
        finally:
            notes.reset()
        self.n_silent = notes.n_silent
        found = []
        for kernel, begin, end in noted:
            ahead = self._ahead_ns[kernel.command.stream.backend]
            found.append(
                CommandTime(prepared, step, kernel.number, kernel.part, begin + ahead, end + ahead,
                            kernel.function)
            )  # fmt: skip
        return found

    def _synchronize(self) -> None:
        for backend in self._backends:
            backend.synchronize()

    def close(self) -> None:
        for prepared in self._noting.values():
            _notes_of(prepared).free()


def _notes_of(prepared: Prepared) -> LaunchNotes:
    assert isinstance(prepared.launches, LaunchNotes), "the program was prepared with notes"
    return prepared.launches


def device_of(prepared: Prepared, command: c.Command) -> Backend | None:
    """The device that runs a copy or a launch after the host has issued it; None for other
    commands."""
    if not isinstance(command, c.Copy | c.Launch | c.Replay):
        return None
    backend = prepared.backends[command.stream.backend]
    return None if backend.capabilities.synchronous else backend
