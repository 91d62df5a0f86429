"""The layout of a trace file: a process per device, a track per lane, slices that nest.

Both file formats (`perfetto.py`, `chrome.py`) have the same processes, tracks and slices.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from workbench.trace.spans import HOST_LANE, Span

HOST_PROCESS = "host"
THREAD_ID = 100  # track n is thread 100 + n, so that no thread id equals a process id (main thread)
ENCLOSING = {"step": 0, "split": 1}  # categories that enclose other spans, outermost first
ABOUT = "about this trace"  # the mark that carries model, toggles and commit
WHOLE = "as JSON"  # of that mark, in Perfetto's format: all of the data, with their types


def nesting_order(span: Span) -> tuple[int, int, bool, int, bool, str]:
    """A sort key: by start. Of spans with the same start, an enclosing span comes before the spans
    in it; after that empty spans come first, and the host's lane before the device's."""
    rank = ENCLOSING.get(span.category, len(ENCLOSING))
    device = span.lane != HOST_LANE
    return span.start_ns, rank, span.end_ns > span.start_ns, -span.end_ns, device, span.lane


def process_and_track(lane: str) -> tuple[str, str]:
    """`host` -> (host, host); `embedded stream 0` -> (embedded, stream 0)."""
    if lane == HOST_LANE:
        return HOST_PROCESS, lane
    process, _, stream = lane.partition(" ")
    return process, stream or lane


def lane_of(process: str, track: str) -> str:
    """The lane whose process and track these are: (embedded, stream 0) -> `embedded stream 0`."""
    return process if process == track else f"{process} {track}"


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """The lanes that have spans. The host's lane is first."""
    return sorted({s.lane for s in spans}, key=lambda lane: (lane != HOST_LANE, lane))


def processes_of(lanes: Iterable[str]) -> dict[str, int]:
    """A number, from 1 on, for each process that has a lane."""
    names = dict.fromkeys(process_and_track(lane)[0] for lane in lanes)
    return {name: n for n, name in enumerate(names, start=1)}


def rows_of(spans: list[Span], numbers: list[int]) -> list[list[tuple[bool, int]]]:
    """The tracks of one lane. A track is a list of (True, n), the begin of span n, and (False, n),
    its end.

    numbers: of the lane's spans, by start.

    The slices of a track form a stack: a slice lies inside the slice that is open at its begin, or
    after it. Usually one track is enough. Where two spans overlap, the later span goes on another
    track, because on the same track its end would close the wrong slice.
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
    """Whether `earlier` has ended when `span` begins. Neighbours that touch do not nest. An empty
    span at the end of a step or split lies inside it."""
    if span.start_ns == span.end_ns == earlier.end_ns and earlier.category in ENCLOSING:
        return nesting_order(span)[1] <= ENCLOSING[earlier.category]
    return earlier.end_ns <= span.start_ns


def flat(about: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flattens `{"toggles": {"sync": "packed"}}` to `{"toggles.sync": "packed"}`."""
    found: dict[str, Any] = {}
    for name, value in about.items():
        inner = isinstance(value, Mapping)
        found |= flat(value, f"{before}{name}.") if inner else {f"{before}{name}": value}
    return found
