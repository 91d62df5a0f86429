"""When each kernel of a step ran, without a trace (`kernel_spans`).

The times come from notes where the device's kernels can note when they run, else from marks
(`command_times.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from workbench.backend.base import Issue
from workbench.backend.issue.prepared import Prepared
from workbench.common.errors import UsageError
from workbench.engine.batch import Work
from workbench.engine.engine import Engine
from workbench.engine.look.command_times import ByMarks, ByNotes, CommandTimes
from workbench.engine.look.watch import PLAIN, Watch, span_of
from workbench.program import commands as c
from workbench.trace.spans import Span


class KernelSpans(NamedTuple):
    """The spans of steps.

    steps: for each step its launches, in the order of issue, as device spans (args `index`, `part`,
        `op`, `stream`; `kernel` where kernels note).
    n_silent: for each step, how many kernels are a library's, which have no span.
    """

    steps: list[list[Span]]
    n_silent: list[int]


@contextmanager
def kernel_spans(engine: Engine) -> Iterator[KernelSpans]:
    """Finds when every kernel of the body's steps ran, in ns of the host's clock. The result is
    complete at the end of the body.

    Differences are by the device's clock. Raises UsageError where steps are launched ahead, because
    the next step would overwrite the notes of this step; and where no device computes.
    """
    if engine.issuer.launches_ahead:
        raise UsageError(
            "kernels note when they ran in one step at a time, and launch_ahead=on queues the "
            "next; use launch_ahead=off plan_end=event"
        )
    if all(backend.capabilities.synchronous for backend in engine.backends):
        raise UsageError(f"the {engine.device} device has no kernels of its own; use another")
    found, before = KernelSpans([], []), engine.recorder
    notes = engine.backend.note_bytes
    times = ByNotes(engine.backends, engine.bound.again) if notes else ByMarks()
    engine.look(None, _Launches(found, times))
    try:
        yield found
        engine.issuer.end_all_but(0)
    finally:
        engine.look(before, PLAIN)
        engine.synchronize()
        times.close()


class _Launches(Watch):
    """Fills `found` with the launches of each step."""

    alone = True

    def __init__(self, found: KernelSpans, times: CommandTimes):
        self._found, self._times = found, times
        self._step = 0

    def of(self, prepared: Prepared) -> Prepared:
        return self._times.of(prepared)

    def begin(self, step: int, work: Work, n_past: int) -> None:
        self._step = step

    def head(self, prepared: Prepared) -> Iterable[Issue]:
        self._times.begin_step(prepared)
        for number, call in enumerate(prepared.head):
            begun = self._times.before(prepared, number)
            yield call
            self._times.after(prepared, self._step, number, begun)

    def end(self, waited: bool) -> None:
        spans = [span_of(time) for time in self._times.read(len(self._found.steps), waited)]
        launches = [span for span in spans if span.args["kind"] == c.Launch.kind]
        steps: dict[int, list[Span]] = {}
        for span in launches:
            steps.setdefault(span.args["step"], []).append(span)
        for _, of_step in sorted(steps.items()):
            self._found.steps.append(sorted(of_step, key=number_of))
            self._found.n_silent.append(self._times.n_silent)


def number_of(span: Span) -> tuple[int, int]:
    """The number of a launch among its program's commands, and in its plan."""
    return span.args["index"], span.args.get("part", 0)
