"""Latencies and throughput of served requests, computed from the time of each token.

    due      sent        first token   token   token      last token   end
    |--lag---|                |--ITL-----|--ITL--|   ...      |          |
    |--------- TTFT ----------|--------- (n - 1) x TPOT ------|
    |------------------------ E2EL ---------------------------|

Latencies count from when a request was due, not from when the client sent it. Names and definitions
are vLLM's (`vllm/benchmarks/serve.py`), but the peak is never below the mean (`_busiest_second`).
Percentiles are linear, as NumPy's. An answer that is not streamed has only an end, so TTFT, TPOT
and ITL are NaN. A figure of no requests is NaN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.common.errors import UsageError
from workbench.common.sizes import counted
from workbench.traffic.records import OK, UNFINISHED, RequestRecord

Figures = dict[str, Any]
METRICS = ("ttft", "tpot", "itl", "e2el")
COLUMNS = (
    "request", "n_prompt", "n_wanted", "n_made", "due_ns", "sent_ns", "end_ns", "status", "finish",
    "why",
)  # fmt: skip
LAG_SHARE = 0.05  # of TTFT: a client that is later than this is part of what it measures
BUSY_SHARE = 0.7  # of a core
_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


class Slo(NamedTuple):
    """A service-level objective: the latencies, ms, that a request must keep to count as
    goodput."""

    ttft: float = math.inf
    tpot: float = math.inf
    e2el: float = math.inf

    @classmethod
    def of(cls, text: str) -> Slo:
        """`ttft:200ms,tpot:30ms,e2e:5s`; raises UsageError for anything else."""
        given = {}
        for part in text.split(","):
            found = re.fullmatch(r"(ttft|tpot|e2el?):(\d+(?:\.\d+)?)(us|ms|s)", part.strip())
            if found is None:
                raise UsageError(
                    f"--slo {part!r} is no objective; write them as ttft:200ms,tpot:30ms,e2e:5s"
                )
            name = "e2el" if found[1] == "e2e" else found[1]
            given[name] = float(found[2]) * _UNITS_MS[found[3]]
        return cls(**given)


class Served(NamedTuple):
    """The requests of one setting.

    requests: a frame of COLUMNS, a row for each request.
    times: for each row, when its tokens came: ns, int64 (k,).
    """

    requests: pd.DataFrame
    times: list[np.ndarray]
    streamed: bool

    @classmethod
    def of(cls, records: Sequence[RequestRecord], streamed: bool) -> Served:
        """Makes it of records, and orders them by request number."""
        rows = sorted(records, key=lambda r: r.request)
        frame = pd.DataFrame([r._asdict() for r in rows], columns=list(COLUMNS))
        return cls(frame, [r.times_ns for r in rows], streamed)

    def only(self, wanted: np.ndarray) -> Served:
        """The rows for which wanted, (n,) bool, is true."""
        times = [t for t, one in zip(self.times, wanted, strict=True) if one]
        return self._replace(requests=self.requests[wanted], times=times)


def latencies(served: Served) -> pd.DataFrame:
    """ttft, tpot and e2el of each request that ended well, ms, float64; tpot is NaN for an answer
    of one token."""
    done = served.only((served.requests["status"] == OK).to_numpy())
    first = np.array([t[0] for t in done.times], float)
    last = np.array([t[-1] for t in done.times], float)
    due, n_made = (done.requests[c].to_numpy(float) for c in ("due_ns", "n_made"))
    gaps = np.where(n_made > 1, n_made - 1, math.nan)
    unknown = 1.0 if served.streamed else math.nan
    return pd.DataFrame(
        {
            "ttft": (first - due) / 1e6 * unknown,
            "tpot": (last - first) / gaps / 1e6 * unknown,
            "e2el": (last - due) / 1e6,
        }
    )


def gaps_ms(times: Sequence[np.ndarray]) -> np.ndarray:
    """Every gap between two streamed chunks of one answer, ms, float64."""
    return np.concatenate([np.empty(0), *(np.diff(t) / 1e6 for t in times)])


def spread(name: str, values_ms: np.ndarray) -> Figures:
    """Mean, median, standard deviation and P99 under vLLM's names; NaN left out."""
    known = values_ms[~np.isnan(values_ms)]
    found = (
        [known.mean(), np.median(known), known.std(), np.percentile(known, 99)]
        if len(known) else [math.nan] * 4
    )  # fmt: skip
    words = ("mean", "median", "std", "p99")
    return {f"{word}_{name}_ms": float(v) for word, v in zip(words, found, strict=True)}


def good(found: pd.DataFrame, slo: Slo) -> np.ndarray:
    """Which of `latencies` keep the objective, bool (n,). An answer of one token has a TPOT of 0.
    An unknown latency does not keep the objective."""
    known = found.fillna({"tpot": 0.0})
    kept = np.ones(len(found), bool)
    for name, limit in slo._asdict().items():
        if limit < math.inf:
            kept &= (known[name] <= limit).to_numpy()
    return kept


def peak(begins: np.ndarray, ends: np.ndarray) -> int:
    """The greatest number of intervals [begin, end) that share a moment."""
    at = np.concatenate([begins, ends])
    step = np.concatenate([np.ones(len(begins), int), -np.ones(len(ends), int)])
    order = np.lexsort((step, at))  # at one moment the ends are first
    return int(np.cumsum(step[order]).max(initial=0))


def figures(served: Served, slo: Slo | None = None, parallel: int | None = None) -> Figures:
    """All figures of a setting, by vLLM's names where it has them; s, ms and tokens.

    Throughput counts requests that ended well, over all the time. `steady` has the figures between
    ramp and drain: read them where the measuring was cut short. `server_bench` has the figures of
    llama.cpp's script.
    parallel: how many requests the server serves at once, for the speed of a slot.
    """
    rows = served.requests
    ok = (rows["status"] == OK).to_numpy()
    done, found = served.only(ok), latencies(served)
    seconds = float(rows["end_ns"].max()) / 1e9 if len(rows) else math.nan
    span = seconds or math.nan  # where all requests are refused at once, no rate is known
    n_in, n_out = int(done.requests["n_prompt"].sum()), int(done.requests["n_made"].sum())
    n_chunks = sum(map(len, done.times))
    failures = rows["status"][~ok & (rows["status"] != UNFINISHED)].value_counts()
    lag = (rows["sent_ns"] - rows["due_ns"]).to_numpy(float) / 1e6
    made: Figures = {
        "completed": int(ok.sum()),
        "failed": int(failures.sum()),
        "failures": {str(kind): int(n) for kind, n in sorted(failures.items())},
        "unfinished": int((rows["status"] == UNFINISHED).sum()),
        "short": int((done.requests["n_made"] < done.requests["n_wanted"]).sum()),
        "duration": seconds,
        "total_input_tokens": n_in,
        "total_output_tokens": n_out,
        "request_throughput": len(done.times) / span,
        "request_goodput": None if slo is None else float(good(found, slo).sum()) / span,
        "output_throughput": n_out / span,
        "total_token_throughput": (n_in + n_out) / span,
        "max_output_tokens_per_s": _busiest_second(done),
        "max_concurrent_requests": peak(rows["sent_ns"].to_numpy(), rows["end_ns"].to_numpy()),
        "tokens_per_chunk": n_out / n_chunks if n_chunks and served.streamed else math.nan,
        "mean_lag_ms": float(lag.mean()) if len(lag) else math.nan,
        "max_lag_ms": float(lag.max()) if len(lag) else math.nan,
    }
    made |= _spreads(found, gaps_ms(done.times) if served.streamed else np.empty(0))
    return made | {"steady": steady(served), "server_bench": server_bench(served, parallel)}


def _spreads(found: pd.DataFrame, itl: np.ndarray) -> Figures:
    values = {name: found[name].to_numpy() for name in found} | {"itl": itl}
    return {k: v for name in METRICS for k, v in spread(name, values[name]).items()}


def _busiest_second(done: Served) -> float:
    """The most tokens of a second, as vLLM counts them: in whole seconds from the first request's
    start, where what remains after the last is a second, too. Never below the mean of the run,
    which for a short run is above all of them. Tokens/s.
    """
    if not served_any(done):
        return math.nan
    begin, end = int(done.requests["sent_ns"].min()), int(done.requests["end_ns"].max())
    if end <= begin:
        return math.nan
    n_made = done.requests["n_made"]
    weights = [np.full(len(t), n / len(t)) for t, n in zip(done.times, n_made, strict=True)]
    second = (np.concatenate(done.times) - begin) // 10**9
    busiest = np.bincount(second, np.concatenate(weights)).max()
    return max(float(busiest), float(n_made.sum()) / (end - begin) * 1e9)


def served_any(done: Served) -> bool:
    return bool(sum(map(len, done.times)))


def steady(served: Served) -> Figures:
    """Figures of the steady state between ramp and drain: a window from the first end of a request
    to the last first token. After the window no request waits, and the batch drains.

    Throughput counts every token and end in the window. TTFT, TPOT and E2EL are of requests that
    were due in the window, ITL of gaps that ended in the window. All are NaN where the window is
    empty. `begin_s`, `end_s`: the window.
    """
    rows = served.requests
    going = served.only(rows["status"].isin([OK, UNFINISHED]).to_numpy())
    ok = served.only((rows["status"] == OK).to_numpy())
    firsts = [t[0] for t in going.times if len(t)] if served.streamed else rows["sent_ns"]
    begin = int(ok.requests["end_ns"].min()) if len(ok.requests) else 0
    end = int(max(firsts, default=0))
    if not len(ok.requests) or end <= begin:
        empty = np.full(0, math.nan)
        none = pd.DataFrame(dict.fromkeys(("ttft", "tpot", "e2el"), empty))
        rates = dict.fromkeys(("request_throughput", "output_throughput"), math.nan)
        return (
            {"begin_s": math.nan, "end_s": math.nan, "completed": 0} | rates | _spreads(none, empty)
        )

    def inside(at: np.ndarray) -> np.ndarray:
        return (begin < at) & (at <= end)

    n_tokens = sum(
        inside(t).sum() * (n / len(t))
        for t, n in zip(going.times, going.requests["n_made"], strict=True) if len(t)
    )  # fmt: skip
    itl = [np.diff(t)[inside(t[1:])] / 1e6 for t in ok.times] if served.streamed else []
    due = inside(ok.requests["due_ns"].to_numpy())
    seconds = (end - begin) / 1e9
    n_ended = int(inside(ok.requests["end_ns"].to_numpy()).sum())
    return {
        "begin_s": begin / 1e9,
        "end_s": end / 1e9,
        "completed": n_ended,
        "request_throughput": n_ended / seconds,
        "output_throughput": float(n_tokens) / seconds,
    } | _spreads(latencies(ok)[due], np.concatenate([np.empty(0), *itl]))


def server_bench(served: Served, parallel: int | None = None) -> Figures:
    """The figures that llama.cpp's scripts/server-bench.py prints, of requests that ended well.

    The script's prompt latency counts from when the request was sent. A token's depth is the length
    of its prompt plus the tokens before it. The script's duration ends with the last token.
    """
    done = served.only((served.requests["status"] == OK).to_numpy())
    if not served_any(done):
        return {}
    rows = done.requests
    n_prompt, n_made = rows["n_prompt"].to_numpy(), rows["n_made"].to_numpy()
    seconds = max(int(t[-1]) for t in done.times) / 1e9
    first = np.array([t[0] for t in done.times]) - rows["sent_ns"].to_numpy()
    waited = first.sum() / 1e9 if served.streamed else math.nan
    depth = (n_made * n_prompt + n_made * (n_made + 1) // 2).sum()
    speed = float(n_made.sum() / seconds)
    return {
        "duration_s": seconds,
        "requests_per_s": len(rows) / seconds,
        "total_prompt_tokens": int(n_prompt.sum()),
        "mean_prompt_tokens": float(n_prompt.mean()),
        "mean_prompt_latency_ms": float(waited / len(rows) * 1e3),
        "prompt_tokens_per_s": float(n_prompt.sum() / waited),
        "total_generated_tokens": int(n_made.sum()),
        "mean_depth": float(depth / n_made.sum()),
        "generated_tokens_per_s": speed,
        "generated_tokens_per_s_and_slot": speed / parallel if parallel else None,
    }


def warnings(found: Figures, n_requests: int, busy: float | None = None) -> list[str]:
    """Warnings about the figures, a sentence each.

    n_requests: how many requests were asked for.
    busy: the share of a core that the busiest client process took.
    """
    said = []
    if found["failed"]:
        kinds = ", ".join(f"{n} {kind}" for kind, n in found["failures"].items())
        said.append(f"{counted(found['failed'], 'request')} did not end well: {kinds}")
    ended = found["completed"] + found["failed"]
    if ended < n_requests:
        said.append(
            f"{n_requests - ended} of {n_requests} requests were not measured to their end: "
            "the row ended by its time (--max-seconds, most_s), or by Ctrl-C"
        )
    if found["short"]:
        said.append(f"{counted(found['short'], 'answer')} shorter than asked for")
    if found["mean_lag_ms"] > LAG_SHARE * found["mean_ttft_ms"]:
        share = found["mean_lag_ms"] / found["mean_ttft_ms"]
        said.append(
            f"the client started requests {found['mean_lag_ms']:.2f} ms late, {share:.0%} of TTFT; "
            "give it more --client-processes or a machine of its own"
        )
    if busy is not None and busy > BUSY_SHARE:
        said.append(
            f"a client process was busy {busy:.0%} of the time, so it may have read tokens late; "
            "give more --client-processes"
        )
    return said
