"""A next step that is made ready, and launched ahead, while the device computes: the same logits to
the bit and the same counts as a step that is made when it is submitted, whatever is done in between
and however late the host is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import workbench as wb
from tests import profiles
from tests.late_host import LATE, late_looks, never_passed  # noqa: F401 - of every test
from workbench.backend.issue.prepared import Prepared
from workbench.backend.plan import gate
from workbench.backend.plan.life import Gated
from workbench.common.errors import UsageError
from workbench.engine.step import Steps
from workbench.program.commands import Sync
from workbench.trace.spans import Recorder, now_ns

STEP: dict[str, Any] = {"sync": "packed_implicit", "plans": "ours", "plan_scope": "step"}
AHEAD = STEP | {"launch_ahead": "on"}
DIRECT = AHEAD | {"results": "direct"}
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "step": STEP,
    "copy": AHEAD,
    "ring": AHEAD | {"host_source": "pinned_ring_2", "step_wait": "outputs"},
    "table": AHEAD | {"graph_reuse": "pointer_table", "kv_growth": "full"},
    "today": AHEAD | {"plans": "today", "fuse": "on"},
    "word": DIRECT | {"plan_end": "word"},
    "branches": DIRECT | {"plan_end": "word", "streams": "4", "fork": "any"},
    "patched": {"plans": "ours", "graph_reuse": "patch_pointers"},
    "rebuilt": {"plans": "ours", "graph_reuse": "rebuild"},
    "redone": {"redo_bind": "on"},
}
NOT_READY = ("patched", "rebuilt", "redone")  # ways whose next steps cannot be made ready
COUNTED = (
    "steps", "programs_built", "programs_reused", "programs_refused", "batch_n", "reuse_n",
    "issue_n", "wait_n", "untraced_steps",
)  # fmt: skip
N_SEQS = 2
TOKENS = [(7 * i + 3) % 500 for i in range(30)]


@pytest.fixture(scope="module")
def loaded(tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=96, n_ubatch=16, n_seqs=N_SEQS,
        n_kv_pad=32, threads=1, toggles=wb.Toggles(),
    ) as made:  # fmt: skip
        yield made


class Way:
    """An engine that makes steps ready as it can, and one that launches none ahead."""

    def __init__(self, name: str, engine: wb.Engine, plain: wb.Engine):
        self.engine, self.plain = engine, plain
        self.is_ready = name not in NOT_READY
        self.is_ahead = engine.toggles.launch_ahead == "on"

    @property
    def gate(self) -> Any:
        return self.engine.issuer.gate

    def ahead(self) -> tuple[int, int]:
        """Launches ahead that were in time, and the others."""
        counts = self.engine.counters
        return counts["plans_ahead"], counts["plans_ahead_missed"]


@pytest.fixture(scope="module", params=WAYS)
def way(request, loaded) -> Iterator[Way]:
    toggles = {"graph_reuse": "set_rows"} | WAYS[request.param]
    without = {"plan_end": "event", "launch_ahead": "off"}
    with (
        loaded.variant(wb.Toggles(**toggles)) as engine,
        loaded.variant(wb.Toggles(**toggles | without)) as plain,
    ):
        yield Way(request.param, engine, plain)


@pytest.fixture(scope="module")
def another(loaded) -> Iterator[wb.Engine]:
    """An engine on the same backend, whose next plan stands at a gate, too."""
    with loaded.variant(wb.Toggles(**AHEAD, graph_reuse="set_rows")) as made:
        yield made


@pytest.fixture
def ahead(way) -> Way:
    if not way.is_ahead:
        pytest.skip("launches nothing ahead")
    way.gate._misses = way.gate._to_pass = 0  # what a busy machine missed before
    return way


def nothing_made_ready() -> Any:
    """The slow twin: each step is made when it is submitted."""
    return patch.object(Steps, "_following", lambda steps, now: None)


def decode(engine: wb.Engine, late: tuple[int, ...] = ()) -> np.ndarray:
    engine.reset()
    rows = [engine.prefill(list(range(1, 21)))]
    for i, token in enumerate(TOKENS):
        if i in late:
            time.sleep(LATE)
        rows.append(engine.step([token]).copy())
    return np.concatenate(rows)


# whatever is done in between ----------------------------------------------------------------------

DOES = st.sampled_from((
    "step", "other", "both", "unwaited", "silent", "prompt", "all", "traced", "stamped", "hold",
    "late", "another", "wrong", "remove", "shift", "fork", "synchronize", "reset",
))  # fmt: skip


def do(engine: wb.Engine, what: str, n: int, another: wb.Engine, held: list[Any]) -> list[Any]:
    """Logits and refusals. another: an engine on the same backend."""
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
                found.append(engine.prefill(list(range(1, 4 * n))).copy())
            case "all":
                found.append(engine.prefill(list(range(1, 1 + n)), "all").copy())
            case "traced":
                engine.recorder = Recorder()
                found += [engine.step([i + 5]).copy() for i in range(n)]
                engine.recorder = None
            case "stamped":
                around = []
                with engine.stamped() as stamps:
                    for i in range(n):
                        begin = now_ns()
                        found.append(engine.step([i + 6]).copy())
                        around.append((begin, now_ns()))
                own = stamps[-n:]  # the first step may come behind a shift, which has a pair, too
                for (begin, end), (called, returned) in zip(own, around, strict=True):
                    assert called < begin < end < returned
            case "hold":  # results, so that blocks run out
                held += [engine.step([i]) for i in range(n)]
                found += [row.copy() for row in held]
            case "late":
                time.sleep(LATE)
            case "another":
                found.append(another.step([5]).copy())
            case "wrong":
                engine.step([engine.model.n_vocab])
            case "remove":
                engine.cache.remove(0, n, None)
            case "shift":
                engine.cache.shift(0, n)
            case "fork":
                engine.cache.copy(n % N_SEQS, (n + 1) % N_SEQS)
            case "synchronize":
                engine.synchronize()
            case "reset":
                engine.reset()
    except UsageError as error:
        engine.recorder = None
        found.append(str(error))
    return found


def counted(engine: wb.Engine) -> dict[str, int]:
    counters = engine.counters
    return {name: counters[name] for name in COUNTED}


@settings(
    max_examples=profiles.examples(40), deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(does=st.lists(st.tuples(DOES, st.integers(1, 5)), min_size=1, max_size=10))
def test_logits_and_counts_are_those_of_the_slow_twin(way, another, does):
    found, counts = [], []
    for engine, slow in ((way.engine, False), (way.engine, True), (way.engine, False),
                         (way.plain, False)):  # fmt: skip
        with ExitStack() as stack:
            if slow:
                stack.enter_context(nothing_made_ready())
            engine.synchronize()
            engine.reset()
            another.reset()
            engine.steps.programs.clear()
            before, held = counted(engine), list[Any]()
            found.append([part for what, n in does for part in do(engine, what, n, another, held)])
            counts.append({name: n - before[name] for name, n in counted(engine).items()})
    assert counts[1] == counts[2]  # the first finds its memory grow
    for wanted, *others in zip(*found, strict=True):
        assert all(np.array_equal(wanted, got) for got in others)


# made ready ---------------------------------------------------------------------------------------


def test_decoded_tokens_are_ready_where_programs_are_kept(way):
    engine = way.engine
    engine.reset()
    for i in range(4):  # plans of every block
        engine.step([i + 1])
    ready = []
    for i in range(12):
        engine.step([i + 1])
        ready.append(engine.steps._coming is not None)
    assert ready == [way.is_ready] * 12


def test_inputs_are_written_once_the_device_has_read(ahead, monkeypatch):
    """Others than those that are known late. Staging memory is free, and the host has seen it."""
    engine = ahead.engine
    if engine.toggles.plans == "today":
        pytest.skip("what it has not seen twice has no gate")
    decode(engine)
    written, late = list[Prepared](), list[Prepared]()
    write, run_late, made_next = Prepared.write_ahead, Prepared.run_late, Steps._following

    def behind_the_read(steps: Steps, now: Any) -> Any:
        """However late a busy machine makes the device."""
        until = time.monotonic() + 0.5
        while now.program.ahead is not None and not now.program.ahead.has_read:
            assert time.monotonic() < until
        return made_next(steps, now)

    monkeypatch.setattr(Steps, "_following", behind_the_read)
    monkeypatch.setattr(Prepared, "write_ahead", lambda p, *of: written.append(p) or write(p, *of))
    monkeypatch.setattr(Prepared, "run_late", lambda p, *of: late.append(p) or run_late(p, *of))
    for i in range(12):
        engine.step([i + 1])
    assert len(written) == 12 and len(late) in (11, 12)
    for program in written:
        pairs = zip(program.head, program.program.commands, strict=False)
        waits = {call for call, command in pairs if isinstance(command, Sync)}
        assert len(waits) == (engine.toggles.step_wait == "outputs")
        assert not waits & {*program.late} and len(program.late) < len(program.head)
    monkeypatch.setattr(Steps, "_following", made_next)
    monkeypatch.setattr(Gated, "has_read", False)
    for i in range(6):
        engine.step([i + 1])
        assert engine.steps._coming is None or not engine.steps._coming.is_written


def test_a_failed_or_refused_step_leaves_the_engine_as_it_was(way):
    engine = way.engine
    engine.reset()
    wanted = [engine.step([i + 1]).copy() for i in range(6)]
    engine.reset()
    for i, row in enumerate(wanted):
        with pytest.raises(UsageError, match="outside the vocabulary"):
            engine.step([engine.model.n_vocab])
        fails = patch.object(Prepared, "finish", side_effect=KeyboardInterrupt)
        with fails, pytest.raises(KeyboardInterrupt):
            engine.step([i + 1])
        engine.synchronize()
        assert np.array_equal(engine.step([i + 1]), row)


# launched ahead -----------------------------------------------------------------------------------


def test_launches_ahead_that_are_late_are_launched_again(ahead, monkeypatch):
    """In time; late before the gate is opened, and behind the host's look at it; late always."""
    wanted = decode(ahead.plain)
    assert np.array_equal(decode(ahead.engine), wanted)
    before = ahead.ahead()
    assert np.array_equal(decode(ahead.engine), wanted)
    launched, missed = np.subtract(ahead.ahead(), before)
    assert launched + missed > len(TOKENS) // 2
    assert np.array_equal(decode(ahead.engine, late=(4, 9, 10, 11, 25)), wanted)
    assert ahead.ahead()[1] > before[1] + missed
    before = ahead.ahead()
    with late_looks(ahead.engine, 4) as looked:
        assert np.array_equal(decode(ahead.engine), wanted)
    assert len(looked) > 20 and ahead.ahead()[1] > before[1]
    before, ahead.gate._misses = ahead.ahead(), 0
    monkeypatch.setattr(gate, "MOST_PASSED", 64)
    monkeypatch.setattr(ahead.gate, "_went", lambda number: -number)  # every limit has passed
    assert np.array_equal(decode(ahead.engine), wanted)
    assert 0 < ahead.ahead()[1] - before[1] < 6, "few are computed twice"


@pytest.mark.parametrize("results", [r for r in wb.Toggles.values("results") if r != "behind"])
def test_a_host_told_of_the_end_waits_for_no_event(loaded, monkeypatch, results):
    """Nor does it go on too early: a plan that never tells is waited for by its event."""
    waits: list[bool] = []
    sync_event = loaded.backend.sync_event

    def counted_sync(event: Any) -> Any:
        sync = sync_event(event)
        return lambda: waits.append(True) or sync()

    monkeypatch.setattr(loaded.backend, "sync_event", counted_sync)
    values, found, n_waits = AHEAD | {"results": results}, [], []
    monkeypatch.setattr(gate, "WORD_NS", 10 * 10**9)  # however late a busy machine makes the device
    for end in ("event", "word", "a word that never comes"):
        if end not in ("event", "word"):
            monkeypatch.setattr(gate.Gate, "end", lambda self, stream, programmatic: None)
            monkeypatch.setattr(gate, "WORD_NS", 100_000)
        waits.clear()
        toggles = wb.Toggles(**values, graph_reuse="set_rows", plan_end=end.split()[-1] if
                             end == "event" else "word")  # fmt: skip
        with loaded.variant(toggles) as engine:
            found.append(decode(engine, late=(7, 19)))
        n_waits.append(len(waits))
    assert all(np.array_equal(rows, found[0]) for rows in found)
    assert n_waits[1] == 0 and min(n_waits[0], n_waits[2]) >= len(TOKENS)


REFUSED: dict[str, dict[str, str]] = {
    "plans": {"plans": "off"},
    "plan_scope": {"plan_scope": "split"},
    "sync": {"sync": "implicit"},
    "n_copies": {"n_copies": "4"},
    "host_source": {"host_source": "pageable"},
    "copy_stream": {"copy_stream": "own"},
    "graph_reuse": {"graph_reuse": "patch_pointers"},
    "rebuild": {"graph_reuse": "rebuild"},
    "results": {"results": "behind", "host_source": "pinned_ring_2"},
    "launch_ahead=on, or plan_end=event": {"launch_ahead": "off", "plan_end": "word"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_never_be_launched_ahead_is_refused(loaded, name):
    wanted = wb.Toggles(**AHEAD | {"graph_reuse": "set_rows"} | REFUSED[name])
    with pytest.raises(UsageError) as refused:
        loaded.resolve(wanted)
    assert name in str(refused.value) and "\n" not in str(refused.value)
