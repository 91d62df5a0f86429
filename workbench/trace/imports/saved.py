"""Reads back what `Profile.save` wrote: Perfetto's protobuf, and Chrome's JSON.

Both hold every span with its times in whole nanoseconds and all its args. `recording`, in the data
about the trace, holds what is not in spans: the collector, its windows, and the cost of tracing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from workbench.common.errors import UsageError
from workbench.trace import chrome as chrome_format
from workbench.trace.lanes import ABOUT, WHOLE, lane_of, nesting_order
from workbench.trace.spans import Recorded, Slowdown, Span, Window

RECORDING = "recording"  # key in the data about a trace
PERFETTO = (".pftrace", ".perfetto-trace")  # the ends of names of Perfetto's traces
_PACKET = 0x0A  # the byte before the length of each packet
_TABLES = ("event_names", "event_categories", "debug_annotation_names")


def recording(
    n_spans: int,
    note: str,
    collector: str,
    fallback: str,
    windows: list[Window],
    slowdown: Slowdown | None,
) -> dict[str, Any]:
    """What a file keeps of a recorder besides its spans. n_spans tells a whole file from a cut
    file."""  # fmt: skip
    return {
        "n_spans": n_spans, "note": note, "collector": collector, "fallback": fallback,
        "windows": [w._asdict() for w in windows],
        "slowdown": slowdown and slowdown._asdict(),
    }  # fmt: skip


def is_own(about: Mapping[str, Any]) -> bool:
    """Whether a JSON object is Chrome's JSON of this package."""
    other = about.get("otherData")
    return isinstance(other, dict) and "workbench" in other and "origin_ns" in other


def chrome(path: Path, made: Mapping[str, Any]) -> tuple[Recorded, dict[str, Any]]:
    """The spans of Chrome's JSON that this package wrote. Raises UsageError for another version."""
    version = made.get("schemaVersion", chrome_format.SCHEMA)
    if version != chrome_format.SCHEMA:
        raise UsageError(
            f"{path} has this package's schemaVersion {version!r}, and this program reads "
            f"{chrome_format.SCHEMA}; load it with the version of workbench that wrote it"
        )
    about = dict(made["otherData"])
    origin = about.pop("origin_ns")
    with _believing(path):
        spans = chrome_format.decode(made["traceEvents"], origin)
    return _recorded(path, spans, about), about


def perfetto(path: Path, data: bytes) -> tuple[Recorded, dict[str, Any]]:
    """The spans of a Perfetto trace that this package wrote."""
    foreign = UsageError(
        f"{path} is no trace that this program can read; it reads traces of wb.profile, "
        "torch.profiler's Chrome JSON, and the SQLite file of nsys export"
    )
    end = len(data)
    try:
        packets = Trace.FromString(data).packet
    except DecodeError:
        end = _end_of_packets(data)
        try:
            packets = Trace.FromString(data[:end]).packet
        except DecodeError:
            raise foreign from None
    reader = _Packets()
    with _believing(path):
        for packet in packets:
            reader.take(packet)
    own = reader.about is not None and "workbench" in reader.about
    if end < len(data) and (own or path.name.removesuffix(".gz").endswith(PERFETTO)):
        raise _cut(path, f"it has no whole packet after byte {end} of {len(data)}")
    if reader.about is None or not own:
        raise foreign
    if any(reader.open.values()):
        raise _cut(path, "a span has no end")
    # The file has a track after the other; in each the spans are in the order of their starts.
    spans = sorted((span for _, span in sorted(reader.spans, key=lambda s: s[0])),
                   key=nesting_order)  # fmt: skip
    return _recorded(path, spans, reader.about), reader.about


def _end_of_packets(data: bytes) -> int:
    """Where the last whole packet ends. Each is its tag, its length (7 bits a byte), its bytes."""
    end = 0
    while data[end : end + 1] == bytes([_PACKET]):
        at, size = end + 1, 0
        for n, byte in enumerate(data[at : at + 5]):
            size |= (byte & 0x7F) << 7 * n
            at += 1
            if byte < 0x80:
                break
        else:
            break  # the length itself is cut
        if at + size > len(data):
            break
        end = at + size
    return end


class _Packets:
    """Spans from the packets of a trace, in their order. open: track -> begins without an end."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, Span]] = []
        self.about: dict[str, Any] | None = None
        self.open: dict[int, list[tuple[int, TrackEvent, int]]] = defaultdict(list)
        self._names: dict[str, dict[int, str]] = {table: {} for table in _TABLES}
        self._processes: dict[int, str] = {}
        self._lanes: dict[int, str] = {}
        self._n = 0

    def take(self, packet: Any) -> None:
        for table in _TABLES:
            for entry in getattr(packet.interned_data, table):
                self._names[table][entry.iid] = entry.name
        if packet.HasField("track_descriptor"):
            self._track(packet.track_descriptor)
        if not packet.HasField("track_event"):
            return
        event = packet.track_event
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            self.open[event.track_uuid].append((self._n, event, packet.timestamp))
            self._n += 1
        elif event.type == TrackEvent.TYPE_SLICE_END:
            number, begun, start = self.open[event.track_uuid].pop()
            span = Span(
                self._names["event_names"][begun.name_iid],
                self._names["event_categories"][begun.category_iids[0]],
                self._lanes[event.track_uuid], start, packet.timestamp, self._args(begun),
            )  # fmt: skip
            self.spans.append((number, span))
        elif self._names["event_names"].get(event.name_iid) == ABOUT:
            args = self._args(event)
            whole = args.pop(WHOLE, None)
            self.about = args if whole is None else json.loads(whole)

    def _track(self, track: Any) -> None:
        if track.HasField("process"):
            self._processes[track.process.pid] = track.process.process_name
        elif track.HasField("thread"):
            process = self._processes[track.thread.pid]
            self._lanes[track.uuid] = lane_of(process, track.thread.thread_name)

    def _args(self, event: TrackEvent) -> dict[str, Any]:
        names = self._names["debug_annotation_names"]
        return {
            names[a.name_iid]: getattr(a, a.WhichOneof("value")) for a in event.debug_annotations
        }


def _recorded(path: Path, spans: list[Span], about: dict[str, Any]) -> Recorded:
    """What the data about a trace say of its recording; `about` loses them."""
    kept = about.pop(RECORDING, None)
    if kept is None:  # of a cell, or of a version that did not keep it
        note = str(about.get("traced", ""))
        return Recorded(spans, "unknown", source=note or f"read from {path.name}")
    with _believing(path):
        if kept["n_spans"] != len(spans):
            raise _cut(path, f"it has {len(spans)} of {kept['n_spans']} spans")
        windows = tuple(Window(**w | {"steps": tuple(w["steps"])}) for w in kept["windows"])
        slowdown = kept["slowdown"] and Slowdown(**kept["slowdown"])
        return Recorded(spans, kept["collector"], kept["fallback"], windows, slowdown, kept["note"])


def _cut(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is cut or damaged: {why}; copy it again, whole")


@contextmanager
def _believing(path: Path) -> Iterator[None]:
    """Within, a field that is missing or of another type becomes one line about the file."""
    try:
        yield
    except UsageError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise _cut(path, f"it is not as this program writes traces ({said})") from None
