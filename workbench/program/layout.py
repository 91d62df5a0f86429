"""Where a program's tensors lie: in staging memory, in arenas, in rings whose copies take turns.

Weights and caches have their ranges already (`residents`). Every other tensor is laid out here, for
each backend. `program/lower.py` says when commands come, and finds every range in the `Layout`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from workbench.common.sizes import round_up
from workbench.config import HostSource, Lifetimes, Results
from workbench.graph import arena
from workbench.graph.forks import Branches, chained, interleaved
from workbench.graph.ir import ALIGN, Graph, Kind, Node, Tensor
from workbench.program.commands import HOST, Buffer, Range, Space
from workbench.program.split import Split
from workbench.program.sync_modes import Ordering

DIRECT_ROWS = 8  # of results: more are computed by kernels that would wait for the host's memory


class Target(NamedTuple):
    """What lowering asks of a backend.

    scratch_bytes: the bytes of scratch memory that a node wants.
    begins_early: whether a node is launched programmatically, because its kernels wait by
        themselves; None: no node is.
    in_stream: as `Capabilities` has it.
    """

    name: str
    scratch_bytes: Callable[[Node], int]
    begins_early: Callable[[Node], bool] | None = None
    in_stream: bool = True


class Layout(NamedTuple):
    """Where every tensor of one step lies.

    ranges[b]: where backend b finds a tensor.
    staged: ranges of staging memory, for inputs and for what the host computes for devices, in the
        order of the copies.
    scratch: the scratch memory of each node.
    buffers: the memory of this step beside the residents, in the order of first use.
    known: the buffers of all steps, by name.
    landed: ranges of the host's memory that a device writes results to itself.
    host_turn, device_turn, result_turn: which copy of each ring the step takes.
    result_ring: how many copies the ring of results has.
    """

    ranges: list[dict[Tensor, Range]]
    staged: dict[Tensor, Range]
    scratch: dict[Node, Range]
    buffers: list[Buffer]
    known: dict[str, Buffer]
    landed: dict[Tensor, Range]
    host_turn: int
    device_turn: int
    result_turn: int = 0
    result_ring: int = 1

    def buffer(self, name: str, space: Space, nbytes: int, backend: int) -> Buffer:
        """The buffer called `name`, of at least `nbytes`; new where no step before had it."""
        made = self.known.setdefault(name, Buffer(name, space, nbytes, backend))
        made.nbytes = max(made.nbytes, nbytes)
        self.buffers.append(made)
        return made

    def results(self, graph: Graph, backend: int) -> dict[Tensor, Range]:
        """Ranges of page-locked memory for the results of a step that ends on `backend`."""
        nbytes = sum(t.nbytes for t in graph.outputs)
        name = _of_ring("result", self.result_turn, self.result_ring)
        landing = self.buffer(name, Space.PINNED, nbytes, backend)
        landing.lands = len(graph.outputs) == 1
        found, at = {}, 0
        for t in graph.outputs:
            found[t] = Range(landing, at, t.nbytes)
            at += t.nbytes
        return found


def lay_out(
    graph: Graph,
    splits: Sequence[Split],
    residents: Sequence[dict[Tensor, Range]],
    targets: Sequence[Target],
    ordering: Ordering,
    turn: int = 0,
    known: dict[str, Buffer] | None = None,
    lifetimes: str = Lifetimes.VISIBILITY,
) -> Layout:
    """Gives every tensor its range on every backend that uses it.

    residents[b]: where backend b keeps weights and caches.
    targets: the host, then the devices.
    turn: which copy of the rings this step takes, below the ordering's `period`.
    known: the buffers of earlier steps, by name. This step shares them and lets them grow. Buffers
        that only this step has are added.
    lifetimes: when bytes of an arena may be used again.
    """
    layout = Layout(
        [], {}, {}, [], {} if known is None else known, {},
        turn % ordering.host_ring, turn % ordering.device_ring,
        turn % ordering.result_ring, ordering.result_ring,
    )  # fmt: skip
    owner = len(residents) - 1  # the device owns what its copies touch
    pageable = ordering.host_source == HostSource.PAGEABLE or not owner
    space = Space.HOST if pageable else Space.PINNED
    offsets, nbytes = _one_after_the_other([*from_host(splits), *graph.inputs])
    name = _of_ring("staging", layout.host_turn, ordering.host_ring)
    staging = layout.buffer(name, space, nbytes, owner)
    layout.staged.update((t, Range(staging, at, t.nbytes)) for t, at in offsets.items())
    crossing = {s for part in splits for s in part.inputs} | set(graph.outputs)
    last = splits[-1].backend
    if _is_direct(graph, ordering, targets[last]) and last != HOST:
        layout.landed.update(layout.results(graph, last))
    kept: dict[Tensor, Range] = {}
    if ordering.result_ring > 1 and last != HOST and graph.outputs:
        offsets, nbytes = _one_after_the_other(graph.outputs)
        name = _of_ring(f"kept results.{last}", layout.result_turn, ordering.result_ring)
        memory = layout.buffer(name, Space.DEVICE, nbytes, last)
        kept.update((t, Range(memory, at, t.nbytes)) for t, at in offsets.items())
    elsewhere = layout.staged | layout.landed | kept

    for b, resident in enumerate(residents):
        given = [s for part in splits if part.backend == b for s in part.inputs]
        ranges = dict(resident)
        if b == HOST:
            ranges.update(layout.staged)  # the host computes on staging itself
            given = [s for s in given if s.kind != Kind.INPUT]
        elif ordering.device_ring > 1:
            offsets, nbytes = _one_after_the_other(given)
            name = _of_ring(f"inputs.{b}", layout.device_turn, ordering.device_ring)
            memory = layout.buffer(name, Space.DEVICE, nbytes, b)
            ranges.update((t, Range(memory, at, t.nbytes)) for t, at in offsets.items())
            given = []
        if b == last:
            ranges.update(layout.landed | kept)
        nodes, visible = _in_order([part for part in splits if part.backend == b], lifetimes)
        own = arena.layout(nodes, given, crossing, targets[b].scratch_bytes, elsewhere, visible)
        where = space if b == HOST else Space.DEVICE
        memory = layout.buffer(f"arena.{b}", where, own.nbytes, b or owner)
        ranges.update((s, Range(memory, at, s.nbytes)) for s, at in own.offsets.items())
        layout.scratch.update(
            (node, Range(memory, at, nbytes)) for node, (at, nbytes) in own.scratch.items()
        )
        layout.ranges.append(ranges)
    return layout


def _in_order(parts: Sequence[Split], lifetimes: str) -> tuple[Sequence[Node], Branches | None]:
    """What the arena is given of a backend's splits: the nodes in order, and these nodes on their
    streams. None for the latter where the arena is to know of no streams."""
    if not any(part.forked for part in parts):
        return [node for part in parts for node in part.nodes], None
    branches = chained([part.branches for part in parts])
    if lifetimes == Lifetimes.INTERLEAVED:
        return interleaved(branches), None
    return branches.nodes, branches if lifetimes == Lifetimes.VISIBILITY else None


def _is_direct(graph: Graph, ordering: Ordering, last: Target) -> bool:
    """Whether the last kernels write the results to the host's memory themselves."""
    shape = graph.shape
    few = shape.n_outputs > 0 and (shape.draws or shape.n_outputs <= DIRECT_ROWS)
    return ordering.results == Results.DIRECT and few and last.in_stream


def from_host(splits: Sequence[Split]) -> list[Tensor]:
    """What the host gives to devices, in the order of the copies: inputs and its own results."""
    computed = {
        t.storage for part in splits if part.backend == HOST for n in part.nodes for t in n.outputs
    }
    copied = [s for part in splits if part.backend != HOST for s in part.inputs]
    return [s for s in copied if s.kind == Kind.INPUT or s in computed]


def _one_after_the_other(tensors: Sequence[Tensor]) -> tuple[dict[Tensor, int], int]:
    """The aligned offset of each tensor, and the bytes of all of them."""
    offsets, end = dict[Tensor, int](), 0
    for t in dict.fromkeys(tensors):
        offsets[t] = end
        end += round_up(t.nbytes, ALIGN)
    return offsets, end


def _of_ring(name: str, turn: int, depth: int) -> str:
    """The name of a ring's buffer. Each turn has its own, because steps of other shapes need other
    sizes."""
    return name if depth == 1 else f"{name}.{turn}"
