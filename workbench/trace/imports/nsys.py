"""Reads what `nsys export --type sqlite` writes, by NVIDIA's documented export schema.

nsys makes a table only where it has rows, and its schema changes with the version. So tables are
looked up first, and columns are taken by name. Times are nanoseconds from the start of the session.
A `globalTid` and a `globalPid` hold the process in bits 24 to 47, and a `globalTid` the thread in
bits 0 to 23.
"""

from __future__ import annotations

import gzip
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from workbench.common.errors import UsageError
from workbench.trace.imports import foreign
from workbench.trace.imports.foreign import RANGE, Call, Range, Trace, Work
from workbench.trace.spans import Recorded

CUPTI = "CUPTI_ACTIVITY_KIND_"
KERNELS, COPIES, MEMSETS, GRAPHS = (
    CUPTI + name for name in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
)
CALLS, SYNCS, EVENTS = (CUPTI + name for name in ("RUNTIME", "SYNCHRONIZATION", "CUDA_EVENT"))
RANGES = "NVTX_EVENTS"
VERSIONS = ("META_DATA_EXPORT", "EXPORT_META_DATA")  # the second until 2022
VERSION, MAJOR = "EXPORT_SCHEMA_VERSION", "EXPORT_SCHEMA_VERSION_MAJOR"  # rows of these tables
NUMBERS = r"\d+(\.\d+)*"
SCHEMA = "3"  # major version of the exports that were really read; others are read as this one
# table -> the columns that it must have, and those that some versions lack
COLUMNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    KERNELS: (("start", "end", "deviceId", "streamId", "correlationId", "shortName",
               "demangledName"), ("globalPid",)),
    COPIES: (("start", "end", "deviceId", "streamId", "correlationId", "bytes", "copyKind"),
             ("globalPid",)),
    MEMSETS: (("start", "end", "deviceId", "streamId", "correlationId", "bytes"), ("globalPid",)),
    GRAPHS: (("start", "end", "deviceId", "streamId", "correlationId", "graphId"),
             ("globalPid",)),
    CALLS: (("start", "end", "nameId", "correlationId"), ("globalTid",)),
    SYNCS: (("streamId", "correlationId", "eventId"), ("deviceId", "globalPid")),
    EVENTS: (("streamId", "correlationId", "eventId"), ("deviceId", "globalPid")),
    RANGES: (("start", "end", "text"),
             ("textId", "eventType", "globalTid", "domainId", "category")),
    "StringIds": (("id", "value"), ()),
}  # fmt: skip
# NVTX_EVENTS.eventType: ranges of a thread and of a process; the names of a category, of a domain
PUSH_POP, START_END, CATEGORY, DOMAIN = 59, 60, 33, 75
OWN_DOMAIN = "workbench"
# category of this package's ranges that CUDA's calls do not show -> category of their spans
OWN = {"sync": "sync", "build": "build", "split": "split"}
NO_EVENT = 2**32 - 1
# ENUM_CUDA_MEMCPY_OPER, whose numbers are CUPTI's CUpti_ActivityMemcpyKind
COPY_KINDS = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA",
              8: "DtoD", 9: "HtoH", 10: "PtoP"}  # fmt: skip
API_VERSION = r"_v\d+$"  # `cudaLaunchKernel_v7000` -> `cudaLaunchKernel`
HEADER_BYTES = 100


def read(path: Path, step: str | None) -> tuple[Recorded, dict[str, Any]]:
    """The spans of an export, which may be gzipped."""
    try:
        with closing(_opened(path)) as database:
            return _read(path, database, step)
    except sqlite3.Error as error:
        raise _damaged(path, str(error)) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # a column of other values
        raise _damaged(path, f"a value is not nsys's: {type(error).__name__}: {error}") from None


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} is cut or damaged ({why}); export it again with nsys export --type sqlite"
    )


def is_export(path: Path) -> bool:
    """Whether an SQLite file has the tables of nsys."""
    try:
        with closing(_opened(path)) as database:
            return _is_export(_names(database))
    except (sqlite3.Error, UsageError):
        return False


def _names(database: sqlite3.Connection) -> set[str]:
    rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {name for (name,) in rows}


def _is_export(names: set[str]) -> bool:
    return "StringIds" in names and any(n.startswith((CUPTI, "NVTX", "TARGET")) for n in names)


def _opened(path: Path) -> sqlite3.Connection:
    """The database, to read only. Raises UsageError where the file is shorter than it says."""
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
        size = path.stat().st_size
    data = b""
    if not head.startswith(b"SQLite"):
        data = gzip.decompress(path.read_bytes())
        head, size = data[:HEADER_BYTES], len(data)
    page, pages = int.from_bytes(head[16:18], "big"), int.from_bytes(head[28:32], "big")
    wanted = (65536 if page == 1 else page) * pages
    if size < max(wanted, HEADER_BYTES):
        raise UsageError(f"{path} is cut: it has {size} of {wanted} bytes; copy it again, whole")
    if not data:
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    database = sqlite3.connect(":memory:")
    database.deserialize(data)
    return database


def _read(
    path: Path, database: sqlite3.Connection, step: str | None
) -> tuple[Recorded, dict[str, Any]]:
    names = _names(database)
    if not _is_export(names):
        raise UsageError(
            f"{path} is an SQLite file that nsys did not write (it has no StringIds and CUPTI "
            "tables); make it with nsys export --type sqlite"
        )
    tables = _Tables(path, database, names)
    strings = dict(tables.rows("StringIds"))
    trace = Trace()
    for start, end, device, stream, correlation, short, full, pid in tables.rows(KERNELS):
        trace.works.append(
            Work("launch", strings[full], start, end, _process(pid), device, stream,
                 correlation or 0, short=strings[short])
        )  # fmt: skip
    for start, end, device, stream, correlation, nbytes, kind, pid in tables.rows(COPIES):
        name = f"Memcpy {COPY_KINDS.get(kind, 'of another kind')}"
        trace.works.append(
            Work("copy", name, start, end, _process(pid), device, stream, correlation or 0, nbytes)
        )
    for start, end, device, stream, correlation, nbytes, pid in tables.rows(MEMSETS):
        work = "memset", "Memset", start, end, _process(pid), device, stream
        trace.works.append(Work(*work, correlation or 0, nbytes))
    for start, end, device, stream, correlation, graph, pid in tables.rows(GRAPHS):
        work = "replay", f"graph {graph}", start, end, _process(pid), device, stream
        trace.works.append(Work(*work, correlation or 0))
    for start, end, name, correlation, thread in tables.rows(CALLS):
        call = re.sub(API_VERSION, "", strings[name])
        trace.calls.append(Call(call, start, end, _thread(thread), correlation or 0))
    for stream, correlation, event, device, pid in (*tables.rows(SYNCS), *tables.rows(EVENTS)):
        key = _process(pid), correlation or 0
        trace.stream_of[key] = device or 0, stream
        if event != NO_EVENT:
            trace.event_of[key] = str(event)
    _take_ranges(trace, list(tables.rows(RANGES)), strings)
    if not trace.works:
        raise UsageError(
            f"{path} holds no work of a GPU ({tables.version}{tables.read_as}); profile with "
            "nsys profile --trace=cuda,nvtx"
        )
    _one_process(trace)
    said = [f"nsys export: {tables.version}{tables.read_as}"]
    return foreign.recorded(path, "nsys", said, trace, step), {"exported_by": tables.version}


def _take_ranges(trace: Trace, rows: list[tuple[Any, ...]], strings: dict[int, str]) -> None:
    """Takes NVTX ranges. A wait of this package's domain counts as a call: the host may poll in it,
    which CUDA's calls do not show."""
    domains = {row[6] for row in rows if row[4] == DOMAIN and row[2] == OWN_DOMAIN}
    own = {(row[6], row[7]): OWN.get(row[2]) for row in rows
           if row[4] == CATEGORY and row[6] in domains}  # fmt: skip
    for start, end, text, text_id, kind, thread, domain, category in rows:
        if end is None or kind not in (PUSH_POP, START_END, None):
            continue
        name = text or strings.get(text_id, "")
        category = own.get((domain, category)) or RANGE
        if category == "sync":
            trace.calls.append(Call(name, start, end, _thread(thread), 0, category))
        else:
            trace.ranges.append(Range(category, name, start, end, _thread(thread)))


class _Tables:
    """Rows of the tables that a file has. Columns that its version lacks are None.

    version: what the file says of nsys and its schema.
    read_as: how a schema of another major version is read; empty for the known schema.
    """

    def __init__(self, path: Path, database: sqlite3.Connection, names: set[str]) -> None:
        self._path, self._database, self._names = path, database, names
        self.version, major = self._version()
        self.read_as = "" if major == SCHEMA else f", read as schema {SCHEMA}"

    def rows(self, table: str) -> Iterator[tuple[Any, ...]]:
        """The rows of a table: its needed columns and then the others, as COLUMNS lists them. None
        where the file has no such table. Raises UsageError where a needed column is missing."""
        if table not in self._names:
            return
        needed, others = COLUMNS[table]
        there = {row[1] for row in self._database.execute(f'PRAGMA table_info("{table}")')}
        if missing := [column for column in needed if column not in there]:
            raise UsageError(
                f"{self._path}: table {table} has no column {', '.join(missing)} "
                f"({self.version}); this program reads exports of schema {SCHEMA}, as nsys "
                "2025.3 writes them"
            )
        columns = ", ".join(
            f'"{column}"' if column in there else "NULL" for column in (*needed, *others)
        )
        yield from self._database.execute(f'SELECT {columns} FROM "{table}"')

    def _version(self) -> tuple[str, str]:
        """nsys and its schema in words, and the schema's major version. Raises UsageError where the
        file has a version that is no number; one that does not say its version is read."""
        for table in VERSIONS:
            if table in self._names:
                said = dict(self._database.execute(f'SELECT name, value FROM "{table}"'))
                product = said.get("EXPORT_PRODUCT_VERSION", "of an unknown version")
                for name, value in said.items():
                    if name in (VERSION, MAJOR) and not re.fullmatch(NUMBERS, str(value)):
                        raise UsageError(
                            f"{self._path}: {name} in table {table} is {value!r}, which is no "
                            "version number; export it again with nsys export --type sqlite"
                        )
                schema = str(said.get(VERSION, "unknown"))
                major = str(said.get(MAJOR, schema.partition(".")[0]))
                return f"nsys {product}, schema {schema}", major
        return "nsys of an unknown version", "unknown"


def _process(global_id: int | None) -> int:
    return 0 if global_id is None else (global_id >> 24) & 0xFFFFFF


def _thread(global_id: int | None) -> tuple[int, int]:
    return _process(global_id), 0 if global_id is None else global_id & 0xFFFFFF


def _one_process(trace: Trace) -> None:
    """Old exports do not say a process for each row; then correlations are of one process."""
    if any(work.pid == 0 for work in trace.works):
        trace.works[:] = [work._replace(pid=0) for work in trace.works]
        trace.calls[:] = [call._replace(thread=(0, call.thread[1])) for call in trace.calls]
