"""What `race_of` says of every ordering is what the checker proves of its programs: of tokens one
by one, of a train of ubatches, of layers over two devices and of some on the host. What is safe is
safe where steps of other shapes come between, too. And bugs that are planted in plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

import workbench as wb
from tests.gates import hold
from tests.oracles.adversary import Adversary
from tests.oracles.interleavings import ends_wrong
from tests.oracles.reading import read
from tests.oracles.walked_again import WalkedAgain
from tests.orderings import PLACED, every_ordering
from tests.planned import SCOPES, only_adds_order
from tests.profiles import long, share, tiers
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.engine.choose import settle
from workbench.graph.ir import StepShape
from workbench.program import commands as cmd
from workbench.program.capabilities import Capabilities
from workbench.program.check import hazards
from workbench.program.check.hazards import apart, check_cycle
from workbench.program.plans import with_plans
from workbench.program.sync_modes import race_of

ABLE = Capabilities(True, True, True, True, 2)
TOKENS = {"decode": 1, "train": 48}  # six ubatches: more than there are places


# of the orderings a share, a fifth, all
SHARES = pytest.mark.parametrize("share", [74, *tiers(13, 1)], ids=["some", "more", "all"])


def some(engine: wb.Engine, share: int) -> list[Toggles]:
    """Others on each placement."""
    config = engine.config
    placement = next(i for i, named in enumerate(PLACED.values())
                     if all(getattr(config, name) == value for name, value in
                            ({"n_devices": 1, "override_tensor": ()} | named).items()))  # fmt: skip
    return [*every_ordering()][placement * 6 % share :: share]


@pytest.fixture(scope="module", params=PLACED)
def engine(request, tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="null", n_ctx=256, n_ubatch=8, unsafe=True,
        toggles=wb.Toggles(), **PLACED[request.param],
    ) as made:  # fmt: skip
        yield made


Bug = Callable[[list[cmd.Command]], list[cmd.Command]]


def refuses(toggles: Toggles, scope: str) -> bool:
    try:
        settle(replace(toggles, plans="ours", plan_scope=scope), ABLE, "device", unsafe=True)
    except UsageError:
        return True
    return False


@SHARES
@pytest.mark.parametrize("what", TOKENS)
def test_what_is_said_to_race_does_and_nothing_else(engine, what, share):
    """Plans add order and nothing else, where they are not refused. Launches that begin early
    after waits add no race."""
    able, racing, planned, refused = engine.backend.capabilities, 0, 0, 0
    for toggles in some(engine, share):
        with engine.variant(toggles) as variant:
            cycle, ordering, made = variant.cycle(TOKENS[what]), variant._ordering, variant._made
            made._targets = [t._replace(begins_early=lambda node: True) for t in made._targets]
            early = variant.cycle(TOKENS[what])
        found, of_early = hazards.races([*cycle, *cycle]), hazards.races([*early, *early])
        assert [r.first[:2] for r in of_early] == [r.first[:2] for r in found], toggles
        for scope in SCOPES:
            if refuses(toggles, scope):
                refused += 1
                continue
            planned += 1
            assert all("p" in p.pattern() for p in only_adds_order([*cycle, *cycle], scope))
            only_adds_order([*early, *early], scope)
        if what == "decode":  # a token has outputs: its step ends with a wait
            ordering = ordering._replace(step_wait="every")
        said, racing = race_of(ordering, able), racing + bool(found)
        # a host split after the device's waits for it in every step, whatever the ordering says
        waits_anyhow = engine.config.override_tensor and not found
        assert bool(said) == bool(found) or waits_anyhow, (ordering, said, found[:1])
    assert share > 13 or (racing and refused and planned > refused)


# tokens, outputs, n_kv and sequences of each step; without tokens, stored K is turned
MIXED = [
    StepShape(*step) for step in (
        (8, 0, 64, 1), (0, 0, 256, 0), (5, 0, 64, 2), (8, 0, 256, 1), (0, 0, 256, 0),
        (0, 0, 256, 0), (1, 0, 64, 1), (8, 8, 128, 3), (3, 0, 64, 3), (1, 1, 64, 1), (2, 0, 256, 2),
    )
]  # fmt: skip


def mixed(engine: wb.Engine) -> Iterator[cmd.Program]:
    """Steps of `MIXED` twice over, each of the turn that an engine gives it."""
    made, buffers, turn = dict[tuple[StepShape, int], cmd.Program](), dict[str, cmd.Buffer](), 0
    for shape in MIXED * 2:
        if (shape, turn) not in made:
            made[shape, turn] = engine._step_programs.of(shape, turn, buffers)
        yield (program := made[shape, turn])
        turn = engine._ordering.turn_after(turn, program.waited)


@SHARES
def test_what_is_safe_is_safe_whatever_shapes_steps_have(engine, share):
    """Programs share arenas, and one may lie where another lies otherwise. The shift of a cache has
    other splits than a step, and gives nothing from one device to another. They share events by
    number, and an event of one device cannot be recorded on another."""
    racing = 0
    for toggles in some(engine, share):
        with engine.variant(toggles) as variant:
            said, steps = race_of(variant._ordering, engine.backend.capabilities), [*mixed(variant)]
            several = [*steps, *variant.programs(20, 2), variant.program(8, n_outputs=0)]
        recorded = {(c.event, c.stream.backend)
                    for p in several for c in p.commands if isinstance(c, cmd.Record)}  # fmt: skip
        assert len(recorded) == len(dict(recorded)), toggles
        found = hazards.races(steps)
        racing += bool(found)
        assert said or not found, (toggles, found[0])
        for scope in () if said else SCOPES:
            planned = {program: with_plans(program, scope) for program in dict.fromkeys(steps)}
            found = hazards.races(planned[program] for program in steps)
            assert not found, (toggles, scope, found[0])
    assert racing or share > 13


@pytest.fixture(scope="module")
def one(tiny_model) -> Iterator[wb.Engine]:
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(path, device="null", n_ubatch=8, unsafe=True, toggles=Toggles()) as made:
        yield made


WAYS = [t for t in every_ordering() if (t.host_source, t.n_copies) == ("pinned", "1")]
SCOPED = [(way, scope) for way in WAYS for scope in ("", *SCOPES)
          if not scope or not refuses(way, scope)]  # fmt: skip


@pytest.mark.parametrize(("way", "scope"), [long(*SCOPED[0]), *share(SCOPED, every=23, slow=5)[1:]])
def test_waits_that_could_go_are_found_by_walking_again(one, way, scope):
    """Of prompts of three ubatches with tokens after them; steps of one shape share a program."""
    with one.variant(way) as engine:
        cycle = engine.programs(20, 3)
    made = {p: with_plans(p, scope) if scope else p for p in dict.fromkeys(cycle)}
    cycle = [made[p] for p in cycle]
    found, twin = check_cycle(cycle), WalkedAgain(cycle * 3)
    assert len({*cycle}) == 3 < len(cycle)
    steady = range(len(cycle), 2 * len(cycle))
    assert [at.key for at in found.superfluous] == twin.superfluous(steady)
    assert [at.key for at in found.sufficient] == twin.sufficient(steady)
    assert found.n_races == len(twin.races())


@pytest.mark.parametrize(("stream", "needed"), [("own", 2), ("compute", 1)])
def test_most_waits_of_llama_cpp_are_in_vain(one, stream, needed):
    """On one stream its order does the rest; on two the launches want the copies waited for."""
    for sync, n_waits, vain in (("per_copy", 13, 5), ("copy_boundary", 3, 1)):
        with one.variant(Toggles(sync=sync, copy_stream=stream)) as engine:
            found = check_cycle(engine.cycle(1, 20))
        assert found.safe and len(found.waits) == n_waits
        assert len(found.sufficient) == needed and len(found.superfluous) >= vain
        assert found.waits[0] in found.superfluous


def one_copy_on_the_wrong_stream(parts: list[cmd.Command]) -> list[cmd.Command]:
    """Nothing forks to it and nothing joins it: the launches do not wait."""
    n = next(i for i, c in enumerate(parts) if isinstance(c, cmd.Copy))
    assert parts[n].stream.id == 0
    return [*parts[:n], replace(parts[n], stream=cmd.Stream(1, 1)), *parts[n + 1 :]]


def no_record(parts: list[cmd.Command]) -> list[cmd.Command]:
    return [c for c in parts if not isinstance(c, cmd.Record)]


def results_in_front(parts: list[cmd.Command]) -> list[cmd.Command]:
    (results,) = [c for c in parts if isinstance(c, cmd.Copy) and c.split < 0]
    return [replace(results, stream=cmd.Stream(1, 1)), *(c for c in parts if c is not results)]


def broken(program: cmd.Program, bug: Bug) -> cmd.Program:
    """With the bug in its plan."""
    return replace(program, commands=[
        replace(c, parts=tuple(bug(list(c.parts)))) if isinstance(c, cmd.Replay) else c
        for c in program.commands
    ])  # fmt: skip


ONE = Toggles(sync="implicit", copy_stream="compute")
TWO = Toggles(sync="event_guarded", copy_stream="own")


@pytest.mark.parametrize(
    ("bug", "toggles"),
    [(one_copy_on_the_wrong_stream, ONE), (no_record, TWO), (results_in_front, ONE)],
)
def test_a_bug_planted_in_a_plan_is_found_and_told_in_a_line(one, bug, toggles):
    with one.variant(toggles) as engine:
        (step,) = engine.programs(1)
    sound = with_plans(step, "step")
    if toggles is ONE:  # the host makes one call, waits and reads
        assert sound.pattern(result=True) == "h ps"
    assert check_cycle([sound]).safe and not Adversary([sound] * 3).search()
    wrong = broken(sound, bug)
    told = [race.missing for race in check_cycle([wrong]).races]
    assert told[0].startswith("nothing orders copy") and told[0].endswith(
        "in a plan: record an event after the copy in the plan, and let null:0 wait for it"
    ), told
    assert all("\n" not in line and "in a plan" in line for line in told)
    steps = apart([wrong] * 3)
    assert Adversary(steps).search()
    assert all(ends_wrong(read(steps), race) for race in hazards.races(steps))


@pytest.mark.parametrize("planted", [False, True], ids=["sound", "planted"])
def test_a_copy_recorded_on_the_wrong_stream_is_found(tiny_model, monkeypatch, planted):
    """A gate holds the copy stream, as work in flight would."""
    toggles = replace(ONE, plans="ours", plan_scope="step")
    with wb.Engine.load(
        tiny_model("tiny-llama", "F32"), device="embedded", n_ctx=64, threads=2, toggles=toggles
    ) as engine:
        engine.prefill(list(range(1, 25)))
        with engine.variant(wb.Toggles()) as other:
            other.prefill(list(range(1, 25)))
            wanted = other.step([5])
        made = engine._step_programs
        whole = made.of
        if planted:
            bug = one_copy_on_the_wrong_stream
            monkeypatch.setattr(made, "of", lambda *a, **k: broken(whole(*a, **k), bug))
        assert check_cycle(engine.programs(1)).safe == (not planted)
        gate = hold(engine.backend, cmd.COPY_STREAM)
        timer = threading.Timer(0.05, gate.open)
        timer.start()
        got = engine.step([5])
        timer.join()
    assert np.allclose(got, wanted, rtol=0, atol=1e-3) == (not planted)


@pytest.mark.parametrize(
    ("plans", "n_copies", "back"), [("split", "1", []), ("step", "1", [1]), ("step", "4", [4])]
)
def test_what_plans_of_several_devices_wait_for(tiny_model, plans, n_copies, back):
    """back: how many steps back the last device's plan is that the first device's waits for. A plan
    of launches waits for none; a copy after it does."""
    toggles = wb.Toggles(
        sync="implicit", step_wait="outputs", host_source="pinned_ring_4", graph_reuse="set_rows",
        plans="ours", plan_scope=plans, n_copies=n_copies,
    )  # fmt: skip
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=64, n_ubatch=8, threads=1,
        n_devices=2, toggles=toggles,
    ) as engine:  # fmt: skip
        steps = engine.programs(6 * 8)
    recorded = [{c.event for c in step.commands if isinstance(c, cmd.Record)} for step in steps]
    first = next(n for n, c in enumerate(steps[-1].commands) if isinstance(c, cmd.Replay))
    waits = [c.event for c in steps[-1].commands[:first] if isinstance(c, cmd.Wait)]
    assert [next(n for n in range(1, 6) if event in recorded[5 - n]) for event in waits] == back
