"""Which steps of an engine are traced, and what tracing them cost.

A window is n steps, the first of them number `first` of those made while it is watched. Steps
outside it take the untraced path of the engine; how long they took there, beside the traced steps
of as many tokens, is the slowdown that tracing caused.
"""

import math
import re
from statistics import median
from typing import Any, NamedTuple

from workbench.common.errors import UsageError
from workbench.graph.ir import StepShape
from workbench.program.commands import Program
from workbench.trace.spans import Recorder

StepKey = tuple[StepShape, int]  # of a step, and the number of its program's commands


class Slowdown(NamedTuple):
    """Median time of a step of n_tokens tokens, traced and untraced, in us, and of how many."""

    n_tokens: int
    traced_us: float
    n_traced: int
    untraced_us: float
    n_untraced: int

    @property
    def ratio(self) -> float:
        """Traced over untraced."""
        return self.traced_us / self.untraced_us

    def __str__(self) -> str:
        return (
            f"a traced step took {self.ratio:.2f} times an untraced one ({self.traced_us:.0f} us, "
            f"median of {self.n_traced}, for {self.untraced_us:.0f} us, median of "
            f"{self.n_untraced})"
        )


def parse_window(text: str | None) -> tuple[int, int] | None:
    """`8,1` as (first step, number of steps); None stays None. Raises UsageError."""
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
    """Some steps that were recorded together. missing: what they lack, nothing where complete.
    clock_error_ns: how far device spans and calls can be off the host's, at most, as far as can be
    told: the brackets of both clocks, or a record seen before the call that made it. n_named:
    kernels that have the names of their launches, because CUPTI had other names."""

    steps: tuple[int, ...]
    missing: str
    clock_error_ns: int
    n_records: int
    n_named: int = 0

    @property
    def complete(self) -> bool:
        return not self.missing


class WindowRecorder(Recorder):
    """Keeps the spans of n steps from number `first` on, counted from the first it hears of.

    A span that names no step belongs to the step of the span before it: inner spans end, and so
    arrive, before the split and the step around them. Raises UsageError for a window that holds no
    step.
    """

    marks = True  # device spans come from marks that the backend sets around each command

    def __init__(self, window: tuple[int, int] | None = None, nvtx: bool = True):
        if window is not None and (len(window) != 2 or window[0] < 0 or window[1] < 1):
            raise UsageError(
                f"window={window!r} holds no step; give (first, n) with first >= 0 and n >= 1"
            )
        super().__init__(nvtx=nvtx)
        self.windows: list[Window] = []  # with CUPTI
        self.fallback = ""  # why device spans come from marks where CUPTI was asked for
        self._first: int = window[0] if window else 0
        self._n: float = window[1] if window else math.inf
        self._origin: int | None = None
        self._step = 0
        self._untraced: list[tuple[int, int]] = []  # tokens and ns of steps outside the window
        # which program a traced step issued; of programs of one shape one is kept, for their
        # launches are alike
        self._key_of: dict[int, StepKey] = {}
        self._program_of: dict[StepKey, Program] = {}

    # what an engine asks and tells ------------------------------------------------------------

    def wants(self, step: int) -> bool:
        """Whether step number `step` of the engine lies in the window."""
        if self._origin is None:
            self._origin = step
        return self._first <= step - self._origin < self._first + self._n

    def untraced(self, n_tokens: int, ns: int) -> None:
        """A step of n_tokens tokens took `ns` on the untraced path."""
        self._untraced.append((n_tokens, ns))

    def runs(self, program: Program, step: int) -> None:
        """The commands of `program` are about to be issued, traced, as step number `step`."""
        if self.wants(step):
            key = self._key_of[step] = program.shape, len(program.commands)
            self._program_of.setdefault(key, program)

    # what comes of it -------------------------------------------------------------------------

    @property
    def slowdown(self) -> Slowdown | None:
        """For the commonest number of tokens of a traced step; None where no step of as many ran
        untraced: give a window that begins after, or ends before, some of them."""
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
        """A program with the launches of traced step number `step`, None if not known."""
        key = self._key_of.get(step)
        return None if key is None else self._program_of[key]

    # what is kept -----------------------------------------------------------------------------

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
