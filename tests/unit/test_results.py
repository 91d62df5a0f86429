"""Run folders: what is written is what is read, whole or not at all."""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from workbench.benchmarks.runs import provenance, results
from workbench.benchmarks.runs.results import SampleTable, load_run, new_run_folder, runs, write_run
from workbench.common.errors import UsageError


def a_run(run_id="r1", **changes):
    arm = {
        "name": "per_copy", "is_control": False, "toggles": {"sync": "per_copy"},
        "sync_mode": "per_copy", "program": {}, "counters": {},
    }  # fmt: skip
    return {
        "schema": 1, "run_id": run_id, "kind": "ab", "name": "a name", "status": "complete",
        "started": "2025-11-21T00:56:01Z", "duration_s": 1.5, "command": ["workbench", "ab"],
        "commit": {"hash": "0" * 40, "number": 3, "dirty": False}, "versions": {"python": "3.11"},
        "machine": {}, "model": {"name": "tiny", "quant": "Q4_0"}, "engine": {"device": "embedded"},
        "seed": 0, "tests": ["tg2"], "repetitions": 2, "arms": [arm], "result": {},
    } | changes  # fmt: skip


def some_samples(run_id="r1"):
    table = SampleTable(run_id)
    for repetition in range(2):
        for arm in ("a", "b")[:: 1 - 2 * repetition]:
            ns = np.array([3000 + repetition, 1000])
            table.add(arm, arm == "b", "pp3+tg1", repetition, ns, np.array([3, 1]))
    return table.frame()


def test_round_trip(tmp_path):
    samples = some_samples()
    folder = write_run(tmp_path / "deep" / "r1", a_run(), samples)
    assert sorted(p.name for p in folder.iterdir()) == ["run.json", "samples.parquet"]
    assert [p.name for p in folder.parent.iterdir()] == ["r1"]  # nothing left beside it
    again = load_run(folder)
    assert again.run == a_run()
    pd.testing.assert_frame_equal(again.samples, samples)
    assert pq.read_schema(folder / "samples.parquet").equals(results.SAMPLE_SCHEMA, False)


def test_percentiles_of_a_prompt_and_what_follows():
    """The prompt is the time to first token, and no token of its own."""
    table = results.percentiles(some_samples())
    assert table["arm"].tolist() == ["a", "b"] and table["is_control"].tolist() == [False, True]
    assert table["n_tokens"].tolist() == [2, 2] and table["ttft_us"].tolist() == [3.0005] * 2
    assert table["p50_us"].tolist() == table["p99_us"].tolist() == [1.0, 1.0]
    assert results.percentiles(some_samples().iloc[:0]).empty


def test_samples_keep_the_order_taken():
    s = some_samples()
    assert s["order"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert s["arm"].tolist() == list("aabbbbaa")
    assert s["token"].tolist() == [0, 1] * 4 and s["n_tokens"].tolist() == [3, 1] * 4
    rates = results.rates(s)
    assert rates["arm"].tolist() == list("abba") and rates["order"].tolist() == [0, 1, 2, 3]
    assert rates["tps"].tolist() == pytest.approx([4e9 / 4000] * 2 + [4e9 / 4001] * 2)


def test_a_table_continues_an_earlier_one():
    first = some_samples()
    table = SampleTable("r1", first)
    table.add("a", False, "tg1", 0, np.array([5]), np.array([1]))
    assert table.frame()["order"].tolist() == [*first["order"], 4]
    assert SampleTable("empty").frame().columns.tolist() == results.SAMPLE_SCHEMA.names


def test_writing_again_replaces_and_keeps_other_files(tmp_path):
    folder = write_run(tmp_path / "r1", a_run(), some_samples())
    (folder / "timeline.pftrace.gz").write_bytes(b"x")
    write_run(folder, a_run(status="interrupted"), some_samples().iloc[:2])
    again = load_run(folder)
    assert again.run["status"] == "interrupted" and len(again.samples) == 2
    assert (folder / "timeline.pftrace.gz").exists()


@pytest.mark.parametrize("key", list(results.RUN_KEYS))
def test_every_key_is_needed(tmp_path, key):
    run = a_run()
    del run[key]
    with pytest.raises(UsageError, match=key):
        write_run(tmp_path / "r1", run, some_samples())
    assert list(tmp_path.iterdir()) == []


def test_the_docstring_lists_the_keys():
    for key in [*results.RUN_KEYS, *results.ARM_KEYS, *results.SAMPLE_SCHEMA.names]:
        assert key in results.__doc__


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(TypeError, match="does not belong"):
        write_run(tmp_path / "r1", a_run(result={"x": object()}), some_samples())
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write_run(tmp_path / "file" / "r1", a_run(), some_samples())
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_damaged_folders_are_refused_in_one_line(tmp_path):
    def damaged(name, change):
        folder = write_run(tmp_path / name, a_run(name), some_samples())
        change(folder)
        with pytest.raises(UsageError) as error:
            load_run(folder)
        assert name in str(error.value) and "\n" not in str(error.value)

    damaged("nothing", lambda f: (f / "run.json").unlink())
    damaged("no-samples", lambda f: (f / "samples.parquet").unlink())
    damaged("cut", lambda f: (f / "run.json").write_text("{"))
    damaged("list", lambda f: (f / "run.json").write_text("[]"))
    damaged("latin", lambda f: (f / "run.json").write_bytes(b'{"a": "\xff"}'))
    damaged("newer", lambda f: (f / "run.json").write_text(json.dumps(a_run(schema=2))))
    damaged("arms", lambda f: (f / "run.json").write_text(json.dumps(a_run(arms=[{}]))))
    damaged("parquet", lambda f: (f / "samples.parquet").write_bytes(b"PAR1"))


def test_runs_lists_what_is_there_and_says_what_is_not_readable(tmp_path):
    write_run(tmp_path / "b", a_run("b", started="2025-11-22T00:00:00Z"), some_samples("b"))
    write_run(tmp_path / "a", a_run("a"), some_samples("a"))
    write_run(tmp_path / "c", a_run("c"), some_samples("c"))
    (tmp_path / "c" / "run.json").write_text("{")
    for left in (f".workbench-{'0' * 16}", f".workbench-{'1' * 16}/inside"):
        write_run(tmp_path / left, a_run("d"), some_samples("d"))
    table = runs(tmp_path)
    assert table["run_id"].tolist() == ["c", "a", "b"]
    assert table["status"].tolist()[1:] == ["complete"] * 2
    assert table["status"][0].startswith("unreadable")
    assert table.loc[1, ["model", "device", "tests", "arms", "commit"]].tolist() == [
        "tiny Q4_0", "embedded", "tg2", "per_copy", "00000000",
    ]  # fmt: skip
    assert runs(tmp_path / "missing").empty


def test_new_folders_do_not_exist(tmp_path):
    first = new_run_folder(tmp_path, "sync=per_copy, x/../y")
    assert first.parent == tmp_path and not first.exists() and "/" not in first.name
    assert first.name.endswith("-sync-per_copy-x-..-y")
    first.mkdir()
    assert new_run_folder(tmp_path, "sync=per_copy, x/../y") != first


def test_provenance_is_json_and_complete():
    found = provenance.collect()
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {"command", "commit", "versions", "machine"}
    assert found["versions"]["numpy"] == np.__version__
    assert found["machine"]["cpu"]["usable_cores"] >= 1 and found["machine"]["cpu"]["name"]


def git(folder, *args):
    user = ("-c", "user.name=t", "-c", "user.email=t@t")
    subprocess.run(["git", "-C", folder, *user, *args], check=True, capture_output=True)


def test_commit_and_dirty_flag(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.common.checkout._SOURCE", tmp_path)
    unknown = {"hash": "unknown", "number": 0, "dirty": None}
    assert provenance.commit() == unknown  # no repository
    git(tmp_path, "init", "-q")
    assert provenance.commit() == unknown  # no commit yet
    recorded = tmp_path / "data" / "results" / "run.json"
    recorded.parent.mkdir(parents=True)
    for file in (tmp_path / "f", recorded):
        file.write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    recorded.unlink()  # as a run does with the folder that it writes anew
    clean = provenance.commit()
    assert len(clean["hash"]) == 40 and clean["number"] == 1 and clean["dirty"] is False
    (tmp_path / "f").write_text("2")
    assert provenance.commit()["dirty"] is True
    monkeypatch.setattr("workbench.common.checkout._SOURCE", tmp_path / "inside")
    (tmp_path / "inside").mkdir()
    assert provenance.commit() == unknown  # installed inside somebody else's checkout
