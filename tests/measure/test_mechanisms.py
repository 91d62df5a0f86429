"""README's first table: a row per mechanism, with the numbers of the recorded comparisons."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from data.measure.mechanisms import (
    AFTER,
    ATTENTION,
    ATTENTION_MODEL,
    BEFORE,
    GAP,
    MECHANISMS,
    SIDE_BY_SIDE,
    Mechanism,
    attention,
    side_by_side,
)  # fmt: skip
from data.measure.peer import recorded_peer
from data.measure.readme import made
from data.measure.recorded import Recorded
from data.measure.skipping import comparisons, runs
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.runs import results
from workbench.benchmarks.times import gaps

RESULTS = Path(__file__).resolve().parents[2] / "data" / "results"


def run_folder(spec: Mechanism) -> Path:
    return RESULTS / f"cuda-{spec.folder}"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


RECORDED = [spec for spec in MECHANISMS if (run_folder(spec)).is_dir()]
needs_runs = pytest.mark.skipif(not RECORDED, reason="no mechanism was measured")


@needs_runs
def test_every_row_is_of_a_recorded_run():
    shown = [spec for spec in MECHANISMS if spec in RECORDED or not spec.later]
    head, _, *rows = made("mechanisms", Recorded(RESULTS)).splitlines()[: len(shown) + 2]
    for spec, line in zip(shown, rows, strict=True):
        row = dict(zip(cells(head), cells(line), strict=True))
        folder = run_folder(spec)
        if not folder.is_dir():  # its run is still to be made, on a machine with a GPU
            assert "not measured" in line
            continue
        baseline = results.load_run(folder).run["arms"][0]
        if spec.test == GAP:
            continue
        found = results.load_run(folder)
        ab = AB(found.run, found.samples)
        toggle, name = ab.run["result"]["toggle"], baseline["name"]
        assert row["off"] == (f"{toggle}={name}" if toggle else name)
        summary = ab.summary().set_index(["test", "arm"]).loc[(spec.test, spec.on)]
        assert row["verdict"] == summary["verdict"]
        assert row["speedup"].startswith(f"{summary['speedup']:.2f} ({summary['low']:.2f}..")
        assert row["at on"] == f"{summary['tps_toggled']:.1f} t/s"


@pytest.mark.skipif(MECHANISMS[0] not in RECORDED, reason="the gap was not measured")
def test_the_gap_s_row_is_a_ratio_by_round():
    spec = MECHANISMS[0]
    found = gaps.load(run_folder(spec))
    ratio, band = found.ratio(BEFORE, AFTER, "own")
    table = found.table()
    us = table[table["copy_stream"] == "own"].groupby("sync")["gap_us"].first()
    assert band.low < 1 < band.high
    assert ratio.low <= ratio.value <= ratio.high
    before = us[BEFORE]
    after = us[AFTER]
    assert ratio.value == pytest.approx(before / after, rel=0.1)


def test_without_runs_the_table_says_so(tmp_path):
    assert made("mechanisms", Recorded(tmp_path)) == "Mechanisms: not measured."


@needs_runs
def test_a_missing_run_keeps_its_row(tmp_path):
    spec = RECORDED[-1]
    (tmp_path / f"cuda-{spec.folder}").symlink_to(run_folder(spec))
    lines = made("mechanisms", Recorded(tmp_path)).splitlines()
    first = [one for one in MECHANISMS if not one.later or one is spec]
    assert sum("not measured" in line for line in lines) == len(first) - 1
    assert sum(spec.name in line for line in lines) == 1


def test_branches_side_by_side_have_the_numbers_of_their_campaign(tmp_path):
    recorded = Recorded(RESULTS)
    page = made("mechanisms", recorded)
    assert not list(side_by_side(Recorded(tmp_path)))
    for one, line in zip(SIDE_BY_SIDE, side_by_side(recorded), strict=True):
        found = recorded_peer(recorded, one.model, "peer-streams")
        tps = found.rates("tg128")
        off, on = (statistics.median(tps[arm]) for arm in one.pair.arms)
        said = line.values
        assert (said["at off"], said["at on"]) == (f"{off:.1f} t/s", f"{on:.1f} t/s")
        assert float(said["speedup"].split()[0]) == pytest.approx(on / off, abs=0.02)
        assert one.name in page
        a, b = (found.toggles(arm) for arm in one.pair.arms)
        assert a["streams"] == "1" != b["streams"]
        assert (said["with"] == "all else on, no fusion") == (a["fuse_rope_store"] == "off")


def test_rows_of_attention_are_of_their_arms():
    """Each row names two arms that its comparison has."""
    every = {one.folder: one for one in comparisons(8192, [512, 2048, 8192], 32, 5)}
    for one in ATTENTION:
        assert {one.off, one.on} <= set(every[one.folder].arms)
        assert one.off.split()[0].partition("=")[0] == one.on.split()[0].partition("=")[0]
    recorded = Recorded(RESULTS)
    found = {line.values["mechanism"]: line for line in attention(recorded)}
    known = runs(recorded, ATTENTION_MODEL)
    assert set(found) == {one.name for one in ATTENTION if one.folder in known}
    for one in ATTENTION:
        if one.name in found:
            run, values = known[one.folder], found[one.name].values
            test = run.run["tests"][-1]
            ratio = run.ratio(test, one.off, one.on, one.phase)
            assert values["speedup"].startswith(f"{ratio.value:.2f} (")
            at_once = every[one.folder].n_ubatch if one.phase == "prompts" else one.phase
            assert str(at_once) in values["workload"].split(", ")[-1]
