"""Which toggles an engine has, and what they make of a step before anything is placed or issued:
its graph, and its modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.config import BEST, Switch, TogglePreset, Toggles
from workbench.engine.loaded import Loaded
from workbench.engine.placement import Placement
from workbench.errors import DeviceError, UsageError, WorkbenchError
from workbench.graph.defer import defer
from workbench.graph.fuse import chosen, fuse
from workbench.graph.ir import Graph, Node, StepShape, Tensor
from workbench.model.decoder import Model, build_graph
from workbench.model.shift import shift_graph
from workbench.program.capabilities import Capabilities
from workbench.program.split import assign
from workbench.program.sync_modes import Ordering, choose_ordering, choose_pdl
from workbench.toggles import best_table

Wanted = Toggles | TogglePreset | str | None  # a preset's name; None: `best`
# toggles that variants of an engine will have, or what makes them of the engine's own
Variants = Sequence[Wanted] | Callable[[Toggles], Sequence[Wanted]]


def as_preset(wanted: Wanted) -> TogglePreset | None:
    """The preset that is meant; None where the toggles themselves are given."""
    if isinstance(wanted, Toggles | TogglePreset):
        return wanted if isinstance(wanted, TogglePreset) else None
    return TogglePreset(wanted or BEST)


def resolve(wanted: Wanted, loaded: Loaded) -> Toggles:
    """The toggles that are meant on a device. Of `best`, each value in the table of the device's
    kind that its backend can honour. Raises UsageError for a change that clashes with a preset."""
    if isinstance(wanted, Toggles):
        return wanted
    preset = as_preset(wanted)
    assert preset is not None
    if not preset.of_device:
        return preset.toggles()
    able, values = loaded.backend.capabilities, dict[str, str]()
    for name, value in best_table().get(loaded.device, {}).items():
        more = values | {name: value}
        if _honours(TogglePreset(BEST).toggles(more), able, loaded.device):
            values = more
    return preset.toggles(values)


def _honours(toggles: Toggles, able: Capabilities, device: str) -> bool:
    try:
        _modes(toggles, able, device, unsafe=False)
    except WorkbenchError:
        return False
    return True


def said(wanted: Wanted, toggles: Toggles, device: str, sync_mode: str) -> tuple[str, str]:
    """What the toggles are called: a preset with its changes, or `as given`. And a line with the
    kind of device and all that differs from the baseline: `best on cuda: sync=packed, fuse=on`."""
    name = str(as_preset(wanted) or "as given")
    shown = str(toggles).replace("sync=auto", f"sync=auto ({sync_mode})", 1)
    return name, f"{name} on {device}: {shown}"


def step_graph(
    model: Model,
    shape: StepShape,
    caches: list[tuple[Tensor, Tensor]],
    toggles: Toggles,
    placement: Placement,
) -> tuple[Graph, Callable[[Node], int]]:
    """The graph of a step on `caches` (K and V of each layer), as `toggles` want it, and the
    backend of each of its nodes."""
    if shape.n_tokens:
        graph = build_graph(model, shape, caches, toggles.activations)
    else:
        graph = shift_graph(model, caches, shape.n_kv)
    if toggles.defer_norm == Switch.ON:
        graph = defer(graph)
    places = assign(graph.nodes, placement.fixed)
    fused = fuse(graph, chosen(toggles), places.__getitem__)
    return fused, lambda node: places[node.parts[0] if node.parts else node]


def modes_of(wanted: Wanted, loaded: Loaded) -> tuple[Ordering, bool]:
    """How copies and waits are ordered, and whether launches are programmatic; DeviceError where
    the device cannot, UsageError where the toggles are known to race."""
    able, device = loaded.backend.capabilities, loaded.device
    if len(loaded.backends) > 2 and not able.in_stream:
        raise DeviceError(
            f"the {device} device cannot share layers with another (n_devices="
            f"{len(loaded.backends) - 1}): its copies and events have no common order; use one"
        )
    toggles, preset = resolve(wanted, loaded), as_preset(wanted)
    try:
        return _modes(toggles, able, device, loaded.config.unsafe)
    except (DeviceError, UsageError) as error:
        if preset is None:
            raise
        raise type(error)(f"{error}{_whose(str(error), toggles, preset)}") from None


def _modes(
    toggles: Toggles, able: Capabilities, device: str, unsafe: bool
) -> tuple[Ordering, bool]:
    wanted = Ordering(
        toggles.sync,
        toggles.copy_stream,
        toggles.host_source,
        toggles.input_order,
        toggles.step_wait,
        toggles.n_copies,
    )
    ordering = choose_ordering(wanted, able, device, unsafe)
    return ordering, choose_pdl(toggles.pdl, able, device)


def _whose(message: str, toggles: Toggles, preset: TogglePreset) -> str:
    """Which of the toggles that a refusal names are a preset's; empty for none."""
    own = [
        f"{name}={value}"
        for name, value in toggles.changed().items()
        if f"{name}={value}" in message and name not in preset.changes
    ]
    are = "is" if len(own) == 1 else "are"
    return f"; {' and '.join(own)} {are} of preset {preset.name}" if own else ""
