"""What the recorded tests read is known by its bytes."""

from __future__ import annotations

import json
import subprocess

from tests.measure import checked


def test_they_are_skipped_once_passed_unless_asked_for(tmp_path, monkeypatch):
    passed = checked.passed.__wrapped__
    monkeypatch.delenv(checked.ALWAYS, raising=False)
    monkeypatch.setattr(checked, "FILE", tmp_path / "checked.json")
    assert not passed(), "nothing is noted"
    checked.FILE.write_text(json.dumps({"sha256": checked.digest()}))
    assert passed()
    monkeypatch.setenv(checked.ALWAYS, "1")
    assert not passed()


def test_the_digest_notices_a_byte_a_new_and_a_missing_file(tmp_path):
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True, capture_output=True)

    assert checked.digest(tmp_path) == "", "no git tells what is committed"
    git("init", "-q")
    (tmp_path / "data" / "results").mkdir(parents=True)
    for name in ("README.md", "data/results/run.json", "code.py"):
        (tmp_path / name).write_text("1")
    (tmp_path / ".gitignore").write_text("ignored")
    git("add", "-A")
    seen = [checked.digest(tmp_path)]
    for name in (checked.NAME, "data/ignored", "code.py"):  # none of what they read
        (tmp_path / name).write_text("2")
        assert checked.digest(tmp_path) == seen[0]
    for name in ("data/results/run.json", "README.md", "data/results/new.json"):
        (tmp_path / name).write_text("2")
        seen.append(checked.digest(tmp_path))
    (tmp_path / "data/results/run.json").unlink()
    assert len({*seen, checked.digest(tmp_path)}) == 5
