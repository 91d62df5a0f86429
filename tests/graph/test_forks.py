"""Forks and joins of graphs made by hand, as pictures. A line is a stream: its nodes in order, each
after what its stream waits for, in brackets. `[...]` at the end of the first is what it joins."""

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
)
from workbench.graph.ir import F32, Kind, Node, Tensor
from workbench.graph.ops import make

N = 64
COSTS = Costs(bytes_per_us=1e3, flops_per_us=1e9, launch_us=1.0, event_us=2.0)  # a product: 17 us
QKV, THREE_WAY, ANY = Fork.QKV, Fork.THREE_WAY, Fork.ANY


def nodes_of(spec: str, rows: int = 1) -> list[Node]:
    """A node for each `name: sources`, in order: `name*` is a product of one source, which takes
    long; others take next to nothing. A source that no node makes is an input."""
    made: dict[str, Tensor] = {}

    def tensor(name: str) -> Tensor:
        return made.setdefault(name, Tensor(name, F32, (rows, N), Kind.INPUT))

    nodes = []
    for line in spec.split(","):
        name, sources = line.split(":")
        first, *others = (tensor(source) for source in sources.split())
        if (name := name.strip()).endswith("*"):
            name = name[:-1]
            weight = Tensor(f"{name}.weight", F32, (N, N), Kind.WEIGHT)
            nodes.append(make("mul_mat", name, weight, first))
        else:
            nodes.append(make("add", name, first, *(others or [first])))
        made[name] = nodes[-1].output
    return nodes


def picture(spec: str, rule: str, n_streams: int = 8, rows: int = 1) -> list[str]:
    branches = fork(nodes_of(spec, rows), n_streams, rule, COSTS)
    lines: list[list[str]] = [[] for _ in range(branches.n_streams)]
    names = [*(node.name for node in branches.nodes), "start"]  # START is -1
    placed = zip(names, branches.streams, branches.waits, strict=False)
    for name, stream, waits in (*placed, ("", 0, branches.joins)):
        lines[stream] += [f"[{' '.join(names[i] for i in sorted(waits))}]"] if waits else []
        lines[stream] += [name] if name else []
    return [" ".join(line) for line in lines]


LAYER = (
    "attn_norm: x, q*: attn_norm, k*: attn_norm, v*: attn_norm, q_rope: q, k_rope: k, "
    "scores: q_rope k_rope, mixed: scores v, out*: mixed, sum: out x"
)
FEED_FORWARD = "ffn_norm: x, gate*: ffn_norm, up*: ffn_norm, glu: gate up, down*: glu"


seeds, streams = st.integers(0, 2**32 - 1).map(Random), st.integers(1, 8)


def in_turn(spec: str) -> str:
    """All nodes on one stream."""
    return " ".join(line.split(":")[0].strip().rstrip("*") for line in spec.split(","))


BRANCHES = [
    "attn_norm q q_rope [k_rope] scores [v] mixed out sum", "[attn_norm] k k_rope", "[attn_norm] v",
]  # fmt: skip
K_LONGEST = [
    "attn_norm k k_rope [q_rope] scores [v] mixed out sum", "[attn_norm] q q_rope", "[attn_norm] v",
]  # fmt: skip
ON_TWO = ["attn_norm q q_rope [k_rope] scores mixed out sum", "[attn_norm] k v k_rope"]
GATE_AND_UP = ["ffn_norm gate [up] glu down", "[ffn_norm] up"]
CHEAP, FROM_THE_BEGIN = "fork: x, a*: fork, b: fork, all: a b", "a*: x, b*: y, a2*: a, all: a2 b"


@pytest.mark.parametrize(
    ("spec", "rules", "how", "wanted"),
    [
        (LAYER, Fork, {}, BRANCHES),
        (LAYER, (ANY,), {"rows": 5}, BRANCHES),
        (LAYER.replace("k_rope: k,", "k_rope*: k,"), (QKV, ANY), {}, K_LONGEST),
        # the shorter branches share a stream
        (LAYER.replace("q_rope: q,", "q_rope*: q,"), (QKV,), {"n_streams": 2}, ON_TWO),
        (LAYER, (QKV, THREE_WAY), {"rows": 2}, [in_turn(LAYER)]),
        (LAYER, (QKV, THREE_WAY), {"rows": 5}, [in_turn(LAYER)]),
        (FEED_FORWARD, (QKV, THREE_WAY), {}, [in_turn(FEED_FORWARD)]),
        (FEED_FORWARD, (ANY,), {}, GATE_AND_UP),
        (FEED_FORWARD, (ANY,), {"rows": 4}, GATE_AND_UP),
        (CHEAP, (ANY,), {}, [in_turn(CHEAP)]),  # it costs less than its events
        (FROM_THE_BEGIN, (ANY,), {}, ["a a2 [b] all", "[start] b"]),  # b needs nothing
    ],
)  # fmt: skip
def test_forks_and_joins_are_as_drawn(spec, rules, how, wanted):
    for rule in rules:
        assert picture(spec, rule, **how) == wanted


def missing(branches: Branches, without: tuple[int, int] | None = None) -> bool:
    """Is anything missing in the closure? All dependencies, START before everything, and all nodes
    before the end."""
    needed = [{*some, START} for some in dependencies(branches.nodes)]
    needed.append(set(range(len(branches.nodes))))
    found = closure(branches, without)
    return any(not need <= have for need, have in zip(needed, found, strict=True))


def forked(rng: Random, n: int, n_streams: int) -> list[Branches]:
    nodes = random_nodes(rng, n)
    by_rule = [fork(nodes, n_streams, rule) for rule in Fork]
    assert all(branches.n_streams <= n_streams for branches in by_rule)
    return [*by_rule, random_branches(rng, n, n_streams)]


several = st.builds(forked, seeds, st.integers(0, 40), streams)


@settings(max_examples=examples(150))
@given(several)
def test_every_order_is_there_and_no_event_too_many(several):
    for branches in several:
        assert not missing(branches)
        every = [(i, k) for i, waits in enumerate(branches.waits) for k in range(len(waits))]
        every += [(-1, k) for k in range(len(branches.joins))]
        for one in every:
            assert missing(branches, without=one), one


@settings(max_examples=examples(150))
@given(several)
def test_clocks_and_pairs_are_those_of_the_closure(several):
    for branches in several:
        place: dict[int, int] = {}
        count = [0] * branches.n_streams
        for i, stream in enumerate(branches.streams):
            place[i] = count[stream]
            count[stream] += 1
        over = closure(branches)
        for clock, earlier in zip(branches.clocks(), over, strict=False):
            known = {i for i in place if place[i] < clock[branches.streams[i]]}
            assert known == earlier - {START}
        number = {node: i for i, node in enumerate(branches.nodes)}
        found = {(number[a], number[b]) for a, b in branches.side_by_side()}
        assert found == {(i, j) for j in place for i in range(j) if i not in over[j]}


@settings(max_examples=examples(100))
@given(several)
def test_other_orders_keep_nodes_after_what_they_need(several):
    for branches in several:
        numbers = branch_of(branches)
        for order in (interleaved(branches), sorted(branches.nodes, key=numbers.__getitem__)):
            assert sorted(map(id, order)) == sorted(map(id, branches.nodes))
            at = {node: i for i, node in enumerate(order)}
            for node, before in zip(branches.nodes, dependencies(branches.nodes), strict=True):
                assert all(at[branches.nodes[i]] < at[node] for i in before)


@settings(max_examples=examples(100))
@given(several)
def test_nodes_of_one_branch_are_neighbours(several):
    for branches in several:
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
def test_a_split_begins_after_all_of_the_one_before(rng, lengths, n_streams):
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


magnitudes = st.floats(-2, 2).map(lambda exponent: 10.0**exponent)
some_costs = st.builds(
    Costs, magnitudes.map(lambda x: 100 * x), magnitudes.map(lambda x: 10 * x), magnitudes,
    magnitudes,
)  # fmt: skip


def simulated_us(branches: Branches, costs: Costs) -> float:
    """From one moment at which anything changes to the next."""
    n, now = len(branches.nodes), 0.0
    over: dict[int, float] = {}
    launched = dict.fromkeys(range(n), math.inf)  # when its work begins
    left = {i: costs.work_us(node) for i, node in enumerate(branches.nodes)}
    while len(over) < n:
        for j in range(n):
            ahead = [i for i in range(j) if branches.streams[i] == branches.streams[j]][-1:]
            needs = {i: costs.event_us for i in branches.waits[j] if i >= 0}
            needs |= dict.fromkeys(ahead, 0)
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
@given(seeds, st.integers(0, 25), streams, some_costs)
def test_the_estimate_is_that_of_the_simulation(rng, n, n_streams, costs):
    branches = random_branches(rng, n, n_streams)
    found = estimate_us(branches, costs)
    assert found == pytest.approx(simulated_us(branches, costs), rel=1e-9)
    assert found >= sum(costs.work_us(node) for node in branches.nodes) * (1 - 1e-9)
