"""Reads Chrome's trace events back, as the format defines them: for tests of what was written."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, NamedTuple


class Event(NamedTuple):
    """A complete event; times are whole ns from the first span."""

    process: str
    thread: str
    name: str
    category: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


class Arrow(NamedTuple):
    kind: str
    source: Event
    sink: Event
    source_ns: int
    sink_ns: int


class Chrome(NamedTuple):
    slices: list[Event]
    arrows: list[Arrow]
    instants: dict[str, dict[str, Any]]
    other: dict[str, Any]


def ns(us: float) -> int:
    whole = round(us * 1000)
    assert abs(whole - us * 1000) < 1e-3, "times are whole nanoseconds"
    return whole


def decode(data: bytes) -> Chrome:
    """Asserts what readers rely on: threads are named, their slices nest, arrows have two ends, in
    order, each inside a slice."""
    made = json.loads(data)
    names: dict[tuple[str, int, int], str] = {}
    on: dict[tuple[int, int], list[Event]] = defaultdict(list)
    ends: dict[int, dict[str, tuple[int, int, int, str]]] = defaultdict(dict)
    slices, instants = [], {}
    for e in made["traceEvents"]:
        here = e["pid"], e["tid"]
        match e["ph"]:
            case "M":
                names[e["name"], *here] = e["args"]["name"]
            case "X":
                start = ns(e["ts"])
                event = Event(
                    names["process_name", e["pid"], 0], names["thread_name", *here], e["name"],
                    e["cat"], start, start + ns(e["dur"]), e["args"],
                )  # fmt: skip
                slices.append(event)
                on[here].append(event)
            case "i":
                instants[e["name"]] = e["args"]
            case "s" | "f" as end:
                assert end not in ends[e["id"]], "an arrow has one start and one end"
                assert end == "s" or e["bp"] == "e"
                ends[e["id"]][end] = *here, ns(e["ts"]), e["name"]
            case other:
                raise AssertionError(other)
    for thread in on.values():
        _check_nesting(thread)
    arrows = []
    for pair in ends.values():
        (sp, st, at, kind), (fp, ft, to, _) = pair["s"], pair["f"]
        assert at <= to, "arrows run forwards"
        arrows.append(Arrow(kind, _open(on[sp, st], at), _open(on[fp, ft], to), at, to))
    return Chrome(slices, arrows, instants, made["otherData"])


def _check_nesting(slices: list[Event]) -> None:
    stack: list[Event] = []
    for event in slices:
        while stack and stack[-1].end_ns <= event.start_ns and stack[-1] is not event:
            stack.pop()
        assert not stack or event.end_ns <= stack[-1].end_ns, "slices of a thread nest"
        stack.append(event)


def _open(slices: list[Event], at: int) -> Event:
    """The innermost slice that is open at a time, as a reader finds it."""
    inside = [s for s in slices if s.start_ns <= at < max(s.end_ns, s.start_ns + 1)]
    assert inside, "an arrow ends at a slice"
    return min(inside, key=lambda s: s.end_ns - s.start_ns)
