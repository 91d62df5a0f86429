"""Pages: one file each, offline, with the banner, and still written where a notebook fails."""

from __future__ import annotations

import base64
import gzip
import re
from pathlib import Path
from typing import ClassVar

import nbformat
import pytest

from tests.network import network_loads
from workbench.common.errors import UsageError, WorkbenchError
from workbench.common.progress import SHARE, Bar
from workbench.report import render
from workbench.trace import perfetto
from workbench.trace.spans import HOST_LANE, Span

CELLS = """
import pandas as pd
from workbench.report import plots, tables
from workbench.trace.profile import Timeline
from workbench.trace.spans import HOST_LANE, Span
print("n is", n, "and device", device)
---
plots.timeline(Timeline([Span("a", "launch", HOST_LANE, 0, 10**6, {"step": 0})] * n))
---
pd.DataFrame({"Speedup": [1.19]})
"""


def notebook(path: Path, *cells: str) -> Path:
    first = nbformat.v4.new_code_cell(
        'device = "auto"\nn: int = 1', metadata={"tags": ["parameters"]}
    )
    made = nbformat.v4.new_notebook()
    made.cells = [
        nbformat.v4.new_markdown_cell("# A question? [link](https://example.org)"),
        first,
        *(nbformat.v4.new_code_cell(c.strip()) for c in cells),
    ]
    nbformat.write(made, path)
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "t.pftrace.gz"
    perfetto.write([Span("step", "step", HOST_LANE, 0, 10, {"step": 0})], path)
    return path


class Told(Bar):
    """Says all it is told."""

    said: ClassVar[list[str]] = []

    def update(self, n=1):
        super().update(n)
        self.said.append(str(self))


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory, trace: Path) -> tuple[Path, str, str]:
    """A page, what was said of it while it was made, and where."""
    folder = tmp_path_factory.mktemp("page")
    path = notebook(folder / "07_question.ipynb", *CELLS.split("---"))
    left = Told("report", sum(render.cell_seconds(path, folder / "runs").values()), SHARE, None)
    page = render.render_notebook(
        path,
        folder / "reports" / "07_question.html",
        {"n": 3, "device": "embedded"},
        runs_dir=folder / "runs",
        trace=trace,
        left=left,
    )
    return folder, page.read_text(), "\n".join(left.said)


def test_page_is_offline_and_small(rendered: tuple[Path, str, str]) -> None:
    _, page, _ = rendered
    assert network_loads(page) == []
    assert len(page.encode()) <= render.MOST_REPORT_BYTES
    # the link stays: following it is the reader's choice
    assert "https://example.org" in page
    assert not re.search(r"<script[^>]*\bsrc=", page) and not re.search(r"<link\b", page)


def test_page_shows_parameters_pictures_tables_and_the_banner(
    rendered: tuple[Path, str, str],
) -> None:
    folder, page, said = rendered
    assert "n is 3 and device embedded" in page
    assert page.count("data:image/png;base64,") >= 1 and "1.19" in page
    assert 'alt="timeline; time (us)"' in page and "No description has been" not in page
    assert f"Ran on the embedded device: {render.CPU_BANNER}." in page
    assert page.index('class="wb-banner"') < page.index('<h1 id="A-question?')
    shares = [(0, 2), (25, 3), (25, 4), (50, 5), (75, 6), (100, 6)]  # 3: the given parameters
    assert [re.sub(r"about \d+ s left, ", "", line) for line in said.splitlines()] == [
        f"report: {share} %, 07_question cell {n} of 6" for share, n in shares
    ]
    again = render.cell_seconds(folder / "07_question.ipynb", folder / "runs")
    assert len(again) == 4 and all(0 < s < 60 and s != 1 for s in again.values()), "as last time"
    assert (folder / "runs" / "07_question.ipynb").is_file()
    assert [p.name for p in (folder / "reports").iterdir()] == ["07_question.html"]


def test_the_trace_in_the_page_is_the_file(rendered: tuple[Path, str, str], trace: Path) -> None:
    _, page, _ = rendered
    data = re.search(r'id="wb-trace-data"[^>]*>([^<]*)</script>', page)
    assert data and base64.b64decode(data[1]) == trace.read_bytes()


def test_a_failing_notebook_leaves_its_page_and_names_the_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = notebook(tmp_path / "bad.ipynb", "print('before')", "raise OSError('no\\nway')", "1")
    with pytest.raises(
        WorkbenchError, match=r"^bad.ipynb: cell 5 failed: OSError: no; see .*html$"
    ):
        render.render_all(
            [bad], tmp_path / "reports", {"device": "cuda", "unknown": 1}, runs_dir=tmp_path
        )
    page = (tmp_path / "reports" / "bad.html").read_text()
    assert "before" in page and "OSError" in page
    assert 'class="wb-banner"' not in page  # a GPU's timings need no banner
    assert capsys.readouterr().out == ""


def test_all_reports_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {}

    def execute(source, executed, parameters, timeout_s, left):
        given[source.name] = parameters
        executed.parent.mkdir(exist_ok=True)
        executed.write_text(source.read_text())

    monkeypatch.setattr(render, "execute_notebook", execute)
    books = [notebook(tmp_path / f"{n}.ipynb", "1") for n in ("a", "b")]
    pages = render.render_all(books, tmp_path / "out", {"n": 2, "x": 1}, runs_dir=tmp_path / "r")
    assert given == {"a.ipynb": {"n": 2}, "b.ipynb": {"n": 2}}
    index = (tmp_path / "out" / "index.html").resolve()
    lines = [*(str(p.resolve()) for p in pages), f"index: {index}"]
    assert capsys.readouterr().out.splitlines() == lines
    assert "device not named" in pages[0].read_text()


def test_a_notebook_that_is_not_there(tmp_path: Path) -> None:
    for call in (render.render_notebook, lambda p, out: render.render_all([p], out)):
        with pytest.raises(UsageError, match="does not exist"):
            call(tmp_path / "no.ipynb", tmp_path / "no.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://cdn.example/x.js"></script>',
        "<script async src='//cdn.example/x.js'></script>",
        '<link rel="stylesheet" href="http://x/y.css">',
        '<style>@import url("https://x/y.css");</style>',
        "<style>a{background:url(https://x/y.png)}</style>",
        '<img alt="" src="http://x/y.png">',
        '<script type="module">const m = (await import("https://x/m.mjs")).default;</script>',
        '<script type="module">import m from "https://x/m.mjs";</script>',
    ],
)
def test_what_counts_as_a_load(page: str) -> None:
    assert len(network_loads(page)) == 1


def test_what_counts_as_none() -> None:
    page = (
        '<a href="https://x">x</a><img src="data:image/png;base64,//8="><script>open("https://x")'
    )
    assert network_loads(page) == []


def test_banner() -> None:
    assert render.banner_html("cuda") == ""
    assert "the host device" in render.banner_html("host")
    assert "<b>" not in render.banner_html("<b>")


def test_a_large_trace_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.pftrace"
    path.write_bytes(b"trace")
    assert base64.b64encode(gzip.compress(b"trace", mtime=0)).decode() in (
        render.trace_download_html(path)
    )
    monkeypatch.setattr(render, "MOST_TRACE_BYTES", 3)
    assert '<a href="t.pftrace' in render.trace_download_html(path)


def test_an_interrupted_notebook_leaves_the_pages_of_the_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
