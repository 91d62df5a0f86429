"""The critical path through one step: what the step's end waited for, and before that, and so on.

The walk begins at the end of the step on the host and goes back in time.

    host    | build | launch a | launch b |      wait ..............| read |
    device                   |- a -|   |--- b ---|
    path    |--------------- host -----|~|------ kernel ----|~ wait ~| host |
                                        launch latency

On the host the path goes back through the host's commands, and Python between them, up to a wait
that the device ended. There it goes to the work that ended last before the wait's return. From work
of the device it goes to whichever of these was over last: the work before it on its stream, the
work that its stream waited for through an event, the call that launched it. The parts of a plan
have no events in a trace: there the part that ended last before it counts.

Where kernels of one stream overlap, the later kernel was launched programmatically: it began early
and waited for the end of the kernel before it. Its part of the path begins at that end.

    device  |----- a -----|
                   |~~~~~ b -------|
    path    |----- a -----|-- b ---|

A host that comes late does not wait: the device was through before the host's wait began. Then the
path stays on the host, and no kernel is on it. `device_us` and `late_us` tell of that device.

This is the method of critical path analysis on traces (HTA has it for PyTorch), with the waits of
the program instead of guesses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from workbench.common.errors import UsageError
from workbench.trace.analysis import BUILD, ISSUING, PYTHON, RESULTS
from workbench.trace.flows import EVENT, ISSUE, WAIT, links_of
from workbench.trace.lanes import nesting_order
from workbench.trace.spans import HOST_LANE, LOGITS_WAIT, Span

# What bounds a part of the path. `launch` is the time from a call, or from the work before, to the
# begin of the work; `wait` the time from the end of the work to the return of the host's wait.
BOUNDS = HOST, LAUNCH, COPY, KERNEL, WAITING = "host", "launch", "copy", "kernel", "wait"
COLUMNS = ["start_us", "dur_us", "lane", "what", "bound"]


class Part(NamedTuple):
    """An interval of the path. phase: of the bound `host`, as in `critical_path`; else empty."""

    start_ns: int
    end_ns: int
    lane: str
    what: str
    bound: str
    phase: str = ""


def critical_path(spans: Sequence[Span], step: int | None = None) -> pd.DataFrame:
    """The parts of the critical path of a step, by start; together they are the step's time.

    step: the step's number. None: the step whose time is the median of the steps of the most
        frequent size. A trace without steps is one step.

    Columns:

    * start_us: from the start of the first span of the trace, as in `Profile.to_frame`.
    * dur_us: the parts follow each other without gaps, so their sum is the step's time.
    * lane: the lane of the span on the path.
    * what: the name of its command. For the host between commands: `python`, or in a foreign
      trace the innermost range around it.
    * bound: one of BOUNDS.

    `attrs`:

    * `step`, `step_us`.
    * `bounds`: bound -> us.
    * `host`: of the bound `host`: phase -> us, the largest first. The phases are `build`, `issue`,
      `results` and `python`, as in the table of phases.
    * `device_us`: how long the device worked in the step, on the path and beside the path.
    * `late_us`: how long the device was through before the host's last wait for work of the step
      began; 0 where the host waited.
    * `line`: a sentence that says all of it.

    Raises UsageError for a step that the trace does not have, and for a trace without spans.
    """
    spans = sorted(spans, key=nesting_order)
    number, begin, end = _step(spans, step)
    walk = _Walk(spans, begin)
    parts = walk.back_from(end)
    origin = spans[0].start_ns
    frame = pd.DataFrame(
        {
            "start_us": [(p.start_ns - origin) / 1e3 for p in parts],
            "dur_us": [(p.end_ns - p.start_ns) / 1e3 for p in parts],
            "lane": [p.lane for p in parts],
            "what": [p.what for p in parts],
            "bound": [p.bound for p in parts],
        },
        columns=COLUMNS,
    )
    sums = frame.groupby("bound")["dur_us"].sum()
    bounds = {bound: float(sums.get(bound, 0.0)) for bound in BOUNDS}
    phases: dict[str, float] = defaultdict(float)
    for part in parts:
        if part.bound == HOST:
            phases[part.phase] += (part.end_ns - part.start_ns) / 1e3
    host = dict(sorted(phases.items(), key=lambda phase: -phase[1]))
    device_us, late_us = _worked_ns(spans, begin, end) / 1e3, (walk.late_ns or 0) / 1e3
    us = (end - begin) / 1e3
    shares = (f"{bound} {t:,.1f} us ({t / us if us else 0:.0%})" for bound, t in bounds.items())
    which = "the trace" if number is None else f"step {number}"
    said = [f"{which}: {us:,.1f} us = {' + '.join(shares)}"]
    if host:
        said.append("of host: " + ", ".join(f"{phase} {t:,.1f} us" for phase, t in host.items()))
    on_path = bounds[COPY] + bounds[KERNEL]
    said.append(f"the device worked {device_us:,.1f} us, {on_path:,.1f} us of it on the path")
    if late_us:
        said.append(f"it was through {late_us:,.1f} us before the host came to wait for it")
    frame.attrs |= {
        "step": number, "step_us": us, "bounds": bounds, "host": host, "device_us": device_us,
        "late_us": late_us, "line": "; ".join(said),
    }  # fmt: skip
    return frame


def _worked_ns(spans: Sequence[Span], begin: int, end: int) -> int:
    """How long at least one span of the device ran between two times. spans: by start."""
    worked, reached = 0, begin
    for span in spans:
        if span.category == "device":
            until = min(span.end_ns, end)
            worked += max(0, until - max(span.start_ns, reached))
            reached = max(reached, until)
    return worked


def _step(spans: Sequence[Span], step: int | None) -> tuple[int | None, int, int]:
    """The number of a step, its begin and its end."""
    if not spans:
        raise UsageError("the trace has no spans, so it has no critical path; trace a step")
    found = [s for s in spans if s.category == "step"]
    if step is not None:
        chosen = [s for s in found if s.args.get("step") == step]
        if not chosen:
            numbers = ", ".join(str(s.args.get("step")) for s in found[:8]) or "none"
            raise UsageError(f"the trace has no step {step}; its steps are {numbers}")
        return step, chosen[-1].start_ns, chosen[-1].end_ns
    if not found:
        return None, spans[0].start_ns, max(s.end_ns for s in spans)
    sizes = [s.args.get("n_tokens", 0) for s in found]
    size = max(sorted(set(sizes)), key=sizes.count)
    alike = [s for s, n in zip(found, sizes, strict=True) if n == size]
    alike.sort(key=lambda s: s.end_ns - s.start_ns)
    typical = alike[len(alike) // 2]
    return typical.args.get("step"), typical.start_ns, typical.end_ns


class _Walk:
    """The way back from the end of a step to its begin."""

    def __init__(self, spans: Sequence[Span], begin_ns: int) -> None:
        self._spans, self._begin = spans, begin_ns
        # the host's commands and phases, in order; spans that enclose others have no index
        self._host = [
            n for n, s in enumerate(spans)
            if s.lane == HOST_LANE and (s.category == "build" or "index" in s.args)
        ]  # fmt: skip
        self._starts = np.array([spans[n].start_ns for n in self._host], dtype=np.int64)
        self._place = {n: i for i, n in enumerate(self._host)}
        device = [n for n, s in enumerate(spans) if s.category == "device"]
        self._ended = sorted(device, key=lambda n: (spans[n].end_ns, n))
        self._ends = np.array([spans[n].end_ns for n in self._ended], dtype=np.int64)
        self._call: dict[int, int] = {}  # work -> its call
        self._works: dict[int, list[int]] = defaultdict(list)  # call -> its work, by start
        self._awaited: dict[int, int] = {}  # wait of the host -> the work that ends it
        self._before: dict[int, list[int]] = defaultdict(list)  # work -> what must be over
        self._relate(device)
        self._parts: list[Part] = []
        self.late_ns: int | None = None  # of the host's last wait; None before the wait is met
        self._ranges = _innermost([
            s for s in spans if s.lane == HOST_LANE and s.category in ("op", "range")
        ])  # fmt: skip

    def _relate(self, device: Sequence[int]) -> None:
        spans = self._spans
        waits: dict[int, int | None] = {}  # wait of a stream -> the work before its record
        for link in links_of(spans):
            if link.kind == ISSUE:
                self._call[link.sink] = link.source
            elif link.kind == EVENT:
                waits[link.sink] = link.work
            elif link.kind == WAIT:
                self._awaited[link.sink] = link.source
        latest: dict[str, int] = {}
        for n in device:  # by start
            if (before := latest.get(spans[n].lane)) is not None:
                self._before[n].append(before)
            latest[spans[n].lane] = n
            if n in self._call:
                self._works[self._call[n]].append(n)
        pending: dict[str, list[int]] = defaultdict(list)
        for n in self._host:
            on = str(spans[n].args.get("on"))
            if (work := waits.get(n)) is not None:
                pending[on].append(work)
            for m in self._works.get(n, ()):
                self._before[m] += pending.pop(spans[m].lane, [])
                self._before[m] += pending.pop(on, [])
            if spans[n].category == "replay":
                self._within_plan(self._works.get(n, ()))

    def _within_plan(self, parts: Sequence[int]) -> None:
        """In a plan the part that ended last before another began counts as its cause."""
        ordered = sorted(parts, key=lambda n: self._spans[n].end_ns)
        ends = [self._spans[n].end_ns for n in ordered]
        for n in parts:
            at = int(np.searchsorted(ends, self._spans[n].start_ns, side="right")) - 1
            if at >= 0 and ordered[at] != n:
                self._before[n].append(ordered[at])

    def back_from(self, end_ns: int) -> list[Part]:
        """The parts from the begin of the step to `end_ns`."""
        at, place = end_ns, len(self._host)
        while at > self._begin:
            at, place = self._through_host(at, place)
        return self._parts[::-1]

    def _add(self, start: int, end: int, lane: str, what: str, bound: str, phase: str = "") -> int:
        """Adds a part, cut at the step's begin; returns the time at which the path goes on."""
        start = max(start, self._begin)
        if end > start:
            self._parts.append(Part(start, end, lane, what, bound, phase))
        return min(start, end)

    def _add_between(self, start: int, end: int) -> int:
        """Adds the host's time between two commands."""
        starts, names = self._ranges
        at = int(np.searchsorted(starts, (start + end) // 2, side="right")) - 1
        what = names[at] if at >= 0 and names[at] else PYTHON
        return self._add(start, end, HOST_LANE, what, HOST, PYTHON)

    def _through_host(self, at: int, limit: int) -> tuple[int, int]:
        """From a time on the host to the begin of the command there, or through the device to the
        call that its wait leads back to. limit: the path is before this command."""
        place = min(limit, int(np.searchsorted(self._starts, at, side="left"))) - 1
        if place < 0:
            return self._add_between(self._begin, at), place
        number = self._host[place]
        span = self._spans[number]
        at = self._add_between(min(span.end_ns, at), at)
        if at <= self._begin:
            return at, place
        work = self._ending(number, span, at)
        if work is None:
            begin, phase = span.start_ns, _phase(span)
            return self._add(begin, at, HOST_LANE, span.name, HOST, phase), place
        ended = max(min(self._spans[work].end_ns, at), span.start_ns)
        at = self._add(ended, at, HOST_LANE, span.name, WAITING)
        return self._through_device(at, work, place)

    def _ending(self, number: int, span: Span, at: int) -> int | None:
        """The work that ended a wait of the host; None for a command that did not wait for any."""
        if span.category not in ("sync", "copy"):
            return None
        work = self._awaited.get(number)
        if work is None and span.category == "sync":
            last = int(np.searchsorted(self._ends, at, side="right")) - 1
            work = self._ended[last] if last >= 0 else None
        if work is None and span.category == "copy":
            work = self._copied(number, span, at)
        if work is None:
            return None
        call = self._call.get(work)
        if call is not None and self._place.get(call, -1) > self._place[number]:
            return None
        late = span.start_ns - self._spans[work].end_ns
        if self.late_ns is None and self._spans[work].end_ns > self._begin:
            self.late_ns = max(0, late)
        return work if late < 0 else None

    def _copied(self, number: int, span: Span, at: int) -> int | None:
        """The copy that a call waited for; None for a call that only queued its copy.

        No trace says whether a call waited, and a small copy can be over before its call returns.
        A call waited where the copy, and the work that the copy was behind, took most of its time.
        """
        ends = [m for m in self._works.get(number, ()) if self._spans[m].end_ns <= at]
        if not ends:
            return None
        work = max(ends, key=lambda m: self._spans[m].end_ns)
        copy = self._spans[work]
        over = [self._spans[m].end_ns for m in self._before.get(work, ())]
        behind = max([span.start_ns, *(end for end in over if end <= copy.start_ns)])
        held = copy.end_ns - copy.start_ns + behind - span.start_ns
        return work if 2 * held >= span.end_ns - span.start_ns else None

    def _ended_before(self, number: int, span: Span, at: int) -> bool:
        """Whether work was over before `span` began; or, on the stream of `span`, before `at`, the
        time of the path within `span`: kernels of one stream overlap only by programmatic
        launches."""
        earlier = self._spans[number]
        if earlier.end_ns <= span.start_ns:
            return True
        return earlier.lane == span.lane and earlier.end_ns <= min(at, span.end_ns)

    def _through_device(self, at: int, work: int, place: int) -> tuple[int, int]:
        """From work of the device, over at `at`, back to the call that the path goes on with."""
        seen = {work}
        while at > self._begin:
            span = self._spans[work]
            bound = COPY if span.args.get("kind") == "copy" else KERNEL
            earlier = [
                m
                for m in self._before.get(work, ())
                if m not in seen and self._ended_before(m, span, at)
            ]
            cause = max(earlier, key=lambda m: self._spans[m].end_ns) if earlier else None
            over = self._spans[cause].end_ns if cause is not None else None
            # work that began early waited for the end of the work before it
            began = span.start_ns if over is None else max(span.start_ns, over)
            at = self._add(min(began, at), at, span.lane, span.name, bound)
            call = self._call.get(work)
            ready = None
            if call is not None and self._place.get(call, len(self._host)) <= place:
                launch = self._spans[call]
                # Work may begin before its call returns; then only the begin of the call is known.
                # A copy that the host waits for is its own call, and returns after its work.
                returned = self._place[call] < place and launch.end_ns <= span.start_ns
                ready = launch.end_ns if returned else launch.start_ns
            if over is None or (ready is not None and ready >= over):
                if ready is None:
                    return at, place
                at = self._add(min(ready, at), at, span.lane, span.name, LAUNCH)
                return at, self._place[self._call[work]] + 1
            at = self._add(min(over, at), at, span.lane, span.name, LAUNCH)
            assert cause is not None
            work = cause
            seen.add(work)
        return at, place


def _phase(span: Span) -> str:
    """The phase of a command of the host."""
    if span.category == "build":
        return BUILD
    return RESULTS if span.name == LOGITS_WAIT or span.category == "read" else ISSUING


def _innermost(ranges: Sequence[Span]) -> tuple[np.ndarray, list[str]]:
    """Which range is the innermost from each time on, to the next time; empty where there is none.
    ranges: by start, nested."""
    changes: list[tuple[int, str]] = []
    stack: list[Span] = []

    def close(until: float) -> None:
        while stack and stack[-1].end_ns <= until:
            ended = stack.pop()
            changes.append((ended.end_ns, stack[-1].name if stack else ""))

    for span in ranges:
        close(span.start_ns)
        stack.append(span)
        changes.append((span.start_ns, span.name))
    close(float("inf"))
    changes.sort(key=lambda change: change[0])
    return np.array([at for at, _ in changes], dtype=np.int64), [name for _, name in changes]
