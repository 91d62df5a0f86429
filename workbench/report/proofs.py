"""The proof table: which waits of which ordering are superfluous, and what races without them.

Programs go in (`Engine.programs`), a frame comes out; `program/check/hazards.py` does the proving.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.config import CopyStream, HostSource, NCopies, StepWait, SyncMode, Toggles
from workbench.errors import UsageError
from workbench.frames import Table, markdown
from workbench.program.check import hazards
from workbench.program.check.races_of_record import CASES
from workbench.program.commands import RESULT, Copy, Place, Program, Sync, Wait
from workbench.program.letters import once
from workbench.report.recorded import commit_of

FILE = "proofs.json"
# what each test of `make test-exhaustive` judges
EXHAUSTIVE = {
    "test_of_every_ordering_on_every_placement_the_checker_is_right": (
        "two models on four placements, copies in order and, with one device, in none: every sync "
        "mode by step_wait and input_order, and by host_source and n_copies, whole and without any "
        "one wait or record"
    ),
    "test_of_the_full_product_of_toggles_the_checker_is_right": (
        "the full product of toggles: every ordering of every graph that they make"
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
COLUMNS = ("ordering", "run", "pattern", "waits", "superfluous", "sufficient", "races", "because")


def cycles(
    engine: Any, n_tokens: int = 1, run: str = "decode", **chosen: str
) -> dict[tuple[str, str], Any]:
    """The programs that are repeated under every sync mode and copy stream, for `proof_rows`: of
    single tokens, or of prompts of n_tokens without waits between their ubatches; with `chosen`
    values of other toggles.

    engine: one that may lower what races (EngineConfig.unsafe); one that computes nothing (device
    `null`) will do.
    """
    found: dict[tuple[str, str], Any] = {}
    for sync, stream in itertools.product(SyncMode, CopyStream):
        if sync == SyncMode.AUTO or stream == CopyStream.AUTO:
            continue
        try:
            toggles = Toggles(sync=sync, copy_stream=stream, step_wait=StepWait.OUTPUTS, **chosen)
        except UsageError:  # the two clash
            continue
        with engine.variant(toggles) as variant:
            found[f"{sync}, {stream}", run] = variant.cycle(n_tokens)
    return found


def proof_rows(cycles: Mapping[tuple[str, str], Sequence[Program]]) -> Iterator[dict[str, Any]]:
    """A row for each (ordering, run) and the programs that are repeated for it.

    waits, superfluous, sufficient: of one repetition; each superfluous one can go alone, and with
    the sufficient ones all others can go together. races: pairs of commands. because: what is
    missing between the first pair; where nothing races, which waits are enough.
    """
    for (ordering, run), cycle in cycles.items():
        found = hazards.check(cycle)
        kept = [_waited_for(found, place) for place in found.sufficient]
        yield {
            "ordering": ordering,
            "run": run,
            "pattern": " | ".join(once(p.pattern(True, result=len(cycle) > 1) for p in cycle)),
            "waits": len(found.waits),
            "superfluous": len(found.superfluous),
            "sufficient": len(found.sufficient),
            "races": len(found.races),
            "because": found.races[0].missing if found.races else _once_each(kept),
        }


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


def proof_table(cycles: Mapping[tuple[str, str], Sequence[Program]]) -> pd.DataFrame:
    """`proof_rows` as a frame; of programs that race, no wait is called superfluous."""
    return _frame(list(proof_rows(cycles)))


def record_table() -> pd.DataFrame:
    """The races of record (`program/check/races_of_record.py`), a row each: what the thread found,
    whether it establishes the racing pair or that is reconstructed, and what the checker finds
    before and after the fix."""
    rows = []
    for case in CASES:
        before = hazards.races(case.before)
        rows.append(
            {
                "thread": case.thread,
                "what": case.title,
                "pair": "reconstructed" if case.reconstructed else "of the thread",
                "first": str(case.expected[0]),
                "and": str(case.expected[1]),
                "before": len(before),
                "after": len(hazards.races(case.after)),
            }
        )
    return Table(rows)


def recorded(folder: Path) -> str:
    """The table of the rows in `folder`/proofs.json, as Markdown."""
    path = folder / FILE
    if not path.is_file():
        return "not measured."
    found = json.loads(path.read_text())
    rows = found["sources"]
    racing = [row for row in rows if any(row["races"].values())]
    sources = pd.DataFrame(
        {
            **{name: row[name] for name in ("ordering", "run")},
            **{source: "races" if n else "safe" for source, n in row["races"].items()},
        }
        for row in racing
    )
    parts = [
        markdown(in_letters(_frame(found["rows"]))), found["what"],
        "By where inputs lie, of every ordering that races anywhere:",
        markdown(sources), found["of_sources"],
    ]  # fmt: skip
    return "\n\n".join(parts)


def exhaustive(folder: Path) -> str:
    """How many runs the tests of `folder`/exhaustive.json judged, as Markdown."""
    path = folder / "exhaustive.json"
    if not path.is_file():
        return "not measured."
    found = json.loads(path.read_text())
    rows, hours = [], 0.0
    for test, what in EXHAUSTIVE.items():
        of_test = [r for name, r in found["tests"].items() if name.partition("[")[0].endswith(test)]
        took = sum(r["seconds"] or 0 for r in of_test) / 3600  # none of a test that was killed
        judged = {  # a test that failed has no counts
            outcome: sum(r.get(outcome, 0) for r in of_test)
            for outcome in ("safe", "unsafe", "unseen")
        }
        rows.append(
            {
                "runs of": what, "safe": judged["safe"], "unsafe": judged["unsafe"],
                "of these no seed saw": judged["unseen"], "hours": f"{took:.1f}",
            }
        )  # fmt: skip
        hours += took
    failed = sum(r["outcome"] != "passed" for r in found["tests"].values())
    return (
        f"{markdown(pd.DataFrame(rows))}\n\n{len(found['tests'])} tests, {failed} failed, "
        f"{hours:.1f} hours of one core; {found['machine']['cpu']['name']}; "
        f"commit {commit_of(found)}; {found['date'][:10]}."
    )


def in_letters(table: pd.DataFrame) -> pd.DataFrame:
    """The table for a Markdown file: its patterns as code."""
    return table.assign(pattern=[f"`{pattern}`" for pattern in table["pattern"]])


def _frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    table = Table(rows, columns=list(COLUMNS))
    table.attrs["code"] = ["pattern"]
    racing = table["races"] > 0
    for name in ("superfluous", "sufficient"):
        table[name] = table[name].astype(object).mask(racing, "")
    table["races"] = table["races"].astype(object).mask(~racing, "none")
    return table


def _waited_for(found: hazards.Findings, place: Place) -> str:
    """What a wait is for, in words: where in its split it stands."""
    command, commands = place.command, found.steps[place.step].commands
    if isinstance(command, Wait):
        return "the device's wait for the copies"
    if command.split == RESULT:
        return "the wait for the logits"
    if isinstance(command, Sync) and command.blocks is not None:
        return f"the wait for the copy of {command.blocks.name}"
    behind = any(isinstance(c, Copy) and c.split == command.split for c in commands[: place.index])
    return f"the wait {'behind' if behind else 'before'} the copies"


def _once_each(kept: Sequence[str]) -> str:
    counted = {what: kept.count(what) for what in dict.fromkeys(kept)}
    said = [what if n == 1 else f"{what} ({n} times)" for what, n in counted.items()]
    return f"enough: {', '.join(said) or 'none'}"
