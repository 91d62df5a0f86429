"""A next step that is made ready while the device computes: the same logits to the bit and the same
counts as a step that is made when it is submitted, whatever is done in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import workbench as wb
from tests import profiles
from tests.late_host import never_passed  # noqa: F401 - of every test
from workbench.backend.issue.prepared import Prepared
from workbench.backend.plan.life import Gated
from workbench.common.errors import UsageError
from workbench.engine.step import Steps
from workbench.program.commands import Sync
from workbench.trace.spans import Recorder

STEP: dict[str, Any] = {"sync": "packed_implicit", "plans": "ours", "plan_scope": "step"}
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "step": STEP,
    "ahead": STEP | {"launch_ahead": "on", "results": "direct"},
    "ring": STEP | {"launch_ahead": "on", "host_source": "pinned_ring_2", "step_wait": "outputs"},
    "word": STEP | {"launch_ahead": "on", "results": "direct", "plan_end": "word"},
    "patched": {"graph_reuse": "patch_pointers"},
    "rebuilt": {"graph_reuse": "rebuild"},
    "redone": {"redo_bind": "on"},
}
READY = ("eager", "step", "ahead", "ring", "word")  # ways whose next steps can be made ready
COUNTED = (
    "steps", "programs_built", "programs_reused", "programs_refused", "batch_n", "reuse_n",
    "issue_n", "wait_n", "untraced_steps",
)  # fmt: skip


@pytest.fixture(scope="module")
def loaded(tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=96, n_ubatch=16, n_seqs=2,
        n_kv_pad=32, threads=1, toggles=wb.Toggles(),
    ) as made:  # fmt: skip
        yield made


@pytest.fixture(scope="module", params=WAYS)
def engine(request, loaded) -> Iterator[wb.Engine]:
    toggles = {"graph_reuse": "set_rows"} | WAYS[request.param]
    with loaded.variant(wb.Toggles(**toggles)) as made:
        made.is_ready = request.param in READY  # type: ignore[attr-defined]
        yield made


def nothing_made_ready() -> Any:
    """The slow twin: each step is made when it is submitted."""
    return patch.object(Steps, "_following", lambda steps, now: None)


def counted(engine: wb.Engine) -> dict[str, int]:
    counters = engine.counters
    return {name: counters[name] for name in COUNTED}


DOES = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("other"), st.integers(1, 3)),
    st.tuples(st.just("both"), st.integers(1, 3)),
    st.tuples(st.just("unwaited"), st.integers(2, 4)),
    st.tuples(st.just("silent"), st.integers(1, 2)),
    st.tuples(st.just("prompt"), st.integers(1, 20)),
    st.tuples(st.just("traced"), st.integers(1, 3)),
    st.tuples(st.just("stamped"), st.integers(1, 3)),
    st.tuples(st.just("wrong"), st.just(0)),
    st.tuples(st.just("remove"), st.integers(0, 6)),
    st.tuples(st.just("shift"), st.integers(1, 4)),
    st.tuples(st.just("synchronize"), st.just(0)),
    st.tuples(st.just("reset"), st.just(0)),
)


def do(engine: wb.Engine, what: str, n: int) -> list[Any]:
    """Logits and refusals."""
    found: list[Any] = []
    try:
        match what:
            case "step":
                found += [engine.step([7 * i + n]).copy() for i in range(n)]
            case "other":
                found += [engine.step([7 * i + n], sequence=1).copy() for i in range(n)]
            case "both":
                for i in range(n):
                    work: Any = [(1, [i + 1], "last"), (0, [i + 2], "last")]
                    found.append(engine.submit(work).wait().copy())
            case "unwaited":
                steps = [engine.submit([(0, [i + 3], "last")]) for i in range(n)]
                found += [step.wait().copy() for step in steps]
            case "silent":
                found += [engine.step([i + 4], "none").copy() for i in range(n)]
            case "prompt":
                found.append(engine.prefill(list(range(1, n + 1))).copy())
            case "traced":
                engine.recorder = Recorder()
                found += [engine.step([i + 5]).copy() for i in range(n)]
                engine.recorder = None
            case "stamped":
                with engine.stamped() as stamps:
                    found += [engine.step([i + 6]).copy() for i in range(n)]
                found.append(len(stamps))
            case "wrong":
                engine.step([engine.model.n_vocab])
            case "remove":
                engine.cache.remove(0, n, None)
            case "shift":
                engine.cache.shift(0, n)
            case "synchronize":
                engine.synchronize()
            case "reset":
                engine.reset()
    except UsageError as error:
        engine.recorder = None
        found.append(str(error))
    return found


@settings(
    max_examples=profiles.examples(40), deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(does=st.lists(DOES, min_size=1, max_size=10))
def test_logits_and_counts_are_those_of_the_slow_twin(engine, does):
    found, counts = [], []
    for twin in (nullcontext, nothing_made_ready, nullcontext):  # the first finds its memory grow
        with twin():
            engine.synchronize()
            engine.reset()
            engine.steps.programs.clear()
            before = counted(engine)
            found.append([part for what, n in does for part in do(engine, what, n)])
            counts.append({name: n - before[name] for name, n in counted(engine).items()})
    assert counts[1] == counts[2]
    for wanted, got in zip(*found[1:], strict=True):
        assert np.array_equal(wanted, got)


def test_decoded_tokens_are_ready_where_their_programs_are_kept_as_they_are(engine):
    engine.reset()
    ready = []
    for i in range(4):  # plans of every block
        engine.step([i + 1])
    for i in range(12):
        engine.step([i + 1])
        ready.append(engine.steps._coming is not None)
    assert ready == [engine.is_ready] * 12


def test_inputs_are_written_before_the_step_where_a_gate_says_that_they_may(engine, monkeypatch):
    engine.reset()
    for i in range(6):  # plans of every block
        engine.step([i + 1])
    written, late = [], []
    write, run_late, made_next = Prepared.write_ahead, Prepared.run_late, Steps._following

    def behind_the_read(steps: Steps, now: Any) -> Any:
        """However late a busy machine makes the device."""
        until = time.monotonic() + 0.5
        while now.program.ahead is not None and not now.program.ahead.has_read:
            assert time.monotonic() < until
        return made_next(steps, now)

    monkeypatch.setattr(Steps, "_following", behind_the_read)
    monkeypatch.setattr(
        Prepared, "write_ahead", lambda self, *of: written.append(self) or write(self, *of)
    )
    monkeypatch.setattr(
        Prepared, "run_late", lambda self, *of: late.append(self) or run_late(self, *of)
    )
    for i in range(12):
        engine.step([i + 1])
    if engine.toggles.launch_ahead == "on":
        assert len(written) == 12 and len(late) in (11, 12)
        assert all(len(program.late) < len(program.head) for program in written)
        for program in written:  # staging memory is free, and the host has seen it
            waits = [call for call, command in zip(
                program.head, program.program.commands, strict=False
            ) if isinstance(command, Sync)]  # fmt: skip
            assert len(waits) == (engine.toggles.step_wait == "outputs")
            assert not set(waits) & {*program.late}
    else:
        assert not written and not late


def test_inputs_are_not_written_before_the_device_has_read_others(engine, monkeypatch):
    engine.reset()
    monkeypatch.setattr(Gated, "has_read", False)
    for i in range(12):
        engine.step([i + 1])
        assert engine.steps._coming is None or not engine.steps._coming.is_written


def test_a_token_that_is_refused_changes_nothing(engine):
    engine.reset()
    wanted = [engine.step([i + 1]).copy() for i in range(8)]
    engine.reset()
    for i, row in enumerate(wanted):
        with pytest.raises(UsageError, match="outside the vocabulary"):
            engine.step([engine.model.n_vocab])
        assert np.array_equal(engine.step([i + 1]), row)


def test_a_step_that_was_made_ready_and_fails_leaves_the_engine_as_it_was(engine, monkeypatch):
    engine.reset()
    wanted = [engine.step([i + 1]).copy() for i in range(8)]
    engine.reset()
    for i, row in enumerate(wanted):
        with monkeypatch.context() as patched:
            patched.setattr(Prepared, "finish", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step([i + 1])
        engine.synchronize()
        assert np.array_equal(engine.step([i + 1]), row)


def interrupted(prepared: Prepared, calls: Any) -> Any:
    raise KeyboardInterrupt
