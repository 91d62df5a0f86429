"""Stamps of plans on the embedded device: when the first kernel of a step began and its last ended,
whatever the plan has around them, and however it was launched."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.gates import hold
from tests.late_host import late_looks, never_passed  # noqa: F401 - of every test
from workbench.backend.clock.stamps import StampRing
from workbench.backend.issue.issued import in_order
from workbench.benchmarks.times.token_parts import PARTS, token_parts
from workbench.common.errors import DeviceError
from workbench.engine.programs import Key
from workbench.program.commands import COMPUTE_STREAM, Launch, Replay
from workbench.trace.profile import profile
from workbench.trace.spans import now_ns

BASE: dict[str, Any] = {"graph_reuse": "set_rows", "sync": "packed_implicit"}
STEP = BASE | {"plans": "ours", "plan_scope": "step"}
AHEAD = STEP | {"launch_ahead": "on"}
TOKENS = [(7 * i + 3) % 500 for i in range(20)]
WAYS: dict[str, dict[str, Any]] = {
    "split": BASE | {"plans": "ours"},
    "step": STEP,
    "direct": STEP | {"results": "direct"},
    "forked": STEP | {"sync": "event_guarded", "copy_stream": "own"},
    "behind": STEP | {"results": "behind", "host_source": "pinned_ring_2", "plan_scope": "split"},
    "ahead": AHEAD,
    "patched": STEP | {"graph_reuse": "patch_pointers"},
}


@pytest.fixture(scope="module")
def loaded(tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=96, n_ubatch=16, threads=1,
        toggles=wb.Toggles(),
    ) as made:  # fmt: skip
        yield made


def plans_of(counters: dict[str, int]) -> dict[str, int]:
    """What was done to plans. A step whose gate was opened too late is replayed twice; on a busy
    machine that happens."""
    names = ("captured", "twinned", "reinstantiated", "updated", "replayed")
    found = {name: counters[f"plans_{name}"] for name in names}
    found["replayed"] -= counters.get("plans_ahead_missed", 0)
    return found


def decode(engine: wb.Engine) -> np.ndarray:
    engine.reset()
    return np.concatenate([engine.step([token]).copy() for token in TOKENS])


def decode_stamped(engine: wb.Engine) -> np.ndarray:
    """Each pair lies in its own step, one after the other."""
    engine.reset()
    around, rows = [], []
    with engine.stamped() as stamps:
        for token in TOKENS:
            begin = now_ns()
            rows.append(engine.step([token]).copy())
            around.append((begin, now_ns()))
    for (begin, end), (called, returned) in zip(stamps, around, strict=True):
        assert called < begin < end < returned
    assert (np.diff(np.array(stamps).ravel()) > 0).all()
    return np.concatenate(rows)


@pytest.mark.parametrize("way", WAYS)
def test_stamps_lie_in_their_steps_and_change_nothing(loaded, way):
    """Plain and stamped plans are kept side by side, and a stamped one is updated where a plain one
    is. A ring goes round."""
    wanted = decode(loaded)
    with loaded.variant(wb.Toggles(**WAYS[way])) as engine:
        engine.issuer.rings.n_pairs = 8
        for _ in range(2):
            before = engine.counters
            assert np.array_equal(decode(engine), wanted)
            plain = engine.counters
            assert np.array_equal(decode_stamped(engine), wanted)
        moments = [plans_of(counts) for counts in (before, plain, engine.counters)]
        for name in moments[0]:
            start, middle, end = (counts[name] for counts in moments)
            assert end - middle == middle - start, name
        if way == "ahead":
            with late_looks(engine, 5):  # misses before the host's look and after it
                assert np.array_equal(decode_stamped(engine), wanted)
            assert engine.counters["plans_ahead_missed"] > plain["plans_ahead_missed"]


@pytest.mark.parametrize("way", ["split", "step", "direct", "forked", "ahead"])
def test_stamps_stand_between_copies_and_kernels(loaded, way):
    with loaded.variant(wb.Toggles(**WAYS[way])) as engine:
        spans: list[tuple[bool, int, int]] = []  # of one step: whether of a launch, begin and end
        with engine.stamped() as stamps:
            for token in TOKENS[:8]:
                engine.step([token])
            engine.synchronize()
            kept = engine.steps.programs.peek(Key(engine.program().shape, 0))
            assert kept is not None
            twin = engine.bound.stamped(kept)
            for number, plan in enumerate(twin.program.commands):
                if isinstance(plan, Replay):
                    captured = twin.replayed(number)
                    assert captured is not None
                    parts = zip(captured.nodes, captured.spans(), strict=True)
                    spans += [(isinstance(plan.parts[i], Launch), *span) for i, span in parts]
        begin, end = stamps[-1]
        kernels = sorted(span[1:] for span in spans if span[0])
        copies = [span[1:] for span in spans if not span[0]]
        # a stamp is a node of the launch that it stands at
        assert kernels[0][0] <= begin <= kernels[0][1] and kernels[-1][0] <= end <= kernels[-1][1]
        assert all(begin <= a <= b <= end for a, b in kernels[1:-1])
        assert all(b <= begin or end <= a for a, b in copies) and bool(copies) == (way != "split")


def test_a_failed_or_traced_step_has_no_stamps(loaded):
    """The others have their own; and one that nobody waited for. Ctrl-C comes after a plan was
    queued, before the host has counted it."""
    with loaded.variant(wb.Toggles(**AHEAD)) as engine:
        decode_stamped(engine)
        own = [found for plan in engine.issuer.plans if (found := plan.captured)]
        with engine.stamped() as stamps:
            engine.synchronize()  # nothing stands at the gate
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                for plan in own:
                    patch.setattr(plan, "launch", partial(and_interrupt, plan.launch))
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


def and_interrupt(call: Any) -> None:
    call()
    raise KeyboardInterrupt


# rings --------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(does=st.text("ppx!.", max_size=40))
@example(does="pp.pppp!pppp.ppp!x!p")
def test_every_pair_is_found_by_its_number(two, does):
    """Pairs in a ring of four: p, in one call; x: in two, as outside of a plan. !: one that is cut
    off after its begin, and written over. .: the host waits."""
    ring, around = StampRing(two, COMPUTE_STREAM, 4), list[int]()
    begin, end = ring.stamp(is_end=False), ring.stamp(is_end=True)

    def cut_off() -> None:
        begin()
        raise DeviceError("a part that could not be issued")

    for what in does:
        if what == "!":
            with pytest.raises(DeviceError):
                ring.ends(cut_off)
        elif what == ".":
            two.synchronize()
        else:
            around.append(now_ns())
            if what == "x":
                ring.begins(begin)
            ring.ends(end if what == "x" else in_order([begin, end]))
        assert what == "!" or ring.launched == len(around)
    two.synchronize()
    found = np.array([ring.pair(number) for number in range(len(around))]).reshape(-1, 2)
    assert (np.diff(found.ravel()) >= 0).all() and (found[:, 0] > np.array(around)).all()
    clock = two.clock()
    assert clock.ahead_ns == clock.error_ns == 0 < clock.tick_ns, "the host's"
    ring.free()


def test_pairs_are_set_aside_once_they_are_written(two, monkeypatch):
    """The device is held until the host waits for it."""
    ring, begun = StampRing(two, COMPUTE_STREAM, 4), now_ns()
    pair = in_order([ring.stamp(is_end=False), ring.stamp(is_end=True)])
    with hold(two) as gate:
        wait = two.synchronize
        monkeypatch.setattr(two, "synchronize", lambda: (gate.open(), wait()))
        for _ in range(5):
            ring.ends(pair)
    wait()
    found = np.array([ring.pair(number) for number in range(5)]).ravel()
    assert (np.diff([begun, *found]) >= 0).all()
    ring.free()


def test_parts_of_tokens_are_told_for_every_arm(loaded):
    arms = {"off": wb.Toggles(**BASE)} | {w: wb.Toggles(**WAYS[w]) for w in ("step", "ahead")}
    for name, of in token_parts(loaded, arms, 2, n_tokens=6).items():
        assert all(len(of[part]) == 2 and min(of[part]) > 0 for part in PARTS), name
        replayed = of["counters"].get("plans_replayed")
        assert replayed == (None if name == "off" else 2 + 3 + 6), "of the turn without stamps"
