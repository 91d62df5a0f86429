"""`make peer-cuda` without a GPU: a llama-bench that only says times beside the embedded device."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from data.measure import streams
from data.measure.command import Options
from data.measure.peer import FOLDER, SWITCHES, PeerRun, recorded_peers, theirs
from data.measure.recorded import Recorded
from data.measure.session import is_complete
from tests.measure.made import in_turn
from tests.peer import cuda, fake_llama_bench, llama_bench
from workbench.benchmarks.runs import results
from workbench.common.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
MODEL = "tiny-llama-q8_0"


@pytest.fixture
def program(tmp_path) -> Path:
    return fake_llama_bench.install(tmp_path / "built")


@pytest.fixture
def measured(program, tmp_path, tiny_models):
    """`measured(rounds=5)`: the run folder of a comparison. `measured.out`: where it is put."""

    def measure(at_most_s: float = math.inf, **options: object) -> Path:
        given = {"tests": "pp8,tg4", "ours": "best,best fuse=on", "theirs": ",".join(SWITCHES)}
        where = Options("embedded", measure.out, tiny_models, at_most_s=at_most_s)
        cuda.main(MODEL, peer=program, options=where, **(given | options))
        return measure.out / MODEL

    measure.out = tmp_path / "results" / FOLDER
    return measure


@pytest.mark.long
def test_both_sides_in_turn(program, measured, monkeypatch, capsys):
    """From the call to the table: arms, order, samples, what is recorded, what is made of it."""
    monkeypatch.setenv("GGML_CUDA_GRAPH_OPT", "1")  # what happens to be set switches nothing
    folder = measured()
    said, loaded = capsys.readouterr().out, results.load_run(folder)
    run, samples, peer, made = loaded.run, loaded.samples, PeerRun(loaded), loaded.run["result"]
    ours = ["workbench best", "workbench best fuse=on", "workbench best (A/A)"]
    names = [*map(theirs, SWITCHES), *ours]
    assert [arm["name"] for arm in run["arms"]] == names
    assert [arm["is_control"] for arm in run["arms"]] == [name == names[-1] for name in names]
    assert (run["kind"], run["status"], run["repetitions"]) == ("peer", "complete", 5)
    assert in_turn(peer) and made["first_ns"].keys() == set(names)
    assert len(samples) == 5 * len(names) * 2 * 2, "rounds, arms, tests, counted repetitions"

    # every process of llama.cpp has its arm's variables and no others
    calls = [json.loads(one) for one in (program.parent / "calls.jsonl").read_text().splitlines()]
    given = [turn["arm"] for turn in made["turns"] if turn["arm"] in made["env"]]
    assert len(calls) == 5 * len(SWITCHES)
    assert [call["own"] for call in calls] == [made["env"][arm] for arm in given]
    wanted = {"-ngl": "99", "-fa": "1", "-p": "8", "-n": "4", "-r": "3", "-o": "json"}
    assert all(call["given"].items() >= wanted.items() for call in calls)

    # the first repetition of a turn does not count
    assert peer.rates("tg4")["llama.cpp"].tolist() == [pytest.approx(1000.0)] * 5
    assert made["first_ns"]["llama.cpp"]["tg4"] == [10 * 4_000_000] * 5
    best, fastest = peer.best("tg4"), pytest.approx(1e6 / 900)
    assert (best.arm_theirs, best.beside.before) == ("llama.cpp graph_opt=1", fastest)
    assert best.arm_ours in ours[:2]
    ns = samples[(samples["arm"] == best.arm_ours) & (samples["test"] == "tg4")]
    rates = 4e9 / ns.groupby("repetition")["ns"].mean()
    assert best.beside.ratio.value == pytest.approx(np.median(rates) / (1e6 / 900))
    pairs = [(one.with_, pytest.approx(one.us)) for one in peer.savings("tg4")]
    assert pairs == [("default", 50.0), ("graphs=off", 50.0)]
    assert "reuse saves llama.cpp 50.0 us, with default" in said

    about = made["peer"]
    assert about["version"] == "0.5.0-fake (build 7, commit fade)"
    assert about["build"] == {"nvcc": "13.0.88"} and set(about["files"]) == {"llama-bench"}
    assert about["says"]["build_commit"] == "fade" and run["model"]["hash"]
    assert {name: a["holds"] for name, a in made["answers"].items()} == {ours[1]: True, "A/A": True}
    assert run["arms"][-1]["counters"]["steps"] > 0 and run["arms"][0]["toggles"] == {}

    # a second call finds it, unless another commit made it
    again = "there already" if is_complete(folder) else "ours / theirs"
    measured()
    assert again in capsys.readouterr().out


def test_a_call_that_fails_keeps_its_rounds_for_nothing(program, measured):
    (program.parent / "fails").write_text("exits at 4")
    with pytest.raises(RuntimeError, match=r"error: failed to load model$"):
        measured(theirs="default")
    folder = measured.out / MODEL
    run = results.load_run(folder).run
    assert run["status"] == "interrupted" and not is_complete(folder)
    assert recorded_peers(Recorded(measured.out.parent)) == []


def test_what_the_program_says_is_not_believed(program):
    for how, said in (
        ("exits", "printed no rows: llama_bench: error: failed to load model$"),
        ("prints text", "printed no rows: it said nothing$"),
        ("a test is missing", "ended with 0 and rows"), ("a time is missing", "pp8 has times"),
    ):  # fmt: skip
        (program.parent / "fails").write_text(how)
        with pytest.raises(RuntimeError, match=said):
            llama_bench.find(program).run(Path("m.gguf"), ["pp8", "tg4"], 3, {})


def test_a_program_that_computed_without_a_gpu_is_refused():
    """llama.cpp falls back to the CPU and says nothing."""
    engine = {"device": "cuda", "device_description": "NVIDIA H200 (sm_90), driver 1"}
    cuda.check_card(Path("b"), {"gpu_info": "NVIDIA H200"}, engine)
    for card, named in (("", "no GPU"), ("NVIDIA L4", "NVIDIA L4")):
        with pytest.raises(RuntimeError, match=f"computed on {named}, and the engine on NVIDIA"):
            cuda.check_card(Path("b"), {"gpu_info": card}, engine)


def test_what_cannot_be_compared_is_refused_first(program, measured, capsys):
    for options, said in (
        ({"theirs": "graphs"}, "'graphs' is not one of default, graphs=off"),
        ({"tests": "pp8+tg4"}, "give ppN and tgN"), ({"tests": "tg4@d16"}, "give ppN and tgN"),
        ({"rounds": 4}, "rounds=4, repetitions=3: give 5 and 2"),
        ({"repetitions": 1}, "rounds=5, repetitions=1"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            measured(**options)
    measured(at_most_s=-1.0)
    assert capsys.readouterr().out == f"{MODEL}: left, -1 s are over; call again\n"
    assert not (program.parent / "calls.jsonl").exists() and not measured.out.exists()


def test_the_program_is_found_in_its_folder_or_archive(program, tmp_path, monkeypatch):
    for path in (program, program.parent, program.parents[1]):
        assert llama_bench.find(path).program == program
    monkeypatch.setattr(llama_bench, "UNPACKED", tmp_path / "unpacked")
    with tarfile.open(tmp_path / "built.tar.xz", "w:xz") as archive:
        archive.add(program.parent, "bin")
    found = llama_bench.find(tmp_path / "built.tar.xz")
    assert found.program == tmp_path / "unpacked" / "bin" / "llama-bench"
    assert found.about["build"] == "unknown: no build.json beside the program"
    with pytest.raises(RuntimeError, match="no llama-bench there, nor in its bin/"):
        llama_bench.find(tmp_path)


def test_the_libraries_of_cuda_are_found_or_missing(program, tmp_path, monkeypatch):
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    (program.parent / "libggml-cuda.so").write_bytes(b"\0libcudart.so.913\0libcublas.so.913\0")
    with pytest.raises(RuntimeError, match=r"^missing: libcublas\.so\.913, which .*; looked in"):
        llama_bench.find(program)
    wheel, named = tmp_path / "site" / "nvidia" / "cu13" / "lib", tmp_path / "named"
    for folder, name in ((wheel, "libcublas.so.913"), (named, "libcudart.so.913")):
        folder.mkdir(parents=True)
        (folder / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(named))
    found = llama_bench.find(program)
    path = found.environment()["LD_LIBRARY_PATH"].split(":")
    assert found.libraries == (wheel, named)
    assert path[:3] == [str(program.parent), str(wheel), str(named)]
    assert "," not in found.environment()["CUDA_VISIBLE_DEVICES"]


def test_without_a_toolkit_one_line_says_so(tmp_path, monkeypatch):
    """The recipe looks for nvcc before anything else."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "env", "dirname", "readlink", "mkdir"):
        (tools / name).symlink_to(str(shutil.which(name)))
    recipe = (ROOT / "tests" / "peer" / "build-cuda.sh").read_text()
    (tmp_path / "build-cuda.sh").write_text(recipe.replace("/usr/local/cuda/bin", "/nowhere/bin"))
    (tmp_path / "build-cuda.sh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(llama_bench, "BUILT", tmp_path / "built")
    monkeypatch.setattr(llama_bench, "__file__", str(tmp_path / "llama_bench.py"))
    with pytest.raises(RuntimeError, match=r"^missing: a CUDA toolkit \(nvcc\); looked in") as said:
        cuda.main(MODEL, options=Options("embedded", tmp_path / "out"))
    assert "install CUDA 13, or give PEER=path" in str(said.value) and "\n" not in str(said.value)


def test_make_passes_what_it_is_given():
    command = "make --no-print-directory -n -o .venv/.dev peer-cuda MODELS=m,n ROUNDS=7 PEER=a,b"
    done = subprocess.run(
        [word.replace(",", " ") for word in command.split()], cwd=ROOT, capture_output=True,
        text=True, env=os.environ | {"MAKEFLAGS": ""},
    )  # fmt: skip
    words = " ".join(done.stdout.replace("\\\n", " ").split())
    assert words.endswith('-m tests.peer.cuda m n --peer "a b" --rounds 7'), done.stderr


@pytest.mark.long
def test_the_campaign_of_streams_has_each_pair_in_one_run(measured):
    """One stream and several, with the same fused nodes and the same logits, to the bit."""
    assert len(set(streams.SETTINGS)) == len(streams.SETTINGS)
    settings = [arm.removeprefix("workbench ") for pair in streams.PAIRS for arm in pair.arms]
    assert set(settings) < set(streams.SETTINGS)
    folder = measured(ours=",".join(streams.SETTINGS), theirs=",".join(streams.SWITCHED))
    run = results.load_run(folder).run
    toggles = {arm["name"]: arm["toggles"] for arm in run["arms"]}
    early = "pdl=off"  # here nothing begins early: an arm without that is another's, and left out
    for pair in (pair for pair in streams.PAIRS if early not in pair.setting):
        first, second = (toggles[arm] for arm in pair.arms)
        assert {name for name in first if first[name] != second[name]} <= {"streams", "fork"}
        assert first["streams"] == "1" and int(second["streams"]) > 1
    assert all(answer["holds"] for answer in run["result"]["answers"].values())


@pytest.mark.long
def test_the_campaign_of_streams_says_the_overlap(measured, tmp_path, monkeypatch, capsys):
    """Of one stream and of several, after all turns. A setting that cannot be measured says why,
    and the run counts."""
    refused = "best launch_ahead=on plan_end=word plans=ours plan_scope=step results=direct"
    given = (*streams.OVERLAPS.values(), f"{refused} sync=packed_implicit copy_stream=compute")
    *campaign, overlapped = cuda.CAMPAIGNS["streams"]
    assert overlapped == given[:-1]
    monkeypatch.setitem(cuda.CAMPAIGNS, "streams", (*campaign, given))
    folder = measured(ours="best", theirs="default", campaign="streams")
    run = results.load_run(folder).run
    one, three, anywhere, ahead = (run["result"]["overlap"][setting] for setting in given)
    assert run["status"] == "complete" and run["arms"][0]["name"] == "llama.cpp"
    assert one["overlap"] == 0 and one["overlaps"] == [0.0] * one["n_tokens"]
    assert not one["branches"]["us"] and three["tick_ns"] >= 1
    assert len(anywhere["branches"]["us"]) > len(three["branches"]["us"]) == 6
    assert "launch_ahead=on queues the next" in ahead["failed"]
    said = capsys.readouterr().out
    assert "overlap 0.0%" in said and "overlap not measured: kernels note" in said
    shutil.copytree(folder, tmp_path / "page" / streams.FOLDER / streams.MODELS[0])
    lines = [line.values for line in streams.overlaps(Recorded(tmp_path / "page"))]
    assert lines[0]["Overlap"] == "0.0%" and len(lines) == 3
