"""Toggles of preset `best` that won together: a device has them as a whole, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from data.measure.matrix import SETS
from data.measure.presets import best
from data.measure.recorded import Recorded
from workbench.benchmarks.compare.arms import parse_changes
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.config.presets import best_set

WHOLE = parse_changes(SETS["embedded"][1])
ALONE = {"sync": "auto", "graph_reuse": "set_rows"}


@pytest.fixture(autouse=True)
def won(monkeypatch):
    """A table in which a set has won on every kind of device."""

    def row(value: str, **more: Any) -> dict[str, Any]:
        return {"value": value, "by": "made up", "runs": []} | more

    rows = {name: row(value) for name, value in ALONE.items()}
    rows |= {
        name: row(value, alone=row(ALONE[name]) if name in ALONE else None)
        for name, value in WHOLE.items()
    }
    sets = {"one": rows, "several": {}}
    table = json.loads(json.dumps(dict.fromkeys(("cuda", "embedded", "host"), sets)))
    for module in ("workbench.config.presets", "data.measure.presets"):
        monkeypatch.setattr(f"{module}.best_rows", lambda: table)
    return table


def load(tiny_model, device="embedded", **given) -> wb.Engine:
    return wb.Engine.load(tiny_model("tiny-llama", "Q8_0"), device=device, **given)


def test_a_device_that_can_has_the_whole(tiny_model):
    """With the baseline's answer, plans replayed, and launched ahead."""
    tokens = (1, 5, 9, 2, 7, 3)
    with load(tiny_model) as engine:
        assert engine.toggles.changed() == {"graph_reuse": "set_rows"} | WHOLE
        found, counted = [engine.step([token]).copy() for token in tokens], engine.counters
        with engine.variant(Toggles()) as baseline:
            for token, logits in zip(tokens, found, strict=True):
                assert np.array_equal(logits, baseline.step([token]))
        assert counted["plans_replayed"] > 0 and counted["plans_ahead"] > 0


@pytest.mark.parametrize(
    "given", [{"device": "host"}, {"n_devices": 2}], ids=["no capture", "two devices"]
)
def test_a_device_that_cannot_has_what_won_one_by_one(tiny_model, given):
    with load(tiny_model, **given) as engine:
        assert engine.toggles == Toggles(**ALONE)


def test_what_is_changed_can_rule_the_whole_out(tiny_model):
    """Then all of it goes, and what won one by one stands with the change."""
    with load(tiny_model) as engine:
        for name, value in (("plans", "off"), ("sync", "per_copy"), ("n_copies", "4"),
                            ("graph_reuse", "rebuild")):  # fmt: skip
            found = engine.resolve(Toggles.preset("best", **{name: value}))
            assert found == Toggles(**ALONE | {name: value})
        for name, value in (("launch_ahead", "off"), ("results", "copy"), ("fuse", "on")):
            found = engine.resolve(Toggles.preset("best", **{name: value}))
            assert found == Toggles(**ALONE | WHOLE | {name: value})


def test_a_word_of_the_end_goes_with_the_launch_ahead_it_tells_of(tiny_model, won):
    """The rest of the set stays: plans of steps with direct results."""
    won["embedded"]["one"]["plan_end"] = {
        "value": "word",
        "by": "made up",
        "runs": [],
        "alone": None,
    }
    with load(tiny_model) as engine:
        whole = Toggles(**ALONE | WHOLE | {"plan_end": "word"})
        assert engine.resolve("best") == whole
        assert engine.resolve(Toggles.preset("best", launch_ahead="on")) == whole
        without = ALONE | WHOLE | {"launch_ahead": "off"}
        assert engine.resolve(Toggles.preset("best", launch_ahead="off")) == Toggles(**without)
        with pytest.raises(UsageError, match="plan_end=word and launch_ahead=off clash"):
            engine.variant(Toggles.preset("best", launch_ahead="off", plan_end="word"))


def test_the_page_says_what_stands_for_each_value_alone():
    lines = {line.values["toggle"]: line.values for line in best(Recorded(Path("nowhere")))}
    assert lines["`sync=packed_implicit`"]["alone"] == "`sync=auto`"
    assert lines["`plans=ours`"]["alone"] == "`plans=off`"
    assert lines["`graph_reuse=set_rows`"]["alone"] == ""
    assert best_set("cuda", "one").together == WHOLE
