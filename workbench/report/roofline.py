"""The runs of `bench-kernels` as a table and as a roofline. Nothing here measures.

The roofline (Williams, Waterman and Patterson, Roofline, CACM 52:4, 2009) has one roof: the read
bandwidth measured in the same run. A kernel on the roof is as fast as memory allows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench.common.output import writing
from workbench.common.sizes import size

KEYS = ["type", "shape", "batch"]
PNG = "roofline.png"  # in a run folder
QUICK = "quick: no figures to quote"


def table(run: Mapping[str, Any]) -> pd.DataFrame:
    """The rows of a run of kind `kernels` (run.json as a dict), ways to launch side by side.

    A row per type, shape and batch, in the order measured. For each way to launch: the median and
    the fastest time in us, the spread of the replays in %, GB/s of weights, and the share of the
    read bandwidth in %. `F/B`: arithmetic operations for each byte of weights.
    """
    made: dict[tuple[Any, ...], dict[str, Any]] = {}
    kinds = [arm["name"] for arm in run["arms"]]
    for row in run["result"]["rows"]:
        key = tuple(row[k] for k in KEYS)
        line = made.setdefault(
            key,
            {
                "type": row["type"],
                "shape": row["shape"],
                "rows": row["rows"],
                "cols": row["cols"],
                "batch": row["batch"],
                "MB": f"{row['bytes'] / 1e6:.2f}",
                "F/B": f"{row['intensity']:.2f}",
            },
        )
        name = row["launch"]
        line |= {
            f"us {name}": f"{row['us']:.2f}",
            f"least us {name}": f"{row['us_min']:.2f}",
            f"spread % {name}": f"{100 * row['spread']:.1f}",
            f"GB/s {name}": f"{row['gbps']:.1f}",
            f"% of read {name}": f"{100 * row['share']:.1f}",
        }
    columns = ["type", "shape", "rows", "cols", "batch", "MB", "F/B"]
    figures = ("us", "least us", "spread %", "GB/s", "% of read")
    columns += [f"{what} {kind}" for kind in kinds for what in figures]
    return pd.DataFrame(list(made.values()), columns=columns).fillna("")


def caption(run: Mapping[str, Any]) -> str:
    """The caption of the table: the device, the roof, and whether the run counts."""
    result = run["result"]
    parts = [
        str(run["engine"].get("device_description")),
        f"read bandwidth {result['read_gbps']:.1f} GB/s",
        f"{size(result['rotating_bytes'])} of weights in turn over a cache of "
        f"{size(result['cache_bytes'])}",
        str(result["how"]),
    ]
    parts += [QUICK] if result["quick"] else []
    parts += [str(result["void"])] if result["void"] else []
    return "; ".join(parts)


def roofline(run: Mapping[str, Any]) -> Any:
    """The picture of a run of kind `kernels`: left GFLOP/s over F/B under the roof, right the share
    of the read bandwidth of each shape at the smallest batch. A matplotlib figure.

    Each type has a colour and a marker. Filled: the last way to launch (pdl where the run has it);
    hollow: plain. Raises ValueError where the run has no rows, ImportError without matplotlib.
    """
    from workbench.report.style import (
        FONT,
        INK,
        grid,
        handles_of,
        legend,
        picture,
        plain_ticks,
    )  # fmt: skip

    rows, result = pd.DataFrame(run["result"]["rows"]), run["result"]
    if rows.empty:
        raise ValueError("the run has no rows to draw")
    kinds = [arm["name"] for arm in run["arms"]]
    shapes = list(dict.fromkeys(rows["shape"]))
    fig = picture(12, max(4.2, 1.6 + 0.22 * len(shapes)))
    left, right = fig.subplots(1, 2)
    roof = result["read_gbps"]
    ends = [rows["intensity"].min() / 1.5, rows["intensity"].max() * 1.5]
    left.plot(ends, [x * roof for x in ends], color=INK, lw=1, label=f"{roof:.0f} GB/s read")
    least = rows[rows["batch"] == rows["batch"].min()]
    for i, (name, part) in enumerate(rows.groupby("type", sort=False)):
        last = part["launch"].iloc[-1]
        for kind, points in part.groupby("launch", sort=False):
            look = _look(i, str(kind) == kinds[-1])
            label = str(name) if kind == last else None
            left.plot(points["intensity"], points["gflops"], label=label, **look)
            at = points.index.intersection(least.index)
            ys = [len(shapes) - 1 - shapes.index(s) for s in points.loc[at, "shape"]]
            right.plot(100 * points.loc[at, "share"], ys, **look)
    left.set_xscale("log")
    left.set_yscale("log")
    # numbers, not powers of ten: the axes span little more than a decade
    for axis in (left.xaxis, left.yaxis):
        plain_ticks(axis, np.array(axis.get_view_interval()))
    left.set_xlabel("operations for each byte of weights", fontsize=FONT)
    left.set_ylabel("GFLOP/s", fontsize=FONT)
    right.axvline(100, color=INK, lw=1)
    right.set_xlim(0, max(105.0, 105 * float(least["share"].max())))
    right.set_yticks(range(len(shapes)), shapes[::-1], fontsize=FONT)
    right.set_xlabel(f"% of the read bandwidth, batch {least['batch'].iloc[0]}", fontsize=FONT)
    for ax in (left, right):
        grid(ax)
    left.set_title(_title(run, kinds), loc="left", fontsize=FONT + 1)
    handles = handles_of([left])
    legend(fig, handles, len(handles))
    return fig


def save(run: Mapping[str, Any], folder: Path) -> Path | None:
    """Draws the roofline into the run folder. Returns None without matplotlib."""
    try:
        figure = roofline(run)
    except ImportError:
        return None
    with writing(folder / PNG) as file:
        figure.savefig(file, format="png")
    return folder / PNG


def _title(run: Mapping[str, Any], kinds: Sequence[str]) -> str:
    device = str(run["engine"].get("device_description")).partition(" (")[0]
    void = ", VOID" if run["result"]["void"] else ""
    void += f", {QUICK}" if run["result"]["quick"] else ""
    return f"{device}{void}" + (f"; hollow: {kinds[0]}, filled: {kinds[-1]}" if kinds[1:] else "")


def _look(i: int, filled: bool) -> dict[str, Any]:
    from workbench.report import style

    colour = (*style.SERIES, style.GREY)[i % (len(style.SERIES) + 1)]
    return {
        "ls": "",
        "marker": "os^DvPX*"[i % 8],
        "ms": 5,
        "color": colour,
        "mfc": colour if filled else "white",
    }
