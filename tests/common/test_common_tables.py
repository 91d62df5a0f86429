"""Tables: they fit, nothing is lost, texts stand to the left, and sizes say what they are."""

from __future__ import annotations

import re

import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from workbench.common.sizes import counted, size, sizes
from workbench.common.tables import Table, known_columns, markdown, terminal_columns, to_html

WIDE = Table(
    {
        "Background": ["all else off", "all else off", "fuse=on"],
        "Toggled": ["packed", "implicit", "packed"],
        "Speedup": [1.5, 1.25, 1.0],
        "why": ["a text that is much too long for any column of a table"] * 2 + ["short"],
        "n": [10, 10, 10],
    }
)


def test_what_all_rows_share_stands_above_and_texts_below() -> None:
    text = markdown(WIDE, 100)
    assert text.startswith("n: 10\n\n| Background") and text.count("n: 10") == 1
    assert markdown(WIDE).startswith("| Background"), "a file's table is whole"
    assert markdown(WIDE.iloc[:1], 200).count("|") == 3 * 6, "one row shares nothing with another"
    lines = markdown(WIDE, 60).splitlines()
    assert "- all else off, packed: a text that is much too long for any" in lines
    assert "  column of a table" in lines and "- fuse=on, packed: short" in lines


def test_groups_stand_under_headings_of_their_own() -> None:
    table = WIDE.drop(columns="why")
    table.attrs["groups"] = ["Background"]
    assert markdown(table, 36).split("\n\n") == [
        "n: 10",
        "Background: all else off",
        "| Toggled  | Speedup |\n|----------|--------:|\n| packed   |    1.50 |\n"
        "| implicit |    1.25 |",
        "Background: fuse=on",
        "| Toggled | Speedup |\n|---------|--------:|\n| packed  |    1.00 |",
    ]


WORDS = st.text("abcde|1.", min_size=1, max_size=9)
CELLS = st.floats(0, 1e6) | st.integers(0, 10**9) | st.lists(WORDS, max_size=9).map(" ".join)
ROWS = st.integers(1, 9).flatmap(
    lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=5)
)


@settings(max_examples=examples(200))
@given(ROWS, st.integers(40, 120), st.integers(0, 2))
def test_any_table_fits_and_no_cell_is_lost(rows: list, width: int, n_groups: int) -> None:
    names = [f"c{i}" for i in range(len(rows[0]))]
    table = pd.DataFrame([map(str, row) for row in rows], columns=names)
    table.attrs["groups"] = names[:n_groups]
    text = markdown(table, width)
    assert all(len(line) <= width for line in text.splitlines())
    left = re.sub(r"\s+", " ", text.replace("\\|", "|"))
    for cell in table.to_numpy().ravel():
        assert re.sub(r"\s+", " ", cell.strip()) in left


def test_where_there_is_no_terminal_there_are_100_columns(monkeypatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)
    assert known_columns() is None and terminal_columns() == 100
    monkeypatch.setenv("COLUMNS", "72")
    assert known_columns() == terminal_columns() == 72


def test_html_has_texts_on_the_left_and_patterns_as_code() -> None:
    table = Table({"mode": ["packed", "<b>"], "waits": [3, 13], "pattern": ["`h sasg`", "`h s|g`"]})
    page = table._repr_html_()
    assert '<th style="text-align:left">mode</th><th style="text-align:right">waits</th>' in page
    assert '<td style="text-align:left"><code>h sasg</code></td>' in page
    assert "`" not in page and "&lt;b&gt;" in page and "h s|g" in page
    table.attrs["code"] = ["mode"]
    assert "<code>packed</code>" in to_html(table) and "<code>mode</code>" not in to_html(table)
    shared = to_html(pd.DataFrame({"a": [1, 2], "Model": ["m", "m"]}))
    assert shared.startswith("<p><small>Model: m</small></p>") and shared.count("m</") == 1
    named = pd.DataFrame({"us": [1.0, 2.0]}, index=pd.Index([32, 33], name="step"))
    assert ">step</th>" in to_html(named) and ">33</td>" in to_html(named)
    assert ">33</td>" not in to_html(named.rename_axis(None))


def test_one_of_a_kind_has_no_s() -> None:
    said = [counted(n, "reading") for n in (0, 1, 2, 1234)]
    assert said == ["0 readings", "1 reading", "2 readings", "1,234 readings"]


def test_sizes_have_two_digits_or_all_that_tell_them_apart() -> None:
    for n, said in {
        0: "0 B", 999: "999 B", 1000: "1.00 kB", 69_632: "69.63 kB", 999_999: "1.00 MB",
        1_840_000: "1.84 MB", 7.6e9: "7.60 GB", 3e12: "3.00 TB",
    }.items():  # fmt: skip
        assert size(n) == said
    assert sizes(1_840_000, 5_000_000) == ["1.84 MB", "5.00 MB"]
    assert sizes(1_840_001, 1_840_000) == ["1,840,001 bytes", "1,840,000 bytes"]
    assert sizes(5, 5) == ["5 B", "5 B"]
