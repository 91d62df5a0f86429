"""The data that the recorded tests have passed on: `python -m tests.measure.checked`.

Tests marked `recorded` compute figures and pages again from what is committed, and nothing else.
They are skipped while the digest of all that they read is the one in FILE. This command runs them,
and keeps the digest where they passed. Planted faults are judged by them, too (`tests/faults`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from workbench.common.output import write_text

ROOT = Path(__file__).resolve().parents[2]
NAME = "data/results/checked.json"
FILE = ROOT / NAME
ALWAYS = "WORKBENCH_RECORDED"  # a variable: where it is set, no recorded test is skipped
# pages, notebooks, what best takes, and the tests whose names `exhaustive.json` has
READ = ("data", "README.md", "workbench/README.md", "workbench/model/README.md", "notebooks",
        "workbench/config/best.json", "tests/program/check/test_mutations.py")  # fmt: skip


def digest(root: Path = ROOT) -> str:
    """SHA-256 over names and contents of the files under READ that git tracks or does not ignore,
    as they are in the working tree. Empty where there is no git."""
    listed = ("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *READ)
    try:
        said = subprocess.run(["git", "-C", str(root), *listed], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    found = hashlib.sha256()
    for name in sorted({*said.stdout.decode().split("\0")} - {"", NAME}):
        path = root / name
        content = hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"missing"
        found.update(name.encode() + b"\0" + content)
    return found.hexdigest()


@functools.cache
def passed() -> bool:
    """Whether the recorded tests have passed on all that is there now, and may be skipped."""
    if os.environ.get(ALWAYS):
        return False
    return FILE.is_file() and json.loads(FILE.read_text())["sha256"] == digest()


def main() -> int:
    now = digest()
    FILE.unlink(missing_ok=True)  # so that none is skipped
    command = [sys.executable, "-m", "pytest", "-m", "recorded", "tests/measure"]
    status = subprocess.run(command, cwd=ROOT).returncode
    if status == 0 and now:
        write_text(FILE, json.dumps({"sha256": now}) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
