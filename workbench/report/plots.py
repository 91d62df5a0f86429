"""Pictures: DataFrames in, matplotlib figures out. Nothing here measures. No picture is drawn
through pyplot, so there is no global state, and any thread may draw.

Every arm has a line style and a marker besides its colour, and every verdict has a shape. So the
pictures can be read in grey, on paper and by the colour-blind. `timelines` draws the parts of a
token.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullLocator,
)
from matplotlib.transforms import Bbox

from workbench.report import style
from workbench.report.timelines import timeline, timeline_pair, timelines

__all__ = [
    "fits", "kv_blocks", "lifetimes", "per_token", "shares", "speedup", "speedup_by",
    "throughput_against_latency", "timeline", "timeline_pair", "timelines", "together",
]  # fmt: skip

BAND_WORDS = "A/A band: what no change looks like"
EVEN_WORDS = "as fast as the baseline"
# verdict -> colour, marker, filled
VERDICT_LOOKS = {
    "faster": (style.BLUE, ">", True),
    "slower": (style.VERMILION, "<", True),
    "no difference": (style.INK, "o", False),
}


# speedups, and times of tokens -------------------------------------------------------------------


def speedup(summary: Any) -> style.Picture:
    """A dot with its 95 % interval for every test and arm, on the A/A band of its test.

    summary: a comparison, or the frame of `AB.summary()` or `tables.summary`. The verdict stands at
    the right. A filled triangle points in the direction of a difference; a hollow dot is no
    difference. The legend has each mark that is drawn.
    """
    rows = summary if isinstance(summary, pd.DataFrame) else summary.summary()
    rows = rows.reset_index(drop=True)
    fig = style.picture(9, 1.4 + 0.34 * max(len(rows), 1))
    ax = fig.add_subplot()
    ys = np.arange(len(rows))[::-1]
    for y, row in zip(ys, rows.to_dict("records"), strict=True):
        if pd.notna(row["band_low"]):
            ax.fill_betweenx(
                [y - 0.5, y + 0.5], row["band_low"], row["band_high"], color=style.BAND, lw=0
            )
        look = _verdict_look(row["verdict"])
        if pd.notna(row["low"]):
            bar = look["color"]
            ax.plot([row["low"], row["high"]], [y, y], color=bar, lw=2, solid_capstyle="butt")
        ax.plot(row["speedup"], y, **look)
        ax.annotate(
            f"{row['speedup']:.3f}  {row['verdict']}", (1.01, y), fontsize=style.FONT, va="center",
            xycoords=("axes fraction", "data"), annotation_clip=False,
        )  # fmt: skip
    even = ax.axvline(1, color=style.INK, lw=0.8, ls="--", zorder=1, label=EVEN_WORDS)
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, 0.98), max(high, 1.02))  # a per mille must not look like a difference
    ax.set_yticks(ys, _row_labels(rows), fontsize=style.FONT)
    ax.set_ylim(-0.6, max(len(rows), 1) - 0.4)
    ax.ticklabel_format(axis="x", style="plain", useOffset=False)
    ax.set_xlabel("speedup: t/s toggled / t/s baseline (bar: 95 % interval)", fontsize=style.FONT)
    style.plain_axes(ax)
    known = [*VERDICT_LOOKS, *rows["verdict"].unique()]
    drawn = [v for v in dict.fromkeys(known) if (rows["verdict"] == v).any()]
    handles: list[Artist] = [Line2D([], [], label=v, **_verdict_look(v)) for v in drawn]
    if _has_band(rows):
        handles.append(Patch(color=style.BAND, label=f"{BAND_WORDS} on this machine"))
    style.legend(fig, [*handles, even], 6)
    return fig


def _verdict_look(verdict: str) -> dict[str, Any]:
    """The mark of a verdict; grey where the verdict is none of a difference."""
    colour, marker, filled = VERDICT_LOOKS.get(verdict, (style.GREY, "o", False))
    mfc = colour if filled else "white"
    return {"color": colour, "marker": marker, "ls": "", "ms": 7, "mew": 1.5, "mfc": mfc}


def _has_band(rows: pd.DataFrame) -> bool:
    """Whether an A/A band is wide enough to be seen; runs without a control have none."""
    return bool((rows["band_high"] > rows["band_low"]).any())


def per_token(samples: pd.DataFrame, test: str | None = None) -> Figure:
    """How long each token took: the share of tokens done within a time, and time against position.

    samples: the columns of samples.parquet.
    test: a test that generates tokens; default: the first.
    Left: the empirical distribution by arm. Right: the median over repetitions of the token at each
    position. Raises ValueError where no test times single tokens.
    """
    tokens = samples[(samples["n_tokens"] == 1) & (samples["token"] >= 0)]
    # a test generates tokens where some repetition has several samples
    tests = [str(t) for t, part in tokens.groupby("test", sort=False) if part["token"].max() > 0]
    if test is None and tests:
        test = tests[0]
    if test not in tests:
        raise ValueError(f"no test that times single tokens ({test or 'none given'}): {tests}")
    tokens = tokens[tokens["test"] == test].assign(ms=lambda t: t["ns"] / 1e6)
    fig = style.picture(11, 3.4)
    left, right = fig.subplots(1, 2)
    for i, (arm, part) in enumerate(tokens.groupby("arm", sort=False)):
        look = style.curve(i) | {"lw": 1.4, "ms": 4, "label": str(arm)}
        if part["is_control"].iloc[0]:
            look["color"] = style.GREY
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
        ax.ticklabel_format(style="plain", useOffset=False)
        style.grid(ax)
    handles = style.handles_of([left])
    style.legend(fig, handles, min(len(handles), 6), handlelength=4)
    return fig


def _row_labels(rows: pd.DataFrame) -> list[str]:
    """A label for each row: test and arm, and model and the like where they vary."""
    if "toggle" in rows:  # of a set the arm says enough: its toggles in words can be many
        toggle = rows["toggle"].astype(str)
        rows = rows.assign(toggle=toggle.mask(toggle.str.contains("[= ]"), ""))
    varying = [c for c in ("model", "device", "toggle") if c in rows and rows[c].nunique() > 1]
    return ["  ".join(map(str, row)) for row in rows[[*varying, "test", "label"]].to_numpy()]


def speedup_by(frames: Mapping[str, pd.DataFrame]) -> Figure:
    """A curve for each arm, with its 95 % intervals on the A/A bands; a panel for each frame.

    frames: by title, rows with x, label (of the arm), speedup, low, high, band_low and band_high;
    `attrs["x"]` says what x counts. An arm looks the same in all panels. Raises ValueError where no
    frame has rows.
    """
    labels = list(dict.fromkeys(label for frame in frames.values() for label in frame["label"]))
    if not labels:
        raise ValueError("there is no speedup to draw")
    fig = style.picture(11, 3.6)
    axes = fig.subplots(1, len(frames), sharey=True, squeeze=False)[0]
    for ax, (title, frame) in zip(axes, frames.items(), strict=True):
        _draw_speedups(ax, frame, labels)
        ax.set_title(title, loc="left", fontsize=style.FONT + 1, fontweight="bold")
    axes[0].set_ylabel("speedup: t/s toggled / t/s baseline", fontsize=style.FONT)
    handles = style.handles_of(axes)
    if any(map(_has_band, frames.values())):
        handles.append(Patch(color=style.BAND, label=BAND_WORDS))
    style.legend(fig, handles, 4, handlelength=4)
    return fig


def _draw_speedups(ax: Axes, frame: pd.DataFrame, labels: list[str]) -> None:
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
            x, part["speedup"], [s.fillna(0).clip(lower=0) for s in spread], label=label, lw=1.3,
            ms=5, elinewidth=1, capsize=2, **style.curve(i),
        )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(sorted(frame["x"].unique())))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(style.plain_number))
    ax.set_xlabel(str(frame.attrs.get("x", "")), fontsize=style.FONT)
    style.grid(ax, "y")


# throughput against latency -----------------------------------------------------------------------

HALO = [withStroke(linewidth=2, foreground="white")]  # makes a number on a line legible


def throughput_against_latency(
    frame: pd.DataFrame, title: str = "throughput against latency"
) -> Figure:
    """One curve per setting: tokens a second over the latency of its requests. Where a curve rises
    straight up, more requests cost nothing. Where it lies flat, more requests only wait.

    frame: columns curve, label (of a point: requests in flight, or a rate), latency_ms and
    tokens_per_s, in the order in which the points are joined (`bench_text.points` makes it).
    `attrs["latency"]` names the latency. Points without a figure are left out. Raises ValueError
    where no point has a figure.
    """
    known = frame[(frame["latency_ms"] > 0) & (frame["tokens_per_s"] > 0)]
    if known.empty:
        raise ValueError("no point has a latency and a throughput")
    fig = style.picture(8.5, 4.8)
    ax = fig.add_subplot()
    for i, (curve, part) in enumerate(known.groupby("curve", sort=False)):
        look = style.curve(i)
        ax.plot(part["latency_ms"], part["tokens_per_s"], label=str(curve), lw=1.4, ms=5, **look)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.margins(0.08, 0.12)
    ax.autoscale_view()  # places are asked for
    named: list[tuple[str, np.ndarray]] = []
    for i, (_, part) in enumerate(known.groupby("curve", sort=False)):
        _name_points(ax, part, style.curve(i)["color"], i % 2 == 0, named)
    for axis, values in ((ax.xaxis, known["latency_ms"]), (ax.yaxis, known["tokens_per_s"])):
        style.plain_ticks(axis, values.to_numpy(float))
    ax.set_xlabel(str(frame.attrs.get("latency", "latency (ms)")), fontsize=style.FONT)
    ax.set_ylabel("output tokens/s", fontsize=style.FONT)
    ax.set_title(title, loc="left", fontsize=style.FONT + 2, fontweight="bold")
    style.grid(ax)
    style.legend(fig, style.handles_of([ax]), 4, handlelength=4)
    return fig


NEAR = 30.0  # points of the page


def _name_points(
    ax: Axes, part: pd.DataFrame, colour: str, above: bool, named: list[tuple[str, np.ndarray]]
) -> None:
    """Writes labels above and to the left of a curve's points, or below and to the right, so that
    labels of two close curves do not overlap. A point near one of the same label needs none.

    named: labels and places of the points that have one, which grows."""
    offset, ha, va = ((-5, 4), "right", "bottom") if above else ((5, -4), "left", "top")
    near = NEAR * ax.figure.dpi / 72
    for x, y, label in zip(part["latency_ms"], part["tokens_per_s"], part["label"], strict=True):
        at = ax.transData.transform((x, y))
        if any(str(label) == text and math.dist(at, other) < near for text, other in named):
            continue
        named.append((str(label), at))
        ax.annotate(
            str(label), (x, y), xytext=offset, textcoords="offset points", ha=ha, va=va,
            color=colour, fontsize=style.FONT, path_effects=HALO,
        )  # fmt: skip


# masks --------------------------------------------------------------------------------------------

SEEN, MIXED, UNSEEN = "all", "some", "none"


class BlockLook(NamedTuple):
    """The look of a block: its word, its colour, its hatch."""

    word: str
    colour: str
    hatch: str


# how much of a block its tokens see, and whether attention visits it -> the block's look
BLOCK_LOOKS = {
    (SEEN, True): BlockLook("visited, all of it seen", style.BLUE, ""),
    (MIXED, True): BlockLook("visited, some of it seen", style.SKY, ""),
    (UNSEEN, True): BlockLook("visited in vain: none of it seen", "#EBA27A", "//"),
    (UNSEEN, False): BlockLook("left unread", "white", ""),
    # the result of a wrong bound; a picture must show it
    (MIXED, False): BlockLook("left unread, though some of it is seen", style.YELLOW, "////"),
    (SEEN, False): BlockLook("left unread, though all of it is seen", style.YELLOW, "////"),
}


def kv_blocks(frames: Mapping[str, pd.DataFrame]) -> Figure:
    """Masks one below the other; beside each mask the blocks that every way visits. Cells run to
    the right, tokens downwards.

    frames: by the name of the mask, a row for each way and block: way, token and n_tokens, cell and
    n_cells (of the block), seen (`all`, `some` or `none` of the block), visited (bool). With a
    column `sequence`, lines part the sequences. Raises ValueError for no mask.
    """
    if not frames:
        raise ValueError("there is no mask to draw")
    ways = list(dict.fromkeys(way for frame in frames.values() for way in frame["way"]))
    fig = style.picture(11, 0.9 + 1.45 * len(frames))
    axes = fig.subplots(len(frames), len(ways), squeeze=False)
    shown: set[tuple[str, bool]] = set()
    for (name, frame), row in zip(frames.items(), axes, strict=True):
        for way, ax in zip(ways, row, strict=True):
            part = frame[frame["way"] == way]
            _draw_blocks(ax, part)
            n = int(part["visited"].sum())
            ax.set_title(f"{way}: {n} of {len(part)}", loc="left", fontsize=style.FONT)
            shown |= set(zip(part["seen"], part["visited"].astype(bool), strict=True))
        row[0].set_ylabel(f"{name}\n\ntoken", fontsize=style.FONT)
    for ax in axes[-1]:
        ax.set_xlabel("cell", fontsize=style.FONT)
    handles = [
        Patch(fc=look.colour, ec=style.GREY, lw=0.6, hatch=look.hatch, label=look.word)
        for kind, look in BLOCK_LOOKS.items()
        if kind in shown
    ]
    style.legend(fig, handles, 4)
    return fig


def _draw_blocks(ax: Axes, part: pd.DataFrame) -> None:
    """One mask with the blocks that one way visits."""
    for (seen, visited), look in BLOCK_LOOKS.items():
        blocks = part[(part["seen"] == seen) & (part["visited"] == visited)]
        if len(blocks):
            ax.add_collection(
                PolyCollection(
                    _corners(blocks), facecolors=look.colour, edgecolors="#D4D4D4", linewidths=0.25,
                    hatch=look.hatch or None,
                )
            )  # fmt: skip
    n_tokens = int((part["token"] + part["n_tokens"]).max())
    n_cells = int((part["cell"] + part["n_cells"]).max())
    if "sequence" in part:
        begins = part.groupby("sequence")["token"].min()
        ax.hlines(begins[begins > 0], 0, n_cells, color=style.INK, lw=0.6)
    ax.set_xlim(0, n_cells)
    ax.set_ylim(n_tokens, 0)
    ax.xaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    ax.tick_params(labelsize=style.FONT - 1)


def _corners(blocks: pd.DataFrame) -> list[np.ndarray]:
    """The corners of each block's rectangle, (4, 2): cell and token."""
    left, top = blocks["cell"].to_numpy(float), blocks["token"].to_numpy(float)
    right = left + blocks["n_cells"].to_numpy(float)
    bottom = top + blocks["n_tokens"].to_numpy(float)
    xs, ys = np.stack([left, right, right, left], 1), np.stack([top, top, bottom, bottom], 1)
    return [*np.stack([xs, ys], axis=2)]


# memory -------------------------------------------------------------------------------------------

STREAMS = (style.SKY, style.ORANGE, style.GREEN, style.PURPLE, style.YELLOW)


def lifetimes(frames: dict[str, pd.DataFrame]) -> Figure:
    """The ranges of each layout in its arena: bytes upwards, nodes in issue order to the right.

    frames: by name, a row for each range: name, offset and nbytes, first and last (numbers of
    nodes), stream, and lost. `lost` lists the bytes that another node writes while they may still
    be in use: (offset, nbytes, number of the node that writes, its name). Beside these bytes stand
    writer and victim. Another name is drawn where it has room.
    """
    fig = style.picture(11, 4.4)
    axes = fig.subplots(1, len(frames), sharey=True, squeeze=False)[0]
    names: list[tuple[Axes, Rectangle, Text]] = []
    top = max((f["offset"] + f["nbytes"]).max() for f in frames.values())
    for ax, (name, frame) in zip(axes, frames.items(), strict=True):
        for row in frame.to_dict("records"):
            width, colour = row["last"] - row["first"] + 1, STREAMS[row["stream"] % len(STREAMS)]
            at = (row["first"], row["offset"])
            made = Rectangle(at, width, row["nbytes"], fc=colour, ec=style.INK, lw=0.6, alpha=0.75)
            ax.add_patch(made)
            name_at = row["first"] + 0.15, row["offset"] + row["nbytes"] / 2
            small = style.FONT - 2.5
            name_of = ax.text(*name_at, row["name"], fontsize=small, va="center")
            names.append((ax, made, name_of))
        n_told = 0
        for row in frame.to_dict("records"):
            for offset, nbytes, by, writer in row["lost"]:
                width = max(row["last"] - by, 0) + 1
                ax.add_patch(
                    Rectangle(
                        (by, offset), width, nbytes, fc="none", ec=style.VERMILION, hatch="////",
                        lw=1.4,
                    )
                )  # fmt: skip
                ax.annotate(
                    f"{writer} writes over\n{row['name']}", (by + width, offset + nbytes / 2),
                    # the largest tensors come last, so the upper left is free
                    xytext=(0.04, 0.88 - 0.14 * n_told), textcoords="axes fraction",
                    fontsize=style.FONT - 0.5,
                    color=style.VERMILION, fontweight="bold", path_effects=HALO, zorder=6,
                    arrowprops={"arrowstyle": "->", "color": style.VERMILION, "lw": 1.2},
                )  # fmt: skip
                n_told += 1
        lost = sum(n for row in frame["lost"] for _, n, *_ in row)
        ax.set_title(f"{name}: {lost:,} bytes lost", loc="left", fontsize=style.FONT + 1)
        ax.set_xlim(frame["first"].min(), frame["last"].max() + 1)
        ax.set_ylim(0, top)
        ax.set_xlabel("node, as issued", fontsize=style.FONT)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter(style.plain_number)
        ax.tick_params(labelsize=style.FONT)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("bytes of the arena", fontsize=style.FONT)
    used = sorted({s for f in frames.values() for s in f["stream"]})
    handles = [Patch(color=STREAMS[s % len(STREAMS)], label=f"made on stream {s}") for s in used]
    if any(lost for f in frames.values() for lost in f["lost"]):
        words = "written while it may be in use"
        handles.append(Patch(fc="none", ec=style.VERMILION, hatch="////", label=words))
    style.legend(fig, handles, len(handles))
    fig.draw_without_rendering()  # lays the axes out; the width of a name depends on them
    for ax, made, name_of in names:
        room = Bbox.intersection(made.get_window_extent(), ax.bbox)
        if room is None or not _inside(name_of.get_window_extent(), room):
            name_of.remove()
    return fig


def _inside(box: Bbox, room: Bbox) -> bool:
    return bool(room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1)


# waiting, and gains together ----------------------------------------------------------------------

CAUSES = (
    (style.BLUE, ""), (style.YELLOW, "\\\\"), (style.ORANGE, ""), (style.VERMILION, "xx"),
    (style.PURPLE, "//"), (style.PALE, ".."),
)  # fmt: skip


def shares(table: pd.DataFrame) -> Figure:
    """A bar for each row, divided by its columns: how large a share of the row each of them is.

    table: numbers, at least 0, with names as index and columns (us, say). Each row's sum stands at
    its end, in the unit of `attrs["unit"]`. Raises ValueError for more columns than there are looks
    (CAUSES).
    """
    if len(table.columns) > len(CAUSES):
        raise ValueError(f"{len(table.columns)} parts are more than {len(CAUSES)} looks")
    fig = style.picture(10, 0.95 + 0.55 * len(table))
    ax = fig.add_subplot()
    ys, sums = np.arange(len(table))[::-1], table.sum(axis=1)
    left = np.zeros(len(table))
    for part, (colour, hatch) in zip(table.columns, CAUSES, strict=False):
        width = (table[part] / sums).to_numpy(float)
        ax.barh(ys, width, left=left, height=0.62, color=colour, hatch=hatch, ec=style.INK, lw=0.5,
                label=str(part))  # fmt: skip
        for y, begin, share in zip(ys, left, width, strict=True):
            if share > 0.05:
                ax.text(begin + share / 2, y, f"{share:.0%}", ha="center", va="center",
                        fontsize=style.FONT, path_effects=HALO)  # fmt: skip
        left += width
    for y, total in zip(ys, sums, strict=True):
        said = f"{total:,.0f} {table.attrs.get('unit', '')}".strip()
        ax.annotate(said, (1.01, y), xycoords=("axes fraction", "data"), fontsize=style.FONT,
                    va="center", annotation_clip=False)  # fmt: skip
    ax.set_yticks(ys, [str(name) for name in table.index], fontsize=style.FONT)
    ax.set_xlim(0, 1)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    ax.set_xlabel(str(table.attrs.get("x", "share")), fontsize=style.FONT)
    style.plain_axes(ax)
    style.legend(fig, style.handles_of([ax]), 6)
    return fig


def together(frame: pd.DataFrame) -> Figure:
    """The speedup of several switches together, beside the product of their speedups alone.

    frame: a row for each set of switches: label, speedup, low, high (95 % interval), product, and
    band_low, band_high (of the A/A control). A set whose dot lies right of its diamond gains more
    than its members promise. Raises ValueError for no rows.
    """
    if frame.empty:
        raise ValueError("there is no set of switches to draw")
    fig = style.picture(9, 1.25 + 0.3 * len(frame))
    ax = fig.add_subplot()
    ys = np.arange(len(frame))[::-1]
    band = frame.iloc[0]
    if pd.notna(band["band_low"]):
        ax.axvspan(band["band_low"], band["band_high"], color=style.BAND, lw=0, label=BAND_WORDS)
    ax.axvline(1, color=style.INK, lw=0.8, ls="--", zorder=1)
    known = frame["low"].notna().to_numpy()
    ax.hlines(ys[known], frame["low"][known], frame["high"][known], color=style.BLUE, lw=2)
    ax.plot(frame["speedup"], ys, "o", color=style.BLUE, ms=6, label="measured together")
    ax.plot(frame["product"], ys, "D", color=style.VERMILION, ms=6, mfc="none", mew=1.4,
            label="product of the gains alone")  # fmt: skip
    ax.set_yticks(ys, frame["label"].astype(str), fontsize=style.FONT)
    ax.set_xscale("log")
    values = frame[["speedup", "product"]].to_numpy(float).ravel()
    style.plain_ticks(ax.xaxis, np.append(values, 1.0))
    ax.set_xlabel("speedup over the start (bar: 95 % interval)", fontsize=style.FONT)
    style.plain_axes(ax)
    style.legend(fig, style.handles_of([ax]), 3)
    return fig


def fits(frame: pd.DataFrame) -> Figure:
    """Points, and the quadratic through them, for each curve.

    frame: a row for each point: curve, x, y, and a, b, c of the curve's a + b x + c x^2;
    `attrs["x"]` and `attrs["y"]` name the axes. No rows give an empty picture that says so.
    """
    fig = style.picture(8.5, 3.6)
    ax = fig.add_subplot()
    if frame.empty:
        ax.text(0.5, 0.5, "nothing is recorded", ha="center", fontsize=style.FONT + 2)
    for i, (curve, part) in enumerate(frame.groupby("curve", sort=False)):
        look = style.curve(i)
        x = np.linspace(0, part["x"].max(), 200)
        a, b, c = part[["a", "b", "c"]].iloc[0]
        ax.plot(x, a + b * x + c * x**2, color=look["color"], ls=look["ls"], lw=1.4)
        ax.plot(part["x"], part["y"], ls="", ms=6, marker=look["marker"], color=look["color"],
                mfc="white", label=str(curve))  # fmt: skip
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_formatter(FuncFormatter(style.plain_number))
    ax.set_xlabel(str(frame.attrs.get("x", "")), fontsize=style.FONT)
    ax.set_ylabel(str(frame.attrs.get("y", "")), fontsize=style.FONT)
    style.grid(ax)
    style.legend(fig, style.handles_of([ax]), 1)
    return fig


def scaling(frame: pd.DataFrame) -> Figure:
    """Throughput by the number of requests in flight, as times that of one, a line for each curve.

    frame: a row for each point: curve, x, y, and label, a text that stands at the point (may be
    empty). Points without y are left out. Raises ValueError where no point has one.
    """
    known = frame.dropna(subset=["y"])
    if known.empty:
        raise ValueError("no point has a throughput")
    fig = style.picture(8.5, 4.2)
    ax = fig.add_subplot()
    ideal = np.array([known["x"].min(), known["x"].max()], float)
    ax.plot(ideal, ideal / ideal[0], color=style.GREY, lw=0.8, ls="--", label="as many times")
    for i, (curve, part) in enumerate(known.groupby("curve", sort=False)):
        look = style.curve(i)
        ax.plot(part["x"], part["y"], label=str(curve), lw=1.4, ms=5, **look)
        points = part.rename(columns={"x": "latency_ms", "y": "tokens_per_s"})
        _name_points(ax, points, look["color"], i % 2 == 1, [])
    for axis in (ax.xaxis, ax.yaxis):
        (ax.set_xscale if axis is ax.xaxis else ax.set_yscale)("log", base=2)
        axis.set_major_formatter(FuncFormatter(style.plain_number))
        axis.set_minor_locator(NullLocator())
    ax.set_xlabel("requests in flight", fontsize=style.FONT)
    ax.set_ylabel("times the throughput of one in flight", fontsize=style.FONT)
    style.grid(ax)
    style.legend(fig, style.handles_of([ax]), 3, handlelength=4)
    return fig
