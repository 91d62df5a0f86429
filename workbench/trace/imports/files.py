"""Opens a trace file of any known format, and gives its content to the reader of that format.

The content decides, not the name: gzip, SQLite (`nsys export`), JSON (Chrome's format), and
else Perfetto's protobuf. A file is read whole or refused with one line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from os import PathLike
from pathlib import Path
from typing import Any

from workbench.common.errors import UsageError
from workbench.common.paths import path_of
from workbench.trace.imports import kineto, nsys, saved
from workbench.trace.spans import Recorded

SQLITE, GZIP = b"SQLite format 3\0", b"\x1f\x8b"
REPORTS = (".nsys-rep", ".qdrep", ".qdstrm")  # the ends of names of files that only nsys reads
KEYS = (b'"traceEvents"', b'"schemaVersion"', b'"ph"')  # of which a trace in JSON has one
HEAD_BYTES = 1 << 16  # a trace in JSON says within these that it is one


def read(path: str | PathLike[str], step: str | None = None) -> tuple[Recorded, dict[str, Any]]:
    """The spans of a trace file, and the data about it.

    step: a regular expression of the names of ranges or calls, each of which is a step. None:
        ranges that a known tool makes for each step. Files of this package have their own steps.

    Raises UsageError for a file that cannot be read, is cut, has another format or version, or
    has no range that matches `step`.
    """
    path = path_of(path, "the path of a trace file")
    try:
        with path.open("rb") as file:
            head = file.read(len(SQLITE))
            if head == SQLITE:
                return nsys.read(path, step)
            data = head + file.read()
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"{path} cannot be read: {why}; give the path of a trace file") from None
    if path.name.endswith(REPORTS):
        raise UsageError(
            f"{path} is a report that only nsys can read; run "
            f"`nsys export --type sqlite -o t.sqlite {path.name}` and load t.sqlite"
        )
    if not data:
        raise UsageError(f"{path} is empty; write the trace again")
    if data.startswith(GZIP):
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise UsageError(f"{path} is cut or damaged ({error}); copy it again, whole") from None
    if data.startswith(SQLITE):
        return nsys.read(path, step)
    if data.lstrip()[:1] in (b"{", b"["):
        return _json(path, data, step)
    return saved.perfetto(path, data)


def is_trace(path: str | PathLike[str]) -> bool:
    """Whether a file looks like a trace, by its first bytes: for commands that take other files,
    too. False for what cannot be read."""
    path = Path(path)
    name = path.name.removesuffix(".gz")
    if name.endswith((*REPORTS, *saved.PERFETTO)):
        return True
    try:
        with path.open("rb") as file:
            zipped = file.read(len(GZIP)) == GZIP
        with gzip.open(path) if zipped else path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except (OSError, EOFError, zlib.error):
        return False
    if head.startswith(SQLITE):
        return nsys.is_export(path)
    return head.lstrip()[:1] in (b"{", b"[") and any(key in head for key in KEYS)


def _json(path: Path, data: bytes, step: str | None) -> tuple[Recorded, dict[str, Any]]:
    try:
        made = json.loads(data)
    except (ValueError, RecursionError) as error:
        at = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(
            f"{path} is no whole JSON{at} of {len(data)} bytes; it was cut or damaged: "
            "copy it again, whole"
        ) from None
    events = made.get("traceEvents") if isinstance(made, dict) else made
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise UsageError(
            f"{path} is JSON without a list `traceEvents`; give a trace of wb.profile, of "
            "torch.profiler (export_chrome_trace) or of nsys export"
        )
    about = made if isinstance(made, dict) else {}
    if saved.is_own(about):
        return saved.chrome(path, about)
    return kineto.read(path, about, events, step)
