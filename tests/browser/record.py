"""Runs the browser tests and records their pass: `python -m tests.browser.record [--out FILE]`.

Writes data/results/browser-test.json (or FILE): date, versions, hash of the panel's sources, names
of the tests, how long Stop took, and duration. A run that fails is not recorded, and the exit
status is pytest's. Without Chromium or its driver one line says so, and that is no failure.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.browser import lab

RESULTS = lab.ROOT / "data" / "results" / "browser-test.json"
PACKAGES = ("jupyterlab", "ipykernel", "ipywidgets", "selenium")
SOURCES = (
    "workbench/jupyter/*.py", "workbench/engine/exclusive.py", "workbench/report/pages.py",
    "workbench/report/template/**/*.j2", "tests/browser/*.py",
)  # fmt: skip


def source_hash() -> str:
    """SHA-256 over names and contents of SOURCES: what the tests are about."""
    digest = hashlib.sha256()
    for path in sorted(p for pattern in SOURCES for p in lab.ROOT.glob(pattern)):
        digest.update(path.relative_to(lab.ROOT).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


class Passed:
    """A pytest plugin that notes the tests that passed, and what they measured."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.seconds: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.names.append(report.nodeid.split("::")[-1])
            self.seconds |= dict(report.user_properties)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args, more = parser.parse_known_args()  # pytest has the rest
    if not lab.installed():
        print(f"browser tests skipped: {lab.MISSING}")
        return 0
    found, begun = Passed(), time.perf_counter()
    here = str(Path(__file__).parent)
    status = pytest.main([here, "-m", "browser", "-p", "no:cacheprovider", *more], plugins=[found])
    if status:
        return int(status)
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": lab.versions() | {name: version(name) for name in PACKAGES},
        "source_hash": source_hash(),
        "passed": found.names,
        "seconds": found.seconds,
        "duration_s": round(time.perf_counter() - begun, 1),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
