"""Decode of two commits: what is made of the samples, and a run of this checkout beside itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data.measure import two_commits
from data.measure.two_commits import SIDES, judged, lines

ROOT = Path(__file__).resolve().parents[2]


class Recorded:
    def __init__(self, found):
        self._found = found

    def alone(self, name):
        assert name == two_commits.NAME
        return self._found


def samples(new: float) -> dict[str, list[float]]:
    noise = [0.0, 0.3, -0.2, 0.1, -0.1, 0.2, -0.3, 0.05]
    return {
        "old": [100 + n for n in noise],
        "control": [100 - n for n in noise],
        "new": [new + n for n in noise],
    }


@pytest.mark.parametrize(
    ("new", "verdict"), [(100.0, "no difference"), (80.0, "faster"), (125.0, "slower")]
)
def test_times_become_a_verdict(new, verdict):
    found = judged(samples(new))
    assert found["verdict"] == verdict and found["speedup"] == pytest.approx(100 / new, rel=0.01)
    assert found["median_us"]["new"] == pytest.approx(new, abs=0.2)


def test_a_line_for_each_model_and_figure():
    judgement = judged(samples(90.0))
    run = {"model": "a.gguf"} | {f"{name}_judged": judgement for name in two_commits.FIGURES}
    (first, second) = lines(Recorded({"runs": [run]}))
    assert first.values["figure"] != second.values["figure"]
    assert first.values["new"] == "90.03" and first.values["verdict"] == "faster"
    assert not list(lines(Recorded(None)))


@pytest.mark.slow
def test_this_checkout_beside_itself(tiny_model, tmp_path):
    out = tmp_path / "two.json"
    subprocess.run(
        [
            sys.executable, "-m", "data.measure.two_commits", "--old", str(ROOT), "--out", str(out),
            "--model", str(tiny_model("tiny-llama", "Q8_0")), "--device", "embedded",
            "--toggles", "graph_reuse=set_rows", "--rounds", "5",
        ],
        check=True, cwd=ROOT, timeout=300,
    )  # fmt: skip
    (run,) = json.loads(out.read_text())["runs"]
    assert set(run["us_per_token"]) == set(run["logits_to_launch_us"]) == set(SIDES)
    assert all(len(taken) == 5 and min(taken) > 0 for taken in run["us_per_token"].values())
