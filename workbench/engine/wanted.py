"""What toggles make of a step, before anything is placed or issued: its graph, and its modes."""

from __future__ import annotations

from collections.abc import Callable

from workbench.config import Switch, Toggles
from workbench.engine.loaded import Loaded
from workbench.engine.placement import Placement
from workbench.errors import DeviceError
from workbench.graph.defer import defer
from workbench.graph.fuse import chosen, fuse
from workbench.graph.ir import Graph, Node, StepShape, Tensor
from workbench.model.decoder import Model, build_graph
from workbench.program.ordering import Ordering, choose_ordering, choose_pdl
from workbench.program.split import assign


def step_graph(
    model: Model,
    shape: StepShape,
    caches: list[tuple[Tensor, Tensor]],
    toggles: Toggles,
    placement: Placement,
) -> tuple[Graph, Callable[[Node], int]]:
    """The graph of a step on `caches` (K and V of each layer), as `toggles` want it, and the
    backend of each of its nodes."""
    graph = build_graph(model, shape, caches, toggles.activations)
    if toggles.defer_norm == Switch.ON:
        graph = defer(graph)
    places = assign(graph.nodes, placement.fixed)
    fused = fuse(graph, chosen(toggles), places.__getitem__)
    return fused, lambda node: places[node.parts[0] if node.parts else node]


def modes_of(toggles: Toggles, loaded: Loaded) -> tuple[Ordering, bool]:
    """How copies and waits are ordered, and whether launches are programmatic; DeviceError where
    the device cannot, UsageError where the toggles are known to race."""
    able, device = loaded.backend.capabilities, loaded.device
    wanted = Ordering(
        toggles.sync,
        toggles.copy_stream,
        toggles.host_source,
        toggles.input_order,
        toggles.step_wait,
        toggles.n_copies,
    )
    if len(loaded.backends) > 2 and not able.in_stream:
        raise DeviceError(
            f"the {device} device cannot share layers with another (n_devices="
            f"{len(loaded.backends) - 1}): its copies and events have no common order; use one"
        )
    ordering = choose_ordering(wanted, able, device, loaded.config.unsafe)
    return ordering, choose_pdl(toggles.pdl, able, device)
