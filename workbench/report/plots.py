"""Pictures: DataFrames in, matplotlib figures out. Nothing here measures, and nothing draws
through pyplot, so no global state is left behind and any thread may draw.

Every arm has a line style and a marker besides its colour, and every verdict a shape: the pictures
can be read in grey, on paper and by the colour-blind.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from workbench.report import style
from workbench.report.memory import lifetimes
from workbench.report.scaling import speedup_by
from workbench.report.serving import throughput_against_latency
from workbench.report.timelines import timeline, timeline_pair, timelines
from workbench.report.visits import kv_blocks

__all__ = [
    "kv_blocks", "lifetimes", "per_token", "speedup", "speedup_by", "throughput_against_latency",
    "timeline", "timeline_pair", "timelines",
]  # fmt: skip


def speedup(summary: Any) -> Figure:
    """A dot with its 95 % interval for every test and arm, on the A/A band of its test.

    summary: a comparison, or the frame of `AB.summary()` or `tables.summary`. The verdict stands at
    the right; filled triangles point where a difference goes, hollow dots are none.
    """
    rows = summary if isinstance(summary, pd.DataFrame) else summary.summary()
    rows = rows.reset_index(drop=True)
    fig = style.picture(9, 1.25 + 0.34 * max(len(rows), 1))
    ax = fig.add_subplot()
    ys = np.arange(len(rows))[::-1]
    for y, row in zip(ys, rows.to_dict("records"), strict=True):
        if pd.notna(row["band_low"]):
            ax.fill_betweenx(
                [y - 0.5, y + 0.5], row["band_low"], row["band_high"], color=style.BAND, lw=0
            )
        colour, marker, filled = VERDICT_LOOKS.get(row["verdict"], (style.GREY, "o", False))
        if pd.notna(row["low"]):
            ax.plot([row["low"], row["high"]], [y, y], color=colour, lw=2, solid_capstyle="butt")
        ax.plot(
            row["speedup"], y, marker, color=colour, ms=7, mew=1.5,
            mfc=colour if filled else "white",
        )  # fmt: skip
        ax.annotate(
            f"{row['speedup']:.3f}  {row['verdict']}", (1.01, y), fontsize=style.FONT, va="center",
            xycoords=("axes fraction", "data"), annotation_clip=False,
        )  # fmt: skip
    ax.axvline(1, color=style.INK, lw=0.8, ls="--", zorder=1)
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, 0.98), max(high, 1.02))  # a per mille must not look like a difference
    ax.set_yticks(ys, _row_labels(rows), fontsize=style.FONT)
    ax.set_ylim(-0.6, max(len(rows), 1) - 0.4)
    ax.ticklabel_format(axis="x", style="plain", useOffset=False)
    ax.set_xlabel("speedup: t/s toggled / t/s baseline (bar: 95 % interval)", fontsize=style.FONT)
    style.plain_axes(ax)
    fig.legend(
        handles=[Patch(color=style.BAND, label=BAND_WORDS)],
        loc="outside lower center", fontsize=style.FONT, frameon=False,
    )  # fmt: skip
    return fig


# verdict -> colour, marker, filled
VERDICT_LOOKS = {
    "faster": (style.BLUE, ">", True),
    "slower": (style.VERMILION, "<", True),
    "no difference": (style.INK, "o", False),
}
BAND_WORDS = "A/A band: what no change looks like on this machine"
ARM_LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
ARM_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def per_token(samples: pd.DataFrame, test: str | None = None) -> Figure:
    """How long each token took: the share of tokens done within a time, and time against position.

    samples: the columns of samples.parquet. test: one that generates tokens, the first by default.
    Left the empirical distribution by arm, right the median over repetitions of the token at each
    position. Raises ValueError where there is no test that times single tokens.
    """
    tokens = samples[(samples["n_tokens"] == 1) & (samples["token"] >= 0)]
    # a test is one of generated tokens where some repetition has several of them
    tests = [str(t) for t, part in tokens.groupby("test", sort=False) if part["token"].max() > 0]
    if test is None and tests:
        test = tests[0]
    if test not in tests:
        raise ValueError(f"no test that times single tokens ({test or 'none given'}): {tests}")
    tokens = tokens[tokens["test"] == test].assign(ms=lambda t: t["ns"] / 1e6)
    fig = style.picture(11, 3.4)
    left, right = fig.subplots(1, 2)
    colours = style.SERIES
    for i, (arm, part) in enumerate(tokens.groupby("arm", sort=False)):
        look = {
            "color": style.GREY if part["is_control"].iloc[0] else colours[i % len(colours)],
            "ls": ARM_LINES[i % len(ARM_LINES)],
            "lw": 1.4,
            "marker": ARM_MARKERS[i % len(ARM_MARKERS)],
            "ms": 4,
            "mfc": "white",
            "label": str(arm),
        }
        ms = np.sort(part["ms"].to_numpy())
        share = np.arange(1, len(ms) + 1) / len(ms)
        left.step(ms, share, where="post", markevery=max(len(ms) // 6, 1), **look)
        medians = part.groupby("token")["ms"].median()
        every = (i, max(len(medians) // 8, 1))
        right.plot(medians.index, medians, markevery=every, **look)
    slowest = tokens["ms"].max()
    edge = tokens["ms"].quantile(0.99) * 1.05
    if slowest > edge:
        left.set_xlim(tokens["ms"].min() * 0.98, edge)
        beyond = int((tokens["ms"] > edge).sum())
        left.annotate(
            f"{beyond} of {len(tokens)} tokens beyond, up to {slowest:.3g} ms",
            (0.98, 0.1), xycoords="axes fraction", ha="right", fontsize=style.FONT - 1,
            bbox={"color": "white"},
        )  # fmt: skip
    left.set_xlabel("time of a token (ms)", fontsize=style.FONT)
    left.set_ylabel("share of tokens done", fontsize=style.FONT)
    right.set_xlabel("token", fontsize=style.FONT)
    right.set_ylabel("median time (ms)", fontsize=style.FONT)
    left.set_title(test, loc="left", fontsize=style.FONT + 2, fontweight="bold")
    for ax in (left, right):
        ax.tick_params(labelsize=style.FONT)
        ax.ticklabel_format(style="plain", useOffset=False)
        ax.grid(color="#DDDDDD", lw=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    handles, names = left.get_legend_handles_labels()
    fig.legend(
        handles, names, loc="outside lower center", ncols=min(len(names), 6), fontsize=style.FONT,
        frameon=False, handlelength=4,
    )  # fmt: skip
    return fig


def _row_labels(rows: pd.DataFrame) -> list[str]:
    """What tells a row from the others: test and arm always, model and the like where they vary."""
    varying = [c for c in ("model", "device", "toggle") if c in rows and rows[c].nunique() > 1]
    return ["  ".join(map(str, row)) for row in rows[[*varying, "test", "label"]].to_numpy()]
