"""The committed record of the comparison, `data/results/same-logits.json`, and what may differ.

`expected.json` is the list of what was changed on purpose since the old commit: each entry has a
verdict of `compare.py`, a pattern that the first line of the difference matches, and why.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from data.measure.same_logits import cases, compare, trees

RECORD = trees.ROOT / "data" / "results" / "same-logits.json"
EXPECTED = Path(__file__).with_name("expected.json")


def expected() -> list[dict[str, str]]:
    return json.loads(EXPECTED.read_text())


def why(other: Mapping[str, Any]) -> str:
    """Why a case is not as it was; empty where nothing in `expected.json` says so."""
    for entry in expected():
        if entry["was"] == other["was"] and re.search(entry["what"], other["what"]):
            return entry["why"]
    return ""


def unexplained(others: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [other for other in others if not why(other)]


def cases_hash() -> str:
    return hashlib.sha256(cases.FILE.read_bytes()).hexdigest()


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
    if any(r["cases_hash"] != cases_hash() for r in found):
        raise SystemExit("a result is of other cases than cases.json has: run `compare` again")
    if len(commits) > 1 or any(r["new"]["commit"]["dirty"] for r in found):
        raise SystemExit("a result is of changed sources: commit them, and run `compare` again")
    runs: dict[str, Any] = {}
    for result in found:
        for device, counts in result["counts"].items():
            own = [o for o in result["others"] if o["device"] == device]
            runs[device] = {
                "date": result["date"],
                "machine": result["machine"],
                "counts": counts,
                "changed_on_purpose": dict(Counter(filter(None, map(why, own)))),
                "others": unexplained(own),
            }
    return {
        "old": found[0]["old"],
        "new": {"commit": (commits or {"unknown"}).pop(), "sources": found[0]["new"]["sources"]},
        "cases_hash": cases_hash(),
        "seen": json.loads(cases.FILE.read_text())["seen"],
        "runs": runs,
    }


def is_whole(record: Mapping[str, Any]) -> bool:
    """Whether the counts of every run add up, and every difference has a reason or is listed."""
    for run in record["runs"].values():
        counts = run["counts"]
        n_others = counts["cases"] - sum(counts.get(kind, 0) for kind in compare.GOOD)
        listed = sum(run["changed_on_purpose"].values()) + len(run["others"])
        if not compare.adds_up(counts) or n_others != listed:
            return False
    return True
