"""The choice of the steps that are traced, and the cost of tracing them.

A window is n steps, from number `first` of the steps that the recorder sees on. All other steps
take the untraced path of the engine. A comparison with traced steps of as many tokens gives the
slowdown that tracing causes.
"""

import math
import re
from statistics import median
from typing import Any, NamedTuple

from workbench.common.errors import UsageError
from workbench.graph.ir import StepShape
from workbench.program.commands import Program
from workbench.trace.spans import Recorder

StepKey = tuple[StepShape, int]  # the step's shape, and how many commands its program has


class Slowdown(NamedTuple):
    """The median time of a step of n_tokens tokens, traced and untraced, in us.

    n_traced, n_untraced: how many steps were compared.
    """

    n_tokens: int
    traced_us: float
    n_traced: int
    untraced_us: float
    n_untraced: int

    @property
    def ratio(self) -> float:
        """The traced time over the untraced time."""
        return self.traced_us / self.untraced_us

    def __str__(self) -> str:
        return (
            f"a traced step took {self.ratio:.2f} times an untraced one ({self.traced_us:.0f} us, "
            f"median of {self.n_traced}, for {self.untraced_us:.0f} us, median of "
            f"{self.n_untraced})"
        )


def parse_window(text: str | None) -> tuple[int, int] | None:
    """Parses `8,1` to (first step, number of steps); None stays None. Raises UsageError."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+),(\d+)", text)
    if found is None or int(found[2]) < 1:
        raise UsageError(
            f"--window {text!r} holds no step; write FIRST,N without a space, "
            "FIRST from 0 and N from 1, as 8,1"
        )
    return int(found[1]), int(found[2])


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


class WindowRecorder(Recorder):
    """Keeps the spans of n steps, from number `first` on, counted from the first step that it sees.

    A span without a step belongs to the step of the span before it: inner spans end, and so arrive,
    before the split and the step around them.

    windows: with CUPTI, the steps that were recorded together.
    fallback: why device spans come from marks where CUPTI was asked for; else empty.

    Raises UsageError for a window without a step.
    """

    marks = True  # device spans come from marks that the backend sets around each command

    def __init__(self, window: tuple[int, int] | None = None, nvtx: bool = True):
        if window is not None and (len(window) != 2 or window[0] < 0 or window[1] < 1):
            raise UsageError(
                f"window={window!r} holds no step; give (first, n) with first >= 0 and n >= 1"
            )
        super().__init__(nvtx=nvtx)
        self.windows: list[Window] = []
        self.fallback = ""
        self._first: int = window[0] if window else 0
        self._n: float = window[1] if window else math.inf
        self._origin: int | None = None
        self._step = 0
        self._untraced: list[tuple[int, int]] = []  # tokens and ns of steps outside the window
        # The program of each traced step. Programs of one shape have equal launches, so one program
        # is kept for all of them.
        self._key_of: dict[int, StepKey] = {}
        self._program_of: dict[StepKey, Program] = {}

    # calls of an engine -----------------------------------------------------------------------

    def wants(self, step: int) -> bool:
        """Whether step number `step` of the engine lies in the window."""
        if self._origin is None:
            self._origin = step
        return self._first <= step - self._origin < self._first + self._n

    def untraced(self, n_tokens: int, ns: int) -> None:
        """Notes that a step of n_tokens tokens took `ns` on the untraced path."""
        self._untraced.append((n_tokens, ns))

    def runs(self, program: Program, step: int) -> None:
        """Notes that the commands of `program` will now be issued, traced, as step `step`."""
        if self.wants(step):
            key = self._key_of[step] = program.shape, len(program.commands)
            self._program_of.setdefault(key, program)

    # results ----------------------------------------------------------------------------------

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
            n, median(traced[n]) / 1e3, len(traced[n]), median(untraced[n]) / 1e3, len(untraced[n])
        )

    def program_of(self, step: int) -> Program | None:
        """A program with the launches of traced step number `step`; None if not known."""
        key = self._key_of.get(step)
        return None if key is None else self._program_of[key]

    # spans that are kept ----------------------------------------------------------------------

    def _keeps(self, args: dict[str, Any]) -> bool:
        step = args.get("step")
        if step is not None:
            self._step = step
            return self.wants(step)
        if self._origin is None:
            return self._first == 0
        return self.wants(self._step)

    def end(
        self, handle: Any, name: str, category: str, start_ns: int, args: dict[str, Any]
    ) -> None:
        super().end(handle, name, category, start_ns, args)
        if not self._keeps(args):
            self.spans.pop()

    def add(
        self, name: str, category: str, lane: str, start_ns: int, end_ns: int, **args: Any
    ) -> None:
        super().add(name, category, lane, start_ns, end_ns, **args)
        if not self._keeps(args):
            self.spans.pop()
