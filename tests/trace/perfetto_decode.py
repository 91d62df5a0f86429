"""Reads a Perfetto trace back, as the format defines it: for tests of what was written."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent


class Slice(NamedTuple):
    track: int
    name: str
    category: str
    start_ns: int
    end_ns: int
    depth: int
    args: dict[str, Any]
    starts: list[int]
    ends: list[int]


class Decoded(NamedTuple):
    processes: dict[int, str]  # pid -> name
    tracks: dict[int, tuple[str, str]]  # uuid -> (process, thread); of slices
    slices: list[Slice]
    instants: dict[str, dict[str, Any]]  # name -> args
    flows: dict[int, list[tuple[int, bool]]]  # number -> (time, whether it ends there)


def decode(data: bytes) -> Decoded:
    """Reads a trace as the format defines it, resolving interned names as packets are read."""
    trace = Trace.FromString(data)
    processes: dict[int, str] = {}
    tracks: dict[int, tuple[str, str]] = {}
    names: dict[str, dict[int, str]] = defaultdict(dict)
    open_: dict[int, list[tuple[TrackEvent, int]]] = defaultdict(list)
    last: dict[int, int] = {}
    slices: list[Slice] = []
    instants: dict[str, dict[str, Any]] = {}
    flows: dict[int, list[tuple[int, bool]]] = defaultdict(list)

    def args_of(event: TrackEvent) -> dict[str, Any]:
        known = names["debug_annotation_names"]
        return {
            known[a.name_iid]: getattr(a, a.WhichOneof("value")) for a in event.debug_annotations
        }

    for packet in trace.packet:
        for table in ("event_names", "event_categories", "debug_annotation_names"):
            for entry in getattr(packet.interned_data, table):
                names[table][entry.iid] = entry.name
        if packet.HasField("track_descriptor"):
            d = packet.track_descriptor
            if d.HasField("process"):
                processes[d.process.pid] = d.process.process_name
            else:
                tracks[d.uuid] = (processes[d.thread.pid], d.thread.thread_name)
                assert d.thread.tid != d.thread.pid
        if packet.HasField("track_event"):
            event, at = packet.track_event, packet.timestamp
            assert at >= last.get(event.track_uuid, 0), "a track's packets are in order of time"
            last[event.track_uuid] = at
            for number in event.flow_ids:
                flows[number].append((at, False))
            for number in event.terminating_flow_ids:
                flows[number].append((at, True))
            if event.type == TrackEvent.TYPE_INSTANT:
                instants[names["event_names"][event.name_iid]] = args_of(event)
                del tracks[event.track_uuid]
                continue
            stack = open_[event.track_uuid]
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                stack.append((event, at))
                continue
            assert event.type == TrackEvent.TYPE_SLICE_END
            begun, start = stack.pop()
            slices.append(
                Slice(
                    event.track_uuid,
                    names["event_names"][begun.name_iid],
                    names["event_categories"][begun.category_iids[0]],
                    start,
                    at,
                    len(stack),
                    args_of(begun),
                    [*begun.flow_ids, *event.flow_ids],
                    [*begun.terminating_flow_ids, *event.terminating_flow_ids],
                )
            )
    assert not any(open_.values()), "every slice that begins ends"
    return Decoded(processes, tracks, slices, instants, dict(flows))
