"""A program bound to addresses: one call for each of its commands, first to last.

Binding makes of a command what the host does at once (a write, a read, a wait of the host), or what
a device is asked (`Issued`). What issues an `Issued` is chosen here, once, when the program is
bound. It is a `Call`:

    eager      the command's own call; of a plan, its parts one by one
    Planned    the replay of a plan, where one fits (`plan.py`)
    Gated      the same, and the plan can be launched before its step is submitted (`plan.py`)

Plans are commands of the program (`program/plans.py`), so whatever reads a program sees them. A
program that is bound never changes. Whoever wants it with stamps, with notes or at a gate says so
when it is bound.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from workbench.backend.base import Backend, Captured, Issue, Memory
from workbench.backend.issue.bind import Binding, Launching
from workbench.backend.issue.issued import Issued, Plannable, in_order
from workbench.backend.plan.ahead import number_ahead
from workbench.backend.plan.gate import Gate
from workbench.backend.plan.life import Gated, Plans
from workbench.program.commands import Buffer, Program, Read, Sync, Write
from workbench.program.first_cell import at_cell


class Call(Protocol):
    """What issues a command of a device, as often as wanted.

    call: issues it.
    replayed: what the latest call launched; None where it issued commands one by one.
    """

    @property
    def call(self) -> Issue: ...

    @property
    def replayed(self) -> Captured | None: ...


class Prepared:
    """A program bound to addresses. Lives as long as the memory it was bound to.

    calls: one for each command, in their order.
    head: the calls before the wait for the results.
    tail: that wait and the reads.
    issued: what devices are asked, by number of the command.
    ahead: the call of a plan that can be launched ahead, if there is one (`ahead.py`), and
    number_ahead: its command's.
    late: of the head, the calls that are left after `write_ahead`; `late_numbers`: their commands'.
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
        """events: as `Binding` has them. plans: of the engine; None issues every command by a call
        of its own. gate: of the engine, where plans are launched ahead. late: inputs, by name, that
        `write_ahead` does not write."""
        self._program = program
        self.backends = backends
        # another engine's device may be the thread's; where there are several, commands say which
        self._attach = backends[-1].attach
        self._attach()
        known = {} if events is None else events
        self.launches = launches or Launching()
        self.binding = Binding(program, backends, memory, known, self.launches, gate)
        self.issued: dict[int, Issued] = {}
        self._calls: dict[int, Call] = {}  # of plans
        calls = self._bound(None if plans is None else plans.call_of(program, gate))
        n = program.first_of_tail
        at = None if gate is None else number_ahead(program)
        self.ahead = None if at is None else self._gated(at)
        self.number_ahead = None if self.ahead is None else at
        if self.ahead is not None:
            calls[n] = _again_where_missed(self.ahead, calls[n], calls[at:n])
        elif gate is not None:  # so that none of its commands queues behind a gate
            calls[0] = in_order([gate.cancel, calls[0]])
        self.calls = tuple(calls)
        self.head, self.tail = self.calls[:n], self.calls[n:]
        self._writes: tuple[Issue, ...] = ()
        self.late: tuple[Issue, ...] = ()
        self.late_numbers: tuple[int, ...] = ()
        if self.number_ahead is not None:
            self._part(self.number_ahead, late)
        self._n_reads = sum(isinstance(command, Read) for command in program.commands)

    def _bound(self, call_of: Callable[[Plannable], Call | None] | None) -> list[Issue]:
        """The call of each command. call_of: of plans."""
        made: list[Issue] = []
        for number, command in enumerate(self._program.commands):
            if self.binding.device_of(command) is None:
                made.append(self.binding.call(command))
                continue
            issued = self.issued[number] = self.binding.issued(command)
            call = None
            if call_of is not None and isinstance(issued, Plannable):
                call = call_of(issued)
            if call is None:
                made.append(issued.call)
            else:
                self._calls[number] = call
                made.append(call.call)
        return made

    def _gated(self, number: int) -> Gated | None:
        """The call of a plan that begins with a gate."""
        call = self._calls.get(number)
        return call if isinstance(call, Gated) and call.has_gate else None

    def _part(self, at: int, late: Collection[str]) -> None:
        """Parts the head: what `write_ahead` writes, what is left for later, and waits before the
        plan, which nobody calls. Command number `at` is the plan."""
        writes, left = list[Issue](), list[int]()
        for number, call in enumerate(self.head):
            command = self._program.commands[number]
            if isinstance(command, Write) and command.value not in late:
                writes.append(call)
            elif not (isinstance(command, Sync) and number < at):
                left.append(number)
        # what comes after the gate wants its device; the gate is opened without it
        self.late = tuple([
            self.calls[i] if i <= at else in_order([self._attach, self.calls[i]]) for i in left
        ])  # fmt: skip
        self._writes, self.late_numbers = tuple(writes), tuple(left)

    @property
    def program(self) -> Program:
        """The program as its next run issues it; made when it is asked for after `store_at`."""
        cell = self.binding.cell
        if cell is not None:
            self._program = at_cell(self._program, cell)
        return self._program

    def store_at(self, cell: int) -> None:
        """Patches the arguments for a step whose first cell is another. What is queued stays as it
        is. A program whose stores are no copies to views needs no patch."""
        if self.binding.cell not in (None, cell):
            self.binding.store_at(cell)

    def replayed(self, number: int) -> Captured | None:
        """What command number `number`, a plan, launched when it was last called; None where it
        issued its parts, or the host computed them."""
        call = self._calls.get(number)
        return None if call is None else call.replayed

    def run(self, values: Mapping[str, np.ndarray], calls: Iterable[Issue]) -> None:
        """Issues everything before the wait for the results. values: each input's array, of one
        dtype and shape for all runs. calls: the head, with whatever a watch does between."""
        self.binding.values.update(values)
        self._attach()
        for call in calls:
            call()

    def write_ahead(self, values: Mapping[str, np.ndarray]) -> None:
        """Writes a next run's inputs now, but for the late ones. Then `run_late` issues that run.
        The caller knows that the device has read what was in this staging memory."""
        self.binding.values.update(values)
        for write in self._writes:
            write()

    def run_late(self, calls: Iterable[Issue]) -> None:
        """As `run`, after `write_ahead`. The late inputs are now in the arrays that `write_ahead`
        was given. calls: `late`, with whatever a watch does between. The host's waits before the
        plan are left out. They are for steps before, on the one stream that there is, and the host
        has waited for the last of them."""
        for call in calls:
            call()
        self._attach()  # whoever waits; what is called late attaches by itself

    def early(self) -> dict[str, np.ndarray] | None:
        """The arrays that `finish` will return, before the results are in them. None where they
        are made only then."""
        early = {name: make() for name, make in self.binding.early.items()}
        made = {name: array for name, array in early.items() if array is not None}
        return made if len(made) == self._n_reads else None

    def finish(self, calls: Iterable[Issue]) -> dict[str, np.ndarray]:
        """Waits for the results of the latest `run`: arrays by name, uint8; the caller owns them. A
        result in a `Landing` is handed out where it landed, any other is copied. calls: the tail,
        with whatever a watch does between."""
        for call in calls:
            call()
        results = dict(self.binding.results)
        self.binding.results.clear()
        return results


def _again_where_missed(ahead: Gated, wait_for_event: Issue, again: Sequence[Issue]) -> Issue:
    """The wait for a step that may have been launched ahead. Where its gate was opened too late,
    the step is issued again. again: the calls from its plan to the wait."""

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
