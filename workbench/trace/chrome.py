"""Spans as Chrome's trace events (JSON), for chrome://tracing, Perfetto and other tools.

The format is "Trace Event Format" of the Catapult project. Spans become complete events (`X`), and
the arrows of `flows.py` become flow events (`s`, `f`). Names are metadata events (`M`). One instant
(`i`) carries the data about the trace. Times are microseconds from the first span, with three
decimals: whole nanoseconds. Perfetto drops events of one thread that overlap without nesting. So a
lane with such spans becomes several threads, as in Perfetto's own format.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from workbench.trace import lanes as tracks
from workbench.trace.flows import Flow, flows_of
from workbench.trace.spans import HOST_LANE, Span


def encode(spans: Iterable[Span], about: Mapping[str, Any] | None = None) -> bytes:
    """The JSON object, UTF-8. `otherData` has `about` and `origin_ns`, the clock's value at 0."""
    spans = sorted(spans, key=tracks.nesting_order)
    origin = spans[0].start_ns if spans else 0
    lanes = tracks.lanes_of(spans)
    pids = tracks.processes_of([HOST_LANE, *lanes])
    events: list[dict[str, Any]] = [
        _named("process_name", pid, 0, process) for process, pid in pids.items()
    ]
    thread_of: dict[int, tuple[int, int]] = {}  # span number -> process and thread
    n_threads = 0
    if about:
        n_threads = 1
        here = pids[tracks.process_and_track(HOST_LANE)[0]], tracks.THREAD_ID + n_threads
        events += [_named("thread_name", *here, tracks.ABOUT), _mark(tracks.flat(about), *here)]
    for lane in lanes:
        process, name = tracks.process_and_track(lane)
        for row in tracks.rows_of(spans, [n for n, s in enumerate(spans) if s.lane == lane]):
            n_threads += 1
            here = pids[process], tracks.THREAD_ID + n_threads
            events.append(_named("thread_name", *here, name))
            begun = [n for is_begin, n in row if is_begin]
            thread_of |= dict.fromkeys(begun, here)
            events += [_slice(spans[n], origin, *here) for n in begun]
    for number, flow in enumerate(flows_of(spans), start=1):
        events += _arrow(number, flow, spans, origin, thread_of)
    made = {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {**(about or {}), "origin_ns": origin},
    }
    return json.dumps(made, separators=(",", ":"), default=str).encode()


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _mark(about: Mapping[str, Any], pid: int, tid: int) -> dict[str, Any]:
    """An instant at the start, whose args are the data about the trace."""
    where = {"ph": "i", "s": "p", "ts": 0, "pid": pid, "tid": tid}
    return where | {"name": tracks.ABOUT, "cat": "about", "args": _args(about)}


def _slice(span: Span, origin: int, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X", "name": span.name, "cat": span.category, "pid": pid, "tid": tid,
        "ts": (span.start_ns - origin) / 1e3, "dur": (span.end_ns - span.start_ns) / 1e3,
        "args": _args(span.args),
    }  # fmt: skip


def _args(args: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in args.items() if value is not None}


def _arrow(
    number: int,
    flow: Flow,
    spans: list[Span],
    origin: int,
    thread_of: Mapping[int, tuple[int, int]],
) -> list[dict[str, Any]]:
    """The two events of an arrow. An end belongs to the slice that is open on its thread at its
    time."""
    made = []
    for phase, n, at_end in (("s", flow.source, flow.from_end), ("f", flow.sink, flow.to_end)):
        span, (pid, tid) = spans[n], thread_of[n]
        # At the time of its end a slice is no longer open.
        at = max(span.end_ns - 1, span.start_ns) if at_end else span.start_ns
        end = {
            "ph": phase, "id": number, "name": flow.kind, "cat": "flow", "pid": pid, "tid": tid,
            "ts": (at - origin) / 1e3,
        }  # fmt: skip
        made.append(end | ({"bp": "e"} if phase == "f" else {}))
    return made
