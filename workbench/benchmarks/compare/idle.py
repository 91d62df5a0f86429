"""Do the arms of a comparison issue different work at all? Asked before anything is measured.

Two arms whose steps have equal programs, and are kept and issued alike, are an A/A control under
two names. A toggle can be idle for three reasons. Another toggle is off (`plan_scope` while
plans=off). No test has the work that it decides on (`slot_choice` without requests). Or nothing in
the steps of the test answers to it (`fuse_bias` on a model without bias). The table of toggles says
the first two (`config/table.py`: `idle`). For the third the programs of all steps of a test are
made with both arms and compared, up to the first difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from workbench.benchmarks.compare.arms import Arm, IdleToggles, idle_refusal
from workbench.benchmarks.workload import Workload, acts
from workbench.config import Toggles, differing
from workbench.config.table import ROWS, Acts, idle
from workbench.config.toggles import names_that_differ
from workbench.program.sameness import n_streams, same_work

if TYPE_CHECKING:
    from workbench.engine.engine import Engine
    from workbench.graph.ir import StepShape
    from workbench.program.commands import Program


def check_engines(
    engines: Sequence[Engine], toggle: str, arms: Sequence[Arm], workloads: Sequence[Workload]
) -> dict[str, dict[str, str]]:
    """Which arms do the baseline's work in a test, and why: test -> arm -> reason.

    engines: of the arms. toggle: that is compared; empty where sets are. Raises IdleToggles where
    that is every arm in every test.
    """
    own = [(arm, side) for arm, side in zip(arms, engines, strict=True) if not arm.is_control]
    found: dict[str, dict[str, str]] = {}
    for test in workloads:
        made = Made(engines[0])
        why = {arm.name: why_same(engines[0], side, test, made) for arm, side in own[1:]}
        found[test.name] = {name: reason for name, reason in why.items() if reason}
    reasons = [reason for by_arm in found.values() for reason in by_arm.values()]
    if len(reasons) == len(found) * (len(own) - 1):
        raise IdleToggles(idle_refusal(toggle, [arm for arm, _ in own], reasons))
    return {test: by_arm for test, by_arm in found.items() if by_arm}


class Made:
    """The programs of an engine's steps. Each is made when a comparison comes to it, and kept for
    those that follow: an engine is compared with many others."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._kept: dict[StepShape, list[Program]] = {}

    def of(self, shapes: Iterable[StepShape]) -> Iterator[Program]:
        """As `Engine.programs_of`."""
        for shape in shapes:
            if shape not in self._kept:
                self._kept[shape] = [*self._engine.programs_of([shape])]
            yield from self._kept[shape]


def why_same(before: Engine, after: Engine, workload: Workload, made: Made | None = None) -> str:
    """Why the steps of a test are the same work with both engines; empty where they differ.

    made: the programs of `before`, as far as earlier comparisons have made them.
    """
    was, now = before.settled.to_dict(), after.settled.to_dict()
    names = [name for name in was if was[name] != now[name]]
    if not names:
        asked = " and ".join(differing(before.toggles, after.toggles))
        return f"{asked} stand for the same here"
    if why := idle(was, now):
        return why
    outside = {ROWS[name].acts for name in names}
    if Acts.STEPS in outside or (Acts.NEXT_STEPS in outside and workload.n_gen > 1):
        return ""
    steps = acts(workload, before.config.n_ubatch)
    shapes = [side.rehearsal.from_empty(steps) for side in (before, after)]
    if shapes[0] != shapes[1]:
        return ""
    if Acts.LARGER_STEPS in outside and any(shape.n_tokens > 1 for shape in shapes[0]):
        return ""
    own = (made or Made(before)).of(shapes[0])
    for one, other in zip_longest(own, after.programs_of(shapes[0])):
        if one is None or other is None or not same_work(one, other):
            return ""
        if Acts.FORKED_STEPS in outside and n_streams(one) > 1:
            return ""
    asked_names = names_that_differ(before.toggles, after.toggles) or names
    needed = dict.fromkeys(map(_needs, [m for n in asked_names for m in Toggles.members(n)]))
    return f"the steps of {workload} have equal programs; {'; '.join(needed)}"


def _needs(name: str) -> str:
    """What a toggle needs to act, in words."""
    row = ROWS[name]
    if row.acts != Acts.PROGRAM:
        return f"{name} acts {row.acts.words}"
    return f"{name} needs {row.needs}" if row.needs else f"{name} changes no command of theirs"
