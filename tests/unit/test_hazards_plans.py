"""The hazard checker, the adversary and the oracles on programs with plans."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.by_hand import OTHER, A, B, S, X, Y, Z, launch, program, record, sync, wait
from tests.by_hand import copy as copying
from tests.oracles.adversary import Adversary
from tests.oracles.happens_before import racing_pairs
from tests.oracles.interleavings import ends_wrong
from tests.oracles.random_runs import PRODUCT, random_commands
from tests.oracles.random_runs import program as of_commands
from tests.orderings import PLACED, every_ordering
from tests.planned import SCOPES, only_adds_order
from tests.profiles import examples, tiers
from workbench.common.errors import UsageError
from workbench.engine.choose import settle
from workbench.program.capabilities import Capabilities
from workbench.program.check.hazards import Race, apart, check_cycle, races
from workbench.program.commands import (
    Buffer,
    Command,
    Copy,
    Launch,
    Program,
    Record,
    Replay,
    Space,
    Stream,
    Write,
)
from workbench.program.plans import with_plans

ABLE = Capabilities(True, True, True, True, 2)
WORK = (Copy, Launch)


def plan(*parts: Command, stream: Stream = A) -> Replay:
    return Replay(parts, stream, 0)


def places(found: Sequence[Race]) -> list[tuple]:
    return [(race.first.key, race.second.key) for race in found]


# what a plan orders -------------------------------------------------------------------------------

BRING, USE, MORE = copying(X, S, B, "inp"), launch(A, [X], [Y]), launch(A, [Y], [Z])


@pytest.mark.parametrize(
    ("commands", "expected"),
    {
        "parts on the plan's stream, its work in front and behind": (
            [copying(X, S, A), plan(USE), MORE], []),
        "parts on another stream begin behind what the plan's has in front": (
            [launch(A, [], [S]), plan(BRING)], []),
        "what the plan's stream has behind begins when they are over": (
            [plan(BRING), USE], []),
        "and so does an event behind, and the host": (
            [plan(BRING), record(0, A), wait(0, B), launch(B, [X]), sync(A), Write(S, "in")], []),
        "no order among the parts of two streams": (
            [plan(BRING, USE)], [((0, 0, 0), (0, 0, 1))]),
        "but by a Record and a Wait among them": (
            [plan(BRING, record(0, B), wait(0, A), USE)], []),
        "no order with the same stream in front": (
            [copying(X, S, B), plan(launch(B, [X]))], [((0, 0, None), (0, 1, 0))]),
        "or behind": (
            [plan(BRING), launch(B, [X])], [((0, 0, 0), (0, 1, None))]),
        "a sync on that stream waits for no part": (
            [plan(BRING), sync(B), Write(S, "in")], [((0, 0, 0), (0, 2, None))]),
        "nobody outside knows of a Record in a plan": (
            [plan(BRING, record(0, B)), wait(0, B), launch(B, [X])],
            [((0, 0, 0), (0, 2, None))]),
        "a Wait in a plan for what is not recorded in it waits for nothing": (
            [BRING, record(0, B), plan(wait(0, A), USE)], [((0, 0, None), (0, 2, 1))]),
    }.values(),
)  # fmt: skip
def test_what_a_plan_orders(commands, expected):
    run = [program(*commands)]
    found = races(run)
    assert places(found) == expected
    assert racing_pairs(run) == set(expected)
    assert bool(Adversary(run).search()) == bool(expected)


def test_a_programmatic_launch_is_early_in_a_plan_and_neither_at_its_begin_nor_behind_it():
    into_weights = launch(A, [], [X])
    early = launch(A, [X, Y], [Z], node=PRODUCT, programmatic=True)
    for commands, racing in (
        ([plan(into_weights, early)], True),
        ([into_weights, plan(early)], False),
        ([plan(into_weights), early], False),
        ([plan(into_weights), plan(early)], False),
    ):
        run = [program(*commands)]
        assert bool(races(run)) == bool(racing_pairs(run)) == racing
        assert bool(Adversary(run).search()) == racing


def test_a_wait_in_a_plan_is_judged_as_one_outside():
    found = check_cycle([program(plan(BRING, record(0, B), wait(0, A), wait(0, A), USE), sync(A))])
    assert found.safe
    assert [at.key for at in found.waits] == [(1, 0, 2), (1, 0, 3), (1, 1, None)]
    assert [at.key for at in found.superfluous] == [(1, 0, 2), (1, 0, 3), (1, 1, None)]
    assert [at.key for at in found.sufficient] == [(1, 0, 3)]
    (told,) = found.to_dict()["sufficient"]
    assert told["words"] == 'wait of dev:0 for "0" in a plan'
    assert (told["step"], told["index"], told["part"]) == (1, 0, 3)


def test_a_launch_in_a_plan_whose_kernel_declares_no_wait_is_refused_by_name():
    step = program(plan(launch(A), launch(A, programmatic=True)))
    (at,) = check_cycle([step], declared=lambda node: False).refused
    assert str(at) == "step 0 #0 part 1 launch sum"


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ([plan(BRING, USE)],
         "nothing orders copy inp on dev:1 before launch add sum on dev:0 in a plan: record an "
         "event behind the copy in the plan, and let dev:0 wait for it"),
        ([BRING, plan(USE)],
         "nothing orders copy inp on dev:1 before launch add sum on dev:0 in a plan: sync dev:1, "
         "or let dev:0 wait for an event recorded behind the copy, between them"),
        ([plan(BRING), launch(B, [X])],
         "nothing orders copy inp on dev:1 in a plan before launch add sum on dev:1: sync dev:0, "
         "or let dev:1 wait for an event recorded behind the plan, between them"),
        ([plan(BRING), Write(S, "in")],
         "nothing orders copy inp on dev:1 in a plan before write in: sync dev:0 (or an event "
         "recorded behind the plan) between them"),
    ],
)  # fmt: skip
def test_a_race_with_a_part_names_it_and_what_would_order_it(commands, expected):
    (race,) = races([program(*commands)])
    assert race.missing == expected


def test_where_copies_have_no_order_a_plan_gives_them_none():
    loose = {"one_order": False}
    (race,) = races([program(plan(copying(X, S, A, "inp"), USE))], **loose)
    assert race.missing == (
        "nothing orders copy inp on dev:0 before launch add sum on dev:0 in a plan: copies keep "
        "no order with their stream, leave the copy out of the plan and sync dev:0"
    )
    assert not races([program(plan(BRING), sync(A), USE)], **loose)
    assert races([program(plan(BRING), sync(B), USE)], **loose)


# what `with_plans` makes of programs --------------------------------------------------------------


@given(st.randoms(use_true_random=False), st.sampled_from(SCOPES), st.integers(1, 3))
@settings(max_examples=examples(300))
def test_plans_only_add_order_to_any_program(rng, scope, laps):
    buffers = [Buffer(name, Space.PINNED, 4, 1) for name in "xyz"]
    only_adds_order([of_commands(random_commands(rng, buffers, rng.randint(1, 20)))] * laps, scope)


HAND_ON, OF_OTHER = [launch(A, [], [X]), record(1, A), wait(1, B), record(0, B)], record(0, OTHER)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    "commands",
    {
        "a Record behind a Wait behind the last work, of that stream": [
            copying(X, S, OTHER), OF_OTHER, launch(B), wait(0, B), record(0, B), launch(OTHER),
            sync(event=0), Write(X, "in")],
        "and of one that had no work": [
            copying(X, S, OTHER), OF_OTHER, launch(A), wait(0, B), record(1, B), launch(OTHER),
            sync(event=1), Write(X, "in")],
        "a Record that has nothing but a Wait in front of it": [
            *HAND_ON, launch(B, [Y]), sync(event=0), Write(X, "in")],
        "and is waited for amid the work": [
            *HAND_ON, wait(0, A), launch(A, [X], [X]), sync(A), Write(X, "in")],
        "an event that another stream records behind the Wait for it": [
            launch(OTHER, [X]), OF_OTHER, launch(A), wait(0, A), record(0, B), copying(Y, S, B),
            launch(A, [], [X])],
    }.values(),
)  # fmt: skip
def test_plans_keep_what_an_event_hands_on(commands, scope):
    assert not races([program(*commands)])
    only_adds_order([program(*commands)], scope)


@pytest.fixture(scope="module", params=PLACED)
def engine(request, tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="null", n_ctx=256, n_ubatch=8, unsafe=True,
        toggles=wb.Toggles(), **PLACED[request.param],
    ) as made:  # fmt: skip
        yield made


@pytest.mark.parametrize("share", [13, *tiers(5, 1)], ids=["some", "more", "all"])
@pytest.mark.parametrize("n_tokens", [1, 48], ids=["decode", "train"])
def test_plans_only_add_order_to_the_programs_of_every_ordering(engine, n_tokens, share):
    refused = planned = 0
    for toggles in [*every_ordering()][::share]:
        with engine.variant(toggles) as variant:
            cycle = variant.cycle(n_tokens)
        for scope in SCOPES:
            try:
                settle(
                    replace(toggles, plans="ours", plan_scope=scope), ABLE, "device", unsafe=True
                )
            except UsageError:
                refused += 1
                continue
            run = only_adds_order([*cycle, *cycle], scope)
            planned += 1
            assert all("p" in p.pattern() for p in run)
    assert refused and planned > refused


def test_a_step_with_plans_of_the_whole_is_written_issued_and_waited_for(engine):
    """Where one device does all, the host writes, makes one call, waits and reads."""
    with engine.variant(wb.Toggles(sync="implicit", copy_stream="compute")) as variant:
        (step,) = variant.programs(1)
    made = with_plans(step, "step")
    if len(step.splits) == 2:
        kinds = [c.kind for c in made.commands if c.kind not in ("write", "read")]
        assert kinds == ["launch", "replay", "record", "sync"]
        assert made.pattern() == "h p" and made.pattern(result=True) == "h ps"


# planted bugs -------------------------------------------------------------------------------------


def replanned(step: Program, edit: Callable[[list[Command]], list[Command]]) -> Program:
    """A copy of a program whose one plan has other parts."""
    made = copy.copy(step)
    made.commands = [
        replace(c, parts=tuple(edit(list(c.parts)))) if isinstance(c, Replay) else c
        for c in step.commands
    ]
    return made


def one_copy_on_the_wrong_stream(parts: list[Command]) -> list[Command]:
    """Nothing forks to it and nothing joins it: the launches do not wait."""
    n = next(i for i, c in enumerate(parts) if isinstance(c, Copy))
    assert parts[n].stream.id == 0
    return [*parts[:n], replace(parts[n], stream=Stream(1, 1)), *parts[n + 1 :]]


def no_record(parts: list[Command]) -> list[Command]:
    return [c for c in parts if not isinstance(c, Record)]


def results_in_front(parts: list[Command]) -> list[Command]:
    (results,) = [c for c in parts if isinstance(c, Copy) and c.split < 0]
    moved = replace(results, stream=Stream(1, 1))
    return [moved, *(c for c in parts if c is not results)]


BUGS = {
    one_copy_on_the_wrong_stream: (
        wb.Toggles(sync="implicit", copy_stream="compute"),
        "nothing orders copy inp_embd on null:1 before launch",
        "in a plan: record an event behind the copy in the plan, and let null:0 wait for it",
    ),
    no_record: (
        wb.Toggles(sync="event_guarded", copy_stream="own"),
        "nothing orders copy",
        "in a plan: record an event behind the copy in the plan, and let null:0 wait for it",
    ),
    results_in_front: (
        wb.Toggles(sync="implicit", copy_stream="compute"),
        "nothing orders copy",
        "in a plan: record an event behind the copy in the plan, and let null:0 wait for it",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_planted_in_a_plan_is_found_and_told_in_a_line(tiny_model, bug):
    toggles, begins, ends = BUGS[bug]
    with wb.Engine.load(
        tiny_model("tiny-llama", "F16"), device="null", n_ctx=64, unsafe=True, toggles=toggles
    ) as engine:
        (step,) = engine.programs(1)
    sound = with_plans(step, "step")
    assert check_cycle([sound]).safe and not Adversary([sound] * 3).search()
    broken = replanned(sound, bug)
    found = check_cycle([broken])
    assert not found.safe
    told = [race.missing for race in found.races]
    assert told[0].startswith(begins) and told[0].endswith(ends), told
    assert all("\n" not in line and "in a plan" in line for line in told)
    steps = apart([broken] * 3)
    assert Adversary(steps).search()
    assert all(ends_wrong(steps, race, True) for race in races(steps))
