"""What races, on programs made by hand, one for each rule; held to the naive relation and to the
adversary. Which waits could go, how findings are told, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

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
    indices,
    launch,
    memory,
    pairs,
    part,
    program,
    record,
    sync,
    wait,
)
from tests.oracles.adversary import Adversary
from tests.oracles.happens_before import racing_pairs
from tests.planned import SCOPES, only_adds_order
from tests.removable import sufficient, superfluous
from workbench.cli.check import lines
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.graph import ops
from workbench.graph.fuse import FUSIONS, fuse
from workbench.graph.ir import F16, F32, I32, I64, Kind, Node, StepShape, Tensor
from workbench.graph.ops import make
from workbench.model.decoder import build_graph
from workbench.program.check.findings import MOST_RACES
from workbench.program.check.hazards import apart, check_cycle, races, refused
from workbench.program.commands import (
    HOST,
    Command,
    Copy,
    Launch,
    Program,
    Range,
    Read,
    Replay,
    Stream,
    Sync,
    Write,
)

W = memory("weights")
PRODUCT = make("mul_mat", "p", Tensor("w", F32, (4, 8), Kind.WEIGHT), Tensor("x", F32, (1, 8)))


def early(reads: Sequence[Range] = (W, X), writes: Sequence[Range] = (Y,)) -> Launch:
    return launch(A, reads, writes, PRODUCT, programmatic=True)


def plan(*parts: Command, stream: Stream = A) -> Replay:
    return Replay(parts, stream, 0)


# what orders, and what does not: by name, the commands and the pairs that race --------------------

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
EARLY = {
    "the launch in front of it": ((launch(A, [], [W]), early()), [(0, 1)]),
    "a launch in front of a chain": ((launch(A, [], [W]), early((Z, X), ()), early()), [(0, 2)]),
    "a launch before the one in front": ((launch(A, [], [W]), launch(A, [Z]), early()), []),
    "a copy in front of it": ((copy(W, S, A), early()), []),
    "a copy that it waits for": ((copy(W, S, B), record(0, B), wait(0, A), early()), []),
    "a copy that the launch in front waits for": (
        (copy(W, S, B), record(0, B), wait(0, A), launch(A, [Z]), early()), [],
    ),
    "a copy on another stream": ((copy(W, S, B), early()), [(0, 1)]),
    "a launch in front of a wait for an event never recorded": (
        (launch(A, [], [W]), wait(7, A), early()), [(0, 2)],
    ),
    "a launch in front of a wait for another stream": (
        (launch(B, [], [Z]), record(0, B), launch(A, [], [W]), wait(0, A), early()), [(2, 4)],
    ),
    "a launch in front of a chain and a wait": (
        (launch(A, [], [W]), early((Z, X), ()), wait(7, A), early()), [(0, 3)],
    ),
    "a launch that the stream waits for by an event of its own": (
        (launch(A, [], [W]), record(0, A), wait(0, A), early()), [],
    ),
    "a launch in front of a wait and a copy": (
        (launch(A, [], [W]), wait(7, A), copy(X, S, A), early()), [],
    ),
    "a copy waited for in front of a chain": (
        (copy(W, S, B), record(0, B), wait(0, A), early((Z, X), ()), early()), [],
    ),
    "a copy that the host waited for": ((copy(W, S, B), sync(B), early()), []),
    "a launch in front of which the host waited": ((launch(A, [], [W]), sync(A), early()), []),
}  # fmt: skip

BRING, MORE = LAND, launch(A, [Y], [Z])
PLANS = {
        "parts on the plan's stream, its work in front and behind": (
            [copy(X, S, A), plan(USE), MORE], []),
        "parts on another stream begin behind what the plan's has in front": (
            [launch(A, [], [S]), plan(BRING)], []),
        "what the plan's stream has behind begins when they are over": (
            [plan(BRING), USE], []),
        "and so does an event behind, and the host": (
            [plan(BRING), record(0, A), wait(0, B), launch(B, [X]), sync(A), Write(S, "in")], []),
        "no order among the parts of two streams": (
            [plan(BRING, USE)], [((0, 0, 0), (0, 0, 1))]),
        "but by a Record and a Wait among them": (
            [plan(BRING, record(0, B), wait(0, A), USE)], []),
        "no order with the same stream in front": (
            [copy(X, S, B), plan(launch(B, [X]))], [((0, 0, None), (0, 1, 0))]),
        "or behind": (
            [plan(BRING), launch(B, [X])], [((0, 0, 0), (0, 1, None))]),
        "a sync on that stream waits for no part": (
            [plan(BRING), sync(B), Write(S, "in")], [((0, 0, 0), (0, 2, None))]),
        "nobody outside knows of a Record in a plan": (
            [plan(BRING, record(0, B)), wait(0, B), launch(B, [X])],
            [((0, 0, 0), (0, 2, None))]),
        "a Wait in a plan for what is not recorded in it waits for nothing": (
            [BRING, record(0, B), plan(wait(0, A), USE)], [((0, 0, None), (0, 2, 1))]),
}  # fmt: skip


def keys(commands: Sequence[Command], expected: Any) -> set[tuple]:
    """Pairs of places; an index stands for a command of the one step."""

    def at(place: Any) -> tuple:
        return place if isinstance(place, tuple) else (0, place, None)

    return {(at(a), at(b)) for a, b in expected}


def unordered(commands: Sequence[Command]) -> list[tuple[int, int]]:
    first = next(i for i, c in enumerate(commands) if isinstance(c, Copy))
    return [(first, len(commands) - 1)]


CASES: dict[str, tuple[Sequence[Command], Any]] = {
    **{name: (commands, []) for name, commands in ORDERED.items()},
    **{name: (commands, unordered(commands)) for name, commands in UNORDERED.items()},
    **EARLY,
    **PLANS,
}


@pytest.mark.parametrize("case", CASES)
def test_what_races_is_what_nothing_orders(case):
    commands, expected = CASES[case]
    run = [program(*commands)]
    found = {(race.first.key, race.second.key) for race in races(run)}
    assert found == racing_pairs(run) == keys(commands, expected)
    assert bool(Adversary(run).search()) == bool(expected)


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
    assert racing_pairs([program(*commands)], False) == keys(commands, expected)


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


@pytest.mark.parametrize(
    ("offset", "nbytes", "disputed"),
    [(0, 16, None), (15, 2, (16, 1)), (20, 4, (20, 4)), (31, 9, (31, 1)), (32, 8, None),
     (0, 64, (16, 16)), (20, 0, None)],
)  # fmt: skip
def test_only_bytes_that_both_touch(offset, nbytes, disputed):
    found = races([program(copy(part(X, 16, 16), S, B), launch(A, [part(X, offset, nbytes)]))])
    assert [(r.offset, r.nbytes) for r in found] == ([] if disputed is None else [disputed])


def test_every_pair_is_found_not_only_the_latest():
    """Two readers, a write between them that races with both, and a later reader of it."""
    commands = (launch(A, [X]), launch(B, [X]), copy(X, S, C), launch(A, [X]), launch(A, [], [X]))
    assert pairs(*commands) == [(0, 2), (1, 2), (1, 4), (2, 3), (2, 4)]


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


def test_a_ring_waits_for_its_entry_not_for_the_step():
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


def test_a_launch_that_declares_no_wait_is_refused():
    run = [program(launch(A, [], [X]), early())] * 2
    found = check_cycle(run[:1], declared=lambda node: False)
    assert indices(found.refused) == [1] and not found.safe
    race = found.races[0]
    assert (race.first.index, race.second.index) == (0, 1)
    assert race.missing.endswith("declares no griddepcontrol.wait: launch it without pdl")
    harmless = [program(launch(A, [], [Z]), early((W, X), (Y,)), copy(S, Z, A))]
    assert races(harmless, declared=lambda node: False) == []
    assert indices(refused(harmless, lambda node: False)) == [1]


def test_bytes_read_early_and_late_are_told_once():
    """Weights W; a part is read again as something else."""
    again = early((W, part(W, 16, 8)))
    (race,) = races([program(copy(W, S, B), again)])
    assert (race.offset, race.nbytes, race.kind) == (0, 64, "write-read")
    (race,) = races([program(copy(W, S, B), early((W, X), (W,)))])
    assert race.kind == "write-write"  # though it reads them early, too
    found = check_cycle([program(copy(W, S, B), again)])
    assert [(r.first.step, r.count) for r in found.races] == [(0, 1), (0, 1)]  # and the next copy
    found = races([program(copy(W, S, B), early((part(W, 0, 32), W)))])
    assert [(r.offset, r.nbytes) for r in found] == [(0, 32), (32, 32)]


def attention(q: Range, k: Range, mask: Range, out: Range, stream: Stream) -> Launch:
    cache = Tensor("k", F16, (4, 8), Kind.CACHE)
    node = make(
        "attention", "kqv", Tensor("q", F32, (1, 1, 8)), cache, Tensor("v", F16, (4, 8)),
        Tensor("mask", F16, (1, 4)), n_kv=4, n_head_kv=1, scale=1.0,
    )  # fmt: skip
    return launch(stream, [q, k, memory("v"), mask], [out], node)


def test_a_race_on_a_superset_only_may_be():
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
        caches = engine.model.caches(256)
        graph = fuse(build_graph(engine.model, StepShape(1, 1, 256), caches), FUSIONS)
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


def test_a_wait_in_a_plan_is_judged_as_one_outside():
    found = check_cycle([program(plan(BRING, record(0, B), wait(0, A), wait(0, A), USE), sync(A))])
    assert found.safe
    assert [at.key for at in found.waits] == [(1, 0, 2), (1, 0, 3), (1, 1, None)]
    assert [at.key for at in found.superfluous] == [(1, 0, 2), (1, 0, 3), (1, 1, None)]
    assert [at.key for at in found.sufficient] == [(1, 0, 3)]
    (told,) = found.to_dict()["sufficient"]
    assert told["words"] == 'wait of dev:0 for "0" in a plan'
    assert (told["step"], told["index"], told["part"]) == (1, 0, 3)


def test_a_refused_launch_in_a_plan_is_named():
    step = program(plan(launch(A), launch(A, programmatic=True)))
    (at,) = check_cycle([step], declared=lambda node: False).refused
    assert str(at) == "step 0 #0 part 1 launch sum"


# how it is told -----------------------------------------------------------------------------------

COPY = "nothing orders copy inp on dev:1"
LET = "let dev:0 wait for an event recorded behind the copy"
TOLD: list[tuple[list[Command], bool, str]] = [
    ([LAND, sync(A), USE], True,
     f"{COPY} before launch add sum on dev:0: sync dev:1, or {LET}, between them"),
    ([plan(LAND, USE)], True, f"{COPY} before launch add sum on dev:0 in a plan: record an event "
     "behind the copy in the plan, and let dev:0 wait for it"),
    ([LAND, plan(USE)], True, f"{COPY} before launch add sum on dev:0 in a plan: sync dev:1, "
     f"or {LET}, between them"),
    ([plan(LAND), launch(B, [X])], True, f"{COPY} in a plan before launch add sum on dev:1: sync "
     "dev:0, or let dev:1 wait for an event recorded behind the plan, between them"),
    ([plan(LAND), Write(S, "in")], True, f"{COPY} in a plan before write in: sync dev:0 (or an "
     "event recorded behind the plan) between them"),
    ([launch(A, [], [W]), early()], True,
     "nothing orders launch add sum on dev:0 before launch mul_mat p on dev:0; the second is "
     "programmatic and may read weights ahead of it: launch it without pdl"),
    ([copy(X, S, A), USE], False, "nothing orders copy x on dev:0 before launch add sum on dev:0: "
     "copies keep no order with their stream, sync dev:0 between them"),
    ([early(), copy(W, S, A)], False, "nothing orders launch mul_mat p on dev:0 before copy x on "
     "dev:0: sync dev:0 (or an event recorded behind the launch) between them"),
    ([plan(copy(X, S, A, "inp"), USE)], False,
     "nothing orders copy inp on dev:0 before launch add sum on dev:0 in a plan: copies keep "
     "no order with their stream, leave the copy out of the plan and sync dev:0"),
]  # fmt: skip


@pytest.mark.parametrize(("commands", "one_order", "says"), TOLD)
def test_a_race_names_commands_and_what_would_order_them(commands, one_order, says):
    (race,) = races([program(*commands)], one_order=one_order)
    assert race.missing == says


def named(name: str) -> Launch:
    node = make("add", name, Tensor("a", F32, (4,)), Tensor("b", F32, (4,)))
    return launch(A, [X], [Y], node)


def test_races_of_the_same_words_are_one_group():
    cycle = apart([program(LAND, USE)] * 5)  # every step a program of its own
    every, found = races(cycle * 3), check_cycle(cycle)
    assert found.n_races == len(every) > len(found.races)
    kinds = Counter((r.first.command, r.second.command) for r in every)
    assert {(r.first.command, r.second.command): r.count for r in found.races} == kinds
    assert sum(r.count for r in found.races) == len(every) and found.more == 0
    first = {}
    for race in every:
        first.setdefault((race.first.command, race.second.command), race)
    assert [r._replace(count=1) for r in found.races] == list(first.values())


def test_most_groups_are_held_and_the_others_are_counted():
    n = MOST_RACES + 50
    found = check_cycle([program(LAND, *(named(f"n{i}") for i in range(n)))])
    assert len(found.races) == MOST_RACES
    assert found.more == found.n_races - MOST_RACES > 50
    told = json.loads(json.dumps(found.to_dict()))
    assert (told["n_races"], told["more"]) == (found.n_races, found.more)
    assert [race["count"] for race in told["races"]] == [1] * MOST_RACES
    said = lines([found.steps[0]], found)
    assert f"races        {found.n_races}" in said
    assert f"  and {found.more} more, of other commands" in said


def test_findings_are_json():
    made = json.loads(
        json.dumps(check_cycle([program(Write(S, "inp"), LAND, wait(0, A), USE)]).to_dict())
    )
    assert not made["safe"]
    assert [r["kind"] for r in made["races"]] == ["write-read", "read-write", "read-write"]
    assert made["races"][0] == {
        "kind": "write-read", "buffer": "x", "offset": 0, "bytes": 64, "may": False,
        "count": 1,
        "missing": "nothing orders copy inp on dev:1 before launch add sum on dev:0: sync dev:1, "
        "or let dev:0 wait for an event recorded behind the copy, between them",
        "first": {
            "step": 0, "index": 1, "kind": "copy", "split": 0, "words": "copy inp on dev:1",
            "name": "inp", "stream": "dev:1",
        },
        "second": {
            "step": 0, "index": 3, "kind": "launch", "split": 0,
            "words": "launch add sum on dev:0", "op": "add", "name": "sum", "stream": "dev:0",
        },
    }  # fmt: skip
    assert made["superfluous"] == made["waits"] == [
        {
            "step": 1, "index": 2, "kind": "wait", "split": 0, "event": "0", "stream": "dev:0",
            "words": 'wait of dev:0 for "0"',
        }
    ]  # fmt: skip
    assert made["sufficient"] == made["refused"] == []


# which waits could go -----------------------------------------------------------------------------


def test_of_two_waits_for_the_same_either_can_go():
    run = [program(LAND, sync(B), sync(B), USE, sync(A))] * 3
    assert races(run) == []
    assert indices(superfluous(run, range(1, 2))) == [1, 2]
    assert indices(sufficient(run, range(1, 2))) == [2, 4]


def test_a_wait_is_removed_in_every_step():
    """The sync at a step's begin can go from any one step, and from no program."""
    run = [program(sync(B), Write(S, "inp"), LAND)] * 3
    assert superfluous(run) == []
    assert [at[:2] for at in sufficient(run)] == [(0, 0)]


def test_a_wait_that_prevents_no_race_is_superfluous():
    run = [program(LAND, sync(A), USE, sync(A), sync(B))] * 3
    assert races(run)
    assert indices(superfluous(run)) == [1, 4]  # the copy races with its reader, now or later
    assert indices(sufficient(run)) == [3]


def test_programs_of_a_cycle_have_their_waits_each():
    one, other = program(LAND, sync(B), USE), program(sync(A), sync(C))
    found = check_cycle([one, one, other], laps=2)
    assert [at[:2] for at in found.waits] == [(3, 1), (5, 0), (5, 1)]


@pytest.mark.parametrize(("cycle", "laps"), [([], 3), ([program()], 1)])
def test_no_loop_is_refused_in_one_line(cycle, laps):
    with pytest.raises(UsageError, match="are no loop; give at least one program and 2 laps"):
        check_cycle(cycle, laps=laps)


def test_any_iterable_of_programs_will_do():
    run = [program(LAND, Sync(0, stream=B), USE, wait(7, A))] * 2 + [program(LAND, USE)]
    assert races(p for p in run) == races(run) != []
    assert superfluous(p for p in run) == superfluous(run) != []
    assert sufficient(p for p in run) == sufficient(run) != []
    assert check_cycle(p for p in run) == check_cycle(run)
    product = make("mul_mat", "p", Tensor("w", F32, (4, 8)), Tensor("x", F32, (1, 8)))
    early = program(launch(A, [X, Y], [Z], product, programmatic=True))
    assert len(refused(iter([early, early]), lambda node: False)) == 1


@pytest.mark.parametrize(
    "commands",
    [
        (copy(X, S, Stream(5, 0)), launch(A, [X])),
        (launch(Stream(3, 0), [X]), Write(X, "inp")),
        (Sync(0, stream=Stream(-1, 0)),),
        (wait(0, Stream(7, 1)),),
    ],
)
def test_a_backend_that_is_not_there_is_refused_in_one_line(commands):
    for finds in (races, superfluous, lambda steps: check_cycle(steps)):
        with pytest.raises(UsageError, match=r"backend -?\d.*host, dev, two") as refusal:
            finds([program(*commands)])
        assert "\n" not in str(refusal.value)


CACHE, IDS = memory("cache", 256), memory("ids")


def decode(*more: Launch) -> Program:
    """A step that stores into the cache, attends to it, and leaves its result on the stream."""
    return program(launch(A, [X, IDS], [CACHE]), launch(A, [CACHE, X], [Y]), *more)


def test_a_step_that_turns_the_cache_is_one_of_the_train():
    shift = launch(A, [CACHE, IDS], [CACHE])
    train = [decode(), program(Write(S, "by"), copy(IDS, S, A), shift), decode(), decode()]
    assert check_cycle(train).n_races == 1  # the next lap's write meets the copy that reads late
    train[1] = program(Sync(0, stream=A), Write(S, "by"), copy(IDS, S, A), shift)
    found = check_cycle(train)
    assert found.safe and len(found.sufficient) == 1
    beside = program(launch(B, [CACHE, IDS], [CACHE]))
    kinds = {r.kind for r in races([decode(), beside, decode()])}
    assert kinds == {"write-write", "read-write", "write-read"}


HAND_ON, OF_OTHER = [launch(A, [], [X]), record(1, A), wait(1, B), record(0, B)], record(0, OTHER)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    "commands",
    {
        "a Record behind a Wait behind the last work, of that stream": [
            copy(X, S, OTHER), OF_OTHER, launch(B), wait(0, B), record(0, B), launch(OTHER),
            sync(event=0), Write(X, "in")],
        "and of one that had no work": [
            copy(X, S, OTHER), OF_OTHER, launch(A), wait(0, B), record(1, B), launch(OTHER),
            sync(event=1), Write(X, "in")],
        "a Record that has nothing but a Wait in front of it": [
            *HAND_ON, launch(B, [Y]), sync(event=0), Write(X, "in")],
        "and is waited for amid the work": [
            *HAND_ON, wait(0, A), launch(A, [X], [X]), sync(A), Write(X, "in")],
        "the order of a stream with parts in a plan and work behind it": [
            launch(A), copy(X, S, B), launch(A), sync(B), Write(S, "in")],
        "an event that another stream records behind the Wait for it": [
            launch(OTHER, [X]), OF_OTHER, launch(A), wait(0, A), record(0, B), copy(Y, S, B),
            launch(A, [], [X])],
    }.values(),
)  # fmt: skip
def test_plans_keep_what_an_event_hands_on(commands, scope):
    assert not races([program(*commands)])
    only_adds_order([program(*commands)], scope)
