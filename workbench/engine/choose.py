"""Which toggles an engine has on a device: the one place that chooses, and that refuses.

    wanted     toggles, the name of a preset, or nothing
      |            resolve: values of `best` for the device and the number of sequences
    toggles    what results name
      |            settle: a value for `auto`; refusals
    settled    what programs, plans and branches are made by

What a value needs of a device and of other toggles stands in its row (`config/table.py`). What the
rooms are given then can be honoured, and they ask nothing again.

Some values of `auto` follow from the shape of a step. The room that knows the shape picks them, by
a rule of its own: `branch_fusion` with several streams, `kv_parts`, `skip_masked_kv`, and a
backend's `attn_kernel`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from workbench.common.errors import DeviceError, UsageError, WorkbenchError
from workbench.config import (
    BEST,
    AttnKernel,
    CopyStream,
    LaunchAhead,
    Pdl,
    PlanRule,
    SampleOn,
    StepWait,
    SyncMode,
    TogglePreset,
    Toggles,
    asked_toggles,
)
from workbench.config.presets import FOR, best_set, set_for
from workbench.config.table import ROWS, Auto, Need, Want, facts_of
from workbench.engine.load import Loaded
from workbench.graph.attend import attend_by
from workbench.graph.ir import StepShape
from workbench.model.decoder import build_graph
from workbench.program.capabilities import Capabilities
from workbench.program.commands import HOST
from workbench.program.split import assign
from workbench.program.sync_modes import RULES, Ordering, race_of

AUTO = "auto"
# what a person may ask for: a preset by its name; changes of `best`, as `sync=packed` or as a
# mapping; None: `best`
Wanted = Toggles | TogglePreset | Mapping[str, Any] | str | None
# toggles that variants of an engine will have, or what makes them of the engine's own
Variants = Sequence[Wanted] | Callable[[Toggles], Sequence[Wanted]]


class Chosen(NamedTuple):
    """The toggles of an engine, chosen.

    toggles: as they were asked for, with `auto`.
    settled: as `settle` returns them.
    preset: the preset's name with the changes, or `as given`; `best` also says for how many
        sequences.
    words: the kind of device, and all that differs from the baseline:
        `best for one sequence on cuda: sync=packed, fuse=on`.
    """

    toggles: Toggles
    settled: Toggles
    preset: str
    words: str

    @property
    def ordering(self) -> Ordering:
        """How copies and waits are ordered, with nothing at `auto`."""
        return Ordering.of(self.settled)

    @property
    def programmatic(self) -> bool:
        """Whether launches may be programmatic."""
        return self.settled.pdl == Pdl.ON

    @property
    def plan_scope(self) -> str:
        """What is in plans; empty where there are none."""
        return "" if self.settled.plans == PlanRule.OFF else self.settled.plan_scope

    @property
    def n_streams(self) -> int:
        """On how many streams a step may compute."""
        return int(self.settled.streams)


def choose(wanted: Wanted, loaded: Loaded) -> Chosen:
    """The toggles that `wanted` means on a device. Raises DeviceError where the device cannot
    honour them, UsageError where they are known to race."""
    able, device, n_devices = loaded.backend.capabilities, loaded.device, len(loaded.backends) - 1
    toggles, preset = resolve(wanted, loaded), as_preset(wanted)
    try:
        settled = settle(toggles, able, device, n_devices, loaded.config.unsafe)
        _check_attention(settled, loaded)
        _check_draws(settled, loaded)
    except (DeviceError, UsageError) as error:
        if preset is None:
            raise
        raise type(error)(f"{error}{_whose(str(error), toggles, preset)}") from None
    name = str(preset or "as given")
    if preset is not None and preset.of_device:
        sized = f"{preset.name} {FOR[_which(preset, loaded)]}"
        name = name.replace(preset.name, sized, 1)
    shown = str(toggles).replace("sync=auto", f"sync=auto ({settled.sync})", 1)
    return Chosen(toggles, settled, name, f"{name} on {device}: {shown}")


# presets ------------------------------------------------------------------------------------------


def as_preset(wanted: Wanted) -> TogglePreset | None:
    """The preset that `wanted` means; None where it is Toggles."""
    found = asked_toggles(wanted, TogglePreset(BEST))
    return found if isinstance(found, TogglePreset) else None


def resolve(wanted: Wanted, loaded: Loaded) -> Toggles:
    """The toggles that `wanted` means on a device. Of `best` they are the values that won on such a
    device, for one sequence or for several, and that the device can honour. Values that won
    together are taken together, with the changes, or not at all. A value that refines another is
    left out where the other is changed to off. Raises UsageError for a change that clashes with a
    preset.
    """
    if isinstance(wanted, Toggles):
        return wanted
    preset = as_preset(wanted)
    assert preset is not None
    if not preset.of_device:
        return preset.toggles()
    values, best = dict[str, str](), best_set(loaded.device, _which(preset, loaded))
    for name, value in best.alone.items():
        more = values | {name: value}
        if _honours(TogglePreset(BEST), more, loaded):
            values = more
    together = best.together
    gone = {name for name, value in preset.changes.items() if value == ROWS[name].off}
    whole = values | {k: v for k, v in together.items() if ROWS[k].refines not in gone}
    return preset.toggles(whole if _honours(preset, whole, loaded) else values)


def _which(preset: TogglePreset, loaded: Loaded) -> str:
    """The set of `best` that is meant: `one` or `several`."""
    return set_for(preset.n_seqs or loaded.config.n_seqs)


def _honours(preset: TogglePreset, values: Mapping[str, str], loaded: Loaded) -> bool:
    """Whether a device can have these values of a preset, with its changes."""
    able, n_devices = loaded.backend.capabilities, len(loaded.backends) - 1
    try:
        settle(preset.toggles(values), able, loaded.device, n_devices)
    except WorkbenchError:
        return False
    return True


def _whose(message: str, toggles: Toggles, preset: TogglePreset) -> str:
    """Words on those toggles in a refusal that come from a preset; empty where none does."""
    own = [
        f"{name}={value}"
        for name, value in toggles.changed().items()
        if f"{name}={value}" in message and name not in preset.changes
    ]
    are = "is" if len(own) == 1 else "are"
    return f"; {' and '.join(own)} {are} of preset {preset.name}" if own else ""


# auto, and what a device honours ------------------------------------------------------------------


def settle(
    toggles: Toggles, able: Capabilities, device: str, n_devices: int = 1, unsafe: bool = False
) -> Toggles:
    """The toggles with a value in place of each `auto` that means the same in every step.

    able, device: the device's capabilities, and its name.
    unsafe: an ordering that races is taken all the same.

    Raises DeviceError where the device lacks what a value needs. Raises UsageError where another
    toggle is not as a value needs it, and for an ordering that races.
    """
    ordering = choose_ordering(Ordering.of(toggles), able, device, unsafe)
    values = toggles.to_dict() | {"sync": ordering.sync, "copy_stream": ordering.copy_stream}
    for auto in [fact for name, value in values.items() for fact in facts_of(name, value, Auto)]:
        if values[auto.toggle] == AUTO:
            values[auto.toggle] = auto.value
    for name, value in values.items():
        if name not in Ordering._fields:
            _refuse_lacking(name, value, able, device)
        _refuse_unwanted(name, value, values)
    if values["launch_ahead"] == LaunchAhead.ON and n_devices > 1:
        raise UsageError(
            f"launch_ahead=on is for one device, not {n_devices}: plans of several devices wait "
            "for each other; use n_devices=1, or launch_ahead=off"
        )
    return replace(toggles, **values)


def choose_ordering(
    wanted: Ordering, able: Capabilities, device: str, unsafe: bool = False
) -> Ordering:
    """The ordering to lower with: `wanted` itself, or, for sync=auto, the safe mode with the fewest
    waits. (Only waits count; the copies that `packed` saves do not.)

    unsafe: a mode whose programs race is taken all the same.

    Raises DeviceError where the device cannot honour one of the toggles, UsageError where they
    race.
    """
    for name in ("copy_stream", "results", "host_source", "n_copies"):
        _refuse_lacking(name, wanted._asdict()[name], able, device)
    if wanted.sync == SyncMode.AUTO:
        modes = [_on_a_stream(wanted._replace(sync=mode), able) for mode in RULES]
        return [o for o in modes if not (lacking("sync", o.sync, able) or race_of(o, able))][-1]
    wanted = _on_a_stream(wanted, able)
    _refuse_lacking("sync", wanted.sync, able, device)
    if not unsafe and (race := race_of(wanted, able)):
        toggles = [f"sync={wanted.sync}", f"copy_stream={wanted.copy_stream}"]
        if wanted.step_wait != StepWait.EVERY:  # then where inputs lie decides, too
            toggles += [f"host_source={wanted.host_source}", f"step_wait={wanted.step_wait}"]
        elif wanted.result_ring > 1:
            toggles += [f"host_source={wanted.host_source}", f"results={wanted.results}"]
        raise UsageError(
            f"toggles {' and '.join(toggles)} race on the {device} device: {race} (`workbench "
            "check` names the commands); use sync=auto, or unsafe to run them all the same"
        )
    return wanted


def _on_a_stream(o: Ordering, able: Capabilities) -> Ordering:
    """The ordering, with the stream that the mode's copies ride by default where none is named."""
    if o.copy_stream != CopyStream.AUTO:
        return o
    own = (o.rule.blocking or o.rule.guarded) and able.n_streams > 1
    return o._replace(copy_stream=CopyStream.OWN if own else CopyStream.COMPUTE)


def lacking(name: str, value: str, able: Capabilities) -> Need | None:
    """The first capability that a value of a toggle needs and a device lacks."""
    needs = facts_of(name, value, Need)
    return next((need for need in needs if getattr(able, need.capability) < need.least), None)


def _refuse_lacking(name: str, value: str, able: Capabilities, device: str) -> None:
    if need := lacking(name, value, able):
        has = int(getattr(able, need.capability))
        use = ROWS[name].use
        toggle = f"{name}={value}"
        raise DeviceError(
            need.line.format(device=device, toggle=toggle, why=need.why, use=use, has=has)
        )


def _refuse_unwanted(name: str, value: str, values: Mapping[str, str]) -> None:
    for want in facts_of(name, value, Want):
        other, has = want.toggle, values[want.toggle]
        counts = not want.beside or values[want.beside] != ROWS[want.beside].off
        if counts and has not in want.values:
            raise UsageError(
                f"toggles {name}={value} and {other}={has} clash: {want.why}; use "
                f"{other}={want.values[0]}, or {name}={ROWS[name].off}"
            )


def _check_attention(toggles: Toggles, loaded: Loaded) -> None:
    """Raises DeviceError where a backend lacks the kernels that compute attention as asked for."""
    if toggles.attn_kernel == AttnKernel.AUTO:
        return
    model, n_kv = loaded.model, loaded.config.n_kv_pad
    graph = build_graph(model, StepShape(1, 1, n_kv), model.caches(n_kv))
    chosen = attend_by(graph, toggles.attn_kernel, toggles.kv_parts)
    for node, b in assign(chosen.nodes, loaded.placement.fixed).items():
        if node.op == "attention" and (why := loaded.backends[b].refuses(node)):
            raise DeviceError(why)


def _check_draws(toggles: Toggles, loaded: Loaded) -> None:
    """Raises UsageError where a device is to draw tokens and has not all layers."""
    backends = {loaded.placement.of_cache(i) for i in range(loaded.model.n_layer)}
    if toggles.sampling == SampleOn.DEVICE and (HOST in backends or len(backends) > 1):
        raise UsageError(
            "sampling=device wants all layers on one device, which looks up its own tokens; use "
            "n_gpu_layers=-1 and n_devices=1, or sampling=host"
        )
