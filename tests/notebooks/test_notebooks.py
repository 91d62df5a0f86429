"""The notebooks: they run from top to bottom on a laptop, and keep the shape they all have. And
README's lines of Python do what they say."""

from __future__ import annotations

import ast
import json
import re
import tarfile
from collections import Counter
from operator import attrgetter
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import workbench as wb
from tests.network import network_loads
from tests.notebooks import record
from tests.profiles import rest
from workbench.common.errors import UsageError
from workbench.report.render import render_notebook

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 250_000


@pytest.mark.parametrize("path", rest(NOTEBOOKS, slow=8), ids=attrgetter("stem"))
def test_it_runs_on_the_embedded_device(path, tiny_models, tmp_path):
    given = {"device": "embedded", "repeats": 1, "workload": "tg8", "runs": str(tmp_path)}
    page = render_notebook(path, tmp_path / "page.html", given, runs_dir=tmp_path).read_text()
    assert network_loads(page) == []
    assert "CPU timings say nothing of GPU speed" in page and "data:image/png;base64" in page
    assert list(tmp_path.glob("*/run.json"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=attrgetter("stem"))
def test_it_asks_a_question_and_reads_as_prose(path):
    """From the baseline to its answer; its parameters are literals in one cell."""
    cells = nbformat.read(path, 4).cells
    code, texts = ([c for c in cells if c.cell_type == kind] for kind in ("code", "markdown"))
    assert cells[0] is texts[0] and cells[0].source.splitlines()[0].endswith("?")
    assert re.search(r"starts? from\s+the\s+baseline", " ".join(c.source for c in texts))
    for cell in texts:  # nbconvert takes `#123` at a line's begin for a heading
        assert not re.search(r"^#+\d", cell.source, re.MULTILINE), cell.source
    assert len(code) <= 12
    for cell in code:
        assert len(cell.source.splitlines()) <= 8, cell.source
        for node in ast.walk(ast.parse(cell.source)):
            assert not isinstance(node, ast.FunctionDef | ast.Lambda | ast.For | ast.While)
            if isinstance(node, ast.keyword) and node.arg == "window_us":
                assert isinstance(node.value, ast.Constant), "how many us it takes is the machine's"
    nodes = [node for c in code for node in ast.walk(ast.parse(c.source))]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    loads = [
        {keyword.arg for keyword in call.keywords}
        for call in calls
        if ast.unparse(call.func) == "wb.Engine.load"
    ]
    assert loads and all("toggles" in given for given in loads), "its default is another preset"
    assert any("Engine.load(" in c.source and c.source.endswith("\nengine") for c in code), (
        "its page names the model and the device of the outputs that are saved in it"
    )
    (cell,) = (c for c in code if "parameters" in c.metadata.get("tags", []))
    given = ast.parse(cell.source).body
    assert all(isinstance(one.value, ast.Constant) for one in given)
    assert ast.unparse(given[0]) == "model = 'auto'", "a real shape on a GPU"
    assert {"model", "device", "workload", "repeats", "seed"} <= {g.targets[0].id for g in given}
    # committed outputs are of one run, and small
    assert path.stat().st_size <= MOST_BYTES
    outputs = [o for c in code for o in c.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    kinds = {kind for o in outputs for kind in o.get("data", {})}
    assert kinds <= {"text/plain", "text/html", "image/png"}
    assert not [c for c in code if c.execution_count]
    assert "conclusions." in code[-1].source
    assert code[-1].outputs and code[-1].outputs[0].data["text/plain"]


@pytest.mark.parametrize("path", rest(NOTEBOOKS[::-1], slow=8), ids=attrgetter("stem"))
def test_it_runs_as_make_lab_opens_it_in_a_fresh_clone(path, tiny_models, tmp_path):
    """Nothing is given to it but what it names: the models, and what is committed in data/."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "models").symlink_to(tiny_models)
    (tmp_path / "data" / "results").symlink_to(ROOT / "data" / "results")
    (tmp_path / "notebooks").mkdir()
    for path in (ROOT / "notebooks").glob("*.py"):
        (tmp_path / "notebooks" / path.name).symlink_to(path)
    resources = {"metadata": {"path": str(tmp_path / "notebooks")}}
    book = nbformat.read(path, 4)
    for cell in book.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source += '\nrepeats, workload = 1, "tg8"'
    NotebookClient(book, timeout=300, kernel_name="python3", resources=resources).execute()
    assert list((tmp_path / "data" / "runs").glob("*/run.json"))


def test_the_python_of_readme_runs(tiny_models, tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "models").symlink_to(tiny_models)
    monkeypatch.chdir(tmp_path)
    exec(code.replace("rounds=10", "rounds=5").replace("tg32", "tg4"), {})  # the same, but short
    out = capsys.readouterr().out
    assert "copy_boundary" in out and "A/A control" in out
    assert (tmp_path / "token.pftrace.gz").read_bytes()[:2] == b"\x1f\x8b"


@pytest.mark.long
def test_the_first_hour_s_notebook_runs(tiny_models, tmp_path, monkeypatch, capsys):
    """Its lines as they stand, on shorter tests: a comparison, a sweep, a trace and pictures."""
    page = (ROOT / "notebooks" / "FIRST_HOUR.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(code.splitlines()) < 30
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "models").symlink_to(tiny_models)
    monkeypatch.chdir(tmp_path)
    exec(code.replace("tg16", "tg2").replace("pp64", "pp8"), {})
    out = capsys.readouterr().out
    assert "Toggle: graph_reuse" in out and "A/A band" in out, "compared"
    assert "values: tokens/s (median); columns: graph_reuse" in out, "swept"
    assert "launches" in out and "steps" in out, "traced"
    for name in ("compared", "swept", "trace"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert len(wb.load(tmp_path / "first-sweep").to_frame()) == 16


def test_a_recorded_notebook_keeps_its_own_parameters(tmp_path):
    notebook = nbformat.read(NOTEBOOKS[0], 4)
    sources = [c.source for c in notebook.cells]
    given = nbformat.v4.new_code_cell("device = 'cuda'", metadata={"tags": ["injected-parameters"]})
    notebook.cells.insert(2, given)
    for cell in notebook.cells:
        cell.metadata["papermill"] = {"duration": 1}
    kept = record.stripped(notebook)
    assert [c.source for c in kept.cells] == sources
    tags = [dict(c.metadata) for c in kept.cells if c.metadata]
    assert tags == [{"tags": ["parameters"]}, {"tags": ["picture"]}]
    assert set(record.MADE) == {p.stem for p in NOTEBOOKS}


@pytest.mark.parametrize(("untold", "kept"), [((2, 3), "first"), ((2, 1), "again")])
def test_of_two_runs_the_one_that_leaves_less_untold_is_kept(tmp_path, monkeypatch, untold, kept):
    out, name = tmp_path / "out", "10_fusion"
    counts = iter([*untold, 0])

    def executed(name: str, into: Path, *_: object) -> None:
        said = "first" if into == out else "again"
        for end in record.MADE[name]:
            (into / record.FOLDERS / f"notebook-{end}").mkdir(parents=True)
            run = json.dumps({"said": said, "result": {}})
            (into / record.FOLDERS / f"notebook-{end}" / "run.json").write_text(run)
        (into / f"{name}.ipynb").write_text(said)
        (into / record.TOOK).write_text(json.dumps({name: 50.0}))

    monkeypatch.setattr(record, "executed", executed)
    monkeypatch.setattr(record, "weak", lambda *_: +Counter({name: next(counts)}))
    monkeypatch.setattr(record, "draw", lambda out, device: None)
    record.run(out, [name], "embedded", again_s=70.0)
    assert (out / f"{name}.ipynb").read_text() == kept
    with tarfile.open(out / record.RUNS) as archive:
        runs = [m.name for m in archive.getmembers() if m.isfile()]
        assert runs == [f"notebook-{end}/run.json" for end in sorted(record.MADE[name])]
        assert {json.load(archive.extractfile(run))["said"] for run in runs} == {kept}


def test_a_run_that_would_end_too_late_is_not_begun(tmp_path, monkeypatch):
    ran: list[Path] = []

    def executed(name: str, into: Path, *_: object) -> None:
        ran.append(into)
        (into / record.TOOK).write_text(json.dumps({name: 50.0}))

    monkeypatch.setattr(record, "executed", executed)
    monkeypatch.setattr(record, "weak", lambda *_: Counter({"10_fusion": 1}))
    monkeypatch.setattr(record, "draw", lambda out, device: None)
    record.run(tmp_path, ["10_fusion"], "embedded", again_s=40.0)
    assert ran == [tmp_path] and (tmp_path / record.RUNS).is_file()


def test_what_was_recorded_of_one_leaves_the_others(tmp_path):
    with pytest.raises(UsageError, match="'08_ladder' is not one of 00_tour, "):
        record.run(tmp_path, ["04_plans", "08_ladder"], "embedded")
    out, root = tmp_path / "out", tmp_path / "root"
    results, folder = root / "data" / "results", "notebook-plans-on"
    for path in (out, root / "notebooks", results / folder, results / "notebook-tour"):
        path.mkdir(parents=True)
    (results / folder / "of-before").touch()
    for name in ("04_plans.ipynb", record.PICTURE, record.ABOUT, record.TOOK):
        (out / name).write_text(name)
    with tarfile.open(out / record.RUNS, "w:gz") as archive:
        archive.add(out / "04_plans.ipynb", arcname=f"{folder}/run.json")
    with pytest.raises(UsageError, match="has no notebook-plans-half of 04_plans"):
        record.take(out, root)
    assert (results / folder / "of-before").is_file() and not (results / record.PICTURE).exists()
    with tarfile.open(out / record.RUNS, "w:gz") as archive:
        for name in (folder, "notebook-plans-half"):
            archive.add(out / "04_plans.ipynb", arcname=f"{name}/run.json")
    record.take(out, root)
    assert [path.name for path in (root / "notebooks").iterdir()] == ["04_plans.ipynb"]
    assert [path.name for path in (results / folder).iterdir()] == ["run.json"]
    assert (results / "notebook-tour").is_dir() and (results / record.PICTURE).is_file()
    assert not (results / record.TOOK).exists(), "the seconds of one say nothing of all"
