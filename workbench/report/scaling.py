"""How a speedup changes with something that is counted: tokens at once, sequences, cells."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from workbench.report import style
from workbench.report.serving import LINES, MARKERS

BAND_WORDS = "A/A band: what no change looks like"


def speedup_by(frames: Mapping[str, pd.DataFrame]) -> Figure:
    """A curve for each arm, with its 95 % intervals on the A/A bands; side by side what varies.

    frames: by title, rows with x, label (of the arm), speedup, low, high, band_low and band_high;
    `attrs["x"]` says what x counts. An arm has the same look in all. Raises ValueError where there
    is nothing to draw.
    """
    labels = list(dict.fromkeys(label for frame in frames.values() for label in frame["label"]))
    if not labels:
        raise ValueError("there is no speedup to draw")
    fig = style.picture(11, 3.6)
    axes = fig.subplots(1, len(frames), sharey=True, squeeze=False)[0]
    for ax, (title, frame) in zip(axes, frames.items(), strict=True):
        _draw(ax, frame, labels)
        ax.set_title(title, loc="left", fontsize=style.FONT + 1, fontweight="bold")
    axes[0].set_ylabel("speedup: t/s toggled / t/s baseline", fontsize=style.FONT)
    handles, names = [], []
    for ax in axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            if name not in names:
                handles.append(handle)
                names.append(name)
    handles.append(Patch(color=style.BAND, label=BAND_WORDS))
    fig.legend(
        handles=handles, loc="outside lower center", ncols=4, fontsize=style.FONT, frameon=False,
        handlelength=4,
    )  # fmt: skip
    return fig


def _draw(ax: Axes, frame: pd.DataFrame, labels: list[str]) -> None:
    """One panel. Curves are moved apart a little, so that no interval hides another."""
    band = frame.dropna(subset=["band_low"]).drop_duplicates("x").sort_values("x")
    ax.fill_between(band["x"], band["band_low"], band["band_high"], color=style.BAND, lw=0)
    if len(band) == 1:
        ax.axhspan(band["band_low"].iloc[0], band["band_high"].iloc[0], color=style.BAND, lw=0)
    ax.axhline(1, color=style.INK, lw=0.8, ls="--", zorder=1)
    for i, label in enumerate(labels):
        part = frame[frame["label"] == label].sort_values("x")
        if part.empty:
            continue
        x = part["x"] * 1.02 ** (i - len(labels) / 2)
        spread = (part["speedup"] - part["low"], part["high"] - part["speedup"])
        ax.errorbar(
            x, part["speedup"], [s.fillna(0).clip(lower=0) for s in spread], label=label,
            color=style.SERIES[i % len(style.SERIES)], ls=LINES[i % len(LINES)], lw=1.3,
            marker=MARKERS[i % len(MARKERS)], ms=5, mfc="white", elinewidth=1, capsize=2,
        )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(sorted(frame["x"].unique())))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(style.plain_number))
    ax.set_xlabel(str(frame.attrs.get("x", "")), fontsize=style.FONT)
    ax.tick_params(labelsize=style.FONT)
    ax.grid(axis="y", color="#DDDDDD", lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
