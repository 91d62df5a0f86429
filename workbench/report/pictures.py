"""Pictures of times: rates of tests, gaps between tokens, and what the host did in a gap.

DataFrames in, matplotlib figures out; nothing here measures.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from workbench.benchmarks.runs import results
from workbench.report import style
from workbench.trace.analysis import GAPS

HATCHES = ("", "//", "..", "xx")  # parts are told apart without their colours, too


def rates(samples: pd.DataFrame) -> style.Picture:
    """A row for each test and arm: a dot for each repetition, and the median as a bar, with its
    number.

    samples: the columns of samples.parquet, or of `results.rates` (test, arm, tps). Raises
    ValueError where there are none.
    """
    found = samples if "tps" in samples else results.rates(samples)
    if found.empty:
        raise ValueError("there is no repetition to draw")
    parts = dict(iter(found.groupby(["test", "arm"], sort=False)))
    names = [(test, arm) for test in samples["test"].unique() for arm in samples["arm"].unique()]
    rows = [(name, parts[name]) for name in names if name in parts]
    several = found["arm"].nunique() > 1
    fig = style.picture(9, 1.0 + 0.4 * len(rows))
    ax = fig.add_subplot()
    for y, (_, part) in zip(range(len(rows))[::-1], rows, strict=True):
        tps = part["tps"].to_numpy(float)
        ax.plot(tps, np.full(len(tps), y), "o", color=style.SKY, ms=5, mew=0, alpha=0.7)
        middle = float(np.median(tps))
        ax.plot([middle, middle], [y - 0.3, y + 0.3], color=style.INK, lw=1.6)
        ax.annotate(
            f"{middle:,.1f} t/s (n={len(tps)})", (1.01, y), fontsize=style.FONT, va="center",
            xycoords=("axes fraction", "data"), annotation_clip=False,
        )  # fmt: skip
    if found["tps"].max() > 3 * found["tps"].min():
        ax.set_xscale("log")
        style.plain_ticks(ax.xaxis, found["tps"].to_numpy(float))
    else:
        ax.ticklabel_format(axis="x", style="plain", useOffset=False)
    labels = [f"{test}  {arm}" if several else str(test) for (test, arm), _ in rows]
    ax.set_yticks(range(len(rows))[::-1], labels, fontsize=style.FONT)
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.set_xlabel("tokens/s (dot: a repetition; bar: the median)", fontsize=style.FONT)
    style.plain_axes(ax)
    return fig


def gaps(table: pd.DataFrame) -> style.Picture:
    """A row for each arm of `host_gaps`: the median gap between two tokens, and its quartiles; the
    number of the host's waits at the right.

    table: `Gaps.table()`: columns arm, waits, gap_us, low_us, high_us. Raises ValueError for no
    arm.
    """
    if table.empty:
        raise ValueError("there is no gap to draw")
    fig = style.picture(9, 1.0 + 0.36 * len(table))
    ax = fig.add_subplot()
    ys = np.arange(len(table))[::-1]
    for y, row in zip(ys, table.to_dict("records"), strict=True):
        ax.plot([row["low_us"], row["high_us"]], [y, y], color=style.BLUE, lw=2)
        ax.plot(row["gap_us"], y, "o", color=style.BLUE, ms=6, mfc="white", mew=1.5)
        ax.annotate(
            f"{row['gap_us']:,.1f} us, {row['waits']} waits", (1.01, y), fontsize=style.FONT,
            xycoords=("axes fraction", "data"), va="center", annotation_clip=False,
        )  # fmt: skip
    ax.set_yticks(ys, table["arm"], fontsize=style.FONT)
    ax.set_ylim(-0.6, len(table) - 0.4)
    ax.set_xlim(left=0)
    ax.set_xlabel("us without a kernel between two tokens (bar: quartiles)", fontsize=style.FONT)
    style.plain_axes(ax)
    return fig


def gap_parts(table: pd.DataFrame) -> style.Picture:
    """What the host did while no kernel ran, a bar for each traced step: the gap before the step
    and the gaps within it.

    table: `Profile.gaps()`. Raises ValueError where it has no gap.
    """
    if table.empty:
        raise ValueError("there is no gap to draw")
    kinds = [name for name in table.columns if name not in GAPS and table[name].sum() > 0]
    sums = table.groupby(["step", "between"], sort=True)[kinds].sum()
    fig = style.picture(9, 1.3 + 0.3 * len(sums))
    ax = fig.add_subplot()
    ys, left = np.arange(len(sums))[::-1], np.zeros(len(sums))
    for i, kind in enumerate(kinds):
        us, colour = sums[kind].to_numpy(float), style.SERIES[i % len(style.SERIES)]
        ax.barh(ys, us, left=left, height=0.7, label=kind, color=colour, hatch=HATCHES[i % 4])
        left += us
    words = {"steps": "before it", "launches": "within it"}
    names = [f"step {step}, {words.get(str(of), of)}" for step, of in sums.index]
    ax.set_yticks(ys, names, fontsize=style.FONT)
    ax.set_xlabel("us without a kernel, by what the host did (traced)", fontsize=style.FONT)
    style.plain_axes(ax)
    style.legend(fig, style.handles_of([ax]), min(len(kinds), 6))
    return fig
