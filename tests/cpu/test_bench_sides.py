"""`bench -npl`: each row runs with the set of `best` for its number of sequences."""

from __future__ import annotations

import json

import pytest

import workbench as wb
from workbench.benchmarks.llama.batched import batched
from workbench.benchmarks.llama.llama_bench import bench
from workbench.config import presets


def row(value: str) -> dict:
    return {"value": value, "by": "made up", "runs": []}


@pytest.fixture(autouse=True)
def sets(monkeypatch):
    """Two sets that differ by the cache and by the way that programs are kept."""
    kept = {"sync": row("auto"), "graph_reuse": row("set_rows")}
    several = kept | {"kv_cache": row("per_sequence"), "skip_masked_kv": row("auto")}
    table = {"embedded": {"one": kept | {"plans": row("ours")}, "several": several}}
    monkeypatch.setattr(presets, "best_rows", lambda: table)


@pytest.fixture
def path(tiny_model):
    return tiny_model("tiny-llama", "Q8_0")


def test_each_row_has_the_set_for_its_number_of_sequences(path, tmp_path):
    seen = []
    with wb.Engine.load(path, device="embedded", n_ctx=1024, n_seqs=4, threads=1) as engine:
        rows = batched(engine, [8], [4], [1, 2, 4], 1, out=tmp_path / "run")
        for made in rows:
            own = wb.Toggles(**made.toggles)
            seen.append((made.workload.n_seqs, own.kv_cache, own.plans))
        with engine.variant(wb.Toggles(sync="auto")) as given:
            (made,) = batched(given, [8], [4], [1], 1)
            assert made.toggles == given.toggles.to_dict(), "toggles that are given stay"
    assert seen == [(1, "unified", "ours"), (2, "per_sequence", "off"), (4, "per_sequence", "off")]
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert {name: words.partition(" on ")[0] for name, words in run["result"]["sides"].items()} == {
        "pp8+tg4@b1": "best for one sequence", "pp8+tg4@b2": "best for several sequences",
        "pp8+tg4@b4": "best for several sequences",
    }  # fmt: skip
    assert run["arms"][0]["counters"]["plans_captured"] > 0, "of the variant, too"


def test_tests_of_one_sequence_have_the_set_for_one(path):
    with wb.Engine.load(path, device="embedded", n_ctx=256, n_seqs=4, threads=1) as engine:
        rows = bench(engine, [8], [4], repetitions=1)
        assert {made.toggles["plans"] for made in rows} == {"ours"}
        assert engine.toggles.plans == "off"


def test_a_change_beside_best_stays_in_every_row(path):
    wanted = wb.Toggles.preset("best", skip_masked_kv="off")
    with wb.Engine.load(
        path, device="embedded", n_ctx=1024, n_seqs=4, threads=1, toggles=wanted
    ) as engine:
        rows = batched(engine, [8], [4], [1, 4], 1)
    assert [made.toggles["skip_masked_kv"] for made in rows] == ["off", "off"]
    assert [made.toggles["kv_cache"] for made in rows] == ["unified", "per_sequence"]


def test_the_command_names_the_set_of_each_row(call, path):
    status, out, said = call(
        "bench", "-m", path, "--device", "embedded", "-npl", "1,4", "-p", 8, "-n", 4, "-r", 1,
        "-t", 1, "-o", "jsonl",
    )  # fmt: skip
    assert status == 0, said
    assert "toggles: best for several sequences on embedded: " in said
    assert "toggles: best for one sequence on embedded: " in said
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["toggles"]["kv_cache"] for row in rows] == ["unified", "per_sequence"]
