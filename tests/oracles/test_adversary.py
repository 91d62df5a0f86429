"""The adversary finds what the contract leaves open, whatever the order, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests.oracles.adversary import SEEDS, STRATEGIES, Adversary, run, search
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


def upload(stream: Stream = COPIES, dst: Range = I, src: Range = S) -> Copy:
    return Copy(dst, src, stream, "x", 0)


def compute(*reads: Range, to: Sequence[Range] = (), on: Stream = COMPUTE) -> Launch:
    return Launch(node("y"), on, reads, tuple(to), None, 0)


WRITE, READ, UP = Write(S, "x"), Read(I, "x"), upload()
RECORD, WAIT, SYNC = Record("0", COPIES, 0), Wait("0", COMPUTE, 0), Sync(0, event="0")
DRAIN, DRAIN_COMPUTE = Sync(0, stream=COPIES), Sync(0, stream=COMPUTE)
STEP = [WRITE, UP, RECORD, WAIT, compute(I), Record("1", COMPUTE, 0)]
# and who sees something wrong; None is the end of the run
CASES: dict[str, tuple[list[Command], set[int | None]]] = {
    "the host waits before it writes again": ([WRITE, UP, DRAIN, WRITE], set()),
    "the host waits before it reads": ([WRITE, UP, DRAIN, READ], set()),
    "one stream": ([upload(COMPUTE), compute(I, to=[I]), compute(I), upload(COMPUTE)], set()),
    "a wait across streams": ([UP, RECORD, WAIT, compute(I)], set()),
    "a sync on the event": ([UP, RECORD, SYNC, READ], set()),
    "a chain": ([UP, RECORD, WAIT, Record("1", COMPUTE, 0), Sync(0, event="1"), WRITE], set()),
    "the host computes at once": (
        [WRITE, compute(S, to=[I], on=Stream(HOST, 0)), WRITE, READ], set()),
    "a host launch before a device one": (
        [compute(to=[S], on=Stream(HOST, 0)), upload(COMPUTE), compute(I)], set()),
    "two readers": ([WRITE, UP, upload(COMPUTE, O)], set()),
    "other bytes": ([upload(COPIES, Range(INPUT, 0, 4)), compute(Range(INPUT, 4, 8))], set()),
    "events keep their Records from step to step": ([Sync(0, event="1"), *STEP] * 3, set()),
    "a source written under a copy": ([WRITE, UP, WRITE], {1}),
    "a result read under a copy": ([UP, READ], {1}),
    "a launch beside the copy it needs": ([UP, compute(I)], {1}),
    "a copy over what a launch reads": ([compute(I), UP], {0}),
    "two writes": ([UP, upload(COMPUTE, src=O)], {None}),
    "two writes and a reader": ([UP, upload(COMPUTE, src=O), compute(I, to=[O])], {2, None}),
    "two writes overwritten unseen leave no trace": (
        [UP, upload(COMPUTE, src=O), DRAIN_COMPUTE, DRAIN, UP, DRAIN, READ], set()),
    "a wait too early": ([WAIT, UP, RECORD, compute(I)], {3}),
    "a record too early": ([RECORD, UP, WAIT, compute(I)], {3}),
    "a sync on another stream": ([UP, DRAIN_COMPUTE, READ], {2}),
    "an event recorded again elsewhere": ([UP, RECORD, Record("0", COMPUTE, 0), SYNC, WRITE], {0}),
    "some bytes of a range": (
        [upload(COPIES, Range(INPUT, 0, 5)), compute(Range(INPUT, 4, 8))], {1}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_the_contract_leaves_open_is_found_by_some_seed(name):
    commands, expected = CASES[name]
    adversary = Adversary([program(commands)])
    found = {w.reader and w.reader.index for seed in SEEDS for w in adversary.run(seed)}
    assert found == expected


def test_without_one_order_only_a_sync_orders_a_copy():
    up, event = upload(COMPUTE), Record("0", COMPUTE, 0)
    cases = (
        ([up, compute(I)], False),
        ([up, event, SYNC, compute(I)], False),
        ([up, DRAIN_COMPUTE, compute(I)], True),
        ([compute(to=[S]), up], False),
    )
    for commands, safe in cases:
        assert search([program(commands)]) == []
        assert (not search([program(commands)], one_order=False)) == safe


def test_the_same_seed_makes_the_same_schedule():
    steps = [program(CASES["two writes and a reader"][0])] * 2
    adversary = Adversary(steps)
    several = [adversary.run(seed) for seed in SEEDS]
    assert several == [run(steps, seed) for seed in SEEDS]
    assert len({tuple(found) for found in several}) > 3


def test_strategies_are_what_they_are_called():
    adversary = Adversary([program(CASES["a source written under a copy"][0])])
    found = {name: [bool(adversary.run(seed, name)) for seed in SEEDS] for name in STRATEGIES}
    always = {name for name, each in found.items() if all(each)}
    assert always == {"lazy", "one starved", "sources late", "destinations first"}
    assert not any(found["eager"])  # nothing is ever pending: program order
    assert all(any(found[name]) and not all(found[name]) for name in ("random", "some starved"))


# against every interleaving ----------------------------------------------------------------------


def tried(steps: Sequence[Program], one_order: bool) -> set:
    """What the adversary finds, byte by byte."""
    adversary = Adversary(steps, one_order)
    return {
        (w.reader and w.reader.key, w.buffer, byte)
        for seed in SEEDS
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
@given(st.randoms(use_true_random=False).map(random_run), st.booleans())
def test_the_adversary_finds_only_what_can_be(steps, one_order):
    assert tried(steps, one_order) <= possible(steps, one_order)
    assert Adversary(steps, one_order).run(0, "eager") == []


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
