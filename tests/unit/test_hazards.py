"""The hazard checker on programs made by hand, one for each rule, and on real ones."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from tests.happens_before import racing_pairs
from workbench.cli import main
from workbench.config import CopyStream, StepWait, SyncMode, Toggles
from workbench.engine.engine import Engine
from workbench.errors import UsageError
from workbench.graph import ops
from workbench.graph.fuse import FUSIONS, fuse
from workbench.graph.ir import F16, F32, I32, I64, Kind, Node, StepShape, Tensor
from workbench.graph.ops import make
from workbench.program import hazards
from workbench.program.commands import (
    HOST,
    Buffer,
    Command,
    Copy,
    Launch,
    Program,
    Range,
    Read,
    Record,
    Space,
    Stream,
    Sync,
    Wait,
    Write,
)
from workbench.program.hazards import check, races, refused, sufficient, superfluous
from workbench.program.ordering import race_of

A, B, C, OTHER = Stream(1, 0), Stream(1, 1), Stream(1, 2), Stream(2, 0)
ADD = make("add", "sum", Tensor("a", F32, (4,)), Tensor("b", F32, (4,)))


def memory(name: str, nbytes: int = 64) -> Range:
    return Range(Buffer(name, Space.DEVICE, nbytes, 1), 0, nbytes)


def part(whole: Range, offset: int, nbytes: int) -> Range:
    return Range(whole.buffer, whole.offset + offset, nbytes)


def program(*commands: Command) -> Program:
    backends = ("host", "dev", "two")
    return Program(list(commands), [], [], [1], backends, StepShape(1, 1, 256), "by_hand", "own")


def copy(dst: Range, src: Range, stream: Stream, name: str = "x") -> Copy:
    return Copy(dst, src, stream, name, 0)


def launch(
    stream: Stream, reads: Sequence[Range] = (), writes: Sequence[Range] = (), node: Node = ADD,
    programmatic: bool = False,
) -> Launch:  # fmt: skip
    return Launch(node, stream, tuple(reads), tuple(writes), None, 0, programmatic)


def record(event: int, stream: Stream) -> Record:
    return Record(event, stream, 0)


def wait(event: int, stream: Stream) -> Wait:
    return Wait(event, stream, 0)


def sync(stream: Stream | None = None, event: int | None = None) -> Sync:
    return Sync(0, stream=stream, event=event)


def pairs(*commands: Command, laps: int = 1, **how) -> list[tuple[int, int]]:
    """The racing pairs of one program, by index."""
    found = races([program(*commands)] * laps, **how)
    return sorted({(race.first.index, race.second.index) for race in found})


def places(found) -> list[int]:
    return [place.index for place in found]


S, X, Y, Z = memory("staging"), memory("x"), memory("y"), memory("z")
LAND, USE = copy(X, S, B, "inp"), launch(A, [X], [Y])

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


def test_same_offsets_of_two_buffers_are_two_places():
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


def test_a_ring_of_two_slots_waits_for_the_slot_not_for_the_step():
    def step(slot: int) -> Program:
        staging, place = part(S, 32 * slot, 32), part(X, 32 * slot, 32)
        return program(
            sync(event=slot), Write(staging, "inp"), copy(place, staging, A), launch(A, [place]),
            record(slot, A),
        )  # fmt: skip

    ring = [step(0), step(1)]
    found = check(ring)
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
    with Engine.load(tiny_model("tiny-llama", "Q8_0"), device="null") as engine:
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


def test_every_value_dependent_op_says_which_access_is_a_superset():
    assert hazards.SUPERSETS.keys() == {o.name for o in ops.OPS.values() if o.value_dependent}


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


# programmatic launches ----------------------------------------------------------------------------

W = memory("weights")
PRODUCT = make("mul_mat", "p", Tensor("w", F32, (4, 8), Kind.WEIGHT), Tensor("x", F32, (1, 8)))


def early(reads: Sequence[Range] = (W, X), writes: Sequence[Range] = (Y,)) -> Launch:
    return launch(A, reads, writes, PRODUCT, programmatic=True)


def test_a_programmatic_launch_that_declares_its_wait_keeps_stream_order():
    commands = (launch(A, [], [X]), early(), early((W, Y), (Z,)), launch(A, [Z]))
    assert pairs(*commands, laps=3) == pairs(*commands, declared=lambda node: True) == []
    assert refused([program(*commands)], lambda node: True) == []


def test_one_that_does_not_is_refused_and_its_races_are_named():
    run = [program(launch(A, [], [X]), early())] * 2
    found = check(run[:1], declared=lambda node: False)
    assert places(found.refused) == [1] and not found.safe
    race = found.races[0]
    assert (race.first.index, race.second.index) == (0, 1)
    assert race.missing.endswith("declares no griddepcontrol.wait: launch it without pdl")
    harmless = [program(launch(A, [], [Z]), early((W, X), (Y,)), copy(S, Z, A))]
    assert races(harmless, declared=lambda node: False) == []
    assert places(refused(harmless, lambda node: False)) == [1]


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
}  # fmt: skip


@pytest.mark.parametrize("case", EARLY)
def test_weights_are_read_ahead_of(case):
    commands, expected = EARLY[case]
    assert pairs(*commands) == expected


def test_weights_written_in_front_of_a_programmatic_launch_say_why():
    (race,) = races([program(launch(A, [], [W]), early())])
    assert race.missing.endswith("may read weights before its turn: launch it without pdl")
    (race,) = races([program(copy(W, S, B), early())])
    assert race.missing.endswith("wait for an event recorded behind the copy, between them")


# which waits could go -----------------------------------------------------------------------------


def test_of_two_waits_for_the_same_either_can_go_but_not_both():
    run = [program(LAND, sync(B), sync(B), USE, sync(A))] * 3
    assert races(run) == []
    assert places(superfluous(run, range(1, 2))) == [1, 2]
    assert places(sufficient(run, range(1, 2))) == [2, 4]


def test_a_wait_is_removed_in_every_step():
    """The sync at a step's begin can go from any one step, and from no program."""
    run = [program(sync(B), Write(S, "inp"), LAND)] * 3
    assert superfluous(run) == []
    assert [place[:2] for place in sufficient(run)] == [(0, 0)]


def test_waits_of_streams_are_candidates_as_syncs_are_and_records_are_not():
    found = check([program(LAND, record(0, B), wait(0, A), wait(0, A), USE, sync(A))])
    assert places(found.waits) == [2, 3, 5]
    assert places(found.superfluous) == [2, 3]
    assert places(found.sufficient) == [3, 5]
    assert {place.step for place in found.waits} == {1}  # the steady lap


def test_where_something_races_anyway_a_wait_is_superfluous_that_keeps_nothing_else_from_it():
    run = [program(LAND, sync(A), USE, sync(A), sync(B))] * 3
    assert races(run)
    assert places(superfluous(run)) == [1, 4]  # the copy races with its reader, now or later
    assert places(sufficient(run)) == [3]


def test_programs_of_a_cycle_have_their_waits_each():
    one, other = program(LAND, sync(B), USE), program(sync(A), sync(C))
    found = check([one, one, other], laps=2)
    assert [place[:2] for place in found.waits] == [(3, 1), (5, 0), (5, 1)]


def test_findings_are_json():
    made = json.loads(
        json.dumps(check([program(Write(S, "inp"), LAND, wait(0, A), USE)]).to_dict())
    )
    assert not made["safe"]
    assert [r["kind"] for r in made["races"]] == ["write-read", "read-write", "read-write"]
    assert made["races"][0] == {
        "kind": "write-read", "buffer": "x", "offset": 0, "bytes": 64, "may": False,
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
            "step": 1, "index": 2, "kind": "wait", "split": 0, "event": 0, "stream": "dev:0",
            "words": "wait of dev:0 for event 0",
        }
    ]  # fmt: skip
    assert made["sufficient"] == made["refused"] == []


@pytest.mark.parametrize(("cycle", "laps"), [([], 3), ([program()], 1)])
def test_no_loop_is_refused_in_one_line(cycle, laps):
    with pytest.raises(UsageError, match="are no loop; give at least one program and 2 laps"):
        check(cycle, laps=laps)


# real programs ------------------------------------------------------------------------------------

WAYS = [
    (sync_mode, stream, step_wait)
    for sync_mode in SyncMode
    if sync_mode != SyncMode.AUTO
    for stream in (CopyStream.OWN, CopyStream.COMPUTE)
    for step_wait in StepWait
    if (sync_mode, stream) != (SyncMode.EVENT_GUARDED, CopyStream.COMPUTE)
]


@pytest.fixture(scope="module")
def engine_of(tiny_model):
    """`engine_of(sync, copy_stream, step_wait)`: an engine of ubatches of 8 that computes nothing,
    for combinations that race too."""
    path = tiny_model("tiny-llama", "Q8_0")
    with Engine.load(path, device="null", n_ubatch=8, unsafe=True) as first:

        def make_one(sync_mode: str, stream: str, step_wait: str = StepWait.EVERY) -> Engine:
            return first.variant(Toggles(sync=sync_mode, copy_stream=stream, step_wait=step_wait))

        yield make_one


@pytest.mark.parametrize("n_tokens", [1, 20])
@pytest.mark.parametrize("way", WAYS)
def test_a_mode_races_where_lowering_says_so(engine_of, way, n_tokens):
    """Of a decode, and of prompts of three ubatches; by the naive relation too."""
    with engine_of(*way) as engine:
        cycle = engine.programs(n_tokens)
        says = race_of(engine._ordering, engine.backend.capabilities)
        train = n_tokens > engine.config.n_ubatch  # else every step ends with a wait
    found = races(cycle * 2)
    within_a_step = way[:2] == (SyncMode.IMPLICIT, CopyStream.OWN)
    assert bool(found) == bool(says and (train or within_a_step))
    assert {(r.first[:2], r.second[:2]) for r in found} <= racing_pairs(cycle * 2)
    assert bool(found) == bool(racing_pairs(cycle * 2))


@pytest.mark.parametrize("stream", [CopyStream.OWN, CopyStream.COMPUTE])
def test_per_copy_waits_for_every_copy_but_one_in_vain(engine_of, stream):
    with engine_of("per_copy", stream) as engine:
        (cycle,) = engine.programs(1)
    n_copies = len([c for c in cycle.commands if isinstance(c, Copy) and c.split >= 0])
    found = check([cycle])
    assert found.safe and n_copies == 6
    assert len(found.superfluous) >= n_copies - 1
    needed = [hazards.Place(1, i, cycle.commands[i]) for i in (p.index for p in found.sufficient)]
    logits = needed[-1].command
    assert isinstance(logits, Sync) and logits.event is not None
    # on one stream its order does the rest; on two the launches want the copies waited for, once
    assert len(needed) == (1 if stream == CopyStream.COMPUTE else 2)


@pytest.mark.parametrize("stream", [CopyStream.OWN, CopyStream.COMPUTE])
def test_copy_boundary_is_free_of_races_and_its_first_wait_superfluous_in_a_decode(
    engine_of, stream
):
    with engine_of("copy_boundary", stream) as engine:
        found = check(engine.programs(1))
    assert found.safe and found.waits[0] in found.superfluous
    assert len(found.sufficient) == (1 if stream == CopyStream.COMPUTE else 2)


def test_in_a_train_without_waits_the_first_wait_of_copy_boundary_is_needed(engine_of):
    with engine_of("copy_boundary", CopyStream.OWN, StepWait.OUTPUTS) as engine:
        found = check(engine.programs(20))
    assert found.safe
    kept = {place.step for place in found.sufficient}
    assert kept == {3, 4, 5}
    assert found.waits[2] in found.sufficient  # of the second ubatch, whose copies meet the first


def test_implicit_on_its_own_stream_races_within_a_step(engine_of):
    with engine_of("implicit", CopyStream.OWN) as engine:
        found = races(engine.programs(1))
    assert {r.first.command.kind for r in found} == {"copy"}
    assert {r.second.command.kind for r in found} == {"launch"}


def test_a_program_of_the_host_alone_has_no_waits(tiny_model):
    with Engine.load(tiny_model("tiny-llama", "Q8_0"), device="host") as engine:
        found = check(engine.programs(1))
    assert found.safe and found.waits == []


# the command --------------------------------------------------------------------------------------


@pytest.fixture
def call(capsys, tiny_model):
    """Runs `workbench check` on a tiny model; returns (exit status, stdout, stderr)."""

    def run(*flags: object) -> tuple[int, str, str]:
        path, status = tiny_model("tiny-llama", "Q8_0"), 0
        try:
            main(["check", "-m", str(path), "--device", "null", *map(str, flags)])
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_check_prints_what_is_proved(call):
    status, out, _ = call()
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "pattern      h scscg"
    assert lines[2] == "races        none"
    assert "superfluous  11 of 13 waits: each can go alone" in lines
    assert "sufficient   2 of 13 waits: with these the others can go together" in lines
    assert lines[-1].endswith("sync of event 0")


def test_check_ends_with_3_where_commands_race_and_runs_what_an_engine_refuses(call):
    status, out, _ = call("--sync", "implicit", "--copy-stream", "own")
    assert status == 3
    assert "races        20" in out
    assert "nothing orders copy inp_pos on null:1 before launch rope" in out


def test_check_of_a_prompt_is_of_all_its_ubatches(call):
    ask = ("--sync", "implicit", "--copy-stream", "compute", "--step-wait", "outputs")
    assert call(*ask)[0] == 0
    status, out, _ = call(*ask, "--n-tokens", 20, "--n-ubatch", 8, "--json")
    made = json.loads(out)
    assert status == 3 and made["patterns"] == ["h aaaaag", "h aaaaag", "h aaaaaag"]
    assert {r["kind"] for r in made["races"]} >= {"read-write"}
    assert all(r["first"]["kind"] == "copy" for r in made["races"])
    assert [w["event"] for w in made["sufficient"]] == [0]


def test_check_of_a_prompt_beyond_the_context_is_refused_before_a_model_is_read(call):
    status, _, err = call("--n-tokens", 3000)
    assert status == 2 and "3000 tokens do not fit the context" in err
