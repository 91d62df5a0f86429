"""The shape of a lesson: what it assumes, a prediction, a line to change, exercises with folded
answers, and tables and pictures that fit a screen."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from operator import attrgetter
from pathlib import Path

import nbformat
import pytest

from workbench.answers import claims

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_CODE, MOST_ROWS, MOST_COLUMNS, LEAST_EXERCISES, MOST_STACKED = 10, 7, 6, 2, 4
DRAWN = re.compile(r"<Picture size .* with (\d+) Axes>")
FOLDED = re.compile(r"<details><summary>Answer</summary>\n\n.+?\n\n +</details>", re.S)


class Tables(HTMLParser):
    """Rows (without the heading) and columns of each table of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[list[int]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.sizes.append([-1, 0])
        elif tag == "tr":
            self.sizes[-1][0] += 1
        elif tag == "th":
            self.sizes[-1][1] += 1


def sizes(html: str) -> list[tuple[int, int]]:
    """Rows and columns of each table."""
    reader = Tables()
    reader.feed(html)
    return [(rows, columns) for rows, columns in reader.sizes]


@pytest.mark.parametrize("path", LESSONS, ids=attrgetter("stem"))
def test_it_is_a_lesson(path):
    cells = nbformat.read(path, 4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    prose = "\n\n".join(texts)
    for word in ("Assumes", "Predict", "Change one line"):
        assert re.search(rf"^\*\*{word}:\*\* .+", prose, re.M), word
    assert len(code) <= MOST_CODE
    exercises = re.findall(r"^(\d+)\. .+", texts[-1].partition("## Exercises")[2], re.M)
    assert len(exercises) >= LEAST_EXERCISES == 2
    assert len(FOLDED.findall(texts[-1])) == len(exercises), "each has its answer, folded"
    assert "conclusions." in code[-1].source
    said = claims.cell(path.stem)
    assert (said in texts) == bool(said), "the threads' own words, from the table of quotes"
    for cell in code:
        shown = [out.data.get("text/html", "") for out in cell.outputs if "data" in out]
        for rows, columns in (size for html in shown for size in sizes(html)):
            assert rows <= MOST_ROWS and columns <= MOST_COLUMNS, (cell.source, rows, columns)
        if "timeline" in cell.source:
            drawn = [out.data.get("text/plain", "") for out in cell.outputs if "data" in out]
            stacked = [int(n) for text in drawn for n in DRAWN.findall(text)]
            assert all(n <= MOST_STACKED for n in stacked), (cell.source, stacked)


def test_a_table_s_size_is_read():
    page = (
        "<table><thead><tr><th>a</th><th>b</th></tr></thead><tr><td>1</td><td>2</td></tr></table>"
    )
    assert sizes(page * 2) == [(1, 2), (1, 2)]
