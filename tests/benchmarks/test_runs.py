"""Run folders: what is written is what is read, and says nothing of where it was made; runs that a
Ctrl-C cut go on."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.benchmarks.fake_engine import N_VOCAB, SPEC, Clock, FakeEngine, interrupted, timed
from tests.benchmarks.made_runs import a_run
from workbench.benchmarks.compare.ab import ab
from workbench.benchmarks.llama.llama_bench import measured, workloads
from workbench.benchmarks.runs import provenance, results
from workbench.benchmarks.runs.draft import Draft, kept, new_arm, new_run
from workbench.benchmarks.runs.nameless import card_number, nameless_command, nameless_text
from workbench.benchmarks.runs.results import (
    ARM_KEYS,
    RUN_KEYS,
    Run,
    SampleTable,
    load_run,
    write_run,
)
from workbench.benchmarks.scores import perplexity as ppl
from workbench.benchmarks.scores.perplexity import perplexity
from workbench.benchmarks.scores.token_source import ask, sample
from workbench.common.errors import UsageError
from workbench.config import Toggles


def some_samples(run_id="r1"):
    table = SampleTable(run_id)
    for repetition in range(2):
        for arm in ("a", "b")[:: 1 - 2 * repetition]:
            ns = np.array([3000 + repetition, 1000])
            table.add(arm, arm == "b", "pp3+tg1", repetition, ns, np.array([3, 1]))
    return table.frame()


def test_what_is_written_is_read(tmp_path):
    """In the order taken; the prompt is the time to first token, and no token of its own."""
    s, run = some_samples(), results.in_todays_words(a_run())
    folder = write_run(tmp_path / "deep" / "r1", run, s)
    assert [p.name for p in folder.parent.iterdir()] == ["r1"]  # nothing left beside it
    again = load_run(folder)
    assert again.run == run
    pd.testing.assert_frame_equal(again.samples, s)
    assert pq.read_schema(folder / "samples.parquet").equals(results.SAMPLE_SCHEMA, False)
    assert s["order"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and s["arm"].tolist() == list("aabbbbaa")
    rates = results.rates(s)
    assert rates["tps"].tolist() == pytest.approx([4e9 / 4000] * 2 + [4e9 / 4001] * 2)
    table = SampleTable("r1", s)
    table.add("a", False, "tg1", 0, np.array([5]), np.array([1]))
    assert table.frame()["order"].tolist() == [*s["order"], 4]
    found = results.percentiles(s)
    assert found["arm"].tolist() == ["a", "b"] and found["is_control"].tolist() == [False, True]
    assert found["ttft_us"].tolist() == [3.0005] * 2 and found["p99_us"].tolist() == [1.0, 1.0]


def test_a_new_run_takes_no_other_runs_folder(tmp_path):
    run, s = a_run(), some_samples()
    folder = write_run(tmp_path / "r1", run, s, new=True)
    write_run(folder, run | {"status": "interrupted"}, s, new=True)  # of the same run
    with pytest.raises(UsageError, match="exists"):
        write_run(folder, run | {"started": "2020-01-01T00:00:00Z"}, s, new=True)
    assert load_run(folder).run["status"] == "interrupted"


DAMAGED = {
    "no run": ("run.json", None), "no samples": ("samples.parquet", None),
    "cut": ("run.json", b"{"), "a list": ("run.json", b"[]"),
    "latin": ("run.json", b'{"a": "\xff"}'),
    "newer": ("run.json", json.dumps(a_run(schema=2)).encode()),
    "arms": ("run.json", json.dumps(a_run(arms=[{}])).encode()),
    "no parquet": ("samples.parquet", b"PAR1"),
} | {
    f"{part}={value}": ("run.json", json.dumps(a_run(**{part: value})).encode())
    for part, value in [
        ("commit", {}), ("model", {}), ("engine", {"a": 1}), ("result", {}), ("arms", []),
        ("seed", -1), ("tests", [1]),
        *(("result", {"toggle": "", "answers": {}, "pace": pace})
          for pace in ([], {"tests": {}}, {"least_us": 1, "tests": {"tg4": 3}},
                       {"least_us": 1, "tests": {"tg4": ["a"]}},
                       {"least_us": 1, "tests": {"tg4": [0.0]}})),
    ]
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_folder_is_refused_in_one_line(tmp_path, how):
    folder, (name, content) = write_run(tmp_path / "r", a_run(), some_samples()), DAMAGED[how]
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(UsageError) as error:
        load_run(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
    listed = results.runs(tmp_path)["status"].tolist()
    assert all(s.startswith(("unreadable: ", "newer schema: ")) for s in listed)
    assert len(listed) == (folder / "run.json").exists()
    with pytest.raises(TypeError, match="does not belong"):
        made = a_run()
        write_run(tmp_path / "other", made | {"result": made["result"] | {"x": object()}},
                  some_samples())  # fmt: skip
    assert [*tmp_path.iterdir()] == [folder], "what cannot be written leaves nothing"


def test_runs_are_listed_and_what_is_not_readable(tmp_path):
    for name, day in (("b", 22), ("a", 21), ("c", 21), (f".workbench-{'0' * 16}", 21)):
        write_run(tmp_path / name, a_run(name, started=f"2026-11-{day}T00"), some_samples(name))
    (tmp_path / "c" / "run.json").write_text("{")
    table = results.runs(tmp_path)
    assert table["run_id"].tolist() == ["c", "a", "b"]
    assert table["status"][0].startswith("unreadable") and table["status"][1] == "complete"
    assert results.runs(tmp_path / "missing").empty


def test_older_runs_are_read_in_todays_words():
    """What a run leaves unsaid is what engines did then; a run of kernels had no engine."""
    toggles = {k: v for k, v in Toggles().to_dict().items() if k != "step_wait"}
    said = {"device": "embedded", "device_description": "embedded device, 2 lanes, A CPU"}
    engine = said | {"config": {"n_ctx": 512, "n_ubatch": 64}, "waiting": "idle lanes yield"}
    old = a_run(kind="perplexity", arms=[new_arm("engine", toggles)], engine=engine)
    new = results.in_todays_words(json.loads(json.dumps(old)))
    assert new["arms"][0]["toggles"] == toggles | {"step_wait": "every"}
    assert new["engine"]["config"]["expand"] == "f16" and new["result"]["n_ubatch"] == 64
    assert new["engine"]["device_description"] == "embedded device, 2 workers, A CPU"
    assert results.in_todays_words(json.loads(json.dumps(new))) == new
    kernels = a_run(kind="kernels", arms=[new_arm("plain", {"pdl": "off"})])
    assert results.in_todays_words(json.loads(json.dumps(kernels))) == kernels


def test_commit_and_dirty_flag(tmp_path, monkeypatch):
    def git(*args):
        user = ("-c", "user.name=t", "-c", "user.email=t@t")
        subprocess.run(["git", "-C", tmp_path, *user, *args], check=True, capture_output=True)

    monkeypatch.setattr("workbench.common.checkout._SOURCE", tmp_path)
    unknown = {"hash": "unknown", "number": 0, "dirty": None}
    git("init", "-q")
    recorded = tmp_path / "data" / "results" / "run.json"
    recorded.parent.mkdir(parents=True)
    for file in (tmp_path / "f", recorded):
        file.write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    recorded.unlink()  # as a run does with the folder that it writes anew
    clean = provenance.commit()
    assert len(clean["hash"]) == 40 and clean["number"] == 1 and clean["dirty"] is False
    (tmp_path / "f").write_text("2")
    assert provenance.commit()["dirty"] is True
    monkeypatch.setattr("workbench.common.checkout._SOURCE", tmp_path / "inside")
    (tmp_path / "inside").mkdir()
    assert provenance.commit() == unknown  # installed inside somebody else's checkout


WORDS = {
    "/home/me/bin/workbench": "workbench", "-m": "-m", "../../me/models/x.gguf": "x.gguf",
    "--model=/home/me/a,/home/me/b.gguf": "--model=a,b.gguf", "-m/home/me/x.gguf": "-mx.gguf",
    "data/runs/first/": "first", "/home/jane doe/x y.gguf": "x y.gguf", "512,1024": "512,1024",
    "plans=off | plans=ours pdl=on": "plans=off | plans=ours pdl=on",
    "--url=http://127.0.0.1:8000/v1": "--url=http://127.0.0.1:8000/v1",
    "http://me:secret@gpu7.lab:8000/v1?key=secret": "http://host:8000/v1",
}  # fmt: skip
TEXTS = {
    "as asked": "as asked", "~me/models/x.gguf": "x.gguf",
    "no GPU: /usr/lib/x86_64/libcuda.so.1 is missing": "no GPU: libcuda.so.1 is missing",
    "16/32 t/s, and/or 1 / 2": "16/32 t/s, and/or 1 / 2",
    "/home/me/x.gguf at https://gpu7.lab:80/v1, twice": "x.gguf at https://host:80/v1, twice",
    "file:///home/me/x.gguf": "x.gguf", "http://[::1]:80": "http://[::1]:80",
}  # fmt: skip


def test_words_and_text_lose_their_folders_and_hosts():
    assert {word: nameless_command([word])[0] for word in WORDS} == WORDS
    assert {said: nameless_text(said) for said in TEXTS} == TEXTS
    engine = {"url": "http://gpu7:1", "config": {"x": ("/a/b",)}, "command": ["-m", "some/x.gguf"]}
    found = {"command": ["/opt/w", "-m", "some/x.gguf"], "engine": engine, "model": {"n": "/m/x"}}
    run = new_run("serve", "r", "r", found, [], [], 1, 0)
    assert run["command"] == ["w", "-m", "x.gguf"] and run["model"] == {"n": "x"}
    assert run["engine"] == {
        "url": "http://host:1", "config": {"x": ["b"]}, "command": ["-m", "x.gguf"],
    }  # fmt: skip


class FakeNvml(SimpleNamespace):
    """An NVML whose every query answers 7, but for those that are named."""

    NVMLError = RuntimeError

    def __getattr__(self, name):
        return 0 if name.startswith("NVML_") else lambda *_: 7


def test_a_gpu_has_a_number_and_no_serial_number(monkeypatch):
    def seen(uuid):
        nvml = FakeNvml(
            nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetUUID=lambda handle: uuid,
            nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=1),
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return provenance.gpus()

    uuid = "GPU-3c0f7a14-1b1f-4a6e-9d53-5f2d3c0a9b11"
    (one,), (other,) = seen(uuid), seen(uuid.replace("3c", "4c"))
    assert one["card"] == card_number(uuid) != other["card"]
    assert not any(part in json.dumps(one) for part in uuid.split("-")[1:])
    assert one["power_w"] == one["power_limit_w"] == 0.007, "NVML tells milliwatts"


MEASURE = {
    "ab": lambda e, out: ab(e, "sync=per_copy,packed", None, "tg1", 1, out=out, smoke=True),
    "bench": lambda e, out: measured(e, workloads([2], [2]), 1, out=out),
    "perplexity": lambda e, out: perplexity(
        e, sample(e, 4, 0), against=Toggles(fuse_glu="on"), out=out
    ),
}


@pytest.mark.parametrize("kind", MEASURE)
def test_a_new_run_has_its_keys_and_no_places(engine, tmp_path, monkeypatch, kind):
    """Programs and files have their names, and no folders; nobody finds the machine or its user."""
    model = Path(engine.model.path)
    argv = ["/opt/bin/workbench", kind, "-m", str(model), f"--out={tmp_path}/run"]
    monkeypatch.setattr("sys.argv", argv)
    MEASURE[kind](engine, tmp_path / "run")
    new = load_run(tmp_path / "run").run
    assert list(new) == list(RUN_KEYS) and all(tuple(arm) == ARM_KEYS for arm in new["arms"])
    assert new["kind"] == kind and new["status"] == "complete" and new["duration_s"] > 0
    assert new["command"] == ["workbench", kind, "-m", model.name, "--out=run"]
    places = [str(tmp_path), str(model.parent), str(Path.home())]
    places += [platform.node()] * (len(platform.node()) > 5)  # a shorter one may be a word
    said = json.dumps(new)
    assert not any(place in said for place in ['"/', '"~', *places])


@pytest.mark.parametrize(("first", "package", "typed"), [
    ("/a/workbench/__main__.py", "workbench", "workbench ab -m x.gguf"),
    ("/a/workbench/__main__.py", None, "workbench ab -m x.gguf"),  # a process that another started
    ("/a/data/measure/__main__.py", "data.measure", "python -m data.measure ab -m x.gguf"),
    ("/a/bin/workbench", None, "workbench ab -m x.gguf"), ("own.py", None, "own.py ab -m x.gguf"),
])  # fmt: skip
def test_the_command_is_what_a_person_types(monkeypatch, first, package, typed):
    spec = None if package is None else ModuleSpec(f"{package}.__main__", None)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    monkeypatch.setattr("sys.argv", [first, "ab", "-m", "/a/x.gguf"])
    assert " ".join(provenance.collect()["command"]) == typed


@pytest.mark.parametrize(
    ("error", "raises", "is_raised"),
    [(KeyboardInterrupt, False, False), (KeyboardInterrupt, True, True), (OSError, False, True)],
)
def test_the_finished_is_saved_whatever_ends_it(tmp_path, monkeypatch, error, raises, is_raised):
    """And on the way, where the last time was long ago."""

    def draft_of(out: Path) -> Draft:
        return Draft(a_run("r", status="interrupted"), out)

    draft = draft_of(tmp_path / "r")
    with pytest.raises(error) if is_raised else nullcontext(), kept(draft, raises=raises):
        draft.samples.add("a", False, "tg1", 0, np.array([5]), np.array([1]))
        draft.checkpoint()
        assert not (tmp_path / "r").exists(), "it is too soon"
        with monkeypatch.context() as late:
            late.setattr(results, "CHECKPOINT_SECONDS", -1.0)
            draft.checkpoint()
        assert len(load_run(tmp_path / "r").samples) == 1
        draft.samples.add("a", False, "tg1", 1, np.array([5]), np.array([1]))
        raise error
    found = load_run(tmp_path / "r")
    assert found.run["status"] == "interrupted" and len(found.samples) == 2
    with pytest.raises(error), kept(draft_of(tmp_path / "none")):
        raise error
    assert not (tmp_path / "none").exists(), "nothing was measured, and nothing is written"


class Kind(NamedTuple):
    """at: the step of all engines that is cut, in the fifth repetition or the third window."""

    measure: Callable[..., Any]
    at: int
    n_kept: int
    changes: dict[str, dict[str, Any]]  # by what the refusal names


def _perplexity(engine, *, tokens="sample:110:0", size=16, out, resume=False, **how):
    source = ask(None, tokens).open(engine)
    return ppl.perplexity_by_size(engine, source, {size: out}, resume=resume, **how)


KINDS = {
    "ab": Kind(
        lambda engine, **how: ab(engine, **({"toggle": SPEC, "tests": "tg2", "rounds": 5} | how)),
        3 * 14 + 3 * 2 * 2 + 9, 2 * 4,  # 13 forced steps for each arm, 2 warm-ups of 2 tokens
        {"arms": {"toggle": "sync=per_copy,auto"}, "tests": {"tests": "tg3"}, "seed": {"seed": 1}},
    ),
    "bench": Kind(
        lambda engine, n_gen=(2,), **how: measured(engine, workloads([4], n_gen), 3, **how), 9, 3,
        {"tests": {"n_gen": [3]}, "seed": {"seed": 1}, "engine": {"of": {"n_ctx": 300}},
         "arm engine": {"of": {"toggles": Toggles(sync="packed")}}},
    ),
    "perplexity": Kind(
        _perplexity, 2 * 43 + 5, 6,  # each token of a window is drawn, then scored in 3 steps
        {"seed": {"tokens": "sample:110:1"}, "source": {"tokens": "sample:111:0"},
         "arms": {"against": Toggles()}, "n_ubatch": {"size": 8}},
    ),
}  # fmt: skip


def engine_of(monkeypatch, kind: str, **changes) -> FakeEngine:
    return timed(monkeypatch, 1.5, **({"n_ctx": 40} if kind == "perplexity" else {}) | changes)


def cut(monkeypatch, kind: str, out: Path) -> Run:
    engine = interrupted(engine_of(monkeypatch, kind), KINDS[kind].at)
    try:
        KINDS[kind].measure(engine, out=out)
    except KeyboardInterrupt:
        assert kind == "bench"
    return load_run(out)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_finished_is_kept_and_the_rest_follows(monkeypatch, tmp_path, kind):
    measure, out = KINDS[kind].measure, tmp_path / "r"
    before = cut(monkeypatch, kind, out)
    assert before.run["status"] == "interrupted"
    assert len(before.samples) == KINDS[kind].n_kept
    engine, straight = engine_of(monkeypatch, kind), tmp_path / "straight"
    measure(engine, out=out, resume=True)
    whole = load_run(out)
    assert whole.run["status"] == "complete" and len(whole.run["result"]["sessions"]) == 2
    assert whole.run["started"] == before.run["started"]
    assert whole.samples.iloc[: len(before.samples)].equals(before.samples)
    assert not whole.samples.duplicated(["arm", "test", "repetition", "token"]).any()
    measure(engine_of(monkeypatch, kind), out=straight)
    same = ["arm", "test", "repetition", "order", "token", "n_tokens"]
    assert whole.samples[same].equals(load_run(straight).samples[same])
    steps = [[a["counters"]["steps"] for a in of.run["arms"]] for of in (before, whole)]
    if kind == "ab":  # what its repetitions did alone
        assert steps[1] == [10, 10, 10]
    else:
        assert steps[1] == [steps[0][0] + engine.counters["steps"]]
    if kind == "perplexity":
        tokens = [pd.read_parquet(f / ppl.TOKENS).drop(columns="run_id") for f in (out, straight)]
        pd.testing.assert_frame_equal(*tokens)
    again = engine_of(monkeypatch, kind)
    measure(again, out=out, resume=True)  # finished: nothing is measured
    assert load_run(out).samples.equals(whole.samples)
    assert kind == "ab" or again.shared.steps == 0


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, of in KINDS.items() for key in of.changes]
)
def test_only_the_same_run_is_resumed(monkeypatch, tmp_path, kind, key):
    cut(monkeypatch, kind, tmp_path / "r")
    before = {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()}
    change = dict(KINDS[kind].changes[key])
    engine = engine_of(monkeypatch, kind, **change.pop("of", {}))
    with pytest.raises(UsageError, match=f"its {key} is") as error:
        KINDS[kind].measure(engine, out=tmp_path / "r", resume=True, **change)
    told = str(error.value).partition(f"its {key} is")[2]
    assert len(told) < 200 or key == "source", "only what differs"
    assert {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()} == before


def ids_of(folder: Path, seed: int = 0) -> str:
    ids = np.random.default_rng(seed).integers(0, N_VOCAB, 110)
    (folder / "ids").write_text(" ".join(map(str, ids)))
    return str(folder / "ids")


def test_each_size_goes_on_with_what_it_lacks(tmp_path):
    """One folder is there whole, one has a window less, and one has none."""
    engine = FakeEngine(Clock(), n_ctx=40)
    asked, folders = ids_of(tmp_path), ppl.folders_of(tmp_path / "run", [16, 8, 4])
    _perplexity(engine, tokens=asked, out=folders[16])
    interrupted(engine, 8 + 5 * 2 + 1)
    _perplexity(engine, tokens=asked, size=8, out=folders[8])  # two of three windows
    assert engine.shared.waits == [8 + 5 * 2 + 1], "nothing is freed that the device reads"
    engine.shared.stop_at, engine.shared.steps = None, 0
    runs = ppl.perplexity_by_size(engine, ask(None, asked).open(engine), folders, resume=True)
    assert engine.shared.steps == 4 + (10 + 10 + 8)
    for made in runs:
        assert made.run["repetitions"] == 3
        assert made.tokens["nll"].tolist() == runs[0].tokens["nll"].tolist()
    with pytest.raises(UsageError, match="ids has other tokens than the run to resume"):
        _perplexity(engine, tokens=ids_of(tmp_path, 1), out=folders[16], resume=True)


def test_a_sample_that_goes_on_is_not_drawn_again(tmp_path):
    engine = interrupted(FakeEngine(Clock(), n_ctx=40), 2 * 43 + 5)  # while the third is drawn
    ppl.perplexity(engine, sample(engine, 110, 3), out=tmp_path / "r")
    engine.shared.stop_at, engine.shared.steps = None, 0
    ppl.perplexity(engine, sample(engine, 110, 3), out=tmp_path / "r", resume=True)
    assert engine.shared.steps == 30 + 2
