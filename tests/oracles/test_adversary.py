"""The adversary finds what the contract leaves open, whatever the order, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests.oracles.adversary import SEEDS, STRATEGIES, Adversary, WrongRead, run, search
from tests.oracles.interleavings import Interleavings, TooManyStates
from tests.oracles.random_runs import node, program, random_run
from tests.profiles import examples
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

N = 12  # bytes of a buffer
STAGING, INPUT, RESULT = (Buffer(name, Space.PINNED, N, 1) for name in ("staging", "in", "out"))
S, I, O = (Range(b, 0, N) for b in (STAGING, INPUT, RESULT))  # noqa: E741
COMPUTE, COPIES = Stream(1, 0), Stream(1, 1)


def write(to: Range = S) -> Write:
    return Write(to, "x")


def upload(stream: Stream = COPIES, dst: Range = I, src: Range = S) -> Copy:
    return Copy(dst, src, stream, "x", 0)


def compute(*reads: Range, to: Sequence[Range] = (), on: Stream = COMPUTE) -> Launch:
    return Launch(node("y"), on, reads, tuple(to), None, 0)


def wrong(*steps: Sequence[Command], one_order: bool = True) -> list[WrongRead]:
    return search([program(commands) for commands in steps], one_order=one_order)


def readers(found: list[WrongRead]) -> set[tuple[int, int] | None]:
    return {w.reader and w.reader[:2] for w in found}


# what is wrong and what is not -------------------------------------------------------------------

SYNC_COPIES = Sync(0, stream=COPIES)
SAFE = {
    "the host waits before it writes again": [write(), upload(), SYNC_COPIES, write()],
    "the host waits before it reads": [write(), upload(), SYNC_COPIES, Read(I, "x")],
    "one stream": [upload(COMPUTE), compute(I, to=[I]), compute(I), upload(COMPUTE)],
    "a wait across streams": [upload(), Record(0, COPIES, 0), Wait(0, COMPUTE, 0), compute(I)],
    "a sync on the event": [upload(), Record(0, COPIES, 0), Sync(0, event=0), Read(I, "x")],
    "events in a chain": [
        upload(), Record(0, COPIES, 0), Wait(0, COMPUTE, 0), Record(1, COMPUTE, 0),
        Sync(0, event=1), write(),
    ],
    "the host computes at once": [
        write(), compute(S, to=[I], on=Stream(HOST, 0)), write(), Read(I, "y"),
    ],
    "a host launch before a device one": [
        compute(to=[S], on=Stream(HOST, 0)), upload(COMPUTE), compute(I),
    ],
    "two readers": [write(), upload(COPIES, I), upload(COMPUTE, O)],
    "other bytes": [upload(COPIES, Range(INPUT, 0, 4)), compute(Range(INPUT, 4, 8))],
}  # fmt: skip
# who sees something wrong; None is the end of the run
UNSAFE: dict[str, tuple[list[Command], set[int | None]]] = {
    "a source written under a copy": ([write(), upload(), write()], {1}),
    "a result read under a copy": ([upload(), Read(I, "x")], {1}),
    "a launch beside the copy it needs": ([upload(), compute(I)], {1}),
    "a copy over what a launch reads": ([compute(I), upload()], {0}),
    "two writes": ([upload(COPIES), upload(COMPUTE, src=O)], {None}),
    "two writes and a reader": (
        [upload(COPIES), upload(COMPUTE, src=O), compute(I, to=[O])], {2, None},
    ),
    "a wait too early": ([Wait(0, COMPUTE, 0), upload(), Record(0, COPIES, 0), compute(I)], {3}),
    "a record too early": ([Record(0, COPIES, 0), upload(), Wait(0, COMPUTE, 0), compute(I)], {3}),
    "a sync on another stream": ([upload(), Sync(0, stream=COMPUTE), Read(I, "x")], {2}),
    "an event recorded again elsewhere": (
        [upload(), Record(0, COPIES, 0), Record(0, COMPUTE, 0), Sync(0, event=0), write()], {0},
    ),
    "some bytes of a range": (
        [upload(COPIES, Range(INPUT, 0, 5)), compute(Range(INPUT, 4, 8))], {1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAFE)
def test_what_the_contract_orders_is_never_wrong(name):
    assert wrong(SAFE[name]) == []


@pytest.mark.parametrize("name", UNSAFE)
def test_what_the_contract_leaves_open_is_found_by_some_seed(name):
    commands, expected = UNSAFE[name]
    adversary = Adversary([program(commands)])
    found = {r and r[1] for seed in SEEDS for r in readers(adversary.run(seed))}
    assert found == expected


def test_a_write_overwritten_unseen_leaves_no_trace():
    """Two copies race for the same bytes, and a third one, behind both, decides what they hold."""
    both = [upload(COPIES), upload(COMPUTE, src=O), Sync(0, stream=COMPUTE), SYNC_COPIES]
    assert readers(wrong(both)) == {None}
    assert wrong([*both, upload(), SYNC_COPIES, Read(I, "x")]) == []


def test_events_keep_their_records_from_step_to_step():
    step = [write(), upload(), Record(0, COPIES, 0), Wait(0, COMPUTE, 0), compute(I)]
    guarded = [Sync(0, event=1), *step, Record(1, COMPUTE, 0)]
    assert wrong(guarded, guarded, guarded) == []
    assert wrong(*[[Sync(0, event=2), *guarded[1:]]] * 3) != []


# copies without an order -------------------------------------------------------------------------


def test_without_one_order_only_a_sync_orders_a_copy():
    on_compute = [upload(COMPUTE), compute(I)]
    event = [upload(COMPUTE), Record(0, COMPUTE, 0), Sync(0, event=0), compute(I)]
    drained = [upload(COMPUTE), Sync(0, stream=COMPUTE), compute(I)]
    behind = [compute(to=[S]), upload(COMPUTE)]
    for commands, safe in ((on_compute, False), (event, False), (drained, True), (behind, False)):
        assert wrong(commands) == []
        assert (not wrong(commands, one_order=False)) == safe


# how it looks ------------------------------------------------------------------------------------


def test_the_same_seed_makes_the_same_schedule():
    steps = [program(UNSAFE["two writes and a reader"][0])] * 2
    adversary = Adversary(steps)
    several = [adversary.run(seed) for seed in SEEDS]
    assert several == [run(steps, seed) for seed in SEEDS]
    assert len({tuple(found) for found in several}) > 3


def test_strategies_are_what_they_are_called():
    adversary = Adversary([program(UNSAFE["a source written under a copy"][0])])
    found = {name: [bool(adversary.run(seed, name)) for seed in SEEDS] for name in STRATEGIES}
    always = {name for name, each in found.items() if all(each)}
    assert always == {"lazy", "one starved", "sources late", "destinations first"}
    assert not any(found["eager"])  # nothing is ever pending: program order
    assert all(any(found[name]) and not all(found[name]) for name in ("random", "some starved"))


@settings(max_examples=examples(100))
@given(st.randoms(use_true_random=False), st.booleans())
def test_eager_is_program_order(rng, one_order):
    assert Adversary(random_run(rng), one_order).run(0, "eager") == []


# against every interleaving ----------------------------------------------------------------------

runs = st.randoms(use_true_random=False).map(random_run)


def tried(steps: Sequence[Program], one_order: bool, seeds=SEEDS) -> set:
    """What the adversary finds, byte by byte."""
    adversary = Adversary(steps, one_order)
    return {
        (w.reader and w.reader.key, w.buffer, byte)
        for seed in seeds
        for w in adversary.run(seed)
        for byte in range(w.offset, w.offset + w.nbytes)
    }


def possible(steps: Sequence[Program], one_order: bool) -> set:
    """What some interleaving makes wrong, byte by byte; a run with too many is no example."""
    try:
        wrong = Interleavings(steps, one_order).wrong
    except TooManyStates:
        reject()
    return {
        (w.reader, w.buffer, byte) for w in wrong for byte in range(w.offset, w.offset + w.nbytes)
    }


@settings(max_examples=examples(150))
@given(runs, st.booleans())
def test_the_adversary_finds_only_what_can_be(steps, one_order):
    assert tried(steps, one_order) <= possible(steps, one_order)


def test_the_adversary_misses_no_unsafe_run():
    unsafe = found_whole = 0
    for number in range(100):
        steps, one_order = random_run(Random(number)), number % 3 > 0
        if exact := possible(steps, one_order):
            unsafe += 1
            found = tried(steps, one_order)
            assert found, number
            found_whole += found == exact
    assert unsafe > 30
    assert found_whole > 0.95 * unsafe
