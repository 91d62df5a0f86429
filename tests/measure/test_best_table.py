"""The table of preset `best`: what made-up runs say won on a kind of device."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.measure import best_table
from data.measure.matrix import SETS
from tests.benchmarks.made_runs import write
from workbench.benchmarks.compare.arms import switched
from workbench.benchmarks.runs.results import Run, load_run
from workbench.config import Toggles

SINGLY, EARLY, _ = SETS["embedded"]
ANY = EARLY.replace("plan_batch=one", "plan_batch=any")


@pytest.fixture
def compared(tmp_path):
    """A run that compares a toggle's values, or sets of toggles; speeds over the first arm's."""

    def made(toggle: str, speedups: dict, waits: dict | None = None, wrong="", first="", **how):
        first = first or (Toggles().value_of(toggle) if toggle else SINGLY)
        names = [first, *speedups]
        kept = Toggles(graph_reuse="set_rows")
        toggles = [(Toggles() if toggle else switched(kept, name)).to_dict() for name in names]
        answer = {"kind": "exact", "n_rows": 3, "n_differ": 0, "nmse": 0.0}
        answers = {n: answer | {"holds": n != wrong} for n in (*names[1:], f"{first} (A/A)")}
        result = {"toggle": toggle, "smoke": False, "warm_up": {}, "answers": answers}
        folder = write(
            tmp_path, f"r{len(list(tmp_path.iterdir()))}", {"tg8": [100.0, *(100.0 * v for v in
            speedups.values())]}, n=10, noise=0.001, arms=names, toggles=toggles, control=True,
            engine={"device": "embedded", "device_description": "a CPU"}, result=result,
            kind=how.get("kind", "ab"),
        )  # fmt: skip
        found = load_run(folder)
        for arm in found.run["arms"]:
            n = (waits or {}).get(arm["name"], 9)
            arm["program"] = {"tg8": {"counts": {"waits": n, "launches": 50}}}
        return Run(Path("made"), found.run, found.samples)

    return made


def values(**runs: Run) -> dict[str, str]:
    return {name: row["value"] for name, row in best_table.of_kind(runs).items()}


def test_what_is_faster_wins_and_a_member_that_loses_is_off(compared):
    """By tokens per second, else by fewer waits; where answers hold, and all steps can have it."""
    table = best_table.of_kind({
        "fuse": compared("fuse", {"on": 1.4}), "glu": compared("fuse_glu", {"on": 0.8}),
        "sync": compared("sync", {"packed": 1.2, "implicit": 1.3}),
        "pdl": compared("pdl", {"on": 1.0}),
    })  # fmt: skip
    assert {name: row["value"] for name, row in table.items()} == {
        "fuse": "on", "fuse_glu": "off", "sync": "implicit", "graph_reuse": "set_rows",
    }  # fmt: skip
    assert table["fuse"]["by"] == "faster" and table["fuse"]["runs"] == ["fuse"]
    waits = {"per_copy": 13, "packed": 3, "implicit": 1}
    found = compared("sync", {"packed": 1.0, "implicit": 1.0}, waits)
    assert best_table.of_kind({"run": found})["sync"] == {
        "value": "implicit", "by": "fewer waits", "runs": ["run"],
    }  # fmt: skip
    wrong = compared("sync", {"packed": 1.3, "implicit": 2.0}, waits, wrong="implicit")
    assert values(run=wrong)["sync"] == "packed", "answers come first"
    ways = compared("graph_reuse", {"pointer_table": 20.2, "set_rows": 20.1})
    assert values(ways=ways)["graph_reuse"] == "set_rows", "not every step can have a table"


def test_a_test_in_which_a_value_does_nothing_says_nothing(compared):
    gains, noise = compared("pdl", {"on": 1.2}), compared("pdl", {"on": 0.9})
    assert "pdl" not in values(gains=gains, noise=noise)
    noise.run["result"]["idle"] = {"tg8": {"on": "the steps of tg8 have equal programs"}}
    assert values(gains=gains, noise=noise)["pdl"] == "on"


def test_a_set_of_toggles_wins_as_a_whole(compared):
    """It stands beside what won one by one; over warm engines and fresh ones."""
    sync = compared("sync", {"auto": 1.2}, {"packed": 3, "per_copy": 9})
    table = best_table.of_kind({"sync": sync, "sets": compared("", {EARLY: 1.1, ANY: 1.05})})
    won = {name: row["value"] for name, row in table.items()}
    assert won == {
        "sync": "packed_implicit", "graph_reuse": "set_rows", "copy_stream": "compute",
        "results": "direct", "plans": "ours", "plan_scope": "step", "plan_batch": "one",
        "launch_ahead": "on",
    }  # fmt: skip
    assert table["sync"]["alone"] == {"value": "auto", "by": "faster", "runs": ["sync"]}
    assert table["plans"]["alone"] is None and "alone" not in table["graph_reuse"]
    Toggles(**won)  # legal together
    warm = compared("", {EARLY: 1.1, ANY: 1.2})
    assert "plan_batch" not in values(warm=warm), "any is the default"
    fresh = compared("", {EARLY: 1.0, ANY: 0.8}, kind="fresh")
    assert values(warm=warm, fresh=fresh)["plan_batch"] == "one"


@pytest.mark.parametrize(
    "run",
    [{"speedups": {EARLY: 0.9, ANY: 0.8}}, {"speedups": {EARLY: 1.0}},
     {"speedups": {EARLY: 1.5}, "wrong": EARLY},
     {"speedups": {EARLY: 1.5}, "first": "plans=off sync=packed"},
     {"speedups": {f"{EARLY} fuse=on": 1.5}}],
    ids=["slower", "no faster", "another answer", "beside another baseline", "other toggles, too"],
)  # fmt: skip
def test_a_set_that_did_not_win_changes_nothing(compared, run):
    assert values(sets=compared("", **run)) == best_table.SAFE
