"""llama-bench's and llama-batched-bench's fields, units and formats."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from dataclasses import replace

import numpy as np
import pytest

import workbench as wb
from tests.benchmarks.fake_engine import Clock, FakeEngine
from tests.profiles import long
from workbench.benchmarks.llama import batched
from workbench.benchmarks.llama.llama_bench import measured, workloads
from workbench.benchmarks.llama.llama_format import FIELDS, SQL_TYPES, TOKEN_FIELDS, format_rows
from workbench.benchmarks.runs import results
from workbench.benchmarks.workload import draw_tokens, parse, take_sample
from workbench.common.errors import UsageError
from workbench.config import Toggles, presets

# what scripts/compare-llama-bench.py joins two sides on: none may be missing or null
KEY_PROPERTIES = [
    "cpu_info", "gpu_info", "backends", "n_gpu_layers", "n_cpu_moe", "tensor_buft_overrides",
    "model_filename", "model_type", "n_batch", "n_ubatch", "embeddings", "cpu_mask", "cpu_strict",
    "poll", "n_threads", "type_k", "type_v", "load_mode", "no_kv_offload", "split_mode", "main_gpu",
    "tensor_split", "flash_attn", "n_prompt", "n_gen", "n_depth", "fit_target", "fit_min_ctx",
    "build_commit", "test_time", "avg_ts",
]  # fmt: skip
# llama-batched-bench's names, in its order (tools/batched-bench/batched-bench.cpp)
NAMES = [
    "n_kv_max", "n_batch", "n_ubatch", "flash_attn", "is_pp_shared", "n_gpu_layers", "n_threads",
    "n_threads_batch", "pp", "tg", "pl", "n_kv", "t_pp", "speed_pp", "t_tg", "speed_tg", "t",
    "speed",
]  # fmt: skip


def engine_of(monkeypatch, **changes):
    """A step takes 1 ms a token and 1 us more each time."""
    clock = Clock().install(monkeypatch)
    return FakeEngine(clock, ns_of=lambda _, n, nth: 1_000_000 * n + 1000 * nth, **changes)


@pytest.fixture
def rows(monkeypatch):
    tests = workloads([16], [4], [0, 8], [(16, 4)])
    return measured(engine_of(monkeypatch), tests, 3, build="abcdef12")


def test_the_matrix_is_llama_benchs(monkeypatch, tmp_path):
    names = [w.name for w in workloads([512, 0], [128], [0, 64], [(16, 4)])]
    assert names == [
        "pp512", "tg128", "pp16+tg4", "pp512@d64", "tg128@d64", "pp16+tg4@d64",
    ]  # fmt: skip
    engine = engine_of(monkeypatch, n_ctx=8)
    for refused, says in (
        (lambda: workloads([0], [0]), "no test"),
        (lambda: measured(engine, workloads([16]), 5), "n_ctx"),
        (lambda: measured(engine, workloads([4]), 0), "repetitions"),
        (lambda: measured(engine, workloads([4], [0]), 5, out=tmp_path), "exists"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            refused()


def test_values_and_units(monkeypatch, rows):
    """compare-llama-bench.py drops keys of JSON that it does not know."""
    values = rows[1].values()
    assert {name: type(v) for name, v in values.items()} == FIELDS and list(values) == list(FIELDS)
    ns, mean = rows[1].samples_ns, sum(rows[1].samples_ns) / 3
    assert values["avg_ns"] == sum(ns) // 3
    assert values["avg_ts"] == pytest.approx(sum(4e9 / t for t in ns) / 3)
    assert values["stddev_ns"] == int((sum((t - mean) ** 2 for t in ns) / 2) ** 0.5)
    assert values["build_commit"] == "abcdef12" and values["model_type"] == "llama 1B Q4_0"
    assert all(values[key] is not None for key in KEY_PROPERTIES)
    lines = [json.loads(line) for line in format_rows(rows, "jsonl").splitlines()]
    assert json.loads(format_rows(rows, "json")) == lines and len(lines) == 6
    for entry, row in zip(lines, rows, strict=True):
        assert {k: entry[k] for k in FIELDS} == row.values()
        assert [sum(times) for times in entry["token_ns"]] == row.samples_ns
        assert {name: entry[name] for name in TOKEN_FIELDS} == row.tokens()
    (row,) = measured(engine_of(monkeypatch), workloads([], [2]), 1)
    assert row.values()["stddev_ns"] == 0 and row.values()["stddev_ts"] == 0.0


@pytest.mark.parametrize(("device", "given", "said"), [
    ("embedded", -1, 3), ("embedded", 0, 0), ("embedded", 99, 99), ("host", -1, 0),
])  # fmt: skip
def test_all_layers_are_no_0(monkeypatch, device, given, said):
    """Two layers and the output."""
    engine = engine_of(monkeypatch)
    engine.device, engine.config = device, replace(engine.config, n_gpu_layers=given)
    (row,) = measured(engine, workloads([], [2]), 1)
    assert row.values()["n_gpu_layers"] == said and row.values()["n_batch"] == 16


def test_percentiles_are_of_single_tokens(rows):
    pp, tg, both = (row.tokens() for row in rows[:3])
    assert pp["p50_us"] is None and pp["ttft_us"] == np.median(rows[0].samples_ns) / 1e3
    every = np.concatenate([s.token_ns for s in rows[1].samples]) / 1e3
    assert [tg[f"p{p}_us"] for p in (50, 90, 99)] == np.percentile(every, [50, 90, 99]).tolist()
    assert both["p99_us"] < 1200 < 16_000 < both["ttft_us"]  # the prompt is no single token


def test_csv_and_sql_load(rows):
    """SQLite takes the table that the script reads, twice over, with text and integer types."""
    read = list(csv.DictReader(io.StringIO(format_rows(rows, "csv"))))
    assert list(read[0]) == list(FIELDS) and read[0]["cpu_strict"] == "0"
    assert [r["n_gen"] for r in read] == ["0", "4", "4", "0", "4", "4"]
    v, db = rows[1].values(), sqlite3.connect(":memory:")
    rows[0].fields["cpu_info"] = "O'Neill"
    for _ in range(2):
        db.executescript(format_rows(rows, "sql"))
    columns = [(name, kind) for _, name, kind, *_ in db.execute("PRAGMA table_info(llama_bench)")]
    assert columns == [(name, SQL_TYPES[kind]) for name, kind in FIELDS.items()]
    found = db.execute("SELECT cpu_info, n_gen, avg_ns FROM llama_bench").fetchall()
    assert len(found) == 12 and found[0][0] == "O'Neill" and found[1][1:] == (4, v["avg_ns"])
    v, narrow = rows[0].values(), format_rows(rows, "md", 80)
    assert max(map(len, narrow.splitlines())) <= 80 and narrow.startswith("toggles: everything off")
    assert f"{v['avg_ts']:.2f} ± {v['stddev_ts']:.2f}" in narrow and "| pp16+tg4 " in narrow


@pytest.fixture(scope="module")
def engine(tiny_model):
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=256, n_ubatch=16, n_seqs=20,
        threads=2, toggles=Toggles(graph_reuse="set_rows"),
    ) as made:  # fmt: skip
        yield made


@pytest.mark.parametrize("shared", [long(False), True])
def test_its_arithmetic_and_a_run(call, engine, tmp_path, shared):
    """A shared prompt is computed once."""
    status, text, said = call(
        "bench", "-m", engine.model.path, "--device", "embedded", "-p", "6,9", "-n", 3, "-r", 2,
        "-npl", "1,3,20", "-ub", 16, "-o", "jsonl", "--out", tmp_path / "run", *["-pps"] * shared,
    )  # fmt: skip
    rows = [json.loads(line) for line in text.splitlines()]
    assert status == 0 and len(rows) == 6 and f"pp9+tg3@{'s' if shared else 'b'}20: prompt " in said
    for row in rows:
        assert list(row)[: len(NAMES)] == NAMES and row["is_pp_shared"] == shared
        pp, tg, pl = row["pp"], row["tg"], row["pl"]
        prompts = pp if shared else pl * pp
        assert row["n_kv"] == prompts + pl * tg and row["n_kv_max"] == 2048
        assert row["t_pp"] == pytest.approx(np.mean(row["samples_t_pp"]))
        assert row["t"] == pytest.approx(row["t_pp"] + row["t_tg"])
        assert row["speed_pp"] == pytest.approx(prompts / row["t_pp"])
        assert row["speed_tg"] == pytest.approx(pl * tg / row["t_tg"])
        assert row["speed"] == pytest.approx(row["n_kv"] / row["t"])
        assert np.shape(row["step_ns"]) == (2, tg)
    run, letter = results.load_run(tmp_path / "run"), "s" if shared else "b"
    assert run.run["tests"] == [f"pp{p}+tg3@{letter}{n}" for p in (6, 9) for n in (1, 3, 20)]
    found = results.percentiles(run.samples).set_index("test")
    assert found.loc[f"pp6+tg3@{letter}20", "n_tokens"] == 6  # steps of two repetitions


@pytest.mark.parametrize("name", ["pp7+tg3@b3", "pp7+tg3@s3", "pp3+tg2@b20"])
def test_what_is_measured_is_what_a_user_does(engine, name):
    """The logits of the last token of the last sequence, prompts packed and a step of all; with
    more sequences than a step has tokens, too."""
    test = parse(name)
    tokens = draw_tokens(test, engine.model.n_vocab, 5, bos=1)
    sample = take_sample(engine, test, tokens)
    assert sample.token_n.tolist() == [test.n_prompt_tokens] + [test.n_seqs] * test.n_gen
    last, n, width = test.n_seqs - 1, test.n_prompt, test.n_seqs
    assert [engine.cache.length(s) for s in range(width)] == [n + test.n_gen] * width
    own = tokens.prompt[-n:] + tokens.gen[last::width]
    engine.reset()
    alone, found = engine.prefill(own)[0], sample.last_logits
    assert np.sum((alone - found) ** 2) < 1e-3 * np.sum(alone**2)


def test_what_does_not_fit_is_refused_in_one_line(call, engine):
    for given, said in (
        ("-npl 2,-3", "-3 sequences cannot be measured with several sequences; give 1 or more"),
        ("-npl 2 -d 16", "-npl goes with -p and -n alone; leave -d and -pg out"),
        ("-ub 16,16", "--n-ubatch has 16 twice; give each value once"),
        ("--sync packed,packed", "--sync has packed twice; give each value once"),
        ("-pg 4,4 -pg 4,4", "-pg has 4,4 twice; give each value once"),
        ("-npl many", "-npl 'many' is no list of whole numbers"),
        ("-pps", "-pps shares a prompt among sequences; give their numbers with -npl"),
    ):
        ask = ("bench", "-m", engine.model.path, "--device", "embedded", *given.split())
        status, out, err = call(*ask)
        (line,) = err.strip().splitlines()
        assert status == 2 and out == "" and said in line
    for given, said in (([9], [3], [3, 30]), "needs 360 KV cells"), (([3], [3], [21]), "n_seqs=20"):
        with pytest.raises(UsageError, match=said):
            batched.batched(engine, *given)


def test_each_row_has_the_best_set_for_its_sequences(call, engine, tmp_path, monkeypatch):
    """Sets that differ by the cache and by the way that programs are kept; a change that is given
    stays in every row."""

    def row(value: str) -> dict:
        return {"value": value, "by": "made up", "runs": []}

    kept = {"sync": row("auto"), "graph_reuse": row("set_rows")}
    several = kept | {"kv_cache": row("per_sequence"), "skip_masked_kv": row("auto")}
    table = {"embedded": {"one": kept | {"plans": row("ours")}, "several": several}}
    monkeypatch.setattr(presets, "best_rows", lambda: table)
    status, out, said = call(
        "bench", "-m", engine.model.path, "--device", "embedded", "-npl", "1,2,4", "-p", 8, "-n", 4,
        "-r", 1, "-t", 1, "-o", "jsonl", "--out", tmp_path / "run", "--skip-masked-kv", "off",
    )  # fmt: skip
    assert status == 0, said
    found = [json.loads(line)["toggles"] for line in out.splitlines()]
    assert [(t["kv_cache"], t["plans"], t["skip_masked_kv"]) for t in found] == [
        ("unified", "ours", "off"), ("per_sequence", "off", "off"), ("per_sequence", "off", "off"),
    ]  # fmt: skip
    assert said.count("toggles: ") == 1, "the engine's; a row says what its own engine has besides"
    own = {
        row.partition(":")[0]: row.partition(" (")[2] for row in said.splitlines() if "@b" in row
    }
    assert own["pp8+tg4@b1"] == "kv_cache=unified, plans=ours)" and own["pp8+tg4@b4"] == ""
    run = results.load_run(tmp_path / "run").run
    assert run["arms"][0]["counters"]["plans_captured"] > 0, "of the variant, too"


@pytest.mark.long
def test_toggles_take_lists_as_ubatches_do(call, engine):
    """A row for each combination; what a device refuses is refused before anything is measured."""
    ask = ("bench", "-m", engine.model.path, "--device", "embedded", "-r", 1, "-ub", "16,32")
    status, text, _ = call(
        *ask, "-p", 4, "-n", 0, "--sync", "per_copy,packed", "--fuse", "on", "-o", "jsonl"
    )
    rows = [json.loads(line) for line in text.splitlines()]
    assert status == 0
    assert [(row["n_ubatch"], row["toggles"]["sync"]) for row in rows] == [
        (16, "per_copy"), (16, "packed"), (32, "per_copy"), (32, "packed"),
    ]  # fmt: skip
    assert {row["toggles"]["fuse_qkv"] for row in rows} == {"on"}
    for npl in (("-n", 0), ("-npl", 2, "-n", 2)):
        table = call(*ask, "-p", 4, *npl, "--sync", "per_copy,packed")[1]
        assert "| sync " in table and table.count("| packed ") >= 2
    status, out, err = call(*ask, "-p", 4, "--pdl", "off,on")
    assert (status, out) == (1, "") and "cannot honour pdl=on" in err and "pp4" not in err
    status, _, err = call(*ask, "--sync", "packed,none")
    assert status == 2 and err.startswith("error: toggle sync='none' does not exist; ")
