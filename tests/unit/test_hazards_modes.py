"""The hazard checker on the programs of engines: what every sync mode races with, and waits for."""

from __future__ import annotations

import pytest

from tests.oracles.happens_before import racing_pairs
from tests.oracles.walked_again import WalkedAgain
from tests.profiles import share
from workbench.common.errors import UsageError
from workbench.config import CopyStream, StepWait, SyncMode, Toggles
from workbench.engine.choose import settle
from workbench.engine.engine import Engine
from workbench.program.capabilities import Capabilities
from workbench.program.check.hazards import apart, check_cycle, races
from workbench.program.commands import CommandAt, Copy, Program, Sync
from workbench.program.plans import with_plans
from workbench.program.sync_modes import race_of

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
    with Engine.load(path, device="null", n_ubatch=8, unsafe=True, toggles=Toggles()) as first:

        def make_one(sync_mode: str, stream: str, step_wait: str = StepWait.EVERY) -> Engine:
            return first.variant(Toggles(sync=sync_mode, copy_stream=stream, step_wait=step_wait))

        yield make_one


@pytest.mark.parametrize(
    ("way", "n_tokens"), share([(w, n) for w in WAYS for n in (1, 20)], 3, slow=2)
)
def test_a_mode_races_where_lowering_says_so(engine_of, way, n_tokens):
    """Of a decode, and of prompts of three ubatches; by the naive relation too."""
    with engine_of(*way) as engine:
        cycle = apart(engine.programs(n_tokens))
        says = race_of(engine._ordering, engine.backend.capabilities)
        train = n_tokens > engine.config.n_ubatch  # else every step ends with a wait
    found = races(cycle * 2)
    within_a_step = (
        way[0] in (SyncMode.IMPLICIT, SyncMode.PACKED_IMPLICIT) and way[1] == CopyStream.OWN
    )
    assert bool(found) == bool(says and (train or within_a_step))
    assert {(r.first.key, r.second.key) for r in found} <= racing_pairs(cycle * 2)
    assert bool(found) == bool(racing_pairs(cycle * 2))


def refused(way: tuple[str, ...]) -> bool:
    """Whether a whole step can be no plan."""
    able = Capabilities(True, True, True, True, 2)
    try:
        settle(Toggles(sync=way[0], plans="ours", plan_scope="step"), able, "device", unsafe=True)
    except UsageError:
        return True
    return False


def planned(cycle: list[Program], scope: str) -> list[Program]:
    """The programs with plans; without a scope as they are."""
    if not scope:
        return cycle
    made = {id(program): with_plans(program, scope) for program in cycle}
    return [made[id(program)] for program in cycle]


@pytest.mark.parametrize(
    ("way", "scope"),
    share([(way, scope) for way in WAYS for scope in ("", "split", "step")
           if scope != "step" or not refused(way)], every=4, slow=2),
)  # fmt: skip
def test_waits_that_could_go_are_those_found_by_walking_all_again(engine_of, way, scope):
    """Of prompts of three ubatches with tokens behind them; steps of one shape share a program."""
    with engine_of(*way) as engine:
        cycle = planned(engine.programs(20, 3), scope)
    found, twin = check_cycle(cycle), WalkedAgain(cycle * 3)
    assert len({id(p) for p in cycle}) == 3 < len(cycle)
    steady = range(len(cycle), 2 * len(cycle))
    assert [at.key for at in found.superfluous] == twin.superfluous(steady)
    assert [at.key for at in found.sufficient] == twin.sufficient(steady)
    assert found.n_races == len(twin.races())


def test_of_many_tokens_a_wait_is_one_of_its_program(engine_of):
    with engine_of("per_copy", CopyStream.OWN) as engine:
        few, many = check_cycle(engine.cycle(1, 20)), check_cycle(engine.cycle(1, 200))
    assert [at.index for at in few.sufficient] == [at.index for at in many.sufficient]
    assert len(few.waits) == len(many.waits) == 13


@pytest.mark.parametrize("stream", [CopyStream.OWN, CopyStream.COMPUTE])
def test_per_copy_waits_for_every_copy_but_one_in_vain(engine_of, stream):
    with engine_of("per_copy", stream) as engine:
        (cycle,) = engine.programs(1)
    n_copies = len([c for c in cycle.commands if isinstance(c, Copy) and c.split >= 0])
    found = check_cycle([cycle])
    assert found.safe and n_copies == 6
    assert len(found.superfluous) >= n_copies - 1
    needed = [CommandAt(1, i, cycle.commands[i]) for i in (p.index for p in found.sufficient)]
    logits = needed[-1].command
    assert isinstance(logits, Sync) and logits.event is not None
    # on one stream its order does the rest; on two the launches want the copies waited for, once
    assert len(needed) == (1 if stream == CopyStream.COMPUTE else 2)


@pytest.mark.parametrize("stream", [CopyStream.OWN, CopyStream.COMPUTE])
def test_copy_boundary_is_free_of_races_and_its_first_wait_superfluous_in_a_decode(
    engine_of, stream
):
    with engine_of("copy_boundary", stream) as engine:
        found = check_cycle(engine.programs(1))
    assert found.safe and found.waits[0] in found.superfluous
    assert len(found.sufficient) == (1 if stream == CopyStream.COMPUTE else 2)


def test_in_a_train_without_waits_the_first_wait_of_copy_boundary_is_needed(engine_of):
    with engine_of("copy_boundary", CopyStream.OWN, StepWait.OUTPUTS) as engine:
        found = check_cycle(apart(engine.programs(20)))
    assert found.safe
    kept = {at.step for at in found.sufficient}
    assert kept == {3, 4, 5}
    assert found.waits[2] in found.sufficient  # of the second ubatch, whose copies meet the first


def test_implicit_on_its_own_stream_races_within_a_step(engine_of):
    with engine_of("implicit", CopyStream.OWN) as engine:
        found = races(engine.programs(1))
    assert {r.first.command.kind for r in found} == {"copy"}
    assert {r.second.command.kind for r in found} == {"launch"}


def test_a_program_of_the_host_alone_has_no_waits(tiny_model):
    with Engine.load(tiny_model("tiny-llama", "Q8_0"), device="host", toggles=Toggles()) as engine:
        found = check_cycle(engine.programs(1))
    assert found.safe and found.waits == []
