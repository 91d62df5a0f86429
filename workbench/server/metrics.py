"""The counts of a front, in Prometheus' text format.

Names follow the servers of llama.cpp and vLLM. Counts are plain numbers, and become metrics when a
client asks for them. (An observation by `prometheus_client` takes a lock; one observation here may
count the tokens of a whole step.)
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from workbench.server.wire.messages import FAILED, Ended, Totals

if TYPE_CHECKING:
    from workbench.server.reply import Continuation

SHORT_S = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1,
           0.2, 0.5, 1.0)  # fmt: skip
LONG_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 600.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts of values, by upper bounds. One call may count a value several times."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def family(self, name: str, about: str) -> HistogramMetricFamily:
        at_most, buckets = 0, []
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            at_most += count
            buckets.append((str(bound), at_most))
        return HistogramMetricFamily(name, about, buckets=buckets, sum_value=self.total)


class Counted:
    """Counts of the requests of one front.

    first_token: times from a request's arrival to its first token.
    between_tokens: times between two steps that made tokens, once for each token that is no first.
    outcomes: ends by reason; `invalid`: requests that were malformed.
    n_made: tokens so far.
    """

    def __init__(self) -> None:
        self.first_token, self.whole = Histogram(LONG_S), Histogram(LONG_S)
        self.between_tokens, self.queued = Histogram(SHORT_S), Histogram(LONG_S)
        self.outcomes: Counter[str] = Counter()
        self.n_made = 0

    def ended(self, part: Continuation, ended: Ended) -> None:
        """Counts the end of a continuation."""
        timings = ended.timings
        error = part.reply.error
        failed = error is not None and error.status == 500
        self.outcomes[FAILED if failed else part.reason or ended.reason] += 1
        self.queued.add(timings.queued_s)
        self.whole.add(time.perf_counter() - part.reply.begun_at)


def _metrics(counted: Counted, totals: Totals | None, n_pending: int) -> Iterator[Metric]:
    value: float
    n_prompt, n_cached = (
        (0, 0) if totals is None else (totals.n_prompt_tokens, totals.n_cached_tokens)
    )
    for name, about, value in (
        ("prompt_tokens", "Tokens of prompts, computed or cached", n_prompt + n_cached),
        ("prompt_tokens_cached", "Tokens of prompts found in the cache", n_cached),
        ("tokens_predicted", "Tokens made", counted.n_made),
    ):
        yield CounterMetricFamily(f"workbench:{name}", about, value=value)
    by_reason = CounterMetricFamily(
        "workbench:requests", "Answers by how they ended", labels=["outcome"]
    )
    for outcome, n in sorted(counted.outcomes.items()):
        by_reason.add_metric([outcome], n)
    yield by_reason
    yield GaugeMetricFamily(
        "workbench:requests_pending", "Answers under way, of this front", n_pending
    )
    if totals is not None:
        for name, about, value in (
            ("engine_steps", "Steps of the engine", totals.n_steps),
            ("engine_seconds", "Seconds in steps of the engine", totals.step_s),
            ("sampling_seconds", "Seconds choosing tokens, each step once", totals.sampling_s),
            ("engine_tokens", "Tokens made for all fronts", totals.n_made_tokens),
        ):
            yield CounterMetricFamily(f"workbench:{name}", about, value=value)
        for name, about, value in (
            ("requests_processing", "Requests in slots", totals.n_running),
            ("requests_deferred", "Requests that wait for a slot", totals.n_waiting),
            ("kv_cache_cells_used", "Cells that running requests hold", totals.n_cells_used),
            ("kv_cache_cells_kept", "Cells of prefixes kept for reuse", totals.n_cells_kept),
            ("kv_cache_cells", "Cells of the cache", totals.n_cells),
            (
                "kv_cache_usage_ratio",
                "Share of the cells that running requests hold, 0 to 1",
                totals.n_cells_used / max(1, totals.n_cells),
            ),
        ):
            yield GaugeMetricFamily(f"workbench:{name}", about, value)
    for name, about, histogram in (
        ("time_to_first_token_seconds", "To the first token", counted.first_token),
        ("inter_token_latency_seconds", "Between tokens", counted.between_tokens),
        ("e2e_request_latency_seconds", "To the last token", counted.whole),
        ("request_queue_time_seconds", "Until a slot was free", counted.queued),
    ):
        yield histogram.family(f"workbench:{name}", about)


def text_of(counted: Counted, totals: Totals | None, n_pending: int) -> bytes:
    """All metrics of a front, as Prometheus reads them. totals: the engine's last report.
    n_pending: answers under way."""
    found = SimpleNamespace(collect=lambda: _metrics(counted, totals, n_pending))
    return generate_latest(found)  # a collector is whatever has `collect`
