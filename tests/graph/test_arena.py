"""The arena on several streams, against every interleaving that the streams' order leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from data.measure.arena_peaks import least_bytes
from tests.graph.random_branches import random_branches
from tests.profiles import examples
from workbench.common.sizes import round_up
from workbench.graph.arena import ALL, ArenaLayout, FreeList, layout
from workbench.graph.forks import START, Branches, interleaved
from workbench.graph.ir import ALIGN, F32, Kind, Node, Tensor
from workbench.graph.lifetimes import lifetimes
from workbench.graph.lifetimes import overwritten as overwritten_by_clocks
from workbench.graph.ops import make

seeds = st.integers(0, 2**32 - 1).map(Random)


State = tuple[frozenset[int], frozenset[int]]  # nodes that are over, and that are running


def states(branches: Branches) -> Iterator[State]:
    """Every state that some timing reaches: nodes begin and end one at a time."""
    tail: dict[int, int] = {}
    needs: list[set[int]] = []
    for i, (stream, waits) in enumerate(zip(branches.streams, branches.waits, strict=True)):
        needs.append({w for w in (*waits, tail.get(stream, START)) if w != START})
        tail[stream] = i
    todo: list[State] = [(frozenset(), frozenset())]
    seen = set(todo)
    while todo:
        over, running = state = todo.pop()
        yield state
        reached = [(over | {i}, running - {i}) for i in running]
        reached += [
            (over, running | {i})
            for i in range(len(needs))
            if i not in over and i not in running and needs[i] <= over
        ]
        todo += [new for new in reached if new not in seen]
        seen.update(reached)


Use = tuple[str, int, int, frozenset[int]]  # name, offset, bytes, the nodes that touch it


def uses(branches: Branches, made: ArenaLayout, kept: Sequence[Tensor]) -> list[Use]:
    """What lies in the arena; what is read after the last node is touched by a node after it."""
    touched: dict[Tensor, set[int]] = {t: set() for t in made.offsets}
    for i, node in enumerate(branches.nodes):
        for t in (*node.inputs, *node.outputs):
            if t.storage in touched:
                touched[t.storage].add(i)
    for t in kept:
        touched[t.storage].add(-1)
    found = [(t.name, made.offsets[t], t.nbytes, frozenset(some)) for t, some in touched.items()]
    number = {node: i for i, node in enumerate(branches.nodes)}
    for node, (offset, nbytes) in made.scratch.items():
        found.append((f"scratch of {node.name}", offset, nbytes, frozenset({number[node]})))
    return found


def overwritten(
    branches: Branches, made: ArenaLayout, kept: Sequence[Tensor]
) -> set[frozenset[str]]:
    """Pairs that share bytes while both are in use in some state: from the begin of the node that
    writes it to the end of the last that touches it."""
    pairs = [
        (a, b)
        for a, b in combinations(uses(branches, made, kept), 2)
        if a[1] < b[1] + round_up(b[2], ALIGN) and b[1] < a[1] + round_up(a[2], ALIGN)
    ]
    found: set[frozenset[str]] = set()
    for over, running in states(branches) if pairs else ():
        begun = over | running
        for a, b in pairs:
            if all(nodes & begun and not nodes <= over for nodes in (a[3], b[3])):
                found.add(frozenset({a[0], b[0]}))
    return found


def scratch_of(rng: Random):
    wanted = rng.choice((0, 0, 100, 3000))
    return lambda node: wanted if node.name.endswith(("1", "4", "7")) else 0


@settings(max_examples=examples(250), deadline=None)
@given(seeds, st.integers(1, 12), st.integers(1, 4), st.sampled_from(["serial", "in turn", "seen"]))
def test_clocks_find_what_the_oracle_finds(rng, n, n_streams, how):
    """And nothing where the arena is laid out by what each stream sees to be over."""
    branches = random_branches(rng, n, n_streams)
    kept = [branches.nodes[-1].output] if branches.nodes[-1].op == "add" else []
    nodes = interleaved(branches) if how == "in turn" else branches.nodes
    visible = branches if how == "seen" else None
    made = layout(nodes, [], kept, scratch_of(rng), visible=visible)
    found = overwritten_by_clocks(lifetimes(made, branches, kept), branches)
    wanted = overwritten(branches, made, kept)
    assert {frozenset({one.lost.name, one.by.name}) for one in found} == wanted
    assert how != "seen" or not wanted


@settings(max_examples=examples(120), deadline=None)
@given(seeds, st.integers(10, 120), st.integers(1, 8), st.booleans())
def test_in_large_graphs_all_users_before_are_over(rng, n, n_streams, seen):
    """Pair by pair, by what each node knows to be over when it begins."""
    branches = random_branches(rng, n, n_streams)
    inputs = list({t for node in branches.nodes for t in node.inputs if t.kind == Kind.INPUT})
    visible = branches if seen else None
    made = layout(branches.nodes, inputs if seen else [], [], scratch_of(rng), visible=visible)
    assert all(at % ALIGN == 0 and at + t.nbytes <= made.nbytes for t, at in made.offsets.items())
    of_all = lifetimes(made, branches)
    assert len(of_all) == len(made.offsets) + len(made.scratch)
    count, ends, begins = [0] * branches.n_streams, [], branches.clocks()
    for stream in branches.streams:
        count[stream] += 1
        ends.append((stream, count[stream]))
    wanted = set()
    for a, b in combinations(sorted(uses(branches, made, []), key=lambda use: min(use[3])), 2):
        clock = begins[min(b[3])]
        over = not a[3] & b[3] and all(clock[s] >= k for s, k in map(ends.__getitem__, a[3]))
        if a[1] < b[1] + b[2] and b[1] < a[1] + a[2] and not over:
            wanted.add(frozenset({a[0], b[0]}))
    found = overwritten_by_clocks(of_all, branches)
    assert {frozenset({one.lost.name, one.by.name}) for one in found} == wanted
    assert not seen or not wanted


class Merged:
    """The free list as it was before streams: ranges without clocks, neighbours always merged."""

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []
        self.end = 0

    def take(self, nbytes: int) -> int:
        need = round_up(nbytes, ALIGN)
        if not need:
            return 0
        fits = [(size, at) for at, size in self.free if size >= need]
        if fits:
            size, at = min(fits)
            self.free.remove((at, size))
            self.free = sorted([*self.free, *([(at + need, size - need)] if size > need else [])])
            return at
        at = self.end
        if self.free and sum(self.free[-1]) == self.end:
            at, _ = self.free.pop()
        self.end = at + need
        return at

    def give(self, offset: int, nbytes: int) -> None:
        if not nbytes:
            return
        ranges = sorted([*self.free, (offset, round_up(nbytes, ALIGN))])
        self.free = ranges[:1]
        for at, size in ranges[1:]:
            first, before = self.free[-1]
            if first + before == at:
                self.free[-1] = first, before + size
            else:
                self.free.append((at, size))


@settings(max_examples=examples(200))
@given(seeds, st.integers(1, 80), st.booleans())
def test_one_stream_gets_the_offsets_it_always_got(rng, n, with_clocks):
    """Also where every taker sees exactly what was given back so far, as one stream does."""
    free, slow, held = FreeList(), Merged(), list[tuple[int, int]]()
    for now in range(n):
        if held and rng.random() < 0.5:
            offset, nbytes = held.pop(rng.randrange(len(held)))
            free.give(offset, nbytes, (now,) if with_clocks else ALL)
            slow.give(offset, nbytes)
        else:
            nbytes = rng.choice((0, 1, 256, 300, 1000, 5000))
            held.append((free.take(nbytes, (now,) if with_clocks else ALL), nbytes))
            assert held[-1][0] == slow.take(nbytes)
    assert free.end == slow.end


def test_a_chain_needs_two_ranges_whatever_its_length():
    x = t = Tensor("x", F32, (1, ALIGN // 4), Kind.INPUT)
    nodes: list[Node] = []
    for i in range(10):
        nodes.append(make("add", f"t{i}", t, t))
        t = nodes[-1].output
    assert layout(nodes, [x], [t], lambda node: 0).nbytes == 3 * ALIGN  # the input keeps its own


@settings(max_examples=examples(60), deadline=None)
@given(seeds, st.integers(1, 9), st.integers(1, 4))
def test_least_bytes_are_the_heaviest_set_alive_together(rng, n, n_streams):
    """Against every set of ranges. Two are alive together that are overwritten where all ranges
    begin at 0."""
    branches = random_branches(rng, n, n_streams)
    made = layout(branches.nodes, [], [], scratch_of(rng), visible=branches)
    scratch = {node: (0, nbytes) for node, (_, nbytes) in made.scratch.items()}
    on_top = ArenaLayout(dict.fromkeys(made.offsets, 0), scratch, 0)
    together = overwritten(branches, on_top, [])
    ranges = {name: round_up(nbytes, ALIGN) for name, _, nbytes, _ in uses(branches, made, [])}
    heaviest = max(
        (
            sum(map(ranges.__getitem__, some))
            for k in range(1, len(ranges) + 1)
            for some in combinations(ranges, k)
            if all(frozenset(pair) in together for pair in combinations(some, 2))
        ),
        default=0,
    )
    assert least_bytes(lifetimes(made, branches), branches) == heaviest <= made.nbytes
