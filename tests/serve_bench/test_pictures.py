"""Throughput against latency: what is on the picture."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from tests.serve_bench.test_bench_text import ROW
from workbench.report import plots
from workbench.traffic.bench_text import points
from workbench.traffic.load import CLOSED, Arrivals


def several(name: str, factor: float) -> pd.DataFrame:
    made = points([ROW._replace(setting=Arrivals(CLOSED, n)) for n in (1, 8, 32)], name)
    return made.assign(tokens_per_s=np.array([100, 600, 900]) * factor, latency_ms=[10, 13, 35.5])


def test_each_setting_is_a_curve_and_each_point_has_its_concurrency():
    frame = pd.concat([several("skipping on", 2.0), several("skipping off", 1.0)])
    frame.attrs = points([ROW], "x").attrs
    fig = plots.throughput_against_latency(frame, "tiny-llama")
    (ax,) = fig.axes
    assert [line.get_label() for line in ax.lines] == ["skipping on", "skipping off"]
    assert ax.lines[0].get_xydata().tolist() == [[10, 200], [13, 1200], [35.5, 1800]]
    assert [t.get_text() for t in ax.texts] == ["1", "8", "32"] * 2
    assert ax.get_xlabel() == "Mean TPOT (ms)" and ax.get_title(loc="left") == "tiny-llama"
    looks = {(line.get_linestyle(), line.get_marker()) for line in ax.lines}
    assert len(looks) == 2, "they differ in grey, too"
    shown = [t.get_text() for axis in (ax.xaxis, ax.yaxis) for t in axis.get_ticklabels()]
    assert "1,000" in shown and not any("e+" in text or "$" in text for text in shown)
    assert fig._repr_png_()[0].startswith(b"\x89PNG")


def test_points_without_a_figure_are_left_out():
    frame = several("one", 1.0)
    frame.loc[1, "latency_ms"] = math.nan
    (ax,) = plots.throughput_against_latency(frame).axes
    assert len(ax.lines[0].get_xdata()) == 2
    with pytest.raises(ValueError, match="no point has a latency and a throughput"):
        plots.throughput_against_latency(frame.assign(tokens_per_s=math.nan))


def test_points_are_of_any_latency():
    made = points([ROW], "ours", "p99_ttft_ms")
    assert made.attrs["latency"] == "P99 TTFT (ms)"
    assert made.iloc[0].tolist() == ["ours", "2", pytest.approx(109.8), pytest.approx(27.692, 1e-3)]
