"""How throughput trades against latency as more requests share a server."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from workbench.report import style

LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HALO = [withStroke(linewidth=2, foreground="white")]  # a number that lies on a line is read
LETTERS, HANDLE_LETTERS = 110, 10  # of the legend's line, and what a curve's own look takes of it
DECADES = 0.7  # an axis with less has more ticks than 1, 2, 5


def throughput_against_latency(
    frame: pd.DataFrame, title: str = "throughput against latency"
) -> Figure:
    """One curve per setting: tokens a second over the latency that its requests see. Where a curve
    goes straight up more requests cost nothing, and where it lies flat they only wait.

    frame: columns curve, label (of a point: requests in flight, or a rate), latency_ms and
    tokens_per_s, in the order in which the points are joined (`bench_text.points` makes it).
    `attrs["latency"]` says which latency. Points without a figure are left out. Raises ValueError
    where none has one.
    """
    known = frame[(frame["latency_ms"] > 0) & (frame["tokens_per_s"] > 0)]
    if known.empty:
        raise ValueError("no point has a latency and a throughput")
    fig = style.picture(8.5, 4.8)
    ax = fig.add_subplot()
    for i, (curve, part) in enumerate(known.groupby("curve", sort=False)):
        colour = style.SERIES[i % len(style.SERIES)]
        ax.plot(
            part["latency_ms"], part["tokens_per_s"], label=str(curve), color=colour, lw=1.4,
            ls=LINES[i % len(LINES)], marker=MARKERS[i % len(MARKERS)], ms=5, mfc="white",
        )  # fmt: skip
        _name_points(ax, part, colour, above=i % 2 == 0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.margins(0.08, 0.12)
    for axis, values in ((ax.xaxis, known["latency_ms"]), (ax.yaxis, known["tokens_per_s"])):
        _plain_ticks(axis, values.to_numpy(float))
    ax.set_xlabel(str(frame.attrs.get("latency", "latency (ms)")), fontsize=style.FONT)
    ax.set_ylabel("output tokens/s", fontsize=style.FONT)
    ax.set_title(title, loc="left", fontsize=style.FONT + 2, fontweight="bold")
    ax.tick_params(which="both", labelsize=style.FONT)
    ax.grid(color="#DDDDDD", lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    names = known["curve"].astype(str).unique()
    in_a_line = LETTERS // (max(map(len, names)) + HANDLE_LETTERS)
    fig.legend(
        loc="outside lower center", ncols=min(len(names), max(1, in_a_line), 4), frameon=False,
        fontsize=style.FONT, handlelength=4,
    )  # fmt: skip
    return fig


def _name_points(ax: Axes, part: pd.DataFrame, colour: str, above: bool) -> None:
    """Labels above and to the left of a curve's points, or below and to the right: so that labels
    of two curves that lie close do not meet."""
    offset, ha, va = ((-5, 4), "right", "bottom") if above else ((5, -4), "left", "top")
    for x, y, label in zip(part["latency_ms"], part["tokens_per_s"], part["label"], strict=True):
        ax.annotate(
            str(label), (x, y), xytext=offset, textcoords="offset points", ha=ha, va=va,
            color=colour, fontsize=style.FONT, path_effects=HALO,
        )  # fmt: skip


def _plain_ticks(axis: Axis, values: np.ndarray) -> None:
    """Numbers as people write them, at 1, 2 and 5 of each decade; at more where there is less."""
    wide = np.log10(values.max() / values.min()) > DECADES
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if wide else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)))
    axis.set_major_formatter(FuncFormatter(style.plain_number))
    axis.set_minor_formatter(NullFormatter())
