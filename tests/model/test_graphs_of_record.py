"""Graphs and the order of weights are as recorded: node for node what commit 7839203 built, before
it had blocks, as hashes of the graph as text. To read a graph, print `text(graph)`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import cast

import pytest

from tests.graphs import Decoder
from tests.profiles import share
from workbench.graph.fuse import FUSIONS, fuse
from workbench.graph.ir import F16, I32, Q8_0, Graph, Kind, StepShape, Tensor
from workbench.model.cache_graphs import shift_graph
from workbench.model.decoder import Model
from workbench.model.inputs import DELTAS
from workbench.model.synth.shapes import PRESETS

RECORD = json.loads(Path(__file__).with_name("graphs_of_record.json").read_text())
SHAPES = ((1, 1, 256), (1, 0, 256), (5, 2, 512), (8, 8, 256), (64, 1, 512))
FILES = [("tiny-llama", "Q4_K"), ("tiny-llama-bias", "F32"), ("tiny-qwen2", "Q8_0"),
         ("tiny-qwen3", "Q4_0")]  # fmt: skip


def text(graph: Graph) -> str:
    """The graph as lines: inputs, nodes in order with their parts, outputs. Tensors that share
    storage have its number."""
    number: dict[Tensor, int] = {}

    def said(t: Tensor) -> str:
        n = number.setdefault(t.storage, len(number))
        return f"{n}:{t.name}:{t.dtype.name}{list(t.shape)}:{t.kind}"

    lines = [f"inputs {' '.join(map(said, graph.inputs))}"]
    for node in graph.nodes:
        for indent, n in (("", node), *(("  ", part) for part in node.parts)):
            made, given = (" ".join(map(said, of)) for of in (n.outputs, n.inputs))
            params = " ".join(f"{k}={v}" for k, v in n.params.items())
            lines.append(f"{indent}{n.layer} {n.op} {n.name}: {made} = {given}; {params}")
    return "\n".join([*lines, f"outputs {' '.join(map(said, graph.outputs))}"])


def graphs(preset: str) -> Iterator[tuple[str, Graph]]:
    """Name and graph: every combination of activations, shape, halved norms and fusion."""
    more = ("ffn_up", "attn_output") if preset == "tiny-llama-bias" else ()
    model = Decoder(preset, Q8_0, {"attn_v": F16}, biases=more)
    for activations, shape, halved in product(("q8", "float"), SHAPES, (False, True)):
        n_tokens, n_outputs, n_kv = shape
        graph = model.graph(n_tokens, n_outputs, n_kv, activations, 1024, halved)
        name = f"{activations} {shape}{' halved' * halved}"
        yield name, graph
        yield f"{name} fused", fuse(graph, FUSIONS)


@pytest.mark.parametrize("preset", share(PRESETS, every=len(PRESETS)))
def test_graphs_are_those_of_record(preset: str):
    whole = hashlib.sha256()
    for name, graph in graphs(preset):
        whole.update(f"{name}\n{text(graph)}\n".encode())
    assert whole.hexdigest() == RECORD["graphs"][preset]


@pytest.mark.parametrize("preset,quant", FILES)
def test_weights_are_taken_in_the_order_of_record(tiny_model, preset: str, quant: str):
    model = Model(tiny_model(preset, quant))
    try:
        found = [f"{t.name} {t.dtype.name} {list(t.shape)}" for t in model.weights]
    finally:
        model.close()
    assert hashlib.sha256("\n".join(found).encode()).hexdigest() == RECORD["weights"][preset]


N_CELLS = 96


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_k_of_every_layer_turns_as_the_model_turned_it(preset: str):
    model = Decoder(preset, Q8_0)
    caches = model.caches(N_CELLS)
    graph = shift_graph(cast(Model, model), caches, 64)
    (deltas,) = graph.inputs
    assert (deltas.name, deltas.dtype, deltas.shape) == (DELTAS, I32, (64,))
    assert deltas.kind == Kind.INPUT and not graph.outputs
    assert graph.shape == StepShape(0, 0, 64, 0)
    step = {n.name: n for n in model.graph(n_cells=N_CELLS).nodes}
    for i, (node, (k, _)) in enumerate(zip(graph.nodes, caches, strict=True)):
        assert node.name == f"k_shift-{i}" and node.layer == i
        assert node.output is k and node.inputs[:2] == (k, deltas)
        rope = step[f"Kcur_rope-{i}"]
        assert node.inputs[2:] == rope.inputs[2:]
        assert node.params == {"n_head_kv": model.hparams.n_head_kv, **rope.params}
