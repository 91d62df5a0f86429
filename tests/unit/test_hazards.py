"""What races, on programs made by hand, one for each rule."""

from __future__ import annotations

import pytest

from tests.by_hand import (
    LAND,
    OTHER,
    USE,
    A,
    B,
    C,
    S,
    X,
    Y,
    Z,
    copy,
    launch,
    memory,
    pairs,
    part,
    program,
    record,
    sync,
    wait,
)
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.graph import ops
from workbench.graph.fuse import FUSIONS, fuse
from workbench.graph.ir import F16, F32, I32, I64, Kind, Node, StepShape, Tensor
from workbench.graph.ops import make
from workbench.program.check.hazards import check_cycle, races
from workbench.program.commands import (
    HOST,
    Copy,
    Launch,
    Program,
    Range,
    Read,
    Stream,
    Sync,
    Write,
)

# what orders, and what does not -------------------------------------------------------------------

ORDERED = {
    "stream order": (copy(X, S, A), USE),
    "a sync of the stream": (LAND, sync(B), USE),
    "a sync of an event behind it": (LAND, record(0, B), sync(event=0), USE),
    "an event wait": (LAND, record(0, B), wait(0, A), USE),
    "an event wait of an event of a third stream that waited": (
        LAND, record(0, B), wait(0, C), record(1, C), wait(1, A), USE,
    ),
    "the host, which waited and then issued to a third stream": (
        LAND, sync(B), launch(C, [], [Z]), record(1, C), wait(1, A), USE,
    ),
    "the latest record": (record(0, B), LAND, record(0, B), wait(0, A), USE),
    "what the host did before": (Write(S, "inp"), LAND, sync(B), launch(Stream(HOST, 0), [X])),
    "streams of two backends and an event": (
        LAND, record(0, B), wait(0, OTHER), launch(OTHER, [X]),
    ),
}  # fmt: skip
UNORDERED = {
    "two streams": (LAND, USE),
    "a sync of another stream": (LAND, sync(A), USE),
    "an event recorded before it": (record(0, B), LAND, wait(0, A), USE),
    "an event of another stream": (LAND, record(0, A), wait(0, A), USE),
    "an event never recorded": (LAND, wait(0, A), sync(event=1), USE),
    "an event recorded anew elsewhere": (LAND, record(0, B), record(0, A), wait(0, A), USE),
    "a wait before the record": (LAND, wait(0, A), record(0, B), USE),
    "a wait of another stream": (LAND, record(0, B), wait(0, C), USE),
    "one stream's number on two backends": (
        copy(X, S, Stream(2, 0)), launch(Stream(1, 0), [X], [Y]),
    ),
    "a launch of the host, which waits for nobody": (LAND, launch(Stream(HOST, 0), [X], [Y])),
}  # fmt: skip


@pytest.mark.parametrize("case", ORDERED)
def test_ordered_by(case):
    assert pairs(*ORDERED[case]) == []


@pytest.mark.parametrize("case", UNORDERED)
def test_not_ordered_by(case):
    commands = UNORDERED[case]
    first = next(i for i, c in enumerate(commands) if isinstance(c, Copy))
    assert pairs(*commands) == [(first, len(commands) - 1)]


def test_a_race_names_commands_bytes_kind_and_the_missing_order():
    (race,) = races([program(Write(S, "inp"), LAND, sync(A), USE)])
    assert (race.first[:2], race.second[:2]) == ((0, 1), (0, 3))
    assert race.first.command is LAND and race.second.command is USE
    assert (race.buffer, race.offset, race.nbytes) == (X.buffer, 0, 64)
    assert (race.kind, race.may) == ("write-read", False)
    assert race.missing == (
        "nothing orders copy inp on dev:1 before launch add sum on dev:0: sync dev:1, or let "
        "dev:0 wait for an event recorded behind the copy, between them"
    )


@pytest.mark.parametrize(
    ("second", "kind"),
    [
        (launch(A, [X], []), "write-read"),
        (launch(A, [], [X]), "write-write"),
        (launch(A, [], [S]), "read-write"),
        (launch(A, [X], [X]), "write-write"),  # once, though it reads too
        (Write(S, "inp"), "read-write"),
        (Read(X, "out"), "write-read"),
    ],
)
def test_kinds_in_host_order(second, kind):
    (race,) = races([program(LAND, second)])
    assert race.kind == kind


def test_reads_do_not_race():
    assert pairs(launch(A, [X], [Y]), launch(B, [X], [Z])) == []


@pytest.mark.parametrize(
    ("offset", "nbytes", "disputed"),
    [(0, 16, None), (15, 2, (16, 1)), (20, 4, (20, 4)), (31, 9, (31, 1)), (32, 8, None),
     (0, 64, (16, 16)), (20, 0, None)],
)  # fmt: skip
def test_only_bytes_that_both_touch(offset, nbytes, disputed):
    found = races([program(copy(part(X, 16, 16), S, B), launch(A, [part(X, offset, nbytes)]))])
    assert [(r.offset, r.nbytes) for r in found] == ([] if disputed is None else [disputed])


def test_same_offsets_of_two_buffers_are_other_bytes():
    assert pairs(copy(X, S, B), launch(A, [memory("x")], [Y])) == []


def test_each_stretch_of_bytes_is_reported():
    found = races([program(copy(X, S, B), launch(A, [part(X, 0, 8), part(X, 32, 8)]))])
    assert [(r.offset, r.nbytes) for r in found] == [(0, 8), (32, 8)]


def test_every_pair_is_found_not_only_the_latest():
    """Two readers, a write between them that races with both, and a later reader of it."""
    commands = (launch(A, [X]), launch(B, [X]), copy(X, S, C), launch(A, [X]), launch(A, [], [X]))
    assert pairs(*commands) == [(0, 2), (1, 2), (1, 4), (2, 3), (2, 4)]


# consecutive steps --------------------------------------------------------------------------------

STEP = (Write(S, "inp"), copy(X, S, B), record(0, B), wait(0, A), launch(A, [X], [Y]))


def test_a_write_of_the_next_step_overtakes_a_copy():
    found = races([program(*STEP)] * 2)
    assert [(r.first[:2], r.second[:2], r.kind) for r in found] == [
        ((0, 1), (1, 0), "read-write"),  # the write of staging
        ((0, 4), (1, 1), "read-write"),  # the copy over what is still read
    ]
    assert found[0].missing == (
        "nothing orders copy x on dev:1 before write inp of the next step: sync dev:1 (or an event "
        "recorded behind the copy) between them"
    )
    assert not races([program(*STEP)])


def test_a_wait_at_the_end_of_a_step_orders_the_next():
    whole = (*STEP, copy(Z, Y, A), record(1, A), sync(event=1), Read(Z, "out"))
    assert pairs(*whole, laps=4) == []


def test_an_event_keeps_its_record_from_step_to_step():
    one = program(wait(1, B), sync(event=0), *STEP, record(1, A))
    assert races([one] * 4) == []


def test_laps_add_no_race_to_those_of_two():
    commands = (*STEP, launch(C, [Y], [X]), wait(7, A), record(7, C))
    assert pairs(*commands, laps=1) != pairs(*commands, laps=2) == pairs(*commands, laps=7)


def test_a_command_issued_anew_is_the_latest_again():
    """What waits for the one issued between its two issues is not ordered behind the second."""
    again = program(launch(A, [], [X]))
    between, last = program(launch(A, [], [X]), record(0, A)), program(wait(0, B), launch(B, [X]))
    assert races([again, between, last]) == []
    (race,) = races([again, between, again, last])
    assert (race.first[:2], race.second[:2]) == ((2, 0), (3, 1))


def test_a_ring_of_two_entries_waits_for_the_entry_not_for_the_step():
    def step(entry: int) -> Program:
        staging, there = part(S, 32 * entry, 32), part(X, 32 * entry, 32)
        return program(
            sync(event=entry), Write(staging, "inp"), copy(there, staging, A), launch(A, [there]),
            record(entry, A),
        )  # fmt: skip

    ring = [step(0), step(1)]
    found = check_cycle(ring)
    assert found.safe and len(found.sufficient) == len(found.waits) == 2
    assert len(races([ring[0], ring[1], ring[1]])) == 0
    other = [program(*(c for c in p.commands if not isinstance(c, Sync))) for p in ring]
    assert {(r.first.step, r.second.step) for r in races(other * 3)} == {(0, 2), (1, 3)}


# value-dependent accesses -------------------------------------------------------------------------


def attention(q: Range, k: Range, mask: Range, out: Range, stream: Stream) -> Launch:
    cache = Tensor("k", F16, (4, 8), Kind.CACHE)
    node = make(
        "attention", "kqv", Tensor("q", F32, (1, 1, 8)), cache, Tensor("v", F16, (4, 8)),
        Tensor("mask", F16, (1, 4)), n_kv=4, n_head_kv=1, scale=1.0,
    )  # fmt: skip
    return launch(stream, [q, k, memory("v"), mask], [out], node)


def test_a_race_on_a_superset_may_be_and_one_on_other_bytes_is():
    cache, x, rows = memory("cache"), memory("rows"), memory("indices")
    node = make(
        "set_rows", "store", Tensor("k", F16, (4, 8), Kind.CACHE), Tensor("x", F32, (1, 8)),
        Tensor("i", I64, (1,)), n_kv=4,
    )  # fmt: skip
    store = launch(B, [x, rows], [cache], node)
    found = races([program(store, attention(X, cache, Y, Z, A))])
    assert [(r.buffer.name, r.may) for r in found] == [("cache", True)]
    found = races([program(store, launch(A, [], [x]))])  # what is stored is read whole
    assert [(r.buffer.name, r.may) for r in found] == [("rows", False)]
    for exact, buffer in ((X, "x"), (Y, "y")):  # the query and the mask
        (race,) = races([program(copy(exact, S, B), attention(X, cache, Y, Z, A))])
        assert (race.buffer.name, race.may) == (buffer, False)


def test_a_gather_may_read_any_row_of_its_table():
    table, ids = Tensor("t", F32, (8, 4)), Tensor("ids", I32, (1,))
    gather = launch(A, [X, Y], [Z], make("get_rows", "rows", table, ids))
    found = races([program(copy(X, S, B), copy(Y, S, B), gather)])
    assert [(r.buffer.name, r.may) for r in found] == [("x", True), ("y", False)]


def test_bytes_that_are_surely_read_too_do_race():
    table, ids = Tensor("t", F32, (8, 4)), Tensor("ids", I32, (1,))
    node = make("get_rows", "rows", table, ids)
    (race,) = races([program(copy(part(X, 0, 8), S, B), launch(A, [X, part(X, 0, 8)], [Z], node))])
    assert not race.may
    fused = Node("both", "both", node.output, (table, ids), {}, -1)
    fused.parts = (node, make("add", "shifted", table, Tensor("b", F32, (4,))))
    gather = launch(A, [memory(t.name) for t, *_ in ops.reads(fused)], [], fused)
    (race,) = races([program(launch(B, [], gather.reads[:1]), gather)])  # the table
    assert not race.may


def test_a_part_of_a_fused_node_makes_its_access_vague(tiny_model):
    with Engine.load(tiny_model("tiny-llama", "Q8_0"), device="null", toggles=Toggles()) as engine:
        graph = fuse(_graph(engine), FUSIONS)
    node = next(n for n in graph.nodes if n.parts and any(p.op == "set_rows" for p in n.parts))
    reads = [memory(t.name) for t, *_ in ops.reads(node)]
    writes = [memory(t.name) for t, *_ in ops.writes(node)]
    fused = launch(A, reads, writes, node)
    caches = [r for r, (t, *_) in zip(writes, ops.writes(node), strict=True) if t.kind == "cache"]
    others = [r for r in (*reads, *writes) if r not in caches]
    assert caches and others
    for r in (*caches, *others):
        (race,) = races([program(launch(B, [], [r]), fused)])
        assert race.may == (r in caches)


def _graph(engine: Engine):
    from workbench.model.decoder import build_graph

    return build_graph(engine.model, StepShape(1, 1, 256), engine.model.caches(256))


# copies that keep no order ------------------------------------------------------------------------

LOOSE = {
    "a copy before a launch of its stream": ((copy(X, S, A), USE), [(0, 1)]),
    "a launch before a copy of its stream": ((launch(A, [], [X]), copy(Y, X, A)), [(0, 1)]),
    "two copies of one stream": ((copy(X, S, A), copy(Y, X, A)), [(0, 1)]),
    "an event behind the copy": ((copy(X, S, B), record(0, B), wait(0, A), USE), [(0, 3)]),
    "a sync of an event behind it": ((copy(X, S, B), record(0, B), sync(event=0), USE), [(0, 3)]),
    "a sync of the stream": ((copy(X, S, B), sync(B), USE), []),
    "a sync of another stream": ((copy(X, S, B), sync(A), USE), [(0, 2)]),
    "a stream that waits for an event before it copies": (
        (launch(A, [], [X]), record(0, A), wait(0, B), copy(Y, X, B)), [(0, 3)],
    ),
    "the host, which waits for an event before it issues the copy": (
        (launch(A, [], [X]), record(0, A), sync(event=0), copy(Y, X, B)), [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOOSE)
def test_copies_without_one_order(case):
    commands, expected = LOOSE[case]
    assert pairs(*commands, one_order=False) == expected


def test_what_copies_without_one_order_lack_is_a_sync():
    first, second = program(copy(X, S, A), USE), program(launch(A, [], [X]), copy(Y, X, A))
    (race,) = races([first], one_order=False)
    assert race.missing.endswith(
        ": copies keep no order with their stream, sync dev:0 between them"
    )
    (race,) = races([second], one_order=False)
    assert race.missing.endswith(
        ": sync dev:0 (or an event recorded behind the launch) between them"
    )
