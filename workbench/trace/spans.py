"""Spans: intervals of work of the host and the device. A leaf: every layer may import it.

A recorder collects the spans of some steps, for timelines and tests. An engine without a recorder
takes the untraced path and has no cost. NVTX ranges of the same commands are in
`engine/look/ranged.py`. Times are nanoseconds of `time.perf_counter_ns`, the monotonic clock. The
backend that measured a device span converts its times to this clock.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
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


WORTH_SAYING = 0.01  # of an untraced step


class Slowdown(NamedTuple):
    """The median time of a step of n_tokens tokens, traced and untraced, in us.

    n_traced, n_untraced: how many steps were compared.
    reading_us: what the trace took after a step, to read its marks on the device; the median. It is
        no part of a step, and lies between this step and the next.
    """

    n_tokens: int
    traced_us: float
    n_traced: int
    untraced_us: float
    n_untraced: int
    reading_us: float = 0.0

    @property
    def ratio(self) -> float:
        """The traced time over the untraced time."""
        return self.traced_us / self.untraced_us

    def __str__(self) -> str:
        said = (
            f"a traced step took {self.ratio:.2f} times an untraced one ({self.traced_us:.0f} us, "
            f"median of {self.n_traced}, for {self.untraced_us:.0f} us, median of "
            f"{self.n_untraced})"
        )
        if self.reading_us < WORTH_SAYING * self.untraced_us:
            return said
        return (
            f"{said}; {self.reading_us:.0f} us between two traced steps are the trace's own, "
            "which reads its marks there"
        )


class Window(NamedTuple):
    """Steps that were recorded together.

    missing: what the recording lacks; empty where it is complete.
    clock_error_ns: the largest known error of device spans and calls against the host's clock. It
        comes from the brackets of both clocks, or from a record that begins before its call.
    n_records: records of CUPTI.
    n_named: kernels that have the names of their launches, because CUPTI had other names.
    """

    steps: tuple[int, ...]
    missing: str
    clock_error_ns: int
    n_records: int
    n_named: int = 0

    @property
    def complete(self) -> bool:
        return not self.missing


class Recorder:
    """Collects the spans of n steps, from number `first` on, counted from the first step that it
    sees. All other steps take the untraced path of the engine. A comparison with traced steps of as
    many tokens gives the slowdown that tracing causes.

    A span without a step belongs to the step of the span before it: inner spans end, and so arrive,
    before the split and the step around them.

    marks: whether device spans come from marks that the backend sets around each command.
    nvtx: whether a tool that listens to NVTX also gets traced steps.
    windows: with CUPTI, the steps that were recorded together.
    fallback: why device spans come from marks where CUPTI was asked for; else empty.
    source: for spans that were read from a file, a line about the file; else empty.
    """

    marks = True
    source = ""

    def __init__(self, window: tuple[int, int] | None = None, nvtx: bool = True):
        self.spans: list[Span] = []
        self.nvtx = nvtx
        self.windows: list[Window] = []
        self.fallback = ""
        self._first: int = window[0] if window else 0
        self._n: float = window[1] if window else math.inf
        self._origin: int | None = None
        self._step = 0
        self._untraced: list[tuple[int, int]] = []  # tokens and ns of steps outside the window
        self._reading_ns: list[int] = []  # the time to read the marks of a step, of each traced one
        # The program of each traced step, by its shape and its number of commands. Programs of one
        # shape have equal launches, so one program is kept for all of them.
        self._key_of: dict[int, tuple[Any, int]] = {}
        self._program_of: dict[tuple[Any, int], Any] = {}

    # calls of an engine -----------------------------------------------------------------------

    def wants(self, step: int) -> bool:
        """Whether step number `step` of the engine lies in the window. Called before each step, in
        order."""
        if self._origin is None:
            self._origin = step
        return self._first <= step - self._origin < self._first + self._n

    def untraced(self, n_tokens: int, ns: int) -> None:
        """Notes that a step of n_tokens tokens took `ns` on the untraced path."""
        self._untraced.append((n_tokens, ns))

    def read(self, ns: int) -> None:
        """Notes that reading the marks of a traced step took `ns` after it."""
        self._reading_ns.append(ns)

    def runs(self, program: Any, step: int) -> None:
        """Notes that the commands of `program` will now be issued, traced, as step `step`."""
        if self.wants(step):
            key = self._key_of[step] = program.shape, len(program.commands)
            self._program_of.setdefault(key, program)

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
        end_ns = now_ns()
        if self._keeps(args):
            self.spans.append(Span(name, category, HOST_LANE, start_ns, end_ns, args))

    def add(
        self, name: str, category: str, lane: str, start_ns: int, end_ns: int, **args: Any
    ) -> None:
        """Adds a span that was measured elsewhere, as on the device."""
        if self._keeps(args):
            self.spans.append(Span(name, category, lane, start_ns, end_ns, args))

    def _keeps(self, args: dict[str, Any]) -> bool:
        step = args.get("step")
        if step is not None:
            self._step = step
            return self.wants(step)
        if self._origin is None:
            return self._first == 0
        return self.wants(self._step)

    # results ----------------------------------------------------------------------------------

    @property
    def why_empty(self) -> str:
        """Why nothing was traced; empty where something was."""
        if self.spans:
            return ""
        n = len(self._untraced)
        made = f"no step was traced: {n} {'was' if n == 1 else 'were'} made"
        later = f", and the window begins with step {self._first}, counted from 0"
        return made + later if self._first else made

    @property
    def collector(self) -> str:
        """The source of the device spans: `events` or `cupti`."""
        return "events" if self.marks else "cupti"

    @property
    def slowdown(self) -> Slowdown | None:
        """The slowdown for the most frequent number of tokens among traced steps. None where no
        step with as many tokens ran untraced: then give a window that leaves some steps out."""
        traced: dict[int, list[int]] = {}
        for span in self.spans:
            if span.category == "step" and "n_tokens" in span.args:
                traced.setdefault(span.args["n_tokens"], []).append(span.end_ns - span.start_ns)
        untraced: dict[int, list[int]] = {}
        for n_tokens, ns in self._untraced:
            untraced.setdefault(n_tokens, []).append(ns)
        both = [n for n in traced if n in untraced]
        if not both:
            return None
        n = max(both, key=lambda n: len(traced[n]))
        return Slowdown(
            n, median(traced[n]) / 1e3, len(traced[n]), median(untraced[n]) / 1e3, len(untraced[n]),
            median(self._reading_ns or [0]) / 1e3,
        )  # fmt: skip

    def program_of(self, step: int) -> Any:
        """A program with the launches of traced step number `step`; None if not known."""
        key = self._key_of.get(step)
        return None if key is None else self._program_of[key]


class Recorded(NamedTuple):
    """What a trace file holds of a recorder: the same fields, complete, and nothing to record.

    collector: `events` or `cupti`, or the tool that wrote a foreign file.
    """

    spans: list[Span]
    collector: str
    fallback: str = ""
    windows: tuple[Window, ...] = ()
    slowdown: Slowdown | None = None
    source: str = ""

    @property
    def marks(self) -> bool:
        return self.collector == "events"

    def program_of(self, step: int) -> None:
        """None: a file has no program, and its launches have their bytes already."""
