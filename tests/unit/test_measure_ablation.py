"""Steps taken apart: what launches are called, what they read, and the measuring step on a CPU."""

from __future__ import annotations

import json

import pytest

import workbench as wb
from tests.gpu import measure, measure_ablation, measure_models, measuring
from workbench.backend.cuda_kernel import Gemm, Kernel, Work
from workbench.bench.kernel_cases import SHAPES
from workbench.graph.ir import Q4_0, Kind
from workbench.program.commands import Launch

# names of nodes that a fused program has -> what they are called here
PRODUCTS = {"qkv-0": "qkv", "attn_out-0": "attn_out", "ffn_glu-1": "glu", "ffn_out-1": "ffn_down",
            "result_output": "result_output"}  # fmt: skip


@pytest.fixture
def engine(tiny_model):
    path = tiny_model("tiny-llama", "Q4_0")
    with (
        wb.Engine.load(path, device="embedded", n_ctx=512) as made,
        made.variant(measuring.everything(made)) as side,
    ):
        yield side


def test_everything_is_on(engine):
    toggles = engine.toggles
    assert toggles.defer_norm == toggles.value_of("fuse") == "on"
    assert toggles.pdl == "off"  # a CPU has none


def test_every_launch_has_a_kind(engine):
    nodes = [c.node for c in engine.program(1).commands if isinstance(c, Launch)]
    kinds = {node.name: measure_ablation.kind_of(node) for node in nodes}
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
    assert [measure_ablation.kind_of(qkv, work) for work in works] == [
        "activations to halves", "weights to halves", "qkv", "rope_store", "qkv",
    ]  # fmt: skip


def test_weights_of_kinds_are_those_of_the_step(engine):
    engine.step([1])
    prepared = engine._programs.get(engine.program(1).shape)
    found = measure_ablation.weight_bytes(prepared)
    inputs = [t for c in prepared.program.commands if isinstance(c, Launch) for t in c.node.inputs]
    matrices = {t for t in inputs if t.kind == Kind.WEIGHT and t.rows > 1}
    embedding = {t for t in matrices if t.name == "token_embd.weight"}
    assert set(found) == set(PRODUCTS.values())
    # norms' and the embedding's rows are read by no product
    assert sum(found.values()) == sum(t.nbytes for t in matrices - embedding)


def test_products_are_read_as_bench_kernels_launches_them():
    sizes = measure_ablation.product_sizes()
    (gate, up), cols = SHAPES["8b.gate_up"].rows, SHAPES["8b.gate_up"].cols
    row = Q4_0.row_bytes(cols)
    assert gate * row in sizes and (gate + up) * row in sizes  # gate_up is two launches, glu one
    assert sizes == sorted(set(sizes))


def test_the_step_runs_on_a_cpu_and_is_kept(tmp_path, tiny_models, capsys, monkeypatch):
    commit = {"hash": "1" * 40, "number": 1, "dirty": False}
    monkeypatch.setattr(measuring.provenance, "commit", lambda: commit)

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
    for way in ("step_us", "eager_us", "graph_us"):
        assert 0 < found[way]["min"] <= found[way]["median"] <= found[way]["max"]
    assert go().count("there already") == 4


def test_fusion_compares_every_toggle_that_a_gpu_has():
    toggles = measure_models.FUSED["llama-3-8b", "Q4_0"]
    patterns = {name for name in wb.Toggles.names() if name.startswith("fuse_")} - {"fuse_bias"}
    assert set(toggles) == patterns | {"fuse", "pdl", "defer_norm"}
    assert set(toggles["fuse_product_norm"]) == {"with-all"}
    assert set(toggles["fuse_glu"]) == set(measure_models.BACKGROUNDS)
