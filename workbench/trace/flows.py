"""The arrows of a trace. An arrow leads from a span to a span that could not begin or end without
it.

    issue   from the host's call to the work that it started on the device
    event   from the record of an event to a stream's wait for the event
    wait    from work of the device to the wait of the host that it ends

A command is identified by its step and its position in the program. A wait waits for the latest
record of its event in host order, as in CUDA. Spans before the first recorded step have no arrows.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from workbench.trace.spans import HOST_LANE, Span

ISSUE, EVENT, WAIT = "issue", "event", "wait"


class Flow(NamedTuple):
    """An arrow between two spans, given by their numbers.

    from_end: the arrow leaves at the end of its source, else at the start.
    to_end: the arrow arrives at the end of its sink, else at the start. A wait of the host begins
        before the work that ends it, so its arrow arrives at the end.
    """

    kind: str
    source: int
    sink: int
    from_end: bool
    to_end: bool


class Link(NamedTuple):
    """Two spans of which the second depends on the first, given by their numbers, whatever their
    times are.

    kind: ISSUE, EVENT or WAIT. EVENT leads from a record; work is the last work before the record,
    or None.
    """

    kind: str
    source: int
    sink: int
    work: int | None = None


def links_of(spans: Sequence[Span]) -> Iterator[Link]:
    """All links between `spans`, which are sorted by start, in the order of the host's calls."""
    ran = device_spans(spans)
    last_on: dict[str, int] = {}  # lane -> the last device span queued there so far
    recorded: dict[str, tuple[int, int | None]] = {}  # event -> its record, the work before
    for n, span in enumerate(spans):
        if span.lane != HOST_LANE or "index" not in span.args:
            continue
        event, lane = span.args.get("event"), span.args.get("on")
        if mine := ran.get(n):
            yield from (Link(ISSUE, n, m) for m in mine)
            last_on |= {spans[m].lane: m for m in mine}
            if span.category == "replay":  # the stream continues after the whole plan
                last_on[str(lane)] = max(mine, key=lambda m: spans[m].end_ns)
        if span.category == "record":
            recorded[str(event)] = n, last_on.get(str(lane))
        elif span.category == "wait" and event in recorded:
            record, work = recorded[str(event)]
            yield Link(EVENT, record, n, work)
        elif span.category == "sync":
            of_event = recorded.get(str(event), (n, None))[1]
            source = last_on.get(str(lane)) if event is None else of_event
            if source is not None:
                yield Link(WAIT, source, n)


def flows_of(spans: Sequence[Span]) -> list[Flow]:
    """All arrows between `spans`, which are sorted by start. The arrow ISSUE leads to the first
    work of a call."""
    made: list[Flow] = []
    begun = set[int]()
    for link in links_of(spans):
        if link.kind == ISSUE and link.source in begun:
            continue
        begun.add(link.source)
        made += _arrow(link.kind, spans, link.source, link.sink, from_end=link.kind == WAIT)
    return made


def _arrow(kind: str, spans: Sequence[Span], source: int, sink: int, from_end: bool) -> list[Flow]:
    """The arrow from the source's end to the sink's end, or from start to start.

    Where the error of two clocks would make the arrow run backwards, it uses the other end of a
    span. Empty where that does not help: a reader sorts the ends of an arrow by time.
    """
    out, into, to_end = spans[source], spans[sink], from_end
    if from_end and out.end_ns >= into.end_ns:
        from_end = False
    if not to_end and into.start_ns < out.start_ns:
        to_end = True
    backwards = out.start_ns > (into.end_ns if to_end else into.start_ns)
    return [] if backwards and not from_end else [Flow(kind, source, sink, from_end, to_end)]


def device_spans(spans: Sequence[Span]) -> dict[int, list[int]]:
    """Number of a host span -> the device spans that it issued, by start.

    Where several runs of one step number were recorded, the device spans are shared out evenly: the
    first belong to the first host span, and so on.
    """
    issued: dict[tuple[Any, Any], list[int]] = defaultdict(list)
    worked: dict[tuple[Any, Any], list[int]] = defaultdict(list)
    for n, span in enumerate(spans):
        if "index" in span.args:
            key = span.args.get("step"), span.args["index"]
            (issued if span.lane == HOST_LANE else worked)[key].append(n)
    found: dict[int, list[int]] = {}
    for key, device in worked.items():
        hosts = issued.get(key, [])
        if len(hosts) == 1:
            found[hosts[0]] = device
        elif hosts:
            each = -(-len(device) // len(hosts))
            found |= {host: device[i * each :][:each] for i, host in enumerate(hosts)}
    return found
