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
from typing import cast

import pytest

from tests.graphs import Decoder
from tests.planned import SCOPES, only_adds_order
from tests.profiles import share
from workbench.common.errors import UsageError
from workbench.config import CopyStream, SyncMode
from workbench.graph import ops
from workbench.graph.fuse import FUSIONS, fuse
from workbench.graph.ir import F16, F32, I32, Q8_0, Graph, Kind, StepShape, Tensor
from workbench.model.cache_graphs import shift_graph
from workbench.model.decoder import Model, build_graph
from workbench.model.inputs import DELTAS
from workbench.model.synth.shapes import PRESETS
from workbench.program.check.hazards import check_cycle
from workbench.program.commands import DEVICE, HOST, Buffer, Launch, Range, Space
from workbench.program.layout import Target, lay_out
from workbench.program.lower import lower
from workbench.program.split import split
from workbench.program.sync_modes import RULES, Ordering

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


def test_rope_shift_says_what_it_may_touch():
    cache, deltas = Tensor("k", F16, (N_CELLS, 64), Kind.CACHE), Tensor("d", I32, (32,))
    factors = Tensor("f", F32, (8,))
    turn = {"n_rot": 16, "neox": False, "theta_base": 1e4, "freq_scale": 1.0}
    node = ops.make("rope_shift", "k_shift", cache, deltas, factors, n_head_kv=2, **turn)
    below = (cache, 0, 32 * 64 * 2)
    assert ops.writes(node) == [below]
    assert ops.reads(node) == [below, (deltas, 0, 128), (factors, 0, 32)]
    assert ops.touched_bytes(node) == 2 * below[2] + 128 + 32
    for wrong in ({"n_rot": 15}, {"n_rot": 64}, {"n_head_kv": 3}):
        with pytest.raises(UsageError, match="rope_shift"):
            ops.make("rope_shift", "k", cache, deltas, factors, **{"n_head_kv": 2} | turn | wrong)
    with pytest.raises(UsageError, match="frequency factors"):
        ops.make("rope_shift", "k", cache, deltas, Tensor("f", F32, (7,)), n_head_kv=2, **turn)


@pytest.mark.parametrize("copy_stream", [CopyStream.OWN, CopyStream.COMPUTE])
@pytest.mark.parametrize("sync", list(RULES))
def test_a_shift_between_steps_is_as_safe_as_the_steps(sync: SyncMode, copy_stream: CopyStream):
    """Step, shift, step: the shift's program is lowered and checked as theirs are."""
    model = Decoder("tiny-llama", Q8_0)
    caches = model.caches(N_CELLS)
    step = build_graph(cast(Model, model), StepShape(1, 1, 64), caches)
    kept = {t.storage for node in step.nodes for t in node.inputs}
    residents: list[dict[Tensor, Range]] = [
        {t: Range(Buffer(t.name, Space.DEVICE, t.nbytes, b), 0, t.nbytes)
         for t in kept if t.kind in (Kind.WEIGHT, Kind.CACHE)} for b in (HOST, DEVICE)
    ]  # fmt: skip
    buffers: dict[str, Buffer] = {}
    targets = [Target(name, lambda node: 0) for name in ("host", "dev")]
    ordering, programs = Ordering(sync, copy_stream), []
    for graph in (step, shift_graph(cast(Model, model), caches, N_CELLS), step):
        splits = split(graph, lambda n: HOST if n.name == "inp_embd" else DEVICE)
        layout = lay_out(graph, splits, residents, targets, ordering, known=buffers)
        programs.append(lower(graph, splits, layout, targets, ordering))
    launched = [c for c in programs[1].commands if isinstance(c, Launch)]
    assert [c.node.op for c in launched] == ["rope_shift"] * model.hparams.n_layer
    unordered = sync in (SyncMode.IMPLICIT, SyncMode.PACKED_IMPLICIT)
    safe = copy_stream == CopyStream.COMPUTE or not unordered
    assert check_cycle(programs[:1]).safe == check_cycle(programs).safe == safe
    for scope in SCOPES:
        only_adds_order(programs * 2, scope)
