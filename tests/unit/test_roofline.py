"""The table and the picture of `bench-kernels`, from a run written out by hand."""

from __future__ import annotations

import pytest

from workbench.report import roofline
from workbench.report.tables import markdown


def row(type_: str, shape: str, batch: int, launch: str, us: float) -> dict:
    n_bytes = 9_437_184
    gbps = n_bytes / us / 1e3
    return {
        "type": type_, "shape": shape, "rows": 4096, "cols": 4096, "batch": batch,
        "launch": launch, "us": us, "us_min": us - 0.1, "spread": 0.05, "gbps": gbps,
        "share": gbps / 3100, "gflops": 2 * 4096**2 * batch / us / 1e3, "intensity": 3.5556 * batch,
        "bytes": n_bytes, "launches": 1, "copies": 29, "per_replay": 348, "replays": 15,
    }  # fmt: skip


def a_run(rows: list[dict], void: str = "") -> dict:
    return {
        "engine": {"device_description": "NVIDIA H100 80GB HBM3 (sm_90, 132 SMs), CUDA 13.0"},
        "arms": [{"name": "plain"}, {"name": "pdl"}],
        "result": {
            "rows": rows, "read_gbps": 3100.0, "void": void, "quick": False,
            "cache_bytes": 50 << 20, "rotating_bytes": 256 << 20, "how": "replayed",
        },
    }  # fmt: skip


@pytest.fixture
def run() -> dict:
    return a_run(
        [
            row("Q4_0", "8b.o", 1, "plain", 5.4),
            row("Q4_0", "8b.o", 1, "pdl", 4.2),
            row("Q4_0", "8b.o", 8, "plain", 6.0),
            row("F16", "8b.qkv", 1, "plain", 9.0),
        ]
    )


def test_ways_to_launch_stand_side_by_side(run):
    table = roofline.table(run)
    assert list(table["type"]) == ["Q4_0", "Q4_0", "F16"] and list(table["batch"]) == [1, 8, 1]
    first = table.iloc[0]
    assert (first["us plain"], first["us pdl"]) == ("5.40", "4.20")
    assert (first["GB/s plain"], first["% pdl"]) == ("1747.6", "72.5")
    assert (first["MB"], first["F/B"], first["spread plain"]) == ("9.44", "3.56", "5.0")
    assert table.iloc[1]["us pdl"] == "" == table.iloc[2]["% pdl"]
    assert markdown(table).count("\n") == 4


def test_the_caption_says_what_the_shares_are_of_and_whether_they_count(run):
    text = roofline.caption(run)
    assert "read bandwidth 3100.0 GB/s" in text and "268.44 MB of weights in turn" in text
    assert "void" not in text
    void = a_run(run["result"]["rows"], void="void: this H100 reads 2500 GB/s")
    assert roofline.caption(void).endswith("void: this H100 reads 2500 GB/s")
    assert "VOID" in roofline.roofline(void).axes[0].get_title(loc="left")
    quick = run | {"result": run["result"] | {"quick": True}}
    for picture, told in ((run, False), (quick, True)):
        title = roofline.roofline(picture).axes[0].get_title(loc="left")
        assert ("quick: no figures to quote" in title) == told


def test_the_roof_is_the_bandwidth_and_every_row_is_a_point(run):
    left, right = roofline.roofline(run).axes
    roof, *points = left.get_lines()
    for x, y in zip(*roof.get_data(), strict=True):
        assert y == pytest.approx(3100 * x)
    drawn = sorted((x, y) for line in points for x, y in zip(*line.get_data(), strict=True))
    expected = sorted((r["intensity"], r["gflops"]) for r in run["result"]["rows"])
    for found, wanted in zip(drawn, expected, strict=True):
        assert found == pytest.approx(wanted)
    shares = [x for line in right.get_lines()[:-1] for x in line.get_data()[0]]
    smallest = [100 * r["share"] for r in run["result"]["rows"] if r["batch"] == 1]
    assert sorted(shares) == pytest.approx(sorted(smallest))
    assert [t.get_text() for t in right.get_yticklabels()] == ["8b.qkv", "8b.o"]


def test_plain_is_hollow_and_the_last_way_filled(run):
    points = roofline.roofline(run).axes[0].get_lines()[1:]
    assert [line.get_markerfacecolor() == "white" for line in points] == [True, False, True]


def test_every_type_is_in_the_legend(run):
    (legend,) = roofline.roofline(run).legends
    assert [t.get_text() for t in legend.get_texts()] == ["3100 GB/s read", "Q4_0", "F16"]


def test_saving_writes_a_png(run, tmp_path):
    assert roofline.save(run, tmp_path) == tmp_path / "roofline.png"
    assert (tmp_path / "roofline.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="no rows"):
        roofline.roofline(a_run([]))
