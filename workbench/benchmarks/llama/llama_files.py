"""Reads the files that llama-bench writes: json, jsonl, csv, sql, and SQLite databases made of sql.

The content of a file tells its form, not its name. `workbench bench -o` writes the same forms, with
further fields. A row must have NEEDED; what else FIELDS has may be missing, as in files of older
versions. json and jsonl hold every repetition. csv, sql and SQLite hold averages only.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workbench.benchmarks.llama.llama_format import FIELDS
from workbench.benchmarks.workload import Workload
from workbench.common.errors import UsageError
from workbench.common.output import named

NEEDED = ("build_commit", "model_type", "n_prompt", "n_gen", "avg_ts")
SQLITE = b"SQLite format 3\0"
MOST_BYTES = 1 << 30
FORMS = "llama-bench's json, jsonl, csv, sql or SQLite"
RATES_ONLY = (
    "has averages only (t/s ± their standard deviation), without the number of repetitions. So a "
    "test with one row in it has no interval and no verdict; llama-bench -o json and -o jsonl "
    "write each repetition"
)
# making a table updates the table of tables
_ROWS = (sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE,
         sqlite3.SQLITE_READ, sqlite3.SQLITE_SELECT, sqlite3.SQLITE_TRANSACTION)  # fmt: skip


class LlamaRow(NamedTuple):
    """A row.

    fields: as in the file, each in the type of FIELDS, whatever form the file has.
    test: its name, as `tg128@d4096`.
    tps: t/s of each repetition, float (n,); of a form without repetitions the average, (1,).
    stddev: of the average's repetitions, t/s, NaN where the file does not say; None beside
        repetitions.
    model: architecture and size, as `llama 8B`. quant: as `Q4_K`, without `- Medium`.
    n_params: parameters of the model; None where the file does not say.
    toggles: those of `workbench bench`; None in rows of llama.cpp, and in csv and sql.
    """

    fields: dict[str, Any]
    test: str
    tps: np.ndarray
    stddev: float | None
    model: str
    quant: str
    n_params: int | None
    toggles: dict[str, str] | None

    @property
    def build(self) -> str:
        return str(self.fields["build_commit"])

    @property
    def engine(self) -> str:
        """What is known of an engine of llama.cpp: `build 4a1b2c3, CUDA`."""
        return f"build {self.build}, {self.fields.get('backends') or 'backend unknown'}"


def llama_rows(path: Path) -> list[LlamaRow]:
    """The rows of a file. Raises UsageError, in one line, for a file that is cut, or that
    llama-bench did not write."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{named(path)} is no file of {FORMS}: it is larger than 1 GiB")
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{named(path)} cannot be read: {error.strerror}") from error
    try:
        found = list(_objects(path, content))
    except (ValueError, sqlite3.Error, csv.Error) as error:
        if isinstance(error, UsageError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{named(path)} is cut, or no file of {FORMS}: {reason}") from error
    if not found:
        raise UsageError(f"{named(path)} has no rows of llama-bench; compare takes {FORMS}")
    return [_row(path, number, one) for number, one in enumerate(found, 1)]


def _objects(path: Path, content: bytes) -> Iterator[Mapping[str, Any]]:
    if content.startswith(SQLITE):
        address = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as database:
            yield from _of_database(database)
        return
    text = content.decode("utf-8").strip()
    if text.startswith("["):
        yield from json.loads(text)
    elif text.startswith("{"):
        yield from map(json.loads, filter(str.strip, text.splitlines()))
    elif re.match(r"CREATE TABLE|INSERT INTO", text, re.IGNORECASE):
        with closing(sqlite3.connect(":memory:")) as database:
            database.set_authorizer(_only_rows)
            database.executescript(text)
            database.set_authorizer(None)
            yield from _of_database(database)
    elif "build_commit" in text.partition("\n")[0]:
        yield from _of_csv(text)


def _only_rows(action: int, *_: Any) -> int:
    """Lets a text of sql make tables and rows, and nothing else."""
    return sqlite3.SQLITE_OK if action in _ROWS else sqlite3.SQLITE_DENY


def _of_database(database: sqlite3.Connection) -> Iterator[dict[str, Any]]:
    """The rows of every table with the fields of llama-bench (`llama_bench`; earlier `test`)."""
    tables = [name for (name,) in database.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
    )]  # fmt: skip
    for table in tables:
        quoted = '"' + table.replace('"', '""') + '"'
        rows = database.execute(f"SELECT * FROM {quoted}")
        names = [column[0] for column in rows.description]
        if set(NEEDED) <= set(names):
            yield from (dict(zip(names, row, strict=True)) for row in rows)


def _of_csv(text: str) -> Iterator[dict[str, Any]]:
    lines = csv.reader(io.StringIO(text), strict=True)
    names = next(lines)
    for number, values in enumerate(lines, 2):
        if values == names:  # files that were put one after the other
            continue
        if len(values) != len(names):
            raise ValueError(f"line {number} has {len(values)} values for {len(names)} columns")
        yield dict(zip(names, values, strict=True))


def _row(path: Path, number: int, fields: Any) -> LlamaRow:
    def refused(why: str) -> UsageError:
        return UsageError(f"{named(path)} is no file of {FORMS}: row {number} {why}")

    if not isinstance(fields, Mapping):
        raise refused("is no object")
    missing = [name for name in NEEDED if fields.get(name) in (None, "")]
    if missing:
        raise refused(f"has no {missing[0]}")
    fields = {name: _typed(value, FIELDS.get(name, str)) for name, value in fields.items()}
    try:
        samples = fields.get("samples_ts")
        tps = np.array([float(one) for one in samples or [fields["avg_ts"]]])
        spread = float(fields.get("stddev_ts") or 0)
        stddev = None if samples else spread or math.nan
        n_prompt, n_gen, n_depth = (
            int(fields.get(name) or 0) for name in ("n_prompt", "n_gen", "n_depth")
        )
        n_params = int(fields.get("model_n_params") or 0) or None
    except (TypeError, ValueError, OverflowError) as error:
        raise refused(f"holds no numbers: {error}") from error
    if not all(math.isfinite(one) and one > 0 for one in tps):
        raise refused(f"has rates that are not above 0: {tps.tolist()}")
    if not 0 <= spread < math.inf:
        raise refused(f"has a standard deviation that is no number of 0 or more: {spread}")
    if min(n_prompt, n_gen, n_depth) < 0 or not n_prompt + n_gen:
        raise refused("measures no tokens")
    architecture, _, rest = str(fields["model_type"]).partition(" ")
    size, _, quant = rest.partition(" ")
    toggles = fields.get("toggles")
    test = Workload(n_prompt, n_gen, n_depth).name
    return LlamaRow(
        fields, test, tps, stddev, f"{architecture} {size}".strip(),
        quant.partition(" - ")[0], n_params,
        {str(k): str(v) for k, v in toggles.items()} if isinstance(toggles, Mapping) else None,
    )  # fmt: skip


def _typed(value: Any, kind: type) -> Any:
    """A value as json has it: csv has text, and SQLite has 0 for false. A value that is no number
    stays as it is."""
    if kind is str or value in (None, ""):
        return value
    text = str(value).lower()
    try:
        return kind(float({"true": "1", "false": "0"}.get(text, text)))
    except (ValueError, OverflowError):
        return value
