"""`wb.load` and `wb.runs`: what a run folder or a trace file holds, and the runs of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from workbench.benchmarks.runs import results
from workbench.benchmarks.runs.results import DEFAULT_ROOT, RUN_JSON, TOGETHER, load_run, together
from workbench.common.errors import UsageError
from workbench.common.paths import path_of
from workbench.common.upper import OF_KIND, OF_TOGETHER, OF_TRACE, upper


def load(path: str | Path) -> Any:
    """Reads a result from where it was recorded.

    path: a run folder, its run.json, the folder of a sweep or of an advice, or the file of a trace
        (`.pftrace`, `.json`, `.sqlite` of nsys, each also `.gz`).

    Returns, by the kind of the run: `ab` an AB, `bench` a Bench, `gaps` a Gaps, `kernels` a
    KernelRun, `serve` a ServeBench, and any other kind a Run, which has run.json and the samples as
    a frame. Of a trace it returns a Profile, of a sweep a Sweep, of an advice an Advice. Raises
    UsageError, in one line, where nothing is there, where the folder is damaged or of a newer
    schema, and for a file of another kind.
    """
    path = path_of(path, "a run folder, or the file of a trace")
    folder = path.parent if path.name in (RUN_JSON, *TOGETHER) else path
    if kind := together(folder):
        return upper(OF_TOGETHER[kind])(folder)
    if folder.is_dir():
        found = load_run(folder)
        reader = OF_KIND.get(found.run["kind"])
        return found if reader is None else upper(reader)(folder)
    if not path.exists():
        raise UsageError(f"{path} does not exist; give a run folder, or the file of a trace")
    for ending, reader in OF_TRACE.items():
        if path.name.endswith(ending):
            return upper(reader)(path)
    if path.suffix == ".zip":
        raise results.no_folder(path)
    endings = ", ".join(OF_TRACE)
    raise UsageError(f"{path} is no run folder, and no trace, whose name ends in {endings}")


def runs(root: str | Path = DEFAULT_ROOT) -> pd.DataFrame:
    """The runs under `root`, oldest first: one row per folder with a run.json, readable or not.

    root: a folder that holds run folders, at any depth. The default need not exist yet.

    Columns: run_id, started, kind, name, status, model, device, tests, arms, repetitions, commit,
    duration_s, folder, part_of (the folder of the sweep or the advice to which the run belongs).
    A folder that cannot be read has the reason as its status, after `newer schema: ` or
    `unreadable: `. Raises UsageError where `root` is no folder.
    """
    folder = path_of(root, "a folder that holds run folders")
    if folder != DEFAULT_ROOT and not folder.is_dir():
        raise UsageError(f"{folder} is no folder; name a folder that holds run folders")
    return results.runs(folder)
