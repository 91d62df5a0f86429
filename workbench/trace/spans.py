"""Spans: intervals of work of the host and the device. A leaf: every layer may import it.

A recorder collects spans, for timelines and tests. An engine without a recorder takes the untraced
path and has no cost. NVTX ranges of the same commands are in `engine/look/ranged.py`. Times are
nanoseconds of `time.perf_counter_ns`, the monotonic clock. The backend that measured a device span
converts its times to this clock.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

now_ns = time.perf_counter_ns

HOST_LANE = "host"
LOGITS_WAIT = "wait logits"  # the name of the host's wait that ends a step
# span categories; build is the host making a step's inputs, graph and program; call is one of the
# driver inside a command
CATEGORIES = (
    "step", "build", "split", "write", "copy", "launch", "replay", "record", "wait", "sync", "read",
    "call", "device",
)  # fmt: skip


class Span(NamedTuple):
    """A traced interval.

    lane: `host` or `<backend> stream <id>`.
    args: identify the command.
    """

    name: str
    category: str
    lane: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


class Recorder:
    """Collects spans.

    marks: whether device spans come from marks that the backend sets around each command.
    nvtx: whether a tool that listens to NVTX also gets traced steps.
    """

    marks = True

    def __init__(self, nvtx: bool = True):
        self.spans: list[Span] = []
        self.nvtx = nvtx

    def wants(self, step: int) -> bool:
        """Whether to trace step number `step`. Called before each step, in order."""
        return True

    def untraced(self, n_tokens: int, ns: int) -> None:
        """Notes that a step of n_tokens tokens took `ns` on the untraced path."""

    def runs(self, program: Any, step: int) -> None:
        """Notes that the commands of `program` will now be issued, traced, as step `step`."""

    def replayed(self, step: int, index: int, nodes: Sequence[int] | None) -> None:
        """Notes that command number `index` of a step, a plan, was issued.

        nodes: the part of each node on the device; None where the parts were issued one by one.
        """

    @contextmanager
    def span(self, name: str, category: str, **args: Any) -> Iterator[None]:
        """Adds a span of the host lane around the body, also where the body raises."""
        handle = self.begin(name)
        start = now_ns()
        try:
            yield
        finally:
            self.end(handle, name, category, start, args)

    def begin(self, name: str) -> Any:
        """Begins a span; for the hot loop, without the generator of `span`. Returns the handle for
        `end`."""
        return None

    def end(
        self, handle: Any, name: str, category: str, start_ns: int, args: dict[str, Any]
    ) -> None:
        self.spans.append(Span(name, category, HOST_LANE, start_ns, now_ns(), args))

    def add(
        self, name: str, category: str, lane: str, start_ns: int, end_ns: int, **args: Any
    ) -> None:
        """Adds a span that was measured elsewhere, as on the device."""
        self.spans.append(Span(name, category, lane, start_ns, end_ns, args))
