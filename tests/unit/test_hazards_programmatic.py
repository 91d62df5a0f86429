"""What races where launches begin early: programs made by hand, and programs of engines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.by_hand import (
    A,
    B,
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
from workbench.config import SyncMode, Toggles
from workbench.engine.engine import Engine
from workbench.graph.ir import F32, Kind, Tensor
from workbench.graph.ops import make
from workbench.program.check.hazards import check_cycle, races, refused
from workbench.program.commands import Launch, Range

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
    found = check_cycle(run[:1], declared=lambda node: False)
    assert indices(found.refused) == [1] and not found.safe
    race = found.races[0]
    assert (race.first.index, race.second.index) == (0, 1)
    assert race.missing.endswith("declares no griddepcontrol.wait: launch it without pdl")
    harmless = [program(launch(A, [], [Z]), early((W, X), (Y,)), copy(S, Z, A))]
    assert races(harmless, declared=lambda node: False) == []
    assert indices(refused(harmless, lambda node: False)) == [1]


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


@pytest.mark.parametrize("case", EARLY)
def test_weights_are_read_ahead_of(case):
    commands, expected = EARLY[case]
    assert pairs(*commands) == expected
    naive = racing_pairs([program(*commands)])
    assert sorted((first[1], second[1]) for first, second in naive) == expected
    wrong = Adversary([program(*commands)]).search()
    assert bool(wrong) == bool(expected)


def test_weights_written_in_front_of_a_programmatic_launch_say_why():
    (race,) = races([program(launch(A, [], [W]), early())])
    assert race.missing.endswith("may read weights ahead of it: launch it without pdl")
    (race,) = races([program(copy(W, S, B), early())])
    assert race.missing.endswith("wait for an event recorded behind the copy, between them")


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


def test_that_the_second_is_programmatic_is_said_of_no_copy():
    commands = (early(), copy(W, S, A))
    (race,) = races([program(*commands)], one_order=False)
    assert "programmatic" not in race.missing
    assert race.missing.endswith(
        ": sync dev:0 (or an event recorded behind the launch) between them"
    )


# programs that engines issue ----------------------------------------------------------------------

ISSUED = [
    toggles
    for sync_mode in SyncMode
    if sync_mode != SyncMode.AUTO
    for toggles in (
        {"sync": sync_mode},
        {"sync": sync_mode, "n_copies": "4", "host_source": "pinned_ring_4"},
        {"sync": sync_mode, "step_wait": "outputs"},
    )
]


@pytest.mark.parametrize("n_devices", [1, 2])
def test_what_begins_early_adds_no_race_to_the_programs_of_an_engine(tiny_model, n_devices):
    """Waits between splits and for copies stand in front of launches that begin early there."""
    path = tiny_model("tiny-llama", "Q8_0")
    with Engine.load(
        path, device="null", n_ubatch=8, unsafe=True, n_devices=n_devices, toggles=Toggles()
    ) as base:
        for chosen in ISSUED:
            with base.variant(Toggles(**chosen)) as engine:
                without = races(engine.programs(20, 9))
                made = engine._made
                made._targets = [target._replace(begins_early=lambda node: True)
                                 for target in made._targets]  # fmt: skip
                steps = engine.programs(20, 9)
                assert any(isinstance(c, Launch) and c.programmatic for c in steps[0].commands)
                found = races(steps)
                assert [r.first[:2] for r in found] == [r.first[:2] for r in without], chosen
                for scope in SCOPES:
                    only_adds_order(steps, scope)
