"""The hazard checker on random small runs, against every interleaving and the adversary."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests.oracles.adversary import Adversary
from tests.oracles.interleavings import Interleavings, TooManyStates, Wrong, ends_wrong
from tests.oracles.random_runs import random_run
from tests.profiles import examples
from workbench.program.check.hazards import races
from workbench.program.commands import Program, Range

runs = st.randoms(use_true_random=False).map(random_run)


def explored(steps: Sequence[Program], one_order: bool, within: Range | None = None) -> set[Wrong]:
    """What some interleaving makes wrong; a run with too many is no example."""
    try:
        return Interleavings(steps, one_order, within).wrong
    except TooManyStates:
        reject()


@settings(max_examples=examples(150))
@given(runs, st.booleans())
def test_a_run_is_free_of_races_only_if_no_interleaving_of_it_is_wrong(steps, one_order):
    found = races(steps, one_order=one_order)
    disputed = {
        (race.buffer, byte)
        for race in found
        for byte in range(race.offset, race.offset + race.nbytes)
    }
    for w in explored(steps, one_order):
        assert {(w.buffer, byte) for byte in range(w.offset, w.offset + w.nbytes)} <= disputed


@settings(max_examples=examples(150))
@given(runs, st.booleans())
def test_every_race_is_one(steps, one_order):
    """Reduced to its two commands a race ends wrong in some order; and where one of them reads, it
    does so among all the others too."""
    for race in races(steps, one_order=one_order):
        assert not race.may
        assert ends_wrong(steps, race, one_order), race
        if race.kind != "write-write":
            bytes_ = Range(race.buffer, race.offset, race.nbytes)
            assert explored(steps, one_order, bytes_), race


@settings(max_examples=examples(100))
@given(runs, st.booleans())
def test_no_seed_finds_anything_in_a_run_without_races(steps, one_order):
    if not races(steps, one_order=one_order):
        assert Adversary(steps, one_order).search() == []


def test_of_400_random_runs_checker_and_interleavings_agree():
    count = {True: 0, False: 0}
    for number in range(400):
        steps, one_order = random_run(Random(number)), number % 3 > 0
        found, wrong = races(steps, one_order=one_order), Interleavings(steps, one_order).wrong
        assert found or not wrong, number
        for race in found:
            assert ends_wrong(steps, race, one_order), (number, race)
        count[bool(found)] += 1
    assert min(count.values()) > 100
