"""The table of preset `best`: what the recorded runs say won on each kind of device."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data.measure import best_table
from workbench.bench.results import COMPLETE, Run, SampleTable
from workbench.config import Toggles
from workbench.presets import best_table as committed


def test_the_committed_table_is_what_the_recorded_runs_say():
    made = best_table.made(best_table.folders_in(best_table.RESULTS))
    assert best_table.TABLE.read_text() == best_table.text(made), (
        "python -m data.measure.best_table"
    )
    for kind, rows in made.items():
        Toggles(**committed()[kind])  # legal together
        for name, row in rows.items():
            assert row["runs"] or best_table.SAFE[name] == row["value"], f"{name} rests on nothing"
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


def comparison(toggle, speedups, waits=None, wrong=""):
    """A run folder of kind `ab` on the embedded device, with these speedups over its baseline."""
    off, rounds = Toggles().value_of(toggle), 10
    names = [off, *speedups, f"{off} (A/A)"]
    samples = SampleTable("made")
    for round_ in range(rounds):
        for name in names:
            ns = np.full(8, int(1e6 * (1 + 0.001 * (round_ % 3)) / speedups.get(name, 1.0)))
            samples.add(name, "A/A" in name, "tg8", round_, ns, np.ones(8, np.int64))
    counts = {name: {"waits": (waits or {}).get(name, 9), "launches": 50} for name in names}
    arms = [
        {
            "name": name, "is_control": "A/A" in name, "toggles": Toggles().to_dict(),
            "sync_mode": "", "program": {"tg8": {"counts": counts[name]}},
        }
        for name in names
    ]  # fmt: skip
    answers = {
        name: {"kind": "exact", "holds": name != wrong, "n_rows": 3, "n_differ": 0, "nmse": 0.0}
        for name in names[1:]
    }
    run = {
        "kind": "ab", "status": COMPLETE, "seed": 0, "tests": ["tg8"], "repetitions": rounds,
        "engine": {"device": "embedded"}, "arms": arms,
        "result": {"toggle": toggle, "smoke": False, "warm_up": {}, "answers": answers},
    }  # fmt: skip
    return Run(Path("made"), run, samples.frame())
