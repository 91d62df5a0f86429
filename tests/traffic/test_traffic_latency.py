"""Latencies and throughput, against a slow plain recomputation; and the fits over them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data.measure.random_lengths import Quadratic, asymptotic_ratio, quadratic
from workbench.common.errors import UsageError
from workbench.traffic.latency import Served, Slo, figures, good, latencies, warnings
from workbench.traffic.records import OK, REFUSED, TIMEOUT, UNFINISHED, RequestRecord

SLO = Slo.of("ttft:200ms,tpot:30ms,e2e:5s")


@st.composite
def records(draw):
    """Requests in any order, some of which fail, some of whose events have several tokens."""
    made = []
    for i in range(draw(st.integers(0, 12))):
        due = draw(st.integers(0, 10**9))
        sent = due + draw(st.integers(0, 10**6))
        status = draw(st.sampled_from([OK, OK, OK, REFUSED, TIMEOUT, UNFINISHED]))
        n = draw(st.integers(0 if status != OK else 1, 6)) if status != REFUSED else 0
        gaps = draw(st.lists(st.integers(1, 10**8), min_size=n, max_size=n))
        times = (sent + np.cumsum(np.array(gaps, np.int64))).astype(np.int64)
        end = int(times[-1] if n else sent) + draw(st.integers(0, 10**6))
        n_made = n + (draw(st.integers(0, 3)) if n else 0)
        n_prompt = draw(st.integers(1, 50))
        made.append(RequestRecord(i, n_prompt, 6, n_made, due, sent, end, times, status))
    return draw(st.permutations(made))


def same(a, b) -> bool:
    return a == pytest.approx(b, nan_ok=True, rel=1e-9, abs=1e-9)


def part(values: list[float], q: float) -> float:
    """Of sorted values the one at a share of them, between two where it lies between."""
    at = q * (len(values) - 1)
    low = math.floor(at)
    return values[low] + (at - low) * (values[min(low + 1, len(values) - 1)] - values[low])


@given(records())
@example([RequestRecord(0, 1, 6, 0, 0, 0, 0, np.array([], np.int64), REFUSED)])
def test_figures_are_those_of_a_plain_recomputation(given_records):
    found = figures(Served.of(given_records, True), SLO, parallel=4)
    ok = [r for r in given_records if r.status == OK]
    assert found["completed"] == len(ok)
    assert found["unfinished"] == sum(r.status == UNFINISHED for r in given_records)
    assert found["failed"] == sum(r.status in (REFUSED, TIMEOUT) for r in given_records)
    assert found["failed"] == sum(found["failures"].values())
    if not given_records:
        assert math.isnan(found["duration"]) and found["failures"] == {}
        return
    seconds = max(r.end_ns for r in given_records) / 1e9
    assert same(found["duration"], seconds)
    seconds = seconds or math.nan
    values = {"ttft": [], "tpot": [], "itl": [], "e2el": []}
    kept = 0
    for r in ok:
        ttft = (r.times_ns[0] - r.due_ns) / 1e6
        e2e = (r.times_ns[-1] - r.due_ns) / 1e6
        values["ttft"].append(ttft)
        values["e2el"].append(e2e)
        tpot = 0.0
        if r.n_made > 1:
            tpot = (e2e - ttft) / (r.n_made - 1)
            values["tpot"].append(tpot)
        values["itl"] += [(b - a) / 1e6 for a, b in zip(r.times_ns, r.times_ns[1:], strict=False)]
        kept += ttft <= 200 and tpot <= 30 and e2e <= 5000
    for name, some in values.items():
        some = sorted(some) or [math.nan]
        assert same(found[f"p99_{name}_ms"], part(some, 0.99))
        assert same(found[f"median_{name}_ms"], part(some, 0.5))
        assert same(found[f"mean_{name}_ms"], sum(some) / len(some))
    tokens, lags = sum(r.n_made for r in ok), [(r.sent_ns - r.due_ns) / 1e6 for r in given_records]
    together = [sum(r.sent_ns <= one.sent_ns < r.end_ns for r in given_records)
                for one in given_records]  # fmt: skip
    for name, wanted in {
        "output_throughput": tokens / seconds, "request_throughput": len(ok) / seconds,
        "total_token_throughput": (tokens + sum(r.n_prompt for r in ok)) / seconds,
        "request_goodput": kept / seconds, "mean_lag_ms": sum(lags) / len(lags),
        "max_lag_ms": max(lags), "max_concurrent_requests": max(together),
    }.items():  # fmt: skip
        assert same(found[name], wanted), name


@given(records())
def test_the_busiest_second_is_not_below_the_mean(given_records):
    found = figures(Served.of(given_records, True))
    ok = [r for r in given_records if r.status == OK]
    if not ok or max(r.end_ns for r in ok) == min(r.sent_ns for r in ok):
        assert math.isnan(found["max_output_tokens_per_s"])
        return
    begin, end = min(r.sent_ns for r in ok), max(r.end_ns for r in ok)
    tokens = [(t, r.n_made / len(r.times_ns)) for r in ok for t in r.times_ns]
    rates = [sum(n for t, n in tokens if a <= t < a + 10**9) for a in range(begin, end + 1, 10**9)]
    mean = sum(r.n_made for r in ok) / (end - begin) * 1e9
    assert same(found["max_output_tokens_per_s"], max(*rates, mean))
    assert found["max_output_tokens_per_s"] >= found["output_throughput"] * (1 - 1e-9)


@pytest.mark.parametrize(("end_s", "at_s", "peak"), [
    (0.5, [0.1, 0.2, 0.3, 0.5], 8.0),  # the mean of a run below a second
    (1.9, [0.1, 0.2, 0.3, 1.8], 3.0),  # the mean would be 2.1
    (1.5, [0.1, 0.2, 1.3, 1.5], 4 / 1.5),  # two of each second are below the mean
    (2.5, [0.1, 1.2, 2.3, 2.4], 2.0),  # what remains is a second of its own
    (2.0, [0.1, 1.2, 1.3, 2.0], 2.0),
])  # fmt: skip
def test_the_peak_is_that_of_whole_seconds_or_the_mean(end_s, at_s, peak):
    times = (np.array(at_s) * 1e9).astype(np.int64)
    one = RequestRecord(0, 1, 4, 4, 0, 0, int(end_s * 1e9), times, OK)
    assert same(figures(Served.of([one], True))["max_output_tokens_per_s"], peak)


@given(records())
def test_the_steady_window_is_between_ramp_and_drain(given_records):
    found = figures(Served.of(given_records, True))["steady"]
    going = [r for r in given_records if r.status in (OK, UNFINISHED)]
    ends = [r.end_ns for r in given_records if r.status == OK]
    firsts = [r.times_ns[0] for r in going if len(r.times_ns)]
    if not ends or max(firsts) <= min(ends):
        assert found["completed"] == 0 and math.isnan(found["output_throughput"])
        return
    begin, end = min(ends), max(firsts)
    tokens = sum((begin < t <= end) * r.n_made / len(r.times_ns) for r in going for t in r.times_ns)
    waits = [(r.times_ns[0] - r.due_ns) / 1e6 for r in given_records
             if r.status == OK and begin < r.due_ns <= end]  # fmt: skip
    assert same(found["begin_s"], begin / 1e9) and same(found["end_s"], end / 1e9)
    assert same(found["output_throughput"], tokens / (end - begin) * 1e9)
    assert found["completed"] == sum(begin < e <= end for e in ends)
    assert same(found["mean_ttft_ms"], sum(waits) / len(waits) if waits else math.nan)


@given(records())
def test_server_bench_s_figures_are_its_script_s(given_records):
    """The loop of scripts/server-bench.py, over records whose events have one token each."""
    given_records = [r._replace(n_made=len(r.times_ns)) for r in given_records]
    found = figures(Served.of(given_records, True), parallel=4)["server_bench"]
    ok = [r for r in given_records if r.status == OK]
    if not ok:
        assert found == {}
        return
    prompt_s, token_s, depth = [], [], 0
    for r in ok:
        prompt_s.append((r.times_ns[0] - r.sent_ns) / 1e9)
        token_s += (r.times_ns / 1e9).tolist()
        n = len(r.times_ns)
        depth += n * r.n_prompt + n * (n + 1) // 2
    last = max(token_s)
    assert same(found["requests_per_s"], len(ok) / last)
    assert same(found["mean_prompt_latency_ms"], 1e3 * sum(prompt_s) / len(prompt_s))
    assert same(found["prompt_tokens_per_s"], sum(r.n_prompt for r in ok) / sum(prompt_s))
    assert same(found["mean_depth"], depth / len(token_s))
    assert same(found["generated_tokens_per_s_and_slot"], len(token_s) / (4 * last))


def test_whole_answers_show_no_tokens():
    one = RequestRecord(0, 5, 4, 4, 10, 20, 10**9, np.array([10**9]), OK)
    served = Served.of([one], False)
    found = figures(served, Slo.of("e2e:2s"))
    assert math.isnan(found["mean_ttft_ms"]) and math.isnan(found["mean_itl_ms"])
    assert same(found["mean_e2el_ms"], (10**9 - 10) / 1e6) and same(found["request_goodput"], 1.0)
    assert good(latencies(served), Slo.of("ttft:9s")).tolist() == [False], "it is not known"


def test_objectives_have_units():
    assert Slo.of("e2el:1.5s,tpot:800us") == Slo(math.inf, 0.8, 1500.0)
    for text in ("", "ttft", "itl:3ms", "ttft:-1ms"):
        with pytest.raises(UsageError, match="is no objective"):
            Slo.of(text)


def test_what_a_reader_must_know_is_said():
    late = RequestRecord(0, 5, 4, 3, 0, 10**7, 3 * 10**8, np.array([10**8, 2 * 10**8]), OK)
    lost = late._replace(request=1, status=REFUSED, times_ns=np.empty(0, np.int64), n_made=0)
    said = warnings(figures(Served.of([late, lost], True)), 5, 0.9)
    wanted = ["1 request did not end well: 1 refused", "3 of 5 requests were not measured to",
              "1 answer shorter than", "10.00 ms late, 10% of TTFT", "busy 90% of"]  # fmt: skip
    assert all(words in line for words, line in zip(wanted, said, strict=True))
    fine = late._replace(sent_ns=10, n_made=4)
    assert warnings(figures(Served.of([fine], True)), 1, 0.1) == []


@given(
    st.floats(0, 100),
    st.floats(1e-4, 1e-1),
    st.floats(1e-8, 1e-5),
    st.lists(st.integers(100, 20_000), min_size=5, max_size=9, unique=True),
)
def test_a_quadratic_is_found_again(a, b, c, lengths):
    fit = quadratic(lengths, [a + b * x + c * x * x for x in lengths])
    assert all(fit(x) == pytest.approx(a + b * x + c * x * x, rel=1e-6) for x in lengths)


def test_the_limit_of_long_prompts_is_of_quadratic_parts():
    x = np.array([1000, 3000, 6000, 9500, 12000])
    noise = np.random.default_rng(1).normal(0, 0.5, 5)
    slow_s, fast_s = (5 + 2e-3 * x + c * x * x for c in (5e-7, 4e-7))
    slow, fast = quadratic(x, slow_s + noise), quadratic(x, fast_s)
    ratio, error = asymptotic_ratio(slow, fast)
    assert ratio == pytest.approx(1.25, abs=3 * error) and 0 < error < 0.2
    _, covariance = np.polyfit(x / 1e4, slow_s + noise, 2, cov=True)
    assert slow.errors[2] == pytest.approx(math.sqrt(covariance[0, 0]) / 1e8, rel=1e-6)
    flat = Quadratic(1.0, 1.0, -1e-9, (0, 0, 0))
    assert all(map(math.isnan, asymptotic_ratio(slow, flat)))
    with pytest.raises(UsageError, match="2 lengths fix no quadratic; measure three or more"):
        quadratic([1, 2, 2], [1, 2, 3])
    with pytest.raises(UsageError, match="finite"):
        quadratic([1, 2, 3], [1, 2, math.nan])
