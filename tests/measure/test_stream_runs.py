"""The table of concurrent streams, from made-up runs."""

from __future__ import annotations

import numpy as np
import pytest

from data.measure import streams
from data.measure.recorded import NOT_MEASURED, Recorded
from data.measure.tables import block
from tests.peer_runs import CONTROL, write

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
    plain, planned, anywhere, late, _, inside = (pair.arms[1] for pair in streams.PAIRS)
    joined = streams.EITHER.arms[0]
    us |= {plain: (30.0, 2950.0), planned: (30.0, 2745.0), anywhere: (28.0, 2600.0)}
    us |= {late: (30.0, 2690.0), inside: (30.0, 2500.0), joined: (30.0, 2400.0)}
    us |= {CONTROL: us[ours[0]]}  # as the first arm of ours
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
    assert theirs["ratio"] == pytest.approx(4000 / 3850, rel=0.002)
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
    assert nowhere == f"Concurrent streams on a GPU: {NOT_MEASURED}."
