"""Graphs are as recorded: node for node what commit 7839203 built, before it had blocks.

`graphs_of_record.json` holds a hash of each graph as text: every preset, activations rounded and
not, steps with and without outputs, fused and with halved norms. It also has the order in which
that commit took weights from files. To read a graph, print `text(graph)`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.graphs import Decoder
from tests.profiles import share
from workbench.graph.fuse import FUSIONS, fuse
from workbench.graph.ir import F16, Q8_0, Graph, Tensor
from workbench.model.decoder import Model
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
    """(name, graph): every combination of activations, shape, halved norms and fusion."""
    more = ("ffn_up", "attn_output") if preset == "tiny-llama-bias" else ()
    model = Decoder(preset, Q8_0, {"attn_v": F16}, biases=more)
    for activations, shape, halved in product(("q8", "float"), SHAPES, (False, True)):
        n_tokens, n_outputs, n_kv = shape
        graph = model.graph(n_tokens, n_outputs, n_kv, activations, 1024, halved)
        name = f"{activations} {shape}{' halved' * halved}"
        yield name, graph
        yield f"{name} fused", fuse(graph, FUSIONS)


def digest(preset: str) -> str:
    """One hash for all graphs of a preset."""
    whole = hashlib.sha256()
    for name, graph in graphs(preset):
        whole.update(f"{name}\n{text(graph)}\n".encode())
    return whole.hexdigest()


@pytest.mark.parametrize("preset", share(PRESETS, every=3))
def test_graphs_are_those_of_record(preset: str):
    assert digest(preset) == RECORD["graphs"][preset]


@pytest.mark.parametrize("preset,quant", FILES)
def test_weights_are_taken_in_the_order_of_record(tiny_model, preset: str, quant: str):
    model = Model(tiny_model(preset, quant))
    try:
        found = [f"{t.name} {t.dtype.name} {list(t.shape)}" for t in model.weights]
    finally:
        model.close()
    assert hashlib.sha256("\n".join(found).encode()).hexdigest() == RECORD["weights"][preset]
