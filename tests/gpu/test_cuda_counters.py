"""The measuring step `counters` on a GPU, quick: ncu counts the launches it is asked for."""

from __future__ import annotations

import json

import pytest

from data.measure import __main__ as measure
from data.measure import counters, nsight

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def test_launches_are_counted(tmp_path, capsys):
    if nsight.find_ncu() is None:
        pytest.skip("there is no ncu")
    measure.measure("counters", out=tmp_path, models=tmp_path, device="cuda", quick=True)
    said = capsys.readouterr().out
    path = tmp_path / "quick-cuda-counters.json"
    if not path.is_file():
        (why,) = (line for line in said.splitlines() if line.endswith("; left out"))
        pytest.skip(why)
    cases = json.loads(path.read_text())["cases"]
    asked = counters.products(quick=True)
    assert [case["kernel"] for case in cases[-len(asked) :]] == [one.kernel for one in asked]
    for case in cases:
        assert case["launches"] == counters.LAUNCHES and 0.5 < case["us"] < 1000
        assert 0 < case["memory_pct"] <= 100 and 0 < case["issue_pct"] <= 100, case
        # caches were emptied: what is read comes from memory
        assert case["dram_bytes"] > 0.8 * case["bytes"], case
    assert cases[-1]["tensor_pct"] > 0  # of 16 tokens
