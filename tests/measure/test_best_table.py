"""The table of preset `best`: what the recorded runs say won on each kind of device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.measure import best_table
from data.measure.matrix import SETS, SETS_SEVERAL
from workbench.benchmarks.compare.arms import switched
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.stats import SAME
from workbench.benchmarks.runs.results import COMPLETE, Run, SampleTable
from workbench.config import Toggles
from workbench.config.presets import best_set


def test_the_committed_table_is_what_the_recorded_runs_say():
    made = best_table.made(best_table.folders_in(best_table.RESULTS))
    assert best_table.TABLE.read_text() == best_table.text(made), (
        "python -m data.measure.best_table"
    )
    for kind, sets in made.items():
        for wanted, rows in sets.items():
            Toggles(**best_set(kind, wanted).values)  # legal together
            for name, row in rows.items():
                assert row["runs"] or best_table.SAFE[name] == row["value"], (
                    f"{name} rests on nothing"
                )
                assert all((best_table.RESULTS / run).is_dir() for run in row["runs"])


def test_a_quiet_machine_s_runs_would_fill_the_table():
    """What wins by tokens per second, and a member of a family that loses where the others win."""
    table = best_table.of_kind(
        {
            "fuse": comparison("fuse", {"on": 1.4}),
            "glu": comparison("fuse_glu", {"on": 0.8}),
            "sync": comparison("sync", {"packed": 1.2, "implicit": 1.3}),
            "pdl": comparison("pdl", {"on": 1.0}),
        }
    )
    assert {name: row["value"] for name, row in table.items()} == {
        "fuse": "on", "fuse_glu": "off", "sync": "implicit", "graph_reuse": "set_rows",
    }  # fmt: skip
    assert table["fuse"]["by"] == "faster" and table["fuse"]["runs"] == ["fuse"]
    assert table["fuse_glu"]["by"] == "slower" and table["graph_reuse"]["runs"] == []


def test_fewer_waits_win_where_tokens_per_second_cannot_tell():
    waits = {"per_copy": 13, "packed": 3, "implicit": 1}
    found = comparison("sync", {"packed": 1.0, "implicit": 1.0}, waits)
    assert best_table.of_kind({"run": found})["sync"] == {
        "value": "implicit", "by": "fewer waits", "runs": ["run"],
    }  # fmt: skip
    found = comparison("sync", {"implicit": 1.0, "auto": 1.0}, waits | {"auto": 1})
    assert best_table.of_kind({"run": found}).get("sync", {}).get("value") == "auto"
    wrong = comparison("sync", {"packed": 1.3, "implicit": 2.0}, waits, wrong="implicit")
    assert best_table.of_kind({"run": wrong})["sync"]["value"] == "packed", "answers come first"


def test_a_way_that_not_every_step_can_have_does_not_win():
    ways = comparison("graph_reuse", {"pointer_table": 20.2, "set_rows": 20.1})
    assert best_table.of_kind({"ways": ways})["graph_reuse"]["value"] == "set_rows"


KEPT = Toggles(graph_reuse="set_rows")
SINGLY, EARLY, _ = SETS["embedded"]
ANY = EARLY.replace("plan_batch=one", "plan_batch=any")


def test_a_set_of_toggles_wins_as_a_whole():
    """It stands beside what won one by one, which stays for devices that cannot have the whole."""
    waits = {"packed": 3, "per_copy": 9}
    sync = comparison("sync", {"auto": 1.2}, waits)
    table = best_table.of_kind({"sync": sync, "sets": of_sets({EARLY: 1.1, ANY: 1.05})})
    won = {name: row["value"] for name, row in table.items()}
    assert won == {
        "sync": "packed_implicit", "graph_reuse": "set_rows", "copy_stream": "compute",
        "results": "direct", "plans": "ours", "plan_scope": "step", "plan_batch": "one",
        "launch_ahead": "on",
    }  # fmt: skip
    assert table["sync"] == {
        "value": "packed_implicit", "by": "faster together", "runs": ["sets"],
        "alone": {"value": "auto", "by": "faster", "runs": ["sync"]},
    }  # fmt: skip
    assert table["plans"]["alone"] is None and "alone" not in table["graph_reuse"]
    Toggles(**won)  # legal together
    assert best_table.text({"embedded": table})


def test_the_fastest_set_wins_over_all_tests_of_warm_engines_and_of_fresh_ones():
    warm = of_sets({EARLY: 1.1, ANY: 1.2})
    assert best_table.of_kind({"warm": warm}).get("plan_batch") is None, "any is the default"
    fresh = of_sets({EARLY: 1.0, ANY: 0.8}, "fresh")
    table = best_table.of_kind({"warm": warm, "fresh": fresh})
    assert table["plan_batch"]["value"] == "one" and table["plans"]["runs"] == ["fresh", "warm"]


def test_between_sets_a_speedup_inside_its_band_counts_as_1():
    warm = of_sets({EARLY: 1.1, ANY: 1.12})
    fresh = of_sets({EARLY: 1.0, ANY: 0.975}, "fresh", spread=0.05)
    verdicts = {row.arm: row.verdict for row in AB(fresh.run, fresh.samples).summary().itertuples()}
    assert verdicts[ANY] == SAME
    table = best_table.of_kind({"warm": warm, "fresh": fresh})
    assert table["plans"]["value"] == "ours" and "plan_batch" not in table, "any is the default"


@pytest.mark.parametrize(
    "run",
    [{"speedups": {EARLY: 0.9, ANY: 0.8}}, {"speedups": {EARLY: 1.0}},
     {"speedups": {EARLY: 1.5}, "wrong": EARLY},
     {"speedups": {EARLY: 1.5}, "first": "plans=off sync=packed"},
     {"speedups": {f"{EARLY} fuse=on": 1.5}}],
    ids=["slower", "no faster", "another answer", "beside another baseline", "other toggles, too"],
)  # fmt: skip
def test_a_set_that_did_not_win_changes_nothing(run):
    alone = best_table.of_kind({})
    assert best_table.of_kind({"sets": of_sets(**run)}) == alone == {
        name: {"value": value, "by": "safe, not measured yet", "runs": []}
        for name, value in best_table.SAFE.items()
    }  # fmt: skip


@pytest.mark.parametrize(("wanted", "sets"), [("one", SETS), ("several", SETS_SEVERAL)])
def test_sets_on_cuda_stand_beside_what_won_there_one_by_one(wanted, sets):
    alone = best_set("cuda", wanted).alone
    singly = {k: v for k, v in alone.items() if k in best_table.TOGETHER}
    first, *others = (switched(Toggles(), spec).to_dict() for spec in sets["cuda"])
    assert {name: first[name] for name in best_table.TOGETHER} == {
        name: singly.get(name, Toggles().value_of(name)) for name in best_table.TOGETHER
    }
    for made in others:
        assert {name for name in made if made[name] != first[name]} <= set(best_table.TOGETHER)


def of_sets(speedups, kind="ab", first=SINGLY, wrong="", spread=0.0):
    """A run that compares sets of toggles on the embedded device."""
    names = [first, *speedups, f"{first} (A/A)"]
    toggles = {name: switched(KEPT, name.removesuffix(" (A/A)")) for name in names}
    return made_up(toggles, speedups, kind, "", wrong=wrong, spread=spread)


def comparison(toggle, speedups, waits=None, wrong=""):
    """A run folder of kind `ab` on the embedded device, with these speedups over its baseline."""
    off = Toggles().value_of(toggle)
    toggles = dict.fromkeys((off, *speedups, f"{off} (A/A)"), Toggles())
    return made_up(toggles, speedups, "ab", toggle, waits, wrong)


def made_up(toggles, speedups, kind, toggle, waits=None, wrong="", spread=0.0):
    """toggles: of each arm, by name, the control's last, which goes from round to round by `spread`
    above the baseline and below it."""
    names, rounds = list(toggles), 10
    samples = SampleTable("made")
    for round_ in range(rounds):
        for name in names:
            speed = speedups.get(name, 1.0)
            if "A/A" in name:
                speed += spread * (-1) ** round_
            ns = np.full(8, int(1e6 * (1 + 0.001 * (round_ % 3)) / speed))
            samples.add(name, "A/A" in name, "tg8", round_, ns, np.ones(8, np.int64))
    counts = {name: {"waits": (waits or {}).get(name, 9), "launches": 50} for name in names}
    arms = [
        {
            "name": name, "is_control": "A/A" in name, "toggles": toggles[name].to_dict(),
            "sync_mode": "", "program": {"tg8": {"counts": counts[name]}},
        }
        for name in names
    ]  # fmt: skip
    answers = {
        name: {"kind": "exact", "holds": name != wrong, "n_rows": 3, "n_differ": 0, "nmse": 0.0}
        for name in names[1:]
    }
    run = {
        "kind": kind, "status": COMPLETE, "seed": 0, "tests": ["tg8"], "repetitions": rounds,
        "engine": {"device": "embedded"}, "arms": arms,
        "result": {"toggle": toggle, "smoke": False, "warm_up": {}, "answers": answers},
    }  # fmt: skip
    return Run(Path("made"), run, samples.frame())
