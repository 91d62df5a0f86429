"""Plans on the embedded device: engines that capture and replay give the baseline's logits."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.gates import hold
from tests.profiles import share
from workbench.backend.cpu.device.loops import FILLED
from workbench.backend.cpu.device.recorded import EmbeddedPlan
from workbench.common.errors import DeviceError
from workbench.config import GraphReuse, NCopies, Toggles
from workbench.engine.engine import Engine
from workbench.program.commands import COMPUTE_STREAM, COPY_STREAM, Program, Replay, Wait

RNG = np.random.default_rng(16)
PROMPT = RNG.integers(1, 500, 40).tolist()  # three ubatches
DECODED = RNG.integers(1, 500, 44).tolist()
N = 3 + len(DECODED)
SCOPES = {
    "split": {"plan_scope": "split"},
    "split, copies on their own stream": {
        "plan_scope": "split", "sync": "event_guarded", "copy_stream": "own",
    },
    "step": {"plan_scope": "step", "sync": "implicit", "copy_stream": "compute"},
    "step, two streams": {"plan_scope": "step", "sync": "event_guarded", "copy_stream": "own"},
}  # fmt: skip


two_workers = pytest.mark.parametrize("base", [2], indirect=True)


@pytest.fixture(scope="module", params=[1, 2], ids=["1 worker", "2 workers"])
def base(request, tiny_model):
    with Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", threads=request.param, n_ctx=128,
        n_ubatch=16, toggles=Toggles(),
    ) as engine:  # fmt: skip
        yield engine


def logits(engine: Engine) -> np.ndarray:
    engine.reset()
    steps = [engine.prefill(PROMPT, outputs="all"), *[engine.step([t]) for t in DECODED]]
    return np.concatenate(steps)


@pytest.fixture(scope="module")
def wanted(base):
    return {fuse: logits(base.variant(Toggles(fuse=fuse))) for fuse in ("off", "on")}


KINDS = [("ours", "off"), ("ours", "on"), ("pr", "on"), ("today", "off")]


@pytest.mark.parametrize(
    ("plans", "fuse", "scope", "reuse"),
    share(
        [(*kind, scope, how) for kind in KINDS for scope in SCOPES for how in GraphReuse], 3, slow=2
    ),
)
def test_logits_with_plans_are_the_baselines(base, wanted, plans, scope, reuse, fuse):
    kept: dict[str, Any] = {"plans": plans, "graph_reuse": reuse, "fuse": fuse, **SCOPES[scope]}
    with base.variant(Toggles(**kept)) as engine:
        assert np.array_equal(logits(engine), wanted[fuse])
        counts = engine.counters
        assert counts["plans_replayed"] + counts["plans_issued"] == N
        if plans == "today":  # no two calls are equal where stores move with every token
            moves = reuse == GraphReuse.PATCH_POINTERS
            assert (counts["plans_replayed"] >= len(DECODED) - 4) != moves
            assert (counts["plans_replayed"] == 0) == moves == (counts["plans_captured"] == 0)
        else:
            assert counts["plans_issued"] == 0 < counts["plans_captured"]


@two_workers
@pytest.mark.parametrize("n_copies", list(NCopies))
@pytest.mark.parametrize("scope", ["step", "step, two streams"])
@pytest.mark.parametrize("plans", ["ours", "today"])
def test_trains_of_ubatches_that_the_host_does_not_wait_for(base, plans, scope, n_copies):
    """Copies of the next ubatch are queued while the one before computes: by replays, and under
    `today` first by parts that are issued one by one."""
    train = {"graph_reuse": "set_rows", "step_wait": "outputs", "host_source": "pinned_ring_4"}
    toggles = Toggles(plans=plans, n_copies=n_copies, **{**SCOPES[scope], **train})
    prompt = PROMPT * 3  # seven ubatches of sixteen, and eight tokens
    with base.variant(toggles) as engine, base.variant(Toggles()) as off:
        wanted = off.prefill(prompt)
        for _ in range(4):
            engine.reset()
            assert np.array_equal(engine.prefill(prompt), wanted)
        counts = engine.counters
        assert counts["plans_replayed"] + counts["plans_issued"] == 32
        assert (counts["plans_issued"] == 0) == (plans == "ours")


EXPECTED = {  # of decode steps behind a prompt without plans of its own (`plan_batch=one`)
    ("set_rows", "split", "ours"): {"captured": 1},
    ("set_rows", "split", "pr"): {"captured": 1},
    ("set_rows", "split", "today"): {"captured": 1, "issued": 1},
    # each block where results land has a plan; the first two are held, the third is copied from
    ("set_rows", "step", "ours"): {"captured": 1, "twinned": 2},
    ("set_rows", "step", "pr"): {"captured": 3},
    ("set_rows", "step", "today"): {"captured": 1, "issued": 3},
    # where every step is bound anew, its uid is another
    ("rebuild", "split", "ours"): {"captured": 1},
    ("rebuild", "split", "pr"): {"captured": 1, "updated": 43},
    ("rebuild", "split", "today"): {"captured": 1, "issued": 1},
    # the work that had the plan is gone: only addresses differ
    ("patch_pointers", "split", "ours"): {"captured": 1, "updated": 43},
    ("patch_pointers", "split", "pr"): {"captured": 1, "updated": 43},
    ("patch_pointers", "split", "today"): {"issued": 44},
    ("pointer_table", "split", "ours"): {"captured": 1},
}


@two_workers
@pytest.mark.parametrize(("reuse", "scope", "plans"), EXPECTED)
def test_counters_say_what_was_captured_updated_and_replayed(base, reuse, scope, plans):
    kept: dict[str, Any] = {"plans": plans, "graph_reuse": reuse, "plan_batch": "one"}
    with base.variant(Toggles(**kept, **SCOPES[scope])) as engine:
        logits(engine)
        expected = EXPECTED[reuse, scope, plans]
        kinds = ("captured", "twinned", "updated", "reinstantiated", "issued", "evicted")
        counts = engine.counters
        found = {kind: n for kind in kinds if (n := counts[f"plans_{kind}"])}
        assert found == expected
        assert counts["plans_replayed"] == len(DECODED) - expected.get("issued", 0)
        captured = expected.get("captured", 0) > 0
        assert (counts["plans_capture_ns"] > 0) == (counts["plans_instantiate_ns"] > 0) == captured
        assert (counts["plans_update_ns"] > 0) == ("updated" in expected)


@two_workers
@pytest.mark.parametrize("scope", SCOPES)
def test_launches_are_gone_from_the_program_and_replays_are_there(base, scope):
    off = base.variant(Toggles(**{k: v for k, v in SCOPES[scope].items() if k != "plan_scope"}))
    on = base.variant(Toggles(plans="ours", **SCOPES[scope]))
    before, after = (engine.program(1).counts() for engine in (off, on))
    launches = [c for c in off.program(1).commands if c.kind == "launch"]
    by_host = sum(c.by_host for c in launches)
    assert before["launches"] == len(launches) > 20 + by_host and "replays" not in before
    assert after["launches"] == by_host and after["replays"] == 1
    assert after["copied_bytes"] == before["copied_bytes"]
    whole = SCOPES[scope]["plan_scope"] == "step"
    assert after["copies"] == (0 if whole else before["copies"])
    for engine in (on, off):
        engine.close()


@two_workers
def test_the_device_is_asked_once_for_a_step(base):
    """One entry of each ring it uses, for some fifty kernels and copies."""
    for scope, streams in (("step", [1, 0]), ("step, two streams", [1, 1])):
        with base.variant(Toggles(plans="ours", graph_reuse="set_rows", **SCOPES[scope])) as engine:
            engine.step(PROMPT[:4])
            for _ in range(3):
                engine.step([3])
            rings = engine.backend.streams
            before = [(ring.words[FILLED // 8], ring.issued) for ring in rings]
            engine.step([3])
            after = [(ring.words[FILLED // 8], ring.issued) for ring in rings]
            entries = [b[0] - a[0] for a, b in zip(before, after, strict=True)]
            kernels = [b[1] - a[1] for a, b in zip(before, after, strict=True)]
            assert entries == [*streams, *[0] * (len(rings) - 2)] and sum(kernels) > 40


def without_waits(lower: Callable[..., Program], *args: Any, **others: Any) -> Program:
    """A program whose plans have no Waits."""
    program = lower(*args, **others)
    for c in program.commands:
        if isinstance(c, Replay):
            c.parts = tuple(part for part in c.parts if not isinstance(part, Wait))
    return program


def test_a_captured_step_with_a_copy_on_the_wrong_stream_is_wrong(base, monkeypatch):
    """The planted bug in an engine's own plan: without the wait between its two streams, launches
    read the inputs of the step before. With the wait, behind the same gate, they cannot."""
    toggles = Toggles(plans="ours", graph_reuse="rebuild", **SCOPES["step, two streams"])
    found = {}
    for planted in (False, True):
        with base.variant(toggles) as engine:
            engine.prefill(PROMPT[:5])
            engine.step([3])
            made = engine._step_programs
            with monkeypatch.context() as patch:
                if planted:
                    patch.setattr(made, "of", partial(without_waits, made.of))
                with hold(engine.backend, COPY_STREAM) as gate:
                    pending = engine.submit([(0, [400], "last")])
                    ring = engine.backend.streams[COMPUTE_STREAM]
                    if planted:
                        ring.wait(ring.issued - 1)  # everything but the end of the plan
                    gate.open()
                    found[planted] = pending.wait()
    assert np.array_equal(found[False], right(base))
    assert not np.allclose(found[True], found[False], rtol=0, atol=1e-3)


def right(base: Engine) -> np.ndarray:
    with base.variant(Toggles()) as engine:
        engine.prefill(PROMPT[:5])
        engine.step([3])
        return engine.step([400])


@two_workers
def test_inputs_taken_at_the_call_are_in_no_plan_and_the_engine_goes_on(base):
    toggles = Toggles(plans="ours", host_source="pageable", **SCOPES["step"])
    with base.variant(toggles) as engine:
        engine.backend.pageable = "snapshot"
        try:
            with pytest.raises(DeviceError, match=r"^a snapshot copy .* host_source=pinned .*$"):
                engine.step(PROMPT[:4])
            with pytest.raises(DeviceError, match="snapshot"):
                engine.step(PROMPT[:4])
            assert engine.counters["plans_captured"] == 0
        finally:
            engine.backend.pageable = "late"
        engine.reset()
        again = replace(toggles, host_source="pinned")
        with base.variant(again) as other, base.variant(Toggles()) as off:
            wanted = off.step(PROMPT[:4])
            assert np.array_equal(other.step(PROMPT[:4]), wanted)
            assert np.array_equal(engine.step(PROMPT[:4]), wanted)  # whose copies are late again


# ends --------------------------------------------------------------------------------------------


def plans_alive() -> int:
    return sum(issubclass(type(thing), EmbeddedPlan) for thing in gc.get_objects())


@two_workers
def test_a_hundred_engines_with_plans_leave_nothing_behind(base):
    gc.collect()
    before = plans_alive()
    for n in range(100):
        kept = SCOPES["step, two streams" if n % 2 else "split"]
        engine = base.variant(Toggles(plans=("ours", "pr")[n % 4 // 2], **kept))
        engine.submit([(0, PROMPT[:4], "none")])
        engine.step([3])
        assert engine.counters["plans_replayed"] == 2
        if n % 3:
            engine.close()
    del engine
    gc.collect()
    assert plans_alive() == before
    base.backend.synchronize()
    base.backend._keep(None)
    assert not base.backend._retired


@pytest.mark.parametrize("order", ["engine", "backend", "plans"])
def test_engine_backend_and_plans_end_in_any_order(tiny_model, order):
    gc.collect()
    before, threads = plans_alive(), threading.active_count()
    for _ in range(4):
        engine = Engine.load(
            tiny_model("tiny-llama", "Q8_0"), device="embedded", threads=2, n_ctx=64,
            toggles=Toggles(plans="ours", **SCOPES["step, two streams"]),
        )  # fmt: skip
        engine.step([3])
        ends = {
            "engine": engine.close, "backend": engine.backend.close,
            "plans": engine.issuer.plans.clear,
        }  # fmt: skip
        ends.pop(order)()
        for end in ends.values():
            end()
        del engine, ends, end
    gc.collect()
    assert (plans_alive(), threading.active_count()) == (before, threads)
