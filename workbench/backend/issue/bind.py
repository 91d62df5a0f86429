"""Binds a program's commands to addresses: each becomes a callable of no arguments.

A command of a device becomes an `Issued`, made by the device's backend. A command of the host (a
write, a read, a wait of the host) becomes a plain callable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from workbench.backend.base import Backend, Issue, Memory
from workbench.backend.issue.args import VIEW, AddressOf, view_address
from workbench.backend.issue.issued import EMPTY, Block, Issued, Plannable, in_order
from workbench.backend.issue.landing import Landing
from workbench.backend.plan.ahead import inputs_of
from workbench.backend.plan.gate import Gate
from workbench.common.errors import UsageError
from workbench.graph.ir import Node, Tensor
from workbench.program import commands as cmd
from workbench.program.first_cell import CELL, is_view

_UIDS = count(1)  # 0 is nobody's


class Launching:
    """How a program's launches are asked for. Here: as they are. `LaunchNotes` asks for kernels
    that note when they ran, and `StepStamps` adds stamps to the first launch and to the last."""

    def launch(
        self, backend: Backend, c: cmd.Launch, address_of: AddressOf, scratch: int
    ) -> Issued:
        """The command for a launch. scratch: the address of its scratch."""
        return backend.launch(c.node, address_of, scratch, c.stream.id, c.programmatic)

    def around(self, c: cmd.Launch, issued: Issued) -> Issued:
        """The launch `issued`, with commands just before it and after it."""
        return issued

    def queue_of(self, plan: cmd.Replay) -> Callable[[Issue], Any] | None:
        """What calls whatever queues the plan, and counts it (`Plannable.queue`); None: nobody
        counts."""
        return None


class LandingBlock(Block):
    """The arguments of a command that writes to a `Landing`. There is a command for each block of
    the landing; these are the arguments of the one for the block where results land next.

    each: the command for each block.
    """

    __slots__ = ("_each", "landing")

    def __init__(self, landing: Landing, each: Sequence[Issued]):
        self.landing = landing
        self._each = each
        self.pointers = each[0].block.pointers

    @property
    def current(self) -> Block:
        return self._each[self.landing.now].block

    def __len__(self) -> int:
        return len(self.current)

    def __getitem__(self, field: int) -> int:
        return self.current[field]

    def __setitem__(self, field: int, value: int) -> None:
        self.current[field] = value

    def taken(self) -> bytes:
        return self.current.taken()


def _landings(issued: Issued) -> Iterator[Landing]:
    """The landings that a command writes results to."""
    if isinstance(issued.block, LandingBlock):
        yield issued.block.landing
    for part in issued.parts:
        yield from _landings(part)


def _where_it_lands(landing: Landing, each: Sequence[Issued]) -> Issued:
    """A command that writes to the block where results land next. each: the command for each
    block."""
    calls = [issued.call for issued in each]

    def issue() -> None:
        calls[landing.now]()

    parts = [
        _where_it_lands(landing, alike)
        for alike in zip(*[issued.parts for issued in each], strict=True)
    ]
    block = EMPTY if parts else LandingBlock(landing, each)
    return Issued(issue, each[0].same, block, tuple(parts))


def plannable(
    backend: Backend,
    parts: Sequence[Issued],
    stream: int,
    streams: Sequence[int],
    queue: Callable[[Issue], Any] | None = None,
    **named: Any,
) -> Plannable:
    """The commands `parts` as a plan of `backend`, launched on `stream`.

    streams: the stream of each part.
    queue, named: as `Plannable` has them.

    Called, it issues the parts one by one, with the order that a plan has towards other work. No
    part begins before earlier work on `stream` is over, and later work on `stream` waits for all
    parts.
    """
    calls = [part.call for part in parts]
    if others := [own for own in dict.fromkeys(streams) if own != stream]:
        calls = _around(backend, stream, others, calls)
    call = in_order(calls)
    if queue is not None:
        call, named = partial(queue, call), named | {"queue": queue}
    return Plannable(
        call, ("replay", stream, *streams), parts=tuple(parts), backend=backend, stream=stream,
        streams=tuple(streams), **named,
    )  # fmt: skip


class Binding:
    """One program on backends and memory.

    events: by name, for all programs of an engine, because a step may wait for an earlier step's
        event. New events are added.
    values: the inputs' arrays by name, read when a write is called.
    results: by name, the array (uint8) that a read has made.
    early: by name, what makes that array before the read, for results that are handed out where
        they land (`Landing.early`).
    cell: the first cell that stores to views store; None where there are no such stores.
    launches: how launches are asked for.
    gate: plans whose inputs come by one copy begin with it (`plan/ahead.py`).
    """

    def __init__(
        self,
        program: cmd.Program,
        backends: Sequence[Backend],
        memory: Mapping[cmd.Buffer, Memory],
        events: dict[str, Any],
        launches: Launching,
        gate: Gate | None = None,
    ):
        self.values: dict[str, np.ndarray] = {}
        self.results: dict[str, np.ndarray] = {}
        self.early: dict[str, Callable[[], np.ndarray | None]] = {}
        self._program = program
        self._backends, self._launches, self._gate = backends, launches, gate
        self.memory = memory
        self._events = events
        self._several = len(backends) > 2  # then each command attaches its own device
        self._recorded_by: dict[str, Backend] = {}
        self.cell: int | None = None
        # of each store to a view: the words that hold its destination, and the field's number
        # there; the address of cell 0, and the bytes of a cell
        self._views: list[tuple[Any, int, int, int]] = []
        self._with_views: list[Plannable] = []
        for command in program.singly():
            if isinstance(command, cmd.Record):
                backend = self._recorded_by[command.event] = backends[command.stream.backend]
                if command.event not in events:
                    backend.attach()
                    events[command.event] = backend.event()

    def device_of(self, command: cmd.Command) -> Backend | None:
        """The backend that does `command`; None for a command of the host."""
        if type(command) in _DEVICE:
            backend = self._backends[command.stream.backend]  # type: ignore[union-attr]
            if not backend.capabilities.synchronous:
                return backend
        return None

    def issued(self, command: cmd.Command) -> Issued:
        """The command of a device, bound."""
        self._attached(command)
        issued = _DEVICE[type(command)](self, command)
        if self._several:
            issued = self._on_its_device(command, issued)
        if isinstance(issued, Plannable):
            self.note(issued)
        return issued

    def note(self, work: Plannable) -> None:
        """Gives a work of this program a uid, which patches then change."""
        work.uid = next(_UIDS)
        if work.moves:
            self._with_views.append(work)

    def store_at(self, cell: int) -> None:
        """Patches the stores to views: calls from now on store from `cell` on. A plan with such
        stores is other work than before."""
        self.cell = cell
        for words, field, first, nbytes in self._views:
            words[field] = first + cell * nbytes
        for work in self._with_views:
            work.uid = next(_UIDS)

    def call(self, command: cmd.Command) -> Issue:
        """The call by which the host does `command`."""
        self._attached(command)
        if isinstance(command, cmd.Sync) and command.event is not None and self._several:
            backend = self._recorded_by[command.event]
            return in_order([backend.attach, self._sync(command)])
        if type(command) in _DEVICE:
            return _DEVICE[type(command)](self, command).call
        return _HOST[type(command)](self, command)

    def _attached(self, command: cmd.Command) -> None:
        """Attaches the thread to the device of `command`, so that handles (stream, kernel, event)
        are made in the context of that device and of no other."""
        stream = command.stream
        if stream is not None:
            self._backends[stream.backend].attach()

    def _on_its_device(self, command: Any, issued: Issued) -> Issued:
        attach, call = self._backends[command.stream.backend].attach, issued.call

        def attached() -> None:
            attach()
            call()

        return replace(issued, call=attached)

    # addresses --------------------------------------------------------------------------------

    def _address(self, r: cmd.Range) -> int:
        return self.memory[r.buffer].address + r.offset

    def _host_view(self, r: cmd.Range) -> np.ndarray:
        array = self.memory[r.buffer].array
        assert array is not None, f"{r} is not host memory"
        return array[r.offset : r.offset + r.nbytes]

    # commands, by type ------------------------------------------------------------------------

    def _write(self, c: cmd.Write) -> Issue:
        there, values, name = self._host_view(c.staging), self.values, c.value
        shape = next((t.shape for t in self._program.inputs if t.name == name), None)
        view: np.ndarray | None = None
        size = ndim = 0

        def differs(value: np.ndarray, view: np.ndarray) -> UsageError:
            return UsageError(
                f"input {name} is {list(value.shape)} where its program has {list(view.shape)}; "
                "use the program of this step's shape"
            )

        def write() -> None:
            nonlocal view, size, ndim
            value = values[name]
            if view is None:
                view = there.view(value.dtype).reshape(shape or value.shape)
                size, ndim = view.size, view.ndim
            # numpy refuses any other shape of this size and number of dimensions. To compare two
            # shapes takes twice as long, for each input of each token
            if value.size != size or value.ndim != ndim:
                raise differs(value, view)
            try:
                view[...] = value
            except ValueError:
                raise differs(value, view) from None

        return write

    def _read(self, c: cmd.Read) -> Issue:
        results, name, nbytes = self.results, c.value, c.staging.nbytes
        landing = self.memory[c.staging.buffer]
        if isinstance(landing, Landing):
            take, self.early[name] = landing.take, partial(landing.early, nbytes)

            def hand_out() -> None:
                results[name] = take(nbytes)

            return hand_out
        there = self._host_view(c.staging)

        def read() -> None:
            results[name] = there.copy()

        return read

    def _sync(self, c: cmd.Sync) -> Issue:
        if c.event is not None:
            return self._recorded_by[c.event].sync_event(self._events[c.event])
        assert c.stream is not None and c.stream.backend != cmd.HOST
        backend = self._backends[c.stream.backend]
        sync = backend.sync_stream(c.stream.id)
        return in_order([backend.attach, sync]) if self._several else sync

    def _copy(self, c: cmd.Copy) -> Issued:
        backend, stream, nbytes = self._backends[c.stream.backend], c.stream.id, c.src.nbytes
        to_host = c.dst.buffer.space != cmd.Space.DEVICE
        source, landing = self._address(c.src), self.memory[c.dst.buffer]
        if c.src.buffer.space == cmd.Space.DEVICE and not to_host:
            peer = self._backends[c.dst.buffer.backend]
            return backend.copy_to_peer(peer, self._address(c.dst), source, nbytes, stream)
        if not isinstance(landing, Landing):
            return backend.copy(self._address(c.dst), source, nbytes, stream, to_host)
        return _where_it_lands(landing, [
            backend.copy(block.address, source, nbytes, stream, to_host) for block in landing.blocks
        ])  # fmt: skip

    def _launch(self, c: cmd.Launch) -> Issued:
        return self._launches.around(c, self._landed(c))

    def _landed(self, c: cmd.Launch) -> Issued:
        for r in c.writes:
            landing = self.memory[r.buffer] if r.buffer.lands else None
            if isinstance(landing, Landing):
                at = [self._with(r.buffer, block) for block in landing.blocks]
                return _where_it_lands(landing, [self._launched(c, address) for address in at])
        return self._launched(c, self._address)

    def _with(self, buffer: cmd.Buffer, memory: Memory) -> Callable[[cmd.Range], int]:
        """The addresses of ranges when `buffer` lies in `memory`."""
        own = self._address
        return lambda r: memory.address + r.offset if r.buffer is buffer else own(r)

    def _launched(self, c: cmd.Launch, address: Callable[[cmd.Range], int]) -> Issued:
        layout = self._program.layout[c.stream.backend]

        def address_of(tensor: Tensor) -> int:
            return address(layout[tensor.storage])

        scratch = 0 if c.scratch is None else address(c.scratch)
        backend = self._backends[c.stream.backend]
        issued = self._launches.launch(backend, c, address_of, scratch)
        if is_view(c.node):
            self._note_view(c.node, issued.block, address_of(c.node.output))
        return issued

    def _note_view(self, node: Node, block: Block, first: int) -> None:
        self.cell = node.params[CELL]
        self._views.append((*block.held(VIEW), first, view_address(node.output, 0, 1)))

    def _replay(self, c: cmd.Replay) -> Issued:
        parts = [_DEVICE[type(part)](self, part) for part in c.parts]
        streams = tuple([part.stream.id for part in c.parts if part.stream is not None])
        views = [i for i, x in enumerate(c.parts) if isinstance(x, cmd.Launch) and is_view(x.node)]
        gate, end = self._gated(c, parts[0])
        landings = tuple(dict.fromkeys([found for part in parts for found in _landings(part)]))
        return plannable(
            self._backends[c.stream.backend], parts, c.stream.id, streams,
            self._launches.queue_of(c), landings=landings, gate=gate, end=end, moves=tuple(views),
        )  # fmt: skip

    def _gated(self, c: cmd.Replay, first: Issued) -> tuple[Issued | None, Issued | None]:
        """The gate and the end of a plan that can be launched ahead. first: the plan's first
        part."""
        copy = None if self._gate is None else inputs_of(c)
        if self._gate is None or copy is None:
            return None, None
        stream, last = c.stream.id, c.parts[-1]
        early = isinstance(last, cmd.Launch) and last.programmatic
        return (
            self._gate.copy(first.addresses, copy.src.nbytes, stream),
            self._gate.end(stream, early),
        )

    def _record(self, c: cmd.Record) -> Issued:
        return self._backends[c.stream.backend].record(self._events[c.event], c.stream.id)

    def _wait(self, c: cmd.Wait) -> Issued:
        return self._backends[c.stream.backend].wait(self._events[c.event], c.stream.id)


def _around(
    backend: Backend, here: int, others: Sequence[int], calls: Sequence[Issue]
) -> list[Issue]:
    """Calls for the parts of a plan on stream `here` and on others, with the order that a plan has.
    The parts begin after all earlier work on `here`. Later work on `here` begins when all parts are
    over."""
    backend.attach()
    begin, ends = backend.event(), [backend.event() for _ in others]
    forked = [backend.wait(begin, other).call for other in others]
    joined = [
        issued.call
        for other, end in zip(others, ends, strict=True)
        for issued in (backend.record(end, other), backend.wait(end, here))
    ]
    return [backend.record(begin, here).call, *forked, *calls, *joined]


_DEVICE: dict[type[cmd.Command], Callable[[Binding, Any], Issued]] = {
    cmd.Copy: Binding._copy,
    cmd.Launch: Binding._launch,
    cmd.Replay: Binding._replay,
    cmd.Record: Binding._record,
    cmd.Wait: Binding._wait,
}
_HOST: dict[type[cmd.Command], Callable[[Binding, Any], Issue]] = {
    cmd.Write: Binding._write,
    cmd.Sync: Binding._sync,
    cmd.Read: Binding._read,
}
