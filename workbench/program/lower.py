"""ROOM #17795: lowers a graph to a program, ordering copies, waits and launches by sync mode.

A sync mode is not an `if` in a loop: it is a row of `RULES` (`program/sync_modes.py`), which says
where Sync commands stand around the input copies of a device split. Each Sync costs a wait of the
host. What it protects, with copies on their own stream:

    host     W W W . s . C C C . s . g g g g ........ S R      W write staging   C copy
    copies           |   c c c-'   |                            g launch          R read
    compute  ...g g -'             '-> g g g g ---> l           s S wait          l logits

* The first `s` keeps a copy from overwriting an input that the step before still reads.
* The second `s` keeps a launch from reading an input before its copy has landed. It also keeps the
  host from writing staging memory that a copy has yet to read.
* `S`, the logits wait, ends a step: the results are on the host. Where every step has one, the
  first `s` is superfluous, and on one stream the second, too. With step_wait=outputs a step without
  outputs has no `S`, so the next step's writes and copies meet its work.
"""

from collections.abc import Sequence

from workbench.common.sizes import round_up
from workbench.config import CopyStream, InputOrder, StepWait
from workbench.graph import forks, ops
from workbench.graph.ir import ALIGN, Graph, Kind, Tensor
from workbench.program import commands as c
from workbench.program import events
from workbench.program.layout import Layout, Target, from_host
from workbench.program.split import Split
from workbench.program.sync_modes import Ordering


class _Emitter:
    """The commands of one program while they are made, and what their makers share.

    last_copied: of each device, the last split that copies from staging memory. (A device's copies
        run in order.)
    overwritten: whether a later copy may overwrite a device's inputs while neither the host nor the
        device's own order holds that copy back.
    """

    def __init__(
        self,
        splits: Sequence[Split],
        layout: Layout,
        ordering: Ordering,
        targets: Sequence[Target],
    ):
        self.layout, self.ranges, self.targets = layout, layout.ranges, targets
        self.ordering, self.rule = ordering, ordering.rule
        own = ordering.copy_stream == CopyStream.OWN
        self.copies_on = c.COPY_STREAM if own else c.COMPUTE_STREAM
        self.commands: list[c.Command] = []
        self.made_by = {
            t.storage: part.backend for part in splits for node in part.nodes for t in node.outputs
        }
        given = set(from_host(splits))
        taking = [(i, part) for i, part in enumerate(splits) if part.backend != c.HOST]
        self.last_copied = {part.backend: i for i, part in taking if given & set(part.inputs)}
        self.overwritten = ordering.device_ring > 1 or len(targets) > c.DEVICE + 1

    def write_inputs(self, graph: Graph) -> None:
        """The host's writes. In a ring, the host first waits until no copy still reads this turn's
        staging memory."""
        if self.ordering.host_ring > 1:
            for device in range(1, len(self.targets)):
                event = events.staged(self.targets[device].name, self.layout.host_turn)
                self.commands.append(c.Sync(c.RESULT, event=event))
        for t in graph.inputs:
            self.commands.append(c.Write(self.layout.staged[t], t.name))

    def bring_inputs(self, number: int, part: Split) -> None:
        """The copies of a split's inputs, with the waits its rule puts around them."""
        if part.backend == c.HOST:
            self._bring_to_host(number, part)
            return
        rule, emit, staged = self.rule, self.commands.append, self.layout.staged
        compute = c.Stream(part.backend, c.COMPUTE_STREAM)
        copies = c.Stream(part.backend, self.copies_on)
        copied = self._from_host(part)
        theirs_first = part.inputs and part.inputs[0] not in staged
        if theirs_first and self.ordering.input_order == InputOrder.GRAPH:
            self._from_devices(number, part)
        if rule.wait_before and copied:
            emit(self._wait_for_graph(number, compute))
        for name, dst, src in copied:
            if rule.wait_each:
                emit(self._wait_for_graph(number, compute))
            copy = c.Copy(dst, src, copies, name, number)
            emit(copy)
            if rule.blocking:
                emit(c.Sync(number, stream=copies, blocks=copy))
        if rule.wait_after and copied:
            emit(c.Sync(number, stream=copies))
        if rule.guarded and copied:
            landed = events.landed(self.targets[part.backend].name, number)
            emit(c.Record(landed, copies, number))
            emit(c.Wait(landed, compute, number))
        if self.ordering.host_ring > 1 and number == self.last_copied.get(part.backend):
            self._staged(copies, number)
        if not theirs_first or self.ordering.input_order == InputOrder.USER_FIRST:
            self._from_devices(number, part)

    def _staged(self, copies: c.Stream, number: int) -> None:
        """Records an event after a device's last copy out of this step's staging memory. The event
        is named by device, not by split, because a step with other splits may wait for it."""
        event = events.staged(self.targets[copies.backend].name, self.layout.host_turn)
        self.commands.append(c.Record(event, copies, number))

    def take_nothing(self, number: int) -> None:
        """Records the event of `_staged` for devices that took nothing from a ring."""
        for device in range(1, len(self.ranges)):
            if self.ordering.host_ring > 1 and device not in self.last_copied:
                self._staged(c.Stream(device, self.copies_on), number)

    def _from_devices(self, number: int, part: Split) -> None:
        """Copies from other devices, each on the stream of the device that computed the tensor.

        The copying stream first waits for the latest graph that read the destination. That graph
        may have another shape, which was given nothing by other devices. The reading device's
        stream then waits for the copies. The host does not wait, so a device may be one step ahead
        of the next.

        In llama.cpp the reading device's stream waits for the last reader, and the copy rides the
        other stream: a race (case reused_copy in `data/measure/races_of_record.py`). Every sync
        mode here excludes it.
        """
        emit, here, made_by = self.commands.append, self.ranges[part.backend], self.made_by
        theirs = [s for s in part.inputs if s not in self.layout.staged]
        for device in dict.fromkeys(made_by[s] for s in theirs):
            stream = c.Stream(device, c.COMPUTE_STREAM)
            emit(c.Wait(self._read(part.backend), stream, number))
            for s in theirs:
                if made_by[s] == device:
                    emit(c.Copy(here[s], self.ranges[device][s], stream, s.name, number))
            landed = events.crossed(self.targets[device].name, number)
            emit(c.Record(landed, stream, number))
            emit(c.Wait(landed, c.Stream(part.backend, c.COMPUTE_STREAM), number))

    def _wait_for_graph(self, number: int, compute: c.Stream) -> c.Sync:
        """The host's wait before copies: for everything queued, or, in a ring, for the graph that
        read this turn's inputs."""
        if self.ordering.device_ring == 1:
            return c.Sync(number, stream=compute)
        return c.Sync(number, event=self._read(compute.backend))

    def _read(self, backend: int) -> str:
        """The event recorded after the latest graph on `backend` that read this turn's inputs."""
        return events.read(self.targets[backend].name, self.layout.device_turn)

    def _from_host(self, part: Split) -> list[tuple[str, c.Range, c.Range]]:
        """The name, destination and source of each copy from staging memory, in order."""
        staged = self.layout.staged
        inputs = [s for s in part.inputs if s in staged]
        if self.ordering.input_order == InputOrder.USER_FIRST:
            inputs.sort(key=lambda s: s.kind != Kind.INPUT)  # stable
        here = self.ranges[part.backend]
        found: list[tuple[str, c.Range, c.Range]] = []
        for s in inputs:
            name, dst, src = s.name, here[s], staged[s]
            if self.rule.packed and found and (both := _joined(found[-1], dst, src)):
                found[-1] = both
            else:
                found.append((name, dst, src))
        return found

    def _bring_to_host(self, number: int, part: Split) -> None:
        """A host split computes at once: its inputs are copied from devices and waited for."""
        waited: set[c.Stream] = set()
        for s in part.inputs:
            if s.kind == Kind.INPUT:
                continue
            device = self.made_by[s]
            stream = c.Stream(device, c.COMPUTE_STREAM)
            if not self.targets[device].in_stream and stream not in waited:
                waited.add(stream)
                self.commands.append(c.Sync(number, stream=stream))
            copy = c.Copy(self.ranges[c.HOST][s], self.ranges[device][s], stream, s.name, number)
            self.commands.append(copy)
            self.commands.append(c.Sync(number, stream=stream, blocks=copy))

    def launches(self, number: int, part: Split) -> None:
        """The split's work in graph order, on the streams of its branches. At the split's end all
        streams are joined: what then is queued on the first stream comes after all branches."""
        nodes, streams, waits, joins = part.branches
        ids = [c.Stream(part.backend, c.compute_stream(n)) for n in range(max(streams) + 1)]
        ranges, scratch, emit = self.ranges[part.backend], self.layout.scratch, self.commands.append
        early, name = self.targets[part.backend].begins_early, self.targets[part.backend].name
        waited = {w for some in waits for w in some}.union(joins)

        def wait(others: Sequence[int], stream: c.Stream) -> None:
            for i in others:
                begun = i == forks.START
                event = events.begun(name, number) if begun else events.branch(name, number, i)
                emit(c.Wait(event, stream, number, forks=True))

        if forks.START in waited:
            emit(c.Record(events.begun(name, number), ids[0], number, forks=True))
        for i, node in enumerate(nodes):
            stream = ids[streams[i]]
            wait(waits[i], stream)
            temporary = scratch.get(node)
            own = () if temporary is None else (temporary,)
            reads = tuple([_range(ranges, a) for a in ops.reads(node)]) + own
            writes = tuple([_range(ranges, a) for a in ops.writes(node)]) + own
            programmatic = early is not None and early(node) and not waits[i]
            emit(c.Launch(node, stream, reads, writes, temporary, number, programmatic))
            if i in waited:
                emit(c.Record(events.branch(name, number, i), stream, number, forks=True))
        wait(joins, ids[0])
        if part.backend != c.HOST and self.overwritten:
            emit(c.Record(self._read(part.backend), ids[0], number))

    def result(self, graph: Graph, splits: Sequence[Split]) -> None:
        """The copy of the logits to the host, and the wait that ends the step."""
        emit, last = self.commands.append, c.Stream(splits[-1].backend, c.COMPUTE_STREAM)
        if not graph.shape.n_outputs and self.ordering.step_wait == StepWait.OUTPUTS:
            return
        self._join(splits, last)
        if last.backend == c.HOST:
            for t in graph.outputs:
                emit(c.Read(self.ranges[c.HOST][t], t.name))
            return
        in_stream = self.targets[last.backend].in_stream
        if not in_stream:
            emit(c.Sync(c.RESULT, stream=last))
        overlaps = self.ordering.result_ring > 1  # the next step may run before the results arrive
        brings = c.Stream(last.backend, c.COPY_STREAM) if overlaps else last
        there = self.layout.landed
        if not there:
            there = self.layout.results(graph, last.backend)
            if overlaps:
                computed = events.computed(self.targets[last.backend].name)
                emit(c.Record(computed, last, c.RESULT))
                emit(c.Wait(computed, brings, c.RESULT))
            for t, landing in there.items():
                emit(c.Copy(landing, self.ranges[self.made_by[t]][t], brings, t.name, c.RESULT))
        reads = [c.Read(landing, t.name) for t, landing in there.items()]
        if overlaps:
            ended = events.arrived(self.targets[last.backend].name, self.layout.result_turn)
            emit(c.Record(ended, brings, c.RESULT))
            emit(c.Sync(c.RESULT, event=ended))
        elif in_stream:
            ended = events.ended(self.targets[last.backend].name)
            emit(c.Record(ended, last, c.RESULT))
            emit(c.Sync(c.RESULT, event=ended))
        else:
            emit(c.Sync(c.RESULT, stream=last))
        self.commands.extend(reads)

    def _join(self, splits: Sequence[Split], last: c.Stream) -> None:
        """Lets the wait that ends the step wait for other devices too. It does already for a device
        whose latest split gives something to a later split. (Shifting a cache gives nothing.)"""
        for device in {s.backend: None for s in splits if s.backend not in (c.HOST, last.backend)}:
            latest = max(i for i, s in enumerate(splits) if s.backend == device)
            taken = {s for part in splits[latest + 1 :] for s in part.inputs}
            if any(self.made_by.get(s) == device for s in taken):
                continue
            stream = c.Stream(device, c.COMPUTE_STREAM)
            ended = events.ended(self.targets[device].name)
            self.commands.append(c.Record(ended, stream, c.RESULT))
            if last.backend == c.HOST:
                self.commands.append(c.Sync(c.RESULT, event=ended))
            else:
                self.commands.append(c.Wait(ended, last, c.RESULT))


def _joined(
    before: tuple[str, c.Range, c.Range], dst: c.Range, src: c.Range
) -> tuple[str, c.Range, c.Range] | None:
    """Two copies as one, where the ranges of the second begin at the aligned ends of the first's;
    else None."""
    _, to, from_ = before
    for first, second in ((to, dst), (from_, src)):
        end = first.offset + round_up(first.nbytes, ALIGN)
        if first.buffer is not second.buffer or second.offset != end:
            return None
    nbytes = dst.offset + dst.nbytes - to.offset
    return "inputs", to._replace(nbytes=nbytes), from_._replace(nbytes=nbytes)


def _range(ranges: dict[Tensor, c.Range], access: ops.Access) -> c.Range:
    tensor, offset, nbytes = access
    base = ranges[tensor]
    if offset == 0 and nbytes == base.nbytes:
        return base
    return c.Range(base.buffer, base.offset + offset, nbytes)


def lower(
    graph: Graph,
    splits: Sequence[Split],
    layout: Layout,
    targets: Sequence[Target],
    ordering: Ordering,
) -> c.Program:
    """The program of one step, whose tensors lie as `layout` says.

    targets: as `lay_out` was given them.
    ordering: with nothing at `auto`.

    The program ends with the logits wait (Record, Sync on that event, Read), unless
    step_wait=outputs and it has no outputs. Where copies are not in stream order, two Syncs on the
    stream replace the event: one before the copy of the logits, one after it. When the wait is
    over, every device is done.
    """
    emitter = _Emitter(splits, layout, ordering, targets)
    emitter.write_inputs(graph)
    for number, part in enumerate(splits):
        emitter.bring_inputs(number, part)
        emitter.launches(number, part)
    emitter.take_nothing(len(splits) - 1)
    emitter.result(graph, splits)
    return c.Program(
        emitter.commands,
        layout.buffers,
        layout.ranges,
        [part.backend for part in splits],
        tuple(target.name for target in targets),
        graph.shape,
        ordering.sync,
        ordering.copy_stream,
        graph.inputs,
    )
