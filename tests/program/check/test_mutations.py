"""The hazard checker is itself checked, against the adversary and against every interleaving, on
the programs of tiny models, whole and with each Sync, Wait and Record removed.

Safe, by the checker: 200 seeds find nothing. Unsafe: the adversary, or every interleaving of the
run reduced to the two racing commands, finds a wrong read or two writes that changed places. (Two
writes that race and are both overwritten before anybody looks are a race to the checker and
invisible in the whole run: reduced to the pair, the end of the run sees them.)
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, islice, product
from random import Random
from typing import Any, NamedTuple, cast

import pytest

from tests.oracles.adversary import SEEDS, Adversary
from tests.oracles.interleavings import ends_wrong
from tests.profiles import tiers
from workbench.common.errors import DeviceError, UsageError
from workbench.config import (
    BranchFusion,
    CopyStream,
    EngineConfig,
    Fork,
    HostSource,
    InputOrder,
    Lifetimes,
    NCopies,
    PlanRule,
    PlanScope,
    StepWait,
    Switch,
    SyncMode,
    Toggles,
)
from workbench.engine.choose import choose_ordering
from workbench.engine.engine import Engine
from workbench.program.capabilities import Capabilities
from workbench.program.check.hazards import apart, races
from workbench.program.commands import Command, CommandAt, Program, Record, Replay, Sync, Wait
from workbench.program.sync_modes import Ordering

ORDERING = (Sync, Wait, Record)


class Mutant(NamedTuple):
    """A run, and what was taken out of it ("" nothing)."""

    run: str
    without: str
    steps: list[Program]
    one_order: bool

    def __str__(self) -> str:
        order = "" if self.one_order else ", copies in no order"
        return f"{self.run}{order}{self.without and ' without ' + self.without}"


@contextmanager
def copies_in_order(engine: Engine, one_order: bool) -> Iterator[None]:
    """Programs are lowered for a device whose copies have the order of its launches, or none."""
    backend, programs = cast(Any, engine.backend), engine._made
    before, targets = backend.capabilities, programs._targets
    backend.capabilities = dataclasses.replace(before, one_order=one_order)
    in_stream = backend.capabilities.in_stream
    programs._targets = [target._replace(in_stream=in_stream) for target in targets]
    try:
        yield
    finally:
        backend.capabilities, programs._targets = before, targets


def runs_of(
    base: Engine, toggles: Toggles, one_order: bool = True, scopes: Iterable[str] = ()
) -> Iterator[tuple[str, list[Program]]]:
    """A decode of three tokens, and a train: two ubatches without outputs, one with, the next
    train's first. What comes again in a run is one program, but where it is patched for its cell
    (graph_reuse). Where rings have several turns, each has a program, and all come again in a
    train. scopes: also of each, with plans, where it is not refused."""
    yield from _runs_of(base, toggles, one_order)
    for scope in scopes:
        if toggles.plans == PlanRule.OFF:
            planned = dataclasses.replace(toggles, plans=PlanRule.OURS, plan_scope=scope)
            yield from _runs_of(base, planned, one_order)


def _runs_of(
    base: Engine, toggles: Toggles, one_order: bool
) -> Iterator[tuple[str, list[Program]]]:
    rule = Ordering.of(toggles).rule
    whole = toggles.plans != PlanRule.OFF and toggles.plan_scope == PlanScope.STEP
    if whole and (rule.blocking or rule.wait_after):  # refused
        return
    on = {name: v for name, v in toggles.to_dict().items() if v != getattr(Toggles(), name)}
    name = " ".join(f"{k}={v}" for k, v in on.items()) or "baseline"
    with base.variant(toggles) as engine, copies_in_order(engine, one_order):
        yield f"decode {name}", engine.programs(1, 2)
        if toggles.step_wait != StepWait.OUTPUTS:
            return
        if (period := engine.period) > 1:
            yield f"train {name}", apart(engine.programs(period + 2, 1))
            return
        first, second, last = engine.programs(3)
        yield f"train {name}", [first, second, last, first]


def mutants_of(run: str, steps: list[Program], one_order: bool) -> Iterator[Mutant]:
    """The run, and the run without each ordering command, in all steps at once."""
    yield Mutant(run, "", steps, one_order)
    for program in {id(p): p for p in steps}.values():
        for step, i, command, part in program.located(steps.index(program)):
            if isinstance(command, ORDERING):
                less = copy.copy(program)
                left: list[Command] = []
                if isinstance(plan := program.commands[i], Replay):
                    assert part is not None
                    left = [dataclasses.replace(plan, parts=_without(plan.parts, part))]
                less.commands = [*program.commands[:i], *left, *program.commands[i + 1 :]]
                changed = [less if p is program else p for p in steps]
                where = f"{command.kind} {CommandAt(step, i, command, part).where}"
                yield Mutant(run, where, changed, one_order)


def _without(parts: Sequence[Command], n: int) -> tuple[Command, ...]:
    return (*parts[:n], *parts[n + 1 :])


def content(steps: Iterable[Program]) -> tuple:
    """What two runs that are the same share: commands, and their ranges by name of the buffer."""

    def of(c: Any) -> tuple:
        if isinstance(c, Replay):
            return (c.kind, c.stream, *map(of, c.parts))
        what = [getattr(c, name, None) for name in ("stream", "event")]
        ranges = [[(r.buffer.name, r.offset, r.nbytes) for r in rs] for rs in (c.reads, c.writes)]
        return (c.kind, *what, *map(tuple, ranges))

    known: dict[int, tuple] = {}
    return tuple(
        known.setdefault(id(p), tuple(map(of, p.commands))) if id(p) not in known else known[id(p)]
        for p in steps
    )


def distinct(mutants: Iterable[Mutant]) -> list[Mutant]:
    found: dict[tuple, Mutant] = {}
    for mutant in mutants:
        found.setdefault((mutant.one_order, content(mutant.steps)), mutant)
    return list(found.values())


def orderings(**fixed: Iterable[str]) -> Iterator[Toggles]:
    """Every ordering of copies and waits with `fixed` values, but for toggles that clash."""
    chosen = {
        "sync": [mode for mode in SyncMode if mode != SyncMode.AUTO],
        "copy_stream": [CopyStream.OWN, CopyStream.COMPUTE],
        "step_wait": [StepWait.OUTPUTS],
        **fixed,
    }
    for values in product(*chosen.values()):
        asked = dict(zip(chosen, map(str, values), strict=True))
        if asked["sync"] != SyncMode.EVENT_GUARDED or asked["copy_stream"] == CopyStream.OWN:
            yield Toggles(**asked)


@pytest.fixture(scope="module")
def base(tiny_model) -> Iterator[Engine]:
    """A model of two layers whose ubatches are one token, so that its programs are short."""
    path = tiny_model("tiny-llama", "F16")
    with Engine.load(
        path, device="null", n_ctx=64, n_ubatch=1, unsafe=True, toggles=Toggles()
    ) as engine:
        yield capturing(engine)


def capturing(engine: Engine) -> Engine:
    """The engine, whose variants may have plans."""
    backend = cast(Any, engine.backend)
    backend.capabilities = dataclasses.replace(backend.capabilities, capture=True)
    return engine


def judge(mutants: Iterable[Mutant], seeds: range = SEEDS) -> dict[str, int]:
    """Asserts that the adversary and the interleavings bear the checker out on every mutant.

    Returns how many were safe, unsafe, and unsafe but right under all seeds.
    """
    count = {"safe": 0, "unsafe": 0, "unseen": 0}
    for mutant in mutants:
        found = races(mutant.steps, one_order=mutant.one_order)
        wrong = Adversary(mutant.steps, mutant.one_order).search(seeds)
        if not found:
            assert not wrong, f"{mutant}: {wrong[0]}"
            count["safe"] += 1
            continue
        count["unsafe"] += 1
        count["unseen"] += not wrong
        for race in found:
            assert ends_wrong(mutant.steps, race, mutant.one_order), f"{mutant}: {race.missing}"
    return count


def mutants(
    base: Engine, chosen: Iterable[Toggles], one_order: bool, scopes: Iterable[str] = ()
) -> list[Mutant]:
    return distinct(
        mutant
        for toggles in chosen
        for run, steps in runs_of(base, toggles, one_order, scopes)
        for mutant in mutants_of(run, steps, one_order)
    )


# of the mutants a share, and of how many of each kind there must be more
SHARES = pytest.mark.parametrize(
    ("share", "least"), [(13, 4), pytest.param(1, 50, marks=pytest.mark.slow)], ids=["some", "all"]
)


@SHARES
def test_without_any_one_command_the_checker_is_right(base, share, least):
    found = judge(mutants(base, orderings(), one_order=True)[::share])
    assert min(found["safe"], found["unsafe"]) > least
    assert found["unseen"] <= found["unsafe"] // 20, "seeds find nearly all by themselves"


@SHARES
def test_without_any_one_command_the_checker_is_right_where_copies_have_no_order(
    base, share, least
):
    modes = (SyncMode.PER_COPY, SyncMode.COPY_BOUNDARY, SyncMode.EVENT_GUARDED)
    found = judge(mutants(base, orderings(sync=modes), one_order=False)[::share])
    assert min(found["safe"], found["unsafe"]) > least // 2
    assert found["unseen"] <= found["unsafe"] // 20


PLANNED = [
    Toggles(sync=mode, copy_stream=stream, step_wait=StepWait.OUTPUTS, plans="ours",
            plan_scope=scope, host_source=source)
    for mode, stream, scope, source in (
        (SyncMode.EVENT_GUARDED, CopyStream.OWN, PlanScope.STEP, HostSource.PINNED_RING_2),
        (SyncMode.IMPLICIT, CopyStream.OWN, PlanScope.STEP, HostSource.PINNED),
        (SyncMode.PACKED_IMPLICIT, CopyStream.COMPUTE, PlanScope.STEP, HostSource.PINNED),
        (SyncMode.COPY_BOUNDARY, CopyStream.OWN, PlanScope.SPLIT, HostSource.PINNED),
    )
]  # fmt: skip


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_of_programs_with_plans_without_any_one_command_the_checker_is_right(base, share):
    found = judge(mutants(base, PLANNED, one_order=True)[::share])
    assert min(found["safe"], found["unsafe"]) > 5 // share
    assert found["unseen"] <= found["unsafe"] // 10


@pytest.mark.parametrize("one_order", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_orderings_are_refused_as_racing_where_they_race_and_nowhere_else(base, one_order):
    """`lower` knows by rule what the checker proves and the adversary tries."""
    able = Capabilities(True, True, one_order, False, 2)
    verdicts = []
    for toggles in orderings(step_wait=StepWait):
        ordering = Ordering.of(toggles)
        try:
            choose_ordering(ordering, able, "device")
            racing = False
        except UsageError:
            racing = True
        except DeviceError:  # impossible there, race or not
            continue
        runs = [steps for _, steps in runs_of(base, toggles, one_order)]
        assert racing == any(races(steps, one_order=one_order) for steps in runs), ordering
        assert racing == any(Adversary(steps, one_order).search() for steps in runs), ordering
        verdicts.append(racing)
    assert min(verdicts.count(True), verdicts.count(False)) >= 3


def across() -> Iterator[Toggles]:
    """Every pair of values of two toggles on the baseline, and 200 random full combinations."""
    values = {name: Toggles.values(name) for name in Toggles.names()}
    values["sync"].remove(SyncMode.AUTO)
    values["pdl"].remove(Switch.ON)  # the null device has no programmatic launch
    del values["launch_ahead"], values["plan_end"]  # change no program
    rng = Random(17795)
    asked = [
        {a: x, b: y} for a, b in combinations(values, 2) for x, y in product(values[a], values[b])
    ] + [{name: rng.choice(few) for name, few in values.items()} for _ in range(200)]
    for chosen in asked:
        try:
            yield Toggles(**chosen)
        except UsageError:  # the two clash
            continue


# every value of each toggle of this mechanism
WITHIN: dict[str, Any] = {
    "step_wait": StepWait, "input_order": InputOrder, "host_source": HostSource,
    "n_copies": NCopies,
}  # fmt: skip


@pytest.mark.timeout(0)
@pytest.mark.parametrize("share", tiers(23, 1), ids=["more", "all"])
def test_on_all_of_this_mechanism_and_across_mechanisms_the_checker_is_right(base, share):
    asked = list(dict.fromkeys([*orderings(**WITHIN), *across()]))
    whole = (
        Mutant(run, "", steps, True)
        for toggles in asked[::share]
        for run, steps in runs_of(base, toggles, scopes=PlanScope)
    )
    found = judge(distinct(whole))
    assert min(found["safe"], found["unsafe"]) > 50 // share


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("share", "least"), tiers((11, 80), (1, 1000)), ids=["more", "all"])
def test_of_all_of_this_mechanism_without_any_one_command_the_checker_is_right(base, share, least):
    found = judge(mutants(base, list(orderings(**WITHIN))[::share], one_order=True))
    assert min(found["safe"], found["unsafe"]) > least and not found["unseen"]


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("share", "least"), tiers((5, 20), (1, 100)), ids=["more", "all"])
def test_of_all_of_this_mechanism_with_plans_too(base, share, least):
    """A share of the orderings; the exhaustive test of placements has most of the others."""
    chosen = list(orderings(**WITHIN))[:: 13 * share]
    found = judge(mutants(base, chosen, one_order=True, scopes=PlanScope))
    assert min(found["safe"], found["unsafe"]) > least and not found["unseen"]


PLACEMENTS: dict[str, dict[str, Any]] = {
    "all on the device": {},
    "a layer on the host": {"n_gpu_layers": 1},
    "a device split between host splits": {"override_tensor": ("blk.1.ffn_(gate|up)=host",)},
    "a layer on each of two devices": {"n_devices": 2},
}
# devices are ordered by events behind copies, so that two of them want an order of copies: without
# it every ordering races, and an engine refuses to open them
PLACED = [
    (placement, one_order)
    for placement, config in PLACEMENTS.items()
    for one_order in (True, False)
    if one_order or "n_devices" not in config
]


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("placement", "one_order"), PLACED)
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3"])
def test_of_every_ordering_on_every_placement_the_checker_is_right(
    tiny_model, record_property, preset, placement, one_order
):
    config = EngineConfig(device="null", n_ctx=64, n_ubatch=1, unsafe=True, **PLACEMENTS[placement])
    chosen = [*orderings(step_wait=StepWait, input_order=InputOrder),
              *orderings(host_source=HostSource, n_copies=NCopies)]  # fmt: skip
    with Engine.load(tiny_model(preset, "F16"), config=config, toggles=Toggles()) as engine:
        found = judge(mutants(capturing(engine), chosen, one_order, PlanScope))
    record_property("runs", found)
    assert min(found["safe"], found["unsafe"]) > 50


SHARDS = 16  # of the graphs that toggles make, so that a run cut off goes on
# change no graph: what orders, and what is done again (graph_reuse changes the cache stores)
ORDERED_BY = (*Ordering._fields, "pdl", *(
    name for name in Toggles.names() if name.startswith(("redo_", "plan", "launch_ahead"))
))  # fmt: skip


FUSIONS = Toggles.members("fuse")
FORKED: dict[str, Any] = {
    "streams": ["3"], "fork": Fork, "branch_fusion": BranchFusion, "lifetimes": Lifetimes,
}  # fmt: skip
LESS_FORKED = ("validate",)  # a check that fails leaves the program of one stream


def combined() -> Iterator[dict[str, str]]:
    """All combinations of the toggles that change a graph of one stream. And on three streams of
    all that change its branches, with every fusion and with none."""
    names = [name for name in Toggles.names() if name not in (*ORDERED_BY, *FORKED, *LESS_FORKED)]
    values = {name: Toggles.values(name) for name in names}
    for some in product(*values.values()):
        yield dict(zip(names, some, strict=True))
    beside = {name: values[name] for name in names if name not in FUSIONS}
    beside |= {"fuse": Toggles.values(FUSIONS[0]), **FORKED}
    for some in product(*beside.values()):
        yield dict(zip(beside, map(str, some), strict=True))


def graphs(base: Engine) -> Iterator[Toggles]:
    """Of these combinations, the first that makes each graph."""
    known = set()
    for chosen in combined():
        toggles = Toggles(**chosen)
        with base.variant(toggles) as engine:
            made = content(engine.programs(3))
        if made not in known:
            known.add(made)
            yield toggles


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_of_the_full_product_of_toggles_the_checker_is_right(tiny_model, record_property, shard):
    """Every ordering of every graph. (The null device has no programmatic launches.)"""
    every = [{name: getattr(o, name) for name in Ordering._fields} for o in orderings(**WITHIN)]
    path, found = tiny_model("tiny-llama", "Q8_0"), Counter[str]()
    with Engine.load(
        path, device="null", n_ctx=64, n_ubatch=1, unsafe=True, toggles=Toggles()
    ) as base:
        capturing(base)
        for of_graph in islice(graphs(base), shard, None, SHARDS):
            whole = (
                Mutant(run, "", steps, True)
                for ordering in every
                for run, steps in runs_of(
                    base, dataclasses.replace(of_graph, **ordering), scopes=PlanScope
                )
            )
            found.update(judge(distinct(whole)))
    record_property("runs", dict(found))
    assert min(found["safe"], found["unsafe"]) > 100


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize("one_order", [True, False])
def test_without_any_two_commands_the_checker_is_right(base, record_property, one_order):
    once = mutants(base, orderings(), one_order)
    twice = [m for mutant in once for m in mutants_of(str(mutant), mutant.steps, one_order)]
    found = judge(distinct(twice))
    record_property("runs", found)
    assert min(found["safe"], found["unsafe"]) > 100
