"""The tables of llama.cpp beside this engine, and of streams, from made-up samples."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from data.measure import readme
from data.measure.peer import FOLDER, MODELS, recorded_peers
from data.measure.recorded import Recorded
from tests import peer_runs
from tests.measure.made import target
from tests.peer_runs import ARMS, CONTROL
from workbench.benchmarks.compare import stats

# the control is the fastest, and counts for nothing
US = dict(zip(ARMS, (1250.0, 1400.0, 1000.0, 1300.0, 600.0, 500.0, 400.0), strict=True))


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """Intervals are looked at, and not how fine they are."""
    monkeypatch.setattr(stats, "N_RESAMPLES", 99)


def steady(rounds: int = 5, us: dict[str, float] = US) -> dict[str, dict[str, list[float]]]:
    return {
        arm: {"pp512": [v / 100] * rounds, "tg128": [v + i for i in range(rounds)]}
        for arm, v in us.items()
    }


@pytest.mark.long
def test_tables_are_what_the_samples_say(tmp_path):
    """The best arm of each side; a model that was not measured has a column that says so, and a run
    that was cut counts for nothing."""
    for model, card in zip(MODELS[3:6], ("one", "two", "one"), strict=True):
        peer_runs.write(tmp_path / FOLDER / model, steady(), quant="BF16", device=card)
    text, every = (
        readme.made(name, Recorded(tmp_path)) for name in ("peer-cuda", "peer-cuda-arms")
    )
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines()[:5]]
    assert [row[4] for row in rows[2:5]] == ["998", "1992", "2.00 (1.99..2.00)"]
    assert all(model in " ".join(rows[0]).replace(" ", "-").lower() for model in MODELS[:3])
    assert re.findall(r"(one|two); in turn", text.splitlines()[-1]) == ["one", "two"]
    assert "Each side is its fastest arm: `llama.cpp graph_opt=1` and `workbench best" in text
    assert re.search(r"50.0 \(50.0..50.0\) \| 1.04 \(1.04..1.04\)", every), "what reuse saves"
    found = target(tmp_path, "tg128 beside llama.cpp")
    assert found.measured.startswith("llama-3-8b-q4_0 2.00 (1.72), llama-3.2-1b-q4_k_m 2.00 (2.2)")
    missed, _, absent = found.met.partition("; ")
    assert missed == "**missed**: llama-3.2-1b-q4_k_m, llama-3.2-3b-q4_k_m"
    assert absent.startswith(f"not measured: {', '.join(MODELS[:3])}")
    path = tmp_path / FOLDER / MODELS[3] / "run.json"
    path.write_text(path.read_text().replace('"complete"', '"interrupted"'))
    assert len(recorded_peers(Recorded(tmp_path))) == 2


RATES = st.floats(50.0, 5000.0, allow_nan=False)


@pytest.mark.long
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=(Phase.explicit, Phase.generate),  # each example writes a folder
)
@given(st.data(), st.integers(5, 9), st.integers(1, 3))
def test_the_ratio_is_of_the_fastest_arms(tmp_path_factory, data, rounds, counted):
    """Beside medians and differences computed from the numbers that went in."""
    us = {
        arm: {"tg128": data.draw(st.lists(RATES, min_size=rounds, max_size=rounds))} for arm in ARMS
    }
    folder = tmp_path_factory.mktemp("run") / FOLDER / MODELS[0]
    peer = peer_runs.write(folder, us, rounds, counted)
    best = peer.best("tg128")
    beside, ratio = best.beside, best.beside.ratio
    medians = {arm: np.median(1e6 / np.array(of["tg128"])) for arm, of in us.items()}
    del medians[CONTROL]
    for side, arm, tps in (
        ("llama.cpp", best.arm_theirs, beside.before),
        ("workbench", best.arm_ours, beside.after),
    ):
        most = max(t for a, t in medians.items() if a.startswith(side))
        assert arm.startswith(side) and tps == pytest.approx(most, rel=1e-4)
    assert ratio.value == pytest.approx(beside.after / beside.before, rel=1e-4) or rounds % 2 == 0
    assert ratio.low <= ratio.value <= ratio.high and beside.band.low <= 1
    a, b = (np.array(us[arm]["tg128"]) for arm in ("llama.cpp", "llama.cpp reuse=off"))
    (one,) = peer.savings("tg128")
    assert one.us == pytest.approx(np.median(b - a), abs=0.1) and one.low <= one.us <= one.high
