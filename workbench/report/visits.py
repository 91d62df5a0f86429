"""Pictures of masks: which blocks of cells attention visits, and which it leaves unread."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from workbench.report import style

SEEN, MIXED, UNSEEN = "all", "some", "none"


class BlockLook(NamedTuple):
    """How a block is drawn: what it is, its colour, its hatch."""

    word: str
    colour: str
    hatch: str


# what the tokens of a block see of its cells, and whether it is visited -> its look
LOOKS = {
    (SEEN, True): BlockLook("visited, all of it seen", style.BLUE, ""),
    (MIXED, True): BlockLook("visited, some of it seen", style.SKY, ""),
    (UNSEEN, True): BlockLook("visited in vain: none of it seen", "#EBA27A", "//"),
    (UNSEEN, False): BlockLook("left unread", "white", ""),
    # what a wrong bound would do; a picture must show it
    (MIXED, False): BlockLook("left unread, though some of it is seen", style.YELLOW, "////"),
    (SEEN, False): BlockLook("left unread, though all of it is seen", style.YELLOW, "////"),
}


def kv_blocks(frames: Mapping[str, pd.DataFrame]) -> Figure:
    """Masks one below the other, and beside each what every way visits of it: cells to the right,
    tokens downwards.

    frames: by the name of the mask, a row for each way and block: way, token and n_tokens, cell and
    n_cells (of the block), seen (`all`, `some` or `none` of it), visited (bool). A line parts the
    sequences where there is a column `sequence`. Raises ValueError for no mask.
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
            _draw(ax, part)
            n = int(part["visited"].sum())
            ax.set_title(f"{way}: {n} of {len(part)}", loc="left", fontsize=style.FONT)
            shown |= set(zip(part["seen"], part["visited"].astype(bool), strict=True))
        row[0].set_ylabel(f"{name}\n\ntoken", fontsize=style.FONT)
    for ax in axes[-1]:
        ax.set_xlabel("cell", fontsize=style.FONT)
    fig.legend(
        handles=[
            Patch(fc=look.colour, ec=style.GREY, lw=0.6, hatch=look.hatch, label=look.word)
            for kind, look in LOOKS.items() if kind in shown
        ],
        loc="outside lower center", ncols=4, fontsize=style.FONT, frameon=False,
    )  # fmt: skip
    return fig


def _draw(ax: Axes, part: pd.DataFrame) -> None:
    """One mask with the blocks that one way visits."""
    for (seen, visited), look in LOOKS.items():
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
    """Of each block the corners of its rectangle, (4, 2): cell and token."""
    left, top = blocks["cell"].to_numpy(float), blocks["token"].to_numpy(float)
    right = left + blocks["n_cells"].to_numpy(float)
    bottom = top + blocks["n_tokens"].to_numpy(float)
    xs, ys = np.stack([left, right, right, left], 1), np.stack([top, top, bottom, bottom], 1)
    return [*np.stack([xs, ys], axis=2)]
