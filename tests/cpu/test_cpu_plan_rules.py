"""The rules of `backend/plan/life.py` on the embedded device: whatever changes between two calls,
the call computes what the work says now."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.backend.cpu.device_kernels import address, mix
from tests.backend.plan.plannable import planned
from workbench.backend.plan.life import Plans, Policy
from workbench.config import Toggles
from workbench.graph.ir import StepShape

WORDS = 64
RULES = ("ours", "pr", "today")


class Steps:
    """Calls of one work under a rule: a kernel and a copy of it, on memory that `patch` may change.
    uids: whether each patched work is told from the one before; else uid 0, which says nothing."""

    def __init__(self, device: Any, rule: str, uids: bool):
        self.device, self.plans = device, Plans(Policy.of(Toggles(plans=rule)))
        self.memory = np.arange(6 * WORDS).reshape(6, WORDS)
        self.dst, self.src, self.out, self.value, self.parts, self.words = 0, 1, 2, 5, 1, WORDS
        self.uid, self._uids = 0, uids
        self.bind()

    def bind(self) -> None:
        """A new work, as a rebuilt step has."""
        device = self.device
        dst, src, out = (address(self.memory[b]) for b in (self.dst, self.src, self.out))
        ring = device.streams[0]
        args = (dst, src, self.words, self.value, 0)
        kernel = ring.prepare(mix.address, self.parts, args, (0, 1))
        copy = device.copy(out, dst, 8 * self.words, 0, to_host=False)
        self.uid += self._uids
        self.work = planned(device, [(kernel, 0), (copy, 0)], uid=self.uid)
        program: Any = SimpleNamespace(
            splits=[0, 1], shape=StepShape(1, 1, 256), commands=[None] * 3
        )
        call_of = self.plans.call_of(program)
        assert call_of is not None
        self.call = call_of(self.work).call

    def patch(self, field: int, value: int) -> None:
        self.work.parts[0].block[field] = value
        self.uid += self._uids
        self.work.uid = self.uid

    def check(self) -> None:
        """One call, and what it computes."""
        wanted, n = self.memory.copy(), self.words
        wanted[self.dst, :n] = 3 * wanted[self.dst, :n] + wanted[self.src, :n] + self.value
        wanted[self.out, :n] = wanted[self.dst, :n]
        self.call()
        self.device.synchronize()
        np.testing.assert_array_equal(self.memory, wanted)

    def counts(self) -> dict[str, int]:
        kinds = ("captured", "twinned", "updated", "reinstantiated", "replayed", "issued")
        return {kind: n for kind in kinds if (n := self.plans.counts[f"plans_{kind}"])}


CHANGES = {
    "a pointer": {"src": 3},
    "another pointer": {"out": 4},
    "a parameter": {"value": 7},
    "a shape": {"words": WORDS // 2},
    "the shape of a launch": {"parts": 3},
}
ADDRESSES = ("a pointer", "another pointer")


def expected(rule: str, change: str, uids: bool) -> dict[str, int]:
    """Of three calls, a change, and three calls."""
    alike = change != "the shape of a launch"  # of one topology
    if rule == "ours":  # an update where only addresses differ, and the plan's work is gone
        return {"captured": 1, "updated": 1, "replayed": 6} if change in ADDRESSES else {
            "captured": 2, "replayed": 6,
        }  # fmt: skip
    found = {"captured": 1, "updated" if alike else "reinstantiated": 1}
    if rule == "today":  # the changed call is issued, as the very first is
        return found | {"replayed": 4, "issued": 2}
    if not uids:  # what may be new is updated without a look
        found["updated"] = 5 if alike else 4
    return found | {"replayed": 6}


@pytest.mark.parametrize("uids", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rule", RULES)
def test_a_change_alone_forces_an_update_or_another_plan(two, rule, change, uids):
    steps = Steps(two, rule, uids)
    for _ in range(3):
        steps.check()
    for name, value in CHANGES[change].items():
        setattr(steps, name, value)
    steps.bind()
    for _ in range(3):
        steps.check()
    assert steps.counts() == expected(rule, change, uids)


@pytest.mark.parametrize("uids", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_a_work_that_is_patched_in_place(two, rule, uids):
    """A pointer, then a parameter, then both as they were; without a uid, a comparison tells."""
    steps = Steps(two, rule, uids)
    changes = [(1, address(steps.memory[3]), "src", 3), (3, 9, "value", 9),
               (1, address(steps.memory[1]), "src", 1), (3, 5, "value", 5)]  # fmt: skip
    steps.check()
    steps.check()
    for field, word, name, value in changes:
        steps.patch(field, word)
        setattr(steps, name, value)
        steps.check()
        steps.check()
    counts = steps.counts()
    assert counts["replayed"] + counts.get("issued", 0) == 10
    assert (
        counts
        == {
            # the last change makes it what the first plan was but for an address
            "ours": {"captured": 2, "twinned": 1, "updated": 2, "replayed": 10},
            "pr": {"captured": 1, "updated": 4 if uids else 9, "replayed": 10},
            "today": {"captured": 1, "updated": 4, "replayed": 5, "issued": 5},
        }[rule]
    )


def test_equal_uids_are_not_looked_at_and_uid_0_always_is(two):
    """With a uid that nobody renewed, a replay is of the old value: who patches says so."""
    old, strict = Steps(two, "ours", uids=True), Steps(two, "ours", uids=False)
    for steps in (old, strict):
        steps.check()
        steps.work.parts[0].block[3] = 9
    strict.value = 9
    strict.check()
    old.check()
