"""ROOM #17795: lowers a graph to a program, ordering copies, waits and launches by sync mode.

A sync mode is not an `if` in a loop: it is a row of `RULES`, which says where Sync commands go
around the input copies of a device split. What the rows cost is one wait of the host each; what
they protect, with copies on their own stream:

    host     W W W . s . C C C . s . g g g g ........ S R      W write staging   C copy
    copies           |   c c c-'   |                            g launch          R read
    compute  ...g g -'             '-> g g g g ---> l           s S wait          l logits

* the first `s` keeps a copy from overwriting an input the step before still reads,
* the second keeps a launch from reading an input whose copy has not landed, and the host from
  rewriting staging memory a copy has yet to read,
* `S`, the logits wait, is in every program: a step ends when its results are on the host. It
  makes the first `s` superfluous, and on one stream the second too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from workbench.config import CopyStream, Switch, SyncMode
from workbench.errors import DeviceError
from workbench.graph import arena, ops
from workbench.graph.ir import Graph, Kind, Node, Tensor
from workbench.program.commands import (
    COMPUTE_STREAM,
    COPY_STREAM,
    HOST,
    RESULT,
    Buffer,
    Capabilities,
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
    Write,
)
from workbench.program.split import Split


class Rule(NamedTuple):
    """Where the host waits around the input copies of a split, and what that asks of a backend."""

    wait_each: bool  # for the split's stream, before every copy
    wait_before: bool  # for the split's stream, once before the copies
    blocking: bool  # each copy is waited for at once
    wait_after: bool  # for the copies, once before the launches
    one_order: bool = False  # correct only where stream order keeps copies before launches


RULES: dict[str, Rule] = {
    SyncMode.PER_COPY: Rule(True, False, True, False),
    SyncMode.BLOCKING_COPIES: Rule(False, True, True, True),
    SyncMode.COPY_BOUNDARY: Rule(False, True, False, True),
    SyncMode.WRITE_READ_BOUNDARY: Rule(False, False, False, True),
    SyncMode.IMPLICIT: Rule(False, False, False, False, one_order=True),
}  # from the most waits to the fewest


def choose_sync(sync: str, copy_stream: str, capabilities: Capabilities, device: str) -> str:
    """The sync mode to lower with: `sync` itself, or for `auto` the safe one with fewest waits.

    Raises DeviceError where the backend cannot honour the mode or the copy stream.
    """
    own = capabilities.asynchronous_copies and copy_stream == CopyStream.OWN
    if own and capabilities.n_streams < 2:
        raise DeviceError(
            f"copy_stream=own needs two streams and the {device} device has "
            f"{capabilities.n_streams}; use copy_stream=compute"
        )
    if sync == SyncMode.AUTO:
        return [m for m in RULES if not _refusal(m, copy_stream, capabilities)][-1]
    reason = _refusal(sync, copy_stream, capabilities)
    if reason:
        raise DeviceError(
            f"the {device} device cannot honour sync={sync}: {reason}; use sync=auto, or per_copy"
        )
    return sync


def choose_pdl(pdl: str, capabilities: Capabilities, device: str) -> bool:
    """Whether launches may be programmatic. Raises DeviceError where the backend cannot do it."""
    if pdl == Switch.ON and not capabilities.programmatic:
        raise DeviceError(
            f"the {device} device cannot honour pdl=on: it has no programmatic dependent launch "
            "(CUDA, compute capability 9.0 or later); use pdl=off"
        )
    return pdl == Switch.ON


def _refusal(sync: str, copy_stream: str, capabilities: Capabilities) -> str:
    rule = RULES[sync]
    if not rule.blocking and not capabilities.asynchronous_copies:
        return "its copies are not asynchronous"
    if rule.one_order and not (capabilities.one_order and copy_stream == CopyStream.COMPUTE):
        return "its copies and launches do not share one order"
    return ""


class _Lowering:
    """What the emitting steps share while one program is made."""

    def __init__(self, rule: Rule, copy_stream: str, begins_early: Callable[[Node], bool] | None):
        self.rule = rule
        self.begins_early = begins_early
        self.copies_on = COPY_STREAM if copy_stream == CopyStream.OWN else COMPUTE_STREAM
        self.commands: list[Command] = []
        self.buffers: list[Buffer] = []
        self.placement: list[dict[Tensor, Range]] = []
        self.scratch: dict[Node, Range] = {}

    def buffer(self, name: str, space: Space, nbytes: int, backend: int) -> Buffer:
        made = Buffer(name, space, nbytes, backend)
        self.buffers.append(made)
        return made

    def place(
        self,
        graph: Graph,
        splits: Sequence[Split],
        residents: Sequence[dict[Tensor, Range]],
        scratch_bytes: Sequence[Callable[[Node], int]],
    ) -> dict[Tensor, Range]:
        """Gives every tensor its range on every backend that uses it; returns the staged inputs."""
        owner = len(residents) - 1  # the device owns what its copies touch
        pinned = Space.PINNED if owner else Space.HOST
        offsets, end = {}, 0
        for t in graph.inputs:
            offsets[t] = end
            end += -(-t.nbytes // arena.ALIGN) * arena.ALIGN
        staging = self.buffer("staging", pinned, end, owner)
        staged = {t: Range(staging, at, t.nbytes) for t, at in offsets.items()}
        crossing = {s for part in splits for s in part.inputs} | set(graph.outputs)

        for b, resident in enumerate(residents):
            nodes = [node for part in splits if part.backend == b for node in part.nodes]
            given = [s for part in splits if part.backend == b for s in part.inputs]
            placement = dict(resident)
            if b == HOST:
                placement.update(staged)  # the host computes on staging itself
                given = [s for s in given if s.kind != Kind.INPUT]
            placed = arena.plan(nodes, given, crossing, scratch_bytes[b])
            space = Space.DEVICE if b != HOST else pinned
            memory = self.buffer(f"arena.{b}", space, placed.nbytes, owner)
            for s, at in placed.offsets.items():
                placement[s] = Range(memory, at, s.nbytes)
            for node, (at, nbytes) in placed.scratch.items():
                self.scratch[node] = Range(memory, at, nbytes)
            self.placement.append(placement)
        for t in graph.inputs:
            self.commands.append(Write(staged[t], t.name))
        return staged

    def bring_inputs(self, number: int, part: Split, staged: dict[Tensor, Range], made_by) -> None:
        """The copies of a split's inputs, with the waits its rule puts around them."""
        if part.backend == HOST:
            self._bring_to_host(number, part, made_by)
            return
        rule, emit = self.rule, self.commands.append
        compute = Stream(part.backend, COMPUTE_STREAM)
        copies = Stream(part.backend, self.copies_on)
        if rule.wait_before and part.inputs:
            emit(Sync(number, stream=compute))
        for s in part.inputs:
            source = staged.get(s) or self.placement[made_by[s]][s]
            if rule.wait_each:
                emit(Sync(number, stream=compute))
            copy = Copy(self.placement[part.backend][s], source, copies, s.name, number)
            emit(copy)
            if rule.blocking:
                emit(Sync(number, stream=copies, blocks=copy))
        if rule.wait_after and part.inputs:
            emit(Sync(number, stream=copies))

    def _bring_to_host(self, number: int, part: Split, made_by) -> None:
        """A host split computes at once: what it needs from a device is copied and waited for."""
        for s in part.inputs:
            if s.kind == Kind.INPUT:
                continue
            stream = Stream(made_by[s], COMPUTE_STREAM)
            copy = Copy(
                self.placement[HOST][s], self.placement[made_by[s]][s], stream, s.name, number
            )
            self.commands.append(copy)
            self.commands.append(Sync(number, stream=stream, blocks=copy))

    def launches(self, number: int, part: Split) -> None:
        """The split's work, in graph order on the compute stream."""
        stream = Stream(part.backend, COMPUTE_STREAM)
        place, scratch, emit = self.placement[part.backend], self.scratch, self.commands.append
        early = None if part.backend == HOST else self.begins_early
        for node in part.nodes:
            temporary = scratch.get(node)
            own = () if temporary is None else (temporary,)
            reads = tuple([_range(place, a) for a in ops.reads(node)]) + own
            writes = tuple([_range(place, a) for a in ops.writes(node)]) + own
            programmatic = early is not None and early(node)
            emit(Launch(node, stream, reads, writes, temporary, number, programmatic))

    def result(self, graph: Graph, made_by: dict[Tensor, int], last: Stream) -> int:
        """The logits on their way to the host, and the wait that ends the step. Returns events."""
        emit = self.commands.append
        if last.backend == HOST:
            for t in graph.outputs:
                emit(Read(self.placement[HOST][t], t.name))
            return 0
        nbytes = sum(t.nbytes for t in graph.outputs)
        landing = self.buffer("result", Space.PINNED, nbytes, last.backend)
        reads, at = [], 0
        for t in graph.outputs:
            there = Range(landing, at, t.nbytes)
            at += t.nbytes
            emit(Copy(there, self.placement[made_by[t]][t], last, t.name, RESULT))
            reads.append(Read(there, t.name))
        emit(Record(0, last, RESULT))
        emit(Sync(RESULT, event=0))
        self.commands.extend(reads)
        return 1


def _range(placement: dict[Tensor, Range], access: ops.Access) -> Range:
    tensor, offset, nbytes = access
    base = placement[tensor]
    if offset == 0 and nbytes == base.nbytes:
        return base
    return Range(base.buffer, base.offset + offset, nbytes)


def lower(
    graph: Graph,
    splits: Sequence[Split],
    residents: Sequence[dict[Tensor, Range]],
    backends: Sequence[str],
    scratch_bytes: Sequence[Callable[[Node], int]],
    sync: str,
    copy_stream: str,
    begins_early: Callable[[Node], bool] | None = None,
) -> Program:
    """The program of one step.

    residents[b] says where backend b keeps weights and caches; backends[0] is the host, and a last
    one, if any, the device. sync is a mode `choose_sync` returned. begins_early says which of the
    device's nodes have kernels that wait by themselves for the launch in front of them: those are
    launched programmatically; without it (`choose_pdl`) none is. The program ends with the logits
    wait: Record, Sync on that event, Read.
    """
    lowering = _Lowering(RULES[sync], copy_stream, begins_early)
    made_by = {t.storage: s.backend for s in splits for node in s.nodes for t in node.outputs}
    staged = lowering.place(graph, splits, residents, scratch_bytes)
    for number, part in enumerate(splits):
        lowering.bring_inputs(number, part, staged, made_by)
        lowering.launches(number, part)
    end = Stream(splits[-1].backend, COMPUTE_STREAM)
    n_events = lowering.result(graph, made_by, end)
    return Program(
        lowering.commands,
        lowering.buffers,
        lowering.placement,
        [part.backend for part in splits],
        tuple(backends),
        graph.shape,
        sync,
        copy_stream,
        n_events,
    )
