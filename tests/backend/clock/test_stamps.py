"""Stamps of plans on the embedded device: when the first kernel of a step began and its last ended,
whatever the plan has around them, and however it was launched."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.late_host import LATE, late_looks, never_passed  # noqa: F401 - of every test
from tests.orderings import PLACED
from workbench.backend.base import Captured
from workbench.backend.clock.stamps import StampRing
from workbench.benchmarks.times.gaps import host_gaps
from workbench.benchmarks.times.token_parts import PARTS, token_parts
from workbench.common.errors import DeviceError
from workbench.engine.programs import Key
from workbench.program.commands import COMPUTE_STREAM, Launch, Replay
from workbench.trace.profile import profile
from workbench.trace.spans import now_ns

BASE: dict[str, Any] = {"graph_reuse": "set_rows", "sync": "packed_implicit"}
STEP = BASE | {"plans": "ours", "plan_scope": "step"}
AHEAD = STEP | {"launch_ahead": "on"}
TOKENS = [(7 * i + 3) % 500 for i in range(24)]
WAYS: dict[str, dict[str, Any]] = {
    "split": BASE | {"plans": "ours"},
    "step": STEP,
    "direct": STEP | {"results": "direct"},
    "forked": STEP | {"sync": "event_guarded", "copy_stream": "own"},
    "behind": STEP | {"results": "behind", "host_source": "pinned_ring_2", "plan_scope": "split"},
    "pr": STEP | {"plans": "pr"},
    "ahead": AHEAD,
    "today": AHEAD | {"plans": "today"},
    "word": AHEAD | {"results": "direct", "plan_end": "word"},
    "patched": STEP | {"graph_reuse": "patch_pointers"},
    "rebuilt": STEP | {"graph_reuse": "rebuild"},
    "table": STEP | {"graph_reuse": "pointer_table"},
}


@pytest.fixture(scope="module")
def loaded(tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=96, n_ubatch=16, threads=1,
        toggles=wb.Toggles(),
    ) as made:  # fmt: skip
        yield made


def decode(engine: wb.Engine, tokens: list[int] = TOKENS) -> np.ndarray:
    engine.reset()
    return np.concatenate([engine.step([token]).copy() for token in tokens])


def decode_stamped(
    engine: wb.Engine, tokens: list[int] = TOKENS, late: Sequence[int] = (), off_ns: int = 0
) -> np.ndarray:
    """Each pair lies in its own step, one behind the other. late: the steps that the host is late
    for. off_ns: between the two clocks."""
    engine.reset()
    around, rows = [], []
    with engine.stamped() as stamps:
        for i, token in enumerate(tokens):
            if i in late:
                time.sleep(LATE)
            begin = now_ns()
            rows.append(engine.step([token]).copy())
            around.append((begin, now_ns()))
    for (begin, end), (called, returned) in zip(stamps, around, strict=True):
        assert called - off_ns < begin < end < returned + off_ns
    assert (np.diff(np.array(stamps).ravel()) > 0).all()
    return np.concatenate(rows)


def small_rings(engine: wb.Engine, n_pairs: int) -> None:
    engine.issuer.rings.n_pairs = n_pairs


@pytest.mark.parametrize("way", WAYS)
def test_stamps_lie_in_their_steps_and_change_nothing(loaded, way):
    """Plain and stamped plans are kept side by side, and a stamped one is updated where a plain one
    is. A ring goes round."""
    wanted = decode(loaded)
    with loaded.variant(wb.Toggles(**WAYS[way])) as engine:
        small_rings(engine, 8)
        for _ in range(2):
            before = engine.counters
            assert np.array_equal(decode(engine), wanted)
            plain = engine.counters
            assert np.array_equal(decode_stamped(engine), wanted)
        for name in ("captured", "twinned", "reinstantiated", "updated", "replayed"):
            name = f"plans_{name}"
            assert engine.counters[name] - plain[name] == plain[name] - before[name], name
        if "launch_ahead" in WAYS[way]:
            names = ("plans_ahead", "plans_ahead_missed")
            assert sum(engine.counters[n] - plain[n] for n in names) > len(TOKENS) // 2
            with late_looks(engine, 5):  # misses before the host's look and behind it
                assert np.array_equal(decode_stamped(engine), wanted)
            assert engine.counters["plans_ahead_missed"] > plain["plans_ahead_missed"]


def stamped_plans(engine: wb.Engine) -> list[tuple[Captured, Replay]]:
    """Plans of a token with stamps: what the device recorded, and the command."""
    kept = engine.steps.programs.peek(Key(engine.program().shape, 0))
    assert kept is not None
    twin = engine.bound.stamped(kept)
    plans = [(twin.replayed(n), x) for n, x in enumerate(twin.program.commands)]
    return [(plan, x) for plan, x in plans if plan is not None and isinstance(x, Replay)]


@pytest.mark.parametrize("way", ["split", "step", "direct", "forked", "ahead"])
def test_stamps_stand_between_copies_and_kernels(loaded, way):
    with loaded.variant(wb.Toggles(**WAYS[way])) as engine:
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
        assert all(b <= begin or end <= a for a, b in copies) and bool(copies) == (way != "split")


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


def test_a_failed_or_traced_step_has_no_stamps(loaded):
    """The others have their own; and one that nobody waited for."""
    with loaded.variant(wb.Toggles(**AHEAD)) as engine:
        decode_stamped(engine)
        with engine.stamped() as stamps:
            engine.synchronize()  # nothing stands at the gate
            with interrupted_launches(engine), pytest.raises(KeyboardInterrupt):
                engine.step([4])
            begun = now_ns()
            engine.step([5])
            engine.submit([(0, [3], "last")])
        assert len(stamps) == 2 and stamps[0][0] > begun
        with engine.stamped() as stamps, profile(engine, window=(2, 3)) as traced:
            for token in TOKENS[:6]:
                engine.step([token])
        assert len(stamps) == 6 - 3
        spans = [s for s in traced.recorder.spans if s.category == "device"]
        first = min(s.args["step"] for s in spans)
        commands = [c for c in engine.program().singly() if c.kind in ("launch", "copy")]
        own = [c for c in commands if c.stream.backend]
        assert sum(s.args["step"] == first for s in spans) == len(own)


# rings --------------------------------------------------------------------------------------------


def ring_goes_round(backend: Any, does: str = "pp.pppp!pppp.ppp!x!p") -> None:
    """Pairs in a ring of four, each by its number: p, in one call; x: in two, as outside of a plan.
    !: one that is cut off after its begin, and written over. .: the host waits."""
    ring, around = StampRing(backend, COMPUTE_STREAM, 4), list[int]()
    try:
        begin, end = ring.stamp(is_end=False), ring.stamp(is_end=True)

        def pair() -> None:
            begin()
            end()

        def cut_off() -> None:
            begin()
            raise DeviceError("a part that could not be issued")

        for what in does:
            match what:
                case "p":
                    around.append(now_ns())
                    ring.ends(pair)
                    assert ring.launched == len(around)
                case "x":
                    around.append(now_ns())
                    ring.begins(begin)
                    ring.ends(end)
                case "!":
                    with pytest.raises(DeviceError):
                        ring.ends(cut_off)
                case ".":
                    backend.synchronize()
        backend.synchronize()
        found = np.array([ring.pair(number) for number in range(len(around))]).reshape(-1, 2)
        assert ring.launched == len(around) and (np.diff(found.ravel()) >= 0).all()
        if backend.clock().error_ns == 0:
            assert (found[:, 0] > np.array(around)).all()
    finally:
        ring.free()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(does=st.text("ppx!.", max_size=40))
def test_every_pair_is_found_by_its_number(two, does):
    ring_goes_round(two, does)


def test_a_pair_that_is_cut_off_is_written_over(two):
    ring_goes_round(two)
    clock = two.clock()
    assert clock.ahead_ns == clock.error_ns == 0 < clock.tick_ns, "the host's"


# devices and benchmarks ---------------------------------------------------------------------------


@pytest.mark.parametrize("placed", PLACED)
def test_steps_of_several_devices_are_stamped_as_one(tiny_model, placed):
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=64, threads=1,
        toggles=wb.Toggles(graph_reuse="set_rows"), **PLACED[placed],
    ) as plain:  # fmt: skip
        wanted = decode(plain, TOKENS[:6])
        for way in ("split", "step"):
            with plain.variant(wb.Toggles(**WAYS[way])) as engine:
                for _ in range(2):
                    assert np.array_equal(decode_stamped(engine, TOKENS[:6]), wanted)


def test_parts_and_gaps_of_tokens_are_told_for_every_arm(loaded):
    arms = {"off": wb.Toggles(**BASE)} | {w: wb.Toggles(**WAYS[w]) for w in ("step", "ahead")}
    for name, of in token_parts(loaded, arms, 2, n_tokens=6).items():
        assert all(len(of[part]) == 2 and min(of[part]) > 0 for part in PARTS), name
        replayed = of["counters"].get("plans_replayed")
        assert replayed == (None if name == "off" else 2 + 3 + 6), "of the turn without stamps"
    del arms["off"]
    found = host_gaps(loaded, arms, n_tokens=5, rounds=2)
    assert (found.samples["ns"] > 0).all() and len(found.samples) == 3 * 2 * 4
