"""Runs the benchmarks and records their medians: `python -m tests.bench.record`.

Writes data/results/benchmarks.json: date, commit, machine, and for every benchmark its median,
interquartile range and rounds, in microseconds. `tests/unit/test_recorded_runs.py` holds the
file to the requirements.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from workbench.bench import provenance
from workbench.output import write_text

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "data" / "results" / "benchmarks.json"


def main() -> int:
    record = {
        "date": provenance.utc_now(),
        "commit": provenance.commit(),
        "machine": provenance.machine(),
        "versions": dict(provenance.versions()),
    }
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "benchmarks.json"
        here = str(ROOT / "tests" / "bench")
        flags = ["--benchmark-enable", "--benchmark-only", f"--benchmark-json={raw}"]
        status = pytest.main([here, "-m", "not gpu", *flags])
        if status:
            return int(status)
        found = json.loads(raw.read_text())["benchmarks"]
    record["benchmarks"] = {
        b["fullname"].removeprefix("tests/bench/"): {
            "median_us": round(b["stats"]["median"] * 1e6, 3),
            "iqr_us": round(b["stats"]["iqr"] * 1e6, 3),
            "rounds": b["stats"]["rounds"],
        }
        for b in found
    }
    write_text(OUT, json.dumps(record, indent=1) + "\n")
    print(f"wrote {OUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
