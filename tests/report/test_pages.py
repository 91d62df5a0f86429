"""Pages of notebooks, one file each, offline; and the index, which lists their answers."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from tests.network import network_loads
from workbench.benchmarks.compare.comparison import AB
from workbench.common.errors import UsageError, WorkbenchError
from workbench.common.progress import SHARE, Bar
from workbench.engine.engine import Engine
from workbench.report import kernels, pages, render, tables
from workbench.report.pages import About
from workbench.trace import perfetto
from workbench.trace.spans import HOST_LANE, Span

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
FUSION = NOTEBOOKS / "10_fusion.ipynb"
ABOUT = About("a.html", "Why & <when>?", 'A "token" is 3.', "embedded, 2 workers", "2026-11-22")
CELLS = """
import pandas as pd
from workbench.report import plots
from workbench.trace.profile import Timeline
from workbench.trace.spans import Span
print("n is", n, "and device", device)
---
plots.timeline(Timeline([Span("a", "launch", "host", 0, 10**6, {"step": 0})] * n))
---
pd.DataFrame({"Speedup": [1.19]})
"""


def notebook(path: Path, *cells: str) -> Path:
    tagged = {"tags": ["parameters"]}
    first = nbformat.v4.new_code_cell('device = "auto"\nn: int = 1', metadata=tagged)
    question = nbformat.v4.new_markdown_cell("# A question? [link](https://example.org)")
    more = [nbformat.v4.new_code_cell(c.strip()) for c in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=[question, first, *more]), path)
    return path


@pytest.mark.long
def test_a_page_shows_its_notebook_offline(tmp_path):
    """Parameters, pictures, tables, the banner, the trace; and how far it is, meanwhile."""
    path = notebook(tmp_path / "07_question.ipynb", *CELLS.split("---"))
    trace, runs = tmp_path / "t.pftrace.gz", tmp_path / "runs"
    out = tmp_path / "out" / "07_question.html"
    perfetto.write([Span("step", "step", HOST_LANE, 0, 10, {"step": 0})], trace)
    left = Bar("report", sum(render.cell_seconds(path, runs).values()), SHARE, None)
    said: list[str] = []
    left.update = lambda n=1: (Bar.update(left, n), said.append(str(left)))  # type: ignore
    given = {"n": 3, "device": "embedded"}
    render.render_notebook(path, out, given, runs_dir=runs, trace=trace, left=left)
    page = out.read_text()
    assert network_loads(page) == [] and len(page.encode()) <= render.MOST_REPORT_BYTES
    assert "https://example.org" in page, "to follow a link is the reader's choice"
    assert not re.search(r"<script[^>]*\bsrc=|<link\b", page)
    assert "n is 3 and device embedded" in page
    assert "data:image/png;base64," in page and "1.19" in page
    assert f"Ran on the embedded device: {render.CPU_BANNER}." in page
    body = page[page.index("<body") :]
    order = ['<h1 id="A-question?', 'class="wb-answer"', 'class="wb-banner"', "data:image",
             "n is 3"]  # fmt: skip
    places = [body.index(part) for part in order]
    assert places == sorted(places), "the answer, the picture, then how"
    assert body.count("A question?") == 1 and "Recorded on" not in body
    data = re.search(r'id="wb-trace-data"[^>]*>([^<]*)</script>', page)
    assert data and base64.b64decode(data[1]) == trace.read_bytes()
    shares = [(0, 2), (25, 3), (25, 4), (50, 5), (75, 6), (100, 6)]  # 3: the given parameters
    for line, (share, n) in zip(said, shares, strict=True):
        assert line.startswith(f"report: {share} %, ") and f"07_question cell {n} of 6" in line
    again = render.cell_seconds(path, runs)
    assert len(again) == 4 and all(0 < s < 60 and s != 1 for s in again.values()), "as last time"


@pytest.mark.long
def test_a_failing_notebook_leaves_its_page(tmp_path, capsys):
    bad = notebook(tmp_path / "bad.ipynb", "print('before')", "raise OSError('no\\nway')", "1")
    said = r"^bad.ipynb: cell 5 failed: OSError: no; see .*html$"
    with pytest.raises(WorkbenchError, match=said):
        render.render_all([bad], tmp_path, {"device": "cuda", "unknown": 1}, runs_dir=tmp_path)
    page = (tmp_path / "bad.html").read_text()
    assert "before" in page and "OSError" in page and capsys.readouterr().out == ""
    assert 'class="wb-banner"' not in page, "a GPU's timings need none"


CONNECTION = "/somewhere/kernel-1.json"


@pytest.fixture
def no_kernel(monkeypatch):
    """For tests that run no cell: a kernel would take seconds."""
    kernel = SimpleNamespace(has_kernel=False, connection_file=CONNECTION)
    monkeypatch.setattr(kernels, "started", lambda folder: kernel)


def test_all_reports_are_named(tmp_path, monkeypatch, capsys, no_kernel):
    given = {}

    def execute(source, executed, parameters, timeout_s, left, kernel):
        given[source.name] = parameters
        executed.parent.mkdir(exist_ok=True)
        executed.write_text(source.read_text())

    monkeypatch.setattr(render, "execute_notebook", execute)
    books = [notebook(tmp_path / f"{n}.ipynb", "1") for n in ("a", "b")]
    made = render.render_all(books, tmp_path / "out", {"n": 2, "x": 1}, runs_dir=tmp_path / "r")
    assert given == {"a.ipynb": {"n": 2}, "b.ipynb": {"n": 2}}
    index = (tmp_path / "out" / "index.html").resolve()
    lines = [*(str(p.resolve()) for p in made), f"index: {index}"]
    assert capsys.readouterr().out.splitlines() == lines
    assert "device not named" in made[0].read_text()
    for call in (render.render_notebook, lambda p, out: render.render_all([p], out)):
        with pytest.raises(UsageError, match="does not exist"):
            call(tmp_path / "no.ipynb", tmp_path / "no.html")
    assert not list(tmp_path.glob("no*"))


@pytest.mark.parametrize("same", ["out", "runs"])
def test_two_reports_at_once_do_not_mix(tmp_path, monkeypatch, no_kernel, same):
    """Pages of one folder, and runs of one folder, are of one report at a time."""
    book, begun = notebook(tmp_path / "a.ipynb", "1"), []
    first = {"out_dir": tmp_path / "out", "runs_dir": tmp_path / "runs"}
    second = {name: path if same in name else tmp_path / "b" for name, path in first.items()}

    def execute(source, executed, *_):
        begun.append(source)
        with pytest.raises(UsageError, match=rf"{same} is being filled by another process; wait"):
            render.render_all([book], **second)
        executed.write_text(source.read_text())

    monkeypatch.setattr(render, "execute_notebook", execute)
    render.render_all([book], **first)
    render.render_all([book], **first)
    assert len(begun) == 2 and not (tmp_path / "b").exists()


def test_an_interrupted_notebook_leaves_the_pages_before_it(tmp_path, monkeypatch, no_kernel):
    book = notebook(tmp_path / "a.ipynb", "1")
    old = [tmp_path / "out" / "a.html", tmp_path / "runs" / "a.ipynb"]
    for path in old:
        path.parent.mkdir()
        path.write_bytes(book.read_bytes())

    def interrupted(source: Path, made: Path, *_: object) -> None:
        made.write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(render, "_run_cells", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render.render_notebook(book, old[0], runs_dir=tmp_path / "runs")
    assert [path.read_bytes() for path in old] == [book.read_bytes()] * 2
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == sorted([book, *old])


def test_a_large_trace_is_linked_and_a_device_named(tmp_path, monkeypatch):
    path = tmp_path / "t.pftrace"
    path.write_bytes(b"trace")
    packed = base64.b64encode(gzip.compress(b"trace", mtime=0)).decode()
    assert packed in render.trace_download_html(path)
    monkeypatch.setattr(render, "MOST_TRACE_BYTES", 3)
    assert '<a href="t.pftrace' in render.trace_download_html(path)
    assert render.banner_html("cuda") == "" and "<b>" not in render.banner_html("<b>")
    assert "the host device" in render.banner_html("host")


@pytest.fixture(scope="module")
def page() -> str:
    return pages.export_html(FUSION, ABOUT, "<b>HEAD</b>", "<i>TAIL</i>")


def test_a_page_has_its_question_and_its_answer(page):
    (title,) = re.findall(r"<title>(.*?)</title>", page)
    assert html.unescape(title) == ABOUT.question
    book, none = nbformat.read(FUSION, 4), nbformat.v4.new_notebook()
    assert pages.question(book, "none") == "How many launches does a layer need?"
    assert pages.answer(book).startswith("A layer takes ")
    assert (pages.question(none, "10_fusion"), pages.answer(none)) == ("10_fusion", "")
    assert pages.picture(none) is None
    assert network_loads(page) == [] and "<script" not in page and "mathjax" not in page.lower()
    assert page.index("<h1") < page.index("<b>HEAD</b>") < page.index("<i>TAIL</i>")
    assert 'href="index.html"' in page and 'alt="' in page
    head = page[page.index('<header class="wb-head') : page.index("</header>")]
    assert html.escape(ABOUT.answer, quote=False) in head.replace("&#34;", '"')


def test_the_answers_of_exercises_are_folded(page, tmp_path):
    folded = re.findall(r"<details>\s*<summary>Answer</summary>(.*?)</details>", page, re.DOTALL)
    source = nbformat.read(FUSION, 4).cells[-1].source
    assert len(folded) == source.count("<details>") >= 2
    assert all("<p>" in answer for answer in folded)
    # a picture that a text names is on the page
    book = nbformat.read(FUSION, 4)
    (tmp_path / "dot.png").write_bytes(b"\x89PNG")
    book.cells[0].source += "\n\n![a dot](dot.png)"
    nbformat.write(book, tmp_path / "with.ipynb")
    assert "data:image/png;base64,iVBORw" in pages.export_html(tmp_path / "with.ipynb", ABOUT)


def test_the_picture_of_a_page_is_tagged_or_its_first():
    book = nbformat.read(FUSION, 4)
    drawn = [cell for cell in book.cells if "image/png" in str(cell.get("outputs"))]
    first = pages.picture(book)
    drawn[-1].metadata["tags"] = [pages.PICTURE]
    last = pages.picture(book)
    assert len(drawn) > 1 and first is not None and last is not None and first != last
    assert base64.b64decode(first.png)[:4] == base64.b64decode(last.png)[:4] == b"\x89PNG"


def test_a_page_of_a_cpu_says_what_a_gpu_found(tmp_path, monkeypatch, no_kernel, tiny_model):
    """From the outputs of the notebook that is run: the answer, the model and the device."""
    found = pages.recorded(nbformat.read(FUSION, 4))
    assert found is not None and found.answer == pages.answer(nbformat.read(FUSION, 4))
    assert found.device.startswith("NVIDIA ") and "(sm_90" in found.device, "as the engine says it"
    assert re.fullmatch(r"llama-3\.2-1b with random weights \w+", found.model)
    commit = AB.load(NOTEBOOKS.parent / "data" / "results" / "notebook-fusion").run["commit"][
        "hash"
    ]
    assert re.fullmatch(rf"commit {commit[:8]}, 20\d\d-\d\d-\d\d", found.taken)
    assert found.where == f"Recorded on {found.device}, with {found.model}; {found.taken}"

    def execute(source, executed, *_):
        executed.parent.mkdir(exist_ok=True)
        executed.write_text(source.read_text())

    monkeypatch.setattr(render, "execute_notebook", execute)
    for device, shown in (("embedded", True), ("cuda", False)):
        out = tmp_path / f"{device}.html"
        text = render.render_notebook(FUSION, out, device=device, runs_dir=tmp_path).read_text()
        head = text[text.index('<header class="wb-head') : text.index("</header>")]
        assert (found.where in head) == shown
        index = html.unescape(pages.write_index(tmp_path, tmp_path).read_text())
        assert f"Recorded on NVIDIA H200; {found.taken}: {found.answer}" in index
        assert f"Ran on the embedded device: {render.CPU_BANNER}." in index
        assert index.count("Ran on ") == 1, "of the CPU's page alone"
    with Engine.load(tiny_model("tiny-llama", "Q8_0"), device="embedded") as engine:
        said = pages.ENGINE.search(repr(engine))
        assert said and said["model"] == f"{engine.model.name} {engine.model.quant}"
        assert (said["device"], said["name"]) == (engine.backend.description, "embedded")
    book = notebook(tmp_path / "mine.ipynb", "1")
    assert pages.recorded(nbformat.read(book, 4)) is None


def test_the_index_lists_the_pages_and_their_comparisons(tmp_path, page):
    out, runs = tmp_path / "reports", NOTEBOOKS.parent / "data" / "results"
    out.mkdir()
    (out / "b.html").write_text(page)
    alone = pages.write_index(out, runs).read_text()
    assert "The comparisons" not in alone and alone.count("<tr>") == 1
    about = ABOUT._replace(runs=("notebook-fusion", "notebook-gone"))
    (out / "a.html").write_text(pages.export_html(FUSION, about))
    (out / "else.html").write_text("<html><head><title>x</title></head><body></body></html>")
    text = pages.write_index(out, runs).read_text()
    assert pages.listed(out) == [about, ABOUT._replace(file="b.html")], "and not itself"
    assert network_loads(text) == [] and 'href="b.html"' in text
    assert text.count("Why &amp; &lt;when&gt;?") == 2 + 1, "a group names its question again"
    assert html.unescape(text).count(ABOUT.answer) == 2
    found = AB.load(runs / "notebook-fusion")
    assert text.count(found.run["started"][:10]) == 1, "in the complete table"
    assert f"{found.summary().iloc[0]['speedup']:.3f}" in text


def test_the_index_shows_in_what_comparisons_differ(tmp_path):
    """Prompts in two sizes of ubatch, beside one background, which stands there once."""
    runs = NOTEBOOKS.parent / "data" / "results"
    own = tuple(f"notebook-prompts-in-{n}" for n in (4, 1))
    (tmp_path / "a.html").write_text(pages.export_html(FUSION, ABOUT._replace(runs=own)))
    text = pages.write_index(tmp_path, runs).read_text()
    short, _, complete = text.partition("The complete table")
    assert "<table>" in complete and "A/A control" in complete, "behind a click"
    found = [AB.load(runs / name) for name in own]
    (beside,) = tables.in_short(*found)
    assert short.count(f"beside {beside.background}</p>") == 1 and "A/A control" not in short
    for size, part in zip(("n_ubatch=256", "n_ubatch=1024"), beside.parts, strict=True):
        assert part.shared == f"pp1024; against skip_masked_kv=off; {size}"
        assert short.count(f"{part.shared}</p>") == 1
        assert list(part.rows.columns) == ["toggled", "speedup", "verdict"]
    verdicts = [verdict for part in beside.parts for verdict in part.rows["verdict"]]
    said = ", ".join(f"{verdicts.count(one)} {one}" for one in dict.fromkeys(verdicts))
    assert f'<span class="beside">{said}</span></summary>' in short, "folded, with its verdicts"
    table = tables.speedup_table(*found)
    names = [n for n in table if n in (*tables.ORIGIN, "Test", "Toggled")]
    assert not table.duplicated(names).any(), "no two rows of one name"


def test_a_run_without_a_device_names_none(tmp_path, monkeypatch, no_kernel):
    """A load of a server over HTTP is no run of an engine here."""
    runs = tmp_path / "runs"

    def execute(source, executed, *_):
        for name in ("notebook-served-serving", "notebook-served-serving-a-a"):
            shutil.copytree(NOTEBOOKS.parent / "data" / "results" / name, runs / name)
            there = runs / name / "run.json"
            run = json.loads(there.read_text()) | {"command": ["ipykernel", "-f", "kernel-1.json"]}
            if name.endswith("a-a"):
                run["engine"] |= {"device": None, "device_description": None}
            there.write_text(json.dumps(run))
        executed.write_text(source.read_text())

    monkeypatch.setattr(render, "execute_notebook", execute)
    runs.mkdir()
    render.render_notebook(FUSION, tmp_path / "a.html", device="embedded", runs_dir=runs)
    (about,) = pages.listed(tmp_path)
    assert about.device.startswith("NVIDIA ") and "None" not in about.device


def test_a_run_that_another_process_made_is_not_the_notebooks(tmp_path, monkeypatch, no_kernel):
    runs, own, other = tmp_path / "runs", "notebook-tour", "notebook-together"

    def execute(source, executed, *_):
        for name in (own, other):
            shutil.copytree(NOTEBOOKS.parent / "data" / "results" / name, runs / name)
        there = runs / own / "run.json"
        run = json.loads(there.read_text()) | {"command": ["ipykernel", "-f", "kernel-1.json"]}
        there.write_text(json.dumps(run))
        executed.write_text(source.read_text())

    monkeypatch.setattr(render, "execute_notebook", execute)
    runs.mkdir()
    render.render_all([FUSION], tmp_path, device="embedded", runs_dir=runs)
    (page,) = pages.listed(tmp_path)
    assert page.runs == (own,)
