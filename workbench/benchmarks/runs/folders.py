"""Run folders on a disk: what is in them, removed, or copied to another place.

Removal has one step that counts: the folder takes a temporary name (`output_swap.TEMPORARY`). After
that no reader finds it. Where the process is killed before the rest is done, the next writing
beside it removes the remains.
"""

from __future__ import annotations

import json
import os
import secrets
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from workbench.benchmarks.runs.results import (
    COMPLETE,
    GROUPS,
    RUN_JSON,
    SAMPLES,
    finite,
    load_tables,
    percentiles,
    rates,
    together,
    together_status,
)
from workbench.common.errors import UsageError
from workbench.common.output import (
    WHY,
    check_folder,
    check_writable,
    named,
    writing,
    writing_folder,
)
from workbench.common.output_swap import TEMPORARY, remove, surely
from workbench.common.sizes import counted
from workbench.common.tables import Table
from workbench.config import said_toggles

FIRST_DATE = (1980, 1, 1, 0, 0, 0)  # of files in a zip: the same folder gives the same archive


class RunFolder(NamedTuple):
    """A run folder. n_bytes: of its files."""

    path: Path
    n_files: int
    n_bytes: int


def run_folder(path: Path) -> RunFolder:
    """What is at `path`: a run folder, or the folder of a sweep or an advice with its runs. A run
    whose files are damaged is a run folder, too.

    Raises UsageError for anything else: a file, a link, a folder without run.json and
    samples.parquet, and a folder in which there is a folder that is no run folder.
    """
    refused = f"{named(path)} is no run folder"
    if path.is_symlink():
        raise UsageError(f"{named(path)} is a link to {os.readlink(path)}; name that folder")
    if not path.is_dir():
        what = "it is a file" if path.exists() else "it does not exist"
        raise UsageError(f"{refused}: {what}; `workbench runs ls` lists run folders")
    of_runs = together(path)
    for name in () if of_runs else (RUN_JSON, SAMPLES):
        if not (path / name).is_file():
            raise UsageError(f"{refused}: {name} is missing; `workbench runs ls` lists run folders")
    inside = sorted(path.iterdir())
    files = [one for one in inside if not one.is_dir()]
    below = [one for one in inside if one.is_dir()]
    if of_runs and (groups := path / GROUPS) in below:
        below = [one for one in below if one != groups] + sorted(groups.iterdir())
    parts = [run_folder(one) for one in below]
    return RunFolder(
        path,
        len(files) + sum(part.n_files for part in parts),
        sum(one.lstat().st_size for one in files) + sum(part.n_bytes for part in parts),
    )


# kind of a result of several run folders -> what it lacks without one of them
WITHOUT = {
    "sweep": "its cells are missing there, until the sweep is run again with --resume",
    "advise": "the advice keeps its figures, and loses the samples behind them",
}


def parted(folders: Sequence[RunFolder]) -> list[str]:
    """A line for each of these folders that is a part of a sweep or an advice which stays: what the
    whole lacks once the part is removed."""
    lines, every = [], {folder.path.absolute() for folder in folders}
    for folder in folders:
        for whole in folder.path.absolute().parents[:2]:
            if (kind := together(whole)) and whole not in every:
                lines.append(f"{named(folder.path)} is part of {whole.name}: {WITHOUT[kind]}")
    return lines


def remove_runs(folders: Sequence[RunFolder]) -> None:
    """Removes run folders. Each is gone as a whole, or is as it was. Raises UsageError for the
    first that cannot be removed; those before it are gone."""
    for folder in folders:
        beside = folder.path.with_name(TEMPORARY + secrets.token_hex(8))
        try:
            surely(os.rename, os.fspath(folder.path), os.fspath(beside))
        except OSError as error:
            why = WHY.get(error.errno or 0, str(error.strerror))
            raise UsageError(f"{named(folder.path)} cannot be removed: {why}") from error
        try:
            surely(remove, os.fspath(beside))
        except OSError as error:  # the name is gone, and the next writing here tries again
            raise UsageError(
                f"{named(folder.path)} is no run any more, and {beside.name} beside it cannot be "
                f"removed: {error.strerror}; remove it by hand"
            ) from error


def runs_together(found: pd.DataFrame, root: str | Path) -> pd.DataFrame:
    """The rows of `results.runs(root)`, with one row in place of the runs of a sweep or an advice,
    unless `root` is its folder. Its kind says how many runs there are; its status is the first that
    is not `complete`, of its own file and of its runs."""

    def said(values: pd.Series, what: str) -> str:
        known = list(dict.fromkeys(values))
        return str(known[0]) if len(known) == 1 else counted(len(known), what)

    rows: list[dict[str, Any]] = []
    for folder, runs in found.groupby("part_of", sort=False):
        if folder in ("", str(root)):
            rows += runs.to_dict("records")
            continue
        of = together(Path(str(folder)))
        every = [together_status(Path(str(folder))), *runs["status"]]
        others = [status for status in every if status != COMPLETE]
        rows.append(runs.iloc[0].to_dict() | {
            "folder": folder, "kind": f"{of} ({counted(len(runs), 'run')})", "part_of": "",
            "status": others[0] if others else COMPLETE, "model": said(runs["model"], "model"),
            "tests": said(runs["tests"], "test"), "duration_s": runs["duration_s"].sum(),
        })  # fmt: skip
    made = pd.DataFrame(rows, columns=found.columns)
    return made.sort_values(["started", "folder"], ignore_index=True, na_position="first")


# copies for elsewhere -----------------------------------------------------------------------------


def tidy(folder: str | Path, table: str = "samples") -> pd.DataFrame:
    """A table of a run folder, each row with what tells it from rows of other runs.

    table: `samples` (the columns of samples.parquet), or `tokens` or `requests`, where the run has
        such a table.

    First columns: run_id, kind, started, commit, model, device. Rows of `samples` also have the
    toggles of their arm that are not off, in words. Raises UsageError for a folder that is no run
    folder, for a newer schema, and for a table that the run does not have.
    """
    names = [] if table == "samples" else [f"{table}.parquet"]
    run, tables = load_tables(folder, *names)
    of, rows = run.run, tables[0] if tables else run.samples
    facts = {
        "run_id": of["run_id"],
        "kind": of["kind"],
        "started": of["started"],
        "commit": str(of["commit"].get("hash"))[:8],
        "model": f"{of['model'].get('name')} {of['model'].get('quant')}",
        "device": of["engine"].get("device_description") or of["engine"].get("device"),
    }
    own = {name: rows[name] for name in rows.columns if name not in facts}
    made = pd.DataFrame({name: [value] * len(rows) for name, value in facts.items()} | own)
    if not tables:
        words = {arm["name"]: said_toggles(arm["toggles"]) for arm in of["arms"]}
        made.insert(len(facts), "toggles", rows["arm"].map(words))
    return made


def _csv(folder: Path, out: Path, table: str) -> None:
    rows = tidy(folder, table)
    with writing(out, "t", parents=True) as file:
        rows.to_csv(file, index=False)


def _json(folder: Path, out: Path, table: str) -> None:
    objects = [finite(row) for row in tidy(folder, table).to_dict("records")]
    with writing(out, "t", parents=True) as file:
        json.dump(objects, file, ensure_ascii=False)
        file.write("\n")


def _jsonl(folder: Path, out: Path, table: str) -> None:
    objects = [finite(row) for row in tidy(folder, table).to_dict("records")]
    with writing(out, "t", parents=True) as file:
        file.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in objects)


def _parquet(folder: Path, out: Path, table: str) -> None:
    rows = pa.Table.from_pandas(tidy(folder, table), preserve_index=False)
    with writing(out, parents=True) as file:
        pq.write_table(rows, file, compression="zstd")


def _contents(folder: Path) -> dict[str, bytes]:
    """The files of a run folder, by their names below it. Raises UsageError for a run that cannot
    be loaded."""
    load_tables(folder)
    run_folder(folder)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(p.startswith(TEMPORARY) for p in path.parts)
    }


def _zip(folder: Path, out: Path, _: str) -> None:
    contents, top = _contents(folder), Path(out).name.removesuffix(".zip") or "run"
    with writing(out, parents=True) as file, zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            entry = zipfile.ZipInfo(f"{top}/{name}", FIRST_DATE)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)


def _folder(folder: Path, out: Path, _: str) -> None:
    contents = _contents(folder)
    if any("/" in name for name in contents):
        raise UsageError(f"{named(folder)} holds further runs; export it as .zip")
    with writing_folder(out, new=True) as made:
        for name, content in contents.items():
            with made.writing(name) as file:
                file.write(content)


# the extension of an exported file, and what writes it
EXPORTS: dict[str, Callable[[Path, Path, str], None]] = {
    ".csv": _csv, ".parquet": _parquet, ".json": _json, ".jsonl": _jsonl, ".zip": _zip,
}  # fmt: skip
WHOLE = (".zip", "")  # take the folder, not a table


def export(folder: str | Path, out: str | Path, table: str = "samples") -> Path:
    """Writes a copy of a run for another place; returns its path.

    out: by its extension. .csv, .parquet, .json and .jsonl hold a table (`tidy`). .zip holds the
        whole folder; unpacked it is a run folder again. A name without an extension is a new
        folder.

    Raises UsageError, and writes nothing, for another extension, for a folder that cannot be
    loaded here (`results.load_run`), and for the folder of a sweep or an advice.
    """
    folder, out = Path(folder), Path(out)
    if of := together(folder):
        runs = folder / GROUPS if (folder / GROUPS).is_dir() else folder
        raise UsageError(
            f"{named(folder)} is a result of {of}, and export takes one run; give {runs}/NAME "
            f"(`workbench runs ls {folder}` has the names), or write the table of all runs in "
            f"Python: wb.load({str(folder)!r}).to_csv('x.csv')"
        )
    extension = out.suffix.lower()
    if extension not in (*EXPORTS, ""):
        raise UsageError(
            f"{named(out)} has an unknown extension; the file can be {', '.join(EXPORTS)}, or a "
            "name without an extension for a folder"
        )
    if extension in WHOLE and table != "samples":
        raise UsageError(f"{named(out)} takes the whole run; leave the table out")
    if extension:
        check_writable(out, parents=True)
    else:
        check_folder(out, new=True)
    EXPORTS.get(extension, _folder)(folder, out, table)
    return out


# what a run says ----------------------------------------------------------------------------------


def facts(run: dict[str, Any]) -> dict[str, str]:
    """What a run was: name to text, for reading. What the run does not know has no line: a load
    knows neither settings nor toggles of its server."""
    engine, commit, model = run["engine"], run["commit"], run["model"]
    changes = " with changes" if commit.get("dirty") else ""
    gpus = [str(gpu.get("name")) for gpu in run["machine"].get("gpus") or []]
    config = engine.get("config") or {}
    known = {
        "run": f"{run['run_id']}: {run['kind']}, {run['status']}",
        "name": run["name"],
        "started": f"{run['started']}, took {run['duration_s']:.1f} s",
        "command": " ".join(map(str, run["command"])),
        "commit": f"{str(commit.get('hash'))[:8]}{changes}",
        "model": f"{model.get('name')} {model.get('quant')} ({model.get('file')})",
        "device": str(engine.get("device_description") or engine.get("device")),
        "machine": ", ".join([str((run["machine"].get("cpu") or {}).get("name")), *gpus]),
        "settings": ", ".join(f"{name}={value}" for name, value in config.items()),
        "tests": f"{', '.join(run['tests'])}; {run['repetitions']} repetitions asked for",
    } | {
        f"arm {arm['name']}": said_toggles(arm["toggles"]) for arm in run["arms"]
        if not arm["is_control"] and arm["toggles"]
    }  # fmt: skip
    return {name: text for name, text in known.items() if text}


def measured(samples: pd.DataFrame) -> Table:
    """A row per test and arm. Columns: test, arm, repetitions, median t/s, and of single tokens
    p50 us, p90 us and p99 us; first token us."""
    table = percentiles(samples).drop(columns=["n_tokens", "is_control"])
    by = rates(samples).groupby(["test", "arm"])["tps"]
    keys = [(row.test, row.arm) for row in table.itertuples()]
    table.insert(2, "repetitions", [int(by.size()[key]) for key in keys])
    table.insert(3, "median t/s", [float(by.median()[key]) for key in keys])
    named_with_units = {"p50_us": "token p50 us", "p90_us": "p90 us", "p99_us": "p99 us",
                        "ttft_us": "first token us"}  # fmt: skip
    digits = dict.fromkeys(named_with_units.values(), 1)
    return table.rename(columns=named_with_units).shown(keys=["test", "arm"], digits=digits)
