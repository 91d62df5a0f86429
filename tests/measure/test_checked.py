"""What the recorded tests read is known by its bytes."""

from __future__ import annotations

import subprocess

from tests.measure import checked


def test_the_digest_notices_a_byte_a_new_and_a_missing_file(tmp_path):
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True, capture_output=True)

    assert checked.digest(tmp_path) == "", "no git tells what is committed"
    git("init", "-q")
    results = tmp_path / "data" / "results"
    results.mkdir(parents=True)
    page, run, new = tmp_path / "README.md", results / "run.json", results / "new.json"
    (tmp_path / ".gitignore").write_text("ignored")
    for path in (page, run, tmp_path / "code.py"):
        path.write_text("1")
    git("add", "-A")
    seen = [checked.digest(tmp_path)]
    for name in (checked.NAME, "data/ignored", "code.py"):  # none of what they read
        (tmp_path / name).write_text("2")
        assert checked.digest(tmp_path) == seen[0]
    for change in (
        lambda: run.write_text("2"), lambda: page.write_text("2"), lambda: new.write_text("1"),
        run.unlink,
    ):  # fmt: skip
        change()
        seen.append(checked.digest(tmp_path))
    assert len(set(seen)) == 5
    new.unlink()
    run.write_text("1")
    page.write_text("1")
    assert checked.digest(tmp_path) == seen[0]
