"""What `race_of` says of every ordering is what the checker proves of its programs: of tokens one
by one, of a train of ubatches, of layers over two devices and of some on the host. What is safe is
safe where steps of other shapes come between, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import workbench as wb
from tests.orderings import NAMES, PLACED, every_ordering
from tests.planned import SCOPES
from tests.profiles import tiers
from workbench.graph.ir import StepShape
from workbench.program.check import hazards
from workbench.program.commands import Buffer, Program, Record
from workbench.program.plans import with_plans
from workbench.program.sync_modes import race_of

TOKENS = {"decode": 1, "train": 48}  # six ubatches: more than there are places


# of the orderings a thirteenth, which has of every value of every toggle, a fifth, or all
SHARES = pytest.mark.parametrize("share", [13, *tiers(5, 1)], ids=["some", "more", "all"])


@pytest.fixture(scope="module", params=PLACED)
def engine(request, tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="null", n_ctx=256, n_ubatch=8, unsafe=True,
        toggles=wb.Toggles(), **PLACED[request.param],
    ) as made:  # fmt: skip
        yield made


def test_a_share_has_every_value():
    for name in NAMES:
        values = {getattr(t, name) for t in every_ordering()}
        for share in (13, 7, 5, 3):
            assert {getattr(t, name) for t in [*every_ordering()][::share]} == values, share


@SHARES
@pytest.mark.parametrize("what", TOKENS)
def test_what_is_said_to_race_does_and_nothing_else(engine, what, share):
    wrong, racing = [], 0
    for toggles in [*every_ordering()][::share]:
        with engine.variant(toggles) as variant:
            cycle, ordering = variant.cycle(TOKENS[what]), variant._ordering
        said = race_of(ordering, engine.backend.capabilities)
        found = hazards.races([*cycle, *cycle])
        only_in_trains = race_of(ordering._replace(step_wait="every"), engine.backend.capabilities)
        if what == "decode":  # a token has outputs: its step ends with a wait
            said = only_in_trains
        racing += bool(found)
        # a host split behind the device's waits for it in every step, whatever the ordering says
        waits_anyhow = engine.config.override_tensor and not found
        if bool(said) != bool(found) and not waits_anyhow:
            wrong.append((ordering, said, found[:1]))
    assert not wrong, (len(wrong), wrong[0])
    assert racing


# tokens, outputs, n_kv and sequences of each step; without tokens, stored K is turned
MIXED = [
    StepShape(*step) for step in (
        (8, 0, 64, 1), (0, 0, 256, 0), (5, 0, 64, 2), (8, 0, 256, 1), (0, 0, 256, 0),
        (0, 0, 256, 0), (1, 0, 64, 1), (8, 8, 128, 3), (3, 0, 64, 3), (1, 1, 64, 1), (2, 0, 256, 2),
    )
]  # fmt: skip


def mixed(engine: wb.Engine) -> Iterator[Program]:
    """Steps of `MIXED` twice over, each of the turn that an engine gives it."""
    made, buffers, turn = dict[tuple[StepShape, int], Program](), dict[str, Buffer](), 0
    for shape in MIXED * 2:
        if (shape, turn) not in made:
            made[shape, turn] = engine._step_programs.of(shape, turn, buffers)
        yield (program := made[shape, turn])
        turn = engine._ordering.turn_after(turn, program.waited)


@SHARES
def test_what_is_safe_is_safe_whatever_shapes_steps_have(engine, share):
    """Programs share arenas, and one may lie where another lies otherwise. The shift of a cache has
    other splits than a step, and gives nothing from one device to another."""
    racing = 0
    for toggles in [*every_ordering()][::share]:
        with engine.variant(toggles) as variant:
            said, steps = race_of(variant._ordering, engine.backend.capabilities), [*mixed(variant)]
        found = hazards.races(steps)
        racing += bool(found)
        assert said or not found, (toggles, found[0])
        for scope in () if said else SCOPES:
            planned = {program: with_plans(program, scope) for program in dict.fromkeys(steps)}
            found = hazards.races(planned[program] for program in steps)
            assert not found, (toggles, scope, found[0])
    assert racing


@SHARES
def test_an_event_is_one_backend_s_in_steps_of_every_shape(engine, share):
    """Steps share events by number, and an event of one device cannot be recorded on another."""
    for toggles in [*every_ordering()][::share]:
        with engine.variant(toggles) as variant:
            steps = [*variant.programs(20, 2), variant.program(8, n_outputs=0)]
        recorded = {
            (c.event, c.stream.backend) for p in steps for c in p.commands if isinstance(c, Record)
        }
        assert len(recorded) == len(dict(recorded)), toggles


def test_every_ordering_is_there():
    orderings = list(every_ordering())
    assert len(orderings) == len(set(orderings)) == (8 * 2 - 1) * 4 * 2 * 2
