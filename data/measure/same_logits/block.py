"""The record of the comparison as tables of data/results/README.md."""

from __future__ import annotations

import re
from collections.abc import Iterator

from data.measure.recorded import Recorded
from data.measure.same_logits import compare
from data.measure.tables import Line, Part, Table

NAME = "same-logits"


def counts(recorded: Recorded) -> Iterator[Line]:
    """A line for each device: how many combinations and arrays, and how many are not the same."""
    for device, run in (recorded.alone(NAME) or {"runs": {}})["runs"].items():
        n = run["counts"]
        yield Line({
            "device": device,
            "combinations": str(n["cases"]),
            "refused by both": str(n.get(compare.REFUSED, 0)),
            "arrays": str(n["arrays"]),
            "equal": str(n["arrays equal"]),
            "logits": str(n["values equal"]),
            "not as they were": str(len(run["others"])),
            "on": f"{run['machine']}, {run['date'][:10]}",
        })  # fmt: skip


def said(recorded: Recorded) -> str:
    found = recorded.alone(NAME) or {}
    old, new = found["old"]["commit"]["hash"], found["new"]["commit"]
    return f"Commit {old[:8]} beside commit {new[:8]}, on one machine each."


def changed(recorded: Recorded) -> Iterator[Line]:
    """What was changed on purpose: the answers of both commits."""
    for row in (recorded.alone(NAME) or {"changed_on_purpose": ()})["changed_on_purpose"]:
        yield Line({"asked": row["what"], "before": _short(row["old"]), "now": _short(row["new"])})


def _short(answer: str) -> str:
    """A refusal by its first clause, without the file; hashes only tell logits apart."""
    if answer.startswith("logits "):
        return f"logits {answer.split()[1][:6]}"
    kind, _, words = answer.partition(": ")
    words = re.sub(r"^\w+\.gguf: ", "", words)
    return f"refused: {words.split('; ')[0].split(', ')[0]}" if kind.endswith("Error") else answer


BLOCKS: dict[str, list[Part]] = {
    NAME: [Table("Logits of an earlier commit", counts, said=said)],
    f"{NAME}-changed": [Table("Changed on purpose", changed)],
}
