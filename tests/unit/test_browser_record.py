"""What is committed of the browser tests: their last pass, and that CI runs them where it can."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BROWSER = ROOT / "tests" / "browser"


def test_the_last_pass_names_tests_versions_and_sources():
    record = json.loads((ROOT / "data" / "results" / "browser-test.json").read_text())
    written = {
        node.name
        for node in ast.walk(ast.parse((BROWSER / "test_panel_in_lab.py").read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert set(record["passed"]) <= written and len(record["passed"]) > 5
    assert {"chromium", "chromedriver", "jupyterlab", "ipykernel"} <= set(record["versions"])
    assert re.fullmatch(r"[0-9a-f]{64}", record["source_hash"]) and record["duration_s"] > 0
    assert {"stop_first_s", "stop_second_s"} <= set(record["seconds"])
    assert max(record["seconds"].values()) < 1, "a run ends within a second of Stop"


def test_ci_runs_the_browser_tests_and_they_say_where_they_cannot(monkeypatch, capsys):
    assert "make test-browser" in (ROOT / ".ci" / "run").read_text()
    assert "not browser" in (ROOT / "pyproject.toml").read_text(), "they are not in make test"
    monkeypatch.syspath_prepend(str(ROOT))
    from tests.browser import record

    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["record"])
    assert record.main() == 0
    said = capsys.readouterr().out
    assert said.startswith("browser tests skipped: no browser: install chromium")
    assert said.count("\n") == 1
