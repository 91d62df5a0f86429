"""The table of what the races of a pipeline do on real devices (`racing.py` records it)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from data.measure.matrix import RACED
from data.measure.recorded import Recorded, model_of
from data.measure.sources import ANSWERS, age
from data.measure.tables import Line, Table, span

NAMES = ("sync", "copy_stream", "host_source", "n_copies")  # what an ordering is recorded by


def lines(recorded: Recorded) -> Iterator[Line]:
    """A line for each sync mode and copy stream: what its orderings did. What `racing` recorded."""
    found = recorded.file(f"pipeline-races-{RACED}")
    judged = found["orderings"] if found else []
    keys = dict.fromkeys((o["toggles"]["sync"], o["toggles"]["copy_stream"]) for o in judged)
    for sync, stream in keys:
        of = [o for o in judged if (o["toggles"]["sync"], o["toggles"]["copy_stream"]) ==
              (sync, stream)]  # fmt: skip
        raced = [o for o in of if o["races"]]
        wrong = [n for o in raced for n in o["differing"] if n]
        yield Line({
            "sync": sync, "copy_stream": stream, "orderings": str(len(of)),
            "that race": str(len(raced)),
            "pairs that race": span(o["races"] for o in raced),
            "gave other logits": str(sum(map(differs, raced))),
            "logits that differ": span(wrong),
            "safe ones that did": str(sum(differs(o) for o in of if not o["races"])),
        })  # fmt: skip


def where(recorded: Recorded) -> str:
    """The caption of the table; empty where nothing is recorded."""
    found = recorded.file(f"pipeline-races-{RACED}")
    if not found:
        return ""
    engine = found["engine"]
    return (
        f"{engine['device_description']}, {engine['config']['n_devices']} of them; "
        f"{model_of(found)}; prompts of {found['n_tokens']} tokens, {found['n_ubatch']} at once; "
        f"the {found['logits']:,} logits of the last {found['n_ubatch']}, {found['runs']} runs of "
        f"each ordering (`host_source` by `n_copies`), `unsafe`, beside those with every wait in "
        f"place; {age(found, ANSWERS)}."
    )


def said(found: dict[str, Any]) -> str:
    """How many orderings race and how many differ, in one line."""
    racing = [o for o in found["orderings"] if o["races"]]
    safe = [o for o in found["orderings"] if not o["races"]]
    return (
        f"of {len(racing)} orderings that race, {sum(map(differs, racing))} gave other logits; of "
        f"{len(safe)} that do not, {sum(map(differs, safe))}"
    )


def differs(ordering: dict[str, Any]) -> bool:
    return any(ordering["differing"])


RACES = Table("Races on real devices", lines, said=where)
