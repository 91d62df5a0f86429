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

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "data" / "results" / "benchmarks.json"


def main(files: Sequence[str]) -> int:
    about = {
        "date": provenance.utc_now(), "commit": provenance.commit(),
        "machine": provenance.machine(), "versions": dict(provenance.versions()),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "benchmarks.json"
        flags = ["-m", "not gpu", "--benchmark-enable", "--benchmark-only"]
        here = [str(Path(__file__).with_name(name)) for name in files] or [str(HERE)]
        if status := pytest.main([*here, *flags, f"--benchmark-json={raw}"]):
            return int(status)
        found = json.loads(raw.read_text())["benchmarks"]
    rows: dict[str, dict[str, Any]] = {
        b["fullname"].removeprefix("tests/bench/"): {
            **{f"{what}_us": round(b["stats"][what] * 1e6, 3) for what in ("median", "iqr")},
            "rounds": b["stats"]["rounds"],
        }
        for b in found
    }
    record = about | {"benchmarks": rows}
    if files:  # these rows say of when and where they are; older ones of the same files are gone
        record, of = json.loads(OUT.read_text()), {name.partition("::")[0] for name in rows}
        kept = {n: row for n, row in record["benchmarks"].items() if n.partition("::")[0] not in of}
        record["benchmarks"] = kept | {n: row | {"of": about} for n, row in rows.items()}
    write_text(OUT, json.dumps(record, indent=1) + "\n")
    print(f"wrote {OUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
