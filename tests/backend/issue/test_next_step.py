"""A next step that is made ready, and launched ahead, while the device computes: logits and counts
are those of one made when it is submitted, whatever comes between, however late the host is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple
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
from workbench.trace.spans import Recorder, now_ns

KEPT = {"graph_reuse": "set_rows"}
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


class Way(NamedTuple):
    """An engine that makes steps ready as it can, and one that launches none ahead."""

    engine: wb.Engine
    plain: wb.Engine
    is_ready: bool


@pytest.fixture(scope="module", params=WAYS)
def way(request, loaded) -> Iterator[Way]:
    toggles = KEPT | WAYS[request.param]
    off = toggles | {"plan_end": "event", "launch_ahead": "off"}
    with loaded.variant(wb.Toggles(**toggles)) as made, loaded.variant(wb.Toggles(**off)) as plain:
        yield Way(made, plain, request.param not in NOT_READY)


@pytest.fixture(scope="module")
def another(loaded) -> Iterator[wb.Engine]:
    """Its next plan stands at a gate, too."""
    with loaded.variant(wb.Toggles(**KEPT | AHEAD)) as made:
        yield made


@pytest.fixture
def ahead(way) -> Way:
    if way.engine.toggles.launch_ahead != "on":
        pytest.skip("launches nothing ahead")
    decode(way.engine)  # its gate is made when it is first wanted
    own: Any = way.engine.issuer.gate
    own._misses = own._to_pass = 0  # what a busy machine missed before
    return way


def decode(engine: wb.Engine, late: tuple[int, ...] = ()) -> np.ndarray:
    engine.reset()
    rows = [engine.prefill(list(range(1, 21)))]
    for i, token in enumerate(TOKENS):
        if i in late:
            time.sleep(LATE)
        rows.append(engine.step([token]).copy())
    return np.concatenate(rows)


# whatever is done in between ----------------------------------------------------------------------


def traced(engine: wb.Engine, n: int) -> Iterator[np.ndarray]:
    engine.recorder = Recorder()
    try:
        yield from (engine.step([i + 5]) for i in range(n))
    finally:
        engine.recorder = None


def stamped(engine: wb.Engine, n: int) -> Iterator[np.ndarray]:
    around = []
    with engine.stamped() as stamps:
        for i in range(n):
            begin = now_ns()
            yield engine.step([i + 6])
            around.append((begin, now_ns()))
    own = stamps[-n:]  # the first step may come after a shift, which has a pair, too
    for (begin, end), (called, returned) in zip(own, around, strict=True):
        assert called < begin < end < returned


def two(i: int) -> Any:
    return [(1, [i + 1], "last"), (0, [i + 2], "last")]


# what is done n times, and its logits; they are copied as they come
DOES: dict[str, Callable[[wb.Engine, int], Iterable[np.ndarray] | None]] = {
    "step": lambda e, n: (e.step([7 * i + n]) for i in range(n)),
    "other": lambda e, n: (e.step([7 * i + n], sequence=1) for i in range(n)),
    "both": lambda e, n: (e.submit(two(i)).wait() for i in range(n)),
    "unwaited": lambda e, n: (x.wait() for x in [e.submit([(0, [i], "last")]) for i in range(n)]),
    "silent": lambda e, n: (e.step([i + 4], "none") for i in range(n)),
    "prompt": lambda e, n: (e.prefill(list(range(1, 4 * n))) for _ in range(1)),
    "all": lambda e, n: (e.prefill(list(range(1, 1 + n)), "all") for _ in range(1)),
    "traced": traced, "stamped": stamped,
    "held": lambda e, n: [e.step([i]) for i in range(n)],  # so that blocks run out
    "late": lambda e, n: time.sleep(LATE),
    "wrong": lambda e, n: [e.step([e.model.n_vocab])],
    "remove": lambda e, n: e.cache.remove(0, n, None),
    "shift": lambda e, n: e.cache.shift(0, n),
    "fork": lambda e, n: e.cache.copy(n % N_SEQS, (n + 1) % N_SEQS),
    "synchronize": lambda e, n: e.synchronize(),
    "reset": lambda e, n: e.reset(),
}  # fmt: skip


def do(engine: wb.Engine, what: str, n: int) -> list[Any]:
    """Logits, or a refusal."""
    try:
        return [row.copy() for row in DOES[what](engine, n) or ()]
    except UsageError as error:
        return [str(error)]


@settings(
    max_examples=profiles.examples(25),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(st.sampled_from([*DOES, "another"]), st.integers(1, 5)), min_size=1,
                max_size=10))  # fmt: skip
def test_logits_and_counts_are_those_of_the_slow_twin(way, another, does):
    """The slow twin: each step is made when it is submitted. another: an engine on the backend."""
    found, counts = [], []
    none_made_ready = patch.object(Steps, "_following", lambda steps, now: None)
    for engine, slow in ((way.engine, False), (way.engine, True), (way.engine, False),
                         (way.plain, False)):  # fmt: skip
        with none_made_ready if slow else nullcontext():
            engine.synchronize()
            engine.reset()
            another.reset()
            engine.steps.programs.clear()
            before, rows = engine.counters, list[Any]()
            for what, n in does:
                rows += do(another, "step", 1) if what == "another" else do(engine, what, n)
            found.append(rows)
            counts.append([engine.counters[name] - before[name] for name in COUNTED])
    assert counts[1] == counts[2]  # the first finds its memory grow
    for wanted, *others in zip(*found, strict=True):
        assert all(np.array_equal(wanted, got) for got in others)


# made ready ---------------------------------------------------------------------------------------


def test_decoded_tokens_are_ready_where_programs_are_kept(way):
    engine = way.engine
    engine.reset()
    for i in range(12):
        engine.step([i + 1])
        if i > 3:  # plans of every block
            assert (engine.steps._coming is not None) == way.is_ready


def test_inputs_are_written_once_the_device_has_read(ahead, monkeypatch):
    """Others than those that are known late."""
    engine = ahead.engine
    if engine.toggles.plans == "today":
        pytest.skip("what it has not seen twice has no gate")
    written, write, made_next = list[Prepared](), Prepared.write_ahead, Steps._following

    def once_read(steps: Steps, now: Any) -> Any:
        """However late a busy machine makes the device."""
        until = time.monotonic() + 0.5
        while now.program.ahead is not None and not now.program.ahead.has_read:
            assert time.monotonic() < until
        return made_next(steps, now)

    monkeypatch.setattr(Prepared, "write_ahead", lambda p, *of: written.append(p) or write(p, *of))
    with patch.object(Steps, "_following", once_read):
        for i in range(12):
            engine.step([i + 1])
    assert len(written) == 12 and all(len(p.late) < len(p.head) for p in written)
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
    """In time; late before the gate is opened, and after the host's look at it; late always."""
    wanted, own = decode(ahead.plain), ahead.engine.issuer.gate

    def missed(late: tuple[int, ...] = ()) -> int:
        before = ahead.engine.counters["plans_ahead_missed"]
        assert np.array_equal(decode(ahead.engine, late), wanted)
        return ahead.engine.counters["plans_ahead_missed"] - before

    missed()  # plans of every block
    assert missed(late=(4, 9, 10, 11, 25)) > 0
    with late_looks(ahead.engine, 4) as looked:
        assert missed() > 0
    assert len(looked) > 20
    own._misses = 0
    monkeypatch.setattr(gate, "MOST_PASSED", 64)
    monkeypatch.setattr(own, "_went", lambda number: -number)  # every limit has passed
    assert 0 < missed() < 6, "few are computed twice"


@pytest.mark.parametrize("results", [r for r in wb.Toggles.values("results") if r != "behind"])
def test_a_host_told_of_the_end_waits_for_no_event(loaded, monkeypatch, results):
    """Nor does it go on too early: a plan that never tells is waited for by its event."""
    waits: list[bool] = []
    sync_event, found, n_waits = loaded.backend.sync_event, [], []

    def counted_sync(event: Any) -> Any:
        sync = sync_event(event)
        return lambda: waits.append(True) or sync()

    monkeypatch.setattr(loaded.backend, "sync_event", counted_sync)
    monkeypatch.setattr(gate, "WORD_NS", 10 * 10**9)  # however late a busy machine makes the device
    for end, comes in (("event", True), ("word", True), ("word", False)):
        if not comes:
            monkeypatch.setattr(gate.Gate, "end", lambda self, stream, programmatic: None)
            monkeypatch.setattr(gate, "WORD_NS", 100_000)
        waits.clear()
        more = {"results": results, "plan_end": end}
        with loaded.variant(wb.Toggles(**KEPT | AHEAD | more)) as engine:
            found.append(decode(engine, late=(7, 19)))
        n_waits.append(len(waits))
    assert all(np.array_equal(rows, found[0]) for rows in found)
    assert n_waits[1] == 0 and min(n_waits[0], n_waits[2]) >= len(TOKENS)


REFUSED = (
    "plans=off", "plan_scope=split", "sync=implicit", "n_copies=4", "host_source=pageable",
    "copy_stream=own", "graph_reuse=patch_pointers", "graph_reuse=rebuild",
    "results=behind host_source=pinned_ring_2", "plan_end=word launch_ahead=off",
)  # fmt: skip


@pytest.mark.parametrize("given", REFUSED)
def test_what_can_never_be_launched_ahead_is_refused(loaded, given):
    more = dict(pair.split("=") for pair in given.split())
    with pytest.raises(UsageError) as refused:
        loaded.resolve(wb.Toggles(**KEPT | AHEAD | more))
    assert next(iter(more)) in str(refused.value) and "\n" not in str(refused.value)
