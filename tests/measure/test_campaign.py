"""The campaign: what it would make and in which call, what it refuses, and that it goes on."""

from __future__ import annotations

import json
import re

import pytest

import workbench as wb
from data.measure import campaign, matrix, mechanisms, peer, readme
from data.measure.campaign import CampaignRun, calls, main, runs_of
from data.measure.command import RESULTS
from data.measure.recorded import Recorded
from data.measure.session import toggles_of
from tests.benchmarks.recorded_counter import RecordedCounter
from tests.peer import fake_llama_bench
from workbench.benchmarks.runs import provenance, results
from workbench.benchmarks.runs.results import load_run
from workbench.common.errors import UsageError

ONE = "cuda-energy-llama-3.2-1b-q4_k_m"
QUICK = "*fusion-fuse-with-all-*"


def test_the_campaign_has_every_run_of_the_tables_of_the_first_screen():
    """Each line of README's first table, each model beside llama.cpp, many sequences, energy."""
    folders = {run.folder for run in runs_of(list(campaign.PARTS), "cuda")}
    for one in mechanisms.MECHANISMS:
        assert f"cuda-{one.folder}" in folders
    assert {f"peer-cuda/{model}" for model in peer.MODELS} <= folders
    assert f"peer-streams/{mechanisms.SIDE_BY_SIDE_MODEL}" in folders
    for row in mechanisms.ATTENTION:
        assert f"skipping/{mechanisms.ATTENTION_MODEL}/{row[1]}" in folders
    assert {"batched/llama-3.2-1b-q4_k_m", ONE} <= folders
    for part, two in (("mechanisms", False), ("two", True)):
        rows = {f"cuda-{row.folder}": row for row in matrix.MATRIX}
        assert all((rows[run.folder].gpus == 2) is two for run in runs_of([part], "cuda"))


def test_a_dry_run_says_what_is_made_when_and_how_long(tmp_path, capsys):
    """By the seconds of the recorded runs; a model is written once. Nothing is made."""
    given = {"out": tmp_path / "out", "files": tmp_path / "models", "device": "embedded"}
    main("batched", "peer", dry_run=True, at_most_s=300, **given)
    table, _, said = capsys.readouterr().out.rpartition("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in table.splitlines()[2:]]  # fmt: skip
    assert [row[1] for row in rows] == [run.folder for run in runs_of(["batched", "peer"], "cuda")]
    recorded = json.loads((RESULTS / rows[0][1] / results.RUN_JSON).read_text())["duration_s"]
    assert recorded < float(rows[0][3]) < recorded + 30
    seconds = {row[1]: float(row[3]) for row in rows}
    model = "llama-3.2-1b-q4_k_m"
    assert seconds[f"batched/{model}"] > seconds[f"peer-cuda/{model}"]
    assert {row[2] for row in rows} == {"missing"}
    by_call = [row[4] for row in rows]
    assert by_call == sorted(by_call) and by_call[0] == "1" and int(by_call[-1]) > 1
    assert f"in all, {by_call[-1]} calls" in said and not list(tmp_path.iterdir())


def test_a_busy_host_takes_the_whole_time_of_what_is_repeated(tmp_path):
    call = campaign.Call(tmp_path, tmp_path, "cuda", None)
    for run in runs_of(["mechanisms", "attention", "energy"], "cuda"):
        recorded = json.loads((RESULTS / run.folder / results.RUN_JSON).read_text())["duration_s"]
        least = run.until.at_most_s if run.until else 0.0
        assert run.seconds(call) > max(recorded, least)
        assert (least > 0) is (run.part != "energy" and "-gaps-" not in run.folder)


def test_calls_hold_what_fits():
    assert calls([100, 200, 50, 400, 10], 300) == [1, 1, 2, 3, 4]
    assert calls([], 300) == []


def made_run(folder, card: str) -> None:
    """A complete run of this commit, of a machine with a card."""
    found = load_run(RESULTS / "peer-cuda" / "llama-3.2-1b-bf16")
    run = found.run | {"commit": provenance.commit()}
    run["machine"] = run["machine"] | {"gpus": [{"card": card}]}
    results.write_run(folder, run, found.samples)


def test_cards_are_never_mixed(tmp_path, capsys):
    """A complete run of another card ends the call; one of another commit is made again anyway."""
    built = fake_llama_bench.install(tmp_path / "built").parent
    given = {"out": tmp_path / "out", "files": tmp_path, "device": "embedded", "peer": built}
    made_run(tmp_path / "out" / "peer-cuda" / "llama-3.2-1b-bf16", "aaaaaaaa")
    with pytest.raises(
        UsageError, match=r"is of card aaaaaaaa, and this machine has \w+; .*--again"
    ):
        main("peer", **given)
    call = campaign.Call(tmp_path / "out", tmp_path, "cuda", built)
    runs = runs_of(["peer"], "cuda")
    campaign.check_cards(runs, call, ["aaaaaaaa"])
    with pytest.raises(UsageError, match="this machine has bbbbbbbb"):
        campaign.check_cards(runs, call, ["bbbbbbbb"])
    for again, state in ((False, "there already"), (True, "missing")):
        main("peer", like="*-1b-bf16", dry_run=True, again=again, **given)
        assert state in capsys.readouterr().out


def test_what_cannot_become_a_campaign_is_refused(tmp_path):
    given = {"out": tmp_path / "out", "files": tmp_path, "device": "embedded"}
    for parts, how, says in (
        (["peers"], {}, "part 'peers' does not exist; choose from mechanisms"),
        ([], {}, r"streams, batched, peer need --peer DIR .* other parts: mechanisms"),
        (["energy"], {"like": "cuda-sync*"}, "names no run"),
        (["attention"], {"quick": True}, "part attention has no quick runs"),
    ):
        with pytest.raises(UsageError, match=says):
            main(*parts, **given | how)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_campaign_makes_its_runs_and_goes_on(tmp_path, tiny_models, capsys):
    """On the embedded device, with a tiny model: too little time, then enough, then all there."""
    given = {"out": tmp_path, "files": tiny_models, "device": "embedded", "quick": True}
    main("mechanisms", like=QUICK, at_most_s=1, **given)
    said = capsys.readouterr().out
    assert "0 of 1 runs are there" in said and "call again for the others" in said
    main("mechanisms", like=QUICK, **given)
    said = capsys.readouterr().out
    (folder,) = tmp_path.glob(f"quick-embedded-{QUICK[1:]}")
    commit = load_run(folder).run["commit"]["hash"][:8]
    assert "| made" in said and commit in said and "1 of 1 runs are there; " in said
    main("mechanisms", like=QUICK, **given)
    assert "there already" in capsys.readouterr().out


def test_a_run_that_fails_is_told(tmp_path, capsys, monkeypatch):
    """The others go on, and the call ends with an error."""

    def fails(call):
        raise RuntimeError("the device is gone")

    made = [CampaignRun("energy", name, "llama-3.2-1b-bf16", fails) for name in ("a", "b")]
    monkeypatch.setitem(campaign.PARTS, "energy", lambda part: iter(made))
    with pytest.raises(campaign.WorkbenchError, match="2 failed: a, b"):
        main("energy", out=tmp_path, files=tmp_path, device="embedded")
    said = capsys.readouterr()
    assert "0 of 2 runs" in said.out and said.err.count("RuntimeError: the device") == 2


@pytest.mark.long
def test_the_table_of_energy_is_made_from_run_folders(tmp_path, tiny_model):
    """A line for each of five switches; joules of both sides, their ratio, and its verdict."""
    row = matrix.the(ONE.removeprefix("cuda-"))
    here = " | ".join(arm for arm in row.compared.split(" | ") if arm != "pdl=off")  # no GPU has it
    counter = RecordedCounter("matmul", work_ns=2_600_000_000)
    with wb.Engine.load(tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=64) as engine:
        wb.ab(engine, here, tests="tg2", rounds=5, background=toggles_of(row.toggles, engine),
              out=tmp_path / ONE, energy=counter)  # fmt: skip
    text = readme.made("energy-cuda", Recorded(tmp_path))
    names = [name for name, *_ in matrix.ENERGY]
    assert [name in text for name in names] == [True, True, True, True, False]
    assert "no difference" in text and "J/token off" in text and "windows of 5 s" in text
    assert re.search(r"the counter steps every (99|100|101) ms", text)
    assert (
        readme.made("energy-cuda", Recorded(tmp_path / "none")) == "Joules a token: not measured."
    )
    assert len(matrix.ENERGY) == 5
