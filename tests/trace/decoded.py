"""Reads traces back, as their formats define them: for tests of what was written."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, NamedTuple

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

KINDS = {"ac2g": "issue"}  # Kineto's name of an arrow -> ours


class Slice(NamedTuple):
    """Times are ns; of Chrome's, from the first span."""

    process: str
    thread: str
    track: Any
    name: str
    category: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


class Arrow(NamedTuple):
    kind: str  # of Perfetto's nothing: its flows have no names
    source: Slice
    sink: Slice


class Decoded(NamedTuple):
    slices: list[Slice]
    arrows: list[Arrow]
    instants: dict[str, dict[str, Any]]  # name -> args
    other: dict[str, Any]


def whole_ns(us: float) -> int:
    whole = round(us * 1000)
    assert abs(whole - us * 1000) < 1e-3
    return whole


def own(e: dict[str, Any]) -> tuple[str, str]:
    """Name and category of the span that an event is, before Kineto's; of no span: no category."""
    kept = e["args"].get("span", {})
    return kept.get("name", e["name"]), kept.get("category", "")


def own_args(e: dict[str, Any]) -> dict[str, Any]:
    kept = e["args"].get("span", {})
    gone = {"span", *kept.get("added", ())}
    return {k: v for k, v in e["args"].items() if k not in gone} | kept.get("replaced", {})


def chrome(data: bytes) -> Decoded:
    """Asserts what readers rely on: threads are named, their slices nest, arrows have two ends, in
    order, each inside a slice."""
    made = json.loads(data)
    names: dict[tuple[str, int, int], str] = {}
    on: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    ends: dict[int, dict[str, tuple[tuple[int, int], int, str]]] = defaultdict(dict)
    instants = {}
    for e in made["traceEvents"]:
        here = e["pid"], e["tid"]
        match e["ph"]:
            case "M":
                names[e["name"], *here] = e["args"]["name"]
            case "X":
                where = names["process_name", e["pid"], 0], names["thread_name", *here], here
                start = whole_ns(e["ts"])
                times = start, start + whole_ns(e["dur"])
                on[here].append(Slice(*where, *own(e), *times, own_args(e)))
            case "i":
                instants[e["name"]] = e["args"]
            case "s" | "f" as end:
                assert end not in ends[e["id"]], "an arrow has one start and one end"
                assert end == "s" or e["bp"] == "e"
                ends[e["id"]][end] = here, whole_ns(e["ts"]), e["name"]
            case other:
                raise AssertionError(other)
    for thread in on.values():
        stack: list[Slice] = []
        for one in thread:
            while stack and stack[-1].end_ns <= one.start_ns:
                stack.pop()
            assert not stack or one.end_ns <= stack[-1].end_ns, "slices of a thread nest"
            stack.append(one)
    arrows = []
    for pair in ends.values():
        (source, at, kind), (sink, to, _) = pair["s"], pair["f"]
        assert at <= to, "arrows run forwards"
        arrows.append(Arrow(KINDS.get(kind, kind), _open(on[source], at), _open(on[sink], to)))
    slices = [one for thread in on.values() for one in thread if one.category]
    return Decoded(slices, arrows, instants, made["otherData"])


def _open(slices: list[Slice], at: int) -> Slice:
    """The innermost span that is open at a time, as a reader finds it."""
    spans = (s for s in slices if s.category)
    inside = [s for s in spans if s.start_ns <= at < max(s.end_ns, s.start_ns + 1)]
    assert inside, "an arrow ends at a slice"
    return min(inside, key=lambda s: s.end_ns - s.start_ns)


def perfetto(data: bytes) -> Decoded:
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

    def ends_of(event: TrackEvent) -> list[tuple[int, bool]]:
        return [(n, False) for n in event.flow_ids] + [
            (n, True) for n in event.terminating_flow_ids
        ]

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
        for number, is_end in ends_of(event):
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
            for number, is_end in (*ends_of(begun), *ends_of(event)):
                flows[number][is_end] = made
    assert not any(open_.values()), "every slice that begins ends"
    assert all(of[False] <= of[True] for of in times.values()), "flows run forwards"
    return Decoded(slices, [Arrow("", of[False], of[True]) for of in flows.values()], instants, {})
