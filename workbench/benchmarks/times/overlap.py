"""How much of a token's device time has two or more kernels in flight. Measured without a trace; a
trace is taken as well, to compare its overlap and to measure its slowdown.

    stream 0   |--norm--|----Q----|         |--attention--|
    stream 2            |------K------|
    total      ===========================================      some kernel runs
    beside               =========                              two or more run
    overlap    beside / total

Kernels note their own times (`engine/look/kernel_spans.py`), so nothing is launched between them.
The report has a token's device time with and without the noting. The clock advances in ticks. The
length of a span of fewer than RESOLVED_TICKS ticks is unknown. Such a branch counts as unresolved.

A trace shows a launch that begins early (`pdl`) from its start, while it still waits for the kernel
before it. So here a kernel begins, in traces too, only after the kernel before it on its lane.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from workbench.benchmarks.times.token_parts import WARM_UP, parts_us, stamped_steps
from workbench.benchmarks.workload import Workload, draw_tokens
from workbench.common.errors import UsageError
from workbench.engine.look.kernel_spans import kernel_spans, number_of
from workbench.program.commands import Launch
from workbench.program.side_by_side import Branch, regions
from workbench.trace.profile import profile
from workbench.trace.spans import Span

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

RESOLVED_TICKS = 10
BRANCHES = ("token", "region", "stream", "first", "n", "us", "resolved")


class InFlight(NamedTuple):
    """The times in which at least one kernel ran, and in which two or more kernels ran, ns."""

    total_ns: int
    beside_ns: int

    @property
    def overlap(self) -> float:
        """The share of time with two or more kernels; 0 without any time."""
        return self.beside_ns / self.total_ns if self.total_ns else 0.0


def in_flight(spans: Iterable[tuple[int, int]]) -> InFlight:
    """The times of kernels in flight. spans: begin and end of each kernel, in any order, ns."""
    edges = sorted(
        (at, step) for begin, end in spans if end > begin for at, step in ((begin, 1), (end, -1))
    )
    total = beside = running = last = 0
    for at, step in edges:
        total += (at - last) * (running >= 1)
        beside += (at - last) * (running >= 2)
        running, last = running + step, at
    return InFlight(total, beside)


def in_stream_order(spans: Iterable[Span]) -> list[Span]:
    """The spans in order of their begins. A span that begins before the end of the span before it
    on its lane is cut at that end."""
    ends: dict[str, int] = {}
    found = []
    for span in sorted(spans, key=lambda s: (s.start_ns, s.end_ns)):
        begin = max(span.start_ns, ends.get(span.lane, 0))
        ends[span.lane] = end = max(begin, span.end_ns)
        found.append(span._replace(start_ns=begin, end_ns=end))
    return found


class Traced(NamedTuple):
    """The result of a trace of as many tokens.

    collector: the source of the spans.
    overlap: median over the tokens.
    us: a token's device time, median.
    slowdown: `us` over the untraced device time.
    step_slowdown: the same for a step, by the host's clock; None: unknown.
    fallback: why the spans are from another collector than the requested one.
    """

    collector: str
    overlap: float
    us: float
    slowdown: float
    step_slowdown: float | None
    fallback: str


class Overlap:
    """The result of `measure_overlap`.

    tick_ns: the tick of the device's clock.
    tokens: a row for each token: `us` from its first kernel to the end of its last, `total_us`,
        `beside_us`, `overlap`, n_kernels, n_short (kernels of fewer than RESOLVED_TICKS ticks), and
        n_silent (kernels of libraries, which have no span).
    branches: a row for each token, region and branch; see BRANCHES.
    plain_us: a token's device time with kernels that do not note their times, median.
    traced: the result of the trace; None without a trace.
    """

    def __init__(
        self,
        tick_ns: int,
        tokens: pd.DataFrame,
        branches: pd.DataFrame,
        plain_us: float,
        traced: Traced | None,
    ):
        self.tick_ns, self.tokens, self.branches = tick_ns, tokens, branches
        self.plain_us, self.traced = plain_us, traced

    @property
    def overlap(self) -> float:
        """The median over the tokens."""
        return float(self.tokens["overlap"].median())

    @property
    def by_branch(self) -> pd.DataFrame:
        """A row for each branch: the median of `us` over the tokens, and whether the branch is
        `resolved` in most tokens."""
        groups = self.branches.groupby(["region", "stream", "first"], sort=False)
        found = groups.agg(n=("n", "first"), us=("us", "median"), resolved=("resolved", "median"))
        return found.assign(resolved=found["resolved"] > 0.5).reset_index()

    def record(self) -> dict[str, Any]:
        """The result for JSON: medians over the tokens, and every branch, column by column."""
        middle = self.tokens.median()
        of_branches = self.by_branch.assign(us=lambda frame: frame["us"].round(3))
        return {
            "tick_ns": self.tick_ns,
            "resolved_ticks": RESOLVED_TICKS,
            "n_tokens": len(self.tokens),
            "overlaps": [round(float(x), 4) for x in self.tokens["overlap"]],
            **{name: round(float(middle[name]), 4) for name in self.tokens.columns},
            "plain_us": self.plain_us,
            "traced": None if self.traced is None else self.traced._asdict(),
            "branches": of_branches.to_dict("list"),
        }

    def __str__(self) -> str:
        middle, branches = self.tokens.median(), self.by_branch
        lines = [
            f"overlap {self.overlap:.1%}: {middle['beside_us']:.1f} of {middle['total_us']:.1f} us "
            f"with two or more of {middle['n_kernels']:.0f} kernels in flight",
            f"{middle['n_short']:.0f} kernels and {int((~branches['resolved']).sum())} of "
            f"{len(branches)} branches under {RESOLVED_TICKS} ticks of {self.tick_ns} ns: "
            "unresolved",
            f"device time {middle['us']:.1f} us with noting, {self.plain_us:.1f} without",
        ]
        if middle["n_silent"]:
            lines.append(f"{middle['n_silent']:.0f} kernels of libraries note nothing")
        if self.traced is not None:
            lines.append(
                f"by {self.traced.collector}: overlap {self.traced.overlap:.1%}, "
                f"{self.traced.slowdown:.2f} times as long"
            )
        return "\n".join(lines)


def measure_overlap(engine: Engine, n_tokens: int = 16, collector: str | None = "auto") -> Overlap:
    """Decodes n_tokens single tokens three times, each time from an empty cache: with kernels that
    note their times, with plain kernels, and traced. collector: of the trace (`trace.profile`);
    None: no trace.

    Raises UsageError for no tokens, and as `kernel_spans` for an engine that launches ahead.
    """
    if n_tokens < 1:
        raise UsageError(f"n_tokens={n_tokens}: an overlap is measured over tokens; give 1 or more")
    test = Workload(0, WARM_UP + n_tokens)
    tokens = draw_tokens(test, engine.model.n_vocab, 0).gen
    engine.reset()
    with kernel_spans(engine) as found:
        for token in tokens:
            engine.step([token])
    clock = engine.backend.clock()
    assert clock is not None, "kernels that run beside the host have a clock"
    tick_ns = clock.tick_ns
    beside = [regions(engine.program(n_past=n)) for n in range(WARM_UP, len(tokens))]
    engine.reset()
    plain_us = parts_us(*stamped_steps(engine, tokens))["device"]
    steps, silent = found.steps[WARM_UP:], found.n_silent[WARM_UP:]
    rows = [_token(spans, tick_ns, n) for spans, n in zip(steps, silent, strict=True)]
    branches = pd.DataFrame(
        [
            row
            for i, (own, spans) in enumerate(zip(beside, steps, strict=True))
            for row in _branches(own, i, spans, tick_ns)
        ],
        columns=list(BRANCHES),
    )
    traced = None if collector is None else _traced(engine, tokens, collector, plain_us)
    return Overlap(tick_ns, pd.DataFrame(rows), branches, plain_us, traced)


def _token(spans: Sequence[Span], tick_ns: int, n_silent: int) -> dict[str, float]:
    """The row of a token."""
    ordered = in_stream_order(spans)
    found = in_flight((s.start_ns, s.end_ns) for s in ordered)
    lengths = [s.end_ns - s.start_ns for s in ordered]
    return {
        "us": _extent_us(ordered),
        "total_us": found.total_ns / 1e3,
        "beside_us": found.beside_ns / 1e3,
        "overlap": found.overlap,
        "n_kernels": len(lengths),
        "n_short": sum(ns < RESOLVED_TICKS * tick_ns for ns in lengths),
        "n_silent": n_silent,
    }


def _extent_us(spans: Sequence[Span]) -> float:
    """The time from the first begin to the last end."""
    if not spans:
        return 0.0
    return (max(s.end_ns for s in spans) - min(s.start_ns for s in spans)) / 1e3


def _branches(
    beside: Sequence[Sequence[Branch]], token: int, spans: Sequence[Span], tick_ns: int
) -> Iterator[tuple[Any, ...]]:
    """The rows of a token's branches. A branch with library kernels only has no row."""
    of_number: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        of_number.setdefault(number_of(span), []).append(span)
    for number, branches in enumerate(beside):
        for branch in branches:
            own = [span for at in branch.numbers for span in of_number.get(at, ())]
            if own:
                us = _extent_us(in_stream_order(own))
                resolved = us * 1e3 >= RESOLVED_TICKS * tick_ns
                first = branch.launches[0].node.name
                yield token, number, branch.stream.id, first, len(own), us, resolved


def _traced(engine: Engine, tokens: Sequence[int], collector: str, plain_us: float) -> Traced:
    with profile(engine, (len(tokens) + WARM_UP, len(tokens)), False, collector) as found:
        for _ in range(2):  # untraced, for the slowdown; then traced
            engine.reset()
            for token in tokens:
                engine.step([token])
    of_step: dict[int, list[Span]] = {}
    for span in found.timeline.spans:
        if span.category == "device" and span.args.get("kind") == Launch.kind:
            of_step.setdefault(span.args["step"], []).append(span)
    steps = [in_stream_order(spans) for spans in of_step.values()]
    overlaps = [in_flight((s.start_ns, s.end_ns) for s in spans).overlap for spans in steps]
    us = median(map(_extent_us, steps))
    host = found.slowdown
    return Traced(
        found.collector, round(median(overlaps), 4), round(us, 3), round(us / plain_us, 4),
        None if host is None else round(host.ratio, 4), found.fallback,
    )  # fmt: skip
