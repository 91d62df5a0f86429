"""The hazard checker is itself checked, against the adversary and against every interleaving, on
the programs of tiny models, whole and with each Sync, Wait and Record removed.

Safe, by the checker: 200 seeds find nothing, or 25 in the full products. Unsafe: the adversary, or
every interleaving of the run reduced to the two racing commands, finds a wrong read or two writes
that changed places. (Two writes that race and are both overwritten before anybody looks are a race
to the checker and invisible in the whole run: reduced to the pair, the end of the run sees them.)
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations, islice, product
from random import Random
from typing import Any, NamedTuple, cast

import pytest

from tests.oracles.adversary import SEEDS, Adversary, WrongRead
from tests.oracles.interleavings import ends_wrong
from tests.profiles import exhaustive, share, tiers
from workbench.common.errors import DeviceError, UsageError
from workbench.config import (
    BranchFusion,
    CopyStream,
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


Runs = Iterator[tuple[str, list[Program]]]


def runs_of(
    base: Engine, toggles: Toggles, one_order: bool = True, scopes: Iterable[str] = ()
) -> Runs:
    """A decode of three tokens, and a train: two ubatches without outputs, one with, the next
    train's first. What comes again in a run is one program, but where it is patched for its cell
    (graph_reuse). Where rings have several turns, each has a program, and all come again in a
    train. scopes: also of each, with plans, where it is not refused."""
    yield from _runs_of(base, toggles, one_order)
    for scope in scopes if toggles.plans == PlanRule.OFF else ():
        planned = dataclasses.replace(toggles, plans=PlanRule.OURS, plan_scope=scope)
        yield from _runs_of(base, planned, one_order)


def _runs_of(base: Engine, toggles: Toggles, one_order: bool) -> Runs:
    rule = Ordering.of(toggles).rule
    whole = toggles.plans != PlanRule.OFF and toggles.plan_scope == PlanScope.STEP
    if whole and (rule.blocking or rule.wait_after):  # refused
        return
    usual = Toggles().to_dict()
    on = {name: v for name, v in toggles.to_dict().items() if v != usual[name]}
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
                if part is not None:
                    plan = cast(Replay, program.commands[i])
                    left = [dataclasses.replace(plan, parts=_without(plan.parts, part))]
                less.commands = [*program.commands[:i], *left, *program.commands[i + 1 :]]
                changed = [less if p is program else p for p in steps]
                where = f"{command.kind} {CommandAt(step, i, command, part).where}"
                yield Mutant(run, where, changed, one_order)


def _without(parts: Sequence[Command], n: int) -> tuple[Command, ...]:
    return (*parts[:n], *parts[n + 1 :])


class Contents:
    """What programs do, as numbers: two runs that are the same have equal ones. A command is its
    kind, its stream and its ranges by name of the buffer. Mutants of a run share their commands, so
    each is read once."""

    def __init__(self) -> None:
        self._numbers: dict[tuple, int] = {}
        self._known: dict[int, tuple[Command, int]] = {}  # keeps the commands, so ids stay theirs

    def of(self, steps: Iterable[Program]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(map(self._number, p.commands)) for p in steps)

    def _number(self, command: Any) -> int:
        if id(command) not in self._known:
            number = self._numbers.setdefault(self._content(command), len(self._numbers))
            self._known[id(command)] = command, number
        return self._known[id(command)][1]

    def _content(self, c: Any) -> tuple:
        if isinstance(c, Replay):
            return (c.kind, c.stream, *map(self._number, c.parts))
        ranges = [tuple((r.buffer.name, *r[1:]) for r in rs) for rs in (c.reads, c.writes)]
        return (c.kind, getattr(c, "stream", None), getattr(c, "event", None), *ranges)


def distinct(mutants: Iterable[Mutant]) -> list[Mutant]:
    contents, found = Contents(), dict[tuple, Mutant]()
    for mutant in mutants:
        found.setdefault((mutant.one_order, contents.of(mutant.steps)), mutant)
    return list(found.values())


def orderings(**fixed: Iterable[str]) -> Iterator[Toggles]:
    """Every ordering of copies and waits with `fixed` values, but for toggles that clash."""
    chosen = {
        "sync": [mode for mode in SyncMode if mode != SyncMode.AUTO],
        "copy_stream": [CopyStream.OWN, CopyStream.COMPUTE], "step_wait": [StepWait.OUTPUTS],
        **fixed,
    }  # fmt: skip
    for values in product(*chosen.values()):
        asked = dict(zip(chosen, map(str, values), strict=True))
        if asked["sync"] != SyncMode.EVENT_GUARDED or asked["copy_stream"] == CopyStream.OWN:
            yield Toggles(**asked)


def opened(path, **config: Any) -> Engine:
    """A model whose ubatches are one token, so that its programs are short; variants may have
    plans."""
    engine = Engine.load(
        path, device="null", n_ctx=64, n_ubatch=1, unsafe=True, toggles=Toggles(), **config
    )
    backend = cast(Any, engine.backend)
    backend.capabilities = dataclasses.replace(backend.capabilities, capture=True)
    return engine


@pytest.fixture(scope="module")
def base(tiny_model) -> Iterator[Engine]:
    with opened(tiny_model("tiny-llama", "F16")) as engine:
        yield engine


def judge(
    mutants: Iterable[Mutant], least: float, seen: int | None = None, seeds: Iterable[int] = SEEDS
) -> dict[str, int]:
    """Asserts that the adversary and the interleavings bear the checker out on every mutant.

    Returns how many were safe, unsafe (each more than `least`), and unsafe but right under all
    seeds: at most one of `seen`, if that is given; they find nearly all by themselves. Runs that
    are one to the adversary are searched once.
    """
    count, searched = {"safe": 0, "unsafe": 0, "unseen": 0}, dict[Hashable, list[WrongRead]]()
    for mutant in mutants:
        found = races(mutant.steps, one_order=mutant.one_order)
        adversary = Adversary(mutant.steps, mutant.one_order)
        if (form := adversary.form()) not in searched:
            searched[form] = adversary.search(seeds)
        wrong = searched[form]
        if not found:
            assert not wrong, f"{mutant}: {wrong[0]}"
            count["safe"] += 1
            continue
        count["unsafe"] += 1
        count["unseen"] += not wrong
        for race in found:
            assert ends_wrong(adversary.moments, race), f"{mutant}: {race.missing}"
    assert min(count["safe"], count["unsafe"]) > least
    assert seen is None or count["unseen"] <= count["unsafe"] // seen
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


def whole(base: Engine, chosen: Iterable[Toggles]) -> list[Mutant]:
    """The runs with nothing taken out, with and without plans."""
    return distinct(
        Mutant(run, "", steps, True)
        for toggles in chosen
        for run, steps in runs_of(base, toggles, scopes=PlanScope)
    )


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
LOOSE = (SyncMode.PER_COPY, SyncMode.COPY_BOUNDARY, SyncMode.EVENT_GUARDED)
# orderings, whether their copies have an order, the share of the mutants that is tried quickly, of
# how many of each kind there must be more (quickly, of all), and how many the seeds must find
TRIED: dict[str, tuple[list[Toggles], bool, int, tuple[int, int], int]] = {
    "every mode": ([*orderings()], True, 13, (4, 50), 20),
    "copies in no order": ([*orderings(sync=LOOSE)], False, 13, (2, 25), 20),
    "plans": (PLANNED, True, 4, (1, 5), 10),
}


@pytest.mark.parametrize("all_of_them", [False, exhaustive(True)])
@pytest.mark.parametrize("name", share(TRIED, every=3))
def test_without_any_one_command_the_checker_is_right(base, name, all_of_them):
    chosen, one_order, share, least, seen = TRIED[name]
    found = mutants(base, chosen, one_order)[:: 1 if all_of_them else share]
    judge(found, least[all_of_them], seen)


@pytest.mark.long
@pytest.mark.parametrize("one_order", [True, False])
def test_orderings_are_refused_as_racing_where_they_race(base, one_order):
    """And nowhere else: `lower` knows by rule what the checker proves and the adversary tries."""
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
        with suppress(UsageError):  # the two clash
            yield Toggles(**chosen)


# every value of each toggle of this mechanism
WITHIN: dict[str, Any] = {
    "step_wait": StepWait, "input_order": InputOrder, "host_source": HostSource,
    "n_copies": NCopies,
}  # fmt: skip


@pytest.mark.timeout(0)
@pytest.mark.parametrize("share", tiers(61, 1), ids=["more", "all"])
def test_on_all_of_this_mechanism_and_across_mechanisms_the_checker_is_right(base, share):
    asked = list(dict.fromkeys([*orderings(**WITHIN), *across()]))
    judge(whole(base, asked[::share]), 50 // share)


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("share", "least"), tiers((74, 10), (1, 1000)), ids=["more", "all"])
def test_of_all_of_this_mechanism_without_any_one_command_the_checker_is_right(base, share, least):
    found = judge(mutants(base, list(orderings(**WITHIN))[::share], one_order=True), least)
    assert not found["unseen"]


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("share", "least"), tiers((23, 4), (1, 100)), ids=["more", "all"])
def test_of_all_of_this_mechanism_with_plans_too(base, share, least):
    """A share of the orderings; the exhaustive test of placements has most of the others."""
    chosen = list(orderings(**WITHIN))[:: 13 * share]
    assert not judge(mutants(base, chosen, True, PlanScope), least)["unseen"]


PLACEMENTS: dict[str, dict[str, Any]] = {
    "all on the device": {},
    "a layer on the host": {"n_gpu_layers": 1},
    "a device split between host splits": {"override_tensor": ("blk.1.ffn_(gate|up)=host",)},
    "a layer on each of two devices": {"n_devices": 2},
}
# devices are ordered by events after copies, so that two of them want an order of copies: without
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
    chosen = [*orderings(step_wait=StepWait, input_order=InputOrder),
              *orderings(host_source=HostSource, n_copies=NCopies)]  # fmt: skip
    with opened(tiny_model(preset, "F16"), **PLACEMENTS[placement]) as engine:
        record_property("runs", judge(mutants(engine, chosen, one_order, PlanScope), 50))


FEW_SEEDS = SEEDS[:25]  # the runs are many, and most of them are safe
SHARDS = 48  # of the graphs that toggles make, so that a run cut off goes on
FUSIONS = Toggles.members("fuse")
ALL_FUSIONS = {"fuse": Toggles.values(FUSIONS[0])}
GRAPHS = ("graph_reuse", "defer_norm")
# Toggles that change a graph; those that order its commands are in WITHIN. The product of all of
# them makes too many graphs to judge, so each of these products is full, and what it does not name
# is as it is by default: what one stream does; every choice of fusions; and on three streams
# all that changes branches, with every fusion and with none.
PRODUCTS: list[dict[str, Any]] = [
    {name: Toggles.values(name) for name in (*GRAPHS, "skip_masked_kv", "skip_gate", "activations")}
    | ALL_FUSIONS,
    {name: Toggles.values(name) for name in FUSIONS},
    {name: Toggles.values(name) for name in GRAPHS}
    | ALL_FUSIONS
    | {"streams": ["3"], "fork": Fork, "branch_fusion": BranchFusion, "lifetimes": Lifetimes},
]


def combined() -> Iterator[dict[str, str]]:
    """All combinations of each of these products."""
    for of in PRODUCTS:
        for some in product(*of.values()):
            yield dict(zip(of, map(str, some), strict=True))


def graphs(base: Engine) -> Iterator[Toggles]:
    """Of these combinations, the first that makes each graph."""
    contents, known = Contents(), set()
    for chosen in combined():
        toggles = Toggles(**chosen)
        with base.variant(toggles) as engine:
            made = contents.of(engine.programs(3))
        if made not in known:
            known.add(made)
            yield toggles


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_of_the_full_products_of_toggles_the_checker_is_right(tiny_model, record_property, shard):
    """Every ordering of every graph. (The null device has no programmatic launches.)"""
    every = [{name: getattr(o, name) for name in Ordering._fields} for o in orderings(**WITHIN)]
    with opened(tiny_model("tiny-llama", "Q8_0")) as base:
        runs = (
            mutant
            for of_graph in islice(graphs(base), shard, None, SHARDS)
            for mutant in whole(base, (dataclasses.replace(of_graph, **o) for o in every))
        )
        record_property("runs", judge(runs, 100, seeds=FEW_SEEDS))


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize("one_order", [True, False])
def test_without_any_two_commands_the_checker_is_right(base, record_property, one_order):
    once = mutants(base, orderings(), one_order)
    twice = [m for mutant in once for m in mutants_of(str(mutant), mutant.steps, one_order)]
    record_property("runs", judge(distinct(twice), 100))
