"""The sources that a recorded run was made with, and whether they have changed since.

No test fails where they have: the pages name a run's sources, and mark for what a run of older
sources is no evidence. (Two GPUs stopped working, and a record that was 500 commits old hid it.)
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.measure.recorded import Recorded
from workbench.benchmarks.runs import results

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "workbench/backend")  # figures of a device depend on these first
OLDER = " (older sources: no evidence {of})"
# what a run of today's sources would be evidence of
TIMES, TESTS, ANSWERS = "of today's times", "that today's pass", "of today's answers"
_MARK = re.compile(re.escape(OLDER).replace(re.escape("{of}"), "[^)]*"))


def source_hash(root: Path = ROOT) -> str:
    """SHA-256 over names and contents of FOLDERS; the recorded GPU tests keep it."""
    files = [*(root / FOLDERS[0]).glob("*.cu*"), *(root / FOLDERS[1]).rglob("*.py")]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def age(found: Mapping[str, Any], of: str = TIMES) -> str:
    """`sources 741a99c4, 2026-11-21`, or `commit 209afd4e, 2026-11-21`: the sources of a run."""
    date = str(found.get("started") or found.get("date") or "")[:10]
    if "source_hash" in found:
        named = f"sources {found['source_hash'][:8]}"
    else:
        named = f"commit {found['commit']['hash'][:8]}"
    return ", ".join(filter(None, (named, date))) + mark(found, of=of)


def mark(*found: Mapping[str, Any], of: str = TIMES) -> str:
    """OLDER where one of these runs is of older sources, else nothing."""
    return OLDER.format(of=of) if any(map(_is_older, found)) else ""


def _is_older(found: Mapping[str, Any]) -> bool:
    if "source_hash" in found:
        return bool(found["source_hash"] != source_hash())
    return _has_changed(found["commit"]["hash"])


@functools.cache
def _has_changed(commit: str) -> bool:
    """Whether a file in FOLDERS differs from `commit`; changes that are not committed count."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", commit, "--", *FOLDERS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and bool(done.stdout.strip())


def unmarked(page: str) -> str:
    """A page without its marks: they change with the sources, the page with its runs."""
    return _MARK.sub("", page)


def commits(recorded: Recorded) -> str:
    """A line for each commit that run folders were made with, newest first."""
    by_commit: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(recorded.folder.glob(f"**/{results.RUN_JSON}")):
        run = json.loads(path.read_text())
        by_commit.setdefault(run["commit"]["hash"], []).append(run)
    newest = sorted(by_commit.values(), key=lambda runs: runs[-1]["started"], reverse=True)
    lines = [
        f"- {age(min(runs, key=lambda run: run['started']))}: {len(runs)} "
        f"{'run' if len(runs) == 1 else 'runs'}"
        for runs in newest
    ]
    changed = "` or `".join(f"{folder}/" for folder in FOLDERS)
    said = (
        f"A run is marked{OLDER.format(of='of ...')} where `{changed}` changed since: it says "
        "what its own sources did, and nothing of what today's do."
    )
    return "\n".join([said, "", *lines]) if lines else "Runs: not measured."
