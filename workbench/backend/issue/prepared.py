"""A program bound to addresses: one call for each of its commands, first to last.

Binding turns a command into a call of the host (a write, a read, a wait of the host), or into an
`Issued`, a command of a device. What issues an `Issued` is chosen here, once, when the program is
bound:

    eager      the command's own call; the parts of a plan are called one by one
    Planned    the replay of a plan, where a plan fits (`plan/life.py`)
    Gated      the same, for a plan that can be launched before its step is submitted

Plans are commands of the program (`program/plans.py`), so every reader of a program sees them. A
bound program never changes. Stamps, notes or a gate are asked for when it is bound.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from workbench.backend.base import Backend, Captured, Issue, Memory
from workbench.backend.issue.bind import Binding, Launching
from workbench.backend.issue.issued import Issued, Plannable, in_order
from workbench.backend.plan.ahead import number_ahead
from workbench.backend.plan.gate import Gate
from workbench.backend.plan.life import Gated, Planned, Plans
from workbench.program.commands import Buffer, Program, Read, Sync, Write
from workbench.program.first_cell import at_cell


class Prepared:
    """A program bound to addresses. It lives as long as the memory that it was bound to.

    calls: one for each command, in the same order.
    head: the calls before the wait for the results.
    tail: that wait, and the reads.
    issued: the commands of devices, by number of the command.
    ahead: the call of a plan that can be launched ahead, if there is one (`plan/ahead.py`).
    number_ahead: the number of that plan's command.
    late: the calls of the head that are left after `write_ahead`.
    late_numbers: the numbers of their commands.
    launches: as `Binding` has them.
    """

    def __init__(
        self,
        program: Program,
        backends: Sequence[Backend],
        memory: Mapping[Buffer, Memory],
        events: dict[str, Any] | None = None,
        plans: Plans | None = None,
        gate: Gate | None = None,
        launches: Launching | None = None,
        late: Collection[str] = (),
    ):
        """Binds the program.

        events: as `Binding` has them.
        plans: the engine's; None: every command is issued by a call of its own.
        gate: the engine's, where it launches plans ahead.
        late: the names of inputs that `write_ahead` does not write.
        """
        self._program = program
        self.backends = backends
        # another engine's device may be the thread's current one; with several devices, each
        # command attaches its own
        self._attach = backends[-1].attach
        self._attach()
        known = {} if events is None else events
        self.launches = launches or Launching()
        self.binding = Binding(program, backends, memory, known, self.launches, gate)
        self.issued: dict[int, Issued] = {}
        self._calls: dict[int, Planned | Gated] = {}  # of plans, by number of the command
        calls = self._bound(None if plans is None else plans.call_of(program, gate))
        n = program.first_of_tail
        at = None if gate is None else number_ahead(program)
        self.ahead = None if at is None else self._gated(at)
        self.number_ahead = None if self.ahead is None else at
        if self.ahead is not None:
            calls[n] = _again_where_missed(self.ahead, calls[n], calls[at:n])
        elif gate is not None:  # so that no command waits in a queue for a gate
            calls[0] = in_order([gate.cancel, calls[0]])
        self.calls = tuple(calls)
        self.head, self.tail = self.calls[:n], self.calls[n:]
        self._writes: tuple[Issue, ...] = ()
        self.late: tuple[Issue, ...] = ()
        self.late_numbers: tuple[int, ...] = ()
        if self.number_ahead is not None:
            self._part(self.number_ahead, late)
        self._n_reads = sum(isinstance(command, Read) for command in program.commands)

    def _bound(self, call_of: Callable[[Plannable], Planned | Gated] | None) -> list[Issue]:
        """The call of each command. call_of: makes the calls of plans."""
        made: list[Issue] = []
        for number, command in enumerate(self._program.commands):
            if self.binding.device_of(command) is None:
                made.append(self.binding.call(command))
                continue
            issued = self.issued[number] = self.binding.issued(command)
            if call_of is not None and isinstance(issued, Plannable):
                call = self._calls[number] = call_of(issued)
                made.append(call.call)
            else:
                made.append(issued.call)
        return made

    def _gated(self, number: int) -> Gated | None:
        """The call of command `number`, if it is a plan that begins with a gate."""
        call = self._calls.get(number)
        return call if isinstance(call, Gated) and call.has_gate else None

    def _part(self, at: int, late: Collection[str]) -> None:
        """Divides the head into the writes of `write_ahead`, the calls that are left for later, and
        waits before the plan, which nobody calls. at: the number of the plan's command."""
        writes, left = list[Issue](), list[int]()
        for number, call in enumerate(self.head):
            command = self._program.commands[number]
            if isinstance(command, Write) and command.value not in late:
                writes.append(call)
            elif not (isinstance(command, Sync) and number < at):
                left.append(number)
        # commands after the gate need their device attached; opening the gate does not
        self.late = tuple([
            self.calls[i] if i <= at else in_order([self._attach, self.calls[i]]) for i in left
        ])  # fmt: skip
        self._writes, self.late_numbers = tuple(writes), tuple(left)

    @property
    def program(self) -> Program:
        """The program as its next run issues it. After `store_at` it is made when asked for."""
        cell = self.binding.cell
        if cell is not None:
            self._program = at_cell(self._program, cell)
        return self._program

    def store_at(self, cell: int) -> None:
        """Patches the arguments for a step with another first cell. Queued work stays as it is. A
        program whose stores are no copies to views needs no patch."""
        if self.binding.cell not in (None, cell):
            self.binding.store_at(cell)

    def replayed(self, number: int) -> Captured | None:
        """The recording that command `number`, a plan, launched when it was last called. None where
        it issued its parts, or the host computed them."""
        call = self._calls.get(number)
        return None if call is None else call.replayed

    def run(self, values: Mapping[str, np.ndarray], calls: Iterable[Issue]) -> None:
        """Issues everything before the wait for the results.

        values: each input's array, of one dtype and shape for all runs.
        calls: the head, with the calls of whoever watches in between.
        """
        self.binding.values.update(values)
        self._attach()
        for call in calls:
            call()

    def write_ahead(self, values: Mapping[str, np.ndarray]) -> None:
        """Writes the inputs of the next run now, except the late ones. `run_late` then issues that
        run. The caller knows that the device has read the old inputs in this staging memory."""
        self.binding.values.update(values)
        for write in self._writes:
            write()

    def run_late(self, calls: Iterable[Issue]) -> None:
        """As `run`, after `write_ahead`. The arrays that `write_ahead` was given now hold the late
        inputs too.

        calls: `late`, with the calls of whoever watches in between.

        The host's waits before the plan are left out. They wait for earlier steps on the only
        stream, and the host has already waited for the last of these.
        """
        for call in calls:
            call()
        self._attach()  # for the wait that follows; late calls attach by themselves

    def early(self) -> dict[str, np.ndarray] | None:
        """The arrays that `finish` will return, before the results are in them. None where `finish`
        makes them."""
        early = {name: make() for name, make in self.binding.early.items()}
        made = {name: array for name, array in early.items() if array is not None}
        return made if len(made) == self._n_reads else None

    def finish(self, calls: Iterable[Issue]) -> dict[str, np.ndarray]:
        """Waits for the results of the latest `run`: arrays by name, uint8, which the caller owns.
        A result in a `Landing` is handed out where it landed; any other result is copied. calls:
        the tail, with the calls of whoever watches in between."""
        for call in calls:
            call()
        results = dict(self.binding.results)
        self.binding.results.clear()
        return results


def _again_where_missed(ahead: Gated, wait_for_event: Issue, again: Sequence[Issue]) -> Issue:
    """The wait for a step that may have been launched ahead. A step whose gate was opened too late
    is issued again. again: the calls from the step's plan to the wait."""

    def wait() -> None:
        if not ahead.ended():
            wait_for_event()

    def wait_or_again() -> None:
        wait()
        if ahead.missed():
            for call in again:
                call()
            wait()

    return wait_or_again
