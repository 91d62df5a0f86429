"""A sweep: what its frame says, and that it loses nothing and counts nothing twice."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import workbench as wb
from tests.profiles import long
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.runs import results
from workbench.benchmarks.sweep import sweep as sweeping
from workbench.benchmarks.sweep.result import COLUMNS, Sweep
from workbench.benchmarks.sweep.scheduler import workers_of
from workbench.common.errors import UsageError, WorkbenchError
from workbench.report import sweeps

MEASURED = ["status", "n", "tps", "p50_us", "key"]
# three groups of three cells, and two cells that are left out
CELLS = {"tests": ["tg2", "pp4", "pp2+tg2"], "presets": "baseline", "device": "embedded",
         "toggles": {"graph_reuse": ["rebuild", "set_rows"], "redo_build": ["off", "on"]},
         "repetitions": 1}  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("tiny-llama", "Q8_0")


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A sweep that nobody interrupted."""
    return wb.sweep(model, out=tmp_path_factory.mktemp("whole") / "sweep", **CELLS)


def alike(one: Sweep, other: Sweep) -> bool:
    """Whether two sweeps have the same cells, measured equally often."""
    names = [*one.axes, "status", "n", "key", "reason", "toggles", "baseline"]
    a, b = (side.to_frame()[names] for side in (one, other))
    return bool(a.equals(b))


@pytest.mark.long
def test_a_row_for_each_cell(whole, model):
    frame = whole.to_frame()
    assert len(frame) == 3 * 2 * 2 and frame["key"].nunique() == 9
    done = frame[frame["status"] == "done"]
    assert len(done) == 9 and (done["n"] == 1).all() and (done["tps"] > 0).all()
    assert done["model"].unique() == [model.stem] and list(frame)[:2] == ["model", "test"]
    left = frame[frame["status"] == "left out"]
    assert len(left) == 3 and left["reason"].str.contains("redo_build=on .*clash").all()
    # the first of a group is the baseline of the others, whose answers are compared
    first = done[done["baseline"].isna()]
    assert first["toggles"].unique() == ["everything off"] and len(first) == 3
    others = done[done["baseline"].notna()]
    assert (others["answer"].str.startswith("exact: bit-equal")).all()
    assert (others["verdict"] == "too few repetitions").all()
    assert others["speedup"].tolist() == pytest.approx(
        [row.tps / first.set_index("test")["tps"][row.test] for row in others.itertuples()]
    )
    # a group is a comparison, for whoever reads run folders
    groups = results.runs(whole.folder)
    assert len(groups) == 3 and set(groups["kind"]) == {"ab"}
    for folder in groups["folder"]:
        made = AB.load(folder)
        assert made.interleaved and sum(arm["is_control"] for arm in made.run["arms"]) == 1


def test_a_sweep_is_read_again_and_shown(whole):
    again = Sweep.load(whole.folder)
    pd.testing.assert_frame_equal(again.to_frame(), whole.to_frame())
    assert alike(again, whole) and repr(again) == repr(whole)
    assert alike(wb.load(whole.folder), whole) and alike(
        wb.load(whole.folder / "sweep.json"), whole
    )
    assert len(pd.read_csv(whole.to_csv(whole.folder / "all.csv"))) == 12
    rows = csv.DictReader(whole.to_frame().to_csv().splitlines())
    assert {row["n"] for row in rows} == {"1", ""}, "whole, also beside cells without any"
    assert "A/A band" not in whole.summary, "too few repetitions for one"
    assert "9 done, 3 left out" in whole.summary and "3 left out: toggles " in whole.summary
    assert "<table>" in whole._repr_html_() and "clash" in whole._repr_html_()
    table = whole.pivot(["test", "redo_build"], "graph_reuse")
    assert table.index.tolist() == [
        ("tg2", "off"), ("tg2", "on"), ("pp4", "off"), ("pp4", "on"), ("pp2+tg2", "off"),
        ("pp2+tg2", "on"),
    ]  # fmt: skip
    assert list(table) == ["rebuild", "set_rows"]
    assert table.isna().sum().sum() == 3, "what is left out has no value"
    assert repr(table).startswith("values: tokens/s (median); columns: graph_reuse\n\n| test ")
    assert table._repr_html_().count("<th ") == 4
    waited = whole.pivot(["test", "redo_build"], "graph_reuse", values="p50_us")
    assert repr(waited).startswith("values: time of a token, us (median); columns: graph_reuse")
    with pytest.raises(UsageError, match="several cells have the same test, graph_reuse; give"):
        whole.pivot("test", "graph_reuse")
    with pytest.raises(UsageError, match="column 'tpss' does not exist; did you mean tps"):
        whole.pivot("test", "graph_reuse", values="tpss")
    with pytest.raises(UsageError, match="argument 'rows' does not exist; choose one of"):
        whole.pivot(rows="test")
    with pytest.raises(UsageError, match="column 3 does not exist; choose one of"):
        whole.pivot(3)


@pytest.mark.long
def test_a_picture_of_a_sweep(whole):
    frame = whole.to_frame()
    fig = sweeps.sweep(frame)
    assert [ax.get_title(loc="left") for ax in fig.axes] == [
        "test=tg2", "test=pp4", "test=pp2+tg2",
    ]  # fmt: skip
    for ax in fig.axes:
        labels = [text.get_text() for text in ax.get_legend().get_texts()]
        assert labels == ["graph_reuse=rebuild", "graph_reuse=set_rows"]
        drawn = [y for line in ax.lines for y in line.get_ydata()]
        test = ax.get_title(loc="left").partition("=")[2]
        assert sorted(drawn) == sorted(frame[frame["test"] == test]["tps"].dropna())
    fig = sweeps.sweep(frame, "graph_reuse", "speedup", by="redo_build", panels="test")
    (tested,) = frame["model"].unique()
    (device,) = frame["device_description"].dropna().unique()
    said = fig.get_suptitle().splitlines()
    assert said[0].startswith("speedup over the first cell of its group (ratio of medians), with")
    assert said[1] == f"{tested}, on {device}", "what all cells have"
    assert fig._repr_png_()[1]["alt"].startswith(said[0])
    assert {ax.get_ylabel() for ax in fig.axes} == {"speedup"}
    deep = frame.assign(n_depth=range(len(frame)), test="tg2")
    labelled = sweeps.sweep(deep).axes[-1]
    assert labelled.get_xlabel() == "n_depth (tokens cached before the test)"
    assert labelled.get_ylabel() == "tokens/s (median)"
    assert fig.axes[-1].get_xlabel() == "graph_reuse" and fig._repr_png_()[0][:4] == b"\x89PNG"
    assert len(wb.plot(whole).axes) == len(whole.plot(x="redo_build").axes) == 3
    assert len(wb.plot(frame, panels="graph_reuse").axes) == 2
    with pytest.raises(UsageError, match=r"keyword .valeus. does not exist .* did you mean values"):
        whole.plot(valeus="speedup")
    with pytest.raises(UsageError, match="column 'x' does not exist"):
        sweeps.sweep(frame, "x")
    with pytest.raises(UsageError, match="no cell has tps"):
        sweeps.sweep(frame[frame["status"] == "left out"])


@pytest.fixture
def copied(whole, tmp_path):
    """The folder of a sweep, to change."""
    return Path(shutil.copytree(whole.folder, tmp_path / "copied"))


def changed(path: Path, **keys: Any) -> None:
    """Changes keys of a file of JSON."""
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_what_other_sources_measured_is_not_resumed(model, copied):
    changed(copied / "sweep.json", commit={"hash": "0" * 40, "dirty": False})
    with pytest.raises(UsageError, match=f"its commit is {'0' * 40}, and now it would be "):
        wb.sweep(model, out=copied, resume=True, **CELLS)


def test_of_a_baseline_measured_twice_the_finished_row_counts(whole, copied):
    """The first group was cut off, and a later group has measured its baseline again."""
    record = json.loads((copied / "sweep.json").read_text())
    first = next(iter(record["groups"]))
    shutil.copytree(copied / "groups" / first, copied / "groups" / "later")
    later = {"later": record["groups"][first]}
    changed(copied / "groups" / first / "run.json", status="interrupted")
    changed(copied / "sweep.json", groups=record["groups"] | later)
    own = Sweep.load(copied).to_frame().set_index("key").loc[record["groups"][first]]
    assert set(own["group"]) == {"later"} and set(own["status"]) == {"done"}
    changed(copied / "sweep.json", groups=later | record["groups"])
    assert alike(Sweep.load(copied), whole), "whichever began first"


@pytest.mark.long
def test_cells_without_a_toggle_are_measured_alone(model, tmp_path):
    """Depths, sequences and settings make engines of their own; a key finds them later."""
    ask = {"models": model, "device": "embedded", "repetitions": 2, "out": tmp_path / "s"}
    made = wb.sweep(tests="tg2", n_depth=[0, 8], n_ubatch=[8, 16], **ask)
    frame = made.to_frame()
    assert frame[["n_depth", "n_ubatch"]].to_numpy().tolist() == [[0, 8], [0, 16], [8, 8], [8, 16]]
    assert (frame["status"] == "done").all() and frame["baseline"].isna().all()
    assert (frame["tps_low"] <= frame["tps"]).all() and (frame["tps"] <= frame["tps_high"]).all()
    groups = results.runs(made.folder)
    assert set(groups["kind"]) == {"bench"} and set(groups["tests"]) == {"tg2", "tg2@d8"}
    begun = dict(zip(groups["folder"], groups["started"], strict=True))
    with pytest.raises(UsageError, match="exists already; resume it"):
        wb.sweep(tests="tg2", **ask)
    with pytest.raises(UsageError, match="its repetitions is 2, and now it would be 3"):
        wb.sweep(tests="tg2", resume=True, **(ask | {"repetitions": 3}))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UsageError, match=r"is no sweep: sweep\.json is missing"):
        wb.sweep(tests="tg2", resume=True, **(ask | {"out": tmp_path / "other"}))
    with pytest.raises(UsageError, match=r"other/file/sweep\.json cannot be read: "):
        wb.sweep(tests="tg2", resume=True, **(ask | {"out": tmp_path / "other" / "file"}))
    with pytest.raises(UsageError, match="a sweep is resumed in its folder; name that"):
        wb.sweep(tests="tg2", resume=True, **{k: v for k, v in ask.items() if k != "out"})
    more = wb.sweep(tests=["tg3", "tg2"], n_ubatch=[16, 8], n_depth=[8, 0], resume=True, **ask)
    now = results.runs(made.folder)
    assert (more.to_frame()["status"] == "done").all() and len(now) == len(more.to_frame()) == 8
    now = dict(zip(now["folder"], now["started"], strict=True))
    assert all(now[folder] == when for folder, when in begun.items()), "not measured again"
    several = wb.sweep(model, "pp2+tg2", n_parallel=[1, 2], device="embedded", repetitions=1,
                       out=tmp_path / "several")  # fmt: skip
    assert results.runs(several.folder)["tests"].tolist() == ["pp2+tg2@b1", "pp2+tg2@b2"]


def test_a_dry_run_is_honest(model, whole, tmp_path):
    ask = {"models": model, "dry_run": True, "out": tmp_path / "s"} | CELLS
    dry = wb.sweep(**ask)
    assert dry.expected.cells == dry.expected.unknown == 9 and dry.expected.repetitions == 3 * 4
    assert "how long that takes is unknown" in dry.summary and not (tmp_path / "s").exists()
    one = wb.sweep(model, "tg2", dry_run=True, repetitions=1, device="embedded", out=tmp_path / "s")
    assert one.summary.startswith("1 cell: 1 missing; ")
    assert "1 cell to measure, in 1 repetition; how long" in one.summary
    dry = wb.sweep(calibrate=True, **ask)
    assert dry.expected.unknown == 0 and dry.expected.seconds > 0
    assert "by one repetition of each test" in dry.summary and not (tmp_path / "s").exists()
    ask |= {"out": whole.folder, "resume": True}
    assert wb.sweep(**ask).expected.cells == 0
    ask["tests"], ask["n_ubatch"] = ["tg2", "tg3"], 16
    expected = wb.sweep(**ask).expected
    assert (expected.cells, expected.unknown) == (6, 3) and expected.seconds > 0
    assert "3 cells have no known time" in str(expected)


def test_what_a_device_refuses_is_left_out(model, tmp_path):
    made = wb.sweep(
        model, ["tg2", "pp64"], toggles={"pdl": ["off", "on"]}, device="embedded", n_ctx=16,
        repetitions=1, out=tmp_path / "s",
    )  # fmt: skip
    frame = made.to_frame().set_index(["test", "pdl"])
    assert frame["status"].to_dict() == {("tg2", "off"): "done"} | dict.fromkeys(
        [("tg2", "on"), ("pp64", "off"), ("pp64", "on")], "left out"
    )
    assert "cannot honour pdl=on" in frame.loc[("tg2", "on"), "reason"]
    assert "needs 64 KV cells, but the engine has n_ctx=16" in frame.loc[("pp64", "off"), "reason"]
    with pytest.raises(UsageError, match=r"every cell is left out, the first because: .*pdl"):
        wb.sweep(model, "tg2", toggles={"pdl": "on"}, device="embedded", out=tmp_path / "t")
    assert not (tmp_path / "t").exists()
    same = wb.sweep(model, "tg2", sets=["", "sync=per_copy"], presets="baseline", device="embedded",
                    repetitions=1, out=tmp_path / "u")  # fmt: skip
    assert same.to_frame()["reason"].tolist()[1].startswith("the same toggles as in ")


def test_cells_that_do_what_their_baseline_does_are_told(model, tmp_path):
    """All of a group: left out, and the baseline measured alone. Some of a group: with a reason."""
    ask = {"presets": "baseline", "device": "embedded", "repetitions": 1}
    made = wb.sweep(
        model, "tg2", toggles={"plan_scope": ["split", "step"]}, out=tmp_path / "s", **ask
    )
    frame = made.to_frame()
    assert frame["status"].tolist() == ["done", "left out"]
    assert "changes nothing while plans=off" in frame["reason"][1]
    assert results.runs(made.folder)["kind"].tolist() == ["bench"]
    made = wb.sweep(
        model, "tg2", toggles={"sync": ["per_copy", "packed"], "fork": ["qkv", "any"]},
        out=tmp_path / "t", **ask,
    )  # fmt: skip
    reasons = made.to_frame().set_index(["sync", "fork"])["reason"]
    assert "streams=1" in reasons["per_copy", "any"] and reasons["packed", "any"] == ""


@pytest.mark.parametrize(("warmups", "first"), [
    ("auto", "plan_scope=step: "), ("auto,0", "plan_scope=split plan_warmup=0 and 2 more: "),
])  # fmt: skip
def test_left_out_are_the_cells_that_are_not_measured(call, model, tmp_path, warmups, first):
    err = call(
        "sweep", "-m", model, "--device", "embedded", "--test", "tg2", "-r", 1, "--preset",
        "baseline", "--plan-scope", "split,step", "--plan-warmup", warmups, "--out", tmp_path / "s",
    )[2]  # fmt: skip
    (line,) = [line for line in err.splitlines() if line.startswith("left out: ")]
    assert line.startswith(f"left out: {model.stem} tg2 {first}")


@pytest.mark.parametrize("after", [long(0), long(1), long(2)])
def test_ctrl_c_after_any_group_loses_nothing(model, whole, tmp_path, monkeypatch, after):
    measure, out, begun = sweeping.measure_group, tmp_path / "s", []

    def interrupted(engine, group, *given, **named):
        begun.append(group.name)
        if len(begun) > after:
            raise KeyboardInterrupt
        measure(engine, group, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(sweeping, "measure_group", interrupted)
        part = wb.sweep(model, out=out, **CELLS)
    assert part.interrupted and "interrupted: resume goes on" in part.summary
    assert (part.to_frame()["status"] == "done").sum() == 3 * after
    assert part.expected.cells == 9 - 3 * after
    before = dict(results.runs(out)[["folder", "started"]].to_numpy().tolist())
    finished = wb.sweep(model, out=out, resume=True, **CELLS)
    assert alike(finished, whole) and not finished.interrupted
    now = dict(results.runs(out)[["folder", "started"]].to_numpy().tolist())
    assert len(now) == 3 and before.items() <= now.items()


RUN = """
import json, sys
import workbench as wb
from workbench.benchmarks.runs import results
results.CHECKPOINT_SECONDS = 0.0  # every round
wb.sweep(sys.argv[1], out=sys.argv[2], **json.loads(sys.argv[3]))
"""


@pytest.mark.long
@pytest.mark.parametrize("where", ["after a group", "in a group"])
def test_sigkill_at_any_time_loses_nothing(model, tmp_path, where):
    """A finished group stays as it was. A group under way goes on with the rounds that it has."""
    cells = CELLS | {"repetitions": 40 if where == "in a group" else 5, "tests": ["tg2", "pp4"]}
    out = tmp_path / "s"
    process = subprocess.Popen([sys.executable, "-c", RUN, model, out, json.dumps(cells)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        known = [name for name in os.listdir(out / "groups") if name[0] != "."] if (
            out / "groups").exists() else []  # fmt: skip
        if len(known) > (where == "after a group") or process.poll() is not None:
            break
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was killed, and had not ended"
    held = {p.name: results.load_run(p) for p in (out / "groups").iterdir() if p.name[0] != "."}
    part = Sweep.load(out).to_frame()
    assert part["status"].isin(["missing", "interrupted"]).any() and (part["n"] > 0).any()
    finished = wb.sweep(model, out=out, resume=True, **cells)
    frame = finished.to_frame()
    assert (frame["status"] != "left out").sum() == frame["key"].nunique() == 6
    assert (frame[frame["status"] != "left out"]["n"] == cells["repetitions"]).all()
    for name, was in held.items():
        now = results.load_run(out / "groups" / name)
        pd.testing.assert_frame_equal(now.samples.iloc[: len(was.samples)], was.samples)
        counted = now.samples.groupby(["arm", "repetition", "token"]).size()
        assert (counted == 1).all(), "nothing counts twice"
    assert sorted(p.name for p in (out / "groups").iterdir() if p.name[0] != ".") == sorted(
        Sweep.load(out).to_frame()["group"].dropna().unique()
    )


@pytest.mark.long
def test_a_group_that_fails_is_told_and_the_others_go_on(model, tmp_path, monkeypatch):
    measure, out, broken = sweeping.measure_group, tmp_path / "s", [True]

    def failing(engine, group, *given, **named):
        if broken and group.cells[0].workload.name == "pp4":
            raise WorkbenchError("out of memory")
        measure(engine, group, *given, **named)

    monkeypatch.setattr(sweeping, "measure_group", failing)
    made = wb.sweep(model, out=out, **CELLS)
    assert made.to_frame()["status"].value_counts().to_dict() == {
        "done": 6, "failed": 3, "left out": 3,
    }  # fmt: skip
    assert "3 failed: out of memory" in made.summary
    broken.clear()
    again = wb.sweep(model, out=out, resume=True, **CELLS)
    assert again.to_frame()["status"].value_counts().to_dict() == {"done": 9, "left out": 3}


# the command --------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command_takes_lists_and_a_file(call, model, tmp_path):
    out = tmp_path / "s"
    ask = ("sweep", "-m", model, "--device", "embedded", "--out", out, "--preset", "baseline")
    ask += ("--test", "tg2,pp4", "-ub", "16,32", "--sync", "per_copy,packed", "-r", 1)
    ask += ("--exclude", "test=tg2 n_ubatch=16")
    status, text, _ = call(*ask, "--dry-run")
    assert status == 0 and not out.exists()
    assert "8 cells: 6 missing, 2 left out; " in " ".join(text.split())
    assert "6 cells to measure, in 9 repetitions; how long that takes is unknown" in text
    assert "--calibrate (in Python calibrate=True) times one of each test" in " ".join(text.split())
    status, text, err = call(*ask, "-o", "json")
    rows = json.loads(text)
    assert status == 0 and len(rows) == 8 and [row["status"] for row in rows].count("done") == 6
    assert {"test", "n_ubatch", "sync", "tps", "verdict", "reason"} <= set(rows[0])
    assert "sweep: 6 of 6 cells" in err and "tg2 n_ubatch=32 sync=packed: " in err
    assert call(*ask)[0] == 2, "the folder exists"
    path = tmp_path / "sweep.toml"
    path.write_text(
        f'models = ["{model}"]\ntests = ["tg2", "pp4"]\npresets = "baseline"\nrepetitions = 1\n'
        '[engine]\ndevice = "embedded"\nn_ubatch = [16, 32]\n'
        '[toggles]\nsync = ["per_copy", "packed"]\n[[exclude]]\ntest = "tg2"\nn_ubatch = 16\n'
    )
    status, text, err = call("sweep", "--matrix", path, "--out", out, "--resume")
    assert status == 0 and "8 cells: 6 done, 2 left out" in text and "t/s\n" not in err
    status, text, _ = call("sweep", "--matrix", path, "--out", out, "--resume", "--dry-run",
                           "--sync", "per_copy,implicit")  # fmt: skip
    assert "8 cells: 3 done, 3 missing, 2 left out" in " ".join(text.split())
    status, text, _ = call("sweep", "--matrix", path, "--out", out, "--resume", "-o", "csv")
    assert text.splitlines()[0].startswith("model,test,") and len(text.splitlines()) == 9


@pytest.mark.parametrize(("words", "said"), [
    ("--test tg2", "the matrix has no model; give a GGUF file"),
    ("-m MODEL -ub 0", "n_ubatch=0 must be at least 1"), ("-m MODEL -b 8", "n_batch changes no"),
    ("-m MODEL --calibrate", "--calibrate times a dry run; add --dry-run"),
    ("-m MODEL --out rows.csv", "--out rows.csv would be a run folder"),
    ("-m MODEL --exclude sync=packed", "no cell has an axis 'sync' to exclude; choose"),
    ("-m none.gguf", "none.gguf"), ("-m MODEL --sync ,", "toggle sync='' does not exist"),
    ("-m MODEL --resume", "a sweep is resumed in its folder; name that, as out= (--out)"),
    ("-m MODEL --scheduler tcp://127.0.0.1:1", "no scheduler answers at 'tcp://127.0.0.1:1'"),
    ("m.toml", "sweep takes m.toml by its flag; write --matrix m.toml"),
    ("x/a.gguf -r 2", "write --model x/a.gguf"), ("tg8", "Unused Tokens: ['tg8']"),
])  # fmt: skip
def test_bad_input_is_one_line_and_nothing_is_written(
    call, model, tmp_path, monkeypatch, words, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("workbench.benchmarks.sweep.scheduler.REACHED_S", 0.5)
    status, out, err = call("sweep", *words.replace("MODEL", str(model)).split())
    assert status in (1, 2) and out == "" and not list(tmp_path.iterdir())
    assert said in err and len(err.strip().splitlines()) == 1, err


def test_a_damaged_sweep_is_one_line(whole, tmp_path):
    for text, said in (
        ("{", "cannot be read"), ("[]", "schema None of sweep.json is not 1"),
        ('{"schema": 2}', "schema 2 of sweep.json is newer than 1, the newest that this version"),
        ('{"schema": 1}', "sweep.json has no valid 'axes'"),
    ):  # fmt: skip
        (tmp_path / "sweep.json").write_text(text)
        with pytest.raises(UsageError, match=re.escape(said)) as error:
            Sweep.load(tmp_path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("part", "value"), [
    ("axes", None), ("axes", []), ("axes", {"a": 1}), ("cells", {"a": 1}), ("failed", [1]),
    ("groups", 3), ("commit", {}), ("repetitions", "2"), ("seed", -1), ("left_out", [1]),
])  # fmt: skip
def test_a_part_of_another_type_is_one_line(whole, tmp_path, part, value):
    made = json.loads((whole.folder / "sweep.json").read_text())
    (tmp_path / "sweep.json").write_text(json.dumps(made | {part: value}))
    with pytest.raises(UsageError, match=r"sweep\.json has no valid") as error:
        wb.load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.long
@pytest.mark.parametrize("is_there", [False, True])
def test_a_sweep_that_was_killed_before_its_first_group_begins_with_resume(
    model, tmp_path, is_there
):
    if is_there:
        (tmp_path / "s").mkdir()
    made = wb.sweep(model, "tg2", repetitions=1, device="embedded", out=tmp_path / "s", resume=True)
    assert made.to_frame()["status"].tolist() == ["done"]


@pytest.mark.parametrize(("address", "said"), [
    ("foo", "missing port number in address 'foo'"), ("zzz://foo:1", "unknown address scheme"),
    ("foo:99999999", "no port has the number 99999999"),
])  # fmt: skip
def test_an_address_without_a_port_makes_no_client(monkeypatch, address, said):
    """A client whose making fails waits for 20 s as Python ends, and prints a traceback."""
    asked: list[str] = []
    monkeypatch.setattr("distributed.Client", lambda at, **_: asked.append(at))
    with pytest.raises(UsageError, match=said) as error, workers_of(address):
        pass
    assert "\n" not in str(error.value) and "`dask scheduler`" in str(error.value)
    assert not asked


@pytest.mark.long
def test_a_summary_says_how_far_a_baseline_differs_from_itself(model, tmp_path):
    made = wb.sweep(model, "tg1", presets="baseline", toggles={"sync": ["per_copy", "packed"]},
                    device="embedded", repetitions=5, out=tmp_path / "s")  # fmt: skip
    (row,) = made.to_frame().dropna(subset="band_low").itertuples()
    band = f"{row.band_low:.3f}..{row.band_high:.3f}"
    assert f"the widest A/A band of a speedup: {band}" in made.summary.splitlines()


# workers ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_workers_that_are_killed_lose_nothing(model, tmp_path):
    """200 cells on two workers, one device each; every now and then one is killed."""
    distributed = pytest.importorskip("distributed")
    cells = {
        "tests": [f"pp{n}" for n in range(1, 41)], "presets": "baseline", "device": "embedded",
        "toggles": {"sync": ["per_copy", "packed", "implicit", "copy_boundary", "auto"]},
        "repetitions": 1, "threads": 1, "n_ubatch": 64,
    }  # fmt: skip
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, resources={"device": 1}, dashboard_address=None,
    ) as cluster:  # fmt: skip
        killed, done = [], []

        def kill_one(line):
            done.append(line)
            if len(done) % 12 == 4 and len(killed) < 3:
                nanny = cluster.workers[len(killed) % 2]
                os.kill(nanny.pid, signal.SIGKILL)
                killed.append(nanny.pid)

        with pytest.MonkeyPatch.context() as patch:
            told = lambda line: kill_one(line) if line.startswith("sweep: ") else None  # noqa: E731
            patch.setattr(sweeping, "note", told)
            made = wb.sweep(model, out=tmp_path / "s", scheduler=cluster.scheduler_address, **cells)
    frame = made.to_frame()
    assert len(set(killed)) == 3 and len(done) == 40
    assert len(frame) == frame["key"].nunique() == 200
    assert (frame["status"] == "done").all() and (frame["n"] == 1).all()
    assert len(results.runs(made.folder)) == 40
    for folder in results.runs(made.folder)["folder"]:
        run = results.load_run(Path(folder))
        assert (results.rates(run.samples)["arm"].value_counts() == 1).all()
    again = wb.sweep(model, out=tmp_path / "s", resume=True, dry_run=True, **cells)
    assert again.expected.cells == 0


@pytest.mark.long
def test_a_scheduler_whose_workers_have_no_device_is_refused(model, tmp_path):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        pytest.raises(UsageError, match=r"none of the 1 workers at .* offers a device; start"),
    ):
        wb.sweep(model, "tg2", out=tmp_path / "s", scheduler=cluster.scheduler_address)
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_scheduler_that_is_lost_is_one_line_and_resume_goes_on(model, tmp_path):
    pytest.importorskip("distributed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    run, said = [sys.executable, "-m"], {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    port = address.rpartition(":")[2]
    scheduler = subprocess.Popen(
        [*run, "distributed.cli.dask_scheduler", "--port", port, "--no-dashboard"], **said
    )
    worker = subprocess.Popen(
        [*run, "distributed.cli.dask_worker", address, "--nthreads", "1", "--resources",
         "device=1", "--no-dashboard", "--death-timeout", "60"], cwd=tmp_path, **said,
    )  # fmt: skip
    words = ["workbench", "sweep", "-m", str(model), "--device", "embedded", "--test",
             ",".join(f"tg{n}" for n in range(200, 260)), "-r", "20", "--out", "s"]  # fmt: skip
    try:
        for _ in range(3):  # until the worker is there
            sweep = subprocess.Popen([*run, *words, "--scheduler", address], cwd=tmp_path,
                                     stderr=subprocess.PIPE, text=True)  # fmt: skip
            begun = time.monotonic()
            while sweep.poll() is None and not [*tmp_path.glob("s/groups/*")]:
                assert time.monotonic() - begun < 60
                time.sleep(0.05)
            if sweep.poll() is None:
                break
        scheduler.kill()
        _, err = sweep.communicate(timeout=120)
    finally:
        for process in (scheduler, worker):
            process.kill()
            process.wait()
    assert sweep.returncode == 1 and "Traceback" not in err, err
    assert err.splitlines()[-1].startswith("error: the scheduler is lost; what was measured is")
    done = len([*tmp_path.glob("s/groups/*")])
    assert 0 < done < 60
    asked = [*run, *words, "--resume", "--dry-run"]
    again = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"{60 - done} missing" in again.stdout


# the page -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_page_works_to_the_letter(call, model, tmp_path, monkeypatch):
    """The commands and the Python of the README, in an empty folder with the tiny model."""
    page = (Path(sweeping.__file__).with_name("README.md")).read_text()
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "models").mkdir(parents=True)
    (tmp_path / "data" / "models" / model.name).symlink_to(model)
    ran, said = [], []
    for kind, text in blocks:
        if kind == "toml":
            (tmp_path / "sweep.toml").write_text(text)
        elif kind == "sh":
            status, out, err = call(*shlex.split(text)[1:])
            assert status == 0, err
            ran.append(text)
            said.append(out)
        elif kind == "python":
            exec(compile(text, "README.md", "exec"), names := {})
    assert len(ran) == 4 and "about" in said[0] and "16 cells: 12 done, 4 left out" in said[1]
    assert "done" in said[2] and "flags: --preset best" in said[3]
    assert len(names["sweep"].to_frame()) == 16
    columns = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    known = {name for line in columns for name in re.findall(r"`(\w+)`", line)}
    assert known == {*COLUMNS} - {"reason"} or known == {*COLUMNS}
