"""Proves every sync mode on both copy streams: `python -m data.measure.proofs` writes
data/results/proofs.json, which README's table is made of and `make test` proves again.

Nothing is measured and no device is needed: programs of a llama of two layers are lowered for a
device that computes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import workbench as wb
from data.measure.races_of_record import record_rows
from data.measure.recorded import Recorded, told
from data.measure.sources import ROOT
from data.measure.tables import Line, Part, Table
from workbench.answers.proofs import cycles, proof_frame, proof_rows
from workbench.common.output import write_text
from workbench.config import HostSource, NCopies
from workbench.model.synth.models import write_model
from workbench.program.check import hazards
from workbench.program.commands import Program

FILE = "proofs.json"
OUT = ROOT / "data" / "results" / FILE
# tests of `make test-exhaustive` -> what they judge
EXHAUSTIVE = {
    "test_of_every_ordering_on_every_placement_the_checker_is_right": (
        "two models on four placements, copies in order and, with one device, in none: every sync "
        "mode by step_wait and input_order, and by host_source and n_copies, whole and without any "
        "one wait or record"
    ),
    "test_of_the_full_products_of_toggles_the_checker_is_right": (
        "three full products of the toggles that change a graph: every ordering of every graph "
        "that they make"
    ),
    "test_without_any_two_commands_the_checker_is_right": (
        "a llama on one device, copies in order and in none: every sync mode without any two"
    ),
}
# where inputs lie on the host and on the device, as `by_source` takes them
SOURCES: dict[str, dict[str, str]] = {
    **{source: {"host_source": source} for source in HostSource},
    f"n_copies={NCopies.FOUR}": {"n_copies": NCopies.FOUR},
}
N_UBATCH = 8
WHAT = (
    "A llama of two layers; decode: one token after the other, each with its logits; train: "
    "prompts of three ubatches with `step_wait=outputs`, of which the last has logits. Waits: of "
    "the host; those of streams for events stand apart. A race is shown by its first pair."
)
LONG = 6  # ubatches: more than a ring has entries, so that every entry comes again
OF_SOURCES = (
    f"The same decode, and a train of {LONG} ubatches, so that every ring entry comes again; by "
    "`host_source`, and with `n_copies` ring entries for inputs on the device."
)


def both(engine: wb.Engine) -> dict[tuple[str, str], list[Program]]:
    """The programs of a decode and of a train under every sync mode and copy stream."""
    decode, train = cycles(engine), cycles(engine, 3 * N_UBATCH, "train")
    names = dict.fromkeys(name for name, _ in decode)
    return {(name, run): of[name, run] for name in names
            for run, of in (("decode", decode), ("train", train))}  # fmt: skip


def by_source(engine: Any, n_tokens: int = 1, run: str = "decode") -> list[dict[str, Any]]:
    """A row for each ordering: how many pairs of commands race with each of SOURCES."""
    found = {name: cycles(engine, n_tokens, run, **chosen) for name, chosen in SOURCES.items()}
    return [
        {
            "ordering": ordering, "run": run,
            "races": {name: len(hazards.races(found[name][ordering, run])) for name in SOURCES},
        }
        for ordering, _ in next(iter(found.values()))
    ]  # fmt: skip


def proved(path: Path) -> dict:
    with wb.Engine.load(
        path, device="null", n_ctx=256, n_ubatch=N_UBATCH, unsafe=True, toggles=wb.Toggles()
    ) as engine:
        return {
            "what": WHAT,
            "rows": list(proof_rows(both(engine))),
            "of_sources": OF_SOURCES,
            "sources": by_source(engine) + by_source(engine, LONG * N_UBATCH, "train"),
            "of_record": record_rows(),
        }


def proofs(recorded: Recorded) -> Iterator[Line]:
    """The rows of proofs.json, with patterns as code."""
    if found := recorded.alone("proofs"):
        for row in proof_frame(found["rows"]).to_dict("records"):
            yield Line(row | {"pattern": f"`{row['pattern']}`"})


def racing(recorded: Recorded) -> Iterator[Line]:
    """A line for each ordering that races for any place of inputs, by place."""
    for row in (recorded.alone("proofs") or {"sources": ()})["sources"]:
        if any(row["races"].values()):
            names = {name: row[name] for name in ("ordering", "run")}
            yield Line(names | {s: "races" if n else "safe" for s, n in row["races"].items()})


def exhaustive(recorded: Recorded) -> Iterator[Line]:
    """How many runs each test in exhaustive.json judged."""
    tests = (recorded.alone("exhaustive") or {"tests": {}})["tests"]
    for test, what in EXHAUSTIVE.items() if tests else ():
        of_test = [row for name, row in tests.items() if _function(name) == test]
        safe, unsafe, unseen = (  # a test that failed has no counts
            sum(r.get(outcome, 0) for r in of_test) for outcome in ("safe", "unsafe", "unseen")
        )
        yield Line({"runs of": what, "safe": safe, "unsafe": unsafe,
                    "of these no seed saw": unseen, "hours": f"{_hours(of_test):.1f}"})  # fmt: skip


def _function(name: str) -> str:
    return name.partition("[")[0].rpartition("::")[2]


def _hours(tests: Iterable[dict[str, Any]]) -> float:
    return sum(test["seconds"] for test in tests) / 3600


def exhaustive_where(recorded: Recorded) -> str:
    found = recorded.alone("exhaustive") or {}
    tests = found["tests"]
    n = sum(_function(name) in EXHAUSTIVE for name in tests)
    failed = sum(test["outcome"] == "failed" for test in tests.values())
    runs = [told(about, about["machine"]["cpu"]["name"]) for about in found["commits"].values()]
    more = f", {len(tests) - n} of what the slow tests try a share of" if len(tests) > n else ""
    hours = f"{_hours(tests.values()):.1f} hours of one core"
    return f"{n} tests{more}, {failed} failed, {hours}; {' '.join(runs)}"


def _told(key: str, recorded: Recorded) -> str:
    return (recorded.alone("proofs") or {})[key]


BLOCKS: dict[str, list[Part]] = {
    "proofs": [
        Table("Proofs", proofs),
        partial(_told, "what"),
        "By where inputs lie, of every ordering that races anywhere:",
        Table("", racing),
        partial(_told, "of_sources"),
    ],
    "exhaustive": [Table("Exhaustive tests", exhaustive, said=exhaustive_where)],
}


if __name__ == "__main__":
    path = write_model("tiny-llama", "Q8_0", Path("data/models/tiny-llama-Q8_0.gguf"))
    write_text(OUT, json.dumps(proved(path), indent=1) + "\n")
    print(f"wrote {OUT}")
