"""Stamps of plans on the embedded device: when the first kernel of a step began and its last ended,
whatever the plan has around them, and however it was launched."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.late_host import LATE, late_looks, never_passed  # noqa: F401 - of every test
from tests.orderings import PLACED
from tests.profiles import share
from workbench.backend.base import Captured
from workbench.backend.clock.stamps import StampRing
from workbench.backend.issue.prepared import Prepared
from workbench.benchmarks.times.gaps import host_gaps
from workbench.benchmarks.times.token_parts import PARTS, token_parts
from workbench.common.errors import DeviceError, UsageError
from workbench.engine.programs import Key
from workbench.program.commands import COMPUTE_STREAM, Launch, Replay
from workbench.trace.profile import profile
from workbench.trace.spans import now_ns

BASE: dict[str, Any] = {"graph_reuse": "set_rows", "sync": "packed_implicit"}
AHEAD = BASE | {"plans": "ours", "plan_scope": "step", "launch_ahead": "on"}
TOKENS = [(7 * i + 3) % 500 for i in range(24)]


@pytest.fixture(scope="module")
def loaded(tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=96, n_ubatch=16, threads=1,
        toggles=wb.Toggles(),
    ) as made:  # fmt: skip
        yield made


class Stamped:
    """Steps of an engine with the host's time around each, ns."""

    def __init__(self, engine: wb.Engine):
        self.engine = engine
        self.around: list[tuple[int, int]] = []

    def step(self, token: int, outputs: Any = "last") -> np.ndarray:
        begin = now_ns()
        logits = self.engine.step([token], outputs).copy()
        self.around.append((begin, now_ns()))
        return logits

    def check(self, stamps: list[tuple[int, int]], off_ns: int = 0) -> None:
        """Each pair lies in its own step, one behind the other. off_ns: between the two clocks."""
        assert len(stamps) == len(self.around)
        for (begin, end), (called, returned) in zip(stamps, self.around, strict=True):
            assert called - off_ns < begin < end < returned + off_ns
        flat = np.array(stamps).ravel()
        assert (np.diff(flat) > 0).all()


def decode(engine: wb.Engine, tokens: list[int] = TOKENS) -> np.ndarray:
    engine.reset()
    return np.concatenate([engine.step([token]).copy() for token in tokens])


def decode_stamped(
    engine: wb.Engine, tokens: list[int] = TOKENS, late: Sequence[int] = (), off_ns: int = 0
) -> np.ndarray:
    """late: the steps that the host is late for. off_ns: of `Stamped.check`."""
    engine.reset()
    steps, rows = Stamped(engine), []
    with engine.stamped() as stamps:
        for i, token in enumerate(tokens):
            if i in late:
                time.sleep(LATE)
            rows.append(steps.step(token))
    steps.check(stamps, off_ns)
    return np.concatenate(rows)


NAMES = ("plans", "plan_scope", "launch_ahead", "results")
COMBINATIONS = [
    dict(zip(NAMES, values, strict=True)) for values in product(*map(wb.Toggles.values, NAMES))
]
COMBINATIONS += [
    values | {"plan_end": "word"} for values in COMBINATIONS if values["launch_ahead"] == "on"
]


@pytest.mark.parametrize("values", share(COMBINATIONS, every=5), ids=lambda v: "-".join(v.values()))
def test_a_step_s_stamps_lie_in_it_and_change_nothing(loaded, values):
    if values["results"] == "behind":  # the host writes inputs while a step is under way
        with pytest.raises(UsageError, match="results=behind race on the embedded device"):
            loaded.resolve(wb.Toggles(**BASE | values))
        values = values | {"host_source": "pinned_ring_2"}
    try:
        toggles = loaded.resolve(wb.Toggles(**BASE | values))
    except UsageError:
        assert values["launch_ahead"] == "on" or values["plans"] == "off"
        return
    wanted = decode(loaded)
    with loaded.variant(toggles) as engine:
        for _ in range(2):
            before = engine.counters
            assert np.array_equal(decode_stamped(engine), wanted)
            after = engine.counters
            assert np.array_equal(decode(engine), wanted)
        # plain and stamped plans are kept side by side
        captures = [
            n for n in after if n in ("plans_captured", "plans_twinned", "plans_reinstantiated")
        ]
        assert all(engine.counters[n] == before[n] for n in captures)
        if values["launch_ahead"] == "on":
            n = sum(after[name] - before[name] for name in ("plans_ahead", "plans_ahead_missed"))
            assert n > len(TOKENS) // 2


@pytest.mark.parametrize("scope", wb.Toggles.values("plan_scope"))
@pytest.mark.parametrize("reuse", wb.Toggles.values("graph_reuse"))
def test_every_way_to_keep_a_graph_can_be_stamped(loaded, reuse, scope):
    """Also where a plan is updated for every token: its twin is another work, patched with it."""
    values = BASE | {"plans": "ours", "plan_scope": scope, "graph_reuse": reuse}
    wanted = decode(loaded)
    with loaded.variant(wb.Toggles(**values)) as engine:
        for _ in range(2):
            before = engine.counters
            assert np.array_equal(decode(engine), wanted)
            plain = engine.counters
            assert np.array_equal(decode_stamped(engine), wanted)
        # a graph that is built anew takes over the plan of one that is gone, stamped or not
        for name in ("plans_captured", "plans_twinned", "plans_updated", "plans_replayed"):
            done = plain[name] - before[name]
            assert engine.counters[name] - plain[name] == done, name


WAYS = [
    {}, {"plan_scope": "step"}, {"plan_scope": "step", "results": "direct"},
    {"plan_scope": "step", "sync": "event_guarded", "copy_stream": "own"},
    {"plan_scope": "step", "launch_ahead": "on"},
]  # fmt: skip


def kept(engine: wb.Engine) -> Prepared:
    """The program of a token, which is kept."""
    found = engine.steps.programs.peek(Key(engine.program().shape, 0))
    assert found is not None
    return found


def stamped_plans(engine: wb.Engine) -> list[tuple[Captured, Replay]]:
    """Plans of a token with stamps: what the device recorded, and the command."""
    twin = engine.bound.stamped(kept(engine))
    plans = [(twin.replayed(n), x) for n, x in enumerate(twin.program.commands)]
    return [(plan, x) for plan, x in plans if plan is not None and isinstance(x, Replay)]


@pytest.mark.parametrize("more", WAYS, ids=lambda v: "-".join(v.values()) or "split")
def test_stamps_stand_between_copies_and_kernels(loaded, more):
    with loaded.variant(wb.Toggles(**BASE | {"plans": "ours"} | more)) as engine:
        with engine.stamped() as stamps:
            for token in TOKENS:
                engine.step([token])
            engine.synchronize()
            spans, firsts, lasts = [], [], []
            for plan, command in stamped_plans(engine):
                launches = [i for i, part in enumerate(command.parts) if isinstance(part, Launch)]
                found = list(zip(plan.nodes, plan.spans(), strict=True))
                firsts += [span for part, span in found if part == launches[0]]
                lasts += [span for part, span in found if part == launches[-1]]
                spans += [(part in launches, *span) for part, span in found]
        begin, end = stamps[-1]
        of_begin, of_end = firsts[0], lasts[-1]
        assert of_begin[0] <= begin <= of_begin[1] and of_end[0] <= end <= of_end[1]
        kernels = sorted(span[1:] for span in spans if span[0])[1:-1]
        copies = [span[1:] for span in spans if not span[0]]
        assert all(begin <= a <= b <= end for a, b in kernels)
        assert all(b <= begin or end <= a for a, b in copies) and bool(copies) == bool(more)


def test_a_step_that_is_not_stamped_has_no_stamps(loaded):
    with loaded.variant(wb.Toggles(**AHEAD)) as engine:
        decode(engine)
        (plain,) = [issued for issued in kept(engine).issued.values() if issued.parts]
        decode_stamped(engine)
        decode(engine)
        prepared, twin = kept(engine), engine.bound.stamped(kept(engine))
        assert engine.bound.stamped(prepared) is twin is not prepared
        (stamped,) = [issued for issued in twin.issued.values() if issued.parts]
        assert len(stamped.parts) == len(plain.parts) and plain in prepared.issued.values()
        (number,) = [n for n, issued in twin.issued.items() if issued.parts]
        there, without = twin.replayed(number), prepared.replayed(number)
        assert there is not None and without is not None
        assert len(there.nodes) - len(without.nodes) == 2
        assert twin.ahead is not prepared.ahead and len(twin.head) == len(prepared.head)


def small_rings(engine: wb.Engine, n_pairs: int) -> None:
    engine.issuer.rings.n_pairs = n_pairs


@pytest.mark.parametrize("values", [AHEAD, AHEAD | {"plan_scope": "split", "launch_ahead": "off"}])
def test_a_ring_goes_round_and_nothing_is_lost(loaded, values):
    with loaded.variant(wb.Toggles(**values)) as engine:
        small_rings(engine, 4)
        for _ in range(2):
            decode_stamped(engine)


def test_launches_ahead_are_those_of_their_steps_however_late_the_host_is(loaded):
    """Forced misses, before the host's look and behind it, and gates that are cancelled."""
    with loaded.variant(wb.Toggles(**AHEAD)) as engine:
        small_rings(engine, 8)
        wanted = decode(engine)
        decode_stamped(engine)
        before = engine.counters["plans_ahead_missed"]
        with late_looks(engine, 5):
            assert np.array_equal(decode_stamped(engine), wanted)
        assert engine.counters["plans_ahead_missed"] > before


DOES = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 500)),
    st.tuples(st.just("hold"), st.integers(1, 5)),
    st.tuples(st.just("late"), st.just(0)),
    st.tuples(st.just("silent"), st.integers(1, 500)),
    st.tuples(st.just("prompt"), st.integers(2, 16)),
    st.tuples(st.just("other"), st.just(0)),
    st.tuples(st.just("synchronize"), st.just(0)),
    st.tuples(st.just("leave"), st.just(0)),
)
ENGINES: dict[str, dict[str, str]] = {
    "ahead": AHEAD,
    "ahead, direct": AHEAD | {"results": "direct"},
    "ahead, today": AHEAD | {"plans": "today"},
    "patched": AHEAD | {"launch_ahead": "off", "graph_reuse": "patch_pointers"},
    "rebuilt": AHEAD | {"launch_ahead": "off", "graph_reuse": "rebuild"},
}


@pytest.fixture(scope="module", params=ENGINES)
def engine_of_steps(request, loaded) -> Iterator[wb.Engine]:
    with loaded.variant(wb.Toggles(**ENGINES[request.param])) as engine:
        small_rings(engine, 8)
        yield engine


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(does=st.lists(DOES, max_size=12))
def test_whatever_comes_in_between_a_pair_is_its_own_step_s(engine_of_steps, loaded, does):
    engine = engine_of_steps
    engine.reset()
    loaded.reset()
    steps, held, left = Stamped(engine), [], False
    around = steps.around
    with engine.stamped() as stamps:
        for what, n in does:
            if engine.n_past > 70:
                break
            match what:
                case "step":
                    steps.step(n)
                case "hold":  # logits: blocks run out
                    for i in range(n):
                        begin = now_ns()
                        held.append(engine.step([i]))
                        around.append((begin, now_ns()))
                case "late":
                    time.sleep(LATE)
                case "silent":
                    steps.step(n, "none")
                case "prompt":
                    begin = now_ns()
                    engine.prefill(list(range(1, n + 1)))
                    around.append((begin, now_ns()))
                case "other":
                    loaded.step([5])
                case "synchronize":
                    engine.synchronize()
                case "leave":
                    left = True
                    break
        if left and engine.n_past:
            begin = now_ns()
            engine.submit([(0, [3], "last")])  # nobody waits for it
            around.append((begin, 1 << 62))
    steps.check(stamps)


@contextmanager
def interrupted_launches(engine: wb.Engine) -> Iterator[None]:
    """Ctrl-C comes after a plan was queued, before the host has counted it."""
    own = [(found, found.launch) for plan in engine.issuer.plans if (found := plan.captured)]

    def and_then_interrupted(launch: Any) -> None:
        launch()
        raise KeyboardInterrupt

    for captured, launch in own:
        captured.launch = partial(and_then_interrupted, launch)
    yield
    for captured, launch in own:
        captured.launch = launch


def test_a_step_that_fails_has_no_stamps_and_the_next_has_its_own(loaded):
    with loaded.variant(wb.Toggles(**AHEAD)) as engine:
        decode_stamped(engine)
        steps = Stamped(engine)
        with engine.stamped() as stamps:
            steps.step(3)

            engine.synchronize()  # nothing stands at the gate
            with interrupted_launches(engine), pytest.raises(KeyboardInterrupt):
                engine.step([4])
            for token in TOKENS[:6]:
                steps.step(token)
        steps.check(stamps)


def ring_goes_round(backend: Any) -> None:
    """Pairs in a ring of four; a pair that is cut off after its begin is written over."""
    ring = StampRing(backend, COMPUTE_STREAM, 4)
    try:
        begin, end = ring.stamp(is_end=False), ring.stamp(is_end=True)

        def pair() -> None:
            begin()
            end()

        def cut_off() -> None:
            begin()
            raise DeviceError("a part that could not be issued")

        for _ in range(11):
            ring.ends(pair)
        with pytest.raises(DeviceError):
            ring.ends(cut_off)
        ring.begins(begin)  # in two calls, as outside of a plan
        ring.ends(end)
        ring.ends(pair)
        backend.synchronize()
        found = np.array([ring.pair(number) for number in range(13)])
        assert ring.launched == 13 and (found > 0).all()
        assert (np.diff(found.ravel()) >= 0).all()
    finally:
        ring.free()


def test_a_pair_that_is_cut_off_is_written_over(two):
    ring_goes_round(two)


@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("scope", ["split", "step"])
def test_steps_of_several_devices_are_stamped_from_the_first_to_the_last(tiny_model, placed, scope):
    more = {"plan_scope": scope, "sync": "packed_implicit", "plans": "ours"}
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=64, threads=1,
        toggles=wb.Toggles(graph_reuse="set_rows"), **PLACED[placed],
    ) as plain, plain.variant(wb.Toggles(graph_reuse="set_rows", **more)) as engine:  # fmt: skip
        wanted = decode(plain, TOKENS[:8])
        for _ in range(2):
            assert np.array_equal(decode_stamped(engine, TOKENS[:8]), wanted)


def test_a_traced_step_has_no_stamps_though_others_have(loaded):
    with loaded.variant(wb.Toggles(**BASE, plans="ours", plan_scope="step")) as engine:
        decode_stamped(engine)
        with engine.stamped() as stamps, profile(engine, window=(2, 3)) as traced:
            for token in TOKENS[:6]:
                engine.step([token])
        assert len(stamps) == 6 - 3
        spans = [s for s in traced.recorder.spans if s.category == "device"]
        steps = {s.args["step"] for s in spans}
        plan = [s for s in spans if s.args["step"] == min(steps)]
        assert len(plan) == sum(1 for c in engine.program().singly() if c.kind in ("launch", "copy")
                                and c.stream.backend)  # fmt: skip


ARMS = {"off": BASE, "a split": BASE | {"plans": "ours"}, "a step": AHEAD | {"launch_ahead": "off"},
        "ahead": AHEAD, "ahead, direct": AHEAD | {"results": "direct"}}  # fmt: skip


def test_the_parts_of_a_token_are_told_for_every_arm(loaded):
    arms = {name: wb.Toggles(**values) for name, values in ARMS.items()}
    found = token_parts(loaded, arms, 2, n_tokens=6)
    for name, of in found.items():
        assert all(len(of[part]) == 2 for part in PARTS)
        assert all(us > 0 for part in PARTS for us in of[part]), name
        replayed = of["counters"].get("plans_replayed")
        assert replayed == (None if name == "off" else 2 + 3 + 6), "of the turn without stamps"


def test_the_gaps_of_launches_ahead_are_measured(loaded):
    arms = {name: wb.Toggles(**ARMS[name]) for name in ("a step", "ahead")}
    found = host_gaps(loaded, arms, n_tokens=5, rounds=2)
    assert (found.samples["ns"] > 0).all() and len(found.samples) == 3 * 2 * 4


def test_the_clock_of_stamps_is_the_host_s(loaded):
    clock = loaded.backend.clock()
    assert clock is not None and clock.ahead_ns == clock.error_ns == 0 < clock.tick_ns
