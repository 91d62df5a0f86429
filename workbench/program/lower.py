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
* `S`, the logits wait, ends a step: its results are on the host. Where every step has one it makes
  the first `s` superfluous, and on one stream the second too. With step_wait=outputs a step
  without outputs has none, and the next one's writes and copies meet this one's.

`race_of` says in words which modes are unsafe where; `program/hazards.py` proves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from workbench.config import CopyStream, HostSource, InputOrder, StepWait, Switch, SyncMode
from workbench.errors import DeviceError, UsageError
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
    Wait,
    Write,
)
from workbench.program.split import Split


class Rule(NamedTuple):
    """Where the host waits around the input copies of a split, and what that asks of a backend."""

    wait_each: bool  # for the split's stream, before every copy
    wait_before: bool  # for the split's stream, once before the copies
    blocking: bool  # each copy is waited for at once
    wait_after: bool  # for the copies, once before the launches
    guarded: bool = False  # launches wait, on the device, for an event behind the copies
    packed: bool = False  # inputs that are neighbours in both places are one copy


RULES: dict[str, Rule] = {
    SyncMode.PER_COPY: Rule(True, False, True, False),
    SyncMode.BLOCKING_COPIES: Rule(False, True, True, True),
    SyncMode.COPY_BOUNDARY: Rule(False, True, False, True),
    SyncMode.PACKED: Rule(False, True, False, True, packed=True),
    SyncMode.EVENT_GUARDED: Rule(False, True, False, False, guarded=True),
    SyncMode.WRITE_READ_BOUNDARY: Rule(False, False, False, True),
    SyncMode.IMPLICIT: Rule(False, False, False, False),
}  # from the most waits to the fewest; of as many, from the most copies


class Ordering(NamedTuple):
    """How a program's copies and waits are ordered. sync: a mode, never `auto`."""

    sync: str
    copy_stream: str = CopyStream.OWN
    host_source: str = HostSource.PINNED
    input_order: str = InputOrder.GRAPH
    step_wait: str = StepWait.EVERY

    @property
    def rule(self) -> Rule:
        return RULES[self.sync]


def choose_ordering(
    wanted: Ordering, capabilities: Capabilities, device: str, unsafe: bool = False
) -> Ordering:
    """The ordering to lower with: `wanted` itself, or with sync=auto the mode among those that are
    safe that has the fewest waits.

    unsafe: a mode whose programs race is taken all the same. Raises DeviceError where the backend
    cannot honour the mode or the copy stream, UsageError where the toggles race.
    """
    able = capabilities
    own = not able.synchronous and wanted.copy_stream == CopyStream.OWN
    if own and able.n_streams < 2:
        raise DeviceError(
            f"copy_stream=own needs two streams and the {device} device has {able.n_streams}; use "
            "copy_stream=compute"
        )
    if wanted.sync == SyncMode.AUTO:
        modes = [wanted._replace(sync=mode) for mode in RULES]
        return [o for o in modes if not (_refusal(o, able) or race_of(o, able))][-1]
    if reason := _refusal(wanted, able):
        raise DeviceError(
            f"the {device} device cannot honour sync={wanted.sync}: {reason}; use sync=auto, or "
            "per_copy"
        )
    if not unsafe and (race := race_of(wanted, able)):
        toggles = [f"sync={wanted.sync}", f"copy_stream={wanted.copy_stream}"]
        if wanted.step_wait != StepWait.EVERY:
            toggles.append(f"step_wait={wanted.step_wait}")
        raise UsageError(
            f"toggles {' and '.join(toggles)} race on the {device} device: {race} (`workbench "
            "check` names the commands); use sync=auto, or unsafe to run them all the same"
        )
    return wanted


def _refusal(o: Ordering, able: Capabilities) -> str:
    """Why a backend cannot honour a mode; empty where it can."""
    if not o.rule.blocking and not able.asynchronous_copies:
        return "its copies are not asynchronous"
    if o.rule.guarded and not able.events:
        return "it has no events"
    if o.rule.guarded and not able.one_order:
        return "an event does not stand behind its copies"
    return ""


def race_of(o: Ordering, able: Capabilities) -> str:
    """What races under an ordering on a backend that can honour it; empty where nothing does."""
    rule, train = o.rule, o.step_wait != StepWait.EVERY
    drained = rule.blocking or rule.wait_after  # the host goes on when the copies have landed
    with_launches = able.one_order and o.copy_stream == CopyStream.COMPUTE
    if not able.asynchronous_copies:
        return ""
    if not (drained or rule.guarded or with_launches):
        return "nothing orders a copy before the graph that reads what it brings"
    if train and not drained:
        return "the next step's inputs are written where copies of this one have yet to read"
    if train and not (rule.wait_each or rule.wait_before or with_launches):
        return "copies overwrite what the graph of the step before still reads"
    return ""


def choose_pdl(pdl: str, capabilities: Capabilities, device: str) -> bool:
    """Whether launches may be programmatic. Raises DeviceError where the backend cannot do it."""
    if pdl == Switch.ON and not capabilities.programmatic:
        raise DeviceError(
            f"the {device} device cannot honour pdl=on: it has no programmatic dependent launch "
            "(CUDA, compute capability 9.0 or later); use pdl=off"
        )
    return pdl == Switch.ON


class _Lowering:
    """What the emitting steps share while one program is made."""

    def __init__(
        self,
        ordering: Ordering,
        begins_early: Callable[[Node], bool] | None,
        known: dict[str, Buffer] | None,
        in_stream: bool,
    ):
        self.in_stream = in_stream
        self.ordering, self.rule = ordering, ordering.rule
        self.known = {} if known is None else known
        self.begins_early = begins_early
        own = ordering.copy_stream == CopyStream.OWN
        self.copies_on = COPY_STREAM if own else COMPUTE_STREAM
        self.n_events = 0
        self.commands: list[Command] = []
        self.buffers: list[Buffer] = []
        self.placement: list[dict[Tensor, Range]] = []
        self.scratch: dict[Node, Range] = {}

    def buffer(self, name: str, space: Space, nbytes: int, backend: int) -> Buffer:
        made = self.known.setdefault(name, Buffer(name, space, nbytes, backend))
        made.nbytes = max(made.nbytes, nbytes)
        self.buffers.append(made)
        return made

    def event(self) -> int:
        self.n_events += 1
        return self.n_events - 1

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
        offsets, end = {}, 0
        for t in dict.fromkeys([*wanted, *graph.inputs]):
            offsets[t] = end
            end += -(-t.nbytes // arena.ALIGN) * arena.ALIGN
        staging = self.buffer("staging", space, end, owner)
        staged = {t: Range(staging, at, t.nbytes) for t, at in offsets.items()}
        crossing = {s for part in splits for s in part.inputs} | set(graph.outputs)

        for b, resident in enumerate(residents):
            nodes = [node for part in splits if part.backend == b for node in part.nodes]
            given = [s for part in splits if part.backend == b for s in part.inputs]
            placement = dict(resident)
            if b == HOST:
                placement.update(staged)  # the host computes on staging itself
                given = [s for s in given if s.kind != Kind.INPUT]
            placed = arena.plan(nodes, given, crossing, scratch_bytes[b], staged)
            memory = self.buffer(f"arena.{b}", Space.DEVICE if b != HOST else space, placed.nbytes,
                                 owner)  # fmt: skip
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
        for name, dst, src in self._transfers(part, staged, made_by):
            if rule.wait_each:
                emit(Sync(number, stream=compute))
            copy = Copy(dst, src, copies, name, number)
            emit(copy)
            if rule.blocking:
                emit(Sync(number, stream=copies, blocks=copy))
        if rule.wait_after and part.inputs:
            emit(Sync(number, stream=copies))
        if rule.guarded and part.inputs:
            landed = self.event()
            emit(Record(landed, copies, number))
            emit(Wait(landed, compute, number))

    def _transfers(
        self, part: Split, staged: dict[Tensor, Range], made_by
    ) -> list[tuple[str, Range, Range]]:
        """Name, destination and source of each copy that a split's inputs want, in order."""
        inputs = list(part.inputs)
        if self.ordering.input_order == InputOrder.USER_FIRST:
            inputs.sort(key=lambda s: s.kind != Kind.INPUT)  # stable
        here = self.placement[part.backend]
        found: list[tuple[str, Range, Range]] = []
        for s in inputs:
            source = staged.get(s) or self.placement[made_by[s]][s]
            name, dst, src = s.name, here[s], source
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
            ended = self.event()
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
    in_stream: bool = True,
) -> Program:
    """The program of one step.

    residents[b] says where backend b keeps weights and caches; backends[0] is the host, and a last
    one, if any, the device. ordering is one that `choose_ordering` returned. begins_early says
    which of the device's nodes have kernels that wait by themselves for the launch in front of
    them: those are launched programmatically; without it (`choose_pdl`) none is. buffers: staging,
    arenas and results of earlier steps of the same engine by name, which are this step's too, grown
    where it needs more; new ones are added. in_stream: as the device's `Capabilities` have it. The
    program ends with the logits wait, Record, Sync on that event, Read, unless it has no outputs
    and step_wait wants none; where not in_stream, a Sync on the stream before the logits' copy and
    one behind it take the place of the event.
    """
    lowering = _Lowering(ordering, begins_early, buffers, in_stream)
    made_by = {t.storage: s.backend for s in splits for node in s.nodes for t in node.outputs}
    staged = lowering.place(graph, splits, residents, scratch_bytes)
    for number, part in enumerate(splits):
        lowering.bring_inputs(number, part, staged, made_by)
        lowering.launches(number, part)
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
        lowering.n_events,
    )
