"""Reads a Perfetto trace back, as the format defines it: for tests of what was written."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from tests.trace.chrome_decode import Arrow, Decoded, Slice


def decode(data: bytes) -> Decoded:
    """Resolves interned names as packets are read. Asserts that packets of a track are in order,
    that what begins ends, and that flows have two ends and run forwards."""
    processes: dict[int, str] = {}
    tracks: dict[int, tuple[str, str]] = {}  # (process, thread)
    names: dict[str, dict[int, str]] = defaultdict(dict)
    open_: dict[int, list[tuple[TrackEvent, int]]] = defaultdict(list)
    last: dict[int, int] = {}
    slices: list[Slice] = []
    instants: dict[str, dict[str, Any]] = {}
    times: dict[int, dict[bool, int]] = defaultdict(dict)  # of flows, by whether it ends there
    flows: dict[int, dict[bool, Slice]] = defaultdict(dict)

    def args_of(event: TrackEvent) -> dict[str, Any]:
        known = names["debug_annotation_names"]
        return {
            known[a.name_iid]: getattr(a, a.WhichOneof("value")) for a in event.debug_annotations
        }

    for packet in Trace.FromString(data).packet:
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
        if not packet.HasField("track_event"):
            continue
        event, at, track = packet.track_event, packet.timestamp, packet.track_event.track_uuid
        assert at >= last.get(track, 0), "a track's packets are in order of time"
        last[track] = at
        ends = [(n, False) for n in event.flow_ids] + [
            (n, True) for n in event.terminating_flow_ids
        ]
        for number, is_end in ends:
            assert is_end not in times[number], "a flow has one start and one end"
            times[number][is_end] = at
        if event.type == TrackEvent.TYPE_INSTANT:
            instants[names["event_names"][event.name_iid]] = args_of(event)
        elif event.type == TrackEvent.TYPE_SLICE_BEGIN:
            open_[track].append((event, at))
        else:
            assert event.type == TrackEvent.TYPE_SLICE_END
            begun, start = open_[track].pop()
            name = names["event_names"][begun.name_iid]
            category = names["event_categories"][begun.category_iids[0]]
            made = Slice(*tracks[track], track, name, category, start, at, args_of(begun))
            slices.append(made)
            for one in (begun, event):
                flows |= {n: flows[n] | {False: made} for n in one.flow_ids}
                flows |= {n: flows[n] | {True: made} for n in one.terminating_flow_ids}
    assert not any(open_.values()), "every slice that begins ends"
    assert all(of[False] <= of[True] for of in times.values()), "flows run forwards"
    return Decoded(slices, [Arrow("", of[False], of[True]) for of in flows.values()], instants, {})
