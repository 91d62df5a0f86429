"""`wb.check`: is what an engine issues free of races, and which of its waits could go?

Nothing is computed. The programs of a decode, or of prompts with tokens after each, are repeated as
the host would issue them, and every pair of accesses is checked (`program/check/hazards.py`).
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import pandas as pd

from workbench.backend.base import Backend
from workbench.benchmarks.given import EngineOrPath, given_engine
from workbench.common.framed import Framed
from workbench.common.whole import check_whole
from workbench.config import BASELINE
from workbench.engine import exclusive
from workbench.engine.choose import Wanted
from workbench.engine.engine import Engine
from workbench.graph.ir import Node
from workbench.program.check import hazards
from workbench.program.check.findings import Findings
from workbench.program.check.report import lines
from workbench.program.commands import CommandAt, Program

RACE, REFUSED, WAIT = "race", "refused", "wait"
COLUMNS = {
    "finding": "str", "step": "Int64", "index": "Int64", "part": "Int64", "command": "str",
    "superfluous": "boolean", "sufficient": "boolean", "kind": "str", "second_step": "Int64",
    "second_index": "Int64", "second": "str", "buffer": "str", "offset": "Int64", "bytes": "Int64",
    "may": "boolean", "missing": "str", "count": "Int64",
}  # fmt: skip


class Proof(Framed):
    """What `wb.check` found: races, and the waits that are superfluous.

    cycle: the programs that were checked, in the order of their issue.
    found: the findings (`program/check/findings.py`).

    Printed, it is the report of `workbench check`. `to_frame` has a row for each finding.
    """

    def __init__(self, cycle: list[Program], found: Findings):
        self.cycle, self.found = cycle, found

    @property
    def safe(self) -> bool:
        """Whether no commands race, and every programmatic launch waits by itself."""
        return self.found.safe

    def lines(self) -> list[str]:
        """The report, line by line."""
        return lines(self.cycle, self.found)

    def to_frame(self) -> pd.DataFrame:
        """A row for each finding.

        Columns:

        * finding: `race`; `refused`, a programmatic launch whose kernel declares no wait; or
          `wait`, a wait of a steady repetition, whether it can go or not.
        * step, index, part: where the command is: the step, its position in the program, and its
          number among the parts of a plan there. command: in words.
        * superfluous: this wait can go alone. sufficient: with these waits all others can go.
        * of a race: kind (`write-read`, ...), second_step, second_index and second of the other
          command; buffer, offset and bytes that they dispute; may (only a declared access might
          touch them), missing (what would order the two), count (races of the same words).
        """
        found = self.found
        rows = [
            self._entry(RACE, race.first)
            | {
                "kind": race.kind, "second_step": race.second.step,
                "second_index": race.second.index, "second": self._words(race.second),
                "buffer": race.buffer.name, "offset": race.offset, "bytes": race.nbytes,
                "may": race.may, "missing": race.missing, "count": race.count,
            }
            for race in found.races
        ]  # fmt: skip
        rows += [self._entry(REFUSED, at) for at in found.refused]
        rows += [
            self._entry(WAIT, at)
            | {"superfluous": at in found.superfluous, "sufficient": at in found.sufficient}
            for at in found.waits
        ]
        return pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)

    def _entry(self, finding: str, at: CommandAt) -> dict[str, Any]:
        where = {"step": at.step, "index": at.index, "part": at.part}
        return {"finding": finding, "command": self._words(at)} | where

    def _words(self, at: CommandAt) -> str:
        return at.describe(self.found.steps[at.step].backends)

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


@exclusive.door
def check(
    engine: EngineOrPath,
    n_tokens: int = 1,
    n_decoded: int = 0,
    *,
    toggles: Wanted = None,
    **settings: Any,
) -> Proof:
    """Proves that what an engine issues is free of races, and lists the waits that it could do
    without. Nothing is computed.

    engine: an Engine; or the path of a GGUF file, which is opened for the check and closed again.
    n_tokens: of each prompt; 1: a decode.
    n_decoded: single tokens after each prompt.
    toggles: to check in place of the engine's own, as `Engine.variant` takes them. An engine of a
        file begins with everything off, and may have an ordering that races.
    settings: fields of EngineConfig (device, n_ctx, ...) for an engine of a file.

    Returns a `Proof`. Raises UsageError for no tokens, for a number of them that is not whole, for
    more than the context holds, for toggles that an open engine refuses, and for an unknown
    keyword; and what `Engine.load` raises.
    """
    check_whole(n_tokens=n_tokens, n_decoded=n_decoded)
    unsafe = {"unsafe": True} if not isinstance(engine, Engine) else {}
    with given_engine(engine, check, unsafe | settings, BASELINE) as opened:
        exclusive.check(opened._loaded)
        if toggles is None:
            return prove(opened, n_tokens, n_decoded)
        with opened.variant(toggles) as variant:
            return prove(variant, n_tokens, n_decoded)


def prove(engine: Engine, n_tokens: int = 1, n_decoded: int = 0) -> Proof:
    """As `check`, of an engine as it is."""
    cycle, able = engine.cycle(n_tokens, n_decoded), engine.backend.capabilities
    declared = _declared(engine.backend)
    return Proof(cycle, hazards.check_cycle(cycle, one_order=able.one_order, declared=declared))


def _declared(backend: Backend) -> Callable[[Node], bool]:
    """Whether the kernels of a node declare their wait for the launch before them. Asked is each
    kernel itself, where a backend names its kernels, and not the rule by which programs are
    lowered."""

    def declared(node: Node) -> bool:
        kernels = backend.kernels_of(node)
        return backend.begins_early(node) if kernels is None else all(k.waits for k in kernels)

    return declared
