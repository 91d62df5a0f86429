"""Whether gains add: of a comparison made up, and of an engine."""

from __future__ import annotations

import numpy as np
import pytest

import workbench as wb
from workbench.answers import conclusions, together
from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.comparison import AB
from workbench.report import plots

THREE = {"waits": "sync=packed_implicit", "plans": "plans=ours", "fusion": "fuse=on"}
KEPT = "graph_reuse=set_rows"
FACTORS = {"waits": 1.2, "plans": 1.5, "fusion": 1.1}


def test_each_set_of_switches_is_measured_once():
    assert together.sets_of([*THREE]) == {
        ("waits", "plans", "fusion"): "all", ("waits",): "alone", ("plans",): "alone",
        ("fusion",): "alone", ("waits", "plans"): "pair", ("waits", "fusion"): "pair",
        ("plans", "fusion"): "pair",
    }  # fmt: skip
    four = together.sets_of("abcd")
    assert len(four) == 1 + 4 + 6 + 4 and four["b", "c", "d"] == "all but one"
    assert together.sets_of(["waits"]) == {("waits",): "all"}


@pytest.fixture(scope="module")
def both(tiny_model, tmp_path_factory):
    """Measured comparisons: of THREE, and of a kept graph."""
    path, folder = tiny_model("tiny-llama", "Q8_0"), tmp_path_factory.mktemp("runs")
    with wb.Engine.load(path, device="embedded", toggles=together.start(KEPT)) as engine:
        found = together.measured(engine, THREE, "tg2", 5, 0, str(folder / "run"))
        reuse = together.reused(engine, THREE, "tg8", 5, 0, str(folder / "reuse"))
    assert AB.load(folder / "run").run["run_id"] == "run"
    assert AB.load(folder / "reuse").run["tests"] == ["tg2"], "a fourth of the tokens"
    return found, reuse


@pytest.fixture(scope="module")
def measured(both):
    return both[0]


def timed(found: AB, tps: list[float]) -> AB:
    """The comparison with the times that follow from `tps` of its arms, in order."""
    rates = dict(zip((arm["name"] for arm in found.run["arms"]), tps, strict=True))
    wobble = 1 + 0.001 * np.sin(np.arange(len(found.samples)))  # so that there are intervals
    ns = (1e9 / found.samples["arm"].map(rates) * wobble).astype(int)
    return AB(found.run, found.samples.assign(ns=ns))


def made(measured: AB, tps, control: float = 1000.0) -> AB:
    """The comparison, with the times that follow from `tps(names)`."""
    return timed(measured, [1000.0, *(tps(on) for on in together.sets_of([*THREE])), control])


@pytest.mark.long
def test_independent_gains_multiply(both):
    measured, reuse = both
    product = lambda names: 1000 * np.prod([FACTORS[name] for name in names])  # noqa: E731
    gains = together.gains(made(measured, product), THREE)
    several = gains[gains["product"].notna()]
    assert set(several["together"]) == {together.AS}
    assert np.allclose(several["interaction"], 1, atol=0.01)
    assert np.allclose(several["interaction"], several["speedup"] / several["product"])
    anew = timed(reuse, [50, 1000, 52, 1980, 50])
    table = together.alone_table(gains, anew).set_index("mechanism")
    assert list(table.index) == ["waits", "plans", "fusion", "reuse"]
    assert list(together.alone_table(gains)["mechanism"]) == ["waits", "plans", "fusion"]
    assert table.loc["plans", "alone"] == "1.50 faster"
    assert table.loc["plans", "as the last"] == pytest.approx(1.5, abs=0.01)
    speedup, verdict = table.loc["reuse", "alone"].split()
    assert float(speedup) == pytest.approx(20, abs=0.03) and verdict == "faster"
    low, high = map(float, table.loc["reuse", "95% CI"].split(".."))
    assert 19.9 < low < 20 < high < 20.1
    assert table.loc["reuse", "us saved alone"] == pytest.approx(1e6 / 50 - 1000, rel=0.01)
    assert table.loc["reuse", "as the last"] == pytest.approx(1980 / 52, rel=0.01)
    saved = pytest.approx(1e6 / 52 - 1e6 / 1980, rel=0.01)
    assert table.loc["reuse", "us saved last"] == saved
    first = str(conclusions.together(gains)).splitlines()[0]
    assert first.startswith("Whether the switches gain more or less together than the product ")
    assert "the product is 1.98" in first


@pytest.mark.long
def test_an_interaction_inside_the_square_of_the_band_is_none(measured):
    """The control differs by 2 %: a ratio of two ratios may differ by 4."""
    for more, told in ((1.03, together.AS), (1.06, together.MORE)):
        tps = lambda names: 1000 * (more if len(names) == 2 else 1)  # noqa: B023, E731
        gains = together.gains(made(measured, tps, 1020.0), THREE)
        assert set(gains.loc[gains["kind"] == together.PAIR, "together"]) == {told}


@pytest.mark.long
def test_gains_that_need_or_rob_each_other_are_told(measured):
    """waits and plans remove the same wait; fusion gains only beside plans."""
    tps = {("waits",): 1200, ("plans",): 1200, ("fusion",): 1000, ("waits", "plans"): 1200,
           ("waits", "fusion"): 1200, ("plans", "fusion"): 1500,
           ("waits", "plans", "fusion"): 1500}  # fmt: skip
    gains = together.gains(made(measured, tps.__getitem__), THREE)
    told = gains.set_index("label")["together"]
    assert told["waits + plans"] == together.LESS and told["plans + fusion"] == together.MORE
    assert told["waits + fusion"] == together.AS and told["all 3"] == together.MORE
    said = str(conclusions.together(gains)).splitlines()
    assert "These pairs gain more together: plans + fusion (1.25)." in said
    assert "These pairs share a gain: waits + plans (0.83)." in said
    table = together.together_table(gains)
    assert len(table) == 4 and table["together"].iloc[0] == "all 3", "all of them come first"
    drawn = together.drawn(gains)
    ax = plots.together(drawn).axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == drawn["label"].tolist()
    with pytest.raises(ValueError, match="no set"):
        plots.together(drawn.iloc[:0])


def test_a_device_has_the_mechanisms_that_it_can_honour(tiny_model):
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(path, device="embedded", toggles=together.start(KEPT)) as engine:
        assert [*together.possible(engine)] == ["waits", "plans", "fusion", "streams"]
    with wb.Engine.load(path, device="embedded", toggles="baseline") as engine:
        assert together.reused(engine, THREE, "tg8", 5, 0, "no-run") is None, "it keeps no graph"
    with wb.Engine.load(path, device="host", toggles=together.start(KEPT)) as engine:
        assert [*together.possible(engine)] == ["fusion"]


@pytest.mark.long
def test_few_repetitions_have_no_verdict(measured):
    found = made(measured, lambda names: 1000.0 + len(names))
    few = found.samples[found.samples["repetition"] < 2]
    gains = together.gains(AB(found.run, few), THREE)
    assert set(gains["together"].dropna()) == {"too few repetitions"}
    assert str(conclusions.together(gains)).startswith("Whether the gains multiply is not known")


def test_an_interaction_is_a_ratio_of_medians_with_an_interval():
    start, one, both = (
        np.array(side, float) for side in ([10, 10, 11], [20, 20, 22], [40, 44, 40])
    )
    found = stats.interaction(start, both, [one, one])
    assert found.value == pytest.approx(1) and found.low <= 1 <= found.high and found.n == 3
    assert stats.interaction(start[:2], 2 * one[:2], [one[:2]] * 2) == pytest.approx((1, 1, 1, 2))
    alone = stats.interaction(start[:1], both[:1], [one[:1]])
    assert alone.value == pytest.approx(2) and np.isnan([alone.low, alone.high]).all()
