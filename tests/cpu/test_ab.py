"""Comparisons on the embedded device: the same answer, a different trace, a whole run folder."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.benchmarks.compare.ab import ab
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.runs.results import load_run, rates
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.engine.engine import Engine

MODES = ["per_copy", "blocking_copies", "copy_boundary", "write_read_boundary"]


@pytest.fixture(scope="module")
def engine(tiny_model):
    reuse = Toggles(graph_reuse="set_rows")
    with Engine.load(tiny_model("tiny-llama", "Q4_0"), device="embedded", toggles=reuse) as made:
        yield made


def test_sync_modes_give_the_same_answer_with_fewer_waits(engine, tmp_path):
    found = ab(engine, "sync", [*MODES, "auto"], "tg8,pp24", 5, out=tmp_path / "r")
    assert [found.answer(arm["name"]).holds for arm in found.run["arms"][1:]] == [True] * 5
    assert {a.n_rows for m in MODES[1:] if (a := found.answer(m))} == {13 + 2 * 5}
    waits = found.evidence().query("Test == 'tg8'").set_index("Arm")["waits"]
    assert waits.iloc[:4].is_monotonic_decreasing and waits["per_copy"] > waits["copy_boundary"] > 0
    assert found.summary()["label"].str.contains(r"auto \(\w+\)").sum() == 2
    assert len(found.table()) == 2 * 5

    run = load_run(tmp_path / "r").run
    assert run["model"]["hash"] == engine.model.hash and run["engine"]["device"] == "embedded"
    assert run["engine"]["config"]["n_ctx"] == engine.config.n_ctx and run["status"] == "complete"
    assert [arm["counters"]["steps"] for arm in run["arms"]] == [5 * 8 + 5] * 6
    assert AB.load(tmp_path / "r").table().equals(found.table())


def test_every_token_has_a_time(engine):
    found = ab(engine, "sync=per_copy,copy_boundary", tests="pp24+tg6@d40", rounds=5)
    s = found.samples
    assert len(s) == 3 * 5 * 7 and (s["ns"] > 0).all()
    assert s.groupby("order")["n_tokens"].sum().eq(30).all()
    tps = rates(s)
    assert np.allclose(tps["tps"], 30e9 / s.groupby("order")["ns"].sum().to_numpy())
    assert engine.n_past == 0  # the engine itself was left alone


def test_reusing_a_graph_builds_none(engine):
    found = ab(engine, "graph_reuse", ["rebuild", "set_rows"], "tg8", 5)
    rebuilt, reused = (arm["counters"] for arm in found.run["arms"][:2])
    assert rebuilt["programs_built"] == 40 and reused["programs_built"] == 0
    assert rebuilt["graph_ns"] > 0 == reused["graph_ns"]
    assert found.answer("set_rows").holds
    assert found.run["arms"][0]["toggles"]["sync"] == "per_copy"


def test_a_background_of_ones_own(engine):
    background = Toggles(copy_stream="compute", graph_reuse="set_rows")
    found = ab(engine, "sync=per_copy,implicit", tests="tg4", rounds=5, background=background)
    assert found.answer("implicit").holds
    assert "background copy_stream=compute, " in found.caption
    assert "graph_reuse=set_rows" in found.caption
    assert found.evidence()["pattern"].iloc[1].endswith("aaaag")


def test_interrupted_and_resumed(engine, tmp_path):
    def stop(done, total, what):
        if done == 7:
            raise KeyboardInterrupt

    spec = {"toggle": "sync=per_copy,copy_boundary", "tests": "tg4", "rounds": 5}
    cut = ab(engine, **spec, out=tmp_path / "r", progress=stop)
    assert cut.interrupted and cut.samples["order"].max() == 6
    whole = ab(engine, **spec, out=tmp_path / "r", resume=True)
    assert not whole.interrupted and len(whole.samples) == 15 * 4
    assert whole.samples.iloc[: 7 * 4].equals(cut.samples)


def test_what_cannot_be_measured(engine):
    with pytest.raises(UsageError, match=f"n_ctx={engine.config.n_ctx + 1}"):
        ab(engine, "sync=per_copy,auto", tests=f"tg{engine.config.n_ctx + 1}")
    with pytest.raises(UsageError, match="race on the embedded device"):
        ab(engine, "sync=per_copy,implicit", background=Toggles(copy_stream="own"))
