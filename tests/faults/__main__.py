"""Plants faults, and records which of them the tests see: `python -m tests.faults`.

    python -m tests.faults [--only PREFIX ...] [--jobs N] [--out FILE]
    python -m tests.faults --check      can every fault be planted?
    python -m tests.faults --touched    which tests touch which function? (before the first run)
    python -m tests.faults --touched PATH ...           the same of new tests alone

Each fault is planted in a copy of the checkout, alone. There run the tests that touch its function,
those of its room first, and of these those that touch little, until a test fails, or the process
dies: the fault is *seen*.
It is *missed* where all pass, and *late* where they take more than a minute. --only: faults of a
room, or whose names begin so: `engine`, `engine/reuse-`. data/results/faults.json (or FILE) is
written after each fault. Those that it has of this commit are not planted again, so a run that was
cut off goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.faults import chosen, touched
from tests.faults.planted import ROOT, Fault, FaultError, every, problems
from tests.measure.checked import ALWAYS
from tests.rows import Rows

OUT = ROOT / "data" / "results" / "faults.json"
MOST_S = 60.0
CHOSEN_S = 200.0  # of tests, as long as they took under coverage: about four times as long
SEEN, MISSED, LATE = "seen", "missed", "late"
LEFT_OUT = ("data/runs", "reports", ".venv", ".git", ".hypothesis", ".mypy_cache", ".ruff_cache",
            ".pytest_cache", ".whl", ".peer", ".scratch")  # fmt: skip
FIRST = re.compile(r"^(?:FAILED|ERROR) (.+)$", re.MULTILINE)


class Copy:
    """A copy of the checkout, in which one fault at a time is planted."""

    def __init__(self, folder: Path, source: Path = ROOT):
        """folder: an empty folder for the copy of `source`."""
        self.root = folder / "checkout"
        skipped = {source / name for name in LEFT_OUT}

        def ignored(directory: str, names: list[str]) -> set[str]:
            return {name for name in names if Path(directory) / name in skipped}

        shutil.copytree(source, self.root, ignore=ignored, symlinks=True)
        for name in (".venv", ".git"):
            (self.root / name).symlink_to(source / name)

    def judge(self, fault: Fault, tests: Sequence[str]) -> dict[str, Any]:
        """What the tests say of a fault: its outcome, the test that saw it, seconds."""
        path = self.root / fault.path
        source, stat = path.read_text(), path.stat()
        path.write_text(fault.planted(source))
        try:
            begun = time.monotonic()
            outcome, by = self._run(tests)
            return {"outcome": outcome, "by": by, "tests": len(tests),
                    "seconds": round(time.monotonic() - begun, 1)}  # fmt: skip
        finally:
            path.write_text(source)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def collected(self) -> list[str]:
        """The names of its tests. Raises FaultError where it cannot load them without a fault."""
        process = self._pytest("--collect-only", "-o", "addopts=")
        said, _ = process.communicate()
        if process.returncode:
            raise FaultError(f"no test runs in a copy of the checkout: {said.strip()[-300:]}")
        return [line for line in said.splitlines() if line.partition("::")[0].endswith(".py")]

    def _pytest(self, *more: str, **variables: str) -> subprocess.Popen[str]:
        paths = filter(None, (str(self.root), os.environ.get("PYTHONPATH")))
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1",
            "GIT_OPTIONAL_LOCKS": "0", "CI": "1", ALWAYS: "1", **variables,
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no",
            "-m", touched.QUICK_AND_LONG, *more,
        ]  # fmt: skip
        return subprocess.Popen(
            command, cwd=self.root, env=env, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _run(self, tests: Sequence[str]) -> tuple[str, str]:
        if not tests:
            return MISSED, ""
        listed = self.root.parent / "tests"
        listed.write_text(json.dumps(list(tests)))
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        process = self._pytest("-x", "-p", chosen.__name__, *files, **{chosen.LISTED: str(listed)})
        try:
            said, _ = process.communicate(timeout=MOST_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return LATE, ""
        if process.returncode == 0:
            return MISSED, ""
        if process.returncode < 0:
            return SEEN, signal.Signals(-process.returncode).name
        found = FIRST.search(said)
        if found is None:
            return SEEN, said.strip().splitlines()[-1][:200] if said.strip() else ""
        # behind the name of a test can be " - " and its error, and in a name both, too
        return SEEN, max(filter(found[1].startswith, tests), key=len, default=found[1])


def plant(wanted: Sequence[Fault], record: Rows, jobs: int) -> None:
    """Judges faults, some at a time, each in a copy of its own."""
    with tempfile.TemporaryDirectory(prefix="workbench-faults-") as folder:
        copies = [Copy(Path(folder) / str(n)) for n in range(jobs)]
        known = touched.load().of(copies[0].collected())
        free = threading.Semaphore(jobs)

        def one(fault: Fault) -> None:
            with free:
                copy = copies.pop()
                try:
                    row = copy.judge(fault, known.tests(fault, CHOSEN_S))
                finally:
                    copies.append(copy)
            record.note(fault.name, row)
            print(f"{row['outcome']:7}{fault.name}: {row['seconds']} s {row['by']}", flush=True)

        with ThreadPoolExecutor(jobs) as pool:
            for done in [pool.submit(one, fault) for fault in wanted]:
                done.result()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="PREFIX")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--touched", nargs="*", metavar="PATH")
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.touched is not None:
        touched.measure(args.jobs, *args.touched)
        return 0
    chosen, wrong = list(every(args.only)), problems(args.only)
    if args.check or wrong:
        print("\n".join(wrong) or f"{len(chosen)} faults can be planted")
        return int(bool(wrong))
    record = Rows(args.out, "faults")
    plant([fault for fault in chosen if not record.now(fault.name)], record, args.jobs)
    counts = {outcome: sum(record.rows[f.name]["outcome"] == outcome for f in chosen)
              for outcome in (SEEN, MISSED, LATE)}  # fmt: skip
    print(", ".join(f"{n} {outcome}" for outcome, n in counts.items()))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FaultError as error:
        sys.exit(f"error: {error}")
    except FileNotFoundError as error:
        sys.exit(f"error: {error}; run python -m tests.faults --touched first")
