"""Forks and joins of graphs made by hand, as pictures. A line is a stream: its nodes in order, each
behind what its stream waits for, in brackets. `[...]` at the end of the first is what it joins.

A product stands for a node that takes long, an `add` for one that takes next to nothing.
"""

from __future__ import annotations

import pytest

from workbench.config import Fork
from workbench.graph.forks import START, Branches, Costs, fork
from workbench.graph.ir import F32, Kind, Node, Tensor
from workbench.graph.ops import make

N = 64
COSTS = Costs(bytes_per_us=1e3, flops_per_us=1e9, launch_us=1.0, event_us=2.0)  # a product: 17 us
QKV, THREE_WAY, ANY = Fork.QKV, Fork.THREE_WAY, Fork.ANY


def nodes_of(spec: str, rows: int = 1) -> list[Node]:
    """A node for each `name: sources`, in order: `name*` is a product of one source. A source that
    no node makes is an input."""
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
            second = others[0] if others else first
            nodes.append(make("add", name, first, second))
        made[name] = nodes[-1].output
    return nodes


def drawn(branches: Branches) -> list[str]:
    names = [node.name for node in branches.nodes]
    lines: list[list[str]] = [[] for _ in range(branches.n_streams)]
    rows = zip(names, branches.streams, branches.waits, strict=True)
    for name, stream, waits in rows:
        if waits:
            lines[stream].append(
                f"[{' '.join('start' if i == START else names[i] for i in sorted(waits))}]"
            )
        lines[stream].append(name)
    if branches.joins:
        lines[0].append(f"[{' '.join(names[i] for i in sorted(branches.joins))}]")
    return [" ".join(line) for line in lines]


def picture(spec: str, rule: str, n_streams: int = 8, rows: int = 1) -> list[str]:
    return drawn(fork(nodes_of(spec, rows), n_streams, rule, COSTS))


LAYER = (
    "attn_norm: x, q*: attn_norm, k*: attn_norm, v*: attn_norm, q_rope: q, k_rope: k, "
    "scores: q_rope k_rope, mixed: scores v, out*: mixed, sum: out x"
)
FEED_FORWARD = "ffn_norm: x, gate*: ffn_norm, up*: ffn_norm, glu: gate up, down*: glu"


# three branches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [QKV, THREE_WAY])
def test_a_layer_forks_at_its_norm(rule):
    assert picture(LAYER, rule) == [
        "attn_norm q q_rope [k_rope] scores [v] mixed out sum",
        "[attn_norm] k k_rope",
        "[attn_norm] v",
    ]


def test_the_branch_that_takes_longest_stays_on_the_first_stream():
    spec = LAYER.replace("k_rope: k,", "k_rope*: k,")
    assert picture(spec, QKV)[0] == "attn_norm k k_rope [q_rope] scores [v] mixed out sum"
    assert picture(spec, ANY)[0].startswith("attn_norm k k_rope [q_rope] scores")


def test_on_two_streams_the_two_shorter_branches_share_one():
    spec = LAYER.replace("q_rope: q,", "q_rope*: q,")
    assert picture(spec, QKV, n_streams=2) == [
        "attn_norm q q_rope [k_rope] scores mixed out sum",
        "[attn_norm] k v k_rope",
    ]


def test_a_fork_elsewhere_is_a_three_way_fork_and_no_qkv():
    spec = LAYER.replace("attn_norm", "ffn_norm")
    assert picture(spec, QKV) == [spec_order(spec)]
    assert len(picture(spec, THREE_WAY)) == 3


@pytest.mark.parametrize("rows", [2, 5])
def test_of_several_rows_only_any_forks(rows):
    for rule in (QKV, THREE_WAY):
        assert picture(LAYER, rule, rows=rows) == [spec_order(LAYER)]
    assert picture(LAYER, ANY, rows=rows) == picture(LAYER, ANY) != [spec_order(LAYER)]


def spec_order(spec: str) -> str:
    """All nodes on one stream."""
    return " ".join(line.split(":")[0].strip().rstrip("*") for line in spec.split(","))


# any shape ----------------------------------------------------------------------------------------


def test_gate_and_up():
    for rule in (QKV, THREE_WAY):
        assert picture(FEED_FORWARD, rule) == [spec_order(FEED_FORWARD)]
    for rows in (1, 4):
        assert picture(FEED_FORWARD, ANY, rows=rows) == [
            "ffn_norm gate [up] glu down",
            "[ffn_norm] up",
        ]


def test_a_router_beside_shared_work():
    """Experts wait for the router; the shared one does not."""
    spec = (
        "norm: x, router*: norm, chosen: router, one*: norm, two*: norm, weighed: one chosen, "
        "weighed2: two chosen, experts: weighed weighed2, shared*: norm, shared2*: shared, "
        "sum: experts shared2"
    )
    for rows in (1, 3):
        assert picture(spec, ANY, rows=rows) == [
            "norm shared shared2 [experts] sum",
            "[norm] router chosen [one] weighed [weighed2] experts",
            "[norm] one",
            "[norm] two [chosen] weighed2",
        ]


def test_what_costs_less_than_its_events_stays():
    spec = "fork: x, a*: fork, b: fork, all: a b"
    assert picture(spec, ANY) == [spec_order(spec)]


def test_what_needs_nothing_of_the_split_waits_for_its_begin():
    spec = "a*: x, b*: y, a2*: a, all: a2 b"
    assert picture(spec, ANY) == ["a a2 [b] all", "[start] b"]


# events only where no order follows ---------------------------------------------------------------


def test_one_event_stands_for_all_that_is_in_front_of_it():
    """`f` needs `d2` and `b`, and `b` is in front of `d2`."""
    spec = "fork: x, a*: fork, b*: fork, d: b a, d2*: d, e*: d2, f: d2 b, f2*: f, all: e f2"
    assert picture(spec, ANY) == ["fork a [b] d d2 f f2 [e] all", "[fork] b [d2] e"]
    spec = spec.replace("e*: d2, f: d2 b", "e*: d2, e2*: e, e3*: e2, f: d2 b").replace(
        "e f2", "e3 f2"
    )
    assert picture(spec, ANY) == ["fork a [b] d d2 e e2 e3 [f2] all", "[fork] b [d2] f f2"]


def test_what_nobody_reads_is_joined_at_the_end():
    spec = "fork: x, a*: fork, b*: fork"
    assert picture(spec, ANY) == ["fork a [b]", "[fork] b"]
