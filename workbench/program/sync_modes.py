"""How a program's copies and waits are ordered: the sync modes, and what races under them.

A sync mode is a row of `RULES`: where the host waits around the input copies of a split.
`program/lower.py` makes programs by the row. `race_of` says in words which orderings race on which
devices; `program/check/hazards.py` proves the same, command by command. `engine/choose.py` chooses
a mode for sync=auto.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from workbench import config
from workbench.program.capabilities import Capabilities


class Rule(NamedTuple):
    """Where the host waits around the input copies of a split."""

    wait_each: bool  # for the split's stream, before every copy
    wait_before: bool  # for the split's stream, once before the copies
    blocking: bool  # each copy is waited for at once
    wait_after: bool  # for the copies, once before the launches
    guarded: bool = False  # launches wait, on the device, for an event recorded after the copies
    packed: bool = False  # inputs that are neighbours on both sides are one copy


RULES: dict[str, Rule] = {
    config.SyncMode.PER_COPY: Rule(True, False, True, False),
    config.SyncMode.BLOCKING_COPIES: Rule(False, True, True, True),
    config.SyncMode.COPY_BOUNDARY: Rule(False, True, False, True),
    config.SyncMode.PACKED: Rule(False, True, False, True, packed=True),
    config.SyncMode.EVENT_GUARDED: Rule(False, True, False, False, guarded=True),
    config.SyncMode.WRITE_READ_BOUNDARY: Rule(False, False, False, True),
    config.SyncMode.PACKED_IMPLICIT: Rule(False, False, False, False, packed=True),
    config.SyncMode.IMPLICIT: Rule(False, False, False, False),
}  # from the most waits to the fewest; `auto` takes the last that is safe


class Ordering(NamedTuple):
    """The toggles that order a program's copies and waits. Once chosen, sync and copy_stream are
    never `auto`."""

    sync: str
    copy_stream: str = config.CopyStream.OWN
    host_source: str = config.HostSource.PINNED
    input_order: str = config.InputOrder.GRAPH
    step_wait: str = config.StepWait.EVERY
    n_copies: str = config.NCopies.ONE
    results: str = config.Results.COPY

    @classmethod
    def of(cls, toggles: config.Toggles) -> Ordering:
        """What an engine's toggles ask for."""
        values = toggles.to_dict()
        return cls(*(values[name] for name in cls._fields))

    @property
    def rule(self) -> Rule:
        return RULES[self.sync]

    @property
    def host_ring(self) -> int:
        """How many steps have staging memory of their own."""
        return RINGS.get(self.host_source, 1)

    @property
    def device_ring(self) -> int:
        """How many steps have memory of their own for the inputs of device splits."""
        return int(self.n_copies)

    @property
    def result_ring(self) -> int:
        """How many steps have results of their own. As many steps may be under way at once."""
        return 2 if self.results == config.Results.BEHIND else 1

    @property
    def period(self) -> int:
        """After how many steps without a wait the rings begin again. Each turn has its own
        program."""
        return math.lcm(self.host_ring, self.device_ring, self.result_ring)

    def turn_after(self, turn: int, waited: bool) -> int:
        """The turn of the step after a step of `turn`.

        waited: the host waited for that step. Then no copy of a ring is in use, and the next step
            takes the first. So tokens share one program, and one plan.

        Source: llama.cpp, `ggml_backend_sched_synchronize`: copy 0 after a synchronization.
        """
        return 0 if waited and self.result_ring == 1 else (turn + 1) % self.period


RINGS: dict[str, int] = {config.HostSource.PINNED_RING_2: 2, config.HostSource.PINNED_RING_4: 4}


def race_of(o: Ordering, able: Capabilities) -> str:
    """What races under an ordering on a backend that can honour it; empty where nothing does."""
    rule, train = o.rule, o.step_wait != config.StepWait.EVERY or o.result_ring > 1
    drained = rule.blocking or rule.wait_after  # the host goes on when the copies have landed
    apart = o.host_ring > 1  # and waits before it writes where copies are made from
    # every step under way has inputs of its own on the device
    own_inputs = o.step_wait == config.StepWait.EVERY and o.device_ring >= o.result_ring
    with_launches = able.one_order and o.copy_stream == config.CopyStream.COMPUTE
    if not able.asynchronous_copies:
        return ""
    if not (drained or rule.guarded or with_launches):
        return "nothing orders a copy before the graph that reads what it brings"
    if train and not (drained or apart):
        return "the next step's inputs are written where copies of this one have yet to read"
    if train and not (rule.wait_each or rule.wait_before or with_launches or own_inputs):
        return "copies overwrite what the graph of the step before still reads"
    return ""
