"""Of which sources a run is: said, marked where they are older, and never a reason to fail."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from data.measure import readme, sources
from data.measure.recorded import Recorded
from data.measure.sources import age, mark, source_hash, unmarked

OLDER = " (older sources: no evidence of today's times)"
UNTESTED = " (older sources: no evidence that today's pass)"

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "data" / "results"


@pytest.fixture
def history(tmp_path, monkeypatch):
    """A checkout of two commits; the second changed a kernel. Returns both."""

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q")
    made = []
    for content in ("old", "new"):
        (tmp_path / "kernels").mkdir(exist_ok=True)
        (tmp_path / "kernels" / "rows.cu").write_text(content)
        git("add", "-A")
        git("commit", "-qm", content)
        made.append(git("rev-parse", "HEAD"))
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    sources._has_changed.cache_clear()
    yield made
    sources._has_changed.cache_clear()


def of(commit: str) -> dict:
    return {"commit": {"hash": commit, "dirty": False}, "started": "2026-01-02T03:04:05+00:00"}


def test_a_run_says_of_which_sources_it_is_and_an_older_one_is_marked(history):
    old, new = history
    assert age(of(new)) == f"commit {new[:8]}, 2026-01-02"
    assert age(of(old)) == f"commit {old[:8]}, 2026-01-02{OLDER}"
    assert mark(of(new), of(old)) == OLDER and mark(of(new)) == "" == mark()


def test_what_is_not_committed_counts(history, tmp_path):
    (tmp_path / "kernels" / "rows.cu").write_text("newer")
    assert mark(of(history[1])) == OLDER


def test_a_history_that_does_not_tell_marks_nothing(history):
    assert mark(of("f" * 40)) == ""


def test_files_that_name_their_sources():
    found = {"source_hash": source_hash(), "date": "2026-01-02T03"}
    assert age(found) == f"sources {source_hash()[:8]}, 2026-01-02"
    assert age(found | {"source_hash": "0123456789"}) == f"sources 01234567, 2026-01-02{OLDER}"


def test_sources_are_kernels_and_backends(tmp_path):
    for folder in sources.FOLDERS:
        (tmp_path / folder / "deep").mkdir(parents=True)
    was = source_hash(tmp_path)
    for path, changes in (
        ("kernels/a.cu", True), ("kernels/b.cuh", True), ("workbench/backend/deep/c.py", True),
        ("kernels/README.md", False), ("workbench/d.py", False),
    ):  # fmt: skip
        (tmp_path / path).write_text("x")
        now = source_hash(tmp_path)
        assert (now != was) == changes, path
        was = now


def test_the_page_marks_runs_of_older_sources(tmp_path):
    tests = {"date": "2026-01-02T03", "device": "NVIDIA X", "passed": 5, "failed": 0, "skipped": 0,
             "duration_s": 1.0}  # fmt: skip
    for digest, marked in ((source_hash(), False), ("0" * 64, True)):
        text = json.dumps(tests | {"source_hash": digest})
        (tmp_path / "gpu-tests.json").write_text(text)
        said = readme.made("correctness-cuda", Recorded(tmp_path))
        assert f"sources {digest[:8]}, 2026-01-02" in said and (UNTESTED in said) == marked
        assert "older sources" not in unmarked(said)


def test_commits_are_listed_newest_first(tmp_path, history):
    old, new = history
    for name, commit, date in (("a", old, "2026-01-01"), ("b", new, "2026-01-03"),
                               ("c", new, "2026-01-02")):  # fmt: skip
        (tmp_path / "runs" / name).mkdir(parents=True)
        run = of(commit) | {"started": date}
        (tmp_path / "runs" / name / "run.json").write_text(json.dumps(run))
    lines = sources.commits(Recorded(tmp_path / "runs")).splitlines()
    assert lines[2:] == [
        f"- commit {new[:8]}, 2026-01-02: 2 runs",
        f"- commit {old[:8]}, 2026-01-01{OLDER}: 1 run",
    ]
    assert (
        "nothing of what today's do" in lines[0]
        and sources.commits(Recorded(tmp_path / "none")) == "Runs: not measured."
    )


@pytest.mark.slow
def test_pages_can_be_made_without_any_run_of_a_gpu(tmp_path):
    """And say what was not measured: no test and no page needs a GPU's run."""
    kept = [p for p in RESULTS.iterdir() if not p.name.startswith(("cuda-", "gpu-", "notebook-"))]
    for path in kept:
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    for page in readme.PAGES:
        made = readme.fill((ROOT / page).read_text(), tmp_path)
        assert "not measured" in made or page.parts[0] == "workbench"
