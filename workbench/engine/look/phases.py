"""The phases of a step: what the host does, how long each takes, and how to do one again.

* batch: the inputs get their values
* reuse: the kept program is found, and patched where graph_reuse wants it
* graph: the graph is built
* fuse: norms are halved, nodes get their backends and are fused
* split: the graph is cut where the backend changes
* layout: every tensor gets its range
* lower: commands are made, and plans put in place of some
* prepare: commands are bound to addresses
* issue: commands are issued
* wait: the host waits for the results
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

from workbench.trace.spans import now_ns

if TYPE_CHECKING:
    from workbench.common.tables import Table

P = ParamSpec("P")
R = TypeVar("R")
Spent = Callable[[str, int, int], None]  # told of a phase: its name, its begin and its end in ns

PHASES = (
    "batch", "reuse", "graph", "fuse", "split", "layout", "lower", "prepare", "issue", "wait",
)  # fmt: skip
OF_STEPS = ("issue", "wait")  # counted where a step is not traced


class PhaseClock:
    """Is told when a phase begins, and when it ends. spent: told of every phase that has ended."""

    def __init__(self, spent: Spent):
        self._spent = spent

    def begin(self, phase: str) -> int:
        """The time now, ns."""
        return now_ns()

    def end(self, phase: str, start_ns: int) -> int:
        """The time now, ns. start_ns: as `begin` has said it."""
        end_ns = now_ns()
        self._spent(phase, start_ns, end_ns)
        return end_ns

    def leave(self) -> None:
        """What has begun turned out to be none of that phase."""


class Phases:
    """The phases of one program, first to last; each can be done again.

    clock: told of every phase. again: by name, what does a phase once more with what it was given;
    what that makes is dropped.
    """

    def __init__(self, clock: PhaseClock):
        self._clock = clock
        self.again: dict[str, Callable[[], object]] = {}

    def do(self, phase: str, work: Callable[P, R], *given: P.args, **named: P.kwargs) -> R:
        """What `work` makes of what it is given, in the phase's time."""
        clock = self._clock

        def timed() -> R:
            start = clock.begin(phase)
            made = work(*given, **named)
            clock.end(phase, start)
            return made

        self.again[phase] = timed
        return timed()


class PhaseCounts:
    """How often each phase was done, and for how long in all, ns."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing was done yet."""
        self.n = dict.fromkeys(PHASES, 0)
        self.ns = dict.fromkeys(PHASES, 0)

    def add(self, phase: str, ns: int) -> None:
        self.n[phase] += 1
        self.ns[phase] += ns


class PhaseTime(NamedTuple):
    """What the host spends on a phase in a step: how often it does it, us, and the share of all
    phases (0 to 1)."""

    phase: str
    times: float
    us: float
    share: float


class PhaseTimes(list[PhaseTime]):
    """A row for each phase, in order; shows itself as a table. steps: how many were counted."""

    steps: int = 0

    @property
    def words(self) -> str:
        """The phases that took any time: `batch 25.4, issue 38.0, wait 412.3`."""
        return ", ".join(f"{row.phase} {row.us:.1f}" for row in self if row.us)

    def table(self) -> Table:
        from workbench.common.tables import Table

        rows = [(row.phase, row.times, row.us, f"{row.share:.1%}") for row in self]
        columns = ["phase", "times a step", "us a step", "share"]
        return Table(rows, columns=columns).shown(right=["share"])

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def per_step(after: Mapping[str, int], before: Mapping[str, int] | None = None) -> PhaseTimes:
    """The phases of the steps between two readings of `Engine.counters`; before None: of all."""
    spent = {name: n - (before or {}).get(name, 0) for name, n in after.items()}
    total = sum(spent[f"{phase}_ns"] for phase in PHASES) or 1
    made = PhaseTimes()
    for phase in PHASES:
        n, ns = spent[f"{phase}_n"], spent[f"{phase}_ns"]
        steps = max(spent["untraced_steps" if phase in OF_STEPS else "steps"], 1)
        made.append(PhaseTime(phase, n / steps, ns / 1e3 / steps, ns / total))
    made.steps = spent["steps"]
    return made
