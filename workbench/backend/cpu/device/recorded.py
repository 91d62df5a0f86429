"""Plans of the embedded device: how capture records commands, how a plan is launched and updated.

A plan has a list of nodes for each stream that its parts use. A node is laid out as an entry of a
ring, and has a copy of the part's arguments. Launch queues one walk of each list, and the workers
go through the lists without the host (`loops.py`). What orders streams are nodes of their own:

    stream 0, launched on   begin . launch . . . . . . await copied . launch . await end .
    stream 1                 ` await begin . copy . copy . record copied . end '

So no list begins before the earlier work of stream 0 is over. Later work of stream 0 begins when
every list is over. A node that awaits a signal waits for the same launch of the plan as its own.

A queued launch runs with the arguments it was queued with: while launches are under way, `update`
writes into a copy of the nodes. The old nodes live until these launches are over. So does all
memory of a destroyed plan.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import groupby
from operator import add, sub
from typing import Any, NamedTuple

from workbench.backend.base import NO_PART, Captured, Issue
from workbench.backend.cpu.device import loops, signals
from workbench.backend.cpu.device.loops import push_walks
from workbench.backend.cpu.device.ring import MemoryBlock, Ring, aligned_zeros, command_words
from workbench.backend.issue.bind import LandingBlock
from workbench.backend.issue.issued import Issued, Plannable
from workbench.common.errors import DeviceError

WALKS_BYTES = 64  # a list's counter of walks, on a cache line of its own


class _Node(NamedTuple):
    """A node: a kernel, or a node that orders streams.

    work: function and parts of a kernel; function and signal of a node that orders streams.
    block: the command of a kernel; None for a node that orders streams.
    """

    stream: int
    part: int
    work: tuple[Any, ...]
    block: Any = None


class _Nodes:
    """The nodes of `work`, in host order. Raises DeviceError for a command that no plan can
    hold."""

    def __init__(self, work: Plannable):
        self.all: list[_Node] = []
        self.n_signals = 0
        self._recorded: dict[int, tuple[int, int]] = {}  # event -> stream and signal of its Record
        others = sorted(set(work.streams) - {work.stream})
        if others:
            begin = self._raised(work.stream, NO_PART)
        for stream in others:
            self.all.append(_Node(stream, NO_PART, (loops.AWAIT_LIST, begin)))
        for number, (part, stream) in enumerate(zip(work.recorded, work.streams, strict=True)):
            for leaf in _leaves(part):
                self._add(stream, number, leaf)
        for stream in others:
            end = self._raised(stream, NO_PART)
            self.all.append(_Node(work.stream, NO_PART, (loops.AWAIT_LIST, end)))
        if work.end is not None:
            self._add(work.stream, NO_PART, work.end)
        self.blocks = {i: node.block for i, node in enumerate(self.all) if node.block is not None}
        if not self.blocks:
            raise DeviceError("a plan without launches and copies; capture at least one")
        # equal in two works that differ in arguments alone
        self.topology = (work.stream, [node[:3] for node in self.all])

    def _raised(self, stream: int, part: int) -> int:
        """Adds a node that raises a signal of its own. Returns the signal."""
        signal = self.n_signals
        self.n_signals += 1
        self.all.append(_Node(stream, part, (loops.RAISE, signal)))
        return signal

    def _add(self, stream: int, part: int, leaf: Issued) -> None:
        """Adds the nodes of a command, by its kind. Only a kernel has its function there."""
        kind, block = leaf.same[0], _block(leaf)
        if kind == "record":
            self._recorded[block[0]] = stream, self._raised(stream, part)
        elif kind == "wait":
            if block[0] not in self._recorded:
                raise DeviceError(
                    "a plan waits for an event that it does not record; record it first"
                )
            by, signal = self._recorded[block[0]]
            if by != stream:
                self.all.append(_Node(stream, part, (loops.AWAIT_LIST, signal)))
        elif kind == "snapshot":
            raise DeviceError(
                f"a {kind} copy takes its bytes at the call, so no plan can have it; use "
                "host_source=pinned or plan_scope=split"
            )
        else:
            self.all.append(_Node(stream, part, leaf.same, block))


_DESTROYED = "this plan is destroyed; capture its commands again"


def _leaves(issued: Issued) -> Sequence[Issued]:
    """The commands that `issued` is made of, in order."""
    return [leaf for part in issued.parts for leaf in _leaves(part)] if issued.parts else (issued,)


def _block(leaf: Issued) -> Any:
    block = leaf.block
    return block.current if isinstance(block, LandingBlock) else block


class _Lists:
    """Where nodes lie: one list after the other, each the list of a stream.

    rings: the ring of each list.
    firsts: the entry that each list begins with, and the end of the last list.
    list_of, entry_of: the list and the entry of each node.
    walks: address of each list's counter of walks.
    signals: address of each signal.
    """

    def __init__(self, nodes: _Nodes, streams: Sequence[Ring]):
        used = sorted({node.stream for node in nodes.all})
        self.rings = [streams[stream] for stream in used]
        self.list_of = [used.index(node.stream) for node in nodes.all]
        order = sorted(range(len(nodes.all)), key=self.list_of.__getitem__)
        self.entry_of = sorted(order, key=order.__getitem__)
        self.firsts = [sum(i < one for i in self.list_of) for one in range(len(used) + 1)]
        self._n_signals = nodes.n_signals
        self._allocate()

    def _allocate(self) -> None:
        n_walks = len(self.rings) * WALKS_BYTES
        self.memory = aligned_zeros(n_walks + self._n_signals * signals.SIGNAL_BYTES)
        base, end = int(self.memory.ctypes.data), int(self.memory.ctypes.data) + self.memory.nbytes
        self.walks = range(base, base + n_walks, WALKS_BYTES)
        self.signals = range(base + n_walks, end, signals.SIGNAL_BYTES)
        for signal in self.signals:
            signals.init_signal(signal)

    def twin(self) -> _Lists:
        """Lists of the same nodes, with signals and walks of their own."""
        made = copy(self)
        made._allocate()
        return made

    def command(self, number: int, node: _Node) -> array[int]:
        """The command of node `number`, which orders streams."""
        (function, signal), one = node.work, self.list_of[number]
        args = self.signals[signal], self.walks[one], self.rings[one].address
        return command_words(function, 1, args)


class EmbeddedPlan(Captured):
    """See the module. streams: the device's. keep: keeps memory until the queued work is over."""

    def __init__(self, work: Plannable, streams: Sequence[Ring], keep: Callable[[object], None]):
        self._plan = array("q", (1,))  # nothing to destroy where this raises
        start = time.perf_counter_ns()
        nodes = _Nodes(work)
        self.capture_ns = time.perf_counter_ns() - start
        self._keep, self._topology = keep, nodes.topology
        self._kernels = list(nodes.blocks)
        self.nodes = tuple([nodes.all[i].part for i in self._kernels])
        self._nodes_of = {
            part: list(found) for part, found in groupby(self._kernels, lambda i: nodes.all[i].part)
        }  # of each part with kernels
        self._orders = {i: node for i, node in enumerate(nodes.all) if node.block is None}
        self._lists = _Lists(nodes, streams)
        self._memory = aligned_zeros(len(nodes.all) * loops.ENTRY_BYTES)
        self._make_launchable(nodes.blocks)
        self.instantiate_ns = time.perf_counter_ns() - start - self.capture_ns

    def _make_launchable(self, blocks: Mapping[int, MemoryBlock]) -> None:
        """blocks: of the nodes whose entries are missing, or have changed."""
        for i, node in self._orders.items():
            command = self._lists.command(i, node)
            loops.fill(self._entry(i), command.buffer_info()[0])
        self._fill(blocks)
        self._plan = self._launchable()
        self.launch = _launcher(self._plan, self._lists.rings)

    def twin(self, work: Plannable, changed: Sequence[int]) -> EmbeddedPlan | None:
        if self._plan[loops.DESTROYED // 8]:
            raise DeviceError(_DESTROYED)
        start = time.perf_counter_ns()
        blocks = self._changed_blocks(work, changed)
        if blocks is None:
            return None
        made = copy(self)
        made._plan = array("q", (1,))  # not this one's: nothing to destroy where this raises
        made._lists, made._memory = self._lists.twin(), aligned_zeros(self._memory.nbytes)
        made._memory[:] = self._memory
        made._make_launchable(blocks)
        made.capture_ns, made.instantiate_ns = 0, time.perf_counter_ns() - start
        return made

    def _entry(self, node: int) -> int:
        return int(self._memory.ctypes.data) + self._lists.entry_of[node] * loops.ENTRY_BYTES

    def _fill(self, blocks: Mapping[int, MemoryBlock]) -> None:
        """Writes the entries of kernels. blocks: by node."""
        base, entry_of = int(self._memory.ctypes.data), self._lists.entry_of
        for node, block in blocks.items():
            loops.fill(base + entry_of[node] * loops.ENTRY_BYTES, block.address)

    def _launchable(self) -> array[int]:
        """The block that `push_walks` takes."""
        lists, base = self._lists, int(self._memory.ctypes.data)
        words = [0, len(lists.rings), 0]
        for ring, walks, first, end in zip(
            lists.rings, lists.walks, lists.firsts, lists.firsts[1:], strict=False
        ):
            words += [ring.address, base + first * loops.ENTRY_BYTES, end - first, walks]
            words += [0] * loops.N_FIRSTS
        return array("q", words)

    @property
    def launches(self) -> int:  # type: ignore[override]
        return self._plan[loops.LAUNCHES // 8]

    def _word(self, number: int, field: int) -> int:
        """Where the plan's words have a field of list `number`."""
        return (loops.LISTS + number * loops.LIST_BYTES + field) // 8

    def _firsts(self, launch: int) -> list[int]:
        """The number of each list's first node in a launch."""
        field = loops.LIST_FIRSTS + launch % loops.N_FIRSTS * 8
        return [self._plan[self._word(i, field)] for i in range(len(self._lists.rings))]

    @property
    def _under_way(self) -> bool:
        """Whether any launch is not over yet."""
        lists, launch = self._lists, self.launches - 1
        if launch < 0:
            return False
        ends = map(add, self._firsts(launch), map(sub, lists.firsts[1:], lists.firsts))
        return any(ring.completed < end for ring, end in zip(lists.rings, ends, strict=True))

    def spans(self, launch: int | None = None) -> list[tuple[int, int]]:
        launch = self.launches - 1 if launch is None else launch
        if not max(0, self.launches - loops.N_FIRSTS) <= launch < self.launches:
            return []
        lists, firsts = self._lists, self._firsts(launch)
        found = []
        for node in self._kernels:
            one = lists.list_of[node]
            number = firsts[one] + lists.entry_of[node] - lists.firsts[one]
            found.append(lists.rings[one].stamp(number))
        return found

    def update(self, work: Plannable, changed: Sequence[int] | None) -> bool:
        if self._plan[loops.DESTROYED // 8]:
            raise DeviceError(_DESTROYED)
        blocks = self._changed_blocks(work, changed)
        if blocks is None:
            return False
        if self._under_way:
            old, self._memory = self._memory, aligned_zeros(self._memory.nbytes)
            self._memory[:] = old
            self._keep(old)
            for i, first in enumerate(self._lists.firsts[:-1]):
                at = int(self._memory.ctypes.data) + first * loops.ENTRY_BYTES
                self._plan[self._word(i, loops.LIST_NODES)] = at
        self._fill(blocks)
        return True

    def _changed_blocks(
        self, work: Plannable, changed: Sequence[int] | None
    ) -> Mapping[int, MemoryBlock] | None:
        """The blocks of nodes that may have changed; None where the topology has changed."""
        if changed is not None and all(part in self._nodes_of for part in changed):
            found: dict[int, MemoryBlock] = {}
            recorded = work.recorded
            for part in changed:
                blocks = map(_block, _leaves(recorded[part]))
                found.update(zip(self._nodes_of[part], blocks, strict=True))
            return found
        nodes = _Nodes(work)
        return nodes.blocks if nodes.topology == self._topology else None

    def destroy(self) -> None:
        if not self._plan[0]:
            self._plan[0] = 1
            self._keep((self._memory, self._lists.memory))

    def __del__(self) -> None:
        self.destroy()


def _launcher(plan: array[int], rings: Sequence[Ring]) -> Issue:
    def launch(plan_address: int = plan.buffer_info()[0], _kept: object = plan) -> None:
        if push_walks(plan_address):
            _launch_slowly(plan, rings)

    return launch


def _launch_slowly(plan: array[int], rings: Sequence[Ring]) -> None:
    """Launches where a ring was full: waits for room. Raises DeviceError where the plan is
    destroyed or a ring is closed."""
    while True:
        if plan[loops.DESTROYED // 8]:
            raise DeviceError(_DESTROYED)
        for ring in rings:
            ring.await_room()
        if push_walks(plan.buffer_info()[0]) == loops.PUSHED:
            return
