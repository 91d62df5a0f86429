"""The committed record of the comparison: `data/results/same-logits.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from data.measure.same_logits import cases, compare, trees

RECORD = trees.ROOT / "data" / "results" / "same-logits.json"


def merged(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One record of several results. Each is of all cases of its devices, and of one new source.

    Raises SystemExit for a sample, for results of two sources, and for one of other cases.
    """
    found = list(results)
    commits = {r["new"]["commit"]["hash"] for r in found} - {"unknown"}
    if not all(r["all"] for r in found):
        raise SystemExit("a sample is no record: run `compare` without --sample")
    if len({(r["old"]["sources"], r["new"]["sources"]) for r in found}) != 1:
        raise SystemExit("these results are of different sources: run `compare` again")
    if any(r["cases_hash"] != cases.files_hash("cuda" if "cuda" in r["counts"] else "")
           for r in found):  # fmt: skip
        raise SystemExit("a result is of other cases than cases.json has: run `compare` again")
    if len(commits) > 1 or any(r["new"]["commit"]["dirty"] for r in found):
        raise SystemExit("a result is of changed sources: commit them, and run `compare` again")
    asked = [r["changed_on_purpose"] for r in found if r["changed_on_purpose"]]
    if not asked:
        raise SystemExit("what was changed on purpose is asked on the embedded device: add its run")
    runs: dict[str, Any] = {}
    for result in found:
        for device, counts in result["counts"].items():
            runs[device] = {
                "date": result["date"],
                "machine": result["machine"],
                "cases_hash": result["cases_hash"],
                "counts": counts,
                "others": [o for o in result["others"] if o["device"] == device],
            }
    return {
        "old": found[0]["old"],
        "new": {"commit": (commits or {"unknown"}).pop(), "sources": found[0]["new"]["sources"]},
        "changed_on_purpose": asked[0],
        "seen": json.loads(cases.FILE.read_text())["seen"],
        "runs": runs,
    }


def is_whole(record: Mapping[str, Any]) -> bool:
    """Whether the counts of every run add up, and every difference is listed."""
    for run in record["runs"].values():
        counts = run["counts"]
        n_others = counts["cases"] - sum(counts.get(kind, 0) for kind in compare.GOOD)
        if not compare.adds_up(counts) or n_others != len(run["others"]):
            return False
    return True
