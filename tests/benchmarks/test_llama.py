"""llama-bench's fields, units and formats, and a run that goes on, on a clock that is told."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3

import numpy as np
import pytest

from tests.benchmarks.fake_engine import Clock, FakeEngine
from workbench.benchmarks.llama.llama_bench import bench, workloads
from workbench.benchmarks.llama.llama_format import (
    FIELDS,
    FORMATS,
    SQL_TYPES,
    TOKEN_FIELDS,
    format_rows,
)
from workbench.benchmarks.runs.results import load_run
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.engine.engine import Engine

# what scripts/compare-llama-bench.py joins two sides on: none may be missing or null
KEY_PROPERTIES = [
    "cpu_info", "gpu_info", "backends", "n_gpu_layers", "n_cpu_moe", "tensor_buft_overrides",
    "model_filename", "model_type", "n_batch", "n_ubatch", "embeddings", "cpu_mask", "cpu_strict",
    "poll", "n_threads", "type_k", "type_v", "load_mode", "no_kv_offload", "split_mode", "main_gpu",
    "tensor_split", "flash_attn", "n_prompt", "n_gen", "n_depth", "fit_target", "fit_min_ctx",
    "build_commit", "test_time", "avg_ts",
]  # fmt: skip


def engine_of(monkeypatch, stop_at=None, **changes):
    """A step takes 1 ms a token and 1 us more each time."""
    clock = Clock().install(monkeypatch)
    engine = FakeEngine(clock, ns_of=lambda _, n, nth: 1_000_000 * n + 1000 * nth, **changes)
    engine.shared.stop_at, engine.shared.error = stop_at, KeyboardInterrupt()
    return engine


@pytest.fixture
def rows(monkeypatch):
    return bench(engine_of(monkeypatch), [16], [4], [0, 8], 3, pg=[(16, 4)], build="abcdef12")


def test_the_matrix_is_llama_benchs(monkeypatch, rows, tmp_path):
    names = [w.name for w in workloads([512, 0], [128], [0, 64], [(16, 4)])]
    assert names == [
        "pp512", "tg128", "pp16+tg4", "pp512@d64", "tg128@d64", "pp16+tg4@d64",
    ]  # fmt: skip
    engine = engine_of(monkeypatch, n_ctx=8)
    for refused, says in (
        (lambda: workloads([0], [0]), "no test"), (lambda: workloads([-1]), "-1 tokens"),
        (lambda: format_rows(rows, "xml"), ", ".join(FORMATS)),
        (lambda: bench(engine, [16]), "n_ctx"),
        (lambda: bench(engine, [4], repetitions=0), "repetitions"),
        (lambda: bench(engine, [4], [0], out=tmp_path), "exists"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            refused()


def test_values_and_units(monkeypatch, rows):
    values = rows[1].values()
    assert {name: type(v) for name, v in values.items()} == FIELDS and list(values) == list(FIELDS)
    ns, mean = rows[1].samples_ns, sum(rows[1].samples_ns) / 3
    assert values["avg_ns"] == sum(ns) // 3
    assert values["avg_ts"] == pytest.approx(sum(4e9 / t for t in ns) / 3)
    assert values["stddev_ns"] == int((sum((t - mean) ** 2 for t in ns) / 2) ** 0.5)
    assert values["build_commit"] == "abcdef12" and values["model_type"] == "llama 1B Q4_0"
    assert values["n_batch"] == values["n_ubatch"] == 16
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", values["test_time"])
    assert all(values[key] is not None for key in KEY_PROPERTIES)
    (row,) = bench(engine_of(monkeypatch), [], [2], repetitions=1)
    assert row.values()["stddev_ns"] == 0 and row.values()["stddev_ts"] == 0.0


def test_json_and_jsonl(rows):
    """compare-llama-bench.py drops keys of JSON that it does not know."""
    listed = json.loads(format_rows(rows, "json"))
    lines = [json.loads(line) for line in format_rows(rows, "jsonl").splitlines()]
    assert listed == lines and len(lines) == 6
    for entry, row in zip(lines, rows, strict=True):
        assert {k: entry[k] for k in FIELDS} == row.values() and set(KEY_PROPERTIES) <= set(FIELDS)
        assert entry["samples_ns"] == row.samples_ns and entry["samples_ts"] == row.samples_ts
        assert [sum(times) for times in entry["token_ns"]] == row.samples_ns
        assert entry["toggles"] == Toggles().to_dict()
        assert {name: entry[name] for name in TOKEN_FIELDS} == row.tokens()


def test_percentiles_of_single_tokens(rows):
    pp, tg, both = (row.tokens() for row in rows[:3])
    assert pp["p50_us"] is None and pp["ttft_us"] == np.median(rows[0].samples_ns) / 1e3
    every = np.concatenate([s.token_ns for s in rows[1].samples]) / 1e3
    assert [tg[f"p{p}_us"] for p in (50, 90, 99)] == np.percentile(every, [50, 90, 99]).tolist()
    assert tg["ttft_us"] == np.median([s.token_ns[0] for s in rows[1].samples]) / 1e3
    assert both["p99_us"] < 1200 < 16_000 < both["ttft_us"]  # the prompt is no single token


def test_csv_and_sql_load(rows):
    """SQLite takes the table that the script reads, twice over, with text and integer types."""
    text = format_rows(rows, "csv")
    assert text.splitlines()[0] == ",".join(FIELDS)  # the heading is not quoted, all else is
    assert text.splitlines()[1].count('"') == 2 * len(FIELDS)
    read = list(csv.DictReader(io.StringIO(text)))
    assert [r["n_gen"] for r in read] == ["0", "4", "4", "0", "4", "4"]
    assert read[0]["cpu_strict"] == "0"
    v, db = rows[1].values(), sqlite3.connect(":memory:")
    rows[0].fields["cpu_info"] = "O'Neill"
    for _ in range(2):
        db.executescript(format_rows(rows, "sql"))
    columns = [(name, kind) for _, name, kind, *_ in db.execute("PRAGMA table_info(llama_bench)")]
    assert columns == [(name, SQL_TYPES[kind]) for name, kind in FIELDS.items()]
    found = db.execute("SELECT cpu_info, n_gen, avg_ns, avg_ts FROM llama_bench").fetchall()
    assert len(found) == 12 and found[0][0] == "O'Neill"
    assert found[1][1:3] == (4, v["avg_ns"]) and found[1][3] == pytest.approx(v["avg_ts"])


def test_md_has_llama_benchs_table_and_one_of_tokens(rows):
    toggles, first, second, build = format_rows(rows, "md").split("\n\n")
    assert toggles == "toggles: everything off"
    head, rule, *body = first.splitlines()
    names = [cell.strip() for cell in head.strip("|").split("|")]
    assert names == ["model", "size", "params", "backend", "threads", "n_ubatch", "test", "t/s"]
    assert len({len(line) for line in (head, rule, *body)}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in body]
    assert [c[-2] for c in cells] == [
        "pp16", "tg4", "pp16+tg4", "pp16 @ d8", "tg4 @ d8", "pp16+tg4 @ d8",
    ]  # fmt: skip
    assert cells[0][:3] == ["llama 1B Q4_0", "724.79 MiB", "1.24 B"]
    v = rows[0].values()
    assert build == "build: abcdef12 (" + str(v["build_number"]) + ")\n"
    head, rule, *body = second.splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == [
        "test", "token p50 us", "p90 us", "p99 us", "first token us",
    ]  # fmt: skip
    assert body[0].split("|")[2].strip() == "-"  # a prompt has no single tokens
    assert float(body[1].split("|")[2].replace(",", "")) == round(rows[1].tokens()["p50_us"], 1)
    narrow = format_rows(rows, "md", 80)
    assert max(map(len, narrow.splitlines())) <= 80 and format_rows([], "md") == ""
    for text in (first, narrow):
        assert f"{v['avg_ts']:.2f} ± {v['stddev_ts']:.2f}" in text


def test_tables_tell_engines_apart_by_their_toggles(monkeypatch):
    clock = Clock().install(monkeypatch)
    engines = [FakeEngine(clock, Toggles(sync=sync)) for sync in ("per_copy", "packed")]
    rows = [row for engine in engines for row in bench(engine, [], [2], repetitions=1)]
    second = format_rows(rows, "md").split("\n\n")[2].splitlines()
    assert [cell.strip() for cell in second[0].strip("|").split("|")][:2] == ["sync", "test"]
    assert second[2].startswith("| per_copy ") and second[3].startswith("| packed ")
    alone = format_rows(bench(engines[1], [], [2], repetitions=1), "md")
    assert alone.startswith("toggles: sync=packed, all else off\n\n") and "| sync " not in alone


# resumed: 4 prompts and 2 tokens, 3 times each, behind warm-ups -----------------------------------


def cut(monkeypatch, out):
    with pytest.raises(KeyboardInterrupt):
        bench(engine_of(monkeypatch, 12), [4], [2], repetitions=3, out=out)
    return load_run(out)


def test_what_is_finished_is_kept_and_the_rest_is_measured(monkeypatch, tmp_path):
    before, seen, engine = cut(monkeypatch, tmp_path / "r"), [], engine_of(monkeypatch)
    assert before.run["status"] == "interrupted"
    how = {"out": tmp_path / "r", "resume": True}
    rows = bench(engine, [4], [2], repetitions=3, on_row=seen.append, **how)
    whole, n = load_run(tmp_path / "r"), len(before.samples)
    assert whole.run["status"] == "complete" and seen == rows
    assert 0 < n < len(whole.samples) and whole.samples.iloc[:n].equals(before.samples)
    counts = whole.samples.groupby("test")["repetition"].nunique()
    assert counts.to_dict() == {"pp4": 3, "tg2": 3}
    assert whole.samples["order"].is_monotonic_increasing
    for row in rows:  # and the rows are of all of them
        of = whole.samples[whole.samples["test"] == row.workload.name]
        assert row.samples_ns == of.groupby("repetition")["ns"].sum().tolist()
        assert all(s.token_ns.sum() == s.ns_total for s in row.samples)
    assert rows[0].values()["test_time"] == before.run["started"] == whole.run["started"]
    assert len(whole.run["result"]["sessions"]) == 2
    steps = [one.run["arms"][0]["counters"]["steps"] for one in (before, whole)]
    assert steps[1] == steps[0] + engine.counters["steps"]
    assert set(whole.run["arms"][0]["program"]) == {"pp4", "tg2"}
    again = engine_of(monkeypatch)  # finished: nothing is measured
    assert [row.samples_ns for row in bench(again, [4], [2], repetitions=3, **how)] == [
        row.samples_ns for row in rows
    ]
    assert again.shared.steps == 0
    more = bench(engine_of(monkeypatch), [4], [2], repetitions=5, **how)
    assert [len(row.samples) for row in more] == [5, 5]


@pytest.mark.parametrize(
    ("change", "of_engine", "key"),
    [
        ({"n_gen": [3]}, {}, "tests"), ({"seed": 1}, {}, "seed"),
        ({}, {"toggles": Toggles(sync="packed")}, "arms"), ({}, {"n_ctx": 300}, "engine"),
    ],
)  # fmt: skip
def test_only_the_same_bench_is_resumed(monkeypatch, tmp_path, change, of_engine, key):
    cut(monkeypatch, tmp_path / "r")
    before = {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()}
    same = {"n_prompt": [4], "n_gen": [2], "repetitions": 3, "out": tmp_path / "r"} | change
    with pytest.raises(UsageError, match=f"its {key} is"):
        bench(engine_of(monkeypatch, **of_engine), **same, resume=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()} == before


@pytest.mark.parametrize("device", ["embedded", "host"])
def test_rows_of_a_real_engine(tiny_model, tmp_path, device):
    path = tiny_model("tiny-qwen3", "Q8_0")
    with Engine.load(path, device=device, n_ctx=128, n_ubatch=32, toggles=Toggles()) as engine:
        rows = bench(engine, [40], [6], [0, 16], 2, pg=[(8, 4)], out=tmp_path / "r")
        n_params, nbytes = engine.model.n_params, sum(t.nbytes for t in engine.model.weights)
    for row in rows:
        values = row.values()
        assert values["avg_ts"] > 0 and len(row.samples_ns) == 2
        assert values["backends"] == {"embedded": "embedded", "host": "CPU"}[device]
        assert (values["model_n_params"], values["model_size"]) == (n_params, nbytes)
        assert values["model_type"].startswith("qwen3 ") and values["model_type"].endswith(" Q8_0")
        assert all(s.token_ns.sum() == s.ns_total for s in row.samples)
    assert all(format_rows(rows, fmt).endswith("\n") for fmt in FORMATS)
    run, samples = load_run(tmp_path / "r")[1:]
    assert run["status"] == "complete" and run["tests"] == [r.workload.name for r in rows]
    assert samples.groupby("test")["repetition"].nunique().eq(2).all() and len(rows) == 6
    assert run["arms"][0]["program"]["tg6"]["counts"]["launches"] > 0
