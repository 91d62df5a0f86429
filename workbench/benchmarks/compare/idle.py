"""Do the arms of a comparison issue different work at all? Asked before anything is measured.

Two arms whose steps have equal programs, and are kept and issued alike, are an A/A control under
two names. A toggle can be idle for three reasons. Another toggle is off (`plan_scope` while
plans=off). No test has the work that it decides on (`slot_choice` without requests). Or nothing in
the steps of the test answers to it (`fuse_bias` on a model without bias). The table of toggles says
the first two (`config/table.py`: `idle`). For the third the programs of all steps of a test are
made with both arms and compared, up to the first difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from workbench.benchmarks.compare.arms import Arm, IdleToggles, idle_refusal
from workbench.benchmarks.workload import Workload, acts
from workbench.config import Toggles, differing
from workbench.config.table import ROWS, Acts, idle
from workbench.program.sameness import n_streams, same_work

if TYPE_CHECKING:
    from workbench.engine.engine import Engine


def check_engines(
    engines: Sequence[Engine], arms: Sequence[Arm], workloads: Sequence[Workload]
) -> dict[str, dict[str, str]]:
    """Which arms do the baseline's work in a test, and why: test -> arm -> reason. engines: of the
    arms. Raises IdleToggles where that is every arm in every test."""
    found: dict[str, dict[str, str]] = {}
    others = [(arm, side) for arm, side in zip(arms, engines, strict=True) if not arm.is_control]
    for workload in workloads:
        reasons = {arm.name: why_same(engines[0], side, workload) for arm, side in others[1:]}
        found[workload.name] = {name: why for name, why in reasons.items() if why}
    n_idle = sum(map(len, found.values()))
    if n_idle == (len(others) - 1) * len(found):
        whys = [why for by_arm in found.values() for why in by_arm.values()]
        raise IdleToggles(idle_refusal([arm.name for arm, _ in others[1:]], whys))
    return {test: by_arm for test, by_arm in found.items() if by_arm}


def why_same(before: Engine, after: Engine, workload: Workload) -> str:
    """Why the steps of a test are the same work with both engines; empty where they differ."""
    was, now = before.settled.to_dict(), after.settled.to_dict()
    names = [name for name in was if was[name] != now[name]]
    if not names:
        return f"{_asked(before.toggles, after.toggles)} stand for the same values here"
    if why := idle(was, now):
        return why
    outside = {ROWS[name].acts for name in names}
    continues = workload.n_gen > 1
    if Acts.STEPS in outside or (Acts.NEXT_STEPS in outside and continues):
        return ""
    shapes = [
        side.rehearsal.from_empty(acts(workload, side.config.n_ubatch)) for side in (before, after)
    ]
    if Acts.LARGER_STEPS in outside and any(shape.n_tokens > 1 for shape in shapes[0]):
        return ""
    if shapes[0] != shapes[1]:
        return ""
    programs = before.programs_of(shapes[0]), after.programs_of(shapes[1])
    for one, other in zip_longest(*programs):
        if one is None or other is None or not same_work(one, other):
            return ""
        if Acts.FORKED_STEPS in outside and n_streams(one) > 1:
            return ""
    return f"the steps of {workload} have equal programs; " + "; ".join(map(_needs, names))


def _needs(name: str) -> str:
    row = ROWS[name]
    if row.acts != Acts.PROGRAM:
        return f"{name} acts {row.acts.words}"
    return f"{name} needs {row.needs}" if row.needs else f"{name} changes none of their commands"


def _asked(before: Toggles, after: Toggles) -> str:
    return " and ".join(differing(before, after))
