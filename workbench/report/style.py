"""What all pictures share: colours, text sizes, and a figure that shows itself."""

from __future__ import annotations

import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours (https://jfly.uni-koeln.de/color/), told apart by the colour-blind
BLUE, SKY, ORANGE, VERMILION = "#0072B2", "#56B4E9", "#E69F00", "#D55E00"
YELLOW = "#F0E442"
GREEN, PURPLE, GREY, PALE, INK = "#009E73", "#CC79A7", "#8C8C8C", "#E8E8E8", "#222222"
BAND = "#DCDCDC"
FONT = 8


class Picture(Figure):
    """A figure that shows itself as the last line of a cell, without pyplot."""

    def _repr_png_(self) -> tuple[bytes, dict[str, str]]:
        """The image, and as metadata the text for those who cannot see it: titles and axes."""
        out = io.BytesIO()
        self.savefig(out, format="png")
        words = [w for ax in self.axes for w in (ax.get_title(loc="left"), ax.get_xlabel()) if w]
        return out.getvalue(), {"alt": "; ".join(dict.fromkeys(words))}


def picture(width: float, height: float) -> Picture:
    """An empty white figure, in inches."""
    return Picture(figsize=(width, height), dpi=110, layout="constrained", facecolor="white")


def plain_axes(ax: Axes) -> None:
    """Only the time axis: rows name themselves."""
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=FONT)
