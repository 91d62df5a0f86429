"""The legend of a picture names what is drawn in it, and nothing else."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import Patch

from tests.benchmarks.made_runs import comparison, write
from tests.trace.test_trace_files import token
from workbench.benchmarks.compare.compare import compare
from workbench.report import plots, style, timelines
from workbench.trace.profile import Timeline

IDLE = "no span: a stream idle, the host in Python"
POINT = "the host begins to wait (triangle), goes on (line)"


def legend(fig) -> list[str]:
    return [text.get_text() for one in fig.legends for text in one.get_texts()]


def rows_of(fig) -> list:
    """The marks of a picture's rows."""
    return [line for line in fig.axes[0].lines if line.get_marker() in {"<", ">", "o"}]


def faces(fig) -> set[tuple[float, ...]]:
    """The colours of the boxes in a picture."""
    return {tuple(c) for ax in fig.axes for made in ax.collections for c in made.get_facecolor()}


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return Timeline(token(0, 10**9, 60)).to_frame()


def test_a_timeline_names_the_kinds_in_its_window(frame):
    whole = legend(plots.timeline(frame))
    words = {look.word for look in timelines.LOOKS.values()}
    named = {"launch (host), kernel (stream)", "copy", "sync (the host waits)", POINT}
    assert named <= set(whole)
    assert set(whole) <= {*words, IDLE, POINT}
    first = float(frame["start_us"].min())
    last = frame[frame["kind"] == "launch"].iloc[-1]
    begin = float(last["start_us"]) - first + float(last["dur_us"]) / 4
    part = (begin, begin + float(last["dur_us"]) / 2)
    inside = frame[(frame["start_us"] - first < part[1])
                   & (frame["start_us"] + frame["dur_us"] - first > part[0])]  # fmt: skip
    kinds = set(inside["category"]) | set(inside.loc[inside["category"] == "device", "kind"])
    wanted = [look.word for kind, look in timelines.LOOKS.items() if kind in kinds]
    assert legend(plots.timeline(frame, window_us=part)) == [*wanted, IDLE] != whole
    assert legend(plots.timeline_pair(frame, frame, window_us=part)) == [*wanted, IDLE]


@pytest.mark.parametrize(("width", "most", "fewest"), [(11, 6, 3), (5, 6, 1), (2, 3, 1)])
def test_a_legend_is_no_wider_than_its_picture(width, most, fewest):
    """With every kind, as a step of a GPU that has several streams and a plan."""
    fig, words = style.picture(width, 5), [look.word for look in timelines.LOOKS.values()]
    style.legend(fig, [Patch(label=word) for word in (*words, IDLE, POINT)], most, title="traced")
    fig.draw_without_rendering()
    (made,) = fig.legends
    assert len(made.get_texts()) == len(words) + 2
    columns = {round(text.get_window_extent().x0) for text in made.get_texts()}
    assert fewest <= len(columns) <= most
    if len(columns) > 1:
        assert made.get_window_extent().x0 >= 0
        assert made.get_window_extent().x1 <= fig.bbox.width


def test_every_kind_in_a_legend_has_a_box(frame):
    for window in (None, "inputs", (0.0, 20.0)):
        fig = plots.timeline(frame, window_us=window)
        named = [look for look in timelines.LOOKS.values() if look.word in legend(fig)]
        drawn = {tuple(np.round(c, 3)) for c in faces(fig)}

        assert named and all(tuple(np.round(to_rgba(look.colour), 3)) in drawn for look in named)


def test_marks_and_a_band_are_named_where_they_are_drawn(tmp_path):
    summary = comparison().summary()
    verdicts = ["faster", "slower", "no difference", "A/A control"]
    band = "A/A band: what no change looks like on this machine"
    assert legend(plots.speedup(summary)) == [*verdicts, band, plots.EVEN_WORDS]
    fig = plots.speedup(summary)
    of_verdict = {line.get_label(): line for line in fig.legends[0].get_lines()}
    for line, verdict in zip(rows_of(fig), summary["verdict"], strict=True):
        named = of_verdict[verdict]
        assert (line.get_marker(), line.get_color()) == (named.get_marker(), named.get_color())
    a, b = write(tmp_path, "a", n=6), write(tmp_path, "b", {"tg8": 90.0}, n=6)
    apart = compare(a, b).summary()  # runs of bench have no control
    assert len(apart) == 1 and legend(plots.speedup(apart)) == ["slower", plots.EVEN_WORDS]
    frame = summary[~summary["is_control"]].assign(x=[1.0, 2.0, 4.0] * 2)
    assert plots.BAND_WORDS in legend(plots.speedup_by({"with": frame}))
    without = frame.assign(band_low=float("nan"), band_high=float("nan"))
    assert plots.BAND_WORDS not in legend(plots.speedup_by({"without": without}))
    assert plots.BAND_WORDS in legend(plots.speedup_by({"without": without, "with": frame}))


def test_lost_bytes_are_named_where_some_are_lost():
    row = {"name": "k", "offset": 0, "nbytes": 64, "first": 0, "last": 3, "stream": 1}
    safe = pd.DataFrame([row | {"lost": []}])
    assert legend(plots.lifetimes({"safe": safe})) == ["made on stream 1"]


def test_arms_of_a_picture_are_those_of_its_test():
    samples = comparison(tests=("tg32",)).samples
    some = samples[samples["arm"].isin(["per_copy", "copy_boundary"])]
    assert legend(plots.per_token(some)) == ["per_copy", "copy_boundary"]
