"""Pictures of sweeps: the frame of `Sweep.to_frame` in, a figure out. Nothing here measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from workbench.benchmarks.sweep.matrix import AXES
from workbench.benchmarks.sweep.result import WORDS
from workbench.common.errors import UsageError
from workbench.common.nearest import choices
from workbench.report import style

BOUNDS = {"tps": ("tps_low", "tps_high"), "speedup": ("low", "high")}  # the 95 % interval
AXIS_WORDS = {
    "n_depth": "tokens cached before the test", "n_parallel": "sequences computed together",
    "n_ctx": "tokens that the KV cache holds", "n_ubatch": "most tokens computed together",
    "threads": "compute threads", "n_gpu_layers": "layers on the device",
}  # fmt: skip
MOST_CURVES, MOST_PANELS = len(style.SERIES), 6


def sweep(
    frame: pd.DataFrame,
    x: str = "",
    values: str = "tps",
    *,
    by: str = "",
    panels: str = "",
) -> style.Picture:
    """The cells of a sweep: a panel for each value of one axis, a curve for each of another.

    frame: of `Sweep.to_frame`.
    x: the axis that goes to the right; default: a number with several values, else the last axis.
    values: the column that goes up; tps and speedup have their 95 % intervals as bars.
    by: the axis of curves; default: all other axes that vary, together.
    panels: the axis of panels; default: `test`, where tests vary.

    Every curve has a colour, a line and a marker of its own. The title says what is drawn, and
    the line below it of which model, test and device. Raises UsageError for a name that is no
    column, and where no cell was measured.
    """
    for name in filter(None, (x, values, by, panels)):
        if name not in frame:
            raise UsageError(f"column {name!r} does not exist; {choices(name, frame)}")
    shown = frame[frame["tps"].notna() & frame[values].notna()]
    if shown.empty:
        raise UsageError(f"no cell has {values}, so there is nothing to draw; measure some")
    axes = [c for c in frame.columns if c in AXES and shown[c].astype(str).nunique() > 1]
    x = x or next((a for a in axes if _is_number(shown[a])), axes[-1] if axes else "test")
    panels = panels or ("test" if "test" in axes and x != "test" else "")
    curves = [by] if by else [a for a in axes if a not in (x, panels)]
    parts = list(_parts(shown, [panels] if panels else []))[:MOST_PANELS]
    fig = style.picture(9, 1.1 + 2.6 * len(parts))
    drawn = WORDS.get(values, values)
    bars = ", with its 95 % interval" if values in BOUNDS else ""
    bars += "; dashed: that cell itself" if values == "speedup" else ""
    fig.suptitle(f"{drawn}{bars}\n{_shared(shown)}", x=0.01, ha="left", fontsize=style.FONT + 1)
    for ax, (title, part) in zip(fig.subplots(len(parts), squeeze=False)[:, 0], parts, strict=True):
        places = list(dict.fromkeys(shown[x]))
        places = sorted(places) if _is_number(shown[x]) else places
        for n, (label, curve) in enumerate(_parts(part, curves)):
            at = np.array([places.index(value) for value in curve[x]], float)
            up = curve[values].to_numpy(float)
            look = n % MOST_CURVES
            ax.plot(
                at, up, color=style.SERIES[look], ls=style.LINES[look], marker=style.MARKERS[look],
                ms=5, mfc="white" if n >= MOST_CURVES else style.SERIES[look], label=label,
            )  # fmt: skip
            if values in BOUNDS:
                low, high = (curve[name].to_numpy(float) for name in BOUNDS[values])
                ax.vlines(at, low, high, color=style.SERIES[look], lw=1.5)
        ax.set_xticks(range(len(places)), [str(p) for p in places], fontsize=style.FONT)
        ax.set_xlim(-0.3, len(places) - 0.7)
        ax.set_ylim(bottom=0)
        ax.set_title(title, fontsize=style.FONT + 1, loc="left")
        ax.set_ylabel(drawn.partition(" over ")[0], fontsize=style.FONT)
        ax.tick_params(labelsize=style.FONT)
        ax.grid(axis="y", color=style.PALE)
        if values == "speedup":
            ax.axhline(1, color=style.INK, lw=0.8, ls="--")
        if curves:
            ax.legend(
                fontsize=style.FONT, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5)
            )
    said = f"{x} ({AXIS_WORDS[x]})" if x in AXIS_WORDS else x
    ax.set_xlabel(said, fontsize=style.FONT)
    return fig


def _shared(rows: pd.DataFrame) -> str:
    """What all cells have: `tiny-llama-Q8_0, tg8, on Embedded device (...)`."""
    same = {n: rows[n].dropna().unique() for n in ("model", "test", "device_description")}
    same = {name: str(values[0]) for name, values in same.items() if len(values) == 1}
    device = same.pop("device_description", "")
    return ", ".join([*same.values(), *([f"on {device}"] if device else [])])


def _parts(rows: pd.DataFrame, names: Sequence[str]) -> list[tuple[str, pd.DataFrame]]:
    """The rows by the values of these columns, in the order in which they come, with a label."""
    if not names:
        return [("", rows)]
    found: Any = rows.groupby(list(names), sort=False)
    return [(" ".join(f"{n}={v}" for n, v in zip(names, values, strict=True)), part)
            for values, part in found]  # fmt: skip


def _is_number(column: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)
