"""The functions of `wb` that measure, check and read: what they take, and what their results do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

import workbench as wb
from tests.benchmarks.fake_engine import timed
from tests.benchmarks.made_runs import a_run, comparison, write
from workbench.benchmarks.compare.arms import arms_of
from workbench.benchmarks.compare.forms import comparison_of, one_comparison
from workbench.benchmarks.runs import results
from workbench.common.errors import UsageError
from workbench.common.upper import OF_KIND, OF_TRACE
from workbench.config import TogglePreset, Toggles
from workbench.report.tables import in_short

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "data" / "results"
ORIGIN = [
    "model",
    "device",
    "settings",
    "toggle",
    "baseline",
    "background",
    "commit",
    "run_id",
    "date",
    "test",
]


# bench --------------------------------------------------------------------------------------------


def test_a_bench_has_rates_times_and_its_origin(monkeypatch, tmp_path):
    found = wb.bench(timed(monkeypatch), "tg4,pp8", 3, out=tmp_path / "run")
    frame = found.to_frame()
    assert frame["test"].tolist() == ["tg4", "pp8"] and frame["n"].tolist() == [3, 3]
    assert frame["tps"].tolist() == pytest.approx([1000.0] * 2)
    assert frame["p50_us"][0] == pytest.approx(1000.0) and frame["p99_us"].isna().tolist()[1]
    assert frame["ttft_us"].tolist() == pytest.approx([1000.0, 8000.0])
    assert not frame[["model", "device", "toggles", "run_id"]].isna().any().any()
    assert "| tg4" in repr(found) and "a clock that counts" in found.caption
    assert "<table" in found._repr_html_() and len(found.samples) == 3 * (4 + 1)
    again = wb.load(tmp_path / "run")
    assert type(again) is type(found) and again.run == found.run
    pd.testing.assert_frame_equal(again.to_frame(), frame)
    both = pd.concat([frame, again.to_frame()], ignore_index=True)
    assert list(both.columns) == list(frame.columns) and len(both) == 4
    saved = type(found).load(found.save(tmp_path / "copy"))
    pd.testing.assert_frame_equal(saved.to_frame(), frame)
    with pytest.raises(UsageError, match="holds a run of kind 'bench', no comparison"):
        wb.AB.load(tmp_path / "run")


def test_a_context_that_is_given_stays_as_it_is(tiny_model):
    """The default's value counts as not given, as the docstrings say."""
    path, on = tiny_model("tiny-llama", "Q8_0"), {"device": "host"}
    for given in ({}, {"n_ctx": wb.EngineConfig.n_ctx}):
        run = wb.bench(path, "pp2050", 1, **on, **given).run
        assert run["engine"]["config"]["n_ctx"] == 2050
    assert all("n_ctx=2048: the default's value" in one.__doc__ for one in (wb.bench, wb.ab))
    for ask in (
        lambda: wb.bench(path, "tg8", 1, n_ctx=4, **on),
        lambda: wb.ab(path, "fuse=off,on", tests="tg8", rounds=5, n_ctx=4, **on),
    ):
        with pytest.raises(
            UsageError, match="test tg8 needs 8 KV cells, but the engine has n_ctx=4"
        ):
            ask()


def test_bench_is_what_the_command_measures(engine, call, tmp_path):
    """The same tests, the same arms, the same record: one way to measure."""
    own = wb.bench(engine, "tg2", 2, seed=3, out=tmp_path / "own").run
    path = engine.model.path
    status, out, _ = call(
        "bench", "-m", path, "-p", "0", "-n", "2", "-r", "2", "--seed", "3", "--device", "embedded",
        "--out", tmp_path / "command", "--preset", "baseline",
    )  # fmt: skip
    theirs = results.load_run(tmp_path / "command").run
    assert status == 0 and "tg2" in out
    for key in ("kind", "tests", "seed", "repetitions"):
        assert own[key] == theirs[key], key
    assert [(a["name"], a["toggles"], a["program"]) for a in own["arms"]] == [
        (a["name"], a["toggles"], a["program"]) for a in theirs["arms"]
    ]
    assert own["result"].keys() == theirs["result"].keys()


@pytest.mark.long
def test_a_path_is_opened_for_the_function_and_closed_again(tiny_model):
    from workbench.engine.engine import OPENED

    path, before = tiny_model("tiny-llama", "Q8_0"), len([*OPENED])
    found = wb.bench(path, "pp8+tg2@b2", 1, device="embedded", n_ctx=20, toggles="sync=packed")
    config = found.run["engine"]["config"]
    assert config["n_seqs"] == 2 and config["n_ctx"] == 20, "room for the test, as given"
    assert found.run["arms"][0]["toggles"]["sync"] == "packed"
    how = {"tests": "tg2", "rounds": 1, "smoke": True, "device": "embedded"}
    two = wb.ab(str(path), "sync=per_copy,packed", **how)
    assert [arm["name"] for arm in two.run["arms"]] == ["per_copy", "packed", "per_copy (A/A)"]
    assert two.run["arms"][0]["toggles"] == Toggles().to_dict(), "as the command begins"
    changed = wb.ab(path, "sync=per_copy,packed", background="n_copies=4", **how)
    assert changed.run["arms"][0]["toggles"] == Toggles(n_copies="4").to_dict(), "and nothing else"
    assert wb.check(path, device="null").safe
    assert len([*OPENED]) == before


@pytest.mark.parametrize(("ask", "says"), [
    (lambda e: wb.bench(e, "tg2", repetitons=3), "'repetitons' does not exist; did you mean repet"),
    (lambda e: wb.bench(e, "tg2", reps=3), "'reps' does not exist; did you mean repetitions?"),
    (lambda e: wb.ab(e, "sync", reps=5), "'reps' does not exist; did you mean rounds?"),
    (lambda e: wb.ab(e, "sync=per_copy,packed", round=5), "'round' does not exist; did you mean"),
    (lambda e: wb.ab("m.gguf", "sync=per_copy,packed", devise="host"), "did you mean device?"),
    (lambda e: wb.check(e, n_ctx=64), "n_ctx cannot be set of an engine that is open"),
    (lambda e: wb.bench(e, "tg2", toggles="best"), "give engine.variant(toggles)"),
    (lambda e: wb.bench(None, "tg2"), "NoneType is no engine; give an Engine, or the path"),
    (lambda e: wb.bench(e, "128tg"), "test '128tg' does not exist; did you mean tg128?"),
    (lambda e: wb.bench(e, "tg2", 0), "repetitions=0"),
    (lambda e: wb.check(e, 0), "a prompt of 0 tokens has no steps"),
    (lambda e: wb.check(e, "4"), "n_tokens='4' is no whole number; give one, as n_tokens=4"),
    (lambda e: wb.check(e, 4, 0.5), "n_decoded=0.5 is no whole number"),
    (lambda e: wb.ab(e, "fuse=off,on", rounds="5"), "rounds='5' is no whole number"),
    (lambda e: wb.ab(e, "fuse=off,on", rounds=5.5), "rounds=5.5 is no whole number"),
    (lambda e: wb.bench(e, "tg2", "2"), "repetitions='2' is no whole number"),
    (lambda e: wb.EngineConfig(n_ctx="5"), "n_ctx='5' is no whole number"),
    (lambda e: wb.ab(e, "fuse=off,on", "tg4"), "a test is given as tests=['tg4']"),
    (lambda e: wb.ab(e, ["fuse", "sync"], "tg4"), "a test is given as tests=['tg4']"),
    (lambda e: wb.ab(e, "fuse=off,on", 3), "3 cannot be them; a test is given as tests=['tg32']"),
    (lambda e: wb.ab(e, "fuse=off,on", tests="tg2", at_most_s=3), "at_most_s=3 needs until: it is"),
    (lambda e: wb.bench(e, "tg2", 2, at_most_s="30s"), "at_most_s='30s' needs until: it is the"),
    (lambda e: wb.runs("no-such-folder"), "no-such-folder is no folder; name a folder that holds"),
    (lambda e: wb.runs(None), "None is no path; give a folder that holds run folders"),
    (lambda e: wb.load(3), "3 is no path; give a run folder, or the file of a trace"),
    (lambda e: wb.diff(None, None), "diff takes profiles or trace files, and no NoneType"),
    (lambda e: comparison().to_csv("a.xlsx"), "a.xlsx has an unknown extension; the file"),
    (lambda e: comparison().to_parquet("a.csv"), "extension; the file can be .parquet"),
])  # fmt: skip
def test_a_wrong_call_is_refused_in_one_line(engine, ask, says):
    with pytest.raises(UsageError) as refused:
        ask(engine)
    assert says in str(refused.value) and "\n" not in str(refused.value)


# comparisons --------------------------------------------------------------------------------------


FUSED = Toggles(fuse="on")


@pytest.mark.parametrize(("toggle", "values", "background", "spec", "beneath"), [
    ("sync=per_copy,packed", None, None, "sync=per_copy,packed", Toggles()),
    ("sync", ["per_copy", "packed"], FUSED, "sync=per_copy,packed", FUSED),
    ("streams", [1, 3], "fuse=on", "streams=1,3", FUSED), ("pdl", (False, True), None, "pdl=off,on",
                                                         Toggles()),
    ("fuse_qkv=off,on", None, "fuse=on", "fuse_qkv=off,on", FUSED),
    ("sync=auto", None, "sync=packed", "sync=auto", Toggles(sync="packed")),
    ("plans=off | plans=ours pdl=on", None, None, "plans=off | plans=ours pdl=on", Toggles()),
    (Toggles(), FUSED, None, "fuse=off,on", Toggles()),
    ([Toggles(), FUSED], None, None, "fuse=off,on", Toggles()),
    (Toggles(sync="packed"), Toggles(sync="auto"), None, "sync=packed,auto",
     Toggles(sync="packed")),
    (FUSED, Toggles(streams="3"), None, "fuse=on streams=1 | fuse=off streams=3", FUSED),
    ([{"sync": "packed"}, {"sync": "auto", "streams": 3}], None, {"fuse": True},
     "sync=packed streams=1 | sync=auto streams=3", Toggles(fuse="on", sync="packed")),
    (TogglePreset("baseline"), TogglePreset("baseline", {"fuse": "on"}), None, "fuse=off,on",
     Toggles()),
])  # fmt: skip
def test_every_form_of_a_comparison_becomes_one_spec(
    engine, toggle, values, background, spec, beneath
):
    made = one_comparison(engine, toggle, values, background)
    assert (made.spec, made.background) == (spec, beneath)


def test_a_toggle_of_a_list_is_compared_with_the_value_beneath(engine):
    made, left = comparison_of(engine, "sync", "sync=packed fuse=on")
    first, *others = made.spec.removeprefix("sync=").split(",")
    assert first == "packed" and sorted([first, *others]) == sorted(Toggles.values("sync"))
    assert made.background == Toggles(sync="packed", fuse="on") and not left


def test_long_sets_are_named_by_their_presets_and_a_set_can_have_a_name(engine):
    best = TogglePreset("llama.cpp@2025-12", {"fuse": "on"})
    made = one_comparison(engine, Toggles(), best, None)
    _, arms = arms_of(made.spec, made.background)
    names = ["baseline", str(best), "baseline (A/A)"]
    assert [arm.name for arm in arms] == names
    assert [arm.toggles for arm in arms] == [Toggles(), best.toggles(), Toggles()]
    _, (first, second, _) = arms_of("as it is: | wide: streams=3 fork=any", FUSED)
    assert (first.name, first.toggles, second.name) == ("as it is", FUSED, "wide")
    assert second.toggles == dataclasses.replace(FUSED, streams="3", fork="any")
    _, (plain, _, _) = arms_of("plain: | wide: streams=3", FUSED)
    assert (plain.name, plain.toggles) == ("plain", FUSED)
    for empty in ("sync=packed |", "| fuse=on", "sync=packed | | fuse=on"):
        with pytest.raises(UsageError, match="has an empty set of toggles"):
            arms_of(empty, Toggles())
    with pytest.raises(UsageError, match="has a set of toggles twice"):
        arms_of("a: fuse=on | a: streams=3", Toggles())


@pytest.mark.parametrize(("how", "says"), [
    ((3,), "3 is no comparison; give 'sync=per_copy,packed'"), ((Toggles(),), "is no comparison"),
    (("sync", Toggles()), "is no comparison; give"), (([],), "[] is no comparison"),
    (([Toggles(), "fuse"],), "is no comparison"), (([Toggles(), Toggles()],), "of which 1 differ"),
    (([Toggles(), FUSED], ["on"]), "sets of toggles have no values"),
    (("synk", ["on"]), "toggle 'synk' does not exist; did you mean sync?"),
    ((Toggles(), FUSED, "tg2", 5, 0, Toggles()), "so there is no background; leave it out"),
    ((["sync"], ["packed"]), "cannot be the values of several toggles"),
    ((["sync=packed,auto", "sinc"],), "toggle 'sinc' does not exist; did you mean sync?"),
    ((["slot_choice"],), "nothing can be compared: slot_choice is left out: slot_choice=lowest_fr"),
    (("sync=per_copy,packed plans=off,ours",), "write ' | ' between sets of toggles, or make a"),
    (("n_ubatch=128,512",), "n_ubatch is a setting and no toggle"),
    (("sync=auto", None, "tg2", 5, 0, "preset=best"), "preset is no toggle; give its name alone"),
    (("sync", ["per_copy", "auto"], "tg2", 5, 0, "sync=packed"), "sync is what is compared; leave"),
    (("fuse=off,on", None, "tg2", 5, 0, {"fuse": True}), "leave it out of background, and put the"),
    ((["sync=per_copy,auto"], None, "tg2", 5, 0, "sync=packed"), "sync is what is compared; leave"),
    (("sync=per_copy,auto", "tg4"), "so 'tg4' cannot be them; a test is given as tests=['tg4']"),
    (("sync", ["per_copy", "pakced"]), "sync='pakced' does not exist; did you mean packed?"),
])  # fmt: skip
def test_what_is_no_comparison_says_what_is(engine, how, says):
    steps = engine.n_steps
    with pytest.raises(UsageError) as refused:
        wb.ab(engine, *how)
    assert says in str(refused.value) and "\n" not in str(refused.value)
    assert engine.n_steps == steps


@pytest.mark.long
def test_several_toggles_are_comparisons_beside_the_baseline(engine, tmp_path):
    how = {"tests": "tg2", "rounds": 1, "smoke": True, "out": tmp_path / "run"}
    found = wb.ab(engine, ["graph_reuse", "pdl", "fuse_bias", "fuse=off,on"], **how)
    assert list(found) == ["graph_reuse", "fuse"]
    arms = [arm["name"] for arm in found["graph_reuse"].run["arms"]]
    assert arms == [*Toggles.values("graph_reuse"), "rebuild (A/A)"]
    left = "\n".join(found.left_out)
    assert "pdl=on is left out: the embedded device cannot honour pdl=on" in left
    assert "fuse_bias is left out: " in left and left in found.verdict and left in repr(found)
    frame = found.to_frame()
    assert set(frame["toggle"]) == {"graph_reuse", "fuse"} and len(frame) == 4 + 2
    assert found.table()["Toggle"].tolist() == ["graph_reuse"] * 3 + ["fuse"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run-fuse", "run-graph_reuse"]
    again = wb.load(tmp_path / "run-fuse")
    pd.testing.assert_frame_equal(again.to_frame(), found["fuse"].to_frame())
    figure = found.plot()
    assert len(figure.axes[0].get_yticklabels()) == 6 and "<table" in found._repr_html_()


@pytest.mark.long
def test_the_frames_of_two_comparisons_concatenate():
    one, other = comparison(), comparison(device="cuda", model="other")
    both = pd.concat([one.to_frame(), other.to_frame()], ignore_index=True)
    assert list(both.columns)[: len(ORIGIN)] == ORIGIN and both["model"].nunique() == 2
    assert not both[ORIGIN].isna().any().any()
    per_test = both[~both["is_control"]].groupby(["model", "test"])["speedup"].size()
    assert per_test.tolist() == [3] * 4
    pd.testing.assert_frame_equal(one.to_frame()[one.summary().columns], one.summary())


@pytest.mark.long
def test_comparisons_that_differ_in_a_setting_are_told_apart(tiny_model):
    path = tiny_model("tiny-llama", "Q8_0")
    given = {"tests": "tg2", "rounds": 1, "smoke": True, "device": "embedded"}
    small, usual = (wb.ab(path, "sync=per_copy,packed", n_ubatch=n, **given) for n in (64, 512))
    both = pd.concat([small.to_frame(), usual.to_frame()], ignore_index=True)
    assert both["settings"].tolist() == ["n_ubatch=64"] * 2 + ["default"] * 2
    assert "; n_ubatch=64; " in small.caption and "n_ubatch" not in usual.caption


@pytest.mark.parametrize("tests", [None, 3])
def test_what_names_no_test_is_refused_in_a_line(monkeypatch, tests):
    with pytest.raises(UsageError, match=f"^{tests} names no test; give 'tg128'.* of names$"):
        wb.bench(timed(monkeypatch), tests)


def test_each_row_of_sets_says_the_toggles_of_its_arm(tmp_path):
    arms = ["plain", "packed", "more"]
    fused = dict.fromkeys(Toggles.members("fuse"), "on")
    toggles = [Toggles(**{"pdl": "on"} | own).to_dict() for own in (
        {}, {"sync": "packed"}, {"sync": "packed", "pdl": "off"} | fused)]  # fmt: skip
    result = {"toggle": "", "smoke": False, "warm_up": {}, "answers": {}}
    sets = wb.AB.load(write(tmp_path, "sets", {"tg8": [100.0, 110.0, 120.0]}, arms=arms, kind="ab",
                            control=True, toggles=toggles, result=result))  # fmt: skip
    frame = sets.to_frame().set_index("arm")["toggle"]
    assert frame["packed"] == "sync=packed" and frame["plain (A/A)"] == "the same toggles"
    assert set(frame["more"].split(", ")) == {"sync=packed", "pdl=off", "fuse=on"}
    both = pd.concat([sets.to_frame(), comparison().to_frame()], ignore_index=True)
    both.to_csv(tmp_path / "both.csv", index=False)
    assert not pd.read_csv(tmp_path / "both.csv")["toggle"].isna().any()
    assert set(comparison().to_frame()["toggle"]) == {"sync"}
    # pictures and tables of a comparison name its arms, and stay one
    labels = [label.get_text() for label in sets.plot().axes[0].get_yticklabels()]
    assert sorted(labels) == ["tg8  more", "tg8  packed", "tg8  plain (A/A)"]
    (beside,) = in_short(sets)
    assert len(beside.parts) == 1


def test_a_frame_is_written_as_one_file(tmp_path):
    found = comparison()
    csv, parquet = found.to_csv(tmp_path / "a.csv"), found.to_parquet(tmp_path / "a.parquet")
    pd.testing.assert_frame_equal(pd.read_csv(csv), found.to_frame(), check_dtype=False)
    assert pq.read_table(parquet).column_names == list(found.to_frame().columns)
    pd.testing.assert_frame_equal(pd.read_parquet(parquet), found.to_frame(), check_dtype=False)
    with pytest.raises(UsageError, match="none"):
        found.to_csv(tmp_path / "none" / "a.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.csv", "a.parquet"]


# variants -----------------------------------------------------------------------------------------


def test_a_variant_is_asked_for_in_words(engine, tiny_model):
    for asked in ("sync=copy_boundary", {"sync": "copy_boundary"}):
        with engine.variant(asked) as variant:
            assert variant.toggles == Toggles(sync="copy_boundary") == engine.resolve(asked)
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(path, device="null", toggles={"sync": "copy_boundary"}) as best:
        assert best.toggles.sync == "copy_boundary" and best.preset.startswith("best for one")
        with best.variant("streams=1 fuse=off") as variant:
            assert (variant.toggles.sync, variant.toggles.fuse) == ("copy_boundary", "off")
            assert variant.preset.startswith("best for one sequence"), "changes of the preset"
    with wb.Engine.load(path, device="null", toggles="baseline pdl=off sync=packed") as plain:
        assert plain.toggles == Toggles(sync="packed")
    with pytest.raises(UsageError, match=r"sync is a toggle .* give toggles=\{'sync': 'packed'\}"):
        wb.Engine.load(path, device="null", sync="packed")
    with pytest.raises(UsageError, match="did you mean sync"):
        engine.variant("snyc=packed")


# check --------------------------------------------------------------------------------------------


def test_check_is_what_the_command_prints(engine, call):
    proof = wb.check(engine, 3, 1)
    status, out, _ = call(
        "check", "-m", engine.model.path, "--n-tokens", "3", "--n-decoded", "1", "--device",
        "embedded", "--n-ctx", "128",
    )  # fmt: skip
    assert (
        status == 0 and proof.safe and out.splitlines() == proof.lines() == repr(proof).split("\n")
    )
    frame = proof.to_frame()
    waits = frame[frame["finding"] == "wait"]
    assert len(frame) == len(waits) == len(proof.found.waits)
    assert waits["superfluous"].sum() == len(proof.found.superfluous) > 0
    assert waits["sufficient"].sum() == len(proof.found.sufficient) > 0
    assert "<pre>" in proof._repr_html_()


def test_a_race_is_a_row(tiny_model):
    path = tiny_model("tiny-llama", "Q8_0")
    racing = {"toggles": "sync=implicit copy_stream=own step_wait=outputs", "device": "null"}
    proof = wb.check(path, 48, n_ubatch=16, **racing)
    races = proof.to_frame().query("finding == 'race'")
    assert not proof.safe and len(races) == len(proof.found.races) > 0
    assert races["buffer"].notna().all() and (races["bytes"] > 0).all() and races["missing"].all()
    with pytest.raises(UsageError, match=r"Proof has no picture; .* \(drawn are AB, "):
        proof.plot()


# load ---------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_folder_of_each_kind_is_read_as_its_result(tmp_path):
    """Recorded folders, one of each kind."""
    kinds: dict[str, Path] = {}
    for path in sorted(RESULTS.glob("**/run.json")):
        kind = json.loads(path.read_text())["kind"]
        kinds.setdefault(kind, path.parent)
    assert {"ab", "bench", "gaps", "kernels"} <= set(kinds)
    for kind, folder in kinds.items():
        found = wb.load(folder)
        assert type(found).__name__ in ("AB", "Bench", "Gaps", "KernelRun", "ServeBench", "Run")
        assert (kind in OF_KIND) == (type(found) is not wb.Run), kind
        assert found.run["kind"] == kind
    assert wb.load(kinds["ab"] / "run.json").run == wb.load(kinds["ab"]).run
    own = write(tmp_path, "own", kind="mine")
    assert isinstance(wb.load(own), wb.Run) and "mine" in wb.load(own)._repr_html_()


def test_loads_are_frames_that_concatenate_and_pictures(tmp_path):
    one, other = (wb.load(RESULTS / f"notebook-served-serving{end}") for end in ("", "-a-a"))
    frame, run = one.to_frame(), one.run
    origin = ["model", "device", "settings", "commit", "run_id", "date", "setting"]
    assert list(frame.columns[:7]) == origin
    assert set(frame["model"]) == {f"{run['model']['name']} {run['model']['quant']}"}
    assert set(frame["run_id"]) == {run["run_id"]}
    assert set(frame["device"]) == {run["engine"]["device_description"]}
    assert frame["output_throughput"].tolist() == [
        row.figures["output_throughput"] for row in one.rows
    ]
    assert frame["request_goodput"].isna().all(), "no objective was asked for"
    both = pd.concat([frame, other.to_frame()], ignore_index=True)
    assert len(both) == 2 * len(frame) and both["run_id"].nunique() == 2
    again = pd.read_csv(one.to_csv(tmp_path / "load.csv"))
    pd.testing.assert_frame_equal(again, frame, check_dtype=False)
    assert pq.read_table(one.to_parquet(tmp_path / "load.parquet")).num_rows == len(frame)
    assert len(one.plot().axes[0].lines) == len(wb.plot(one).axes[0].lines) > 0


def test_what_cannot_be_loaded_is_refused_in_one_line(tmp_path):
    newer = write(tmp_path, "newer")
    (newer / "run.json").write_text(json.dumps(a_run(schema=2)))
    for name in ("t.txt", "run.zip"):
        (tmp_path / name).write_text("x")
    for path, says in (
        (tmp_path / "missing", "does not exist; give a run"), (newer, "schema 2 of run.json"),
        (tmp_path / "t.txt", "is no run folder, and no trace, whose name ends in .pftrace"),
        (tmp_path, "is no run folder: run.json is missing"),
        (tmp_path / "run.zip", "is no run folder: it is a file; unpack it first (unzip "),
    ):  # fmt: skip
        with pytest.raises(UsageError) as refused:
            wb.load(path)
        assert says in str(refused.value) and "\n" not in str(refused.value)
    for name, what in (("run.zip", "unpack it first"), ("t.txt", "`workbench runs ls` lists run")):
        with pytest.raises(UsageError, match=f"{name} is no run folder: it is a file; {what}"):
            wb.AB.load(tmp_path / name)
    assert {".json.gz", ".pftrace.gz"} <= set(OF_TRACE)
