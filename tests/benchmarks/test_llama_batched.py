"""`workbench bench -npl`: llama-batched-bench's tests, columns, arithmetic and sets of `best`."""

from __future__ import annotations

import csv
import io
import json
import sqlite3

import numpy as np
import pytest

import workbench as wb
from workbench.benchmarks.llama import batched, llama_bench
from workbench.benchmarks.runs import results
from workbench.benchmarks.workload import Workload, draw_tokens, parse, take_sample
from workbench.common.errors import UsageError
from workbench.config import Toggles, presets

HEAD = ["PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s"]
# llama-batched-bench's names, in its order (tools/batched-bench/batched-bench.cpp)
NAMES = [
    "n_kv_max", "n_batch", "n_ubatch", "flash_attn", "is_pp_shared", "n_gpu_layers", "n_threads",
    "n_threads_batch", "pp", "tg", "pl", "n_kv", "t_pp", "speed_pp", "t_tg", "speed_tg", "t",
    "speed",
]  # fmt: skip


@pytest.fixture(scope="module")
def path(tiny_model):
    return tiny_model("tiny-llama", "Q8_0")


@pytest.fixture(scope="module")
def engine(path):
    with wb.Engine.load(
        path, device="embedded", n_ctx=256, n_ubatch=16, n_seqs=20, threads=2,
        toggles=Toggles(graph_reuse="set_rows"),
    ) as made:  # fmt: skip
        yield made


@pytest.fixture
def bench(call, path):
    flags = ("-p", "6,9", "-n", 3, "-r", 2, "-npl", "1,3,20", "-ub", 16)
    return lambda *given: call("bench", "-m", path, "--device", "embedded", *flags, *given)


def test_the_table_is_llama_batched_bench_s(bench, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal has what all rows share above
    status, out, err = bench()
    assert status == 0
    cells = [[c.strip() for c in row.strip("|").split("|")] for row in out.splitlines()
             if row.startswith("|")]  # fmt: skip
    head, _, *rows = cells
    assert head == HEAD
    assert [row[:4] for row in rows] == [
        [str(p), "3", str(n), str(n * (p + 3))] for p in (6, 9) for n in (1, 3, 20)
    ]
    assert "n_kv_max = 2048, n_batch = 16, n_ubatch = 16, flash_attn = 1, is_pp_shared = 0" in out
    assert "pp9+tg3@b20: prompt " in err


@pytest.mark.parametrize("shared", [False, True])
def test_its_arithmetic_and_a_run(bench, tmp_path, shared):
    """A shared prompt is computed once."""
    out = ("--out", tmp_path / "run")
    status, text, _ = bench("-o", "jsonl", *out, *["-pps"] * shared)
    rows = [json.loads(line) for line in text.splitlines()]
    assert status == 0 and len(rows) == 6
    for row in rows:
        assert list(row)[: len(NAMES)] == NAMES and row["is_pp_shared"] == shared
        pp, tg, pl = row["pp"], row["tg"], row["pl"]
        prompts = pp if shared else pl * pp
        assert row["n_kv"] == prompts + pl * tg and row["n_kv_max"] == 2048
        assert row["t_pp"] == pytest.approx(np.mean(row["samples_t_pp"]))
        assert row["t_tg"] == pytest.approx(np.mean(row["samples_t_tg"]))
        assert row["t"] == pytest.approx(row["t_pp"] + row["t_tg"])
        assert row["speed_pp"] == pytest.approx(prompts / row["t_pp"])
        assert row["speed_tg"] == pytest.approx(pl * tg / row["t_tg"])
        assert row["speed"] == pytest.approx(row["n_kv"] / row["t"])
        assert np.shape(row["step_ns"]) == (2, tg)
    run, letter = results.load_run(tmp_path / "run"), "s" if shared else "b"
    assert run.run["kind"] == "bench" and run.run["engine"]["config"]["n_seqs"] == 20
    assert run.run["tests"] == [f"pp{p}+tg3@{letter}{n}" for p in (6, 9) for n in (1, 3, 20)]
    found = results.percentiles(run.samples).set_index("test")
    assert found.loc[f"pp6+tg3@{letter}20", "n_tokens"] == 6  # steps of two repetitions


def test_csv_and_sql_have_the_same_columns(bench):
    head, *rows = csv.reader(io.StringIO(bench("-o", "csv")[1]))
    assert head == list(batched.FIELDS) and head[: len(NAMES)] == NAMES
    assert len(rows) == 6 and all(len(row) == len(head) for row in rows)
    base = sqlite3.connect(":memory:")
    base.executescript(bench("-o", "sql")[1])
    found = base.execute("SELECT pp, pl FROM llama_batched_bench").fetchall()
    assert found == [(p, n) for p in (6, 9) for n in (1, 3, 20)]


@pytest.mark.parametrize("name", ["pp7+tg3@b3", "pp7+tg3@s3", "pp3+tg2@b20"])
def test_what_is_measured_is_what_a_user_does(engine, name):
    """The logits of the last token of the last sequence, prompts packed and a step of all; with
    more sequences than a step has tokens, too."""
    test = parse(name)
    tokens = draw_tokens(test, engine.model.n_vocab, 5, bos=1)
    sample = take_sample(engine, test, tokens)
    assert sample.token_n.tolist() == [test.n_prompt_tokens] + [test.n_seqs] * test.n_gen
    assert sample.ns_total == sample.token_ns.sum()
    last, n, width = test.n_seqs - 1, test.n_prompt, test.n_seqs
    assert [engine.cache.length(s) for s in range(width)] == [n + test.n_gen] * width
    own = tokens.prompt[-n:] + tokens.gen[last::width]
    engine.reset()
    alone, found = engine.prefill(own)[0], sample.last_logits
    assert np.sum((alone - found) ** 2) < 1e-3 * np.sum(alone**2)
    assert np.argmax(alone) == np.argmax(found)


REFUSED = [
    (["-npl", "0"], "0 sequences cannot be measured with several sequences; give 1 or more"),
    (["-npl", "2,-3"], "-3 sequences cannot be measured with several sequences; give 1 or more"),
    (["-npl", "2", "-p", "0"], "0 tokens of a prompt cannot be measured with several sequences"),
    (["-npl", "2", "-n", "0"], "0 tokens to generate cannot be measured with several sequences"),
    (["-npl", "2", "-d", "16"], "-npl goes with -p and -n alone; leave -d and -pg out"),
    (["-npl", "2", "-pg", "4,2"], "-npl goes with -p and -n alone; leave -d and -pg out"),
    (["-npl", "many"], "-npl 'many' is no list of whole numbers"),
    (["-pps"], "-pps shares a prompt among sequences; give their numbers with -npl"),
    (["-npl", "99999999", "-p", "1", "-n", "1"], "n_seqs=99999999 must be at least 1, at most"),
]


def test_what_does_not_fit_is_refused_in_one_line(call, engine, path):
    for given, said in REFUSED:
        status, out, err = call("bench", "-m", path, "--device", "embedded", *given)
        (line,) = err.strip().splitlines()
        assert status == 2 and out == "" and said in line
    with pytest.raises(UsageError, match="needs 360 KV cells, but the engine has n_ctx=256"):
        batched.batched(engine, [9], [3], [3, 30])
    with pytest.raises(UsageError, match="needs 21 sequences, but the engine has n_seqs=20"):
        batched.batched(engine, [3], [3], [21])
    assert [t.name for t in batched.workloads([3], [2], [1, 1, 4])] == ["pp3+tg2@b1", "pp3+tg2@b4"]
    assert batched.workloads([3], [2], [4], True) == [Workload(3, 2, 0, 4, True)]


def test_each_row_has_the_best_set_for_its_sequences(call, path, tmp_path, monkeypatch):
    """Two sets that differ by the cache and by the way that programs are kept; a change that is
    given stays in every row."""

    def row(value: str) -> dict:
        return {"value": value, "by": "made up", "runs": []}

    kept = {"sync": row("auto"), "graph_reuse": row("set_rows")}
    several = kept | {"kv_cache": row("per_sequence"), "skip_masked_kv": row("auto")}
    table = {"embedded": {"one": kept | {"plans": row("ours")}, "several": several}}
    monkeypatch.setattr(presets, "best_rows", lambda: table)
    status, out, said = call(
        "bench", "-m", path, "--device", "embedded", "-npl", "1,2,4", "-p", 8, "-n", 4, "-r", 1,
        "-t", 1, "-o", "jsonl", "--out", tmp_path / "run", "--skip-masked-kv", "off",
    )  # fmt: skip
    assert status == 0, said
    for number in ("several sequences", "one sequence"):
        assert f"toggles: best for {number} with skip_masked_kv=off on embedded: " in said
    found = [json.loads(line)["toggles"] for line in out.splitlines()]
    assert [(t["kv_cache"], t["plans"], t["skip_masked_kv"]) for t in found] == [
        ("unified", "ours", "off"), ("per_sequence", "off", "off"), ("per_sequence", "off", "off"),
    ]  # fmt: skip
    run = results.load_run(tmp_path / "run").run
    assert list(run["result"]["sides"]) == ["pp8+tg4@b1", "pp8+tg4@b2", "pp8+tg4@b4"]
    assert run["arms"][0]["counters"]["plans_captured"] > 0, "of the variant, too"
    with wb.Engine.load(path, device="embedded", n_ctx=256, n_seqs=4, threads=1) as engine:
        rows = llama_bench.bench(engine, [8], [4], repetitions=1)
        assert {made.toggles["plans"] for made in rows} == {"ours"}
        with engine.variant(Toggles(sync="auto")) as given:
            (made,) = batched.batched(given, [8], [4], [1], 1)
            assert made.toggles == given.toggles.to_dict(), "toggles that are given stay"
