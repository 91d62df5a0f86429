"""Pictures of memory over time: what lies where in an arena, and for how long."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from workbench.report import style

STREAMS = (style.SKY, style.ORANGE, style.GREEN, style.PURPLE, style.YELLOW)


def lifetimes(frames: dict[str, pd.DataFrame]) -> Figure:
    """What each layout has in its arena: bytes upwards, nodes as they are issued to the right.

    frames: by name, a row for each range: name, offset and nbytes, first and last (numbers of
    nodes), stream, and lost, the bytes that something else writes while they may still be in use:
    a list of (offset, nbytes, number of the node that writes). A name stands where it has room.
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
        for row in frame.to_dict("records"):
            for offset, nbytes, by in row["lost"]:
                ax.add_patch(
                    Rectangle(
                        (by, offset), max(row["last"] - by, 0) + 1, nbytes, fc="none",
                        ec=style.VERMILION, hatch="////", lw=1.4,
                    )
                )  # fmt: skip
        lost = sum(n for row in frame["lost"] for _, n, _ in row)
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
    handles.append(
        Patch(fc="none", ec=style.VERMILION, hatch="////", label="written while it may be in use")
    )
    fig.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), fontsize=style.FONT,
        frameon=False,
    )  # fmt: skip
    fig.draw_without_rendering()  # sets the axes out; how wide a name is depends on them
    for ax, made, name_of in names:
        room = Bbox.intersection(made.get_window_extent(), ax.bbox)
        if room is None or not _inside(name_of.get_window_extent(), room):
            name_of.remove()
    return fig


def _inside(box: Bbox, room: Bbox) -> bool:
    return bool(room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1)
