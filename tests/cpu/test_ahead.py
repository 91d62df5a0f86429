"""Plans that are launched before their step is submitted: the same logits to the bit, whatever the
host does in between and however late it is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.late_host import LATE, late_looks, never_passed  # noqa: F401 - of every test
from workbench.backend.plan import gate
from workbench.common.errors import UsageError
from workbench.program.commands import Record, Replay, Wait
from workbench.trace.profile import profile

TOGGLES: dict[str, Any] = {
    "sync": "packed_implicit", "plans": "ours", "plan_scope": "step", "graph_reuse": "set_rows",
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "copy": {},
    "direct": {"results": "direct"},
    "ring": {"host_source": "pinned_ring_2", "step_wait": "outputs"},
    "table": {"graph_reuse": "pointer_table", "kv_growth": "full"},
    "today": {"plans": "today", "fuse": "on"},
    "word": {"results": "direct", "plan_end": "word"},
    "branches": {"streams": "4", "fork": "any", "results": "direct", "plan_end": "word"},
    "word behind a copy": {
        "plan_end": "word",
        "host_source": "pinned_ring_2",
        "step_wait": "outputs",
    },
}
N_SEQS = 3


@pytest.fixture(scope="module")
def loaded(tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=96, n_ubatch=16, n_seqs=N_SEQS,
        threads=1, toggles=wb.Toggles(),
    ) as made:  # fmt: skip
        yield made


@pytest.fixture(scope="module", params=WAYS)
def pair(request, loaded) -> Iterator[tuple[wb.Engine, wb.Engine]]:
    """Without launches ahead, and with them."""
    toggles = TOGGLES | WAYS[request.param]
    with (
        loaded.variant(wb.Toggles(**toggles | {"plan_end": "event"})) as plain,
        loaded.variant(wb.Toggles(**toggles, launch_ahead="on")) as ahead,
    ):
        yield plain, ahead


def decode(engine: wb.Engine, tokens: Sequence[int], late: Sequence[int] = ()) -> np.ndarray:
    engine.reset()
    rows = [engine.prefill(list(range(1, 21)))]
    for i, token in enumerate(tokens):
        if i in late:
            time.sleep(LATE)
        rows.append(engine.step([token]).copy())
    return np.concatenate(rows)


TOKENS = [(7 * i + 3) % 500 for i in range(30)]


def test_steps_are_launched_ahead_and_give_the_same_logits(pair):
    plain, ahead = pair
    wanted, before = decode(plain, TOKENS), ahead.counters
    assert np.array_equal(decode(ahead, TOKENS), wanted)
    counts = ahead.counters
    launched, missed = (counts[n] - before[n] for n in ("plans_ahead", "plans_ahead_missed"))
    assert launched + missed > len(TOKENS) // 2  # until plans of every block are captured
    assert "plans_ahead" not in plain.counters


def test_a_host_that_is_late_launches_again(pair):
    plain, ahead = pair
    wanted = decode(plain, TOKENS)
    decode(ahead, TOKENS)
    before = ahead.counters["plans_ahead_missed"]
    late = [4, 9, 10, 11, 25]
    own: Any = ahead.issuer.gate  # type: ignore[attr-defined]
    own._misses = own._to_pass = 0  # what a busy machine missed before makes no launch pass now
    assert np.array_equal(decode(ahead, TOKENS, late), wanted)
    assert ahead.counters["plans_ahead_missed"] > before


def test_a_host_that_is_late_for_every_step_has_few_computed_twice(pair, monkeypatch):
    plain, ahead = pair
    wanted = decode(plain, TOKENS)
    decode(ahead, TOKENS)
    own: Any = ahead.issuer.gate  # type: ignore[attr-defined]
    own._misses = 0
    monkeypatch.setattr(gate, "MOST_PASSED", 64)
    monkeypatch.setattr(own, "_went", lambda number: -number)  # as if every limit had passed
    before = ahead.counters["plans_ahead_missed"]
    assert np.array_equal(decode(ahead, TOKENS), wanted)
    assert 0 < ahead.counters["plans_ahead_missed"] - before < 6
    own._misses = own._to_pass = 0


def test_a_gate_that_is_opened_too_late_is_found_behind_the_wait(pair):
    """The host has looked, and its plan still stood there; then the limit passes."""
    plain, ahead = pair
    wanted = decode(plain, TOKENS)
    decode(ahead, TOKENS)
    before = ahead.counters["plans_ahead_missed"]
    with late_looks(ahead, 4) as looked:
        assert np.array_equal(decode(ahead, TOKENS), wanted)
    assert len(looked) > 20
    assert ahead.counters["plans_ahead_missed"] > before


DOES = st.one_of(
    st.tuples(st.just("step"), st.integers(0, N_SEQS - 1), st.integers(1, 500)),
    st.tuples(st.just("steps"), st.integers(1, 6), st.integers(1, 500)),
    st.tuples(st.just("all"), st.integers(1, 4), st.integers(1, 500)),
    st.tuples(st.just("prompt"), st.integers(0, N_SEQS - 1), st.integers(1, 20)),
    st.tuples(st.just("silent"), st.integers(0, N_SEQS - 1), st.integers(1, 500)),
    st.tuples(st.just("late"), st.just(0), st.just(0)),
    st.tuples(st.just("reset"), st.just(0), st.just(0)),
    st.tuples(st.just("remove"), st.integers(0, N_SEQS - 1), st.integers(0, 8)),
    st.tuples(st.just("shift"), st.integers(0, N_SEQS - 1), st.integers(0, 5)),
    st.tuples(st.just("fork"), st.integers(0, N_SEQS - 1), st.integers(0, N_SEQS - 1)),
    st.tuples(st.just("synchronize"), st.just(0), st.just(0)),
)


class Doing:
    """What an engine does; `other` is another engine on the same backend."""

    def __init__(self, engine: wb.Engine, other: wb.Engine):
        self.engine, self.other = engine, other
        self.found: list[Any] = []

    def __call__(self, what: str, a: int, b: int, sleeps: bool) -> None:
        engine = self.engine
        try:
            match what:
                case "step":
                    self.found.append(engine.step([b], sequence=a).copy())
                case "silent":
                    engine.step([b], outputs="none", sequence=a)
                case "steps":
                    for i in range(a):
                        self.found.append(engine.step([b + i]))  # held: blocks run out
                case "all":
                    for i in range(a):
                        work: Any = [(s, [b + i + s], "last") for s in range(N_SEQS)]
                        self.found.append(engine.submit(work).wait().copy())
                case "prompt":
                    tokens = [(31 * i + 7) % 500 for i in range(b)]
                    self.found.append(engine.prefill(tokens, sequence=a).copy())
                case "late":
                    if sleeps:
                        time.sleep(LATE)
                    self.found.append(self.other.step([5]).copy())
                case "reset":
                    engine.reset()
                    self.other.reset()
                case "remove":
                    engine.cache.remove(a, b)
                case "shift":
                    engine.cache.shift(a, 2, b)
                case "fork":
                    engine.cache.copy(a, b)
                case "synchronize":
                    engine.synchronize()
        except UsageError as error:  # the same of both engines
            self.found.append(str(error))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(does=st.lists(DOES, max_size=14))
def test_whatever_an_engine_does_in_between(pair, loaded, does):
    found = []
    for engine in pair:
        engine.reset()
        loaded.reset()
        doing = Doing(engine, loaded)
        for what, a, b in does:
            doing(what, a, b, sleeps=engine is pair[1])
        found.append(doing.found)
    plain, ahead = found
    assert len(plain) == len(ahead)
    for wanted, got in zip(plain, ahead, strict=True):
        assert np.array_equal(wanted, got)


def test_nothing_is_launched_ahead_where_results_come_behind(loaded):
    """The host submits the next step before it waits for this one; so nobody launches for it."""
    toggles = TOGGLES | {"results": "behind", "host_source": "pinned_ring_2"}
    loaded.resolve(wb.Toggles(**toggles))
    with pytest.raises(UsageError, match="launch_ahead=on and results=behind clash"):
        loaded.resolve(wb.Toggles(**toggles, launch_ahead="on"))


@pytest.mark.parametrize("results", [r for r in wb.Toggles.values("results") if r != "behind"])
def test_a_host_that_is_told_of_the_end_waits_for_no_event(loaded, monkeypatch, results):
    """Nor does it go on too early: a plan that never tells is waited for by its event."""
    waits: list[bool] = []
    sync_event = loaded.backend.sync_event

    def counted(event: Any) -> Any:
        sync = sync_event(event)

        def wait() -> None:
            waits.append(True)
            sync()

        return wait

    monkeypatch.setattr(loaded.backend, "sync_event", counted)
    toggles = TOGGLES | {"launch_ahead": "on", "results": results}
    found, n_waits = [], []
    with loaded.variant(wb.Toggles(**toggles)) as by_event:
        found.append(decode(by_event, TOKENS))
    assert len(waits) >= len(TOKENS)
    for deaf in (False, True):
        if deaf:  # no plan tells, and the host looks in vain
            monkeypatch.setattr(gate.Gate, "end", lambda self, stream, programmatic: None)
            monkeypatch.setattr(gate, "WORD_NS", 100_000)
        waits.clear()
        with loaded.variant(wb.Toggles(**toggles, plan_end="word")) as by_word:
            found.append(decode(by_word, TOKENS, late=[7, 19]))
        n_waits.append(len(waits))
    assert all(np.array_equal(rows, found[0]) for rows in found)
    assert n_waits[0] == 0 and n_waits[1] > len(TOKENS)


def test_two_engines_that_launch_ahead_share_a_backend(pair, loaded):
    plain, ahead = pair
    wanted = decode(plain, TOKENS)
    with loaded.variant(ahead.toggles) as other:
        rows: list[list[np.ndarray]] = [[], []]
        for engine in (ahead, other):
            engine.reset()
        for engine, made in zip((ahead, other), rows, strict=True):
            made.append(engine.prefill(list(range(1, 21))))
        for token in TOKENS:
            for engine, made in zip((ahead, other), rows, strict=True):
                made.append(engine.step([token]).copy())
        for made in rows:
            assert np.array_equal(np.concatenate(made), wanted)


def test_a_traced_step_is_launched_when_it_is_submitted(pair):
    _, ahead = pair
    decode(ahead, TOKENS)
    with profile(ahead):
        ahead.step([3])
        before = ahead.counters["plans_ahead"]
        for token in TOKENS[:5]:
            ahead.step([token])
        assert ahead.counters["plans_ahead"] == before


def test_a_trace_has_every_command_of_a_plan_and_nothing_more(pair):
    """What tells the host of the end is no command's, and the spans are there when it is told."""
    _, ahead = pair
    decode(ahead, TOKENS)
    with profile(ahead) as prof:
        for token in TOKENS[:6]:
            ahead.step([token])
    spans = [s for s in prof.timeline.spans if s.category == "device"]
    assert all(s.end_ns >= s.start_ns > 0 for s in spans)
    program = ahead.program(n_past=ahead.n_past)
    (plan,) = [command for command in program.commands if isinstance(command, Replay)]
    steps = {s.args["step"] for s in spans}
    assert len(steps) == 6
    for step in steps:
        parts = {s.args["part"] for s in spans if s.args["step"] == step}
        # what orders branches is no work
        assert parts == {i for i, x in enumerate(plan.parts) if not isinstance(x, Record | Wait)}


def test_a_stamped_step_is_launched_ahead(pair):
    _, ahead = pair
    for _ in range(2):  # stamped plans of every block are captured
        before = ahead.counters
        with ahead.stamped() as stamps:
            decode(ahead, TOKENS)
    launched, missed = (ahead.counters[n] - before[n]
                        for n in ("plans_ahead", "plans_ahead_missed"))  # fmt: skip
    assert launched + missed > len(TOKENS) - 4
    assert len(stamps) == len(TOKENS) + 2  # a prompt of two ubatches


def test_an_engine_with_a_plan_at_its_gate_can_be_closed(loaded):
    with loaded.variant(wb.Toggles(**TOGGLES, launch_ahead="on")) as engine:
        decode(engine, TOKENS)
        assert engine.issuer.gate._armed is not None  # type: ignore[attr-defined]
    assert loaded.step([5]).shape[0] == 1


REFUSED: dict[str, dict[str, str]] = {
    "plans": {"plans": "off"},
    "plan_scope": {"plan_scope": "split"},
    "sync": {"sync": "implicit"},
    "n_copies": {"n_copies": "4"},
    "host_source": {"host_source": "pageable"},
    "copy_stream": {"copy_stream": "own"},
    "graph_reuse": {"graph_reuse": "patch_pointers"},
    "rebuild": {"graph_reuse": "rebuild"},
}


def test_no_plan_tells_of_its_end_that_is_not_launched_ahead(loaded):
    with pytest.raises(UsageError, match="use launch_ahead=on, or plan_end=event"):
        loaded.resolve(wb.Toggles(**TOGGLES, plan_end="word"))


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_never_be_launched_ahead_is_refused(loaded, name):
    wanted = wb.Toggles(**TOGGLES | REFUSED[name], launch_ahead="on")
    with pytest.raises(UsageError) as refused:
        loaded.resolve(wanted)
    assert name in str(refused.value) and "\n" not in str(refused.value)
