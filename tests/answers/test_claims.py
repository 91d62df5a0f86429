"""The table of quotes: each row can be held against a run, and pages take figures from it."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from tests.notebooks import quotes
from workbench.answers import claims
from workbench.answers.claims import CLAIMS, QuoteKind
from workbench.common.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PERCENT = re.compile(r"-?\d[\d.]*(?: to \d[\d.]*)? ?%")
THREAD = re.compile(r"(?<!\w)#\d{4,5}\b")


def test_a_row_says_whose_words_or_figures_it_has():
    for one in CLAIMS:
        assert re.fullmatch(r"([\w.]+)?#\d{2,5}", one.thread) and one.who and one.notebooks
        assert one.words or one.figures, one
        assert '"' not in one.words and "\n" not in one.said()
        assert bool(one.low) == bool(one.high) and one.low <= one.high, one
        if one.kind == QuoteKind.GUESS:
            assert not one.high, "nobody measured a guess"
        if one.verdict:
            assert one.kind in (QuoteKind.CLAIM, QuoteKind.MEASUREMENT), one
    assert len({(one.thread, one.who, one.said()) for one in CLAIMS}) == len(CLAIMS)


@pytest.mark.parametrize(("notebook", "thread", "gain"), [
    ("02_sync_modes", "#17795", "1 to 2 %"), ("03_graph_reuse", "#8366", "2 to 7 %"),
    ("04_plans", "#16548", "up to 30 %"), ("05_streams", "#16991", "1 to 9 %"),
])  # fmt: skip
def test_a_verdict_has_the_thread_s_figure(notebook, thread, gain):
    found = claims.verdict(notebook)
    assert (found.thread, found.gain) == (thread, gain)


def test_what_has_no_verdict_is_refused():
    with pytest.raises(UsageError, match="0 claims are the verdict's of notebook '08_ladder'"):
        claims.verdict("08_ladder")
    assert claims.of("08_ladder") == () and claims.cell("08_ladder") == ""


def test_gpus_of_8366_are_six_and_its_figures_are_2_to_7():
    found = claims.verdict("03_graph_reuse")
    assert len(found.card.split(", ")) == 6 and (found.low, found.high) == (1.02, 1.07)
    page = (ROOT / "data" / "results" / "README.md").read_text()
    assert "2 to 7 % is a build of" in page and "3 to 7 %" not in page


def test_a_wait_of_the_thread_is_a_share_of_its_token():
    low, high = claims.threads_us()
    assert 13.5 < low < 13.6 and 15.2 < high < 15.3


def test_each_side_s_seconds_are_by_slots():
    assert list(claims.SERVED_S) == [1, 2, 3, 4, 8, 16, 32, 64, 128]
    theirs, vllm = claims.SERVED_S[2]
    assert theirs < vllm, "at one and two llama.cpp was faster"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_quotes_the_table_and_nothing_else(path):
    """No figure of a thread stands in prose: a percentage beside a thread is the table's."""
    texts = [c.source for c in nbformat.read(path, 4).cells if c.cell_type == "markdown"]
    own = claims.cell(path.stem)
    assert own == "" or texts[1] == own, "write it: python -m tests.notebooks.quotes"
    assert sum(text.startswith(claims.HEADING) for text in texts) == bool(own)
    known = {gain for one in CLAIMS for gain in [one.gain, *PERCENT.findall(one.said())]}
    prose = [text for text in texts if not text.startswith(claims.HEADING)]
    for paragraph in "\n\n".join(prose).split("\n\n"):
        if THREAD.search(paragraph):
            assert set(PERCENT.findall(paragraph)) <= known, paragraph


def test_quotes_are_written_once():
    notebook = nbformat.read(ROOT / "notebooks" / "04_plans.ipynb", 4)
    before = [cell.source for cell in notebook.cells]
    twice = quotes.quoted(quotes.quoted(notebook, "04_plans"), "04_plans")
    assert [cell.source for cell in twice.cells] == before
    assert twice.cells[1].id == "04-said"
    none = quotes.quoted(nbformat.v4.new_notebook(cells=[]), "08_ladder")
    assert none.cells == []
