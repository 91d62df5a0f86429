"""The adversary finds what the contract leaves open, whatever the order, and nothing else."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from random import Random

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests.oracles.adversary import SEEDS, STRATEGIES, Adversary, search
from tests.oracles.interleavings import Interleavings, TooManyStates
from tests.oracles.random_runs import node, program, random_run
from tests.oracles.reading import read
from tests.profiles import examples
from workbench.program.commands import (
    Buffer,
    Copy,
    Launch,
    Program,
    Range,
    Space,
    Stream,
    Sync,
    Write,
)

STAGING, INPUT = (Buffer(name, Space.PINNED, 12, 1) for name in ("staging", "in"))
S, IN = Range(STAGING, 0, 12), Range(INPUT, 0, 12)
WRITE, UP = Write(S, "x"), Copy(IN, S, Stream(1, 1), "x", 0)
RACING = [WRITE, UP, WRITE, Launch(node("y"), Stream(1, 0), (IN,), (), None, 0)]


def test_the_same_seed_makes_the_same_schedule():
    steps = [program(RACING)] * 2
    adversary = Adversary(steps)
    several = [adversary.run(seed) for seed in SEEDS]
    assert several == [Adversary(steps).run(seed) for seed in SEEDS]
    assert search(steps) == next(filter(None, several))
    assert len({tuple(found) for found in several}) > 3


def test_strategies_are_what_they_are_called():
    """A source is written under a copy."""
    adversary = Adversary([program([WRITE, UP, WRITE])])
    found = {name: [bool(adversary.run(seed, name)) for seed in SEEDS] for name in STRATEGIES}
    always = {name for name, each in found.items() if all(each)}
    assert always == {"lazy", "one starved", "sources late", "destinations first"}
    assert not any(found["eager"])  # nothing is ever pending: program order
    assert all(any(found[name]) and not all(found[name]) for name in ("random", "some starved"))


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
        wrong = Interleavings(read(steps, one_order)).wrong
    except TooManyStates:
        reject()
    return {
        (w.reader, w.buffer, byte) for w in wrong for byte in range(w.offset, w.offset + w.nbytes)
    }


@pytest.mark.long
def test_runs_of_one_form_go_wrong_under_the_same_seeds():
    """Whatever their commands, buffers and streams are called; and a wait that counts is a form."""
    forms: dict[Hashable, list[int]] = {}
    for number in range(30):
        runs = [random_run(Random(number)), random_run(Random(number))]
        without = [program([c for c in p.commands if not isinstance(c, Sync)]) for p in runs[0]]
        for steps in (*runs, without):
            adversary = Adversary(steps, number % 3 > 0)
            wrong = [seed for seed in SEEDS if adversary.run(seed)]
            assert forms.setdefault(adversary.form(), wrong) == wrong, number
    assert 30 < len(forms) < 60


@settings(max_examples=examples(150))
@given(st.randoms(use_true_random=False).map(random_run), st.booleans())
def test_the_adversary_finds_only_what_can_be(steps, one_order):
    assert tried(steps, one_order) <= possible(steps, one_order)
    assert Adversary(steps, one_order).run(0, "eager") == []


@pytest.mark.long
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
