"""`workbench bench -npl`: llama-batched-bench's tests, columns and arithmetic."""

from __future__ import annotations

import csv
import io
import json
import sqlite3

import numpy as np
import pytest

import workbench as wb
from workbench.benchmarks.llama import batched
from workbench.benchmarks.runs import results
from workbench.benchmarks.workload import Workload, draw_tokens, parse, take_sample
from workbench.common.errors import UsageError
from workbench.config import Toggles

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


def bench(call, path, *given, device="embedded"):
    flags = ("--device", device, "-p", "6,9", "-n", 3, "-r", 2, "-npl", "1,3,20", "-ub", 16)
    return call("bench", "-m", path, *flags, *given)


def cells(text: str) -> list[list[str]]:
    return [[c.strip() for c in row.strip("|").split("|")] for row in text.splitlines()
            if row.startswith("|")]  # fmt: skip


@pytest.mark.parametrize("device", ["embedded", "host"])
def test_the_table_is_llama_batched_bench_s(call, monkeypatch, path, device):
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal has what all rows share above
    status, out, err = bench(call, path, device=device)
    assert status == 0
    head, _, *rows = cells(out)
    assert head == HEAD
    assert [row[:4] for row in rows] == [
        [str(p), "3", str(n), str(n * (p + 3))] for p in (6, 9) for n in (1, 3, 20)
    ]
    assert "n_kv_max = 2048, n_batch = 16, n_ubatch = 16, flash_attn = 1, is_pp_shared = 0" in out
    assert "pp9+tg3@b20: prompt " in err


def test_its_arithmetic(call, path):
    status, out, _ = bench(call, path, "-o", "jsonl")
    rows = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and len(rows) == 6
    for row in rows:
        assert list(row)[: len(NAMES)] == NAMES
        pp, tg, pl = row["pp"], row["tg"], row["pl"]
        assert row["n_kv"] == pl * (pp + tg) and row["n_kv_max"] == 2048
        assert row["t_pp"] == pytest.approx(np.mean(row["samples_t_pp"]))
        assert row["t_tg"] == pytest.approx(np.mean(row["samples_t_tg"]))
        assert row["t"] == pytest.approx(row["t_pp"] + row["t_tg"])
        assert row["speed_pp"] == pytest.approx(pl * pp / row["t_pp"])
        assert row["speed_tg"] == pytest.approx(pl * tg / row["t_tg"])
        assert row["speed"] == pytest.approx(row["n_kv"] / row["t"])
        assert np.shape(row["step_ns"]) == (2, tg)


def test_a_shared_prompt_is_computed_once(call, path):
    status, out, _ = bench(call, path, "-pps", "-o", "json")
    assert status == 0
    for row in json.loads(out):
        assert row["n_kv"] == row["pp"] + row["pl"] * row["tg"] and row["is_pp_shared"] == 1
        assert row["speed_pp"] == pytest.approx(row["pp"] / row["t_pp"])
        assert row["speed"] == pytest.approx(row["n_kv"] / row["t"])


def test_the_other_formats(call, path):
    _, out, _ = bench(call, path, "-o", "csv")
    head, *rows = csv.reader(io.StringIO(out))
    assert head == list(batched.FIELDS) and head[: len(NAMES)] == NAMES
    assert len(rows) == 6 and all(len(row) == len(head) for row in rows)
    _, out, _ = bench(call, path, "-o", "sql")
    base = sqlite3.connect(":memory:")
    base.executescript(out)
    found = base.execute("SELECT pp, pl FROM llama_batched_bench").fetchall()
    assert found == [(p, n) for p in (6, 9) for n in (1, 3, 20)]


def test_it_saves_a_run(call, path, tmp_path):
    status, _, _ = bench(call, path, "--out", tmp_path / "run")
    assert status == 0
    run = results.load_run(tmp_path / "run")
    assert run.run["kind"] == "bench" and run.run["engine"]["config"]["n_seqs"] == 20
    assert run.run["tests"] == [f"pp{p}+tg3@b{n}" for p in (6, 9) for n in (1, 3, 20)]
    rates = results.rates(run.samples)
    assert len(rates) == 12
    assert rates.groupby("test")["n_tokens"].first()["pp9+tg3@b3"] == 36
    found = results.percentiles(run.samples).set_index("test")
    assert found.loc["pp6+tg3@b20", "n_tokens"] == 6  # steps of two repetitions
    counts = run.run["arms"][0]["program"]["pp6+tg3@b3"]
    assert counts["n_tokens"] == 3


def test_what_is_measured_is_what_a_user_does(engine):
    """The logits of the last token of the last sequence, prompts packed and a step of all; with
    more sequences than a step has tokens, too."""
    for name in ("pp7+tg3@b3", "pp7+tg3@s3", "pp3+tg2@b20"):
        test = parse(name)
        tokens = draw_tokens(test, engine.model.n_vocab, 5, bos=1)
        sample = take_sample(engine, test, tokens)
        assert sample.token_n.tolist() == [test.n_prompt_tokens] + [test.n_seqs] * test.n_gen
        assert sample.ns_total == sample.token_ns.sum()
        last, n, width = test.n_seqs - 1, test.n_prompt, test.n_seqs
        assert [engine.cache.length(s) for s in range(width)] == [n + test.n_gen] * width
        own = tokens.prompt[-n:] + tokens.gen[last::width]
        engine.reset()
        alone = engine.prefill(own)
        assert wb_close(alone[0], sample.last_logits)


def test_the_null_device_takes_the_same_steps(path):
    toggles = Toggles(graph_reuse="set_rows")
    with wb.Engine.load(
        path, device="null", n_ctx=64, n_seqs=3, n_ubatch=8, toggles=toggles
    ) as engine:
        (row,) = batched.batched(engine, [5], [4], [3], 2)
        assert [s.token_n.tolist() for s in row.samples] == [[15, 3, 3, 3, 3]] * 2
        assert engine.n_past == 27


def wb_close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.sum((a - b) ** 2) < 1e-3 * np.sum(a**2)) and np.argmax(a) == np.argmax(b)


def test_it_can_be_compared_as_any_test(call, path):
    status, out, _ = call(
        "ab", "--model", path, "--device", "embedded", "--toggle", "sync=per_copy,copy_boundary",
        "--test", "tg2@b3", "--rounds", 5, "--n-ctx", 64,
    )  # fmt: skip
    assert status == 0 and "tg2@b3" in out and "exact" in out


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


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=lambda v: " ".join(v)[:30])
def test_what_makes_no_sense_is_refused_in_one_line(call, path, given, said):
    status, out, err = call("bench", "-m", path, "--device", "embedded", *given)
    assert status == 2 and out == ""
    (line,) = err.strip().splitlines()
    assert said in line


def test_what_does_not_fit_the_engine_is_refused(engine):
    with pytest.raises(UsageError, match="needs 360 KV cells, but the engine has n_ctx=256"):
        batched.batched(engine, [9], [3], [3, 30])
    with pytest.raises(UsageError, match="needs 21 sequences, but the engine has n_seqs=20"):
        batched.batched(engine, [3], [3], [21])
    assert [t.name for t in batched.workloads([3], [2], [1, 1, 4])] == ["pp3+tg2@b1", "pp3+tg2@b4"]
    assert batched.workloads([3], [2], [4], True) == [Workload(3, 2, 0, 4, True)]


def test_a_profile_is_of_one_sequence(call, path):
    status, _, err = call("profile", "--model", path, "--test", "pp4+tg2@b3")
    assert status == 2 and "pp4+tg2@b3 has several sequences, and a profile is of one" in err
