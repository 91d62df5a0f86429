"""Makes spans of a foreign trace: device work, calls of the host, and ranges.

Each format's reader fills a `Trace`. Here the parts are connected: a call with the work that it
started (by correlation), a call with the operator around it, everything with its step. The lanes
are `host` for the thread that calls the device most, `host thread <tid>` for others, and
`cuda stream <n>`, with the device's number where there are several.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from workbench.common.errors import UsageError
from workbench.trace.lanes import nesting_order
from workbench.trace.spans import HOST_LANE, Recorded, Span

OP, RANGE, PYTHON = "op", "range", "python"  # categories of foreign host spans
# a call's name -> category of its span; the first that matches
CALLS = (
    (re.compile(r"(cuda|cu|hip)GraphLaunch"), "replay"),
    (re.compile(r"(cuda|cu|hip)\w*Launch(Cooperative|HostFunc)?\w*Kernel|cuLaunch"), "launch"),
    (re.compile(r"(cuda|cu|hip)Memcpy"), "copy"),
    (re.compile(r"(cuda|cu|hip)Memset"), "launch"),
    (re.compile(r"(cuda|cu|hip)(Device|Stream|Event|Ctx)Synchronize"), "sync"),
    (re.compile(r"(cuda|cu|hip)EventRecord"), "record"),
    (re.compile(r"(cuda|cu|hip)StreamWaitEvent"), "wait"),
)
CALL = "call"
VLLM = r"execute_context_\d+\((\d+)\)_generation_\d+\((\d+)\)"  # tokens of prompts, and others
# ranges that tools make for each step: this package's (and whoever numbers tokens), vLLM's,
# torch.profiler's
STEPS = (r"(step|token)( \d+)?", VLLM, r"ProfilerStep#\d+")
NAMED = 5  # how many names a message gives

Thread = tuple[int, Any]  # process and thread
Key = tuple[int, int]  # process and correlation


class Work(NamedTuple):
    """Work of a device. kind: launch, copy, memset, or replay (a whole graph). pid: the process, or
    0 where the file is of one. name: of a kernel the function with its template's arguments."""

    kind: str
    name: str
    start_ns: int
    end_ns: int
    pid: int
    device: int
    stream: int
    correlation: int
    nbytes: int | None = None
    short: str = ""


class Call(NamedTuple):
    """A call of CUDA's runtime or driver. category: of its span, where the name does not tell."""

    name: str
    start_ns: int
    end_ns: int
    thread: Thread
    correlation: int
    category: str = ""


class Range(NamedTuple):
    """A range of the host: an operator, an annotation, a Python function."""

    category: str
    name: str
    start_ns: int
    end_ns: int
    thread: Thread


@dataclass
class Trace:
    """The parts of a foreign trace.

    event_of: which event the call with this key records or waits for.
    stream_of: on which device and stream the call works or waits.
    """

    works: list[Work] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    event_of: dict[Key, str] = field(default_factory=dict)
    stream_of: dict[Key, tuple[int, int]] = field(default_factory=dict)


class Step(NamedTuple):
    number: int
    name: str
    start_ns: int
    end_ns: int


def recorded(
    path: Path, tool: str, said: Iterable[str], trace: Trace, step: str | None
) -> Recorded:
    """The spans of `trace`, with a line about the file. said: what the line says of the format.

    Raises UsageError where nothing has a name that matches `step`.
    """
    steps = _steps(path, trace, step)
    spans = _spans(trace, steps)
    n_kernels = sum(work.kind == "launch" for work in trace.works)
    counts = f"{n_kernels} kernels, {len(trace.calls)} calls"
    of_steps = f"{len(steps)} steps" if steps else "no steps (name their ranges with step=)"
    source = "; ".join([f"read from {path.name}", *said, counts, of_steps])
    return Recorded(spans, tool, source=source)


def short_name(function: str) -> str:
    """A kernel's name without its return type, arguments and template arguments:
    `void at::native::gemv<float, 4>(int)` -> `at::native::gemv`."""
    name = function.replace("(anonymous namespace)::", "").replace("operator()", "call")
    kept, depth = [], 0
    for letter in name:
        depth += letter in "<("
        if not depth:
            kept.append(letter)
        depth -= letter in ">)" and depth > 0
    words = "".join(kept).split()
    return words[-1] if words else function


# steps --------------------------------------------------------------------------------------------


def _steps(path: Path, trace: Trace, step: str | None) -> list[Step]:
    """The steps, by start. They do not overlap: of nested ranges the outermost counts."""
    named: dict[str, list[Range | Call]] = defaultdict(list)
    parts: list[Range | Call] = [*trace.ranges, *trace.calls]
    for part in parts:
        named[part.name].append(part)
    for pattern in STEPS if step is None else (step,):
        try:
            matches = re.compile(pattern).fullmatch
        except re.error as error:
            raise UsageError(f"step={step!r} is no regular expression: {error}") from None
        found = [part for name in named if matches(name) for part in named[name]]
        if found:
            return _apart(found, trace)
    if step is None:
        return []
    frequent = Counter(part.name for part in parts).most_common(NAMED)
    names = ", ".join(f"{name} ({n})" for name, n in frequent) or "none at all"
    raise UsageError(
        f"{path.name} has no range or call whose whole name matches step={step!r}; the most "
        f"frequent are {names}"
    )


def _apart(found: list[Range | Call], trace: Trace) -> list[Step]:
    """Steps of ranges; with calls each step lasts to the begin of the next call."""
    ordered = sorted(found, key=lambda part: (part.start_ns, -part.end_ns))
    outer: list[Range | Call] = []
    for part in ordered:
        if not outer or part.start_ns >= outer[-1].end_ns:
            outer.append(part)
    last = max(
        *(work.end_ns for work in trace.works), *(call.end_ns for call in trace.calls),
        *(part.end_ns for part in trace.ranges), 0,
    )  # fmt: skip
    starts = [part.start_ns for part in outer]
    ends = [
        part.end_ns if isinstance(part, Range) else (starts[n + 1 : n + 2] or [last])[0]
        for n, part in enumerate(outer)
    ]
    numbers = [re.search(r"(?:step|token|ProfilerStep)\s*#?(\d+)$", part.name) for part in outer]
    told = [int(number[1]) if number else -1 for number in numbers]
    own = -1 not in told and len(set(told)) == len(told)
    return [
        Step(told[n] if own else n, part.name, part.start_ns, ends[n])
        for n, part in enumerate(outer)
    ]


def _step_at(steps: Sequence[Step], starts: Sequence[int], at_ns: int) -> int | None:
    n = bisect_right(starts, at_ns) - 1
    return steps[n].number if n >= 0 and at_ns < steps[n].end_ns else None


# spans --------------------------------------------------------------------------------------------


def _spans(trace: Trace, steps: list[Step]) -> list[Span]:
    calls, works = _calls(trace.calls), sorted(trace.works, key=lambda w: (w.start_ns, w.end_ns))
    lanes = _Lanes(trace, calls)
    starts = [step.start_ns for step in steps]
    index: dict[Key, int] = {}  # of a call with a correlation -> its number in host order
    step_of: dict[Key, int | None] = {}
    op_of: dict[Key, str] = {}
    started: dict[Key, list[Work]] = defaultdict(list)
    for work in works:
        if work.correlation:
            started[work.pid, work.correlation].append(work)
    operators = _innermost([r for r in trace.ranges if r.category == OP], calls)
    made: list[Span] = []
    for n, (call, category) in enumerate(calls):
        key = call.thread[0], call.correlation
        args: dict[str, Any] = {"step": _step_at(steps, starts, call.start_ns)}
        if category != CALL:
            args["index"] = n
            if call.correlation and key not in index:
                index[key], step_of[key] = n, args["step"]
                if operators[n]:
                    op_of[key] = operators[n]
            if mine := started.get(key):
                args |= {"on": lanes.of(mine[0]), "bytes": mine[0].nbytes}
            elif key in trace.stream_of:
                args["on"] = lanes.device(call.thread[0], *trace.stream_of[key])
            if key in trace.event_of:
                args["event"] = trace.event_of[key]
        if call.correlation:
            args["correlation"] = call.correlation
        lane = lanes.thread(call.thread)
        made.append(Span(call.name, category, lane, call.start_ns, call.end_ns, _told(args)))
    replays = {index[key] for key in index if calls[index[key]][1] == "replay"}
    number = Counter[int]()
    for work in works:
        key = work.pid, work.correlation
        at = index.get(key)
        name = work.short or (short_name(work.name) if work.kind == "launch" else work.name)
        args = {
            "kind": work.kind, "index": at, "bytes": work.nbytes, "stream": work.stream,
            "step": step_of[key] if key in step_of else _step_at(steps, starts, work.start_ns),
            "correlation": work.correlation or None,
        }  # fmt: skip
        if work.kind == "launch":
            args |= {"kernel": work.name, "op": op_of.get(key, name)}
        if at in replays and work.kind != "replay":
            args |= {"part": number[at], "op": name if work.kind == "launch" else None}
            number[at] += 1
        lane = lanes.of(work)
        made.append(Span(name, "device", lane, work.start_ns, work.end_ns, _told(args)))
    taken = {(s.name, s.start_ns) for s in steps}
    for part in trace.ranges:
        if (part.name, part.start_ns) not in taken:
            lane = lanes.thread(part.thread)
            made.append(Span(part.name, part.category, lane, part.start_ns, part.end_ns, {}))
    made += [
        Span(s.name, "step", HOST_LANE, s.start_ns, s.end_ns,
             {"step": s.number} | _tokens(s.name)) for s in steps
    ]  # fmt: skip
    return sorted(made, key=nesting_order)


def _tokens(name: str) -> dict[str, int]:
    """How many tokens a step has, where the name of its range says it."""
    found = re.fullmatch(VLLM, name)
    return {"n_tokens": int(found[1]) + int(found[2])} if found else {}


def _told(args: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in args.items() if value is not None}


def _calls(calls: Iterable[Call]) -> list[tuple[Call, str]]:
    """The calls by start, each with its category. A call inside another call of its thread is the
    other's own, as a driver's call in the runtime's."""
    found: list[tuple[Call, str]] = []
    until: dict[Thread, int] = {}
    for call in sorted(calls, key=lambda c: (c.start_ns, -c.end_ns)):
        inside = call.start_ns < until.get(call.thread, -1)
        until[call.thread] = max(call.end_ns, until.get(call.thread, -1))
        category = call.category or next((c for n, c in CALLS if n.match(call.name)), CALL)
        found.append((call, CALL if inside else category))
    return found


def _innermost(ranges: list[Range], calls: list[tuple[Call, str]]) -> list[str]:
    """For each call the name of the innermost range around it on its thread; else empty."""
    found = [""] * len(calls)
    by_thread: dict[Thread, list[tuple[int, int, int]]] = defaultdict(list)
    for n, part in enumerate(ranges):
        by_thread[part.thread].append((part.start_ns, -part.end_ns, n))
    for n, (call, _) in enumerate(calls):
        by_thread[call.thread].append((call.start_ns, -call.end_ns, len(ranges) + n))
    for events in by_thread.values():
        stack: list[Range] = []
        for start, end, n in sorted(events):
            while stack and stack[-1].end_ns < -end:
                stack.pop()
            if n < len(ranges):
                stack.append(ranges[n])
            elif stack and stack[-1].start_ns <= start:
                found[n - len(ranges)] = stack[-1].name
    return found


class _Lanes:
    """The names of lanes. The host's lane is the thread with the most calls that start work."""

    def __init__(self, trace: Trace, calls: list[tuple[Call, str]]) -> None:
        busiest = Counter(call.thread for call, category in calls if category != CALL)
        busiest = busiest or Counter(part.thread for part in trace.ranges)
        self._main = busiest.most_common(1)[0][0] if busiest else None
        pids = {call.thread[0] for call in trace.calls}
        self._several = len(pids | {part.thread[0] for part in trace.ranges}) > 1
        self._shared = len({work.pid for work in trace.works}) > 1

    def thread(self, thread: Thread) -> str:
        if thread == self._main:
            return HOST_LANE
        pid, tid = thread
        return f"{HOST_LANE} thread {f'{pid}.' * self._several}{tid}"

    def of(self, work: Work) -> str:
        return self.device(work.pid, work.device, work.stream)

    def device(self, pid: int, device: int, stream: int) -> str:
        """`cuda stream 7`; `cuda 1 stream 7` on device 1; with several processes that use devices,
        `cuda 0.4711 stream 7` on device 0 of process 4711."""
        own = f" {device}.{pid}" if self._shared else f" {device}" if device else ""
        return f"cuda{own} stream {stream}"
