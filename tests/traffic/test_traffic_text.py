"""What serve-bench prints: vLLM's table to the letter (the peak is ours), the summary, JSON; points
of a picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from workbench.common.errors import UsageError
from workbench.traffic.bench import ServedRow, table_of
from workbench.traffic.bench_text import format_rows, points, report
from workbench.traffic.latency import Served, Slo, figures
from workbench.traffic.load import CLOSED, POISSON, Arrivals
from workbench.traffic.records import OK, REFUSED, RequestRecord

MS = 10**6
CLIENT = {"us_per_chunk": 20.0, "us_per_request": 150.5, "busy": 0.25, "processes": 1}
TABLE = Path(__file__).with_name("vllm_table.txt").read_text()  # with vLLM's blanks


def record(i: int, due_ms: int, *token_ms: float, **more) -> RequestRecord:
    times = np.array([int(t * MS) for t in token_ms], np.int64)
    made = RequestRecord(
        i, 10, 3, len(times), due_ms * MS, due_ms * MS + MS, int(times[-1]), times, OK, "length"
    )
    return made._replace(**more)


RECORDS = [
    record(0, 0, 100, 120, 150),
    record(1, 0, 110, 130, 160),
    record(2, 150, 250, 300, 325),
    record(3, 160, 161, status=REFUSED, n_made=0, times_ns=np.empty(0, np.int64)),
]
ROW = ServedRow(
    Arrivals(CLOSED, 2), 4, figures(Served.of(RECORDS, True), Slo.of("ttft:105ms"), 2), CLIENT
)


def test_the_table_is_vllm_s_to_the_letter():
    assert report(ROW) + "\n" == TABLE


def test_what_is_not_known_has_no_line():
    whole = [record(0, 0, 100), record(1, 0, 100)]
    text = report(ServedRow(Arrivals(POISSON, 2.5), 2, figures(Served.of(whole, False)), {}))
    assert "Request rate configured (RPS):           2.50      " in text
    for word in ("TTFT", "TPOT", "ITL", "goodput", "nan", "concurrency:", "CPU", "Steady"):
        assert word not in text, word


def test_several_settings_have_a_row_each():
    other = ROW._replace(setting=Arrivals(POISSON, float("inf")))
    table = table_of([ROW, other])
    assert table["failed"].tolist() == [1, 1] and "good/s" in table
    assert table["median TTFT ms"].tolist() == [ROW.figures["median_ttft_ms"]] * 2
    text = format_rows([ROW, other])
    frame = points([ROW, other], "ours", "p99_ttft_ms")
    assert len(frame) == 2 and frame.attrs["latency"] == "P99 TTFT (ms)"
    assert text.startswith("concurrency=2\n" + TABLE) and text.count(" Serving B") == 2
    assert "| rate=inf " in text and text.endswith("|\n")
    assert format_rows([ROW]) == "concurrency=2\n" + TABLE, "one setting needs no summary"
    narrow = format_rows([ROW, other], "md", 60)
    assert "| setting " in narrow and max(map(len, narrow.splitlines())) <= 60


def test_json_has_vllm_s_keys_and_no_nan():
    made = json.loads(format_rows([ROW], "jsonl"))
    assert [made] == json.loads(format_rows([ROW], "json"))
    assert made["max_concurrency"] == 2 and made["request_rate"] == "inf"
    assert made["completed"] == 3 and made["failures"] == {"refused": 1}
    assert made["p99_itl_ms"] == pytest.approx(49.0) and made["num_prompts"] == 4
    assert made["steady"]["mean_ttft_ms"] is None and "NaN" not in format_rows([ROW], "json")
    assert made["server_bench"]["mean_depth"] == pytest.approx(12.0)
    assert made["server_bench"]["generated_tokens_per_s_and_slot"] == pytest.approx(9 / 0.65)
    assert made["client"] == CLIENT and "1 refused" in made["warnings"][0]
    with pytest.raises(UsageError, match="-o 'csv': choose one of table, md, json, jsonl"):
        format_rows([ROW], "csv")
