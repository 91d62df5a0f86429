"""Pages carry their question as title; the index lists every page with its answer."""

from __future__ import annotations

import html
import re
from pathlib import Path

import nbformat
import pytest

from tests.network import network_loads
from workbench.benchmarks.compare.comparison import AB
from workbench.report import pages
from workbench.report.pages import About

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
ABOUT = About("a.html", "Why & <when>?", 'A "token" is 3.', "embedded, 2 workers", "2026-11-22")


@pytest.fixture(scope="module")
def page() -> str:
    return pages.export_html(NOTEBOOKS / "10_fusion.ipynb", ABOUT, "<b>HEAD</b>", "<i>TAIL</i>")


def test_the_title_is_the_question_and_so_is_the_heading(page: str) -> None:
    (title,) = re.findall(r"<title>(.*?)</title>", page)
    assert html.unescape(title) == ABOUT.question
    notebook = nbformat.read(NOTEBOOKS / "10_fusion.ipynb", 4)
    assert pages.question(notebook, "none") == "How many launches does a layer need?"
    assert re.search(r"<h1[^>]*>How many launches does a layer need\?", page)
    assert pages.question(nbformat.v4.new_notebook(), "10_fusion") == "10_fusion"


def test_the_answer_is_the_first_line_of_the_last_cell() -> None:
    notebook = nbformat.read(NOTEBOOKS / "10_fusion.ipynb", 4)
    assert pages.answer(notebook).startswith("A layer takes ")
    assert pages.answer(nbformat.v4.new_notebook()) == ""


def test_a_page_loads_nothing_and_keeps_head_and_tail(page: str) -> None:
    assert network_loads(page) == [] and "<script" not in page and "mathjax" not in page.lower()
    assert page.index("<b>HEAD</b>") < page.index("<h1") < page.index("<i>TAIL</i>")
    assert 'href="index.html"' in page and 'alt="' in page


def test_the_index_lists_the_pages_of_its_folder_and_their_comparisons(
    tmp_path: Path, page: str
) -> None:
    out, runs = tmp_path / "reports", NOTEBOOKS.parent / "data" / "results"
    out.mkdir()
    about = ABOUT._replace(runs=("notebook-fusion", "notebook-gone"))
    (out / "a.html").write_text(pages.export_html(NOTEBOOKS / "10_fusion.ipynb", about))
    (out / "b.html").write_text(page)
    (out / "else.html").write_text("<html><head><title>x</title></head><body></body></html>")
    assert pages.write_index(out, runs) == out / "index.html"
    assert pages.write_index(out, runs) == out / "index.html", "it does not list itself"
    assert pages.listed(out) == [about, ABOUT._replace(file="b.html")]
    text = (out / "index.html").read_text()
    assert network_loads(text) == []
    assert text.count("Why &amp; &lt;when&gt;?") == 2 and 'href="b.html"' in text
    assert html.unescape(text).count(ABOUT.answer) == text.count("2026-11-22</td>") == 2
    comparison = AB.load(runs / "notebook-fusion")
    found = comparison.summary().iloc[0]
    assert f"Model: {comparison.model}" in text
    assert f"{found['speedup']:.3f}" in text


def test_an_index_without_comparisons(tmp_path: Path, page: str) -> None:
    (tmp_path / "b.html").write_text(page)
    text = pages.write_index(tmp_path, tmp_path).read_text()
    assert "The comparisons" not in text and text.count("<tr>") == 2
