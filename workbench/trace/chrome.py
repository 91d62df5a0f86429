"""Spans as Chrome's trace events (JSON), with the categories and correlations of Kineto.

The format is "Trace Event Format" of the Catapult project. Kineto, the tracer of torch.profiler,
writes it with conventions that chrome://tracing, Perfetto and HTA (HolisticTraceAnalysis) rely on:

    span of                         cat               name in the file
    a step                          user_annotation   ProfilerStep#<number>
    building, a split               user_annotation   its own
    any command of the host         cpu_op            its own
      inside it, device commands    cuda_runtime      cudaLaunchKernel, cudaMemcpyAsync, ...
    a driver's call, from CUPTI     cuda_driver       its own
    a kernel                        kernel            its function, or its op
    a copy, a memset                gpu_memcpy ...    Memcpy, Memset

The `cuda_runtime` event is no span: it stands for the call that the command made, has the command's
times, and carries `correlation`, which the device's work has, too. Backends that have no CUDA get
these events as well, so that the same analyses run.

Spans become complete events (`X`), and the arrows of `flows.py` flow events (`s`, `f`). Those from
call to work have Kineto's name `ac2g`. Names are metadata events (`M`). One instant (`i`) carries
the data about the trace. Times are microseconds from the first span, with three decimals: whole
nanoseconds. Perfetto drops events of one thread that overlap without nesting. So a lane with
such spans becomes several threads, as in Perfetto's own format.

`decode` gives the spans back: each event has, under `span` in its args, what Kineto's conventions
replaced.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from workbench.trace import lanes as tracks
from workbench.trace.flows import ISSUE, Flow, device_spans, flows_of
from workbench.trace.spans import HOST_LANE, Span

SCHEMA = 1  # Kineto's `schemaVersion`
SPAN = "span"  # arg of an event: the span's own name, category and replaced args
STANDS_FOR = "stands for"  # arg of an event that is no span
# category of a span -> Kineto's; a command is `cpu_op`
CATEGORIES = {
    "step": "user_annotation", "build": "user_annotation", "split": "user_annotation",
    "range": "user_annotation", "call": "cuda_driver", "python": "python_function",
}  # fmt: skip
# kind of a device span -> Kineto's category, and the name where the span names no function
WORK = {
    "copy": ("gpu_memcpy", "Memcpy"), "memset": ("gpu_memset", "Memset"),
    "launch": ("kernel", ""), "replay": ("kernel", "plan"),
}  # fmt: skip
# kind of a command that calls the device -> the runtime's function that it stands for
CALLS = {
    "launch": "cudaLaunchKernel", "copy": "cudaMemcpyAsync", "replay": "cudaGraphLaunch",
    "record": "cudaEventRecord", "wait": "cudaStreamWaitEvent", "sync": "cudaEventSynchronize",
}  # fmt: skip
API = {"runtime": "cuda_runtime", "sync": "cuda_sync"}  # of a call, where CUPTI says it
ARROW = "ac2g"  # Kineto's name of an arrow from a call to its work
STREAM = "stream"
# Args that mean something to Kineto's readers. An event of the host with `stream` would count as
# work, and a second event with a correlation would count its work twice.
RESERVED = (STREAM, "device", "correlation", "External id")
FIRST_STREAM = 1  # HTA takes stream 0 for none
# HTA 0.5.0 takes the smallest integers that hold all correlations, and then puts numbers of events
# into them. A plan is one call for hundreds of events, so small correlations would have no room.
FIRST_CORRELATION = 1 << 20


def encode(spans: Iterable[Span], about: Mapping[str, Any] | None = None) -> bytes:
    """The JSON object, UTF-8. `otherData` has `about` and `origin_ns`, the clock's value at 0."""
    spans = sorted(spans, key=tracks.nesting_order)
    origin = spans[0].start_ns if spans else 0
    lanes = tracks.lanes_of(spans)
    pids = tracks.processes_of([HOST_LANE, *lanes])
    devices = [process for process in pids if process != tracks.HOST_PROCESS]
    events: list[dict[str, Any]] = [
        _named("process_name", pid, 0, process) for process, pid in pids.items()
    ]
    kineto = _Kineto(spans, devices)
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
            for n in begun:
                events += [_complete(spans[n], origin, here, *made) for made in kineto.events(n)]
    for number, flow in enumerate(flows_of(spans), start=1):
        events += _arrow(number, flow, spans, origin, thread_of)
    made = {
        "schemaVersion": SCHEMA,
        "deviceProperties": [{"id": n, "name": name} for n, name in enumerate(devices)],
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "baseTimeNanoseconds": origin,
        "otherData": {**(about or {}), "origin_ns": origin},
    }
    return json.dumps(made, separators=(",", ":"), default=str).encode()


def decode(events: Iterable[Mapping[str, Any]], origin_ns: int) -> list[Span]:
    """The spans of `encode`, in its order. Raises KeyError where an event is not as it writes."""
    processes: dict[int, str] = {}
    lanes: dict[tuple[int, int], str] = {}
    spans = []
    for event in events:
        here = event["pid"], event["tid"]
        if event["ph"] == "M" and event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "M":
            lanes[here] = tracks.lane_of(processes[event["pid"]], event["args"]["name"])
        elif event["ph"] == "X" and STANDS_FOR not in event["args"]:
            own = event["args"][SPAN]
            added = {SPAN, *own.get("added", ())}
            args = {name: value for name, value in event["args"].items() if name not in added}
            start = origin_ns + whole_ns(event["ts"])
            end = start + whole_ns(event["dur"])
            name = own.get("name", event["name"])
            args |= own.get("replaced", {})
            spans.append(Span(name, own["category"], lanes[here], start, end, args))
    return sorted(spans, key=tracks.nesting_order)


def whole_ns(us: float) -> int:
    """Microseconds with three decimals as nanoseconds, exact for large numbers, too."""
    whole = int(us)
    return whole * 1000 + round((us - whole) * 1000)


class _Kineto:
    """The events that stand for a span by Kineto's conventions."""

    def __init__(self, spans: list[Span], devices: list[str]) -> None:
        self._spans = spans
        self._device_of = {name: n for n, name in enumerate(devices)}
        # number of a span -> the correlation of a call and its work
        self._correlation: dict[int, int] = {}
        first = FIRST_CORRELATION
        for number, (host, work) in enumerate(sorted(device_spans(spans).items()), start=first):
            self._correlation |= dict.fromkeys([host, *work], number)

    def events(self, n: int) -> list[tuple[str, str, dict[str, Any]]]:
        """Category, name and args of each event of span n, the enclosing event first."""
        span, number = self._spans[n], self._correlation.get(n)
        known = {} if number is None else {"External id": number, "correlation": number}
        if span.lane != HOST_LANE and span.category == "device":
            return [self._work(span, known)]
        name = span.name
        if span.category == "step" and "step" in span.args:
            name = f"ProfilerStep#{span.args['step']}"
        category = CATEGORIES.get(span.category, "cpu_op")
        if span.category == "call":
            category = API.get(str(span.args.get("api")), category)
        outer = {"External id": number} if known else {}
        made = [(category, name, _args(span, name, outer))]
        if self._calls_device(span):
            made.append(("cuda_runtime", CALLS[span.category], {STANDS_FOR: span.name} | known))
        return made

    @staticmethod
    def _calls_device(span: Span) -> bool:
        """Whether the command called a device; the host computes a launch inside its own call."""
        on = str(span.args.get("on") or "")
        return span.category in CALLS and "index" in span.args and not on.startswith("host ")

    def _work(self, span: Span, known: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
        kind = str(span.args.get("kind"))
        category, name = WORK.get(kind, WORK["launch"])
        process, track = tracks.process_and_track(span.lane)
        digits = track.rpartition(" ")[2]
        where = {
            "device": self._device_of[process],
            STREAM: FIRST_STREAM + (int(digits) if digits.isdecimal() else 0),
        }
        name = name or str(span.args.get("kernel") or span.args.get("op") or span.name)
        return category, name, _args(span, name, where | known)


def _args(span: Span, name: str, kineto: dict[str, Any]) -> dict[str, Any]:
    """The span's args and Kineto's. `span` among them keeps what Kineto's name and args replaced.
    name: the event's."""
    own = {arg: value for arg, value in span.args.items() if value is not None}
    kept: dict[str, Any] = {"category": span.category}
    if name != span.name:
        kept["name"] = span.name
    if replaced := {arg: own.pop(arg) for arg in (*kineto, *RESERVED) if arg in own}:
        kept["replaced"] = replaced
    if added := [arg for arg in kineto if arg not in replaced]:
        kept["added"] = added
    return own | kineto | {SPAN: kept}


def _complete(
    span: Span, origin: int, here: tuple[int, int], category: str, name: str, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": category, "pid": here[0], "tid": here[1],
        "ts": (span.start_ns - origin) / 1e3, "dur": (span.end_ns - span.start_ns) / 1e3,
        "args": args,
    }  # fmt: skip


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _mark(about: Mapping[str, Any], pid: int, tid: int) -> dict[str, Any]:
    """An instant at the start, whose args are the data about the trace."""
    where = {"ph": "i", "s": "p", "ts": 0, "pid": pid, "tid": tid}
    args = {name: value for name, value in about.items() if value is not None}
    return where | {"name": tracks.ABOUT, "cat": "about", "args": args}


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
    name, category = (ARROW, ARROW) if flow.kind == ISSUE else (flow.kind, "flow")
    for phase, n, at_end in (("s", flow.source, flow.from_end), ("f", flow.sink, flow.to_end)):
        span, (pid, tid) = spans[n], thread_of[n]
        # At the time of its end a slice is no longer open.
        at = max(span.end_ns - 1, span.start_ns) if at_end else span.start_ns
        end = {
            "ph": phase, "id": number, "name": name, "cat": category, "pid": pid, "tid": tid,
            "ts": (at - origin) / 1e3,
        }  # fmt: skip
        made.append(end | ({"bp": "e"} if phase == "f" else {}))
    return made
