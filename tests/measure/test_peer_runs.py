"""The tables of llama.cpp beside this engine: what the samples say, computed a second way."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.measure import peer as peers
from data.measure import readme, targets
from data.measure.peer import FOLDER, MODELS, SWITCHES, PeerRun, recorded_peers, theirs
from data.measure.recorded import Recorded
from tests import peer_runs
from tests.peer_runs import ARMS, BEST, CONTROL
from workbench.benchmarks.compare import stats
from workbench.benchmarks.runs import results

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "data" / "results"
RUNS = sorted(path.parent for path in (RESULTS / FOLDER).glob("*/run.json"))
US = dict(zip(ARMS, (1250.0, 1400.0, 1000.0, 1300.0, 600.0, 500.0, 600.0), strict=True))


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """Intervals are looked at, and not how fine they are."""
    monkeypatch.setattr(stats, "N_RESAMPLES", 99)


def steady(rounds: int = 5, us: dict[str, float] = US) -> dict[str, dict[str, list[float]]]:
    return {
        arm: {"pp512": [v / 100] * rounds, "tg128": [v + i for i in range(rounds)]}
        for arm, v in us.items()
    }


def again(folder: Path) -> dict[str, dict[str, float]]:
    """test -> arm -> median t/s, from the parquet file alone."""
    samples = pd.read_parquet(folder / "samples.parquet")
    found: dict[str, dict[str, float]] = {}
    for (test, arm), rows in samples.groupby(["test", "arm"]):
        rounds = [
            1e9 * of["n_tokens"].sum() / of["ns"].sum() for _, of in rows.groupby("repetition")
        ]
        found.setdefault(str(test), {})[str(arm)] = float(np.median(rounds))
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def first_screen(folder: Path) -> dict[str, dict[str, str]]:
    """model -> row -> cell of the table on README."""
    head, _, *rows = readme.made("peer-cuda", Recorded(folder)).splitlines()[:5]
    _, *models = cells(head)
    return {
        model: {cells(row)[0]: cells(row)[i] for row in rows} for i, model in enumerate(models, 1)
    }


def as_recomputed(folder: Path) -> None:
    """Every cell on README, and every arm on the page of the results."""
    shown, every = first_screen(folder), readme.made("peer-cuda-arms", Recorded(folder))
    absent = [column for column in shown.values() if set(column.values()) == {"not measured"}]
    assert len(shown) == len(MODELS)
    assert len(MODELS) - len(absent) == len(recorded_peers(Recorded(folder)))
    for path in sorted((folder / FOLDER).glob("*/run.json")):
        peer, found = PeerRun(results.load_run(path.parent)), again(path.parent)
        controls = {arm["name"] for arm in peer.run["arms"] if arm["is_control"]}
        of = {arm: tps for arm, tps in found["tg128"].items() if arm not in controls}
        them, us = (
            max(tps for arm, tps in of.items() if arm.startswith(side))
            for side in ("llama.cpp", "workbench")
        )
        column = shown[peer.model]
        assert (column["llama.cpp, t/s"], column["workbench, t/s"]) == (f"{them:.0f}", f"{us:.0f}")
        ratio, low, high = map(float, re.findall(r"\d+\.\d+", column["ratio"]))
        assert low <= ratio <= high and ratio == pytest.approx(us / them, abs=0.006)
        lines = [cells(x) for x in every.splitlines() if x.startswith(f"| {peer.model} ")]
        for (_, arm, tg, *_), name in zip(
            lines, [a["name"] for a in peer.run["arms"]], strict=False
        ):
            assert arm == name and tg.startswith(f"{found['tg128'][arm]:.1f} (")


def test_nothing_recorded_says_so(tmp_path):
    assert (
        readme.made("peer-cuda", Recorded(tmp_path)) == "Beside llama.cpp on a GPU: not measured."
    )
    assert "What llama.cpp's own" not in readme.made("peer-cuda-arms", Recorded(tmp_path))


def test_tables_are_what_the_samples_say(tmp_path):
    """The best arm of each side; a model that was not measured has a column that says so."""
    for model in MODELS[:2]:
        peer_runs.write(tmp_path / FOLDER / model, steady(), quant="BF16")
    as_recomputed(tmp_path)
    column = first_screen(tmp_path)["llama-3.2-1b-bf16 BF16"]
    assert column == {
        "llama.cpp, t/s": "998",
        "workbench, t/s": "1992",
        "ratio": "2.00 (1.99..2.00)",
    }
    text = readme.made("peer-cuda", Recorded(tmp_path))
    assert (
        "NVIDIA Made Up; in turn in one run, 5 rounds; llama.cpp 1.0 (build 1, commit abc)" in text
    )
    assert "The fastest: `llama.cpp graph_opt=1` and `workbench best" in text
    assert "| llama-3-8b Q8_0 |" in text, "not measured"
    every = readme.made("peer-cuda-arms", Recorded(tmp_path))
    assert re.search(r"50.0 \(50.0..50.0\) \| 1.04 \(1.04..1.04\)", every), "what reuse saves"
    assert every.count("| default") == 2 and "| graphs=off reuse=off" not in every


def test_each_card_has_its_caption(tmp_path):
    for model, card in zip(MODELS, ("one", "two", "one"), strict=False):
        peer_runs.write(tmp_path / FOLDER / model, steady(), device=card)
    said = readme.made("peer-cuda", Recorded(tmp_path)).splitlines()[-1]
    assert re.findall(r"(one|two); in turn", said) == ["one", "two"]


def test_the_first_screen_holds_every_model(tmp_path):
    """With all of MODELS measured, README is no longer than a first screen."""
    for model in MODELS:
        peer_runs.write(tmp_path / FOLDER / model, steady())
    text = (ROOT / "README.md").read_text()
    now = readme.BLOCK.sub(lambda m: m.group(0) if m.group(2) != "peer-cuda" else "", text)
    made = readme.made("peer-cuda", Recorded(tmp_path)).splitlines()
    n_marks, left_behind = 2, 1  # the block leaves an empty line
    assert len(now.splitlines()) - left_behind + n_marks + len(made) <= 150
    assert all(model in made[0] for model in MODELS)


def test_the_targets_are_held_against_the_same_run(tmp_path):
    """Twice llama.cpp's best is enough for all but the two that ask for more."""
    for model in MODELS[3:]:
        peer_runs.write(tmp_path / FOLDER / model, steady())
    (found,) = (t for t in targets.targets(Recorded(tmp_path)) if "same run" in t.what)
    assert found.measured.startswith("llama-3-8b-q4_0 2.00 (1.72), llama-3.2-1b-q4_k_m 2.00 (2.2)")
    missed, _, absent = found.met.partition("; ")
    assert missed == "**missed**: llama-3.2-1b-q4_k_m, llama-3.2-3b-q4_k_m"
    assert absent == f"not measured: {', '.join(MODELS[:3])}"


def test_a_run_that_was_cut_off_counts_for_nothing(tmp_path):
    folder = tmp_path / FOLDER / MODELS[0]
    peer_runs.write(folder, steady())
    run = json.loads((folder / "run.json").read_text()) | {"status": "interrupted"}
    (folder / "run.json").write_text(json.dumps(run))
    assert recorded_peers(Recorded(tmp_path)) == []


RATES = st.floats(50.0, 5000.0, allow_nan=False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(5, 9), st.integers(1, 3))
def test_the_ratio_is_of_the_fastest_arms_whatever_they_are(
    tmp_path_factory, data, rounds, counted
):
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


def test_an_order_that_does_not_turn_is_seen(tmp_path):
    peer = peer_runs.write(tmp_path / "run", steady())
    assert peer.interleaved
    swapped = peer.samples.copy()
    second = swapped["repetition"] == 1
    swapped.loc[second, "arm"] = swapped.loc[second, "arm"].replace({ARMS[0]: BEST, BEST: ARMS[0]})
    found = results.load_run(tmp_path / "run")
    assert not PeerRun(found._replace(samples=swapped)).interleaved
    again = swapped.copy()
    again["arm"] = ARMS[0]
    assert not PeerRun(found._replace(samples=again)).interleaved


# the committed runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_a_recorded_run_is_interleaved_repeated_and_of_one_card(folder):
    found = results.load_run(folder)
    peer, result = PeerRun(found), found.run["result"]
    assert found.run["kind"] == "peer" and folder.name in MODELS
    assert peer.interleaved and found.run["repetitions"] >= 5
    assert peers.answers_hold(found.run)
    assert result["peer"]["says"]["gpu_info"] in found.run["engine"]["device_description"]
    assert set(found.run["tests"]) == set(peers.TESTS)
    wanted = {theirs(name): SWITCHES[name] for name in ("default", "graphs=off", "graph_opt=1")}
    assert wanted.items() <= result["env"].items()
    n = result["repetitions_of_a_turn"] - 1
    for _, rows in found.samples.groupby(["arm", "test", "repetition"]):
        assert rows["token"].tolist() == list(range(n)) and n > 0


def test_recorded_tables_are_what_the_samples_say():
    if RUNS:
        as_recomputed(RESULTS)


def test_names_of_arms_are_apart():
    names = [theirs(switch) for switch in SWITCHES]
    assert len(set(names)) == len(names)
    for a, b in itertools.combinations(SWITCHES.values(), 2):
        assert a != b
