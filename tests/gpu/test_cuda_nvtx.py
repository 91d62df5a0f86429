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


def counted(model: Path, folder: Path, wanted: str, *toggles: str) -> tuple[int, str]:
    """Kernels that ncu measures inside of the ranges `wanted`, and what the command said."""
    tool, log = nsight.find_ncu(), folder / "ncu.csv"
    if tool is None:
        pytest.skip("there is no ncu")
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


# A node of a layer, which is launched once in a prompt and two tokens behind it; a split of the
# device; the steps, which are ranges of the process: no slash; none; and one that is off.
@pytest.mark.parametrize(
    ("wanted", "toggles", "least", "most"),
    [
        ("workbench@attn_norm-0/", EAGER, 3, 9),
        ("workbench@prompt/", EAGER, 10, 10**9),
        ("workbench@step", EAGER, 10, 10**9),
        ("workbench@plan/", PLANS, 10, 10**9),
        ("workbench@attn_norm-99/", EAGER, 0, 0),
        ("workbench@attn_norm-0/", (*EAGER, "--nvtx", "off"), 0, 0),
    ],
    ids=["node", "prompt", "step", "plan", "no such node", "off"],
)
def test_ncu_finds_what_is_in_a_range(tiny_model, tmp_path, wanted, toggles, least, most):
    found, said = counted(tiny_model("tiny-llama", "Q8_0"), tmp_path, wanted, *toggles)
    if "off" in toggles:
        assert "NVTX" not in said.replace("==", "")
    else:
        assert LISTENS in said
    assert least <= found <= most and (most > 9 or found % 3 == 0)
