"""Two replays of the same cases, array by array."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# How a case came out: the same arrays, or the same refusal, or what else.
EQUAL = "equal"
DIFFERENT = "different"
REFUSED = "refused by both"
NEWLY_REFUSED = "refused by the new one only"
NEWLY_ALLOWED = "refused by the old one only"
FAILED = "failed"
GOOD = (EQUAL, REFUSED)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """What `replay.py` wrote, by case."""
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return {row["case"]: row for row in rows}


def verdict(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if "failed" in old or "failed" in new:
        return FAILED
    if "refused" in old or "refused" in new:
        if "refused" in old and "refused" in new:
            return REFUSED
        return NEWLY_REFUSED if "refused" in new else NEWLY_ALLOWED
    return EQUAL if old["arrays"] == new["arrays"] else DIFFERENT


def what_differs(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """In words: the first array that differs, or the errors."""
    for word, found in (("old", old), ("new", new)):
        error = found.get("failed") or found.get("refused")
        if error:
            return f"{word}: {error[0]}: {error[1]}"
    pairs = list(zip(old["arrays"], new["arrays"], strict=False))
    unequal = [i for i, (a, b) in enumerate(pairs) if a != b]
    first = f", the first is number {unequal[0]}" if unequal else ""
    return f"{len(unequal)} of {len(old['arrays'])} and {len(new['arrays'])} arrays differ{first}"


def compare(
    cases: Iterable[Mapping[str, Any]],
    old: Mapping[str, Mapping[str, Any]],
    new: Mapping[str, Mapping[str, Any]],
    device: str = "",
) -> dict[str, Any]:
    """Counts by device, and the cases that are not as they were. A case that a replay does not have
    is an error (KeyError): nothing is left out in silence.

    device: where the cases ran, in place of their own.
    """
    counts: dict[str, Counter[str]] = {}
    others: list[dict[str, Any]] = []
    for case in cases:
        a, b = old[case["case"]], new[case["case"]]
        kind = verdict(a, b)
        own = counts.setdefault(device or case["device"], Counter())
        own["cases"] += 1
        own[kind] += 1
        pairs = list(zip(a.get("arrays", []), b.get("arrays", []), strict=False))
        same = [x for x, y in pairs if x == y]
        own["arrays"] += len(pairs)
        own["arrays equal"] += len(same)
        own["values equal"] += sum(values for _, _, values, _ in same)
        own["arrays not finite"] += sum(not finite for *_, finite in same)
        own["refusals in other words"] += kind == REFUSED and a["refused"] != b["refused"]
        if kind not in GOOD:
            others.append({"case": case["case"], "device": device or case["device"],
                           "model": case["model"], "was": kind,
                           "what": what_differs(a, b)})  # fmt: skip
    return {"counts": {k: dict(v) for k, v in counts.items()}, "others": others}


def adds_up(counts: Mapping[str, int]) -> bool:
    """Whether every case is counted once, and no more arrays are equal than were compared."""
    kinds = (EQUAL, DIFFERENT, REFUSED, NEWLY_REFUSED, NEWLY_ALLOWED, FAILED)
    return (
        counts["cases"] == sum(counts.get(kind, 0) for kind in kinds)
        and counts["arrays equal"] <= counts["arrays"]
        and (counts["arrays equal"] == counts["arrays"] or any(map(counts.get, kinds[1:])))
    )
