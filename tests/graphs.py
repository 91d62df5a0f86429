"""Graphs of decoders without a model file: any preset's shape, weight types and biases at will."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from workbench.config import Activations, Fork
from workbench.graph.branch_fusion import branch_numbers
from workbench.graph.defer import defer
from workbench.graph.fuse import fuse
from workbench.graph.ir import F16, F32, I64, Q8_ACT, DType, Graph, Kind, Node, StepShape, Tensor
from workbench.model.blocks import BLOCKS, Caches, WeightSpec
from workbench.model.decoder import build_graph
from workbench.model.gguf.quants import quantize_activations, random_blocks
from workbench.model.hparams import HParams
from workbench.model.synth.shapes import Preset, find_preset, tensors

SPECS = [spec for block in BLOCKS.values() for spec in block.specs]
PRODUCTS = tuple(s.name.removesuffix(".bias") for s in SPECS if s.optional)  # that may have a bias


class Decoder:
    """What `build_graph` asks of a Model: tensors of a preset's shapes, and no bytes.

    dtypes: types of single products by name (`attn_v`), all others are `dtype`. biases: products
    that have one, besides those of the preset.
    """

    def __init__(
        self, preset: Preset | str, dtype: DType, dtypes: Mapping[str, DType] | None = None,
        biases: Collection[str] = (), **fields: Any,
    ):  # fmt: skip
        known = find_preset(preset) if isinstance(preset, str) else preset
        p = dataclasses.replace(known, **fields)
        self.hparams = HParams(
            p.arch, p.n_layer, p.n_embd, p.n_ff, p.n_head, p.n_head_kv, p.head_dim, p.head_dim,
            p.n_ctx, p.eps, p.rope_base, 1.0,
        )  # fmt: skip
        found: dict[str, Tensor] = {}
        for spec in tensors(p):
            part = spec.name.split(".")[-2]
            own = F32 if len(spec.shape) == 1 else (dtypes or {}).get(part, dtype)
            found[spec.name] = Tensor(spec.name, own, spec.shape, Kind.WEIGHT)
        self.embedding = found["token_embd.weight"]
        self.output = found.get("output.weight", self.embedding)
        self.output_norm = found["output_norm.weight"]
        self.rope_freqs = found.get("rope_freqs.weight")
        self.blocks = [BLOCKS[name] for name in self.hparams.traits.blocks]
        self.layers = [self._layer(found, i, biases) for i in range(p.n_layer)]

    def _layer(self, found: dict[str, Tensor], i: int, biases: Collection[str]) -> tuple[Any, ...]:
        def take(spec: WeightSpec) -> Tensor | None:
            name = f"blk.{i}.{spec.name}"
            if spec.optional and name not in found and spec.name.removesuffix(".bias") in biases:
                return Tensor(name, F32, spec.shape(self.hparams), Kind.WEIGHT)
            return found.get(name) if spec.optional else found[name]

        return tuple(block.take(self.hparams, take) for block in self.blocks)

    def caches(self, n_cells: int) -> Caches:
        """K and V of each layer, as `Model.caches` has them."""
        shape = (n_cells, self.hparams.n_embd_kv)
        pairs = [[Tensor(f"cache_{n}_l{i}", F16, shape, Kind.CACHE) for n in "kv"]
                 for i in range(self.hparams.n_layer)]  # fmt: skip
        return [(k, v) for k, v in pairs]

    def graph(
        self, n_tokens: int = 1, n_outputs: int = 1, n_kv: int = 64,
        activations: str = Activations.Q8, n_cells: int = 96, deferred: bool = False,
    ) -> Graph:  # fmt: skip
        """The unfused graph of one step, on caches of its own; `deferred`: with halved norms."""
        model: Any = self
        shape = StepShape(n_tokens, n_outputs, n_kv)
        graph = build_graph(model, shape, self.caches(n_cells), activations)
        return defer(graph) if deferred else graph


def fused_nodes(graph: Graph, fusions: Collection[str], inside: bool = False) -> Iterator[Node]:
    """The fused nodes of `graph`, one of each combination of op, parts and shapes. inside: of its
    branches alone."""
    seen = set()
    numbers = branch_numbers(graph, lambda node: 0, Fork.ANY) if inside else None
    for node in fuse(graph, fusions, branch_of=numbers).nodes:
        shapes = tuple((t.dtype, t.shape) for t in (*node.inputs, *node.outputs))
        key = node.op, tuple(part.op for part in node.parts), shapes
        if node.parts and key not in seen:
            seen.add(key)
            yield node


def wiring(node: Node) -> tuple:
    """What a launch follows from: ops and parameters of the parts, types and shapes of what they
    read and make, and which of it is the same. Names and layers are no part of it."""
    number: dict[Tensor, int] = {}

    def of(tensors: Iterable[Tensor]) -> tuple:
        return tuple((t.dtype, t.shape, t.kind, number.setdefault(t.storage, len(number)))
                     for t in tensors)  # fmt: skip

    parts = tuple((part.op, repr(sorted(part.params.items())), of((*part.inputs, part.output)))
                  for part in node.parts)  # fmt: skip
    return node.op, parts, of(node.inputs), of(node.outputs)


def values_for(node: Node, n_kv: int, rng: np.random.Generator) -> dict[Tensor, np.ndarray]:
    """Values for what `node` reads, by storage: every position and index different, the mask open
    at random, floats of norm about 1."""
    return {t.storage: _value(t.storage, n_kv, rng) for t in node.inputs}


def _value(t: Tensor, n_kv: int, rng: np.random.Generator) -> np.ndarray:
    if t.kind == Kind.INPUT:
        if t.dtype == F16:
            mask = np.where(rng.random(t.shape) < 0.5, np.float16(0), np.float16(-np.inf))
            mask[:, 0] = 0
            return mask
        ids = rng.permutation(n_kv)[: t.shape[0]]
        return ids.astype(np.int64 if t.dtype == I64 else np.int32)
    if t.kind == Kind.WEIGHT and len(t.shape) == 1:
        return rng.uniform(0.5, 1.5, t.shape).astype(np.float32)
    if t.kind == Kind.WEIGHT:
        return random_blocks(rng, t.dtype, t.rows, t.cols, t.cols**-0.5)
    x = rng.standard_normal(t.shape).astype(np.float32)
    if t.dtype == Q8_ACT:
        return quantize_activations(x)
    if t.name.endswith("(squares)"):  # sums of 32 squares
        return 32 * np.square(x)
    return x.astype(np.float16) if t.dtype == F16 else x


def topology_key(graph: Graph) -> tuple:
    """What must match for reuse: ops, shapes, types, parameters, wiring; no names, no values.

    The slow twin of the step shape: tests require that equal step shapes give equal keys.
    """
    number: dict[Tensor, int] = {}

    def of(node: Node) -> tuple:
        touched = tuple((number.setdefault(t.storage, len(number)), t.dtype.name, t.shape)
                        for t in (*node.inputs, *node.outputs))  # fmt: skip
        parts = tuple((part.op, *sorted(part.params.items())) for part in node.parts)
        return node.op, tuple(sorted(node.params.items())), touched, parts

    return tuple(map(of, graph.nodes))
