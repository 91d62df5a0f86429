"""README's first table: what each mechanism is worth, a row each, from the recorded comparisons.

`ROWS` names the runs; the numbers are `AB.summary`'s and, for the host gap, `gaps.Gaps`'s. A row
whose run is missing says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from data.measure.blocks import OfARun, caption
from data.measure.recorded import NOT_MEASURED, model_of
from workbench.bench import gaps, results
from workbench.bench.comparison import AB
from workbench.bench.stats import FASTER, SLOWER, verdict
from workbench.config import CopyStream, SyncMode
from workbench.report.tables import markdown

BEFORE, AFTER = SyncMode.PER_COPY.value, SyncMode.COPY_BOUNDARY.value
GAP = "host gap"


class Row(NamedTuple):
    """A mechanism, the toggle values that are compared, and the run folder that compares them.

    test: of the run's tests the one shown; GAP takes the host gap of a run of gaps. beside: the
    other toggles, in words.
    """

    mechanism: str
    off: str
    on: str
    folder: str
    test: str
    beside: str


ROWS = (
    Row("fewer synchronizations (#17795)", f"sync={BEFORE}", AFTER,
        "cuda-gaps-on-llama-3.2-1b-f16", GAP, "all else on"),
    Row("", f"sync={BEFORE}", AFTER,
        "cuda-sync-own-on-llama-3.2-1b-f16", "tg512", "all else on"),
    Row("graph reuse (#8366)", "graph_reuse=rebuild", "set_rows",
        "cuda-graph-reuse-llama-3.2-1b-f16", "tg32", "all else off"),
    Row("fusion", "fuse=off", "on",
        "cuda-fusion-fuse-with-all-llama-3-8b-q4_0", "tg32", "all else on"),
    Row("norms in halves", "defer_norm=off", "on",
        "cuda-fusion-defer-norm-with-all-llama-3-8b-q4_0", "tg32", "all else on"),
    Row("dependent launch", "pdl=off", "on",
        "cuda-fusion-pdl-with-all-llama-3-8b-q4_0", "tg32", "all else on"),
    Row("no wait between ubatches", "step_wait=every", "outputs",
        "cuda-pipeline-one-device-llama-3-8b-q4_0", "pp4096", "all else on"),
    Row("the same, layers over two GPUs", "step_wait=every", "outputs",
        "cuda-pipeline-step-wait-llama-3-8b-q4_0", "pp4096", "all else on"),
    Row("four input buffers, two GPUs", "n_copies=1", "4",
        "cuda-pipeline-n-copies-llama-3-8b-q4_0", "pp4096", "all else on"),
)  # fmt: skip


def table(folder: Path) -> str:
    """The rows as Markdown, and one caption for each device."""
    rows, runs = list[dict[str, str]](), dict[str, list[OfARun]]()
    for row in ROWS:
        path = folder / row.folder
        what = {"mechanism": row.mechanism, "off": row.off, "on": row.on}
        if not (path / results.RUN_JSON).is_file():
            rows.append(what | {"verdict": NOT_MEASURED})
            continue
        found: gaps.Gaps | AB = gaps.load(path) if row.test == GAP else AB.load(path)
        numbers = _of_gaps(found) if isinstance(found, gaps.Gaps) else _of(found, row)
        where = {"workload": f"{model_of(found.run)}, {row.test}", "with": row.beside}
        rows.append(what | where | numbers)
        runs.setdefault(str(found.run["engine"]["device_description"]), []).append(found)
    if not runs:
        return f"Mechanisms: {NOT_MEASURED}."
    captions = " ".join(caption(of_device) for of_device in runs.values())
    return f"{markdown(pd.DataFrame(rows).fillna(''))}\n\n{captions}"


def _of(found: AB, row: Row) -> dict[str, str]:
    """Tokens a second under both values."""
    summary = found.summary()
    (line,) = summary[(summary["test"] == row.test) & (summary["arm"] == row.on)].to_dict("records")
    return {
        "at off": f"{line['tps_baseline']:.1f} t/s",
        "at on": f"{line['tps_toggled']:.1f} t/s",
        "speedup": f"{line['speedup']:.2f} ({line['low']:.2f}..{line['high']:.2f})",
        "verdict": line["verdict"],
    }


def _of_gaps(found: gaps.Gaps) -> dict[str, str]:
    """The gap under both values; copies ride their own stream."""
    us = found.table().set_index("arm")["gap_us"]
    arms = {
        mode: arm["name"]
        for arm in found.run["arms"]
        for mode in (BEFORE, AFTER)
        if not arm["is_control"] and arm["sync_mode"] == mode and _own(arm)
    }
    ratio, band = found.ratio(BEFORE, AFTER, CopyStream.OWN.value)
    return {
        "at off": f"{us[arms[BEFORE]]:.0f} us",
        "at on": f"{us[arms[AFTER]]:.0f} us",
        "speedup": f"{ratio.value:.2f} ({ratio.low:.2f}..{ratio.high:.2f})",
        "verdict": {FASTER: "shorter", SLOWER: "longer"}.get(v := verdict(ratio, band), v),
    }


def _own(arm: dict[str, Any]) -> bool:
    return arm["toggles"]["copy_stream"] == CopyStream.OWN.value
