"""Run folders: what is written is what is read, and says nothing of where it was made."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.benchmarks.made_runs import a_run
from workbench.benchmarks.runs import provenance, results
from workbench.benchmarks.runs.draft import new_run
from workbench.benchmarks.runs.nameless import (
    card_number,
    nameless_command,
    nameless_text,
    portable,
)
from workbench.benchmarks.runs.results import SampleTable, load_run, runs, write_run
from workbench.common.errors import UsageError


def some_samples(run_id="r1"):
    table = SampleTable(run_id)
    for repetition in range(2):
        for arm in ("a", "b")[:: 1 - 2 * repetition]:
            ns = np.array([3000 + repetition, 1000])
            table.add(arm, arm == "b", "pp3+tg1", repetition, ns, np.array([3, 1]))
    return table.frame()


def test_what_is_written_is_read(tmp_path):
    samples = some_samples()
    run = results.in_todays_words(a_run())
    folder = write_run(tmp_path / "deep" / "r1", run, samples)
    assert sorted(p.name for p in folder.iterdir()) == ["run.json", "samples.parquet"]
    assert [p.name for p in folder.parent.iterdir()] == ["r1"]  # nothing left beside it
    again = load_run(folder)
    assert again.run == run
    pd.testing.assert_frame_equal(again.samples, samples)
    assert pq.read_schema(folder / "samples.parquet").equals(results.SAMPLE_SCHEMA, False)


def test_samples_keep_the_order_taken_and_go_on():
    s = some_samples()
    assert s["order"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and s["arm"].tolist() == list("aabbbbaa")
    assert s["token"].tolist() == [0, 1] * 4 and s["n_tokens"].tolist() == [3, 1] * 4
    rates = results.rates(s)
    assert rates["arm"].tolist() == list("abba") and rates["order"].tolist() == [0, 1, 2, 3]
    assert rates["tps"].tolist() == pytest.approx([4e9 / 4000] * 2 + [4e9 / 4001] * 2)
    table = SampleTable("r1", s)
    table.add("a", False, "tg1", 0, np.array([5]), np.array([1]))
    assert table.frame()["order"].tolist() == [*s["order"], 4]
    assert SampleTable("empty").frame().columns.tolist() == results.SAMPLE_SCHEMA.names


def test_percentiles_of_a_prompt_and_what_follows():
    """The prompt is the time to first token, and no token of its own."""
    table = results.percentiles(some_samples())
    assert table["arm"].tolist() == ["a", "b"] and table["is_control"].tolist() == [False, True]
    assert table["n_tokens"].tolist() == [2, 2] and table["ttft_us"].tolist() == [3.0005] * 2
    assert table["p50_us"].tolist() == table["p99_us"].tolist() == [1.0, 1.0]
    assert results.percentiles(some_samples().iloc[:0]).empty


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    for key in results.RUN_KEYS:
        with pytest.raises(UsageError, match=key):
            write_run(tmp_path / "r1", {k: v for k, v in a_run().items() if k != key}, None)
    with pytest.raises(TypeError, match="does not belong"):
        write_run(tmp_path / "r1", a_run(result={"x": object()}), some_samples())
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write_run(tmp_path / "file" / "r1", a_run(), some_samples())
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


DAMAGED = {
    "no run": ("run.json", None), "no samples": ("samples.parquet", None),
    "cut": ("run.json", b"{"), "a list": ("run.json", b"[]"),
    "latin": ("run.json", b'{"a": "\xff"}'),
    "newer": ("run.json", json.dumps(a_run(schema=2)).encode()),
    "arms": ("run.json", json.dumps(a_run(arms=[{}])).encode()),
    "no parquet": ("samples.parquet", b"PAR1"),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_folder_is_refused_in_one_line(tmp_path, how):
    folder, (name, content) = write_run(tmp_path / "r", a_run(), some_samples()), DAMAGED[how]
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(UsageError) as error:
        load_run(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_runs_lists_what_is_there_and_what_is_not_readable(tmp_path):
    write_run(tmp_path / "b", a_run("b", started="2026-11-22T00:00:00Z"), some_samples("b"))
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
        "tiny Q8_0", "embedded", "tg2", "per_copy", "aaaaaaaa",
    ]  # fmt: skip
    assert runs(tmp_path / "missing").empty


# where it was made -------------------------------------------------------------------------------


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


WORDS = {
    "/home/me/bin/workbench": "workbench", "-m": "-m", "/home/me/models/x.gguf": "x.gguf",
    "../../me/models/x.gguf": "x.gguf", "--model=/home/me/a,/home/me/b.gguf": "--model=a,b.gguf",
    "-m/home/me/x.gguf": "-mx.gguf", "data/runs/first/": "first",
    "/home/jane doe/x y.gguf": "x y.gguf", "sync=per_copy,auto": "sync=per_copy,auto",
    "plans=off | plans=ours pdl=on": "plans=off | plans=ours pdl=on", "512,1024": "512,1024",
    "--url=http://127.0.0.1:8000/v1": "--url=http://127.0.0.1:8000/v1",
    "http://me:secret@gpu7.lab:8000/v1?key=secret": "http://host:8000/v1",
}  # fmt: skip
TEXTS = {
    "as asked": "as asked", "~me/models/x.gguf": "x.gguf",
    "no GPU: /usr/lib/x86_64/libcuda.so.1 is missing": "no GPU: libcuda.so.1 is missing",
    "16/32 t/s, and/or 1 / 2": "16/32 t/s, and/or 1 / 2",
    "meta-llama/Llama-3.2-1B": "meta-llama/Llama-3.2-1B",
    "at https://gpu7.lab:80/v1, twice": "at https://host:80/v1, twice",
    "file:///home/me/x.gguf": "x.gguf", "http://[::1]:80": "http://[::1]:80",
}  # fmt: skip


def test_words_and_text_lose_their_folders_and_hosts():
    assert {word: nameless_command([word])[0] for word in WORDS} == WORDS
    assert {said: nameless_text(said) for said in TEXTS} == TEXTS


def test_all_that_a_run_begins_with_is_portable():
    engine = {"device": "unknown", "url": "http://gpu7:1", "config": {"n_ctx": 5, "x": ("/a/b",)},
              "command": ["serve", "-m", "some/x.gguf"]}  # fmt: skip
    found = {
        "command": ["/opt/w", "-m", "some/x.gguf"],
        "engine": engine,
        "model": {"name": "/m/x"},
    }
    run = new_run("serve", "r", "r", found, [], [], 1, 0)
    assert run["command"] == ["w", "-m", "x.gguf"] and run["model"] == {"name": "x"}
    assert run["engine"] == {
        "device": "unknown", "url": "http://host:1", "config": {"n_ctx": 5, "x": ["b"]},
        "command": ["serve", "-m", "x.gguf"],
    }  # fmt: skip
    assert portable(None) is None and portable(1.5) == 1.5


class FakeNvml(SimpleNamespace):
    """An NVML whose every query answers 7, but for those that are named."""

    class NVMLError(Exception):
        pass

    def __getattr__(self, name):
        return 0 if name.startswith("NVML_") else lambda *_: 7


def test_a_gpu_has_no_serial_number_and_is_told_from_another(monkeypatch):
    def seen(uuid):
        nvml = FakeNvml(
            nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetUUID=lambda handle: uuid,
            nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=1),
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return provenance.gpus()

    uuid = "GPU-3c0f7a14-1b1f-4a6e-9d53-5f2d3c0a9b11"
    (one,), (same,), (other,) = seen(uuid), seen(uuid), seen(uuid.replace("3c", "4c"))
    assert one == same and one["card"] != other["card"] and one["card"] == card_number(uuid)
    assert not any(part in json.dumps(one) for part in uuid.split("-")[1:])
