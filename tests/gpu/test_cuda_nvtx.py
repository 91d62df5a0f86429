"""ncu finds the engine's NVTX ranges, and the kernels in them, by their names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from data.measure import nsight

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
METRIC = "gpu__time_duration.sum"
LISTENS = "NVTX ranges: on, a tool listens"
EAGER = ("--preset", "baseline")
PLANS = ("--plans", "ours", "--graph-reuse", "set_rows", "--preset", "baseline")


@pytest.fixture(scope="module")
def tool() -> Path:
    found = nsight.find_ncu()
    if found is None:
        pytest.skip("there is no ncu")
    return found


def counted(tool: Path, model: Path, folder: Path, wanted: str, *toggles: str) -> tuple[int, str]:
    """Kernels that ncu measures inside of the ranges `wanted`, and what the command said."""
    log = folder / "ncu.csv"
    done = subprocess.run(
        [
            str(tool), "--clock-control", "none", "--target-processes", "all", "--nvtx",
            "--nvtx-include", wanted, "--metrics", METRIC, "--csv", "--page", "raw",
            "--print-units", "base", "--log-file", str(log),
            sys.executable, "-m", "workbench", "run", "-m", str(model), "--device", "cuda",
            "--tokens", "1,2,3", "-n", "3", "-c", "256", "--n-seqs", "1", *toggles,
        ],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    text, said = log.read_text() if log.is_file() else "", done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in text + said or "LibraryNotLoaded" in text + said:
        pytest.skip(f"ncu may not measure here: {nsight.refusal(text, said)}")
    assert done.returncode == 0, text + said
    return len(nsight.launches_counted(text)), said


# a split of the device; a node of a layer; the steps, which are ranges of the process: no slash
@pytest.mark.parametrize(
    ("wanted", "toggles", "each"),
    [
        ("workbench@attn_norm-0/", EAGER, True),
        ("workbench@prompt/", EAGER, False),
        ("workbench@step", EAGER, False),
        ("workbench@plan/", PLANS, False),
    ],
    ids=["node", "prompt", "step", "plan"],
)
def test_ncu_finds_a_range(tool, tiny_model, tmp_path, wanted, toggles, each):
    found, said = counted(tool, tiny_model("tiny-llama", "Q8_0"), tmp_path, wanted, *toggles)
    assert LISTENS in said
    # a prompt and two tokens behind it: the node is launched in each of three steps
    assert found % 3 == 0 and 3 <= found <= 9 if each else found > 9, found


def test_ncu_finds_nothing_in_a_range_that_is_not_there(tool, tiny_model, tmp_path):
    model = tiny_model("tiny-llama", "Q8_0")
    found, said = counted(tool, model, tmp_path, "workbench@attn_norm-99/", *EAGER)
    assert found == 0 and LISTENS in said


def test_off_is_off(tool, tiny_model, tmp_path):
    model = tiny_model("tiny-llama", "Q8_0")
    found, said = counted(tool, model, tmp_path, "workbench@attn_norm-0/", *EAGER, "--nvtx", "off")
    assert found == 0 and "NVTX" not in said.replace("==", "")
