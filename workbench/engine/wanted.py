"""What toggles make of a step, before anything is placed or issued: its graph, and its modes."""

from __future__ import annotations

from workbench.config import Switch, Toggles
from workbench.engine.loaded import Loaded
from workbench.graph.defer import defer
from workbench.graph.fuse import chosen, fuse
from workbench.graph.ir import Graph, StepShape, Tensor
from workbench.model.decoder import Model, build_graph
from workbench.program.lower import choose_pdl, choose_sync


def step_graph(
    model: Model, shape: StepShape, caches: list[tuple[Tensor, Tensor]], toggles: Toggles
) -> Graph:
    """The graph of a step on `caches` (K and V of each layer), as `toggles` want it."""
    graph = build_graph(model, shape, caches, toggles.activations)
    if toggles.defer_norm == Switch.ON:
        graph = defer(graph)
    return fuse(graph, chosen(toggles))


def modes_of(toggles: Toggles, loaded: Loaded) -> tuple[str, bool]:
    """The sync mode, and whether launches are programmatic; DeviceError where the device cannot."""
    able, device = loaded.backend.capabilities, loaded.device
    sync = choose_sync(toggles.sync, toggles.copy_stream, able, device)
    return sync, choose_pdl(toggles.pdl, able, device)
