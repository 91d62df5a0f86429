"""`workbench report` and make: which notebooks, and what is refused before anything is written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from workbench.cli.doctor.findings import LEAST_DRIVER
from workbench.model.synth import models as synth
from workbench.report import pages, render

ROOT = Path(__file__).resolve().parents[2]
RUN = "notebook-fusion"
SHIPPED = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture
def rendered(tmp_path, monkeypatch):
    """The paths that `report` would run, in a folder with copies of all notebooks."""
    found: list[Path] = []
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(synth, "write_tiny_models", lambda folder: [])
    monkeypatch.setattr(render, "render_all", lambda paths, *_, **__: found.extend(paths) or [])
    return found


def test_without_names_all_that_come_with_it_are_run(call, rendered):
    shutil.copy("notebooks/00_tour.ipynb", "notebooks/mine.ipynb")
    assert call("report", "--device", "host")[0] == 0
    assert [path.stem for path in rendered] == SHIPPED and "mine" not in SHIPPED


def test_names_and_own_files_are_run(call, rendered):
    Path("elsewhere").mkdir()
    shutil.copy("notebooks/00_tour.ipynb", "elsewhere/mine.ipynb")
    asked = ("04_plans", "00_tour.ipynb", "elsewhere/mine.ipynb")
    assert call("report", *asked, "--device", "host")[0] == 0
    assert [str(path) for path in rendered] == [
        "notebooks/04_plans.ipynb", "notebooks/00_tour.ipynb", "elsewhere/mine.ipynb"
    ]  # fmt: skip


@pytest.mark.long
def test_the_answers_are_printed_and_the_speedups_of_a_single_notebook(call, tmp_path, monkeypatch):
    """Of pages with recorded runs."""

    def write(paths, out, *_, **__):
        made = []
        for path in paths:
            about = pages.About(
                f"{path.stem}.html", "?", f"Answer of {path.stem}.", "a", "b", (RUN,)
            )
            made.append(Path(out, about.file))
            made[-1].parent.mkdir(exist_ok=True)
            made[-1].write_text(pages.export_html(path, about))
        return made

    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    shutil.copytree(ROOT / "data/results" / RUN, tmp_path / "data/runs" / RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(synth, "write_tiny_models", lambda folder: [])
    monkeypatch.setattr(render, "render_all", write)
    out = call("report", "00_tour", "10_fusion", "--device", "host")[1]
    assert out.splitlines() == [
        "00_tour: Answer of 00_tour.", "10_fusion: Answer of 10_fusion.",
        f"2 reports in {tmp_path / 'reports'}",
    ]  # fmt: skip
    one = call("report", "10_fusion", "--device", "host")[1]
    assert one.startswith("10_fusion: Answer of 10_fusion.\n") and "A/A control" in one
    assert "00_tour" not in one and one.endswith(f"1 report in {tmp_path / 'reports'}\n")


@pytest.mark.parametrize(("name", "says"), [
    ("00_tuor", "notebook notebooks/00_tuor.ipynb does not exist; did you mean 00_tour?"),
    ("nothing", "notebook notebooks/nothing.ipynb does not exist; choose one of 00_tour"),
])  # fmt: skip
def test_an_unknown_notebook_is_refused_before_models_are_written(
    call, tmp_path, monkeypatch, name, says
):
    (tmp_path / "notebooks").mkdir()
    shutil.copy(ROOT / "notebooks/00_tour.ipynb", tmp_path / "notebooks")
    monkeypatch.chdir(tmp_path)
    status, out, err = call("report", "00_tour", name)
    assert (status, out, err.count("\n")) == (2, "", 1) and says in err
    assert os.listdir() == ["notebooks"], "no models, no pages, no runs"
    shutil.rmtree("notebooks")
    status, _, err = call("report")
    assert status == 2 and "`workbench notebooks copy notebooks` writes them" in err


@pytest.mark.parametrize(("name", "text", "says"), [
    ("repeat", "5", "-p repeat: no notebook has that parameter; did you mean repeats?"),
    ("slots", "2", "-p slots: no notebook has that parameter; choose one of model, device"),
    ("repeats", "x", "-p repeats 'x' is not a whole number; give one, as 10"),
    ("repeats", "1.5", "-p repeats '1.5' is not a whole number"),
])  # fmt: skip
def test_a_parameter_that_no_notebook_takes_is_refused(call, rendered, name, text, says):
    status, out, err = call("report", "10_fusion", "--device", "host", "-p", name, text)
    assert (status, out, err.count("\n")) == (2, "", 1) and says in err and not rendered


def test_parameters_have_the_types_that_the_notebooks_give_them(call, rendered, monkeypatch):
    given = {}
    monkeypatch.setattr(
        render, "render_all", lambda _paths, _out, own, **_: given.update(own) or []
    )
    words = ["-p", "slots", "4", "-p", "repeats", "6", "-p", "quick", "False"]
    assert call("report", "--device", "host", *words)[0] == 0
    assert given == {"device": "host", "slots": "4", "repeats": 6, "quick": False}


@pytest.mark.parametrize("text", ["junk\n", "", '{"cells": []}', "[]", '{"nbformat": 4}'])
def test_a_file_that_is_no_notebook_is_one_line(call, rendered, text):
    Path("j.ipynb").write_text(text)
    status, out, err = call("report", "j.ipynb", "--device", "host")
    assert (status, out, err.count("\n")) == (2, "", 1) and not rendered, err
    assert err.startswith("error: j.ipynb is no notebook: ")


def test_a_model_is_a_file_from_here_or_from_the_notebook_and_is_read_before_a_cell(
    call, rendered, tiny_model, monkeypatch, tmp_path
):
    given = {}
    monkeypatch.setattr(
        render, "render_all", lambda _paths, _out, own, **_: given.update(own) or []
    )
    ask = ("report", "00_tour", "--device", "host", "-p", "model")
    own = tiny_model("tiny-llama", "Q8_0")
    assert call(*ask, own)[0] == 0 and given["model"] == str(own)
    shutil.copy(own, "notebooks/beside.gguf")
    assert call(*ask, "beside.gguf")[0] == 0 and given["model"] == "beside.gguf"
    given.clear()
    (tmp_path / "cut.gguf").write_bytes(own.read_bytes()[:100])
    neither = "error: -p model none.gguf: no such file, neither here nor in notebooks/;"
    for file, says in (("none.gguf", neither), (tmp_path / "cut.gguf", "byte")):
        status, out, err = call(*ask, file)
        assert (status, out, given, err.count("\n")) == (1, "", {}, 1) and says in err
    for name, code, says in (
        ("a" * 5000, 1, "aaa...: no such file, neither here nor in notebooks/;"),
        ("", 2, 'error: -p model "" names no file; give -p model auto, or a GGUF file'),
    ):
        status, out, err = call(*ask, name)
        assert (status, out, given, err.count("\n")) == (code, "", {}, 1) and says in err


def test_a_tiny_model_may_be_named_before_it_is_written(call, rendered, monkeypatch, tmp_path):
    given, written = {}, []
    monkeypatch.setattr(synth, "write_tiny_models", written.append)
    monkeypatch.setattr(
        render, "render_all", lambda _paths, _out, own, **_: given.update(own) or []
    )
    ask, name = ("report", "00_tour", "--device", "host", "-p", "model"), synth.TINY[0][0]
    assert call(*ask, f"data/models/{name}")[0] == 0
    assert given["model"] == str(tmp_path / "data/models" / name)
    assert call(*ask, f"../data/models/{name}")[0] == 0
    assert given["model"] == f"../data/models/{name}" and len(written) == 2
    assert call(*ask, f"models/{name}")[0] == 1 and len(written) == 2


@pytest.mark.parametrize(("words", "right"), [
    (["model=X"], "-p model X"), (["model"], "-p model VALUE"),
    (["repeats", "5", "-p", "model=a=b"], "-p model a=b"), (["model=X", "00_tour"], "-p model X"),
])  # fmt: skip
def test_a_parameter_in_one_word_is_told_the_two(call, rendered, words, right):
    status, out, err = call("report", "00_tour", "-p", *words)
    assert (status, out, err.count("\n")) == (2, "", 1) and err.endswith(f"two words: {right}\n")


def test_who_copies_notebooks_is_told_what_runs_them(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, run in (("notebooks", "workbench report"), ("nb", "workbench report nb/*.ipynb")):
        status, _, err = call("notebooks", "copy", "--out", folder)
        assert status == 0 and f"notebooks in {folder}; `{run}` runs them" in err


def made(*words: str) -> str:
    """What make would run."""
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "-o", ".venv/.lab", *words], cwd=ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def test_make_names_no_notebook_and_hands_on_what_is_given():
    assert made("report").strip() == ".venv/bin/workbench report"
    assert made("report", "NOTEBOOKS=00_tour 04_plans").strip().endswith("report 00_tour 04_plans")
    line = made("lab", "LAB_ARGS=--no-browser --port 8899").splitlines()[-1]
    assert "jupyter lab --notebook-dir=notebooks" in line and line.endswith("-browser --port 8899")


def test_the_page_on_remote_gpus_is_linked_and_its_commands_are_there(call):
    page = (ROOT / "notebooks" / "README.md").read_text()
    for name in ("README.md", "CONTRIBUTING.md"):
        assert "](notebooks/README.md)" in (ROOT / name).read_text()
    assert "ssh -N -L 8888:localhost:8888" in page and '--port 8888"' in page
    for command in re.findall(r"`?workbench (\w+(?: export)?)", page):
        assert call(*command.split(), "--help")[0] == 0


def test_limits_name_what_was_tested_where():
    limits = " ".join((ROOT / "README.md").read_text().partition("## Limits\n")[2].split())
    for record in ("gpu-tests.json", "gpu-tests-two.json"):
        made = json.loads((ROOT / "data" / "results" / record).read_text())
        card = made["device"].split()[1]
        assert card in limits and f"driver {made['driver'].partition('.')[0]}" in limits
    assert f"driver {LEAST_DRIVER}" in limits and "Python 3.11" in limits and "Linux" in limits
