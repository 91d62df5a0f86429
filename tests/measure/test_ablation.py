"""Steps taken apart: what launches are called, what they read, and the measuring step on a CPU."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import numpy as np
import pytest

import workbench as wb
from data.measure import __main__ as measure
from data.measure import ablation, launches, matrix, session
from workbench.backend.cuda.kernels.kernel import Gemm, Kernel, Work
from workbench.benchmarks.kernels.kernel_cases import SHAPES
from workbench.engine.programs import Key
from workbench.graph import arena
from workbench.graph.ir import F32, Q4_0, Kind
from workbench.program.commands import DEVICE, Buffer, Launch

# names of nodes that a fused program has -> what they are called here
PRODUCTS = {"qkv-0": "qkv", "attn_out-0": "attn_out", "ffn_glu-1": "glu", "ffn_out-1": "ffn_down",
            "result_output": "result_output"}  # fmt: skip


@pytest.fixture
def engine(tiny_model):
    path = tiny_model("tiny-llama", "Q4_0")
    with (
        wb.Engine.load(path, device="embedded", n_ctx=512, toggles=wb.Toggles()) as made,
        made.variant(session.everything(made)) as side,
    ):
        yield side


def test_everything_is_on(engine):
    toggles = engine.toggles
    assert toggles.defer_norm == toggles.value_of("fuse") == "on"
    assert toggles.pdl == "off"  # a CPU has none


def test_every_launch_has_a_kind(engine):
    nodes = [c.node for c in engine.program(1).commands if isinstance(c, Launch)]
    kinds = {node.name: ablation.kind_of(node) for node in nodes}
    assert kinds.items() >= PRODUCTS.items()
    assert {kinds[f"kqv_out-{i}"] for i in range(2)} == {"attention"}
    assert kinds["attn_norm-0"] == "norm"


def test_kernels_of_one_node_are_told_apart(engine):
    nodes = [c.node for c in engine.program(64).commands if isinstance(c, Launch)]
    (qkv,) = [node for node in nodes if node.name == "qkv-0"]
    kernels = [("dequantise", "half_tiles_Q8"), ("dequantise", "dequantise_Q4_0"),
               ("tensor_product", "tensor_product"), ("rope_store", "rope_store")]  # fmt: skip
    works: list[Work] = [Kernel(file, function, (1, 1), 32, []) for file, function in kernels]
    works.append(Gemm("F16", 0, 0, 0, 1, 1, 1, 1))
    assert [ablation.kind_of(qkv, work) for work in works] == [
        "activations to halves", "weights to halves", "qkv", "rope_store", "qkv",
    ]  # fmt: skip


@pytest.mark.parametrize("n_tokens", [1, 64])
@pytest.mark.parametrize(
    "toggles",
    [
        {"plan_scope": "split"},
        {"plan_scope": "step", "results": "direct"},
        {"plan_scope": "step", "launch_ahead": "on"},
    ],
    ids=" ".join,
)
def test_a_step_with_plans_is_taken_apart_into_the_same_launches(engine, toggles, n_tokens):
    planned = dataclasses.replace(
        engine.toggles, plans="ours", sync="packed_implicit", graph_reuse="set_rows", **toggles
    )
    engine.step(list(range(n_tokens)))
    wanted = ablation.pieces(ablation.prepared_of(engine, n_tokens), engine.backend)
    with engine.variant(planned) as side:
        side.step(list(range(n_tokens)))
        found = ablation.pieces(ablation.prepared_of(side, n_tokens), side.backend)
        assert [piece.kind for piece in found] == [piece.kind for piece in wanted]
        apart = ablation.take_apart(side, n_tokens, quick=True)
        assert side.counters["plans_replayed"] > 0
    assert apart["unchanged"] and apart["launches"] == len(wanted)
    assert set(apart["kinds"]) == {piece.kind for piece in wanted}


def test_weights_of_kinds_are_those_of_the_step(engine):
    engine.step([1])
    prepared = engine.steps.programs.get(Key(engine.program(1).shape, 0))
    found = ablation.weight_bytes(prepared)
    inputs = [t for c in prepared.program.commands if isinstance(c, Launch) for t in c.node.inputs]
    matrices = {t for t in inputs if t.kind == Kind.WEIGHT and t.rows > 1}
    embedding = {t for t in matrices if t.name == "token_embd.weight"}
    assert set(found) == set(PRODUCTS.values())
    # norms' and the embedding's rows are read by no product
    assert sum(found.values()) == sum(t.nbytes for t in matrices - embedding)


def floats_of(prepared) -> dict[str, np.ndarray]:
    """Every F32 tensor of the step's arena, by name."""
    placed = prepared.program.layout[DEVICE].items()
    views = zip(buffers_of(prepared), ablation.content(prepared), strict=True)
    bytes_of = dict(views)
    return {
        tensor.name: bytes_of[there.buffer][there.offset :][: there.nbytes].view(np.float32)
        for tensor, there in placed
        if there.buffer in bytes_of and tensor.dtype == F32
    }


def buffers_of(prepared) -> list[Buffer]:
    placed = prepared.program.layout[DEVICE].items()
    return list(dict.fromkeys(there.buffer for t, there in placed if t.kind != Kind.WEIGHT))


@pytest.mark.parametrize("n_tokens", [1, 64])
def test_apart_no_two_tensors_share_memory(engine, n_tokens):
    shared = engine.program(n_tokens)
    with ablation.apart():
        program = engine.program(n_tokens)
    assert arena.FreeList is not ablation._NeverAgain
    for lowered, some in ((shared, True), (program, False)):
        launches = [c for c in lowered.commands if isinstance(c, Launch)]
        ranges = [there for t, there in lowered.layout[DEVICE].items() if t.kind != Kind.WEIGHT]
        ranges += [c.scratch for c in launches if c.scratch is not None]
        ranges.sort(key=lambda r: (r.buffer.name, r.offset))
        overlaps = any(
            a.buffer is b.buffer and a.offset + a.nbytes > b.offset for a, b in pairwise(ranges)
        )
        assert overlaps == some


@pytest.mark.parametrize("n_tokens", [1, 64])
def test_behind_a_gap_the_others_compute_what_they_did(engine, n_tokens):
    with ablation.apart():
        engine.step(list(range(n_tokens)))
        prepared = ablation.prepared_of(engine, n_tokens)
    chain = ablation.pieces(prepared, engine.backend)
    whole = ablation.content(prepared)
    assert whole[0].any()
    for kind in dict.fromkeys(piece.kind for piece in chain):
        for piece in chain:
            if piece.kind != kind:
                piece.issue()
        engine.backend.synchronize()
        now = ablation.content(prepared)
        assert all(map(np.array_equal, whole, now)), kind
    values = floats_of(prepared)
    assert len(values) > 8 and all(np.isfinite(each).all() for each in values.values())


def test_where_tensors_share_memory_a_gap_changes_what_others_read(engine):
    engine.step([1])
    prepared = ablation.prepared_of(engine, 1)
    chain = ablation.pieces(prepared, engine.backend)
    whole = ablation.content(prepared)
    for piece in chain:
        if piece.kind != "glu":
            piece.issue()
    engine.backend.synchronize()
    assert not all(map(np.array_equal, whole, ablation.content(prepared)))


def test_products_are_read_as_bench_kernels_launches_them():
    sizes = launches.product_sizes()
    (gate, up), cols = SHAPES["8b.gate_up"].rows, SHAPES["8b.gate_up"].cols
    row = Q4_0.row_bytes(cols)
    assert gate * row in sizes and (gate + up) * row in sizes  # gate_up is two launches, glu one
    assert sizes == sorted(set(sizes))


def test_the_step_runs_on_a_cpu_and_is_kept(tmp_path, tiny_models, capsys, monkeypatch):
    commit = {"hash": "1" * 40, "number": 1, "dirty": False}
    monkeypatch.setattr(session.provenance, "commit", lambda: commit)

    def go() -> str:
        measure.measure("ablation", out=tmp_path, models=tiny_models, device="embedded", quick=True)
        return capsys.readouterr().out

    said = go()
    assert "launches: a GPU alone can tell; left out" in said
    names = {p.name.removeprefix("quick-embedded-ablation-") for p in tmp_path.iterdir()}
    assert names == {
        "qwen3-4b-q4_k_m.json", "llama-3-8b-q4_0.json", "llama-3-8b-q4_0-64.json",
        "llama-3-8b-q8_0-64.json",
    }  # fmt: skip
    found = json.loads((tmp_path / "quick-embedded-ablation-llama-3-8b-q4_0.json").read_text())
    assert found["commit"] == commit and found["date"] and found["read_gbps"] > 0
    assert found["n_tokens"] == 1 and found["quick"] and found["toggles"]["fuse_glu"] == "on"
    kinds = found["kinds"]
    assert set(kinds) >= set(PRODUCTS.values()) | {"attention", "norm"}
    assert sum(kind["launches"] for kind in kinds.values()) == found["launches"]
    assert found["unchanged"] and "VOID" not in said
    for way in ("step_us", "eager_us", "graph_us", "apart_us"):
        assert 0 < found[way]["min"] <= found[way]["median"] <= found[way]["max"]
    assert go().count("there already") == 4


def test_fusion_compares_every_toggle_that_a_gpu_has():
    rows = [row for row in matrix.rows("fusion") if row.model == "llama-3-8b-q4_0"]
    toggles = {row.compared.partition("=")[0]: set() for row in rows}
    for row in rows:
        toggles[row.compared.partition("=")[0]].add(row.toggles)
    patterns = {name for name in wb.Toggles.names() if name.startswith("fuse_")} - {"fuse_bias"}
    assert set(toggles) == patterns | {"fuse", "pdl", "defer_norm"}
    assert toggles["fuse_product_norm"] == {"all"}
    assert toggles["fuse_glu"] == {"kept", "all"}
