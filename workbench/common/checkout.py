"""The commit that a figure or a trace was made with. Any module may import this one."""

import subprocess
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"
_SOURCE = Path(__file__).resolve().parents[2]  # the checkout, where there is one
_RECORDED = ":(exclude)data/results"  # what measuring writes says nothing of what was measured


def _git(*args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(_SOURCE), *args], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> dict[str, Any]:
    """The checkout's commit: hash (40 digits or `unknown`), number of commits before it, dirty.

    dirty is true where a tracked file outside of data/results differs from the commit, null where
    there is no commit.
    """
    if _git("rev-parse", "--show-toplevel") != str(_SOURCE):  # installed beside another checkout
        return {"hash": UNKNOWN, "number": 0, "dirty": None}
    head = _git("rev-parse", "--verify", "HEAD")
    if head is None:
        return {"hash": UNKNOWN, "number": 0, "dirty": None}
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", _RECORDED)
    return {
        "hash": head,
        "number": int(_git("rev-list", "--count", "HEAD") or 0),
        "dirty": None if changed is None else bool(changed),
    }
