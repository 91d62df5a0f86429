"""The common style of all pictures: colours, text sizes, and a figure that shows itself."""

import io
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from PIL import Image

# Okabe and Ito's colours (https://jfly.uni-koeln.de/color/), told apart by the colour-blind
BLUE, SKY, ORANGE, VERMILION = "#0072B2", "#56B4E9", "#E69F00", "#D55E00"
YELLOW = "#F0E442"
GREEN, PURPLE, GREY, PALE, INK = "#009E73", "#CC79A7", "#8C8C8C", "#E8E8E8", "#222222"
BAND = "#DCDCDC"
SERIES = (INK, BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)  # colours of curves, in order
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
FONT = 8
DECADES = 0.7  # an axis with less has more ticks than 1, 2, 5


class Picture(Figure):
    """A figure that shows itself as the last line of a cell, without pyplot."""

    def _repr_png_(self) -> tuple[bytes, dict[str, str]]:
        """The image. Its metadata has a text for readers who cannot see it: titles and axes."""
        out = io.BytesIO()
        self.savefig(out, format="png")
        words = self.get_suptitle().splitlines()
        words += [w for ax in self.axes for w in (ax.get_title(loc="left"), ax.get_xlabel()) if w]
        return few_colours(out.getvalue()), {"alt": "; ".join(dict.fromkeys(words))}


def few_colours(png: bytes) -> bytes:
    """The same picture in its 256 most frequent colours; other colours become the nearest of these.
    It has a third of the bytes, so a notebook with its pictures stays small."""
    image = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    colours, of_pixel, n_pixels = np.unique(
        image.reshape(-1, 3) @ [1 << 16, 1 << 8, 1], return_inverse=True, return_counts=True
    )
    levels = np.stack([colours >> shift & 255 for shift in (16, 8, 0)], axis=1)
    palette = levels[np.argsort(-n_pixels, kind="stable")[:256]]
    apart = sum((levels[:, None, i] - palette[None, :, i]) ** 2 for i in range(3))
    indices = np.argmin(apart, axis=1).astype(np.uint8)[of_pixel.reshape(image.shape[:2])]
    made, out = Image.fromarray(indices, "P"), io.BytesIO()
    made.putpalette(palette.astype(np.uint8).tobytes())
    made.save(out, "PNG", optimize=True)
    return out.getvalue()


def picture(width: float, height: float) -> Picture:
    """An empty white figure, in inches."""
    return Picture(figsize=(width, height), dpi=110, layout="constrained", facecolor="white")


def plain_number(value: float, _: int = 0) -> str:
    """A tick's number in plain form, never `1e+04`: 0.5, 8,000, 10,000."""
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def plain_ticks(axis: Axis, values: np.ndarray) -> None:
    """Plain numbers at 1, 2 and 5 of each decade of a logarithmic axis; at more places on an axis
    with less than DECADES."""
    wide = np.log10(values.max() / values.min()) > DECADES
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if wide else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)))
    axis.set_major_formatter(FuncFormatter(plain_number))
    axis.set_minor_formatter(NullFormatter())


def plain_axes(ax: Axes) -> None:
    """Draws only the time axis: rows carry their own names."""
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=FONT)


def curve(i: int) -> dict[str, Any]:
    """The line, marker and colour of a picture's curve number i, different for each curve."""
    return {
        "color": SERIES[i % len(SERIES)],
        "ls": LINES[i % len(LINES)],
        "marker": MARKERS[i % len(MARKERS)],
        "mfc": "white",
    }


def grid(ax: Axes, axis: Literal["both", "x", "y"] = "both") -> None:
    """Draws pale lines under the picture, in place of a frame."""
    ax.tick_params(which="both", labelsize=FONT)
    ax.grid(axis=axis, color="#DDDDDD", lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def legend(fig: Figure, handles: Sequence[Artist], ncols: int, **how: Any) -> None:
    """The legend below the picture, in at most `ncols` columns: as many as its width has room for.
    how: arguments of matplotlib's legend."""
    for columns in range(max(1, ncols), 0, -1):
        made = fig.legend(
            handles=handles, loc="outside lower center", ncols=columns, fontsize=FONT,
            frameon=False, **how,
        )  # fmt: skip
        if columns == 1 or made.get_window_extent().width <= fig.bbox.width:
            return
        made.remove()


def handles_of(axes: Sequence[Axes]) -> list[Artist]:
    """The entries of a legend for these axes, each name once."""
    found: dict[str, Artist] = {}
    for ax in axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    return list(found.values())
