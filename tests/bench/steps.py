"""Decode steps of llama-3-8b in Q4_0, lowered without a file: shapes, and no weights."""

from __future__ import annotations

from tests.graphs import Decoder
from workbench.graph.ir import Q4_0, Kind, StepShape
from workbench.model.decoder import build_graph
from workbench.program.commands import DEVICE, HOST, Buffer, Program, Range, Space
from workbench.program.layout import Target, lay_out
from workbench.program.lower import lower
from workbench.program.split import split
from workbench.program.sync_modes import Ordering


class Steps:
    """The model on a device: everything of a step but computing. Copies have their own stream, and
    every copy a wait. n_cells: of its cache."""

    def __init__(self, n_cells: int):
        self.decoder = Decoder("llama-3-8b", Q4_0)
        self.caches = self.decoder.caches(n_cells)
        self.ordering, self.buffers = Ordering("per_copy"), dict[str, Buffer]()
        self.targets = [Target(name, lambda node: 0) for name in ("host", "null")]
        graph = build_graph(self.decoder, StepShape(1, 1, 256), self.caches)
        used = {t.storage for n in graph.nodes for t in (*n.inputs, *n.outputs)}
        self.residents = {
            t: Range(Buffer(t.name, Space.DEVICE, t.nbytes, DEVICE), 0, t.nbytes)
            for t in used if t.kind in (Kind.WEIGHT, Kind.CACHE)
        }  # fmt: skip

    def program(self, n_kv: int = 256) -> Program:
        graph = build_graph(self.decoder, StepShape(1, 1, n_kv), self.caches)
        splits = split(graph, self._backend_of)
        layout = lay_out(
            graph, splits, [self.residents] * 2, self.targets, self.ordering, 0, self.buffers
        )
        return lower(graph, splits, layout, self.targets, self.ordering)

    def _backend_of(self, node):
        embeds = node.op == "get_rows" and node.inputs[0] is self.decoder.embedding
        return HOST if embeds else DEVICE
