"""Reads Chrome's trace events back, as the format defines them: for tests of what was written."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, NamedTuple


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


def ns(us: float) -> int:
    whole = round(us * 1000)
    assert abs(whole - us * 1000) < 1e-3, "times are whole nanoseconds"
    return whole


def decode(data: bytes) -> Decoded:
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
                start = ns(e["ts"])
                times = start, start + ns(e["dur"])
                on[here].append(Slice(*where, e["name"], e["cat"], *times, e["args"]))
            case "i":
                instants[e["name"]] = e["args"]
            case "s" | "f" as end:
                assert end not in ends[e["id"]], "an arrow has one start and one end"
                assert end == "s" or e["bp"] == "e"
                ends[e["id"]][end] = here, ns(e["ts"]), e["name"]
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
        arrows.append(Arrow(kind, _open(on[source], at), _open(on[sink], to)))
    slices = [one for thread in on.values() for one in thread]
    return Decoded(slices, arrows, instants, made["otherData"])


def _open(slices: list[Slice], at: int) -> Slice:
    """The innermost slice that is open at a time, as a reader finds it."""
    inside = [s for s in slices if s.start_ns <= at < max(s.end_ns, s.start_ns + 1)]
    assert inside, "an arrow ends at a slice"
    return min(inside, key=lambda s: s.end_ns - s.start_ns)
