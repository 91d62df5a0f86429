"""One side of a comparison of runs that exist: a run folder, or rows of llama-bench.

Anything that can become a `Side` can be compared with anything else that can.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.matching import OURS, Repeated, repeated
from workbench.benchmarks.compare.stats import Band
from workbench.benchmarks.llama.llama_files import RATES_ONLY, LlamaRow, llama_rows
from workbench.benchmarks.llama.llama_format import FIELDS
from workbench.benchmarks.runs import results
from workbench.benchmarks.runs.nameless import card_number
from workbench.common.devices import DEVICES, is_gpu
from workbench.config import Toggles

KINDS = ("ab", "bench")
ARM = "engine"  # the arm of rows that differ in no setting
APART = timedelta(hours=12)  # runs of two dates that are nearer were made in one night


class Side(NamedTuple):
    """What was measured once, and where.

    name: of the run, or of the file.
    kind: of the run folder; `bench` for rows of llama-bench.
    repetitions: every test and arm.
    bands: the A/A band by test; empty without a control.
    circumstances: what must be alike for a verdict, of what is known.
    started: when it began, or each of its rows, as its file has it.
    commit, versions, settings: further facts; settings of rows are fields of llama-bench.
    is_run: whether this is a run folder.
    notes: what to know before believing it.
    """

    name: str
    kind: str
    repetitions: list[Repeated]
    bands: dict[str, Band]
    circumstances: dict[str, str]
    started: tuple[str, ...]
    commit: str
    versions: dict[str, Any]
    settings: dict[str, Any]
    is_run: bool
    notes: tuple[str, ...] = ()


def sides_of(path: str | Path) -> list[Side]:
    """The sides in a run folder (one), or in a file of llama-bench (one for each build_commit, as
    compare-llama-bench.py tells sides apart). Raises UsageError for anything else."""
    path = Path(path)
    if not path.is_file():
        return [_of_run(results.load_run(path))]
    builds: dict[str, list[LlamaRow]] = {}
    for row in llama_rows(path):
        builds.setdefault(row.build, []).append(row)
    return [
        _of_rows(path.name if len(builds) == 1 else f"{path.name} {build}", build, rows)
        for build, rows in builds.items()
    ]


# run folders --------------------------------------------------------------------------------------


def _of_run(found: results.Run) -> Side:
    run = found.run
    name = str(run["run_id"])
    interrupted = run["status"] == results.INTERRUPTED
    return Side(
        name, run["kind"],
        list(repeated(found)) if run["kind"] in KINDS else [],
        _bands(found), _circumstances(run), (str(run["started"]),), _commit(run["commit"]),
        run["versions"], run["engine"].get("config") or {}, True,
        (f"{name} was interrupted",) if interrupted else (),
    )  # fmt: skip


def _bands(run: results.Run) -> dict[str, Band]:
    """The A/A band by test; empty for a run without a control."""
    if run.run["kind"] != "ab":
        return {}
    found = AB(run.run, run.samples).summary()
    bands = {row.test: Band(row.band_low, row.band_high) for row in found.itertuples()}
    return {test: band for test, band in bands.items() if not math.isnan(band.low)}


def _circumstances(run: dict[str, Any]) -> dict[str, str]:
    """The circumstances of a run. The day is the UTC day of the start; `gpu` has the words of
    llama-bench's gpu_info."""
    engine, machine = run["engine"], run["machine"]
    device, _, software = str(engine.get("device_description")).partition(", driver ")
    gpus = machine.get("gpus") or [] if is_gpu(str(engine.get("device"))) else []
    drivers = {str(gpu.get("driver")) for gpu in gpus}
    return {
        "device": device,
        "gpu": ", ".join(str(gpu.get("name")) for gpu in gpus),
        "card": ", ".join(str(gpu.get("card") or card_number(gpu.get("uuid"))) for gpu in gpus),
        "processor": str((machine.get("cpu") or {}).get("name")),
        "driver": software or ", ".join(sorted(drivers)),
        "day": str(run["started"])[:10],
    }


def _commit(commit: dict[str, Any]) -> str:
    return str(commit.get("hash"))[:8] + (" with changes" if commit.get("dirty") else "")


# rows of llama-bench ------------------------------------------------------------------------------

# fields that are no setting of an engine
_NO_SETTING = {
    "build_commit", "build_number", "cpu_info", "gpu_info", "model_filename", "model_type",
    "model_size", "model_n_params", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns",
    "stddev_ns", "avg_ts", "stddev_ts",
}  # fmt: skip
SETTINGS = [name for name in FIELDS if name not in _NO_SETTING]


def _of_rows(name: str, build: str, rows: list[LlamaRow]) -> Side:
    varying = [s for s in SETTINGS if len({str(row.fields.get(s)) for row in rows}) > 1]
    same = {s: rows[0].fields.get(s) for s in SETTINGS if s not in varying}
    found = list(_repeated(rows, varying))
    notes = (f"{name} {RATES_ONLY}",) if any(row.stddev is not None for row in rows) else ()
    return Side(
        name, "bench", found, {},
        {
            "gpu": _all(rows, "gpu_info"), "processor": _all(rows, "cpu_info"),
            "day": ", ".join(sorted({str(row.fields.get("test_time"))[:10] for row in rows})),
        },
        tuple(str(row.fields.get("test_time")) for row in rows), build, {}, same, False, notes,
    )  # fmt: skip


def _all(rows: list[LlamaRow], name: str) -> str:
    return ", ".join(dict.fromkeys(str(row.fields.get(name) or "") for row in rows))


def _repeated(rows: list[LlamaRow], varying: list[str]) -> Iterator[Repeated]:
    """Rows as repetitions. An arm is named by the settings that vary in the file. Rows that are
    alike in all of this are repetitions of each other; so are their averages."""
    import numpy as np

    found: dict[tuple[Any, ...], Repeated] = {}
    for row in rows:
        arm = " ".join(f"{name}={row.fields.get(name)}" for name in varying) or ARM
        if row.toggles is not None:
            foreign = ""
        else:  # csv and sql have no toggles, but llama.cpp's devices have other names
            foreign = OURS if row.fields.get("devices") in DEVICES else row.engine
        toggles = Toggles().to_dict() | (row.toggles or {})
        one = Repeated(
            row.test, arm, (None, row.model, row.quant), toggles, row.tps,
            (row.n_params, row.quant), foreign, row.stddev,
        )  # fmt: skip
        key = (row.test, arm, row.model, row.n_params, tuple(toggles.items()))
        if key in found:
            one = one._replace(tps=np.concatenate([found[key].tps, one.tps]), stddev=None)
        found[key] = one
    yield from found.values()


# how two sides differ -----------------------------------------------------------------------------


def why_history(before: Side, after: Side) -> list[str]:
    """Why a side is history: its device, card, processor, driver or day differs. Empty where all
    that both sides tell are alike. A day may end between two runs: they must also be APART."""
    a, b = before.circumstances, after.circumstances
    told = [what for what in a if what in b and not (what == "gpu" and "device" in a.keys() & b)]
    unlike = [what for what in told if a[what] != b[what]]
    if "day" in unlike and _near(before.started, after.started):
        unlike.remove("day")
    return [f"another {what} ({a[what]}, and {b[what]})" for what in unlike]


def _near(before: tuple[str, ...], after: tuple[str, ...]) -> bool:
    """Whether all these times lie within APART of each other; False where one is unknown."""
    try:
        times = [datetime.fromisoformat(text) for text in (*before, *after)]
        return max(times) - min(times) < APART
    except (TypeError, ValueError):  # no time; with a zone, and without
        return False


def differences(before: Side, after: Side) -> Iterator[str]:
    """The further differences between two sides: commits, versions, settings."""
    a, b = before.commit, after.commit
    yield f"commit {a} -> {b}" if a != b else f"the same commit {a}"
    if before.is_run != after.is_run:
        return  # other words for settings
    for what, old, new in (
        ("versions", before.versions, after.versions),
        ("settings", before.settings, after.settings),
    ):
        names = [k for k in dict.fromkeys([*old, *new]) if old.get(k) != new.get(k)]
        if names:
            changed = (f"{k} {_said(old.get(k))} -> {_said(new.get(k))}" for k in names)
            yield f"other {what}: {', '.join(changed)}"


def _said(value: Any) -> str:
    return "none" if value is None else str(value)
