"""Which toggles an engine has on a device, and how its copies, waits and launches are ordered."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from workbench.backend.plan import check_ahead
from workbench.choices import AttnKernel
from workbench.config import BEST, TogglePreset, Toggles
from workbench.engine.loaded import Loaded
from workbench.errors import DeviceError, UsageError, WorkbenchError
from workbench.graph.attend import attend_by
from workbench.graph.ir import StepShape
from workbench.model.decoder import build_graph
from workbench.presets import FOR, best_set, set_for
from workbench.program.branches import choose_streams
from workbench.program.plans import choose_scope
from workbench.program.split import assign
from workbench.program.sync_modes import Ordering, choose_ordering, choose_pdl

Wanted = Toggles | TogglePreset | str | None  # a preset's name; None: `best`
# toggles that variants of an engine will have, or what makes them of the engine's own
Variants = Sequence[Wanted] | Callable[[Toggles], Sequence[Wanted]]
# toggle of a set that won together -> the one that it says more of, and is nothing without
SAYS_MORE_OF = {"plan_end": "launch_ahead"}


def as_preset(wanted: Wanted) -> TogglePreset | None:
    """The preset that is meant; None where the toggles themselves are given."""
    if isinstance(wanted, Toggles | TogglePreset):
        return wanted if isinstance(wanted, TogglePreset) else None
    return TogglePreset(wanted or BEST)


def resolve(wanted: Wanted, loaded: Loaded) -> Toggles:
    """The toggles that are meant on a device. `best` has each value that won on such a device, for
    one sequence or for several, and that the backend can honour. Values that won together it has as
    a whole, with the changes, or not at all. A value that refines another is left out where that
    other is. Raises UsageError for a change that clashes with a preset."""
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
    gone = {name for name, value in together.items() if preset.changes.get(name, value) != value}
    whole = values | {k: v for k, v in together.items() if SAYS_MORE_OF.get(k) not in gone}
    return preset.toggles(whole if _honours(preset, whole, loaded) else values)


def _which(preset: TogglePreset, loaded: Loaded) -> str:
    """For how many sequences `best` is meant: `one` or `several`."""
    return set_for(preset.n_seqs or loaded.config.n_seqs)


def _honours(preset: TogglePreset, values: Mapping[str, str], loaded: Loaded) -> bool:
    """Whether a device can have these values of a preset, with its changes."""
    able, device = loaded.backend.capabilities, loaded.device
    try:
        toggles = preset.toggles(values)
        ordering = choose_ordering(Ordering.of(toggles), able, device)
        choose_pdl(toggles.pdl, able, device)
        choose_scope(toggles.plans, toggles.plan_scope, ordering, able, device)
        check_ahead(toggles, ordering, len(loaded.backends) - 1)
        choose_streams(toggles.streams, able, device)
    except WorkbenchError:
        return False
    return True


class Chosen(NamedTuple):
    """What an engine has. ordering: with the sync mode and the stream that stand for `auto`.
    programmatic: whether launches are. plan_scope: what is in plans, empty where there are none.
    n_streams: on how many a step may compute. preset: its name with the changes, or `as given`; of
    `best` also for how many sequences. words: the kind of device and all that differs from the
    baseline: `best for one sequence on cuda: sync=packed, fuse=on`."""

    toggles: Toggles
    ordering: Ordering
    programmatic: bool
    plan_scope: str
    n_streams: int
    preset: str
    words: str


def choose(wanted: Wanted, loaded: Loaded) -> Chosen:
    """What is meant, on a device that can honour it. Raises DeviceError where the device cannot,
    UsageError where the toggles are known to race."""
    able, device = loaded.backend.capabilities, loaded.device
    if len(loaded.backends) > 2 and not able.in_stream:
        raise DeviceError(
            f"the {device} device cannot share layers with another (n_devices="
            f"{len(loaded.backends) - 1}): its copies and events have no common order; use one"
        )
    toggles, preset = resolve(wanted, loaded), as_preset(wanted)
    try:
        ordering = choose_ordering(Ordering.of(toggles), able, device, loaded.config.unsafe)
        programmatic = choose_pdl(toggles.pdl, able, device)
        scope = choose_scope(toggles.plans, toggles.plan_scope, ordering, able, device)
        check_ahead(toggles, ordering, len(loaded.backends) - 1)
        n_streams = choose_streams(toggles.streams, able, device)
        _check_attention(toggles, loaded)
    except (DeviceError, UsageError) as error:
        if preset is None:
            raise
        raise type(error)(f"{error}{_whose(str(error), toggles, preset)}") from None
    name = str(preset or "as given")
    if preset is not None and preset.of_device:
        sized = f"{preset.name} {FOR[_which(preset, loaded)]}"
        name = name.replace(preset.name, sized, 1)
    shown = str(toggles).replace("sync=auto", f"sync=auto ({ordering.sync})", 1)
    words = f"{name} on {device}: {shown}"
    return Chosen(toggles, ordering, programmatic, scope, n_streams, name, words)


def _check_attention(toggles: Toggles, loaded: Loaded) -> None:
    """Raises DeviceError where a backend lacks the kernels that attention is to be computed by."""
    if toggles.attn_kernel == AttnKernel.AUTO:
        return
    model, n_kv = loaded.model, loaded.config.n_kv_pad
    graph = build_graph(model, StepShape(1, 1, n_kv), model.caches(n_kv))
    chosen = attend_by(graph, toggles.attn_kernel, toggles.kv_parts)
    for node, b in assign(chosen.nodes, loaded.placement.fixed).items():
        if node.op == "attention" and (why := loaded.backends[b].refuses(node)):
            raise DeviceError(why)


def _whose(message: str, toggles: Toggles, preset: TogglePreset) -> str:
    """Which of the toggles that a refusal names are a preset's; empty for none."""
    own = [
        f"{name}={value}"
        for name, value in toggles.changed().items()
        if f"{name}={value}" in message and name not in preset.changes
    ]
    are = "is" if len(own) == 1 else "are"
    return f"; {' and '.join(own)} {are} of preset {preset.name}" if own else ""
