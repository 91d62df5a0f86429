"""The hazard checker on batched steps: prompts beside tokens, draws, copied and shifted cells.
It is given the programs in the order in which an engine's host began them, and waited for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

import workbench as wb
from tests.orderings import every_ordering
from tests.profiles import long, share, tiers
from workbench.backend.base import Backend, open_backend
from workbench.backend.issue.prepared import Prepared
from workbench.config import Toggles
from workbench.engine import load as loaded
from workbench.engine.engine import Engine
from workbench.engine.programs import Key
from workbench.engine.slots.draws import FED
from workbench.program import commands as cmd
from workbench.program import events
from workbench.program.check.hazards import races
from workbench.program.plans import with_plans
from workbench.program.sync_modes import race_of

N_UBATCH = 16
# what a server has: no wait of the host but for results, and for its own staging memory
SERVED = {
    "graph_reuse": "set_rows", "sync": "packed_implicit", "copy_stream": "compute",
    "host_source": "pinned_ring_2", "step_wait": "outputs", "skip_gate": "always",
}  # fmt: skip
NAMES = ("kv_cache", "skip_masked_kv", "kv_parts", "batch_sizes", "sampling", "results")
EVERY = [
    dict(zip(NAMES, values, strict=True))
    for values in itertools.product(*(Toggles.values(name) for name in NAMES))
]
BEHIND = SERVED | {
    "kv_cache": "per_sequence", "skip_masked_kv": "tail", "kv_parts": "parallel_blocks",
    "batch_sizes": "padded", "sampling": "device", "results": "behind",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[Engine]:
    """It computes nothing, so that programs that race may be issued, too (unsafe). As on a GPU,
    kernels may begin early, and steps may compute on several streams."""

    def able(name: str, threads: int) -> Backend:
        return open_backend(name, threads, **({"programmatic": True} if name == "null" else {}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded, "open_backend", able)
        made = wb.Engine.load(
            tiny_model("tiny-llama", "Q8_0"), device="null", n_ctx=512, n_seqs=4, n_kv_pad=32,
            n_ubatch=N_UBATCH, threads=1, unsafe=True, toggles=Toggles(),
        )  # fmt: skip
    with made:
        yield made


class Part(NamedTuple):
    """Of a step: all that comes before the wait for its results, or that wait and the reads."""

    key: Key
    is_tail: bool


def issued(engine: Engine) -> list[Part]:
    """What the host does, in its order, for sequences that begin, go on, share and end."""
    found: list[Part] = []
    keys: dict[Prepared, Key] = {}
    get, run, finish = engine.steps.programs.get, Prepared.run, Prepared.finish

    def noted(key: Key, cell: int = 0) -> Prepared:
        keys[made := get(key, cell)] = key
        return made

    def began(prepared: Prepared, *given: Any) -> None:
        found.append(Part(keys[prepared], False))
        run(prepared, *given)

    def ended(prepared: Prepared, *given: Any) -> Any:
        found.append(Part(keys[prepared], True))
        return finish(prepared, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.steps.programs, "get", noted)
        patch.setattr(Prepared, "run", began)
        patch.setattr(Prepared, "finish", ended)
        serve(engine)
    return found


def serve(engine: Engine) -> None:
    """Steps of several sequences. Each is submitted as soon as the engine takes it."""
    cache, numbers = engine.cache, np.random.default_rng(4)

    def submit(*work: tuple[int, int, Any], draws: bool = engine.can_draw) -> None:
        made = [
            (s, [FED] if draws and n == 1 else numbers.integers(3, 900, n).tolist(), outputs)
            for s, n, outputs in work
        ]
        pending.append(engine.submit(made, draws))

    pending: list[Any] = []
    engine.reset()
    submit((0, 9, "last"), (1, 5, "none"))
    submit((0, 1, "last"), (1, 8, "last"))
    for _ in range(5):  # a train without results, longer than any ring
        submit((2, N_UBATCH, "none"))
    submit((2, 3, "last"), (0, 1, "last"), (1, 1, "last"))
    submit((1, 1, "last"), (0, 1, "last"), (2, 1, "last"))
    cache.copy(2, 3, 0, 20)  # which the next step finds there
    submit((3, 4, "last"), (0, 1, "last"), (1, 1, "last"))
    for _ in range(3):
        submit(*((s, 1, "last") for s in (0, 1, 2, 3)))
    cache.remove(1)
    cache.remove(0, 2, 6)
    cache.shift(0, -4, 6)  # K of which is turned before the next step
    submit((0, 1, "last"), (2, 1, "last"), (3, 1, "last"))
    submit((0, 3, "all"), (2, 1, "last"), draws=False)  # whose logits the host wants
    submit((1, 6, "last"), (0, 1, "last"))
    submit((0, 1, "last"))
    for step in pending:
        step.wait()


def as_programs(engine: Engine, parts: list[Part], scope: str = "") -> list[cmd.Program]:
    """The programs of the parts, on common buffers, for the checker to read. scope: of plans."""
    buffers, made = dict[str, cmd.Buffer](), dict[Key, cmd.Program]()
    cut: dict[Part, cmd.Program] = {}
    for part in parts:
        if part.key not in made:
            program = engine._step_programs.of(*part.key, buffers)
            made[part.key] = with_plans(program, scope) if scope else program
        program, at = made[part.key], made[part.key].first_of_tail
        commands = program.commands[at:] if part.is_tail else program.commands[:at]
        if part not in cut:
            cut[part] = replace(program, commands=commands)
    return [cut[part] for part in parts if cut[part].commands]


def order_of(engine: Engine, values: dict[str, str], scope: str = "") -> list[cmd.Program]:
    with engine.variant(Toggles(**values)) as variant:
        return as_programs(variant, issued(variant), scope)


def launched(steps: list[cmd.Program]) -> list[cmd.Launch]:
    return [c for p in steps for c in p.singly() if isinstance(c, cmd.Launch)]


def ops_of(steps: list[cmd.Program]) -> set[str]:
    return {c.node.op for c in launched(steps)}


def spoiled(steps: list[cmd.Program], gone: Callable[[Any], bool]) -> list[cmd.Program]:
    """The steps without the commands that `gone` says of."""
    made = {p: replace(p, commands=[c for c in p.commands if not gone(c)]) for p in {*steps}}
    assert any(len(made[p].commands) < len(p.commands) for p in steps)
    return [made[p] for p in steps]


@pytest.mark.parametrize(
    "values", share(EVERY, every=47, slow=7), ids=lambda v: "-".join(v.values())
)
def test_batched_steps_are_free_of_races(engine, values):
    steps = order_of(engine, SERVED | values)
    assert not races(steps * 2)
    found = ops_of(steps)
    assert ("draw" in found) == ("keep_tokens" in found) == (values["sampling"] == "device")
    assert ("kv_extents" in found) == (values["skip_masked_kv"] in ("tail", "auto"))
    assert ("kv_classes" in found) == (values["skip_masked_kv"] == "classes")
    assert ("copy_cells" in found) == (values["kv_cache"] == "per_sequence")
    assert "rope_shift" in found
    # and it would see it: nothing waits any more
    assert races(spoiled(steps, lambda c: isinstance(c, cmd.Sync | cmd.Wait)))


# as programs of one sequence are lowered for a GPU
LOWERED: dict[str, dict[str, str]] = {
    "fused on four streams": {
        "streams": "4", "fork": "any", "fuse": "on", "branch_fusion": "inside", "defer_norm": "on",
    },
    "halved for one": {"defer_norm": "one"},
    "best of a GPU": {"pdl": "on", "fuse": "on", "defer_norm": "on"},
}  # fmt: skip


def is_halved(launches: list[cmd.Launch]) -> bool:
    return any(p.op == "square_sums" for c in launches for p in c.node.parts or (c.node,))


@pytest.mark.parametrize("cache", Toggles.values("kv_cache"))
@pytest.mark.parametrize("name", [long(n) if "four streams" in n else n for n in LOWERED])
def test_batched_steps_lowered_for_a_gpu_do_not_race(engine, name, cache):
    values = LOWERED[name]
    steps = order_of(engine, BEHIND | {"kv_cache": cache} | values)
    assert not races(steps * 2)
    # that programs of several sequences are what the toggles say
    of_several = launched([p for p in steps if p.shape.n_seqs > 1])
    on_device = [c for c in of_several if c.stream.backend == 1]
    assert any(c.node.parts for c in on_device) == ("fuse" in values)
    assert any(c.programmatic for c in on_device) == ("pdl" in values)
    assert (len({c.stream for c in on_device}) > 1) == ("streams" in values)
    assert is_halved(of_several) == (values.get("defer_norm") == "on")
    assert is_halved(launched(steps)) == ("defer_norm" in values)
    if "streams" in values:  # and it would see it: no stream waits for another any more
        assert races(spoiled(steps, lambda c: isinstance(c, cmd.Wait) and c.forks))


@pytest.mark.parametrize("scope", Toggles.values("plan_scope"))
@pytest.mark.parametrize("results", Toggles.values("results"))
def test_batched_steps_in_plans_are_free_of_races(engine, results, scope):
    steps = order_of(engine, BEHIND | {"results": results}, scope)
    assert not races(steps * 2)
    assert sum(p.counts().get("replays", 0) for p in steps) > 10


@pytest.mark.parametrize("results", Toggles.values("results"))
def test_the_host_goes_on_before_results_are_there(engine, results):
    """Else the order would prove nothing of results behind: a step begins before the wait for the
    step before it, and never two steps. Two whose results lie in the same memory race."""
    with engine.variant(Toggles(**BEHIND | {"results": results})) as variant:
        parts = issued(variant)
        under_way = [*itertools.accumulate(-1 if part.is_tail else 1 for part in parts)]
        assert max(under_way) == (2 if results == "behind" else 1) and under_way[-1] == 0
        if results == "behind":
            same = [part._replace(key=part.key._replace(turn=0)) for part in parts]
            assert races(as_programs(variant, same))


def test_results_copied_or_read_too_early_are_found(engine):
    """Without the copy stream's wait for the graph, and the host's for the copies of results."""
    steps, of_graph = order_of(engine, BEHIND), events.computed("null")
    found = races(spoiled(steps, lambda c: isinstance(c, cmd.Wait) and c.event == of_graph))
    assert found
    for race in found:
        copies = [at.command for at in race[:2] if isinstance(at.command, cmd.Copy)]
        assert copies[0].stream.id == cmd.COPY_STREAM
    arrived = {events.arrived("null", turn) for turn in range(2)}
    found = races(spoiled(steps, lambda c: isinstance(c, cmd.Sync) and c.event in arrived))
    assert any(isinstance(race.second.command, cmd.Read) for race in found)


@pytest.fixture(scope="module")
def two_devices(tiny_model) -> Iterator[Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="null", n_ctx=256, n_ubatch=8, n_devices=2,
        unsafe=True, toggles=Toggles(),
    ) as made:  # fmt: skip
        yield made


@pytest.mark.parametrize("every", [long(37), *tiers(13, 1)], ids=["some", "more", "all"])
def test_what_is_said_to_race_with_results_behind_does_and_nothing_else(engine, two_devices, every):
    """`race_of` against the checker. It knows nothing of devices. On one, copies of inputs that
    ride a stream of their own come after the results there, and so after the graph that they wait
    for. The first of two devices has no results."""
    more = {"results": "behind", "graph_reuse": "set_rows"}
    said = set()
    for toggles in [*every_ordering(**more)][::every]:
        with engine.variant(replace(toggles, kv_cache="per_sequence", sampling="device")) as made:
            steps = as_programs(made, issued(made))
            why = race_of(made._ordering, made.backend.capabilities)
        with two_devices.variant(toggles) as made:
            cycle = made.cycle(30, 2)
        found = bool(races(steps)), bool(races(cycle * 2))
        assert any(found) == bool(why), (toggles, why, found)
        if toggles.copy_stream == "compute" or toggles.sync != "write_read_boundary":
            assert found[0] == found[1], (toggles, why, found)
        said.add(why)
    assert "" in said and len(said) > 1
