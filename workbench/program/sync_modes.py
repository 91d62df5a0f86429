"""How a program's copies and waits are ordered: the sync modes, what they ask of a backend, and
what races under them.

A sync mode is a row of `RULES`: where the host waits around the input copies of a split.
`program/lower.py` makes programs by it. `race_of` says in words which orderings are unsafe where;
`program/check/hazards.py` proves it, command by command.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from workbench import config
from workbench.errors import DeviceError, UsageError
from workbench.program.capabilities import Capabilities


class Rule(NamedTuple):
    """Where the host waits around the input copies of a split, and what that asks of a backend."""

    wait_each: bool  # for the split's stream, before every copy
    wait_before: bool  # for the split's stream, once before the copies
    blocking: bool  # each copy is waited for at once
    wait_after: bool  # for the copies, once before the launches
    guarded: bool = False  # launches wait, on the device, for an event behind the copies
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
        """How many steps have results of their own: so many may be under way."""
        return 2 if self.results == config.Results.BEHIND else 1

    @property
    def period(self) -> int:
        """After how many steps without a wait the rings come round again. Each turn has its own
        program."""
        return math.lcm(self.host_ring, self.device_ring, self.result_ring)

    def turn_after(self, turn: int, waited: bool) -> int:
        """The turn behind a step of `turn`. waited: the host waited for the step. No copy is in use
        then, and the first is taken: so tokens share one program, and one plan.

        Source: llama.cpp, `ggml_backend_sched_synchronize`: copy 0 after a synchronization.
        """
        return 0 if waited and self.result_ring == 1 else (turn + 1) % self.period


_NO_EVENTS = "it has no events"
_LOOSE = "an event does not stand behind its copies"
RINGS: dict[str, int] = {config.HostSource.PINNED_RING_2: 2, config.HostSource.PINNED_RING_4: 4}


def choose_ordering(
    wanted: Ordering, capabilities: Capabilities, device: str, unsafe: bool = False
) -> Ordering:
    """The ordering to lower with: `wanted` itself, or for sync=auto the safe mode with the fewest
    waits. (Only waits count; the copies that `packed` saves do not.)

    unsafe: a mode whose programs race is taken all the same. Raises DeviceError where the backend
    cannot honour one of the toggles, UsageError where they race.
    """
    able = capabilities
    if wanted.copy_stream == config.CopyStream.OWN and able.n_streams < 2:
        raise DeviceError(
            f"copy_stream=own needs two streams and the {device} device has {able.n_streams}; use "
            "copy_stream=compute"
        )
    if reason := _refusal_of_rings(wanted, able):
        raise DeviceError(f"the {device} device cannot honour {reason}")
    if wanted.sync == config.SyncMode.AUTO:
        modes = [_on_a_stream(wanted._replace(sync=mode), able) for mode in RULES]
        return [o for o in modes if not (_refusal(o, able) or race_of(o, able))][-1]
    wanted = _on_a_stream(wanted, able)
    if reason := _refusal(wanted, able):
        raise DeviceError(
            f"the {device} device cannot honour sync={wanted.sync}: {reason}; use sync=auto, or "
            "per_copy"
        )
    if not unsafe and (race := race_of(wanted, able)):
        toggles = [f"sync={wanted.sync}", f"copy_stream={wanted.copy_stream}"]
        if wanted.step_wait != config.StepWait.EVERY:  # then where inputs lie decides, too
            toggles += [f"host_source={wanted.host_source}", f"step_wait={wanted.step_wait}"]
        elif wanted.result_ring > 1:
            toggles += [f"host_source={wanted.host_source}", f"results={wanted.results}"]
        raise UsageError(
            f"toggles {' and '.join(toggles)} race on the {device} device: {race} (`workbench "
            "check` names the commands); use sync=auto, or unsafe to run them all the same"
        )
    return wanted


def _on_a_stream(o: Ordering, able: Capabilities) -> Ordering:
    """With the stream that a mode's copies ride by default, where none is named."""
    if o.copy_stream != config.CopyStream.AUTO:
        return o
    own = (o.rule.blocking or o.rule.guarded) and able.n_streams > 1
    return o._replace(copy_stream=config.CopyStream.OWN if own else config.CopyStream.COMPUTE)


def _refusal_of_rings(o: Ordering, able: Capabilities) -> str:
    """Which ring a backend cannot honour, why, and what to use; empty where it can. A ring needs
    events, which say when its memory comes free."""
    if o.result_ring > 1 and not (able.events and able.one_order and able.n_streams > 1):
        return f"results={o.results}: {_NO_EVENTS}; use results={config.Results.COPY}"
    ring = f"host_source={o.host_source}", f"use host_source={config.HostSource.PINNED}"
    if o.host_ring > 1 and not able.events:
        return f"{ring[0]}: {_NO_EVENTS}; {ring[1]}"
    if o.host_ring > 1 and not able.one_order:
        return f"{ring[0]}: {_LOOSE}; {ring[1]}"
    if o.device_ring > 1 and not able.events:
        return f"n_copies={o.n_copies}: {_NO_EVENTS}; use n_copies={config.NCopies.ONE}"
    return ""


def _refusal(o: Ordering, able: Capabilities) -> str:
    """Why a backend cannot honour a mode; empty where it can. Modes that block always work."""
    if not o.rule.blocking and not able.asynchronous_copies:
        return "its copies are not asynchronous"
    if o.rule.guarded and not able.events:
        return _NO_EVENTS
    if o.rule.guarded and able.n_streams < 2:
        return "it has one stream, and the event orders two"
    if o.rule.guarded and not able.one_order:
        return _LOOSE
    return ""


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


def choose_pdl(pdl: str, capabilities: Capabilities, device: str) -> bool:
    """Whether launches may be programmatic. Raises DeviceError where the backend cannot do it."""
    if pdl == config.Switch.ON and not capabilities.programmatic:
        raise DeviceError(
            f"the {device} device cannot honour pdl=on: it has no programmatic dependent launch "
            "(CUDA, compute capability 9.0 or later); use pdl=off"
        )
    return pdl == config.Switch.ON
