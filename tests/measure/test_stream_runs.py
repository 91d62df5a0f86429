"""The table of concurrent streams, from made-up runs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from data.measure import streams
from data.measure.recorded import NOT_MEASURED, Recorded
from data.measure.tables import block
from tests.peer_runs import AGAIN, write
from workbench.config.presets import best_set

MODEL = "llama-3-8b-q8_0"


def made(folder, us: dict[str, tuple[float, float]]):
    """A run with so many us a token of pp512 and of tg128 for each arm, each round a bit off."""
    noise = np.array([0.0, 0.001, -0.001, 0.002, -0.002])
    arms = {arm: {"pp512": a * (1 + noise), "tg128": b * (1 - noise)} for arm, (a, b) in us.items()}
    return write(folder / streams.FOLDER / MODEL, arms, name="llama-3-8b", quant="Q8_0")


@pytest.fixture
def recorded(tmp_path) -> Recorded:
    us = {"llama.cpp": (90.0, 4000.0), "llama.cpp graph_opt=1": (90.0, 3850.0)}
    ours = [arm for pair in streams.PAIRS for arm in pair.arms]
    us |= dict.fromkeys(ours, (30.0, 2800.0))
    planned, anywhere, late, plain, _, inside = (pair.arms[1] for pair in streams.PAIRS)
    joined = streams.EITHER.arms[0]
    us |= {plain: (30.0, 2950.0), planned: (30.0, 2745.0), anywhere: (28.0, 2600.0)}
    us |= {late: (30.0, 2690.0), inside: (30.0, 2500.0), joined: (30.0, 2400.0)}
    us |= {f"{ours[0]}{AGAIN}": us[ours[0]]}
    made(tmp_path, us)
    return Recorded(tmp_path)


def test_each_pair_stands_in_the_columns_of_the_thread_with_its_verdict(recorded):
    found = {
        (line.values["setting"], line.values["test"]): line.values
        for line in streams.lines(recorded)
    }
    assert len(found) == 2 * (2 + len(streams.PAIRS))
    theirs = found[streams.THEIRS.name, "tg128"]
    assert theirs["one"] == pytest.approx(250, rel=0.01) and theirs["claim"] == ""
    assert float(theirs["ratio"].split()[0]) == pytest.approx(4000 / 3850, rel=0.002)
    said = {pair.name: found[pair.name, "tg128"]["claim"] for pair in streams.PAIRS}
    assert said == {
        "no plans, no fusion": "not reproduced: slower",
        "plans, no fusion": "direction only",
        "plans, no fusion, any fork": "reproduced",
        "plans, no fusion, pdl=off": "reproduced",
        "no plans, fusion inside branches": "not reproduced: no difference",
        "plans, fusion inside branches": "reproduced",
    }
    either = found[streams.EITHER.name, "tg128"]
    assert either["found"] == "slower" and either["claim"] == ""
    assert found["plans, no fusion", "pp512"]["claim"] == "reproduced"
    assert found["plans, no fusion, any fork", "pp512"]["claim"] == "not reproduced: faster"


def test_the_page_says_where_it_ran_or_that_it_did_not(recorded, tmp_path):
    page = block(streams.BLOCKS["streams"], recorded)
    assert "NVIDIA Made Up; in turn in one run, 5 rounds; llama.cpp 1.0" in page
    assert "| llama-3-8b Q8_0" in page and "direction only" in page
    nowhere = block(streams.BLOCKS["streams"], Recorded(tmp_path / "nowhere"))
    said = ("Concurrent streams on a GPU", "Overlap of kernels on a GPU")
    assert nowhere == "\n\n".join(f"{title}: {NOT_MEASURED}." for title in said)


def test_the_page_says_on_which_models_streams_win_over_fusion(recorded):
    said = streams.either(recorded)
    assert ": slower on llama-3-8b Q8_0 (0.960). `streams=1`" in said
    assert best_set("cuda", "one").values.get("streams", "1") == "1", (
        "what the sentence says of the preset"
    )


def overlap(us: list[float], **of: object) -> dict:
    """What `Overlap.record` says of a token with a branch of each length."""
    branches = {"us": us, "resolved": [one >= 0.32 for one in us]}
    traced = {"overlap": 0.25, "collector": "cupti", "slowdown": 1.5}
    return {
        "tick_ns": 32, "overlap": 0.1234, "beside_us": 61.7, "total_us": 500.0, "us": 610.0,
        "plain_us": 600.0, "n_kernels": 480.0, "n_short": 3.0, "n_silent": 0.0,
        "branches": branches, "traced": traced,
    } | of  # fmt: skip


def test_overlap_stands_in_a_table_of_its_own_or_is_said_to_be_not_measured(recorded, tmp_path):
    without = block(streams.BLOCKS["streams"], recorded)
    rows = [row for row in without.split("\n") if row.startswith("| llama-3-8b Q8_0 | plans, no")]
    assert sum(row.rstrip(" |").endswith(NOT_MEASURED) for row in rows) == len(streams.OVERLAPS)
    assert "goes on by" not in without

    one, three, anywhere = streams.OVERLAPS.values()
    path = tmp_path / streams.FOLDER / MODEL / "run.json"
    run = json.loads(path.read_text())
    run["result"]["overlap"] = {
        one: overlap([], overlap=0.0, beside_us=0.0, traced=None),
        three: overlap([10.0, 2.0, 0.1]),
        anywhere: {"failed": "out of memory"},
    }
    path.write_text(json.dumps(run))
    serial, found, failed = (line.values for line in streams.overlaps(Recorded(tmp_path)))
    assert serial["Overlap"] == "0.0%" and serial["us a branch"] == serial["times as long"] == ""
    assert found == {
        "Model": "llama-3-8b Q8_0", "Setting": "plans, no fusion, streams=3", "Overlap": "12.3%",
        "us with two or more": "61.7 of 500.0", "us a branch": "2.0..10.0",
        "Branches unresolved": "1 of 3", "Kernels under ten ticks": "3 of 480", "silent": "0",
        "us a token": "600.0", "with noting": "610.0", "Overlap traced": "25.0% (cupti)",
        "times as long": "1.50",
    }  # fmt: skip
    assert failed["Overlap"] == f"{NOT_MEASURED}: out of memory"
    page = block(streams.BLOCKS["streams"], Recorded(tmp_path))
    assert "`%globaltimer` goes on by 32 ns. NVIDIA Made Up; in turn in one run" in page
    assert page.count("12.3%") == 1
