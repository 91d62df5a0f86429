"""The tables: the comparison's own numbers; what does not vary stands below, not in a column."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from comparisons import FACTORS, comparison

from workbench.answers import launches
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.report import tables


def test_one_comparison() -> None:
    found = comparison()
    table = tables.speedup_table(found)
    assert list(table.columns) == [
        "Test", "Toggled", "t/s baseline", "t/s toggled", "Speedup", "95% CI", "n",
        "verdict",
    ]  # fmt: skip
    assert table.attrs["constant"] == {
        "Model": "tiny Q8_0",
        "Device": "embedded, 2 workers",
        "Toggle": "sync",
        "Baseline": "per_copy",
        "Background": "copy_stream=own, all else off",
        "Commit": "01234567",
        "Date": "2026-11-21",
        "answer": str(found.answer("copy_boundary")),
    }
    numbers = found.summary()
    arms = table[table["Test"] != tables.GEOMETRIC_MEAN]
    assert [float(s) for s in arms["Speedup"]] == pytest.approx(list(numbers["speedup"]), abs=6e-4)
    assert list(arms["verdict"]) == list(numbers["verdict"])
    verdicts = dict(zip(arms["Toggled"], arms["verdict"], strict=True))
    assert verdicts == {
        "copy_boundary": "faster", "write_read_boundary": "slower",
        "blocking_copies": "no difference", "per_copy (A/A)": "A/A control",
    }  # fmt: skip


def test_geometric_mean_comes_last_and_leaves_the_control_out() -> None:
    table = tables.speedup_table(comparison())
    means = table[table["Test"] == tables.GEOMETRIC_MEAN]
    assert list(means.index) == list(range(len(table) - 3, len(table)))
    for toggled, speedup in zip(means["Toggled"], means["Speedup"], strict=True):
        assert float(speedup) == pytest.approx(FACTORS[toggled], rel=0.01)
    alone = tables.speedup_table(comparison(tests=("tg32",)))
    assert tables.GEOMETRIC_MEAN not in set(alone["Test"])


def test_several_devices_and_models_stand_apart() -> None:
    one, two = comparison(), comparison(device="cuda", model="big")
    three = comparison(model="big")
    numbers = tables.summary(one, two, three)
    assert list(dict.fromkeys(numbers["device"])) == ["embedded, 2 workers", "cuda, 2 workers"]
    assert len(numbers) == 3 * len(one.summary())
    devices = list(numbers["device"])
    assert devices == sorted(devices, reverse=True), "rows of one device stand together"
    table = tables.speedup_table(one, two, three)
    assert {"Model", "Device"} <= set(table.columns)
    # 3 arms in 2 tests, for each model on each device
    assert (table["Test"] == tables.GEOMETRIC_MEAN).sum() == 9


def test_no_comparison() -> None:
    assert len(tables.speedup_table()) == 0 and len(tables.summary()) == 0
    assert tables.markdown(tables.speedup_table()).startswith("| Test")


def test_too_few_repetitions_have_no_interval() -> None:
    table = tables.speedup_table(comparison(rounds=1, tests=("tg32",)))
    assert set(table["95% CI"]) == {"-"}
    assert set(table["verdict"]) == {"too few repetitions", "A/A control"}


def test_markdown_aligns_and_escapes() -> None:
    frame = pd.DataFrame({"name": ["a|b", None], "x": [1.5, float("nan")], "n": [10, 7]})
    frame.attrs["constant"] = {"Model": "m", "answer": ""}
    assert tables.markdown(frame).splitlines() == [
        "Model: m",
        "",
        "| name |    x |   n |",
        "|------|-----:|----:|",
        "| a\\|b | 1.50 |  10 |",
        "|      |      |   7 |",
    ]
    assert tables.markdown(frame.iloc[:0]).count("\n") == 3


class Issued:
    def __init__(self, pattern: str, waits: int):
        self._pattern, self.waits = pattern, waits

    def pattern(self, fold: bool = False) -> str:
        return self._pattern if fold else self._pattern * 2

    def counts(self) -> dict[str, int]:
        return {"waits": self.waits, "copies": 6}


def test_counts() -> None:
    table = launches.counts_table(
        {"per_copy": Issued("h scscg", 13), "implicit": Issued("h aaaag", 1)}
    )
    assert table.to_dict("list") == {
        "program": ["per_copy", "implicit"],
        "pattern": ["h scscg", "h aaaag"],
        "waits": [13, 1],
        "copies": [6, 6],
    }


def test_provenance_names_what_is_needed_to_run_again() -> None:
    run = comparison().run
    table = tables.provenance(run)
    rows = dict(zip(table["what"], table["value"], strict=True))
    assert rows["commit"] == run["commit"]["hash"] + " with uncommitted changes"
    assert rows["command"] == "workbench ab --toggle sync=a|b"
    assert rows["device"] == "embedded, 2 workers (as asked)"
    assert rows["versions"] == "python 3.11.9" and rows["GPU"] == "none"
    assert rows["model hash"] == "abc" and rows["seed"] == "0"
    assert "unknown" in set(tables.provenance({})["value"])


def test_launches_of_every_fusion_and_the_nodes_of_a_layer(tiny_model) -> None:
    with Engine.load(tiny_model("tiny-llama", "Q8_0"), device="null", toggles=Toggles()) as engine:
        table = launches.launches_table(engine).set_index("toggle")
        assert list(table.index) == [*Toggles.members("fuse"), "fuse"]
        none = engine.program().counts()["launches"]
        assert (table["alone"] + table["removes"] == none).all()
        assert table.loc["fuse", "without it"] == none
        assert table.loc["fuse_bias", "removes"] == 0, "the model has no biases"
        assert (table["removes"] >= 0).all()
        with engine.variant(Toggles().switched("fuse", "on")) as fused:
            nodes = launches.nodes_table(fused.program())
        assert len(nodes) == 7
        assert nodes.loc[nodes["op"] == "glu", "parts"].item() == (
            "mul_mat + mul_mat + swiglu + quantize"
        )
        halved = Toggles().switched("fuse", "on").switched("defer_norm", "on")
        with engine.variant(halved) as side:  # the first layer's first norm is whole
            names = list(launches.nodes_table(side.program())["node"])
        assert names[0] == "attn_norm-0" and names[-1] == "ffn_out-0" and len(names) == 6
        unfused = launches.nodes_table(engine.program())
        assert len(unfused) == 23 and set(unfused["parts"]) == {""}
