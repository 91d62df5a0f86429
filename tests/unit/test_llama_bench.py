"""llama-bench's fields, units and formats, on an engine that computes nothing."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3

import numpy as np
import pytest
from fake_engine import Clock, FakeEngine

from workbench.benchmarks.compare.ab import ab
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

# what scripts/compare-llama-bench.py joins two sides on: none may be missing or null
KEY_PROPERTIES = [
    "cpu_info", "gpu_info", "backends", "n_gpu_layers", "n_cpu_moe", "tensor_buft_overrides",
    "model_filename", "model_type", "n_batch", "n_ubatch", "embeddings", "cpu_mask", "cpu_strict",
    "poll", "n_threads", "type_k", "type_v", "load_mode", "no_kv_offload", "split_mode", "main_gpu",
    "tensor_split", "flash_attn", "n_prompt", "n_gen", "n_depth", "fit_target", "fit_min_ctx",
    "build_commit", "test_time", "avg_ts",
]  # fmt: skip


@pytest.fixture
def rows(monkeypatch):
    clock = Clock().install(monkeypatch)
    engine = FakeEngine(clock, ns_of=lambda toggles, n, nth: 1_000_000 * n + 1000 * nth)
    return bench(engine, [16], [4], [0, 8], 3, pg=[(16, 4)], build="abcdef12")


def test_the_matrix_is_llama_benchs():
    names = [w.name for w in workloads([512, 0], [128], [0, 64], [(16, 4)])]
    assert names == [
        "pp512", "tg128", "pp16+tg4", "pp512@d64", "tg128@d64", "pp16+tg4@d64",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="no test"):
        workloads([0], [0])
    with pytest.raises(UsageError, match="-1 tokens"):
        workloads([-1])


def test_values_and_units(rows):
    assert [r.workload.name for r in rows][:3] == ["pp16", "tg4", "pp16+tg4"]
    values = rows[1].values()
    assert list(values) == list(FIELDS)
    assert {name: type(v) for name, v in values.items()} == FIELDS
    ns = rows[1].samples_ns
    assert values["avg_ns"] == sum(ns) // 3
    assert values["avg_ts"] == pytest.approx(sum(4e9 / t for t in ns) / 3)
    mean = sum(ns) / 3
    assert values["stddev_ns"] == int((sum((t - mean) ** 2 for t in ns) / 2) ** 0.5)
    assert values["build_commit"] == "abcdef12" and values["model_type"] == "llama 1B Q4_0"
    assert values["n_batch"] == values["n_ubatch"] == 16
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", values["test_time"])
    assert all(values[key] is not None for key in KEY_PROPERTIES)


def test_one_repetition_has_no_deviation(monkeypatch):
    (row,) = bench(FakeEngine(Clock().install(monkeypatch)), [], [2], repetitions=1)
    assert row.values()["stddev_ns"] == 0 and row.values()["stddev_ts"] == 0.0


def test_json_and_jsonl(rows):
    listed = json.loads(format_rows(rows, "json"))
    lines = [json.loads(line) for line in format_rows(rows, "jsonl").splitlines()]
    assert listed == lines and len(lines) == 6
    for entry, row in zip(lines, rows, strict=True):
        assert {k: entry[k] for k in FIELDS} == row.values()
        assert entry["samples_ns"] == row.samples_ns and entry["samples_ts"] == row.samples_ts
        assert [sum(times) for times in entry["token_ns"]] == row.samples_ns
        assert entry["toggles"] == Toggles().to_dict()
        assert entry["cpu_strict"] is False
        assert {name: entry[name] for name in TOKEN_FIELDS} == row.tokens()


def test_percentiles_of_single_tokens(rows):
    """A step takes 1,000 us and 1 us more each time: what each token took is known."""
    pp, tg, both = (row.tokens() for row in rows[:3])
    assert pp["p50_us"] is None and pp["ttft_us"] == np.median(rows[0].samples_ns) / 1e3
    every = np.concatenate([s.token_ns for s in rows[1].samples]) / 1e3
    assert [tg[f"p{p}_us"] for p in (50, 90, 99)] == np.percentile(every, [50, 90, 99]).tolist()
    assert tg["p50_us"] < tg["p90_us"] < tg["p99_us"] <= every.max()
    assert tg["ttft_us"] == np.median([s.token_ns[0] for s in rows[1].samples]) / 1e3
    assert both["p99_us"] < 1200 < 16_000 < both["ttft_us"]  # the prompt is no single token


def test_what_reads_llama_bench_reads_ours(rows):
    """As compare-llama-bench.py does: it drops keys of JSON that it does not know, and reads a
    table of SQLite into which real rows may go, too."""
    for entry in json.loads(format_rows(rows, "json")):
        for key in entry.keys() - set(FIELDS):
            del entry[key]
        assert set(KEY_PROPERTIES) <= entry.keys() and set(map(type, entry.values())) <= {
            str, int, float, bool,
        }  # fmt: skip
    assert not set(TOKEN_FIELDS) & set(format_rows(rows, "csv").splitlines()[0].split(","))
    assert not any(name in format_rows(rows, "sql") for name in TOKEN_FIELDS)


def test_csv(rows):
    text = format_rows(rows, "csv")
    assert text.splitlines()[0] == ",".join(FIELDS)  # the heading is not quoted, all else is
    assert text.splitlines()[1].count('"') == 2 * len(FIELDS)
    read = list(csv.DictReader(io.StringIO(text)))
    assert [r["n_gen"] for r in read] == ["0", "4", "4", "0", "4", "4"]
    assert float(read[0]["avg_ts"]) == pytest.approx(rows[0].values()["avg_ts"], abs=1e-6)
    assert read[0]["cpu_strict"] == "0"


def test_sql_loads(rows):
    """SQLite takes the table that the script reads, twice over, with text and integer types."""
    db = sqlite3.connect(":memory:")
    rows[0].fields["cpu_info"] = "O'Neill"
    db.executescript(format_rows(rows, "sql"))
    db.executescript(format_rows(rows, "sql"))
    columns = [(name, kind) for _, name, kind, *_ in db.execute("PRAGMA table_info(llama_bench)")]
    assert columns == [(name, SQL_TYPES[kind]) for name, kind in FIELDS.items()]
    found = db.execute("SELECT cpu_info, n_gen, avg_ns, avg_ts FROM llama_bench").fetchall()
    assert len(found) == 12 and found[0][0] == "O'Neill"
    v = rows[1].values()
    assert found[1][1:3] == (4, v["avg_ns"]) and found[1][3] == pytest.approx(v["avg_ts"])


def test_md(rows):
    text = format_rows(rows, "md")
    toggles, first, second, build = text.split("\n\n")
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
    assert cells[0][-1] == f"{v['avg_ts']:.2f} ± {v['stddev_ts']:.2f}"
    assert build == "build: abcdef12 (" + str(v["build_number"]) + ")\n"
    head, rule, *body = second.splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == [
        "test", "token p50 us", "p90 us", "p99 us", "first token us",
    ]  # fmt: skip
    assert len({len(line) for line in (head, rule, *body)}) == 1 and len(body) == len(rows)
    assert body[0].split("|")[2].strip() == "-"  # a prompt has no single tokens
    assert float(body[1].split("|")[2].replace(",", "")) == round(rows[1].tokens()["p50_us"], 1)
    assert format_rows([], "md") == ""


def test_md_shows_the_toggles_that_are_on(monkeypatch):
    engine = FakeEngine(Clock().install(monkeypatch), Toggles(sync="copy_boundary"))
    text = format_rows(bench(engine, [], [2], repetitions=1), "md")
    assert text.splitlines()[:2] == ["toggles: sync=copy_boundary, all else off", ""]
    assert "copy_stream" not in text and "| sync " not in text


def test_md_fits_a_terminal_and_keeps_every_figure(rows):
    whole = format_rows(rows, "md")
    assert max(map(len, whole.splitlines())) > 100
    assert format_rows(rows, "md", 200) == whole
    narrow = format_rows(rows, "md", 80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert re.search(r"\| +test \| +t/s \|\n\|-+:\|-+:\|\n", narrow), "figures to the right"
    assert "model: llama 1B Q4_0; size: 724.79 MiB; params: 1.24 B" in narrow
    for row in rows:
        v = row.values()
        assert f"{v['avg_ts']:.2f} ± {v['stddev_ts']:.2f}" in narrow


def test_the_table_of_tokens_tells_engines_apart(monkeypatch):
    clock = Clock().install(monkeypatch)
    engines = [FakeEngine(clock, Toggles(sync=sync)) for sync in ("per_copy", "packed")]
    rows = [row for engine in engines for row in bench(engine, [], [2], repetitions=1)]
    second = format_rows(rows, "md").split("\n\n")[2].splitlines()
    assert [cell.strip() for cell in second[0].strip("|").split("|")][:3] == [
        "sync", "test", "token p50 us",
    ]  # fmt: skip
    assert second[2].startswith("| per_copy ") and second[3].startswith("| packed ")


def test_many_repetitions_keep_no_logits(monkeypatch):
    (row,) = bench(FakeEngine(Clock().install(monkeypatch)), [], [2], repetitions=3)
    assert [len(s.last_logits) for s in row.samples] == [0, 0, 0]


def test_refusals(monkeypatch, rows, tmp_path):
    clock = Clock().install(monkeypatch)
    with pytest.raises(UsageError, match=", ".join(FORMATS)):
        format_rows(rows, "xml")
    with pytest.raises(UsageError, match="n_ctx"):
        bench(FakeEngine(clock, n_ctx=8), [16])
    with pytest.raises(UsageError, match="repetitions"):
        bench(FakeEngine(clock), [4], repetitions=0)
    with pytest.raises(UsageError, match="exists"):
        bench(FakeEngine(clock), [4], [0], out=tmp_path)


def test_a_run_folder_is_written_also_when_interrupted(monkeypatch, tmp_path):
    clock = Clock().install(monkeypatch)
    seen = []
    bench(FakeEngine(clock), [4], [2], repetitions=3, out=tmp_path / "whole", on_row=seen.append)
    whole = load_run(tmp_path / "whole")
    assert whole.run["status"] == "complete" and whole.run["kind"] == "bench" and len(seen) == 2
    assert whole.samples.groupby("test")["repetition"].nunique().to_dict() == {"pp4": 3, "tg2": 3}
    engine = FakeEngine(clock)
    engine.shared.stop_at, engine.shared.error = 12, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        bench(engine, [4], [2], repetitions=3, out=tmp_path / "cut")
    cut = load_run(tmp_path / "cut")
    assert cut.run["status"] == "interrupted"
    assert cut.samples.groupby("test")["repetition"].nunique().to_dict() == {"pp4": 3, "tg2": 1}


class TestResumed:
    """4 prompts and 2 tokens, 3 times each: 6 repetitions, behind warm-ups."""

    ASK = ([4], [2])

    def engine(self, monkeypatch, stop_at=None, **changes):
        ns_of = lambda toggles, n, nth: 1_000_000 * n + 1000 * nth  # noqa: E731
        engine = FakeEngine(Clock().install(monkeypatch), ns_of=ns_of, **changes)
        engine.shared.stop_at, engine.shared.error = stop_at, KeyboardInterrupt()
        return engine

    def cut(self, monkeypatch, out, stop_at=12, **how):
        with pytest.raises(KeyboardInterrupt):
            bench(self.engine(monkeypatch, stop_at), *self.ASK, repetitions=3, out=out, **how)
        return load_run(out)

    def test_what_is_finished_is_kept_and_the_rest_is_measured(self, monkeypatch, tmp_path):
        cut, seen = self.cut(monkeypatch, tmp_path / "r"), []
        engine = self.engine(monkeypatch)
        rows = bench(
            engine, *self.ASK, repetitions=3, out=tmp_path / "r", resume=True, on_row=seen.append
        )
        whole = load_run(tmp_path / "r")
        assert whole.run["status"] == "complete" and seen == rows
        n = len(cut.samples)
        assert 0 < n < len(whole.samples) and whole.samples.iloc[:n].equals(cut.samples)
        counts = whole.samples.groupby("test")["repetition"].nunique()
        assert (
            counts.to_dict() == {"pp4": 3, "tg2": 3}
            and whole.samples["order"].is_monotonic_increasing
        )
        for row in rows:  # and the rows are of all of them
            of = whole.samples[whole.samples["test"] == row.workload.name]
            assert row.samples_ns == of.groupby("repetition")["ns"].sum().tolist()
            assert all(s.token_ns.sum() == s.ns_total for s in row.samples)
        assert format_rows(rows, "json") and rows[0].values()["test_time"] == cut.run["started"]

    def test_a_resumed_run_says_when_it_was_measured(self, monkeypatch, tmp_path):
        cut = self.cut(monkeypatch, tmp_path / "r").run
        engine = self.engine(monkeypatch)
        bench(engine, *self.ASK, repetitions=3, out=tmp_path / "r", resume=True)
        run = load_run(tmp_path / "r").run
        assert [run[k] for k in ("run_id", "started")] == [cut[k] for k in ("run_id", "started")]
        assert run["duration_s"] >= cut["duration_s"] and len(run["result"]["sessions"]) == 2
        before, after = (one["arms"][0]["counters"]["steps"] for one in (cut, run))
        assert after == before + engine.counters["steps"]
        assert set(run["arms"][0]["program"]) == {"pp4", "tg2"} == set(run["result"]["warm_up"])

    def test_a_finished_run_is_not_measured_again_and_may_get_more(self, monkeypatch, tmp_path):
        first = bench(self.engine(monkeypatch), *self.ASK, repetitions=3, out=tmp_path / "r")
        engine = self.engine(monkeypatch)
        again = bench(engine, *self.ASK, repetitions=3, out=tmp_path / "r", resume=True)
        assert engine.shared.steps == 0
        assert [row.samples_ns for row in again] == [row.samples_ns for row in first]
        more = bench(
            self.engine(monkeypatch), *self.ASK, repetitions=5, out=tmp_path / "r", resume=True
        )
        assert [len(row.samples) for row in more] == [5, 5]
        assert load_run(tmp_path / "r").run["repetitions"] == 5

    def test_until_goes_on_to_its_width(self, monkeypatch, tmp_path):
        self.cut(monkeypatch, tmp_path / "r", until=0.0001)
        rows = bench(
            self.engine(monkeypatch), *self.ASK, repetitions=3, out=tmp_path / "r", resume=True,
            until=0.1,
        )  # fmt: skip
        run = load_run(tmp_path / "r").run
        assert [row.ended["stopped"] for row in rows] == ["width", "width"]
        assert run["result"]["until"]["tests"]["tg2"]["rounds"] == len(rows[1].samples) >= 10

    @pytest.mark.parametrize(
        ("change", "key"),
        [
            ({"n_gen": [3]}, "tests"), ({"seed": 1}, "seed"),
            ({"toggles": Toggles(sync="packed")}, "arms"), ({"n_ctx": 300}, "engine"),
        ],
    )  # fmt: skip
    def test_only_the_same_run_is_resumed(self, monkeypatch, tmp_path, change, key):
        self.cut(monkeypatch, tmp_path / "r")
        before = {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()}
        of_engine = {k: v for k, v in change.items() if k in ("toggles", "n_ctx")}
        of_bench = {k: v for k, v in change.items() if k not in of_engine}
        same = {"n_prompt": [4], "n_gen": [2], "repetitions": 3, "out": tmp_path / "r"} | of_bench
        with pytest.raises(UsageError, match=f"its {key} is"):
            bench(self.engine(monkeypatch, **of_engine), **same, resume=True)
        assert {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()} == before

    def test_without_a_run_to_resume_it_is_refused(self, monkeypatch, tmp_path):
        for out, says in ((tmp_path / "none", "is no run folder"), (None, "give it as out")):
            with pytest.raises(UsageError, match=says):
                bench(self.engine(monkeypatch), *self.ASK, out=out, resume=True)
        ab(
            self.engine(monkeypatch),
            "sync=per_copy,packed",
            tests="tg2",
            rounds=5,
            out=tmp_path / "a",
        )
        with pytest.raises(UsageError, match="its kind is ab, and now it would be bench"):
            bench(self.engine(monkeypatch), [], [2], out=tmp_path / "a", resume=True)
