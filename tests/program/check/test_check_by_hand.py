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
from tests.graphs import Decoder
from tests.oracles.adversary import Adversary
from tests.oracles.happens_before import racing_pairs
from tests.planned import SCOPES, only_adds_order
from tests.removable import superfluous
from workbench.common.errors import UsageError
from workbench.graph import ops
from workbench.graph.fuse import FUSIONS, fuse
from workbench.graph.ir import F16, F32, I32, I64, Q8_0, Kind, Node, Tensor
from workbench.graph.ops import make
from workbench.program.check.findings import MOST_RACES
from workbench.program.check.hazards import apart, check_cycle, races, refused
from workbench.program.check.report import lines
from workbench.program.commands import HOST, Command, Launch, Range, Replay, Stream, Write

W = memory("weights")
PRODUCT = make("mul_mat", "p", Tensor("w", F32, (4, 8), Kind.WEIGHT), Tensor("x", F32, (1, 8)))


def early(reads: Sequence[Range] = (W, X), writes: Sequence[Range] = (Y,)) -> Launch:
    return launch(A, reads, writes, PRODUCT, programmatic=True)


def plan(*parts: Command, stream: Stream = A) -> Replay:
    return Replay(parts, stream, 0)


# by name, the commands and the pairs that race; an index stands for a command of the one step
CASES: dict[str, tuple[Sequence[Command], Any]] = {
    "stream order": ((copy(X, S, A), USE), []),
    "a sync of the stream": ((LAND, sync(B), USE), []),
    "an event of a third stream that waited": (
        (LAND, record(0, B), wait(0, C), record(1, C), wait(1, A), USE), [],
    ),
    "the latest record": ((record(0, B), LAND, record(0, B), wait(0, A), USE), []),
    "two streams": ((LAND, USE), [(0, 1)]),
    "a sync of another stream": ((LAND, sync(A), USE), [(0, 2)]),
    "an event recorded before it": ((record(0, B), LAND, wait(0, A), USE), [(1, 3)]),
    "one stream's number on two backends": ((copy(X, S, Stream(2, 1)), launch(B, [X])), [(0, 1)]),
    "a launch of the host, which waits for nobody": (
        (LAND, launch(Stream(HOST, 0), [X], [Y])), [(0, 1)],
    ),
    "early: the launch before it": ((launch(A, [], [W]), early()), [(0, 1)]),
    "early: a launch before a chain": (
        (launch(A, [], [W]), early((Z, X), ()), early()), [(0, 2)],
    ),
    "early: a copy that it waits for": (
        (copy(W, S, B), record(0, B), wait(0, A), early()), [],
    ),
    "early: a copy on another stream": ((copy(W, S, B), early()), [(0, 1)]),
    "early: a launch before a wait for an event never recorded": (
        (launch(A, [], [W]), wait(7, A), early()), [(0, 2)],
    ),
    "early: a launch that the stream waits for by an event of its own": (
        (launch(A, [], [W]), record(0, A), wait(0, A), early()), [],
    ),
    "plans: parts on the plan's stream, its work before and after": (
        (copy(X, S, A), plan(USE), launch(A, [Y], [Z])), [],
    ),
    "plans: what the plan's stream has after begins when they are over": ((plan(LAND), USE), []),
    "plans: and so does an event after, and the host": (
        (plan(LAND), record(0, A), wait(0, B), launch(B, [X]), sync(A), Write(S, "in")), [],
    ),
    "plans: no order among the parts of two streams": (
        (plan(LAND, USE),), [((0, 0, 0), (0, 0, 1))],
    ),
    "plans: no order with the same stream before": (
        (copy(X, S, B), plan(launch(B, [X]))), [(0, (0, 1, 0))],
    ),
    "plans: a sync on that stream waits for no part": (
        (plan(LAND), sync(B), Write(S, "in")), [((0, 0, 0), 2)],
    ),
    "plans: nobody outside knows of a Record in a plan": (
        (plan(LAND, record(0, B)), wait(0, B), launch(B, [X])), [((0, 0, 0), 2)],
    ),
    "plans: a Wait for what is not recorded in the plan waits for nothing": (
        (LAND, record(0, B), plan(wait(0, A), USE)), [(0, (0, 2, 1))],
    ),
}  # fmt: skip


def keys(expected: Any) -> set[tuple]:
    at = [[p if isinstance(p, tuple) else (0, p, None) for p in pair] for pair in expected]
    return {*map(tuple, at)}


@pytest.mark.parametrize("case", CASES)
def test_what_races_is_what_nothing_orders(case):
    commands, expected = CASES[case]
    run = [program(*commands)]
    found = {(race.first.key, race.second.key) for race in races(run)}
    assert found == racing_pairs(run) == keys(expected)
    assert bool(Adversary(run).search()) == bool(expected)


LOOSE = {
    "a copy before a launch of its stream": ((copy(X, S, A), USE), [(0, 1)]),
    "a sync of an event after it": ((copy(X, S, B), record(0, B), sync(event=0), USE), [(0, 3)]),
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
    assert racing_pairs([program(*commands)], False) == keys(expected)


def test_every_pair_is_found_not_only_the_latest():
    """Two readers, a write between them that races with both, and a later reader of it."""
    commands = (launch(A, [X]), launch(B, [X]), copy(X, S, C), launch(A, [X]), launch(A, [], [X]))
    assert pairs(*commands) == [(0, 2), (1, 2), (1, 4), (2, 3), (2, 4)]
    assert pairs(launch(A, [X]), launch(A, [X]), LAND) == [(0, 2), (1, 2)]
    (race,) = races([program(LAND, launch(A, [X], [X]))])
    assert race.kind == "write-write"  # once, though it reads too


STEP = (Write(S, "inp"), copy(X, S, B), record(0, B), wait(0, A), launch(A, [X], [Y]))


def test_a_write_of_the_next_step_overtakes_a_copy():
    assert not races([program(*STEP)])
    found = races([program(*STEP)] * 2)
    assert [(r.first[:2], r.second[:2], r.kind) for r in found] == [
        ((0, 1), (1, 0), "read-write"),  # the write of staging
        ((0, 4), (1, 1), "read-write"),  # the copy over what is still read
    ]
    assert found[0].missing == (
        "nothing orders copy x on dev:1 before write inp of the next step: sync dev:1 (or an event "
        "recorded after the copy) between them"
    )


def test_a_command_issued_anew_is_the_latest_again():
    """What waits for the one issued between its two issues is not ordered after the second."""
    again = program(launch(A, [], [X]))
    between, last = program(launch(A, [], [X]), record(0, A)), program(wait(0, B), launch(B, [X]))
    assert races([again, between, last]) == []
    (race,) = races([again, between, again, last])
    assert (race.first[:2], race.second[:2]) == ((2, 0), (3, 1))


def test_a_launch_that_declares_no_wait_is_refused():
    run, no = [program(launch(A, [], [X]), early())] * 2, lambda node: False
    found = check_cycle(run[:1], declared=no)
    assert indices(found.refused) == [1] and not found.safe
    race = found.races[0]
    assert (race.first.index, race.second.index) == (0, 1)
    assert race.missing.endswith("declares no griddepcontrol.wait: launch it without pdl")
    harmless = [program(launch(A, [], [Z]), early((W, X), (Y,)), copy(S, Z, A))]
    assert races(harmless, declared=no) == [] and indices(refused(harmless * 2, no)) == [1]
    found = check_cycle([program(plan(launch(A), launch(A, programmatic=True)))], declared=no)
    assert str(*found.refused) == "step 0 #0 part 1 launch sum"
    assert not found.races and not found.safe


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


def test_a_race_on_a_superset_only_may_be():
    cache, rows = memory("cache"), memory("rows")
    k, v = Tensor("k", F16, (4, 8), Kind.CACHE), Tensor("v", F16, (4, 8))
    node = make("set_rows", "store", k, Tensor("x", F32, (1, 8)), Tensor("i", I64, (1,)), n_kv=4)
    store = launch(B, [rows, memory("indices")], [cache], node)
    node = make("attention", "kqv", Tensor("q", F32, (1, 1, 8)), k, v, Tensor("mask", F16, (1, 4)),
                n_kv=4, n_head_kv=1, scale=1.0)  # fmt: skip
    attention = launch(A, [X, cache, memory("v"), Y], [Z], node)
    for first, second, name, may in (
        (store, attention, "cache", True),
        (store, launch(A, [], [rows]), "rows", False),  # what is stored is read whole
        (copy(X, S, B), attention, "x", False), (copy(Y, S, B), attention, "y", False),
    ):  # fmt: skip
        (race,) = races([program(first, second)])
        assert (race.buffer.name, race.may) == (name, may)


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


def test_a_part_of_a_fused_node_makes_its_access_vague():
    graph = fuse(Decoder("tiny-llama", Q8_0).graph(), FUSIONS)
    node = next(n for n in graph.nodes if n.parts and any(p.op == "set_rows" for p in n.parts))
    reads = [memory(t.name) for t, *_ in ops.reads(node)]
    writes = {memory(t.name): t.kind == Kind.CACHE for t, *_ in ops.writes(node)}
    fused = launch(A, reads, [*writes], node)
    for r in (*reads, *writes):
        (race,) = races([program(launch(B, [], [r]), fused)])
        assert race.may == writes.get(r, False)


def test_a_wait_in_a_plan_is_judged_as_one_outside():
    found = check_cycle([program(plan(LAND, record(0, B), wait(0, A), wait(0, A), USE), sync(A))])
    assert found.safe
    assert [at.key for at in found.waits] == [(1, 0, 2), (1, 0, 3), (1, 1, None)]
    assert found.superfluous == found.waits
    assert [at.key for at in found.sufficient] == [(1, 0, 3)]
    (told,) = found.to_dict()["sufficient"]
    assert told["words"] == 'wait of dev:0 for "0" in a plan'
    assert (told["step"], told["index"], told["part"]) == (1, 0, 3)


COPY, SUM = "nothing orders copy inp on dev:1", "launch add sum on dev:0"
ITS = "copies keep no order"
TOLD: list[tuple[list[Command], bool, tuple[str, ...]]] = [
    ([LAND, sync(A), USE], True, (f"{COPY} before {SUM}: sync dev:1, or let dev:0 wait for an "
     "event recorded after the copy, between them",)),
    ([plan(LAND, USE)], True, (f"{COPY} before {SUM} in a plan: record an event after the copy in "
     "the plan, and let dev:0 wait for it",)),
    ([LAND, plan(USE)], True, (f"{COPY} before {SUM} in a plan: sync dev:1, or let dev:0",)),
    ([plan(LAND), launch(B, [X])], True, (f"{COPY} in a plan before launch add sum on dev:1: sync "
     "dev:0, or let dev:1", "recorded after the plan")),
    ([plan(LAND), Write(S, "in")], True, (f"{COPY} in a plan before write in: sync dev:0 (or",)),
    ([launch(A, [], [W]), early()], True, ("the second is programmatic", "launch it without pdl")),
    ([copy(X, S, A), USE], False, (f"before {SUM}: {ITS} with their stream, sync dev:0 between",)),
    ([early(), copy(W, S, A)], False, ("copy x on dev:0: sync dev:0 (or", "after the launch")),
    ([plan(copy(X, S, A, "inp"), USE)], False,
     (ITS, "leave the copy out of the plan and sync dev:0")),
]  # fmt: skip


@pytest.mark.parametrize(("commands", "one_order", "says"), TOLD)
def test_a_race_names_commands_and_what_would_order_them(commands, one_order, says):
    (race,) = races([program(*commands)], one_order=one_order)
    assert all(words in race.missing for words in says), race.missing


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
    nodes = [make("add", f"n{i}", Tensor("a", F32, (4,)), Tensor("b", F32, (4,)))
             for i in range(MOST_RACES + 50)]  # fmt: skip
    found = check_cycle([program(LAND, *(launch(A, [X], [Y], node) for node in nodes))])
    assert len(found.races) == MOST_RACES
    assert found.more == found.n_races - MOST_RACES > 50
    told = json.loads(json.dumps(found.to_dict()))
    assert (told["n_races"], told["more"]) == (found.n_races, found.more)
    assert [race["count"] for race in told["races"]] == [1] * MOST_RACES
    assert f"  and {found.more} more, of other commands" in lines([found.steps[0]], found)


def test_findings_are_json():
    found = check_cycle([program(Write(S, "inp"), LAND, wait(0, A), USE)]).to_dict()
    made = json.loads(json.dumps(found))
    assert not made["safe"] and made["sufficient"] == made["refused"] == []
    assert [r["kind"] for r in made["races"]] == ["write-read", "read-write", "read-write"]
    first, on = made["races"][0], {"step": 0, "split": 0}
    assert first.pop("first") == on | {
        "index": 1, "kind": "copy", "words": "copy inp on dev:1", "name": "inp", "stream": "dev:1",
    }  # fmt: skip
    assert first.pop("second") == on | {
        "index": 3, "kind": "launch", "words": SUM, "op": "add", "name": "sum", "stream": "dev:0",
    }  # fmt: skip
    assert first.pop("missing").startswith(COPY) and first == {
        "kind": "write-read", "buffer": "x", "offset": 0, "bytes": 64, "may": False, "count": 1,
    }  # fmt: skip
    assert made["superfluous"] == made["waits"] == [
        {"step": 1, "index": 2, "kind": "wait", "split": 0, "event": "0", "stream": "dev:0",
         "words": 'wait of dev:0 for "0"'}
    ]  # fmt: skip


def test_programs_of_a_cycle_have_their_waits_each():
    one, other = program(LAND, sync(B), USE), program(sync(A), sync(C))
    found = check_cycle(iter([one, one, other]), laps=2)
    assert [at[:2] for at in found.waits] == [(3, 1), (5, 0), (5, 1)]
    for cycle, laps in (([], 3), ([program()], 1)):
        with pytest.raises(UsageError, match="are no loop; give at least one program and 2 laps"):
            check_cycle(cycle, laps=laps)


@pytest.mark.parametrize(
    "commands",
    [
        (copy(X, S, Stream(5, 0)), launch(A, [X])), (launch(Stream(3, 0), [X]), Write(X, "inp")),
        (sync(Stream(-1, 0)),), (wait(0, Stream(7, 1)),),
    ],
)  # fmt: skip
def test_a_backend_that_is_not_there_is_refused_in_one_line(commands):
    for finds in (races, superfluous, check_cycle):
        with pytest.raises(UsageError, match=r"backend -?\d.*host, dev, two") as refusal:
            finds([program(*commands)])
        assert "\n" not in str(refusal.value)


HAND_ON, OF_OTHER = [launch(A, [], [X]), record(1, A), wait(1, B), record(0, B)], record(0, OTHER)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    "commands",
    {
        "a Record after a Wait after the last work, of that stream": [
            copy(X, S, OTHER), OF_OTHER, launch(B), wait(0, B), record(0, B), launch(OTHER),
            sync(event=0), Write(X, "in")],
        "and of one that had no work": [
            copy(X, S, OTHER), OF_OTHER, launch(A), wait(0, B), record(1, B), launch(OTHER),
            sync(event=1), Write(X, "in")],
        "a Record that has nothing but a Wait before it": [
            *HAND_ON, launch(B, [Y]), sync(event=0), Write(X, "in")],
        "and is waited for amid the work": [
            *HAND_ON, wait(0, A), launch(A, [X], [X]), sync(A), Write(X, "in")],
        "the order of a stream with parts in a plan and work after it": [
            launch(A), copy(X, S, B), launch(A), sync(B), Write(S, "in")],
        "an event that another stream records after the Wait for it": [
            launch(OTHER, [X]), OF_OTHER, launch(A), wait(0, A), record(0, B), copy(Y, S, B),
            launch(A, [], [X])],
    }.values(),
)  # fmt: skip
def test_plans_keep_what_an_event_hands_on(commands, scope):
    assert not races([program(*commands)])
    only_adds_order([program(*commands)], scope)
