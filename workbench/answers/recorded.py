"""The tables of the results page, as they were recorded: a block of it by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from workbench.common.errors import WorkbenchError
from workbench.common.shipped import shipped


class Block(NamedTuple):
    """rows: the block's table, every cell a text. words: the paragraphs after it: first device,
    commit and date."""

    rows: pd.DataFrame
    words: list[str]


def block(name: str, page: str | Path | None = None) -> Block | None:
    """The block of the results page with this name; None where the page, the block or its table is
    missing. page: default: the page that comes with the package."""
    try:
        path = Path(page) if page else shipped("data/results", "README.md") / "README.md"
        text = path.read_text(encoding="utf-8")
    except (OSError, WorkbenchError):
        return None
    found = re.search(rf"<!-- begin {name} -->\n(.*?)<!-- end {name} -->", text, re.S)
    lines = found[1].splitlines() if found else []
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    if len(cells) < 3:  # heading, rule, a row
        return None
    words = [line for line in lines if line and line[0] != "|"]
    return Block(pd.DataFrame(cells[2:], columns=cells[0]), words)
