"""Writes spans as a Perfetto trace: protobuf TrackEvents, for ui.perfetto.dev and trace_processor.

One process per device and one for the host; one track per lane; a slice per span, nested as the
spans are; the span's args as debug annotations; an arrow (flow) from the host's span that issued a
copy or a launch to the device's span that ran it. Timestamps are the recorder's nanoseconds.
TrackEvents and not Chrome's JSON, because Perfetto drops JSON events that overlap.

Names, categories and annotation names are interned, as the format provides: a name is written
once and then referred to by number, which makes the file a third of the size.
"""

from __future__ import annotations

import gzip
import os
from collections import defaultdict, deque
from collections.abc import Iterable
from os import PathLike
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    DebugAnnotation,
    TracePacket,
    TrackEvent,
)
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

from workbench.output import writing
from workbench.trace.spans import HOST_LANE, Span

SEQUENCE = 1  # the one packet sequence of our traces: interned numbers belong to it
PROCESS_UUID = 1_000_000  # process n has this uuid + n; track n has the uuid n
THREAD_ID = 100  # track n is thread 100 + n: a thread whose id is its process's is the main one
HOST_PROCESS = "host"
ENCLOSING = {"step": 0, "split": 1}  # what encloses other spans, outermost first


def write(spans: Iterable[Span], path: str | PathLike[str]) -> int:
    """Writes `path` (gzipped where it ends in .gz) and returns the file's size in bytes.

    Raises UsageError where it cannot be written.
    """
    data = encode(spans)
    if os.fspath(path).endswith(".gz"):
        data = gzip.compress(data, mtime=0)  # no date inside: same spans, same file
    with writing(path) as file:
        file.write(data)
    return len(data)


def encode(spans: Iterable[Span]) -> bytes:
    """The spans as one serialised `perfetto.protos.Trace`."""
    spans = sorted(spans, key=nesting_order)
    writer = _Writer()
    lanes = sorted({s.lane for s in spans}, key=lambda lane: (lane != HOST_LANE, lane))
    writer.add_processes(lanes)
    starts, ends = _flows(spans)
    for lane in lanes:
        for row in _rows(spans, [n for n, s in enumerate(spans) if s.lane == lane]):
            track = writer.add_track(lane)
            for is_begin, n in row:
                if is_begin:
                    writer.add_begin(spans[n], track, starts.get(n), ends.get(n))
                else:
                    writer.add_end(spans[n].end_ns, track)
    return writer.builder.serialize()


def nesting_order(span: Span) -> tuple[int, int, bool, int]:
    """Sorts spans by start; at one start the enclosing before the enclosed, the empty first."""
    rank = ENCLOSING.get(span.category, len(ENCLOSING))
    return span.start_ns, rank, span.end_ns > span.start_ns, -span.end_ns


def process_and_track(lane: str) -> tuple[str, str]:
    """`host` -> (host, host); `embedded stream 0` -> (embedded, stream 0)."""
    if lane == HOST_LANE:
        return HOST_PROCESS, lane
    process, _, stream = lane.partition(" ")
    return process, stream or lane


class _Writer:
    """The packets of one trace, and the numbers of the names already in it."""

    def __init__(self) -> None:
        self.builder = TraceProtoBuilder()
        self._numbers: dict[str, dict[str, int]] = defaultdict(dict)
        self._pids: dict[str, int] = {}
        self._n_tracks = 0

    def _packet(self) -> TracePacket:
        packet = self.builder.add_packet()
        packet.trusted_packet_sequence_id = SEQUENCE
        return packet

    def add_processes(self, lanes: list[str]) -> None:
        """Opens the sequence, and describes a process per device that has a lane."""
        self._packet().sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        for process in dict.fromkeys(process_and_track(lane)[0] for lane in lanes):
            pid = self._pids[process] = len(self._pids) + 1
            track = self._packet().track_descriptor
            track.uuid = PROCESS_UUID + pid
            track.process.pid = pid
            track.process.process_name = process

    def add_track(self, lane: str) -> int:
        """Describes one more track of `lane`; returns its uuid."""
        self._n_tracks += 1
        process, name = process_and_track(lane)
        track = self._packet().track_descriptor
        track.uuid = self._n_tracks
        track.parent_uuid = PROCESS_UUID + self._pids[process]
        track.thread.pid = self._pids[process]
        track.thread.tid = THREAD_ID + self._n_tracks
        track.thread.thread_name = name
        return self._n_tracks

    def add_begin(self, span: Span, track: int, starts: int | None, ends: int | None) -> None:
        packet = self._packet()
        packet.sequence_flags = TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        packet.timestamp = span.start_ns
        event = packet.track_event
        event.type = TrackEvent.TYPE_SLICE_BEGIN
        event.track_uuid = track
        event.name_iid = self._intern(packet, "event_names", span.name)
        event.category_iids.append(self._intern(packet, "event_categories", span.category))
        for key, value in span.args.items():
            if value is not None:
                annotation = event.debug_annotations.add()
                annotation.name_iid = self._intern(packet, "debug_annotation_names", key)
                _annotate(annotation, value)
        if starts is not None:
            event.flow_ids.append(starts)
        if ends is not None:
            event.terminating_flow_ids.append(ends)

    def add_end(self, end_ns: int, track: int) -> None:
        packet = self._packet()
        packet.timestamp = end_ns
        packet.track_event.type = TrackEvent.TYPE_SLICE_END
        packet.track_event.track_uuid = track

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


def _rows(spans: list[Span], numbers: list[int]) -> list[list[tuple[bool, int]]]:
    """The tracks of one lane (sorted by start): of each, (True, n) where span n begins, (False, n)
    where it ends.

    Slices of a track are a stack: each lies inside the one open before it, or after it. One track
    is enough for a host and for a stream; where two spans do overlap, the later goes on another
    track, for on the same one its end would close the wrong slice.
    """
    rows: list[list[tuple[bool, int]]] = []
    stacks: list[list[int]] = []
    for n in numbers:
        for row, stack in zip(rows, stacks, strict=True):
            while stack and _is_over(spans[stack[-1]], spans[n]):
                row.append((False, stack.pop()))
            if not stack or spans[n].end_ns <= spans[stack[-1]].end_ns:
                break
        else:
            row, stack = [], []
            rows.append(row)
            stacks.append(stack)
        row.append((True, n))
        stack.append(n)
    for row, stack in zip(rows, stacks, strict=True):
        row += [(False, n) for n in reversed(stack)]
    return rows


def _is_over(earlier: Span, span: Span) -> bool:
    """Whether `earlier` has ended when `span` begins: neighbours that touch do not nest.

    An empty span at the very end of a step or split lies inside it.
    """
    if span.start_ns == span.end_ns == earlier.end_ns and earlier.category in ENCLOSING:
        return nesting_order(span)[1] <= ENCLOSING[earlier.category]
    return earlier.end_ns <= span.start_ns


def _flows(spans: list[Span]) -> tuple[dict[int, int], dict[int, int]]:
    """Flow number by host span that starts it, and by device span that ends it.

    A command is known by its step and its position in the program. Where several runs of one
    step number were recorded, the first device span belongs to the first host span, and so on.
    """
    issued: dict[tuple[Any, Any], deque[int]] = defaultdict(deque)
    for n, span in enumerate(spans):
        if span.lane == HOST_LANE and "index" in span.args:
            issued[span.args.get("step"), span.args["index"]].append(n)
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for n, span in enumerate(spans):
        if span.lane != HOST_LANE and "index" in span.args:
            waiting = issued.get((span.args.get("step"), span.args["index"]))
            if waiting:
                flow = len(starts) + 1
                starts[waiting.popleft()] = flow
                ends[n] = flow
    return starts, ends
