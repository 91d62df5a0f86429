"""What `serve-bench` prints: vLLM's table for each setting, a summary of several, and JSON.

The table has the lines, widths and blanks that `vllm bench serve` prints, so a program that reads
vLLM's table reads this one, too. After them come parts that vLLM does not have: the steady state
between ramp and drain, the engine's steps, and the cost of the client itself. JSON has the keys of
vLLM's result file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from workbench.benchmarks.runs.results import finite
from workbench.common.errors import UsageError
from workbench.common.nearest import choices
from workbench.common.tables import markdown
from workbench.traffic.bench import ServedRow, latency_label, table_of
from workbench.traffic.bench import points as points
from workbench.traffic.latency import METRICS, Figures
from workbench.traffic.load import CLOSED

FORMATS = ("table", "md", "json", "jsonl")
WIDTH, LABEL = 50, 40
_HEADERS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_WORDS = ("mean", "median", "p99")
_COUNTS = {
    "Successful requests:": "completed", "Failed requests:": "failed",
    "Maximum request concurrency:": "max_concurrency",
    "Request rate configured (RPS):": "request_rate",
    "Benchmark duration (s):": "duration", "Total input tokens:": "total_input_tokens",
    "Total generated tokens:": "total_output_tokens",
    "Request throughput (req/s):": "request_throughput",
    "Request goodput (req/s):": "request_goodput",
    "Output token throughput (tok/s):": "output_throughput",
    "Peak output token throughput (tok/s):": "max_output_tokens_per_s",
    "Peak concurrent requests:": "max_concurrent_requests",
    "Total token throughput (tok/s):": "total_token_throughput",
}  # fmt: skip
_STEADY = {
    "Steady from (s):": "begin_s", "Steady until (s):": "end_s",
    "Steady request throughput (req/s):": "request_throughput",
    "Steady output throughput (tok/s):": "output_throughput",
    "Steady mean TTFT (ms):": "mean_ttft_ms", "Steady mean TPOT (ms):": "mean_tpot_ms",
    "Steady P99 ITL (ms):": "p99_itl_ms", "Steady mean E2EL (ms):": "mean_e2el_ms",
}  # fmt: skip
_CLIENT = {
    "Mean client lag (ms):": "mean_lag_ms", "Max client lag (ms):": "max_lag_ms",
    "Tokens per chunk:": "tokens_per_chunk", "Client CPU per chunk (us):": "us_per_chunk",
    "Client CPU per request (us):": "us_per_request", "Busiest client (share of a core):": "busy",
}  # fmt: skip
_ENGINE = {
    "Steps:": "n_steps", "Tokens a step:": "tokens_per_step",
    "Sampling a step (ms):": "sampling_ms", "Sampling (share of the time):": "sampling_share",
}  # fmt: skip


def setting_fields(row: ServedRow) -> dict[str, Any]:
    """max_concurrency and request_rate as vLLM writes them: None and `inf` for no limit."""
    kind, value = row.setting
    closed = kind == CLOSED
    return {
        "max_concurrency": int(value) if closed else None,
        "request_rate": "inf" if closed or math.isinf(value) else float(value),
    }


def report(row: ServedRow) -> str:
    """vLLM's table, without a newline at its end. A figure that is not known has no line."""
    found = row.figures | row.client | setting_fields(row)
    found["request_rate"] = None if found["request_rate"] == "inf" else found["request_rate"]
    found["max_concurrent_requests"] = float(found["max_concurrent_requests"])  # vLLM writes 2.00
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_lines(_COUNTS, found)]
    for name in METRICS:
        keys = {latency_label(word, name): f"{word}_{name}_ms" for word in _WORDS}
        lines += _part(_HEADERS[name], keys, found)
    lines += _part("Steady State", _STEADY, row.figures["steady"])
    lines += _part("Engine", _ENGINE, step_figures(row))
    lines += _part("Client", _CLIENT, found)
    return "\n".join([*lines, "=" * WIDTH])


def step_figures(row: ServedRow) -> Figures:
    """The engine's mean step in a setting: n_steps, tokens_per_step, sampling_ms, and the share of
    sampling in all the time. Empty where the engine reports no counts."""
    counted = row.engine
    n = int(counted.get("n_steps", 0))
    if not n:
        return {}
    return {
        "n_steps": n,
        "tokens_per_step": (counted["n_prompt_tokens"] + counted["n_made_tokens"]) / n,
        "sampling_ms": 1e3 * counted["sampling_s"] / n,
        "sampling_share": counted["sampling_s"] / row.figures["duration"],
    }


def _part(header: str, keys: dict[str, str], found: Figures) -> list[str]:
    lines = list(_lines(keys, found))
    return [f"{header:-^{WIDTH}}", *lines] if lines else []


def _lines(keys: dict[str, str], found: Figures) -> Iterator[str]:
    for label, key in keys.items():
        value = found.get(key)
        if isinstance(value, int):
            yield f"{label:<{LABEL}} {value:<10}"
        elif value is not None and not math.isnan(value):
            yield f"{label:<{LABEL}} {value:<10.2f}"


def as_object(row: ServedRow) -> dict[str, Any]:
    """A row for JSON: the setting, vLLM's keys, and keys that only this client has."""
    begin = {"setting": row.setting.name, "num_prompts": row.n_requests}
    rest = {"client": row.client, "engine": dict(row.engine), "warnings": row.warnings}
    made: dict[str, Any] = finite(begin | setting_fields(row) | row.figures | rest)
    return made


def format_rows(rows: Sequence[ServedRow], wanted: str = "table", width: int | None = None) -> str:
    """Rows as text in one of FORMATS, ending in a newline; raises UsageError for another format.
    width: of the terminal."""
    check_format(wanted)
    objects = [as_object(row) for row in rows]
    if wanted == "json":
        return json.dumps(objects, indent=1) + "\n"
    if wanted == "jsonl":
        return "".join(json.dumps(each) + "\n" for each in objects)
    below = markdown(table_of(rows), width) + "\n"
    if wanted == "md":
        return below
    tables = [f"{row.setting.name}\n{report(row)}\n" for row in rows]
    return "\n".join([*tables, below] if len(rows) > 1 else tables)


def check_format(wanted: str) -> None:
    if wanted not in FORMATS:
        raise UsageError(f"-o {wanted!r}: {choices(wanted, FORMATS)}")
