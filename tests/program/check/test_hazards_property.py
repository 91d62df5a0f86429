"""The hazard checker on random runs: what races against every state that host and streams can be
in, or paths in the whole relation; which waits could go against programs without them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import combinations, product
from operator import or_
from random import Random

from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests.by_hand import OTHER, A, B, X, Y, launch, part, record, sync, wait
from tests.oracles.adversary import Adversary
from tests.oracles.happens_before import racing_pairs, seen_both_ways
from tests.oracles.interleavings import Interleavings, TooManyStates, Wrong, ends_wrong
from tests.oracles.random_runs import program, random_commands, random_run
from tests.oracles.reading import read
from tests.oracles.walked_again import WalkedAgain
from tests.planned import SCOPES, only_adds_order
from tests.profiles import examples
from tests.removable import sufficient, superfluous
from workbench.program import commands as cmd
from workbench.program.check.hazards import Race, races
from workbench.program.check.intervals import cut, tags

rngs = st.randoms(use_true_random=False)
small = rngs.map(random_run)


def runs(most_steps: int) -> st.SearchStrategy[list[cmd.Program]]:
    """Runs of one to three programs, in any order."""

    def run(rng: Random, n: int) -> list[cmd.Program]:
        made = random_run(rng)
        return [rng.choice(made) for _ in range(n)]

    return st.builds(run, rngs, st.integers(1, most_steps))


Pairs = set[tuple[cmd.Command, cmd.Command]]


def commands_of(found: list[Race]) -> Pairs:
    return {(race.first.command, race.second.command) for race in found}


def command_at(run: list[cmd.Program], key) -> cmd.Command:
    """By step, index and part; of a CommandAt, too."""
    command = run[key[0]].commands[key[1]]
    return command if key[-1] is None else command.parts[key[-1]]


def commands_at(run: list[cmd.Program], pairs) -> Pairs:
    """The same for pairs of (step, index, part); whatever recurs in other steps is once in it."""
    return {(command_at(run, first), command_at(run, second)) for first, second in pairs}


@given(small, st.booleans())
@settings(max_examples=examples(300))
def test_races_are_what_interleavings_do_in_either_order(run, one_order):
    seen = seen_both_ways(run, one_order)
    assert seen == racing_pairs(run, one_order)  # the twins agree
    assert commands_of(races(run, one_order=one_order)) == commands_at(run, seen)


@given(runs(5), st.booleans())
@settings(max_examples=examples(300))
def test_races_are_conflicts_without_a_path(run, one_order):
    naive = racing_pairs(run, one_order)
    found = races(run, one_order=one_order)
    assert commands_of(found) == commands_at(run, naive)
    assert {(r.first.key, r.second.key) for r in found} <= naive
    for race in found:
        doing, done = race.kind.split("-")
        for how, at in ((doing, race.first), (done, race.second)):
            assert any(
                r.buffer is race.buffer and r.offset <= race.offset
                and race.offset + race.nbytes <= r.offset + r.nbytes
                for r in (at.command.reads if how == "read" else at.command.writes)
            )  # fmt: skip
        assert race.nbytes > 0 and not race.may and "\n" not in race.missing


@given(runs(6), st.booleans(), st.sampled_from([None, True, False]))
@settings(max_examples=examples(200))
def test_findings_are_those_of_walking_all_again(run, one_order, declares):
    declared = None if declares is None else lambda node: declares
    how = {"one_order": one_order, "declared": declared}
    twin = WalkedAgain(run, one_order, declared)
    assert bytes_of(run, races(run, **how)) == bytes_of(run, twin.races())
    assert [at.key for at in superfluous(run, **how)] == twin.superfluous()
    assert [at.key for at in sufficient(run, **how)] == twin.sufficient()


def bytes_of(run: list[cmd.Program], found) -> set[tuple]:
    """The bytes that commands dispute, one by one: how they are cut is not compared."""
    return {
        (command_at(run, r.first), command_at(run, r.second), r.buffer, i)
        for r in found
        for i in range(r.offset, r.offset + r.nbytes)
    }


@given(small, st.booleans())
@settings(max_examples=examples(200))
def test_a_race_shows_within_two_laps_or_never(cycle, one_order):
    two, five = (races(cycle * laps, one_order=one_order) for laps in (2, 5))
    assert commands_of(two) == commands_of(five)
    assert [r._replace(missing="") for r in two] == [r._replace(missing="") for r in five]


def without(run: list[cmd.Program], gone: set[cmd.Command]) -> list[cmd.Program]:
    """The run, with some commands really gone."""

    def left(commands: Iterable[cmd.Command]) -> list[cmd.Command]:
        return [
            replace(c, parts=tuple(left(c.parts))) if isinstance(c, cmd.Replay) else c
            for c in commands
            if c not in gone
        ]

    made = {id(p): program(left(p.commands)) for p in run}
    return [made[id(p)] for p in run]


def naive_races(run: list[cmd.Program], gone: set[cmd.Command]) -> Pairs:
    less = without(run, gone)
    return commands_at(less, racing_pairs(less))


@given(runs(3))
@settings(max_examples=examples(150))
def test_without_waits_that_could_go_nothing_more_races(run):
    anyway = naive_races(run, set())
    waits = {c for p in run for c in p.singly() if isinstance(c, (cmd.Sync, cmd.Wait))}
    alone = {w for w in waits if naive_races(run, {w}) == anyway}
    assert {at.command for at in superfluous(run)} == alone
    kept = {at.command for at in sufficient(run)}
    assert kept <= waits and waits - alone <= kept
    assert naive_races(run, waits - kept) == anyway
    for one in kept:  # none of them can go
        assert naive_races(run, waits - kept | {one}) != anyway
    if len(waits) <= 5:
        assert len(kept) >= smallest(run, waits, anyway)


def smallest(run: list[cmd.Program], waits: set[cmd.Command], anyway) -> int:
    """The least number of waits that keep what all keep, by trying all sets."""
    return next(
        n
        for n in range(len(waits) + 1)
        for kept in combinations(sorted(waits, key=id), n)
        if naive_races(run, waits - set(kept)) == anyway
    )


def test_an_inclusion_minimal_set_need_not_be_the_smallest():
    """The first sync does what the two after it do together, and greedy removal tries it first."""
    low, high = part(X, 0, 4), part(X, 4, 4)
    held, first, later = wait(1, B), sync(B), [sync(A), sync(event=0)]
    run = [
        program([
            launch(B, (), (Y,)), record(0, B), launch(A, (), (low,)), record(1, A), held,
            launch(B, (low,), (high,)), first, *later, launch(OTHER, (low, Y)),
        ])
    ]  # fmt: skip
    assert not races(run)
    assert [at.command for at in sufficient(run)] == [held, *later]
    assert smallest(run, {held, first, *later}, set()) == 2
    assert naive_races(run, set(later)) == set()


BUFFERS = [cmd.Buffer(f"b{i}", cmd.Space.DEVICE, 8, 1) for i in range(2)]
ranges = st.builds(
    lambda buffer, ends: cmd.Range(buffer, min(ends), abs(ends[1] - ends[0])),
    st.sampled_from(BUFFERS),
    st.tuples(st.integers(0, 8), st.integers(0, 8)),
)


@given(st.dictionaries(ranges, st.integers(0, 7), max_size=12), st.integers(0, 7))
@settings(max_examples=examples(300))
def test_pieces_are_the_bytes_that_matter_cut_at_every_end(touched, needed):
    def matters(bits: int) -> bool:
        return bits & needed == needed != 0

    pieces = cut(touched, matters)
    covering: dict[int, set] = {}  # of a piece, the ranges that cover it
    for r, numbers in pieces.of.items():
        assert 0 <= numbers.start <= numbers.stop <= pieces.n
        for number in numbers:
            covering.setdefault(number, set()).add(r)
    assert sorted(covering) == list(range(pieces.n))
    by_byte = set()
    for buffer in BUFFERS:
        for byte in range(8):
            here = frozenset(
                r for r in touched if r.buffer is buffer and 0 <= byte - r.offset < r.nbytes
            )
            if matters(reduce(or_, map(touched.get, here), 0)):
                by_byte.add(here)
    assert {frozenset(ranges) for ranges in covering.values()} == by_byte


@given(st.lists(ranges, max_size=12, unique=True))
@settings(max_examples=examples(300))
def test_tags_meet_where_ranges_overlap(some):
    pieces = cut(dict.fromkeys(some, 1), lambda bits: True)
    found = tags(pieces)
    for r, s in product(some, some):
        begin, end = max(r.offset, s.offset), min(r.offset + r.nbytes, s.offset + s.nbytes)
        meet = bool(set(found.looks[r]) & set(found.marks[s]))
        assert meet == (r.buffer is s.buffer and begin < end)
    numbers = {n for some in (*found.looks.values(), *found.marks.values()) for n in some}
    assert numbers <= set(range(found.n))


def explored(
    steps: Sequence[cmd.Program], one_order: bool, within: cmd.Range | None = None
) -> set[Wrong]:
    """What some interleaving makes wrong; a run with too many is no example."""
    try:
        return Interleavings(read(steps, one_order), within).wrong
    except TooManyStates:
        reject()


@settings(max_examples=examples(150))
@given(small, st.booleans())
def test_without_races_no_interleaving_is_wrong(steps, one_order):
    found = races(steps, one_order=one_order)
    disputed = {(r.buffer, r.offset + i) for r in found for i in range(r.nbytes)}
    for w in explored(steps, one_order):
        assert {(w.buffer, w.offset + i) for i in range(w.nbytes)} <= disputed
    assert found or Adversary(steps, one_order).search() == []  # no seed finds anything


@settings(max_examples=examples(150))
@given(small, st.booleans())
def test_every_race_is_one(steps, one_order):
    """Reduced to its two commands a race ends wrong in some order; and where one of them reads, it
    does so among all the others too."""
    for race in races(steps, one_order=one_order):
        assert not race.may
        assert ends_wrong(read(steps, one_order), race), race
        if race.kind != "write-write":
            bytes_ = cmd.Range(race.buffer, race.offset, race.nbytes)
            assert explored(steps, one_order, bytes_), race


@given(rngs, st.sampled_from(SCOPES), st.integers(1, 3))
@settings(max_examples=examples(300))
def test_plans_only_add_order_to_any_program(rng, scope, laps):
    made = [cmd.Buffer(name, cmd.Space.PINNED, 4, 1) for name in "xyz"]
    only_adds_order([program(random_commands(rng, made, rng.randint(1, 20)))] * laps, scope)
