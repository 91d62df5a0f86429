"""What a plan costs, measured on a driver that only notes what it is asked."""

from __future__ import annotations

import json

import pytest

from data.measure import plan_costs
from tests.backend.cuda.fake_cuda import fake_backend
from workbench.common.errors import UsageError

SET = {"set_kernel_first_us", "set_kernel_us", "set_copy_first_us", "set_copy_us"}
TIMES = {
    "issue_us", "capture_us", "instantiate_us", "upload_us", "exec_update_us", "refused_update_us",
    "launch_us", "launch_behind_us", "device_us",
}  # fmt: skip


def test_every_cost_of_a_step_s_plan_is_in_the_file(monkeypatch, tmp_path, tiny_models):
    fake_backend(monkeypatch)
    out = tmp_path / "made" / "costs.json"
    plan_costs.measure(models=tiny_models, out=out, only="llama-3.2-1b-bf16", quick=True)
    found = json.loads(out.read_text())
    assert found["commit"] and found["date"] and found["quick"]
    step, split = found["rows"]
    assert (step["scope"], split["scope"]) == ("step", "split")
    assert step["toggles"]["plans"] == split["toggles"]["plans"] == "ours"
    assert set(step["costs"]) == TIMES | SET
    assert set(split["costs"]) == {name for name in TIMES | SET if "copy" not in name}
    for row in (step, split):
        assert row["nodes"] > 10 and row["edges"] == row["nodes"] - 1
        assert all(row[name]["median"] > 0 for name in row["costs"])
        assert row["programmatic_edges"] > 0 and row["device_us"]["median"] == 250


def test_no_rounds_are_refused(tmp_path):
    with pytest.raises(UsageError, match="--rounds 0 measures nothing"):
        plan_costs.measure(out=tmp_path / "x.json", rounds=0)
