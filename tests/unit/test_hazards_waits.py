"""Which waits a run could do without, on programs made by hand; and what is found, as JSON."""

from __future__ import annotations

import json

import pytest

from tests.by_hand import (
    LAND,
    USE,
    A,
    B,
    C,
    S,
    indices,
    program,
    record,
    sync,
    wait,
)
from tests.removable import sufficient, superfluous
from workbench.common.errors import UsageError
from workbench.program.check.hazards import check_cycle, races
from workbench.program.commands import Write


def test_of_two_waits_for_the_same_either_can_go_but_not_both():
    run = [program(LAND, sync(B), sync(B), USE, sync(A))] * 3
    assert races(run) == []
    assert indices(superfluous(run, range(1, 2))) == [1, 2]
    assert indices(sufficient(run, range(1, 2))) == [2, 4]


def test_a_wait_is_removed_in_every_step():
    """The sync at a step's begin can go from any one step, and from no program."""
    run = [program(sync(B), Write(S, "inp"), LAND)] * 3
    assert superfluous(run) == []
    assert [at[:2] for at in sufficient(run)] == [(0, 0)]


def test_waits_of_streams_are_candidates_as_syncs_are_and_records_are_not():
    found = check_cycle([program(LAND, record(0, B), wait(0, A), wait(0, A), USE, sync(A))])
    assert indices(found.waits) == [2, 3, 5]
    assert indices(found.superfluous) == [2, 3]
    assert indices(found.sufficient) == [3, 5]
    assert {at.step for at in found.waits} == {1}  # the steady lap


def test_where_something_races_anyway_a_wait_is_superfluous_that_keeps_nothing_else_from_it():
    run = [program(LAND, sync(A), USE, sync(A), sync(B))] * 3
    assert races(run)
    assert indices(superfluous(run)) == [1, 4]  # the copy races with its reader, now or later
    assert indices(sufficient(run)) == [3]


def test_programs_of_a_cycle_have_their_waits_each():
    one, other = program(LAND, sync(B), USE), program(sync(A), sync(C))
    found = check_cycle([one, one, other], laps=2)
    assert [at[:2] for at in found.waits] == [(3, 1), (5, 0), (5, 1)]


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


@pytest.mark.parametrize(("cycle", "laps"), [([], 3), ([program()], 1)])
def test_no_loop_is_refused_in_one_line(cycle, laps):
    with pytest.raises(UsageError, match="are no loop; give at least one program and 2 laps"):
        check_cycle(cycle, laps=laps)
