"""Spans: what the host and the device did, and when. A leaf: every layer may import it.

A recorder collects them, for timelines and tests. An engine without a recorder takes the untraced
path and pays nothing. NVTX ranges of the same commands are in `engine/look/ranged.py`.
Times are nanoseconds of `time.perf_counter_ns`, which is the monotonic clock; device spans are
brought to the same clock by the backend that measured them.
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
    """A traced interval. lane is `host` or `<backend> stream <id>`; args say which command."""

    name: str
    category: str
    lane: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


class Recorder:
    """Collects spans.

    marks: device spans come from marks that the backend sets around each command. nvtx: a tool that
    listens to NVTX is told of traced steps, too.
    """

    marks = True

    def __init__(self, nvtx: bool = True):
        self.spans: list[Span] = []
        self.nvtx = nvtx

    def wants(self, step: int) -> bool:
        """Whether step number `step` is to be traced; asked before each, in order."""
        return True

    def untraced(self, n_tokens: int, ns: int) -> None:
        """A step of n_tokens tokens that was not wanted took `ns`."""

    def runs(self, program: Any, step: int) -> None:
        """The commands of `program` are about to be issued, traced, as step number `step`."""

    def replayed(self, step: int, index: int, nodes: Sequence[int] | None) -> None:
        """Command number `index` of a step, a plan, was issued. nodes: of each node on the device,
        its part; None where the parts were issued one by one."""

    @contextmanager
    def span(self, name: str, category: str, **args: Any) -> Iterator[None]:
        """A span of the host lane around the body; it is kept when the body raises, too."""
        handle = self.begin(name)
        start = now_ns()
        try:
            yield
        finally:
            self.end(handle, name, category, start, args)

    def begin(self, name: str) -> Any:
        """A span begins; the hot loop's form of `span` (no generator). Returns what `end` wants."""
        return None

    def end(
        self, handle: Any, name: str, category: str, start_ns: int, args: dict[str, Any]
    ) -> None:
        self.spans.append(Span(name, category, HOST_LANE, start_ns, now_ns(), args))

    def add(
        self, name: str, category: str, lane: str, start_ns: int, end_ns: int, **args: Any
    ) -> None:
        """A span measured elsewhere: the device's."""
        self.spans.append(Span(name, category, lane, start_ns, end_ns, args))
