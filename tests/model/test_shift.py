"""The graph that shifts a cache: what it turns, and that its program needs no other wait."""

from __future__ import annotations

from typing import cast

import pytest

from tests.graphs import Decoder
from tests.planned import SCOPES, only_adds_order
from workbench.common.errors import UsageError
from workbench.config import CopyStream, SyncMode
from workbench.graph import ops
from workbench.graph.ir import F16, F32, I32, Q8_0, Kind, StepShape, Tensor
from workbench.model.cache_graphs import shift_graph
from workbench.model.decoder import Model, build_graph
from workbench.model.inputs import DELTAS
from workbench.program.check.hazards import check_cycle
from workbench.program.commands import DEVICE, HOST, Buffer, Launch, Range, Space
from workbench.program.layout import Target, lay_out
from workbench.program.lower import lower
from workbench.program.split import split
from workbench.program.sync_modes import RULES, Ordering

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


def test_a_shift_of_more_cells_than_there_are_is_refused():
    model = Decoder("tiny-llama", Q8_0)
    with pytest.raises(UsageError, match=r"rope_shift.*at most as many I32 deltas"):
        shift_graph(cast(Model, model), model.caches(64), 65)


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
