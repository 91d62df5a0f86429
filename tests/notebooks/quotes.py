"""Writes the threads' words into the notebooks, from `workbench/answers/claims.py`.

    python -m tests.notebooks.quotes [NAMES]   # 04_plans; without any, all notebooks

The cell is the second one, behind the question; a notebook without quotes is left as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat

from workbench.answers import claims

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def quoted(notebook: Any, name: str) -> Any:
    """The notebook with the quotes of that name, in place of those it has."""
    cells = [c for c in notebook.cells if not c.source.startswith(claims.HEADING)]
    if source := claims.cell(name):
        cell = nbformat.v4.new_markdown_cell(source)
        cell.id = f"{name[:2]}-said"  # the same whenever it is written
        cells.insert(1, cell)
    notebook.cells = cells
    return notebook


def main(names: Sequence[str] = ()) -> None:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not names or path.stem in names:
            nbformat.write(quoted(nbformat.read(path, 4), path.stem), path)


if __name__ == "__main__":
    main(sys.argv[1:])
