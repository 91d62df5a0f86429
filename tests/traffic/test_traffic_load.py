"""What a load generator sends: lengths, prompts and arrivals, from a seed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workbench.common.errors import UsageError
from workbench.traffic.load import (
    ANSWER,
    CLOSED,
    CONSTANT,
    POISSON,
    PROMPT,
    Arrivals,
    Starts,
    arrivals,
    draw,
    lengths,
)

IDS = np.arange(100, 900, dtype=np.int32)
FIXED = lengths("-p", "5")
SETTINGS = st.one_of(
    st.builds(Arrivals, st.just(CLOSED), st.integers(1, 9)),
    st.builds(Arrivals, st.sampled_from([POISSON, CONSTANT]), st.floats(0.5, 1e4)),
    st.just(Arrivals(POISSON, math.inf)),
)


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(0, 99), st.integers(1, 40))
def test_lengths_are_in_range_and_come_again_from_a_seed(low, more, seed, n):
    for text in (f"{low}", f"uniform:{low}-{low + more}", f"rng-{low}-{low + more}"):
        asked = lengths("-p", text)
        assert str(asked) == text
        found = asked.draw(n, seed, PROMPT)
        assert found.dtype == np.int64 and found.shape == (n,)
        assert (asked.low <= found).all() and (found <= asked.high).all()
        assert (found == asked.draw(n, seed, PROMPT)).all()
        assert (found[: n // 2] == asked.draw(n // 2, seed, PROMPT)).all() or "uniform" in text


def test_rng_lengths_are_server_bench_s():
    """The figures are of random.seed(3 * (offset + 1000 * i) + part); random.randint(low, high),
    which is how llama.cpp's scripts/server-bench.py calls Python's generator."""
    of_prompt = lengths("-p", "rng-0-19000")
    for asked, seed, which, wanted in (
        (of_prompt, 0, PROMPT, [12623, 4156, 5699, 11270, 1260, 13486]),
        (of_prompt, 7, PROMPT, [5405, 3961, 17947, 2600, 7417, 7260]),
        (lengths("-n", "rng-128-384"), 0, ANSWER, [196, 277, 297, 146, 199, 267]),
    ):
        assert asked.draw(6, seed, which).tolist() == wanted
    load = draw(Arrivals(CLOSED, 2), 3, of_prompt, FIXED, IDS, seed=7)
    assert [load.sampling_seed(i) for i in range(3)] == [23, 3023, 6023]
    assert lengths("-p", "rng-0-1").draw(50, 0, PROMPT).tolist() == [1] * 50, "none is empty"


NO_LENGTHS = ["", "0", "-1", "1.5", "uniform:5", "uniform:9-3", "rng-0-0", "rng:1-2", "many", "1e3"]
REFUSED = [
    *((lengths, ("-p", text), "-p .* is no length; write it as") for text in NO_LENGTHS),
    (arrivals, (POISSON, "nan", None), "--rate 'nan' is no rate"),
    (arrivals, (POISSON, "1,,2", None), "--rate '' is no rate"),
    (arrivals, (POISSON, None, "0"), "--concurrency '0' is no number"),
    (arrivals, (POISSON, None, "1.5"), "--concurrency '1.5' is no"),
    (arrivals, ("gamma", "1", None), "--arrivals 'gamma': choose poisson or constant"),
    (draw, (Arrivals(CLOSED, 2), 0, FIXED, FIXED, IDS), "--n-requests 0 must be 1 to"),
    (draw, (Arrivals(CLOSED, 2), 1, FIXED, FIXED, IDS[:0]), "no token ids"),
]


@pytest.mark.parametrize(("asked", "given", "said"), REFUSED)
def test_what_is_no_load_is_refused(asked, given, said):
    with pytest.raises(UsageError, match=said):
        asked(*given)


@given(SETTINGS, st.integers(1, 200), st.integers(0, 9))
def test_arrivals_rise_and_have_their_rate(arriving, n, seed):
    due = arriving.due_ns(n, seed)
    if arriving.kind == CLOSED:
        assert due is None and arriving.in_flight == arriving.value
        return
    assert due.shape == (n,) and (np.diff(due) >= 0).all() and due[0] >= 0
    assert (due == arriving.due_ns(n, seed)).all() and arriving.in_flight is None
    if arriving.kind == CONSTANT:
        assert np.allclose(np.diff(due), 1e9 / arriving.value, atol=1)


def test_poisson_gaps_are_exponential():
    gaps = np.diff(Arrivals(POISSON, 20.0).due_ns(20_000, 3)) / 1e9
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.03)
    assert np.mean(gaps > 1 / 20) == pytest.approx(math.exp(-1), rel=0.03)


def test_lists_of_rates_and_concurrencies():
    found = [*arrivals(POISSON, "1,2.5,inf", "8,inf"), *arrivals(CONSTANT, "4", None)]
    wanted = ["rate=1", "rate=2.5", "rate=inf", "concurrency=8", "rate=4 constant", "rate=inf"]
    assert [a.name for a in [*found, *arrivals(POISSON, None, None)]] == wanted


@given(st.integers(0, 40), st.integers(0, 5), st.integers(0, 5))
def test_prompts_have_their_length_beginning_and_tokens(n_shared, seed, row):
    load, other = (
        draw(Arrivals(CLOSED, 2), 4, lengths("-p", "rng-1-40"), FIXED, IDS, n_shared=n_shared,
             seed=seed, row=of)
        for of in (row, row + 1)
    )  # fmt: skip
    prompts = [load.prompt(i) for i in range(load.n)]
    assert [len(p) for p in prompts] == load.n_prompt.tolist()
    assert all(np.isin(p, IDS).all() and p.dtype == np.int32 for p in prompts)
    for one, next_one in itertools.pairwise(prompts):
        both = min(n_shared, len(one), len(next_one))
        assert (one[:both] == next_one[:both]).all()
        if min(len(one), len(next_one)) > n_shared + 5:
            assert (one[n_shared : n_shared + 5] != next_one[n_shared : n_shared + 5]).any()
    assert (load.n_prompt == other.n_prompt).all(), "settings differ in their prompts alone"
    for i, prompt in enumerate(prompts):
        for part in (slice(0, n_shared), slice(n_shared, None)):
            assert len(prompt[part]) < 4 or (prompt[part] != other.prompt(i)[part]).any()


@given(
    SETTINGS, st.integers(1, 60), st.integers(1, 4), st.lists(st.integers(0, 10**9), max_size=200)
)
@example(Arrivals(CLOSED, 3), 12, 2, [])
def test_each_request_starts_once_and_not_before_it_is_due(arriving, n, parts, steps):
    load = draw(arriving, n, FIXED, FIXED, IDS)
    due, closed = load.due_ns(), arriving.kind == CLOSED
    started: list[int] = []
    for part in range(parts):
        starts, now, in_flight = Starts(due, load, part, parts), 0, 0
        share = len(range(part, int(arriving.value), parts)) if closed else n
        for step in [*steps, *[10**12] * (n + 1)]:
            now += step
            for request, at in starts.due(now):
                assert at <= now and request % parts == part
                assert due is None or at == due[request]
                started.append(request)
                in_flight += 1
            assert in_flight <= share
            if in_flight:
                in_flight -= 1
                starts.ended(now)
        if share:
            assert starts.n_left == 0 and starts.next_ns is None
    if not closed or arriving.value >= parts:
        assert sorted(started) == list(range(n))
