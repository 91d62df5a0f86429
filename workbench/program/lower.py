"""ROOM #17795: lowers a graph to a program, ordering copies, waits and launches by sync mode.

A sync mode is not an `if` in a loop: it is a row of `RULES` (`program/sync_modes.py`), which says
where Sync commands go around the input copies of a device split. What the rows cost is one wait of
the host each; what they protect, with copies on their own stream:

    host     W W W . s . C C C . s . g g g g ........ S R      W write staging   C copy
    copies           |   c c c-'   |                            g launch          R read
    compute  ...g g -'             '-> g g g g ---> l           s S wait          l logits

* the first `s` keeps a copy from overwriting an input the step before still reads,
* the second keeps a launch from reading an input whose copy has not landed, and the host from
  rewriting staging memory a copy has yet to read,
* `S`, the logits wait, ends a step: its results are on the host. Where every step has one it makes
  the first `s` superfluous, and on one stream the second too. With step_wait=outputs a step
  without outputs has none, and the next one's writes and copies meet this one's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.config import (
    CopyStream,
    HostSource,
    InputOrder,
    StepWait,
)
from workbench.graph import arena, ops
from workbench.graph.ir import Graph, Kind, Node, Tensor
from workbench.program import events
from workbench.program.commands import (
    COMPUTE_STREAM,
    COPY_STREAM,
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
from workbench.program.split import Split
from workbench.program.sync_modes import Ordering


def _of_place(name: str, place: int, places: int) -> str:
    """A buffer for each place, since those of other shapes are as large as they need."""
    return name if places == 1 else f"{name}.{place}"


class _Lowering:
    """What the emitting steps share while one program is made."""

    def __init__(
        self,
        ordering: Ordering,
        begins_early: Callable[[Node], bool] | None,
        known: dict[str, Buffer] | None,
        turn: int,
        in_stream: bool,
        names: Sequence[str],
    ):
        self.in_stream, self.names = in_stream, names
        self.ordering, self.rule = ordering, ordering.rule
        self.host_place = turn % ordering.host_places
        self.device_place = turn % ordering.device_places
        self.known = {} if known is None else known
        self.begins_early = begins_early
        own = ordering.copy_stream == CopyStream.OWN
        self.copies_on = COPY_STREAM if own else COMPUTE_STREAM
        self.commands: list[Command] = []
        self.buffers: list[Buffer] = []
        self.placement: list[dict[Tensor, Range]] = []
        self.scratch: dict[Node, Range] = {}

    def buffer(self, name: str, space: Space, nbytes: int, backend: int) -> Buffer:
        made = self.known.setdefault(name, Buffer(name, space, nbytes, backend))
        made.nbytes = max(made.nbytes, nbytes)
        self.buffers.append(made)
        return made

    def place(
        self,
        graph: Graph,
        splits: Sequence[Split],
        residents: Sequence[dict[Tensor, Range]],
        scratch_bytes: Sequence[Callable[[Node], int]],
    ) -> dict[Tensor, Range]:
        """Gives every tensor its range on every backend that uses it; returns those in staging
        memory: the inputs, and what the host computes for others, in the order of their copies."""
        owner = len(residents) - 1  # the device owns what its copies touch
        pageable = self.ordering.host_source == HostSource.PAGEABLE or not owner
        space = Space.HOST if pageable else Space.PINNED
        copied = [s for part in splits if part.backend != HOST for s in part.inputs]
        on_host = {t.storage for p in splits if p.backend == HOST for n in p.nodes
                   for t in n.outputs}  # fmt: skip
        wanted = [s for s in copied if s.kind == Kind.INPUT or s in on_host]
        taking = [(i, part) for i, part in enumerate(splits) if part.backend != HOST]
        self.last_copied = {
            part.backend: i for i, part in taking if any(s in wanted for s in part.inputs)
        }  # of each device: its copies run in order
        several = self.ordering.device_places > 1
        self.read_again = {
            i for i, part in taking if part.inputs and (several or set(part.inputs) - set(wanted))
        }
        offsets, end = {}, 0
        for t in dict.fromkeys([*wanted, *graph.inputs]):
            offsets[t] = end
            end += -(-t.nbytes // arena.ALIGN) * arena.ALIGN
        name = _of_place("staging", self.host_place, self.ordering.host_places)
        staging = self.buffer(name, space, end, owner)
        staged = {t: Range(staging, at, t.nbytes) for t, at in offsets.items()}
        crossing = {s for part in splits for s in part.inputs} | set(graph.outputs)

        for b, resident in enumerate(residents):
            nodes = [node for part in splits if part.backend == b for node in part.nodes]
            given = [s for part in splits if part.backend == b for s in part.inputs]
            placement = dict(resident)
            if b == HOST:
                placement.update(staged)  # the host computes on staging itself
                given = [s for s in given if s.kind != Kind.INPUT]
            elif self.ordering.device_places > 1:
                placement |= self._apart(b, given)
                given = []
            placed = arena.plan(nodes, given, crossing, scratch_bytes[b], staged)
            memory = self.buffer(
                f"arena.{b}", space if b == HOST else Space.DEVICE, placed.nbytes, b or owner
            )
            for s, at in placed.offsets.items():
                placement[s] = Range(memory, at, s.nbytes)
            for node, (at, nbytes) in placed.scratch.items():
                self.scratch[node] = Range(memory, at, nbytes)
            self.placement.append(placement)
        if self.ordering.host_places > 1 and owner:
            for device in range(1, owner + 1):
                copied_from = events.staged(self.names[device], self.host_place)
                self.commands.append(Sync(RESULT, event=copied_from))
        for t in graph.inputs:
            self.commands.append(Write(staged[t], t.name))
        return staged

    def _apart(self, b: int, given: Sequence[Tensor]) -> dict[Tensor, Range]:
        """Places for the inputs of a device's splits in memory of this step's turn."""
        offsets, end = {}, 0
        for t in given:
            offsets[t] = end
            end += -(-t.nbytes // arena.ALIGN) * arena.ALIGN
        name = _of_place(f"inputs.{b}", self.device_place, self.ordering.device_places)
        memory = self.buffer(name, Space.DEVICE, end, b)
        return {t: Range(memory, at, t.nbytes) for t, at in offsets.items()}

    def bring_inputs(self, number: int, part: Split, staged: dict[Tensor, Range], made_by) -> None:
        """The copies of a split's inputs, with the waits its rule puts around them."""
        if part.backend == HOST:
            self._bring_to_host(number, part, made_by)
            return
        rule, emit = self.rule, self.commands.append
        compute = Stream(part.backend, COMPUTE_STREAM)
        copies = Stream(part.backend, self.copies_on)
        from_host = self._from_host(part, staged)
        theirs_first = part.inputs and part.inputs[0] not in staged
        if theirs_first and self.ordering.input_order == InputOrder.GRAPH:
            self._from_devices(number, part, staged, made_by)
        if rule.wait_before and from_host:
            emit(self._wait_for_graph(number, compute))
        for name, dst, src in from_host:
            if rule.wait_each:
                emit(self._wait_for_graph(number, compute))
            copy = Copy(dst, src, copies, name, number)
            emit(copy)
            if rule.blocking:
                emit(Sync(number, stream=copies, blocks=copy))
        if rule.wait_after and from_host:
            emit(Sync(number, stream=copies))
        if rule.guarded and from_host:
            landed = events.landed(self.names[part.backend], number)
            emit(Record(landed, copies, number))
            emit(Wait(landed, compute, number))
        if self.ordering.host_places > 1 and number == self.last_copied.get(part.backend):
            self._staged(copies, number)
        if not theirs_first or self.ordering.input_order == InputOrder.USER_FIRST:
            self._from_devices(number, part, staged, made_by)

    def _staged(self, copies: Stream, number: int) -> None:
        """The point behind a device's copies from this step's staging memory. It has the device's
        number, not a split's: a step of another shape, with other splits, waits for it."""
        event = events.staged(self.names[copies.backend], self.host_place)
        self.commands.append(Record(event, copies, number))

    def take_nothing(self, number: int) -> None:
        """Where staging memory is a ring: a point, too, for devices that took nothing from it."""
        for device in range(1, len(self.placement)):
            if self.ordering.host_places > 1 and device not in self.last_copied:
                self._staged(Stream(device, self.copies_on), number)

    def _from_devices(self, number: int, part: Split, staged, made_by) -> None:
        """Copies from other devices, on the stream of the one that computed them, which waits for
        the graph that read their place last; and the wait of this one's stream for them. No wait of
        the host orders devices: so a device is at one step while the next is at the one before.

        llama.cpp has the reading device's stream wait for its last reader while the copy rides the
        other's (`races_of_record.py`, reused_copy); here it is repaired in every sync mode."""
        emit, here = self.commands.append, self.placement[part.backend]
        theirs = [s for s in part.inputs if s not in staged]
        for device in dict.fromkeys(made_by[s] for s in theirs):
            stream = Stream(device, COMPUTE_STREAM)
            emit(Wait(self._read(part.backend, number), stream, number))
            for s in theirs:
                if made_by[s] == device:
                    emit(Copy(here[s], self.placement[device][s], stream, s.name, number))
            landed = events.crossed(self.names[device], number)
            emit(Record(landed, stream, number))
            emit(Wait(landed, Stream(part.backend, COMPUTE_STREAM), number))

    def _wait_for_graph(self, number: int, compute: Stream) -> Sync:
        """The wait before copies: for all that is queued, or where inputs have several places for
        the graph that read this one."""
        if self.ordering.device_places == 1:
            return Sync(number, stream=compute)
        return Sync(number, event=self._read(compute.backend, number))

    def _read(self, backend: int, number: int) -> str:
        """The event behind the graph of a split on `backend` that read this step's places."""
        return events.read(self.names[backend], number, self.device_place)

    def _from_host(self, part: Split, staged) -> list[tuple[str, Range, Range]]:
        """Name, destination and source of each copy from staging memory, in order."""
        inputs = [s for s in part.inputs if s in staged]
        if self.ordering.input_order == InputOrder.USER_FIRST:
            inputs.sort(key=lambda s: s.kind != Kind.INPUT)  # stable
        here = self.placement[part.backend]
        found: list[tuple[str, Range, Range]] = []
        for s in inputs:
            name, dst, src = s.name, here[s], staged[s]
            if self.rule.packed and found and (both := _joined(found[-1], dst, src)):
                found[-1] = both
            else:
                found.append((name, dst, src))
        return found

    def _bring_to_host(self, number: int, part: Split, made_by) -> None:
        """A host split computes at once: what it needs from a device is copied and waited for."""
        waited: set[Stream] = set()
        for s in part.inputs:
            if s.kind == Kind.INPUT:
                continue
            stream = Stream(made_by[s], COMPUTE_STREAM)
            if not self.in_stream and stream not in waited:
                waited.add(stream)
                self.commands.append(Sync(number, stream=stream))
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
        if number in self.read_again:
            emit(Record(self._read(part.backend, number), stream, number))

    def result(self, graph: Graph, made_by: dict[Tensor, int], last: Stream) -> None:
        """The logits on their way to the host, and the wait that ends the step."""
        emit = self.commands.append
        if last.backend == HOST:
            for t in graph.outputs:
                emit(Read(self.placement[HOST][t], t.name))
            return
        if not graph.shape.n_outputs and self.ordering.step_wait == StepWait.OUTPUTS:
            return
        nbytes = sum(t.nbytes for t in graph.outputs)
        landing = self.buffer("result", Space.PINNED, nbytes, last.backend)
        reads, at = [], 0
        if not self.in_stream:
            emit(Sync(RESULT, stream=last))
        for t in graph.outputs:
            there = Range(landing, at, t.nbytes)
            at += t.nbytes
            emit(Copy(there, self.placement[made_by[t]][t], last, t.name, RESULT))
            reads.append(Read(there, t.name))
        if self.in_stream:
            ended = events.ended(self.names[last.backend])
            emit(Record(ended, last, RESULT))
            emit(Sync(RESULT, event=ended))
        else:
            emit(Sync(RESULT, stream=last))
        self.commands.extend(reads)


def _joined(
    before: tuple[str, Range, Range], dst: Range, src: Range
) -> tuple[str, Range, Range] | None:
    """A copy and the next one as one, where both ranges go on where the first ones end but for
    alignment; None where they do not."""
    _, to, from_ = before
    for first, second in ((to, dst), (from_, src)):
        end = first.offset + -(-first.nbytes // arena.ALIGN) * arena.ALIGN
        if first.buffer is not second.buffer or second.offset != end:
            return None
    nbytes = dst.offset + dst.nbytes - to.offset
    return PACKED_NAME, to._replace(nbytes=nbytes), from_._replace(nbytes=nbytes)


PACKED_NAME = "inputs"  # of a copy that brings several


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
    ordering: Ordering,
    begins_early: Callable[[Node], bool] | None = None,
    buffers: dict[str, Buffer] | None = None,
    turn: int = 0,
    in_stream: bool = True,
) -> Program:
    """The program of one step.

    residents[b] says where backend b keeps weights and caches; backends[0] is the host, and a last
    one, if any, the device. ordering is one that `choose_ordering` returned. begins_early says
    which of the device's nodes have kernels that wait by themselves for the launch in front of
    them: those are launched programmatically; without it (`choose_pdl`) none is. buffers: staging,
    arenas and results of earlier steps of the same engine by name, which are this step's too, grown
    where it needs more; new ones are added. turn: of the ordering's `turns`, which the steps of an
    engine take one after the other. in_stream: as the device's `Capabilities` have it. The program
    ends with the logits wait, Record, Sync on that event, Read, unless it has no outputs and
    step_wait wants none; where not in_stream, a Sync on the stream before the logits' copy and one
    behind it take the place of the event.
    """
    lowering = _Lowering(ordering, begins_early, buffers, turn, in_stream, backends)
    made_by = {t.storage: s.backend for s in splits for node in s.nodes for t in node.outputs}
    staged = lowering.place(graph, splits, residents, scratch_bytes)
    for number, part in enumerate(splits):
        lowering.bring_inputs(number, part, staged, made_by)
        lowering.launches(number, part)
    lowering.take_nothing(len(splits) - 1)
    end = Stream(splits[-1].backend, COMPUTE_STREAM)
    lowering.result(graph, made_by, end)
    return Program(
        lowering.commands,
        lowering.buffers,
        lowering.placement,
        [part.backend for part in splits],
        tuple(backends),
        graph.shape,
        ordering.sync,
        ordering.copy_stream,
    )
