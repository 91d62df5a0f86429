"""What measures on a GPU, quick: the step `ablation`, kernels, and ncu in NVTX ranges."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data.measure import __main__ as measure
from data.measure import counters
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.benchmarks.kernels.kernel_bench import KernelMatrix, bench_kernels
from workbench.benchmarks.kernels.kernel_cases import parse_shapes, parse_types
from workbench.benchmarks.kernels.kernel_rigs import PDL, PLAIN

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_models) -> Path:
    """What one quick run of the step `ablation` wrote."""
    out = tmp_path_factory.mktemp("ablation")
    measure.measure("ablation", out=out, models=tiny_models, device="cuda", quick=True)
    return out


@pytest.mark.parametrize(
    "name", ["qwen3-4b-q4_k_m", "llama-3-8b-q4_0", "llama-3-8b-q4_0-64", "llama-3-8b-q8_0-64"]
)
def test_steps_are_taken_apart_and_compute_the_same(folder: Path, name: str):
    """Every graph without some launches computed on the values of the whole step, bit for bit."""
    found = json.loads((folder / f"quick-cuda-ablation-{name}.json").read_text())
    kinds, whole = found["kinds"], found["apart_us"]
    assert found["unchanged"] and found["product_tflops"] > 0
    assert set(kinds) >= {"qkv", "attn_out", "glu", "ffn_down", "attention", "norm"}
    assert sum(kind["launches"] for kind in kinds.values()) == found["launches"]
    assert found["graph_us"]["min"] > 0 < whole["min"]
    for kind in kinds.values():
        assert kind["without_us"]["min"] < 1.5 * whole["max"], kind


def test_launches_are_timed_in_streams_and_graphs(backend: CudaBackend, folder: Path):
    found = json.loads((folder / "quick-cuda-launches.json").read_text())
    early = [PLAIN, PDL] if backend.capabilities.programmatic else [PLAIN]
    for way in ("stream_us", "graph_us"):
        assert list(found[way]) == early
        assert all(0.1 < us["median"] < 100 for us in found[way].values())
    assert found["graph_us"][PLAIN]["median"] < 2 * found["stream_us"][PLAIN]["median"]
    for row in found["reads"]:  # quick: partly from the cache
        assert row["bytes"] / row["us"]["median"] / 1e3 < 10 * found["read_gbps"], row


def test_kernels_are_measured_plain_and_early(backend: CudaBackend, tmp_path):
    shapes = parse_shapes("1b.o,1b.glu,1b.qkv")
    matrix = KernelMatrix(parse_types("Q4_0,F16"), shapes, [1, 3], quick=True)
    made = bench_kernels(backend, matrix, tmp_path / "run")
    kinds = {PLAIN, PDL} if backend.capabilities.programmatic else {PLAIN}
    assert {row.launch for row in made.rows} == kinds
    assert len(made.rows) == 2 * 3 * 2 * len(kinds) and not made.interrupted
    for row in made.rows:
        assert 0.01 < row.share < 1.5, row  # quick: the cache keeps part of the weights
        assert row.launches * row.per_replay >= 20


EAGER = ("--preset", "baseline")
PLANS = ("--plans", "ours", "--graph-reuse", "set_rows", "--preset", "baseline")
RANGES = [  # least and most kernels in it
    ("attn_norm-0/", EAGER, 3, 9),  # a node of a layer: once in a prompt and two tokens after it
    ("prompt/", EAGER, 10, 10**9),  # a split of the device
    ("step", EAGER, 10, 10**9),  # the steps, which are ranges of the process: no slash
    ("plan/", PLANS, 10, 10**9),
    ("attn_norm-99/", EAGER, 0, 0),
    ("attn_norm-0/", (*EAGER, "--nvtx", "off"), 0, 0),
]


@pytest.mark.parametrize(("wanted", "toggles", "least", "most"), RANGES, ids=str)
def test_ncu_finds_what_is_in_a_range(tiny_model, tmp_path, wanted, toggles, least, most):
    tool, log = counters.find_ncu(), tmp_path / "ncu.csv"
    if tool is None:
        pytest.skip("there is no ncu")
    done = subprocess.run(
        [
            str(tool), "--clock-control", "none", "--target-processes", "all", "--nvtx",
            "--nvtx-include", f"workbench@{wanted}", "--metrics", "gpu__time_duration.sum",
            "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log),
            sys.executable, "-m", "workbench", "run", "-m", str(tiny_model("tiny-llama", "Q8_0")),
            "--device", "cuda", "--tokens", "1,2,3", "-n", "3", "-c", "256", "--n-seqs", "1",
            *toggles,
        ],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    text, said = log.read_text() if log.is_file() else "", done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in text + said or "LibraryNotLoaded" in text + said:
        pytest.skip(f"ncu may not measure here: {counters.refusal(text, said)}")
    assert done.returncode == 0, text + said
    assert ("NVTX ranges: on, a tool listens" in said) == ("off" not in toggles)
    found = len(counters.launches_counted(text))
    assert least <= found <= most and (most > 9 or found % 3 == 0)
