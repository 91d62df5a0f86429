"""Branches of random graphs against the brute-force closure of their order."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.random_branches import closure, random_branches, random_nodes
from tests.profiles import examples
from workbench.config import Fork
from workbench.graph.forks import (
    START,
    Branches,
    Costs,
    branch_of,
    chained,
    dependencies,
    estimate_us,
    fork,
    interleaved,
    ordered,
)
from workbench.graph.ir import F32, Kind, Node, Tensor
from workbench.graph.ops import make

seeds = st.integers(0, 2**32 - 1).map(Random)
sizes = st.integers(0, 40)
streams = st.integers(1, 8)


def needed_orders(branches: Branches) -> list[set[int]]:
    """What must be in the closure: all dependencies, START in front of everything, and all nodes in
    front of the end."""
    before = [{*some, START} for some in dependencies(branches.nodes)]
    return [*before, set(range(len(branches.nodes)))]


def missing(branches: Branches, without: tuple[int, int] | None = None) -> bool:
    return any(
        not need <= have
        for need, have in zip(needed_orders(branches), closure(branches, without), strict=True)
    )


def forked(rng: Random, n: int, n_streams: int) -> list[Branches]:
    nodes = random_nodes(rng, n)
    by_rule = [fork(nodes, n_streams, rule) for rule in Fork]
    return [*by_rule, random_branches(rng, n, n_streams)]


@settings(max_examples=examples(150))
@given(seeds, sizes, streams)
def test_every_order_that_is_needed_is_there(rng, n, n_streams):
    for branches in forked(rng, n, n_streams):
        assert branches.n_streams <= n_streams
        assert not missing(branches)


@settings(max_examples=examples(100))
@given(seeds, sizes, streams)
def test_no_event_could_be_left_out(rng, n, n_streams):
    for branches in forked(rng, n, n_streams):
        every = [(i, k) for i, waits in enumerate(branches.waits) for k in range(len(waits))]
        every += [(-1, k) for k in range(len(branches.joins))]
        for one in every:
            assert missing(branches, without=one), one


@settings(max_examples=examples(150))
@given(seeds, sizes, streams)
def test_clocks_are_the_closure(rng, n, n_streams):
    for branches in forked(rng, n, n_streams):
        place: dict[int, int] = {}
        count = [0] * branches.n_streams
        for i, stream in enumerate(branches.streams):
            place[i] = count[stream]
            count[stream] += 1
        for clock, over in zip(branches.clocks(), closure(branches), strict=False):
            known = {i for i in place if place[i] < clock[branches.streams[i]]}
            assert known == over - {START}


@settings(max_examples=examples(100))
@given(seeds, sizes, streams)
def test_side_by_side_are_all_pairs_without_an_order(rng, n, n_streams):
    for branches in forked(rng, n, n_streams):
        over = closure(branches)
        number = {node: i for i, node in enumerate(branches.nodes)}
        found = {(number[a], number[b]) for a, b in branches.side_by_side()}
        assert found == {(i, j) for j in range(n) for i in range(j) if i not in over[j]}


@settings(max_examples=examples(100))
@given(seeds, sizes, streams)
def test_other_orders_keep_every_node_behind_what_it_needs(rng, n, n_streams):
    for branches in forked(rng, n, n_streams):
        numbers = branch_of(branches)
        for order in (interleaved(branches), sorted(branches.nodes, key=numbers.__getitem__)):
            assert sorted(map(id, order)) == sorted(map(id, branches.nodes))
            at = {node: i for i, node in enumerate(order)}
            for node, before in zip(branches.nodes, dependencies(branches.nodes), strict=True):
                assert all(at[branches.nodes[i]] < at[node] for i in before)


@settings(max_examples=examples(100))
@given(seeds, sizes, streams)
def test_nodes_of_one_branch_are_neighbours_with_one_begin_and_one_end(rng, n, n_streams):
    for branches in forked(rng, n, n_streams):
        numbers, waited = branch_of(branches), {i for w in branches.waits for i in w}
        tail: dict[int, int] = {}
        for i, (node, stream) in enumerate(zip(branches.nodes, branches.streams, strict=True)):
            if stream in tail and numbers[branches.nodes[tail[stream]]] == numbers[node]:
                assert all(other < numbers[node] for other in branches.waits[i])
                assert tail[stream] not in waited
            else:
                assert numbers[node] == i
            tail[stream] = i


@settings(max_examples=examples(100))
@given(seeds, st.lists(st.integers(1, 12), min_size=2, max_size=4), streams)
def test_a_split_begins_behind_all_of_the_one_before(rng, lengths, n_streams):
    several = [random_branches(rng, n, n_streams) for n in lengths]
    whole = chained(several)
    assert [node for one in several for node in one.nodes] == list(whole.nodes)
    over, first = closure(whole), 0
    for one in several:
        alone = closure(one)
        for i in range(len(one.nodes)):
            inside = {j + first for j in alone[i] if j != START}
            assert over[first + i] - {START} == inside | set(range(first))
        first += len(one.nodes)


EVENT_COSTS = Costs(bytes_per_us=100.0, flops_per_us=1e9, launch_us=3.0, event_us=2.0)
WORK = 3 * 4 * 100 / 100  # of a node of `alone`, in us

magnitudes = st.floats(-2, 2).map(lambda exponent: 10.0**exponent)
some_costs = st.builds(
    Costs, magnitudes.map(lambda x: 100 * x), magnitudes.map(lambda x: 10 * x), magnitudes,
    magnitudes,
)  # fmt: skip


def alone(n: int) -> list[Node]:
    """Nodes that need nothing of each other: 400 bytes each from two inputs to a result."""
    made = []
    for i in range(n):
        x, y = (Tensor(f"{name}{i}", F32, (1, 100), Kind.INPUT) for name in "xy")
        made.append(make("add", f"n{i}", x, y))
    return made


def on(nodes: list[Node], streams: list[int]) -> Branches:
    return ordered(nodes, streams, dependencies(nodes))


def simulated_us(branches: Branches, costs: Costs) -> float:
    """From one moment at which anything changes to the next."""
    n, now = len(branches.nodes), 0.0
    over: dict[int, float] = {}
    launched = dict.fromkeys(range(n), math.inf)  # when its work begins
    left = {i: costs.work_us(node) for i, node in enumerate(branches.nodes)}
    while len(over) < n:
        for j in range(n):
            ahead = [i for i in range(j) if branches.streams[i] == branches.streams[j]][-1:]
            needs = {i: costs.event_us for i in branches.waits[j] if i >= 0} | dict.fromkeys(
                ahead, 0
            )
            if launched[j] == math.inf and needs.keys() <= over.keys():
                ready = max([over[i] + lag for i, lag in needs.items()], default=0.0)
                launched[j] = ready + costs.launch_us
        at_work = [j for j in range(n) if launched[j] <= now and j not in over]
        first = min(at_work, key=left.__getitem__, default=-1)
        ends = now + left[first] * len(at_work) if at_work else math.inf
        begins = min([t for j, t in launched.items() if t > now], default=math.inf)
        then = min(ends, begins)
        for j in at_work:
            left[j] -= (then - now) / len(at_work)
        now = then
        if ends <= begins:
            over[first] = now
    return now


@settings(max_examples=examples(200))
@given(st.integers(0, 2**32 - 1).map(Random), st.integers(0, 25), st.integers(1, 8), some_costs)
def test_the_estimate_is_that_of_the_simulation(rng, n, n_streams, costs):
    branches = random_branches(rng, n, n_streams)
    found = estimate_us(branches, costs)
    assert found == pytest.approx(simulated_us(branches, costs), rel=1e-9)
    assert found >= sum(costs.work_us(node) for node in branches.nodes) * (1 - 1e-9)


def test_a_launch_goes_by_while_others_work():
    """Two on one stream, and one beside them that has the device with the first."""
    found = estimate_us(on(alone(3), [0, 0, 1]), EVENT_COSTS)
    assert found == 3.0 + 2 * WORK + 3.0 + WORK


def test_an_event_takes_its_time():
    nodes = alone(1)
    nodes.append(make("add", "last", nodes[0].output, nodes[0].output))
    apart, together = (estimate_us(on(nodes, streams), EVENT_COSTS) for streams in ([0, 1], [0, 0]))
    assert apart == together + EVENT_COSTS.event_us
