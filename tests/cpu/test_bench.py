"""`bench` on real engines: llama-bench's rows, with this engine's numbers in them."""

from __future__ import annotations

import json

import pytest

from workbench.benchmarks.llama.llama_bench import bench
from workbench.benchmarks.llama.llama_format import FORMATS, format_rows
from workbench.benchmarks.runs.results import load_run
from workbench.config import Toggles
from workbench.engine.engine import Engine


@pytest.mark.parametrize("device", ["embedded", "host"])
def test_rows_of_a_real_engine(tiny_model, tmp_path, device):
    path = tiny_model("tiny-qwen3", "Q8_0")
    with Engine.load(path, device=device, n_ctx=128, n_ubatch=32, toggles=Toggles()) as engine:
        rows = bench(engine, [40], [6], [0, 16], 3, pg=[(8, 4)], out=tmp_path / "r")
        n_params, nbytes = engine.model.n_params, sum(t.nbytes for t in engine.model.weights)
    assert [row.workload.name for row in rows] == [
        "pp40", "tg6", "pp8+tg4", "pp40@d16", "tg6@d16", "pp8+tg4@d16",
    ]  # fmt: skip
    for row in rows:
        values = row.values()
        assert values["avg_ts"] > 0 and len(row.samples_ns) == 3
        assert values["backends"] == {"embedded": "embedded", "host": "CPU"}[device]
        assert (values["model_n_params"], values["model_size"]) == (n_params, nbytes)
        assert values["model_type"].startswith("qwen3 ") and values["model_type"].endswith(" Q8_0")
        assert all(s.token_ns.sum() == s.ns_total for s in row.samples)
    assert all(format_rows(rows, fmt).endswith("\n") for fmt in FORMATS)
    assert len(json.loads(format_rows(rows, "json"))) == 6
    run, samples = load_run(tmp_path / "r")[1:]
    assert run["status"] == "complete" and run["tests"] == [r.workload.name for r in rows]
    assert samples.groupby("test")["repetition"].nunique().eq(3).all()
    assert run["arms"][0]["program"]["tg6"]["counts"]["launches"] > 0
