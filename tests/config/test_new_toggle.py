"""`workbench/README.md` to the letter: the mechanism that it adds works, in a copy of the code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.test_lessons import MOST_CODE

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "workbench" / "README.md"
BLOCK = re.compile(r"^(?P<said>[^\n]+):\n\n```python\n(?P<code>.*?)```$", re.MULTILINE | re.DOTALL)
EDIT = re.compile(r"In `(?P<file>\S+)`, (?P<how>before|in place of) the line `(?P<line>.+)`")
NEW = re.compile(r"A new file, `(?P<file>\S+)`")
IN_A_NOTEBOOK = """
import workbench as wb
engine = wb.Engine.load("auto", device="embedded", toggles="baseline")
print({cell})
"""


def follow(root: Path) -> str:
    """Does what the page says in the checkout `root`. Returns the code of its other block."""
    text, others = PAGE.read_text(), list[str]()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python")
    for block in blocks:
        code = block["code"]
        if edit := EDIT.fullmatch(block["said"]):
            path, line = root / edit["file"], edit["line"] + "\n"
            found = path.read_text()
            assert found.count("\n" + line) == 1, f"{edit['file']}: one line {line}"
            apart = "\n\n" if line.startswith("@") else ""  # as a formatter would have it
            new = code + apart + line if edit["how"] == "before" else code
            path.write_text(found.replace("\n" + line, "\n" + new))
        elif new_file := NEW.fullmatch(block["said"]):
            path = root / new_file["file"]
            assert not path.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)
        else:
            others.append(code)
    (cell,) = others
    return cell


def test_the_notebook_that_gets_the_cell_has_room_for_it_and_an_engine():
    (name,) = re.findall(r"`notebooks/(\w+)\.ipynb`", PAGE.read_text())
    cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert len(code) < MOST_CODE
    assert any("\nengine = wb.Engine.load(" in source for source in code)


@pytest.mark.long
def test_a_mechanism_is_added_as_the_page_says(tmp_path):
    """Its two tests pass and fail without its room; its cell compares it; its style is ours."""
    ignored = shutil.ignore_patterns("__pycache__")
    for part in ("workbench", "data/prompts"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=ignored)
    cell = follow(tmp_path)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True
        )

    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    passed = run(*tests)
    assert "2 passed" in passed.stdout, passed.stdout + passed.stderr
    short = cell.replace("tg32", "tg2").replace("rounds=10", "rounds=5")
    shown = run("-c", IN_A_NOTEBOOK.format(cell=short))
    assert "largest_first" in shown.stdout and "exact" in shown.stdout, shown.stderr
    checked = run("-m", "workbench", "check", "-m", "data/models/tiny-llama-Q8_0.gguf",
                  "--copy-order", "largest_first")  # fmt: skip
    assert checked.returncode == 0, checked.stderr
    for how in (("check",), ("format", "--check")):
        style = run("-m", "ruff", *how, "--config", str(ROOT / "pyproject.toml"), ".")
        assert style.returncode == 0, style.stdout
    room = tmp_path / "workbench" / "program" / "copy_order.py"
    room.write_text(room.read_text().replace("-copy[1].nbytes", "0"))
    assert "1 failed, 1 passed" in run(*tests).stdout
