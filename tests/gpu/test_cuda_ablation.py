"""The measuring step `ablation` on a GPU, quick: launches are captured, numbers are there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.measure import __main__ as measure
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.benchmarks.kernels.kernel_rigs import PDL, PLAIN

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_models) -> Path:
    """What one quick run of the step wrote."""
    out = tmp_path_factory.mktemp("ablation")
    measure.measure("ablation", out=out, models=tiny_models, device="cuda", quick=True)
    return out


def test_steps_are_taken_apart(folder: Path):
    found = json.loads((folder / "quick-cuda-ablation-llama-3-8b-q4_0-64.json").read_text())
    kinds = found["kinds"]
    assert set(kinds) >= {"qkv", "attn_out", "glu", "ffn_down", "attention", "norm"}
    assert sum(kind["launches"] for kind in kinds.values()) == found["launches"]
    assert found["graph_us"]["min"] > 0 and found["product_tflops"] > 0
    whole = found["apart_us"]
    assert whole["min"] > 0
    for name, kind in kinds.items():
        assert kind["without_us"]["min"] < 1.5 * whole["max"], name


@pytest.mark.parametrize(
    "name", ["qwen3-4b-q4_k_m", "llama-3-8b-q4_0", "llama-3-8b-q4_0-64", "llama-3-8b-q8_0-64"]
)
def test_launches_left_out_change_nothing(folder: Path, name: str):
    """Every graph computed on the values of the whole step, bit for bit."""
    found = json.loads((folder / f"quick-cuda-ablation-{name}.json").read_text())
    assert found["unchanged"]


def test_launches_are_timed_in_streams_and_graphs(backend: CudaBackend, folder: Path):
    found = json.loads((folder / "quick-cuda-launches.json").read_text())
    early = [PLAIN, PDL] if backend.capabilities.programmatic else [PLAIN]
    for way in ("stream_us", "graph_us"):
        assert list(found[way]) == early
        assert all(0.1 < us["median"] < 100 for us in found[way].values())
    assert found["graph_us"][PLAIN]["median"] < 2 * found["stream_us"][PLAIN]["median"]
    for row in found["reads"]:  # quick: partly from the cache
        assert row["bytes"] / row["us"]["median"] / 1e3 < 10 * found["read_gbps"], row
