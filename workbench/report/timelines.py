"""Timelines of one token or a few: the host's lane on top, a row per stream below it.

Every kind of span has a height or a hatch besides its colour, so the picture can be read in grey.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from workbench.common.errors import UsageError
from workbench.report import style
from workbench.trace.analysis import busy_us
from workbench.trace.spans import HOST_LANE

NOTE = "traced: shows where time goes, not throughput"


class Look(NamedTuple):
    """The look of a kind of span: its word, colour, second tint, hatch, and height (a share of the
    lane's)."""

    word: str
    colour: str
    tint: str
    hatch: str
    height: float


# a span's category (a device span: its kind) -> its look
LOOKS = {
    "launch": Look("launch (host), kernel (stream)", style.BLUE, "#4796CC", "", 1.0),
    "replay": Look("replay (of a plan)", style.INK, "#4D4D4D", "", 0.85),
    "copy": Look("copy", style.ORANGE, style.ORANGE, "////", 1.0),
    "sync": Look("sync (the host waits)", "white", "white", "xxxx", 0.7),
    "build": Look("build (batch, graph, program)", style.YELLOW, style.YELLOW, "\\\\", 0.6),
    "write": Look("write", style.GREY, style.GREY, "", 0.45),
    "read": Look("read", style.PURPLE, style.PURPLE, "", 0.45),
    "record": Look("record", style.GREEN, style.GREEN, "", 0.25),
    "wait": Look("wait (of a stream)", style.SKY, style.SKY, "....", 0.25),
}
EDGES = {"sync": style.VERMILION, "copy": "#8A5A00", "build": "#8F8600"}
# kind -> the column that names its wide spans, and the text's colour
LABELS = {"launch": ("op", "white"), "replay": ("name", "white"), "build": ("name", style.INK)}
LANE, BRACKET, SPACE = 0.8, 0.26, 0.3  # heights, in rows
IN_A_LINE = 6  # of the legend, at most
POINT = "v"  # marks where the host begins to wait
MOST_SYNC_LINES = 40  # more lines would hide the spans
TITLE_LETTERS = 105  # in a line; more would run out of the picture

# the part of the time axis that is drawn: from and to, in us, `inputs`, or all of it
Shown = tuple[float, float] | np.ndarray | Literal["inputs"] | None
AND_MORE = 1.15  # of the time until the inputs are copied, so that the first launches are seen
MOST_LATE = 3.0  # of the time of the host's copies: later copies of a device widen no picture


def timeline(
    frame: Any,
    steps: int | Iterable[int] | None = None,
    title: str | None = None,
    window_us: Shown = None,
) -> Figure:
    """Draws the spans of one or more steps: a row per lane, the host's on top, on one time axis.

    frame: a profile, a timeline, or the frame of either (columns: `trace.profile.COLUMNS`).
    steps: the step or steps to draw; None: all.
    window_us: draws a part of the time, in us from the first step's start. `inputs`: until all
        input copies are done, and a little more.
    Raises ValueError for a step that the frame does not have. The host's row has three storeys:
    steps, splits, commands. A triangle and a dashed line mark each point where the host begins to
    wait and goes on.
    """
    part = _steps(_frame(frame), steps)
    lanes = _lanes(part)
    fig = style.picture(11, 1.35 + 0.52 * (len(lanes) + 1))
    ax = fig.add_subplot()
    window = _window(window_us, [part])
    _draw(ax, part, lanes, window)
    if title is None:
        names = part.loc[part["category"] == "step", "name"]
        title = f"{len(names)} steps" if len(names) > 1 else next(iter(names), "timeline")
    _title(ax, title)
    _finish(fig, [ax], _clip(part, *window))
    return fig


def timeline_pair(
    before: Any,
    after: Any,
    labels: Sequence[str] = ("off", "on"),
    step: int | None = None,
    window_us: Shown = None,
) -> style.Picture:
    """The same token twice on one time axis, before above after, each from its own start.

    before, after: as for `timeline`.
    step: its number. By default the token of both sides whose times are nearest to the medians, so
        that no disturbed token is shown. Where the sides share no token, each shows its own.
    window_us: as for `timeline`; `inputs` shows all copies of each side.
    The end of each step is marked, with its time. Raises ValueError for a step that a side does not
    have.
    """
    return _stacked([_frame(before), _frame(after)], list(labels), step, window_us)


def timelines(
    sources: Mapping[str, Any],
    step: int | None = None,
    window_us: Shown = None,
) -> style.Picture:
    """As `timeline_pair`, for any number of timelines by name, the first on top."""
    return _stacked([_frame(s) for s in sources.values()], list(sources), step, window_us)


def _stacked(
    frames: list[pd.DataFrame],
    labels: list[str],
    step: int | None,
    window_us: Shown,
) -> style.Picture:
    numbers = [step] * len(frames) if step is not None else typical(frames, window_us)
    parts = [_steps(frame, number) for frame, number in zip(frames, numbers, strict=True)]
    lanes = _lanes(pd.concat(parts))
    ends = [_extent_us(p) for p in parts]
    fig = style.picture(11, (2.0 + 1.04 * (len(lanes) + 1)) * len(frames) / 2)
    axes = list(np.atleast_1d(fig.subplots(len(frames), 1, sharex=True)))
    window = _window(window_us, parts)
    for ax, part, label, end in zip(axes, parts, labels, ends, strict=True):
        _draw(ax, part, lanes, window, own_end=end)
        _title(ax, label)
    for ax in axes[:-1]:
        ax.tick_params(labelbottom=False)
        ax.set_xlabel("")
    _finish(fig, axes, _clip(pd.concat(parts, ignore_index=True), *window))
    return fig


def _frame(source: Any) -> pd.DataFrame:
    return source if isinstance(source, pd.DataFrame) else source.to_frame()


def _steps(frame: pd.DataFrame, steps: int | Iterable[int] | None) -> pd.DataFrame:
    """The rows of the wanted steps, time counted from their start."""
    if steps is not None:
        wanted = [steps] if isinstance(steps, int | np.integer) else list(steps)
        frame = frame[frame["step"].isin(wanted)]
        if frame.empty:
            raise ValueError(f"steps {wanted} are not in this timeline")
    start = frame["start_us"].min() if len(frame) else 0.0
    return frame.assign(start_us=frame["start_us"] - start)


def typical(frames: list[pd.DataFrame], shown: Shown) -> list[int]:
    """The number of a typical step for each frame, the same number where the frames share steps.
    The shown part must be typical: the whole step, or the copies of its inputs."""
    if not all((f["category"] == "step").any() for f in frames):
        raise ValueError("a timeline holds no step")
    off = []  # how far each step's time is from the median's, by step number
    for frame in frames:
        times = frame[frame["category"] == "step"].set_index("step")["dur_us"]
        if isinstance(shown, str):  # "inputs"; an array is not compared with it
            ways = {n: _inputs_us(_steps(frame, n), HOST_LANE) for n in times.index}
            times = pd.Series(ways) if all(ways.values()) else times
        off.append((times / times.median() - 1).abs())
    worst = pd.concat(off, axis=1, join="inner").max(axis=1)
    if len(worst):
        return [int(worst.idxmin())] * len(frames)
    return [int(o.idxmin()) for o in off]


def _extent_us(part: pd.DataFrame) -> float:
    return float((part["start_us"] + part["dur_us"]).max()) if len(part) else 1.0


def _window(shown: Shown, parts: Sequence[pd.DataFrame]) -> tuple[float, float]:
    """From and to, us, of an axis that all of `parts` share. Raises UsageError for another window
    than `Shown` has, and for one that ends before it begins."""
    if isinstance(shown, np.ndarray | pd.Series):
        shown = shown.tolist()
    if isinstance(shown, Sequence) and not isinstance(shown, str):
        numbers = [float(n) for n in shown if isinstance(n, Real) and math.isfinite(n)]
        if len(shown) != 2 or len(numbers) != 2 or not numbers[0] < numbers[1]:
            raise UsageError(
                f"window_us={shown!r} is no part of the time; give (from, to) in us, with from "
                "below to, as (0, 50)"
            )
        return numbers[0], numbers[1]
    if shown not in ("inputs", None):
        raise UsageError(f"window_us={shown!r} does not exist; give (from, to) in us, or 'inputs'")
    end = max(_extent_us(part) for part in parts)
    if shown == "inputs" and (host := max(_inputs_us(part, HOST_LANE) for part in parts)):
        device = max(_inputs_us(part, "device") for part in parts)
        # after a device's late wake-up the host's part would shrink to a line
        inputs = max(host, device) if device <= MOST_LATE * host else host
        end = min(end, AND_MORE * inputs)
    return 0, end


def _inputs_us(part: pd.DataFrame, on: str) -> float:
    """When the last input copy ended on the host or the device (`on`), with the waits for it; 0
    without input copies. Copies of results belong to no split."""
    device = part["category"] == "device"
    kind = part["kind"].where(device, part["category"])
    inputs = kind.isin(["copy", "sync", "record", "wait"]) & (part["split"] >= 0)
    ends = (part["start_us"] + part["dur_us"])[inputs & (device == (on == "device"))]
    return float(ends.max()) if len(ends) else 0.0


def _title(ax: Axes, text: str) -> None:
    """Writes a title at the left above the axes, on as many lines as it needs."""
    lines = textwrap.fill(text, TITLE_LETTERS)
    ax.set_title(lines, loc="left", fontsize=style.FONT + 2, fontweight="bold")


def _clip(part: pd.DataFrame, first: float, last: float) -> pd.DataFrame:
    """The parts of the spans that lie in first..last us."""
    starts, ends = part["start_us"], part["start_us"] + part["dur_us"]
    seen = part[(ends >= first) & (starts <= last)]
    starts, ends = starts[seen.index].clip(lower=first), ends[seen.index].clip(upper=last)
    return seen.assign(start_us=starts, dur_us=ends - starts)


def _lanes(part: pd.DataFrame) -> list[str]:
    return sorted(part["lane"].unique(), key=lambda lane: (lane != HOST_LANE, lane))


def _draw(
    ax: Axes,
    part: pd.DataFrame,
    lanes: list[str],
    window: tuple[float, float],
    own_end: float | None = None,
) -> None:
    """Draws one timeline into one axes, which shows `window` us; own_end marks its end."""
    first, last = window
    width = last - first
    syncs = part[part["category"] == "sync"]
    part = _clip(part, first, last)
    top = 0.0
    centres = []
    for lane in lanes:
        spans = part[part["lane"] == lane]
        if lane == HOST_LANE:
            top = commands_top = _brackets(ax, spans, top, width)
        bottom = top - LANE
        centres.append((top + bottom) / 2)
        end = own_end if own_end is not None else last
        ax.fill_between([0, end], bottom, top, color=style.PALE, lw=0, zorder=0)
        kinds = spans["kind"].where(spans["category"] == "device", spans["category"])
        for kind, look in LOOKS.items():
            _boxes(ax, spans[kinds == kind], look, kind, bottom, width)
        if lane != HOST_LANE and len(spans):
            busy, plural = _time(busy_us(spans)), "" if len(spans) == 1 else "s"
            ax.annotate(
                f"{len(spans)} span{plural}\n{busy} busy", (1.005, centres[-1]),
                xycoords=("axes fraction", "data"), fontsize=style.FONT - 1, va="center",
                color=style.INK,
            )  # fmt: skip
        top = bottom - SPACE
    if HOST_LANE in lanes:
        _sync_points(ax, syncs, commands_top, top + SPACE, window)
    ax.set_yticks(centres, lanes, fontsize=style.FONT)
    ax.set_ylim(top + SPACE - 0.1, 0.1)
    ax.set_xlim(first, last + 0.002 * width)
    if own_end is not None:
        if own_end <= last:
            ax.axvline(own_end, color=style.INK, lw=1)
        # beside the storeys of the host's row, where there is no other text
        ax.annotate(
            f"{_time(own_end)} in all", (1.005, 1.0), xycoords="axes fraction", va="top",
            fontsize=style.FONT - 1, fontweight="bold",
        )  # fmt: skip
    unit = 1e3 if width >= 20_000 else 1
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: style.plain_number(x / unit)))
    ax.set_xlabel(f"time ({'ms' if unit > 1 else 'us'})", fontsize=style.FONT)
    style.plain_axes(ax)


def _brackets(ax: Axes, spans: pd.DataFrame, top: float, width: float) -> float:
    """Draws the storeys of steps and splits above the host's commands; returns their upper end."""
    for category in ("step", "split"):
        rows = spans[spans["category"] == category]
        for row in rows.itertuples():
            ax.broken_barh(
                [(row.start_us, row.dur_us)], (top - BRACKET, BRACKET * 0.86),
                facecolor="white", edgecolor=style.INK, lw=0.6, zorder=2,
            )  # fmt: skip
            _label(ax, row.name, row.start_us, row.dur_us, top - BRACKET * 0.57, width, style.INK)
        top -= BRACKET
    return top - 0.12


def _boxes(
    ax: Axes, rows: pd.DataFrame, look: Look, kind: str, bottom: float, width: float
) -> None:
    """Draws all spans of one kind in a lane; neighbouring launches alternate between two tints."""
    if rows.empty:
        return
    height = LANE * look.height
    tints = [look.colour, look.tint]
    edge = EDGES.get(kind)
    # an outline keeps a span thinner than a pixel visible, and must not hide a slightly wider one
    narrow = rows["dur_us"].median() < 0.005 * width
    ax.broken_barh(
        list(zip(rows["start_us"], rows["dur_us"], strict=True)),
        (bottom, height),
        facecolors=[tints[i % 2] for i in range(len(rows))],
        edgecolors=edge or "none",
        linewidth=(0.3 if narrow else 0.7) if edge else 0,
        hatch=look.hatch or None,
        snap=False,  # to pixels: a gap of a third of one would become a whole one or none
        zorder=3,
    )
    if kind in LABELS:
        column, colour = LABELS[kind]
        for text, start, dur in zip(rows[column], rows["start_us"], rows["dur_us"], strict=True):
            _label(ax, text, start, dur, bottom + height / 2, width, colour)


def _label(
    ax: Axes, text: Any, start: float, dur: float, y: float, width: float, colour: str
) -> None:
    """Writes `text` into a span that is wide enough for it."""
    if isinstance(text, str) and dur / width > 0.0085 * len(text):
        ax.text(
            start + dur / 2, y, text, fontsize=style.FONT - 1.5, color=colour, ha="center",
            va="center", clip_on=True, zorder=4,
        )  # fmt: skip


def _sync_points(
    ax: Axes, syncs: pd.DataFrame, top: float, bottom: float, window: tuple[float, float]
) -> None:
    """Draws a triangle where the host begins to wait, and a line through all lanes where it goes
    on."""
    starts, ends = syncs["start_us"], syncs["start_us"] + syncs["dur_us"]
    starts, ends = starts[starts.between(*window)], ends[ends.between(*window)]
    ax.plot(
        starts, np.full(len(starts), top + 0.04), POINT, color=style.VERMILION, ms=4, mew=0,
        zorder=5,
    )  # fmt: skip
    if len(ends) <= MOST_SYNC_LINES:
        ax.vlines(
            ends, bottom, top, color=style.VERMILION, lw=0.6, ls=(0, (3, 3)), alpha=0.7, zorder=1
        )


def _time(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.0f} us" if us >= 10 else f"{us:.1f} us"


def _finish(fig: Figure, axes: list[Axes], part: pd.DataFrame) -> None:
    """Draws one legend for all axes, with the kinds that are drawn, and the note that the run was
    traced. part: the spans in the window."""
    kinds = set(part["category"]) | set(part.loc[part["category"] == "device", "kind"])
    handles: list[Artist] = [
        Patch(
            facecolor=look.colour, hatch=look.hatch, label=look.word, lw=0.7,
            edgecolor=EDGES.get(kind, look.colour),
        )
        for kind, look in LOOKS.items() if kind in kinds
    ]  # fmt: skip
    handles.append(Patch(facecolor=style.PALE, label="no span: a stream idle, the host in Python"))
    marks = [line for ax in axes for line in ax.get_lines() if line.get_marker() == POINT]
    if any(np.size(line.get_xdata()) for line in marks):
        handles.append(
            Line2D([], [], color=style.VERMILION, marker=POINT, ms=4, mew=0, lw=0.6,
                   ls=(0, (3, 3)), label="the host begins to wait (triangle), goes on (line)")
        )  # fmt: skip
    lines = math.ceil(len(handles) / IN_A_LINE)
    columns = math.ceil(len(handles) / lines)
    style.legend(fig, handles, columns, title=NOTE, title_fontsize=style.FONT - 1)
    axes[-1].tick_params(axis="x", labelsize=style.FONT)
