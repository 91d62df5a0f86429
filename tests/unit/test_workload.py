"""Test names, the scope of a repetition, and the warm-up rule."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine import BOS, N_VOCAB, Clock, FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from workbench.benchmarks.workload import (
    WARM_MAX,
    Workload,
    bos_token,
    draw_tokens,
    gen_steps,
    parse,
    parse_tests,
    prompt_steps,
    take_sample,
    warm_up,
)
from workbench.common.errors import UsageError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pp512", (512, 0, 0)),
        ("tg128", (0, 128, 0)),
        ("tg128@d4096", (0, 128, 4096)),
        ("tg128 @ d4096", (0, 128, 4096)),
        ("pp512+tg128", (512, 128, 0)),
        (" pp1+tg2 @d3 ", (1, 2, 3)),
        ("pp512+tg128@b8", (512, 128, 0, 8, False)),
        ("pp512+tg128 @ s32", (512, 128, 0, 32, True)),
        ("tg4@b1", (0, 4, 0, 1, False)),
    ],
)
def test_names(name, expected):
    assert parse(name) == Workload(*expected)
    assert parse(parse(name).name) == parse(name)


@given(st.integers(0, 9999), st.integers(0, 9999), st.integers(0, 9999))
def test_a_name_reads_back(n_prompt, n_gen, n_depth):
    workload = Workload(n_prompt, n_gen, n_depth)
    if workload.n_tokens:
        assert parse(workload.name) == workload


@pytest.mark.parametrize(
    "name",
    ["", "pp", "tg", "tg0", "pp0", "pp0+tg4", "pp4tg4", "+tg4", "pp4+", "tg4@4", "tg-4", "xx8",
     "tg4@d", "@d7", "tg4 tg5", "pp4+tg4+tg4"],
)  # fmt: skip
def test_other_names_are_refused(name):
    with pytest.raises(UsageError, match="does not exist"):
        parse(name)


def test_lists_of_names():
    assert parse_tests("pp8, tg4") == [Workload(8), Workload(0, 4)]
    assert parse_tests(["tg4", "tg4"]) == [Workload(0, 4)]
    with pytest.raises(UsageError, match="no test"):
        parse_tests("")


def test_tokens_follow_from_seed_test_and_repetition():
    w = Workload(30, 20, 10)
    a = draw_tokens(w, N_VOCAB, 1, 0, bos=BOS)
    assert a == draw_tokens(w, N_VOCAB, 1, 0, bos=BOS)
    assert a != draw_tokens(w, N_VOCAB, 1, 1, bos=BOS) != draw_tokens(w, N_VOCAB, 2, 0, bos=BOS)
    assert [len(part) for part in a] == [10, 30, 20]
    assert a.depth[0] == a.gen[0] == BOS  # BOS into the empty cache, and before the generation
    assert draw_tokens(Workload(30), N_VOCAB, 1, 0, BOS).prompt[0] == BOS
    without = draw_tokens(Workload(900), N_VOCAB, 1)
    with pytest.raises(UsageError, match="seed=-1"):
        draw_tokens(w, N_VOCAB, -1)
    assert min(without.prompt) == 0 and max(without.prompt) == N_VOCAB - 1


def test_bos_comes_from_the_file():
    engine = FakeEngine(Clock())
    assert bos_token(engine) == BOS
    engine.model.file.metadata["tokenizer.ggml.add_bos_token"] = False
    assert bos_token(engine) is None
    engine.model.file.metadata = {"tokenizer.ggml.bos_token_id": N_VOCAB}
    assert bos_token(engine) is None


def test_scope_of_a_repetition(monkeypatch):
    """The depth is not timed, the prompt is one entry, and every token is one."""
    clock = Clock().install(monkeypatch)
    engine = FakeEngine(clock, ns_of=lambda toggles, n, nth: 1000 * n + nth)
    workload = parse("pp20+tg3@d32")
    tokens = draw_tokens(workload, N_VOCAB, 0)
    sample = take_sample(engine, workload, tokens)
    assert [len(call) for call in engine.calls] == [16, 16, 16, 4, 1, 1, 1]
    assert [t for call in engine.calls for t in call] == tokens.depth + tokens.prompt + tokens.gen
    assert sample.token_ns.tolist() == [20_000 + 3 + 4, 1005, 1006, 1007]
    assert sample.token_n.tolist() == [20, 1, 1, 1]
    assert sample.ns_total == sample.token_ns.sum()
    assert sample.tokens_per_second == pytest.approx(23e9 / sample.ns_total)
    assert engine.n_waits == 1  # at the end, so that nothing is left for whoever is next
    again = take_sample(engine, workload, tokens)  # the cache was emptied first
    assert len(engine.live) == workload.n_cells
    np.testing.assert_array_equal(sample.last_logits, again.last_logits)


def test_of_several_sequences():
    own, shared = parse("pp5+tg3@b4"), parse("pp5+tg3@s4")
    assert (own.n_tokens, own.n_cells, shared.n_tokens, shared.n_cells) == (32, 32, 17, 17)
    # the mean step of three: 20 (5) cells of prompts, and cells of two steps
    assert own.step_bytes(1000, 10) == 1000 + 10 * (20 + 8)
    assert shared.step_bytes(1000, 10) == 1000 + 10 * (5 + 8)
    assert parse("tg3").step_bytes(1000, 10) == 1020
    tokens = draw_tokens(own, N_VOCAB, 0, bos=1)
    assert tokens.prompt[::5] == [1] * 4 and len(tokens.gen) == 12
    assert len({tuple(tokens.prompt[i : i + 5]) for i in range(0, 20, 5)}) == 4
    assert len(draw_tokens(shared, N_VOCAB, 0).prompt) == 5
    # prompts are packed into ubatches of 8; steps of 4 tokens are one, of 9 tokens two
    prompt = [
        [(s, len(ids), wanted) for s, ids, wanted in w] for w in prompt_steps(own, range(20), 8)
    ]
    assert prompt[0] == [(0, 5, "none"), (1, 3, "none")] and prompt[2] == [(3, 4, "last")]
    assert [[len(work) for work in row] for row in gen_steps(own, range(12), 8)] == [[4]] * 3
    assert [[len(work) for work in row] for row in gen_steps(parse("tg1@b9"), range(9), 8)] == [
        [8, 1]
    ]


@pytest.mark.parametrize("name", ["pp1@b0", "@b3", "pp1@b", "tg1@d3@b2", "tg1@x2", "tg1@b-1"])
def test_names_of_several_sequences_that_are_none(name):
    with pytest.raises(UsageError, match="name it as llama-bench does"):
        parse(name)


def test_too_long_for_the_context(monkeypatch):
    engine = FakeEngine(Clock().install(monkeypatch), n_ctx=64)
    workload = parse("tg33@d32")
    with pytest.raises(UsageError, match="n_ctx=65"):
        take_sample(engine, workload, draw_tokens(workload, N_VOCAB, 0))
    assert engine.calls == []


def test_a_traced_engine_is_not_timed(monkeypatch):
    engine = FakeEngine(Clock().install(monkeypatch))
    engine.recorder = object()
    with pytest.raises(UsageError, match="recorder"):
        take_sample(engine, Workload(0, 2), draw_tokens(Workload(0, 2), N_VOCAB, 0))


def test_warm_up_ends_when_times_settle(monkeypatch):
    clock = Clock().install(monkeypatch)
    slow_start = FakeEngine(clock, ns_of=lambda toggles, n, nth: 9000 if nth <= 4 else 1000)
    assert warm_up([slow_start], Workload(0, 4), 0, None) == (3, True)
    steady = FakeEngine(clock)
    assert warm_up([steady, steady], Workload(0, 4), 0, None) == (2, True)
    noisy = FakeEngine(clock, ns_of=lambda toggles, n, nth: 1000 if nth <= 4 else 1000 * nth)
    assert warm_up([steady, noisy], Workload(0, 4), 0, None) == (2, True)  # slower is no warm-up
    improving = FakeEngine(clock, ns_of=lambda toggles, n, nth: 10**6 * 0.97**nth)
    assert warm_up([steady, improving], Workload(0, 4), 0, None) == (WARM_MAX, False)
    endless = FakeEngine(clock, ns_of=lambda toggles, n, nth: 10**11 / nth)
    assert warm_up([endless], Workload(0, 4), 0, None) == (2, False)
    assert warm_up([steady], Workload(0, 4), 0, None, once=True) == (1, False)
