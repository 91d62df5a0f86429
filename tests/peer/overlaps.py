"""How much of a token has two kernels or more in flight, in settings of the campaign of streams."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import workbench as wb
from data.measure.session import toggles_of
from workbench.benchmarks.times.overlap import measure_overlap
from workbench.common.errors import WorkbenchError

N_TOKENS = 8


def overlaps(engine: wb.Engine, settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of each setting what `Overlap.record` says, and the seconds it took; `failed`: why it could
    not be measured, which ends no comparison. Each is printed.

    Behind all turns: what a trace leaves in the process meets none of them."""
    found: dict[str, dict[str, Any]] = {}
    for spec in settings:
        begun = time.monotonic()
        try:
            toggles = engine.resolve(toggles_of(spec, engine))
            with engine.variant(toggles) as used:
                made = measure_overlap(used, N_TOKENS)
        except WorkbenchError as error:
            print(f"{spec}: overlap not measured: {error}", flush=True)
            found[spec] = {"failed": str(error)}
            continue
        print(f"{spec}: {made}", flush=True)
        found[spec] = made.record() | {"seconds": round(time.monotonic() - begun, 3)}
    return found
