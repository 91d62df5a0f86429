"""The proof table: the superfluous waits of each ordering, and the races without the other waits.

Programs go in (`Engine.programs`), a frame comes out; `program/check/hazards.py` does the proving.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from workbench.common.errors import UsageError, WorkbenchError
from workbench.common.shipped import shipped
from workbench.common.tables import Table
from workbench.config import CopyStream, StepWait, SyncMode, Toggles
from workbench.program.check import hazards
from workbench.program.commands import RESULT, CommandAt, Copy, Program, Sync, Wait
from workbench.program.letters import once

COLUMNS = (
    "ordering", "run", "pattern", "waits", "stream_waits", "superfluous", "sufficient", "races",
    "because",
)  # fmt: skip
# column of the record -> heading
OF_RECORD = {
    "thread": "thread", "what": "what", "first": "first", "and": "and",
    "before": "races before the fix", "after": "races after it",
}  # fmt: skip
# the modes of a lesson: the two that race and are left out have a twin among these
SHOWN = (
    SyncMode.PER_COPY, SyncMode.BLOCKING_COPIES, SyncMode.COPY_BOUNDARY, SyncMode.PACKED,
    SyncMode.EVENT_GUARDED, SyncMode.WRITE_READ_BOUNDARY, SyncMode.IMPLICIT,
)  # fmt: skip


def cycles(
    engine: Any, n_tokens: int = 1, run: str = "decode", **chosen: str
) -> dict[tuple[str, str], Any]:
    """The programs that are repeated under every sync mode and copy stream, for `proof_rows`: of
    single tokens, or of prompts of n_tokens without waits between their ubatches. `chosen`: values
    of other toggles. Every step has a program with waits and races of its own.

    engine: may lower racing programs (EngineConfig.unsafe); device `null` will do.
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
            found[f"{sync}, {stream}", run] = hazards.apart(variant.cycle(n_tokens))
    return found


def of_arms(engine: Any, arms: Mapping[str, Toggles]) -> dict[tuple[str, str], Any]:
    """The programs of single tokens with each of some toggles, for `proof_rows`."""
    found: dict[tuple[str, str], Any] = {}
    for name, toggles in arms.items():
        with engine.variant(toggles) as side:
            found[name, "decode"] = hazards.apart(side.cycle(1))
    return found


def proof_rows(cycles: Mapping[tuple[str, str], Sequence[Program]]) -> Iterator[dict[str, Any]]:
    """A row for each (ordering, run) and the programs that are repeated for it.

    waits: of the host, in one repetition. stream_waits: of streams, for events.
    superfluous: the host's waits that can be removed, each alone.
    sufficient: waits of both kinds; all others can be removed together.
    races: pairs of commands.
    because: the order that is missing between the first pair; without races, the waits that
    suffice.
    """
    for (ordering, run), cycle in cycles.items():
        found = hazards.check_cycle(cycle)
        kept = [_waited_for(found, wait) for wait in found.sufficient]
        yield {
            "ordering": ordering,
            "run": run,
            "pattern": " | ".join(once(p.pattern(True, result=len(cycle) > 1) for p in cycle)),
            "waits": _n_of_host(found.waits),
            "stream_waits": len(found.waits) - _n_of_host(found.waits),
            "superfluous": _n_of_host(found.superfluous),
            "sufficient": len(found.sufficient),
            "races": found.n_races,
            "because": found.races[0].missing if found.races else _once_each(kept),
        }


def proof_table(cycles: Mapping[tuple[str, str], Sequence[Program]]) -> pd.DataFrame:
    """`proof_rows` as a frame. In programs that race, no wait counts as superfluous."""
    return proof_frame(list(proof_rows(cycles)))


def proof_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    table = Table(rows, columns=list(COLUMNS))
    table.attrs["code"] = ["pattern"]
    racing = table["races"] > 0
    for name in ("superfluous", "sufficient"):
        table[name] = table[name].astype(object).mask(racing, "")
    table["races"] = table["races"].astype(object).mask(~racing, "none")
    return table


def superfluous_table(**runs: pd.DataFrame) -> Table:
    """A row for each mode of SHOWN: its pattern, and by run and copy stream `11 of 13`, the host's
    waits that are superfluous and all; or `races`, where commands have no order; empty where the
    mode has no such ordering. runs: frames of `proof_table`."""
    rows = []
    for mode in SHOWN:
        row: dict[str, str] = {"sync": mode.value, "pattern": ""}
        for run, table in runs.items():
            proved = table.set_index("ordering")
            for stream in (CopyStream.OWN, CopyStream.COMPUTE):
                name = f"{mode}, {stream}"
                found = proved.loc[name] if name in proved.index else None
                row[f"{run}, {stream}"] = "" if found is None else _of_all(found)
                if found is not None and not row["pattern"]:
                    row["pattern"] = str(found["pattern"])
        rows.append(row)
    return Table(rows).shown(code=["pattern"])


def _of_all(proved: pd.Series) -> str:
    if proved["races"] != "none":
        return "races"
    return f"{proved['superfluous']} of {proved['waits']}"


def _n_of_host(waits: Sequence[CommandAt]) -> int:
    return sum(not isinstance(wait.command, Wait) for wait in waits)


def _waited_for(found: hazards.Findings, wait: CommandAt) -> str:
    """The purpose of a wait in words: its position in its split."""
    command, commands = wait.command, found.steps[wait.step].commands
    if isinstance(command, Wait):
        return "the device's wait for the copies"
    if command.split == RESULT:
        return "the wait for the logits"
    if isinstance(command, Sync) and command.blocks is not None:
        return f"the wait for the copy of {command.blocks.name}"
    after = any(isinstance(c, Copy) and c.split == command.split for c in commands[: wait.index])
    return f"the wait {'after' if after else 'before'} the copies"


def _once_each(kept: Sequence[str]) -> str:
    counted = {what: kept.count(what) for what in dict.fromkeys(kept)}
    said = [what if n == 1 else f"{what} ({n} times)" for what, n in counted.items()]
    return f"enough: {', '.join(said) or 'none'}"


def of_record_table() -> Table:
    """The recorded table of races found in llama.cpp's scheduler, before and after their fix
    (`data/measure/races_of_record.py`): a row for each, with its first pair. Empty where the
    results did not come along."""
    try:
        page = shipped("data/results", "proofs.json") / "proofs.json"
    except WorkbenchError:
        return Table([], columns=[*OF_RECORD.values()])
    found = pd.DataFrame(json.loads(page.read_text())["of_record"])
    return Table(found[[*OF_RECORD]].rename(columns=OF_RECORD))
