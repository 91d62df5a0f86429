"""One token's timeline with its phases below, numbered in the order in which they begin.

host     [ build ][w c w c][ launch launch launch ][ sync ][ read ]
device                        [====  ==== ====]
         |-- 1 --||-- 2 --||-------- 3 --------||---- 4 ----|      brackets, a row each
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from workbench.common.tables import Table
from workbench.report.style import FONT, INK
from workbench.report.timelines import timeline, typical
from workbench.trace.spans import HOST_LANE

ROW = 0.42  # height of a bracket's row, in lanes
WIDE = 0.35  # of the picture: the text of a wider bracket stands on it
COUNTED = ("launches", "copies", "waits", "step_us", "device_us")  # of a step, in a table
HALF = 0.55  # of the picture: the text of a bracket that ends later stands on the left


class Phase(NamedTuple):
    """A part of a step: its name, and its begin and end in us from the step's start."""

    what: str
    start_us: float
    end_us: float

    @property
    def us(self) -> float:
        return self.end_us - self.start_us


def phases(step: pd.DataFrame) -> list[Phase]:
    """The phases of a step (rows of a timeline's frame), in the order in which they begin.

    They may overlap: the device works while the host still launches.
    """
    host, device = step[step["lane"] == HOST_LANE], step[step["category"] == "device"]
    kernels = device[device["kind"] == "launch"]
    launched = host[(host["category"] == "launch") & (host["split"] == host["split"].max())]
    first, last = launched["start_us"].min(), launched["start_us"].max()  # NaN: there is none
    moved = host[host["category"].isin(["write", "copy", "sync"]) & ~(host["start_us"] >= first)]
    built = host[(host["category"] == "build") & ~(host["start_us"] >= moved["start_us"].min())]
    back = host[host["category"].isin(["copy", "sync", "read"]) & (host["start_us"] > last)]
    found = [
        _phase("the host makes batch, graph and program", built),
        _phase("inputs go to the device", moved),
        _phase("the host launches", launched),
        _phase("the device computes", kernels),
        _phase("the host waits for the logits", back),
    ]
    return sorted((phase for phase in found if phase is not None), key=lambda p: p.start_us)


def counts_table(traced: Any) -> Table:
    """A row for each step of a profile: what the host issues, and us of the host and the device.
    traced: a profile, or its `summary()`."""
    steps = traced if isinstance(traced, pd.DataFrame) else traced.summary()
    few = steps[[*COUNTED]].rename(columns={"step_us": "host us", "device_us": "device us"})
    return Table(few.reset_index()).shown(digits={"host us": 0, "device us": 0})


def token(traced: Any, step: int | None = None, title: str | None = None) -> Figure:
    """The timeline of one step and its phases, each with its time.

    traced: a profile, a timeline or its frame.
    step: its number; default: a typical one, whose time is nearest to the median.
    Raises ValueError for a step that is not in the trace.
    """
    frame = traced if isinstance(traced, pd.DataFrame) else traced.to_frame()
    (number,) = typical([frame], None) if step is None else [step]
    fig = timeline(frame, steps=number, title=title)
    part = frame[frame["step"] == number]
    part = part.assign(start_us=part["start_us"] - part["start_us"].min())
    found = phases(part)
    ax = fig.axes[0]
    bottom, top = ax.get_ylim()
    width = ax.get_xlim()[1]
    for i, phase in enumerate(found):
        y = bottom - ROW * (i + 0.6)
        ax.annotate(
            "", (phase.start_us, y), (phase.end_us, y), annotation_clip=False,
            arrowprops={"arrowstyle": "|-|,widthA=0.25,widthB=0.25", "lw": 1, "color": INK,
                        "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip
        x, side = phase.end_us + 0.006 * width, "left"
        if phase.us > WIDE * width:
            x, side = phase.start_us + phase.us / 2, "center"
        elif phase.end_us > HALF * width:
            x, side = phase.start_us - 0.006 * width, "right"
        ax.text(
            x, y, f"{i + 1}  {phase.what}: {phase.us:,.0f} us", fontsize=FONT, ha=side, va="center",
            bbox={"color": "white", "pad": 1.5} if side == "center" else None,
        )  # fmt: skip
    ax.set_ylim(bottom - ROW * (len(found) + 0.3), top)
    fig.set_figheight(fig.get_figheight() + 0.26 * len(found))
    return fig


def _phase(what: str, spans: pd.DataFrame) -> Phase | None:
    if spans.empty:
        return None
    ends = spans["start_us"] + spans["dur_us"]
    return Phase(what, float(spans["start_us"].min()), float(ends.max()))
