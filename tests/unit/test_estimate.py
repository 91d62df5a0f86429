"""What branches are estimated to take, against a plain simulation of a device that is shared."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tests.unit.random_branches import random_branches
from workbench.graph.forks import Branches, Costs, dependencies, estimate_us, ordered, serial
from workbench.graph.ir import F32, Kind, Node, Tensor
from workbench.graph.ops import make

COSTS = Costs(bytes_per_us=100.0, flops_per_us=1e9, launch_us=3.0, event_us=2.0)
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


@settings(max_examples=examples(50))
@given(st.integers(0, 2**32 - 1).map(Random), st.integers(0, 25), some_costs)
def test_one_stream_takes_the_sum(rng, n, costs):
    nodes = random_branches(rng, n, 1).nodes
    wanted = sum(costs.us(node) for node in nodes)
    assert estimate_us(serial(nodes), costs) == pytest.approx(wanted)


def test_side_by_side_saves_launches_and_no_bytes():
    one, three = (estimate_us(on(alone(3), streams), COSTS) for streams in ([0] * 3, [0, 1, 2]))
    assert one == 3 * (3.0 + WORK) and three == 3.0 + 3 * WORK


def test_a_launch_goes_by_while_others_work():
    """Two on one stream, and one beside them that has the device with the first."""
    found = estimate_us(on(alone(3), [0, 0, 1]), COSTS)
    assert found == 3.0 + 2 * WORK + 3.0 + WORK


def test_an_event_takes_its_time():
    nodes = alone(1)
    nodes.append(make("add", "last", nodes[0].output, nodes[0].output))
    apart, together = (estimate_us(on(nodes, streams), COSTS) for streams in ([0, 1], [0, 0]))
    assert apart == together + COSTS.event_us


def test_no_nodes_take_no_time():
    assert estimate_us(serial([])) == 0.0
