"""The proof table: the superfluous waits of each ordering, and the races without the other waits.

Programs go in (`Engine.programs`), a frame comes out; `program/check/hazards.py` does the proving.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from workbench.common.errors import UsageError
from workbench.common.shipped import shipped
from workbench.common.tables import Table
from workbench.config import CopyStream, StepWait, SyncMode, Toggles
from workbench.program.check import hazards
from workbench.program.commands import RESULT, CommandAt, Copy, Program, Sync, Wait
from workbench.program.letters import once

COLUMNS = ("ordering", "run", "pattern", "waits", "superfluous", "sufficient", "races", "because")


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

    waits, superfluous, sufficient: of one repetition. Each superfluous wait can be removed alone;
        all waits except the sufficient ones can be removed together.
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
            "waits": len(found.waits),
            "superfluous": len(found.superfluous),
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
    (`data/measure/races_of_record.py`)."""
    page = shipped("data/results", "proofs.json") / "proofs.json"
    return Table(json.loads(page.read_text())["of_record"])
