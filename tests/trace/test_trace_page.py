"""The page on traces is true: its columns are those of the code, and its files were read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import workbench
from tests.trace.test_trace_imports import FILES, OWN, REAL
from workbench.cli.compare import compare
from workbench.trace import analysis, critical, diff
from workbench.trace.chrome import CALLS, CATEGORIES, WORK
from workbench.trace.cupti import collector
from workbench.trace.profile import COLUMNS, SUMMARY_COLUMNS

PAGE = (Path(workbench.__file__).parent / "trace" / "README.md").read_text()
OF_FILES = (FILES / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("frame", COLUMNS), ("critical", critical.COLUMNS), ("diff", diff.COLUMNS),
        ("summary", SUMMARY_COLUMNS), ("kernels", analysis.KERNELS),
        ("phases", analysis.PHASES), ("gaps", [*analysis.GAPS, analysis.PYTHON, analysis.OUTSIDE]),
    ],
)  # fmt: skip
def test_the_columns_are_those_of_the_code(name: str, columns: list[str]) -> None:
    table = PAGE.split(f"<!-- begin {name} -->")[1].split(f"<!-- end {name} -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in
            table.strip().splitlines()[2:]]  # fmt: skip
    assert [row[0].strip("`") for row in rows] == list(columns)
    for column, unit, _ in rows:
        if re.search(r"_us\b|us_", column):
            assert unit.startswith("us"), column
        if "bytes" in column:
            assert unit == "bytes"


def test_bounds_and_categories_are_those_of_the_code() -> None:
    bounds = PAGE.split("| bound | time |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", bounds, re.MULTILINE) == list(critical.BOUNDS)
    for name in {*CATEGORIES.values(), *(category for category, _ in WORK.values())}:
        assert f"`{name}`" in PAGE or name == "python_function", name
    assert f"`{CALLS['launch']}`" in PAGE


def test_each_real_file_is_told_with_what_wrote_it() -> None:
    there = {path.name for path in FILES.glob("*.gz")}
    assert there == {*REAL, *OWN} == set(re.findall(r"^\| `([\w.-]+)`", OF_FILES, re.MULTILINE))
    assert "2025.3.2, export schema 3.20.3" in PAGE and "schema 3.20.3" in OF_FILES


def test_the_notes_that_the_page_explains_are_what_the_collector_says() -> None:
    source = Path(collector.__file__).read_text()
    notes = PAGE.split("| the note says |")[1].split("\n\n")[0]
    said = re.findall(r"^\| `([^`]+?)(?: \.\.\.[^`]*)?` \|", notes, re.MULTILINE)
    assert len(said) == 4
    for text in said:
        assert text.removesuffix(" ...") in source, text


def test_the_command_takes_what_the_page_names() -> None:
    assert "`--step`" in PAGE and "step" in compare.__annotations__
