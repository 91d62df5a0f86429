"""Runs the benchmarks and records their medians.

    python -m tests.bench.record          # all of them
    python -m tests.bench.record FILES    # of test_bench_forks.py, say, beside the rest

Writes data/results/benchmarks.json: date, commit, machine, and for every benchmark its median,
interquartile range and rounds, in microseconds. What a call with FILES measured says under `of`
when, where and of which commit. `tests/measure/test_recorded_runs.py` holds the file to the
requirements.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from workbench.benchmarks.runs import provenance
from workbench.common.output import write_text

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "tests" / "bench"
OUT = ROOT / "data" / "results" / "benchmarks.json"


def main(files: Sequence[str]) -> int:
    about = {
        "date": provenance.utc_now(),
        "commit": provenance.commit(),
        "machine": provenance.machine(),
        "versions": dict(provenance.versions()),
    }
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "benchmarks.json"
        flags = ["-m", "not gpu", "--benchmark-enable", "--benchmark-only"]
        here = [str(BENCHMARKS / name) for name in files or [""]]
        if status := pytest.main([*here, *flags, f"--benchmark-json={raw}"]):
            return int(status)
        found = rows(json.loads(raw.read_text())["benchmarks"])
    record = about | {"benchmarks": found}
    if files:
        record = merged(json.loads(OUT.read_text()), found, about)
    write_text(OUT, json.dumps(record, indent=1) + "\n")
    print(f"wrote {OUT}")
    return 0


def rows(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By name, what pytest-benchmark found."""
    return {
        b["fullname"].removeprefix("tests/bench/"): {
            "median_us": round(b["stats"]["median"] * 1e6, 3),
            "iqr_us": round(b["stats"]["iqr"] * 1e6, 3),
            "rounds": b["stats"]["rounds"],
        }
        for b in found
    }


def merged(
    record: dict[str, Any], found: dict[str, dict[str, Any]], about: dict[str, Any]
) -> dict[str, Any]:
    """`record` with these rows, which say of when and where they are. Older rows of the same files
    are gone."""
    files = {name.partition("::")[0] for name in found}
    kept = {n: row for n, row in record["benchmarks"].items() if n.partition("::")[0] not in files}
    return record | {"benchmarks": kept | {n: row | {"of": about} for n, row in found.items()}}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
