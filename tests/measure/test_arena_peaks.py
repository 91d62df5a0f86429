"""What lifetimes cost in memory: what is recorded is what is computed again, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.measure import readme
from data.measure.arena_peaks import MODELS, NAME, OUT, lines, peaks
from data.measure.recorded import Recorded
from tests.profiles import share
from workbench.config import Fork, Lifetimes

ROOT = Path(__file__).resolve().parents[2]


def rows() -> list[dict[str, Any]]:
    return json.loads(OUT.read_text())["rows"]


@pytest.mark.parametrize("model", share(MODELS, every=4))
def test_what_is_recorded_is_computed_again(model):
    recorded = [row for row in rows() if row["model"].startswith(f"{model} ")]
    assert recorded == list(peaks([model]))


def test_visibility_overwrites_nothing_and_the_others_do():
    branched = [row["overwritten"] for row in rows() if row["used"] > 1]
    assert not any(found[Lifetimes.VISIBILITY] for found in branched)
    assert all(found[Lifetimes.SERIAL] for found in branched)
    assert sum(found[Lifetimes.INTERLEAVED] > 0 for found in branched) > len(branched) / 2


def test_without_branches_all_lifetimes_are_equal():
    alone = [row for row in rows() if row["used"] == 1]
    assert {(row["test"], row["fork"]) for row in alone} == {("pp512", Fork.QKV)}
    for row in alone:
        assert len(set(row["bytes"].values())) == 1 and not any(row["overwritten"].values())


def test_visibility_is_near_the_least_where_it_needs_much_more_than_serial():
    """What it takes there no right layout saves: branches that run side by side need their bytes
    side by side."""
    dear = [
        row for row in rows()
        if row["bytes"][Lifetimes.VISIBILITY] > 1.3 * row["bytes"][Lifetimes.SERIAL]
    ]  # fmt: skip
    assert dear and all(row["least"] > row["bytes"][Lifetimes.SERIAL] for row in dear)
    assert all(row["bytes"][Lifetimes.VISIBILITY] < 1.1 * row["least"] for row in dear)


def test_no_right_layout_is_below_the_least():
    assert all(row["bytes"][Lifetimes.VISIBILITY] >= row["least"] for row in rows())


def test_readme_has_the_table(tmp_path):
    page, recorded = (ROOT / "data/results/README.md").read_text(), Recorded(OUT.parent)
    assert readme.made(NAME, recorded) in page
    assert readme.made(NAME, Recorded(tmp_path)) == "Memory by lifetimes: not measured."
    assert sum(len(line.values["streams"].split(" or ")) for line in lines(recorded)) == sum(
        row["used"] > 1 for row in rows()
    )
