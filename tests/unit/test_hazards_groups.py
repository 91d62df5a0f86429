"""Findings told in groups, what the checker takes, and what it refuses in one line."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.by_hand import LAND, USE, A, B, S, X, Y, Z, copy, launch, memory, part, program, wait
from tests.removable import sufficient, superfluous
from workbench.cli.check import lines
from workbench.common.errors import UsageError
from workbench.graph.ir import F32, Tensor
from workbench.graph.ops import make
from workbench.program.check.findings import MOST_RACES
from workbench.program.check.hazards import apart, check_cycle, races, refused
from workbench.program.commands import Launch, Program, Stream, Sync, Write


def named(name: str) -> Launch:
    node = make("add", name, Tensor("a", F32, (4,)), Tensor("b", F32, (4,)))
    return launch(A, [X], [Y], node)


def test_races_of_the_same_words_that_lack_the_same_order_are_one_group():
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


def test_commands_with_other_words_are_other_groups():
    found = check_cycle([program(LAND, named("one"), named("two"), named("one"))])
    told = [(r.first.index, r.second.index, r.count) for r in found.races if r.first.index == 0]
    assert told == [(0, 1, 2), (0, 2, 1)]


def test_every_stretch_of_a_group_counts():
    found = check_cycle([program(copy(X, S, B), launch(A, [part(X, 0, 8), part(X, 32, 8)], [Z]))])
    assert [r.count for r in found.races] == [2, 2]  # with its reader, and the next copy
    assert (found.races[0].offset, found.n_races) == (0, 4)


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


def test_a_group_says_how_many_it_stands_for():
    cycle = apart([program(LAND, USE)] * 2)
    said = lines(cycle, check_cycle(cycle))
    assert any(line.endswith("between them (4 times)") for line in said)


def test_steps_of_one_program_are_told_from_programs():
    once = program(copy(X, S, A), USE)
    assert lines([once, once], check_cycle([once, once]))[1] == (
        "checked      2 steps of 1 program, 3 times: 12 commands"
    )
    assert lines([once], check_cycle([once]))[1] == "checked      1 program, 3 times: 6 commands"


# what it takes ------------------------------------------------------------------------------------


def test_any_iterable_of_programs_will_do():
    run = [program(LAND, Sync(0, stream=B), USE, wait(7, A))] * 2 + [program(LAND, USE)]
    assert races(p for p in run) == races(run) != []
    assert superfluous(p for p in run) == superfluous(run) != []
    assert sufficient(p for p in run) == sufficient(run) != []
    assert check_cycle(p for p in run) == check_cycle(run)
    product = make("mul_mat", "p", Tensor("w", F32, (4, 8)), Tensor("x", F32, (1, 8)))
    early = program(launch(A, [X, Y], [Z], product, programmatic=True))
    assert len(refused(iter([early, early]), lambda node: False)) == 1


def test_of_no_programs_nothing_races():
    assert races([]) == superfluous(iter(())) == sufficient([]) == []


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


# steps submitted behind each other ----------------------------------------------------------------

CACHE, IDS = memory("cache", 256), memory("ids")


def decode(*more: Launch) -> Program:
    """A step that stores into the cache, attends to it, and leaves its result on the stream."""
    return program(launch(A, [X, IDS], [CACHE]), launch(A, [CACHE, X], [Y]), *more)


def test_what_stores_into_cells_anew_comes_behind_in_stream_order():
    """Cells that are removed while a step is under way: the next step's stores find it over."""
    assert races([decode(), decode()]) == []
    other = program(launch(B, [Z, IDS], [CACHE]))
    assert {r.buffer.name for r in races([decode(), other])} == {"cache"}


def test_a_step_that_turns_the_cache_in_place_is_a_step_of_the_train():
    shift = launch(A, [CACHE, IDS], [CACHE])
    train = [decode(), program(Write(S, "by"), copy(IDS, S, A), shift), decode(), decode()]
    assert check_cycle(train).n_races == 1  # the next lap's write meets the copy that reads late
    train[1] = program(Sync(0, stream=A), Write(S, "by"), copy(IDS, S, A), shift)
    found = check_cycle(train)
    assert found.safe and len(found.sufficient) == 1
    beside = program(launch(B, [CACHE, IDS], [CACHE]))
    kinds = {r.kind for r in races([decode(), beside, decode()])}
    assert kinds == {"write-write", "read-write", "write-read"}
