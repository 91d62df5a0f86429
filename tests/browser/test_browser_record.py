"""What is committed of the browser tests: their last pass, and that CI runs them where it can."""

from __future__ import annotations

import json
import re
import shutil
import sys

from tests.browser import lab, record


def test_the_last_pass_names_tests_versions_and_sources():
    found = json.loads(record.RESULTS.read_text())
    files = (lab.ROOT / "tests" / "browser").glob("test_*_in_*.py")
    source = "\n".join(path.read_text() for path in files)
    names = {name.partition("[")[0] for name in found["passed"]}
    assert names <= set(re.findall(r"^def (test_\w+)", source, re.MULTILINE))
    assert len(found["passed"]) > 5
    assert {*lab.NAMES, *record.PACKAGES} <= set(found["versions"])
    assert re.fullmatch(r"[0-9a-f]{64}", found["source_hash"]) and found["duration_s"] > 0
    assert {"stop_first_s", "stop_second_s"} <= set(found["seconds"])
    assert max(found["seconds"].values()) < 1, "a run ends within a second of Stop"


def test_ci_runs_them_and_they_say_where_they_cannot(monkeypatch, capsys):
    assert "make test-browser" in (lab.ROOT / ".ci" / "run").read_text()
    assert "not browser" in (lab.ROOT / "pyproject.toml").read_text(), "they are not in make test"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["record"])
    assert record.main() == 0
    said = capsys.readouterr().out
    assert said.startswith("browser tests skipped: no browser: install chromium")
    assert said.count("\n") == 1
