"""Writes spans as a Perfetto trace: protobuf TrackEvents, for ui.perfetto.dev and trace_processor.

A file has a process per device and one for the host, a track per lane, a slice per span and the
arrows of `flows.py`. The args of a span are debug annotations. The data about the trace (model,
toggles, commit) are annotations of an instant on a separate track; one of them is all the data as
JSON, for `Profile.load`. Timestamps are the recorder's
nanoseconds.

Names, categories and annotation names are interned: a name is written once, and later given by
number. That makes the file a third of the size.

A file whose name ends in `.json` or `.json.gz` gets Chrome's JSON instead (`chrome.py`), which more
tools read.
"""

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    DebugAnnotation,
    TracePacket,
    TrackEvent,
)
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

from workbench.common.output import writing
from workbench.trace import chrome
from workbench.trace import lanes as tracks
from workbench.trace.flows import flows_of
from workbench.trace.spans import HOST_LANE, Span

SEQUENCE = 1  # the only packet sequence of a trace; interned numbers belong to it
PROCESS_UUID = 1_000_000  # process n has this uuid + n; track n has the uuid n


def write(
    spans: Iterable[Span], path: str | PathLike[str], about: Mapping[str, Any] | None = None
) -> int:
    """Writes `path` and returns the file's size in bytes. The end of the name decides the format:
    `.json` is Chrome's JSON, any other is Perfetto's format. `.gz` after either means gzipped.

    about: data about the trace, by name. Values are numbers, texts or such mappings again.

    Raises UsageError where the file cannot be written.
    """
    path = os.fspath(path)
    as_json = path.removesuffix(".gz").endswith(".json")
    data = chrome.encode(spans, about) if as_json else encode(spans, about)
    if path.endswith(".gz"):
        data = gzip.compress(data, mtime=0)  # no date: the same spans give the same file
    with writing(path) as file:
        file.write(data)
    return len(data)


def encode(spans: Iterable[Span], about: Mapping[str, Any] | None = None) -> bytes:
    """The spans as one serialised `perfetto.protos.Trace`."""
    spans = sorted(spans, key=tracks.nesting_order)
    writer = _Writer(spans)
    lanes = tracks.lanes_of(spans)
    writer.add_processes(lanes)
    if about:
        writer.add_about(about, spans[0].start_ns if spans else 0)
    for lane in lanes:
        for row in tracks.rows_of(spans, [n for n, s in enumerate(spans) if s.lane == lane]):
            track = writer.add_track(lane)
            for is_begin, n in row:
                if is_begin:
                    writer.add_begin(n, track)
                else:
                    writer.add_end(n, track)
    return writer.builder.serialize()


class _Writer:
    """The packets of one trace, and the numbers of the names already in it."""

    def __init__(self, spans: list[Span]) -> None:
        self.builder = TraceProtoBuilder()
        self._spans = spans
        # (number of a span, whether at its end) -> the arrows that leave, and that arrive
        self._leaving: dict[tuple[int, bool], list[int]] = defaultdict(list)
        self._arriving: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for number, flow in enumerate(flows_of(spans), start=1):
            self._leaving[flow.source, flow.from_end].append(number)
            self._arriving[flow.sink, flow.to_end].append(number)
        self._numbers: dict[str, dict[str, int]] = defaultdict(dict)
        self._pids: dict[str, int] = {}
        self._n_tracks = 0

    def _packet(self) -> TracePacket:
        packet = self.builder.add_packet()
        packet.trusted_packet_sequence_id = SEQUENCE
        return packet

    def add_processes(self, lanes: list[str]) -> None:
        """Opens the sequence, and describes a process for each device that has a lane."""
        self._packet().sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        self._pids = tracks.processes_of([HOST_LANE, *lanes])
        for process, pid in self._pids.items():
            track = self._packet().track_descriptor
            track.uuid = PROCESS_UUID + pid
            track.process.pid = pid
            track.process.process_name = process

    def add_track(self, lane: str, name: str = "") -> int:
        """Describes a new track of `lane`, and returns its uuid."""
        self._n_tracks += 1
        process, own = tracks.process_and_track(lane)
        track = self._packet().track_descriptor
        track.uuid = self._n_tracks
        track.parent_uuid = PROCESS_UUID + self._pids[process]
        track.thread.pid = self._pids[process]
        track.thread.tid = tracks.THREAD_ID + self._n_tracks
        track.thread.thread_name = name or own
        return self._n_tracks

    def add_about(self, about: Mapping[str, Any], at_ns: int) -> None:
        """Adds an instant at the start, on a separate track of the host's process."""
        event, packet = self._event(self.add_track(tracks.HOST_PROCESS, tracks.ABOUT), at_ns)
        event.type = TrackEvent.TYPE_INSTANT
        event.name_iid = self._intern(packet, "event_names", tracks.ABOUT)
        event.category_iids.append(self._intern(packet, "event_categories", "about"))
        whole = {tracks.WHOLE: json.dumps(about, default=str)}
        self._annotate(packet, event, tracks.flat(about) | whole)

    def add_begin(self, n: int, track: int) -> None:
        span = self._spans[n]
        event, packet = self._event(track, span.start_ns)
        event.type = TrackEvent.TYPE_SLICE_BEGIN
        event.name_iid = self._intern(packet, "event_names", span.name)
        event.category_iids.append(self._intern(packet, "event_categories", span.category))
        self._annotate(packet, event, span.args)
        self._connect(event, n, at_end=False)

    def add_end(self, n: int, track: int) -> None:
        event, _ = self._event(track, self._spans[n].end_ns)
        event.type = TrackEvent.TYPE_SLICE_END
        self._connect(event, n, at_end=True)

    def _event(self, track: int, at_ns: int) -> tuple[TrackEvent, TracePacket]:
        packet = self._packet()
        packet.sequence_flags = TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        packet.timestamp = at_ns
        packet.track_event.track_uuid = track
        return packet.track_event, packet

    def _connect(self, event: TrackEvent, n: int, at_end: bool) -> None:
        event.flow_ids.extend(self._leaving.get((n, at_end), ()))
        event.terminating_flow_ids.extend(self._arriving.get((n, at_end), ()))

    def _annotate(self, packet: TracePacket, event: TrackEvent, args: Mapping[str, Any]) -> None:
        for key, value in args.items():
            if value is not None:
                annotation = event.debug_annotations.add()
                annotation.name_iid = self._intern(packet, "debug_annotation_names", key)
                _annotate(annotation, value)

    def _intern(self, packet: TracePacket, table: str, name: str) -> int:
        numbers = self._numbers[table]
        if name not in numbers:
            numbers[name] = len(numbers) + 1
            entry = getattr(packet.interned_data, table).add()
            entry.iid, entry.name = numbers[name], name
        return numbers[name]


def _annotate(annotation: DebugAnnotation, value: Any) -> None:
    match value:
        case bool():
            annotation.bool_value = value
        case int():
            annotation.int_value = value
        case float():
            annotation.double_value = value
        case _:
            annotation.string_value = str(value)
