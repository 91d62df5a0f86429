"""The recorded runtimes of requests with prompts of random lengths, and a quadratic through them.

Products cost as much for each token; attention costs as much as there are tokens before it. So the
runtime of a fixed number of requests is a + b x + c x^2 in the mean length x of their prompts. The
ratio of two c is the gain for prompts without end, by which llama.cpp #14924 judges the skipping of
masked cells.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from workbench.answers.recorded import block
from workbench.common.tables import Table

OFF, TAIL = "s off", "s tail"  # columns of the block, seconds
MEAN, MODEL, SLOTS = "mean prompt", "Model", "slots"


class Fitted(NamedTuple):
    """points: a row for each mean length, with the columns MEAN, OFF and TAIL. slots: of the
    server. about: the recorded run in words: model, device, commit. said: the recorded fits, in
    words."""

    points: pd.DataFrame
    slots: str
    about: str
    said: str


def recorded(page: str | Path | None = None) -> Fitted | None:
    """What the results page has of random lengths; None where it has none, or fewer than three
    lengths. page: as for `recorded.block`."""
    found = block("random-lengths", page)
    if found is None or len(found.rows) < 3:
        return None
    about = f"{found.rows[MODEL].iloc[0]}; {found.words[0]}"
    points = found.rows[[MEAN, OFF, TAIL]].astype(float)
    return Fitted(points, found.rows[SLOTS].iloc[0], about, " ".join(found.words[1:]))


def quadratic(points: pd.DataFrame, column: str) -> np.ndarray:
    """The least-squares a, b, c of seconds over the mean length, float64 (3,)."""
    return np.polyfit(points[MEAN].to_numpy(), points[column].to_numpy(), 2)[::-1]


def table(found: Fitted | None) -> Table:
    """The recorded points beside the fits: seconds without skipping and with tail, and the gain."""
    if found is None:
        return Table(columns=[MEAN, OFF, "fit off", TAIL, "fit tail", "speedup"])
    points, x = found.points, found.points[MEAN]
    fits = {one: np.polynomial.Polynomial(quadratic(points, one)) for one in (OFF, TAIL)}
    made = Table(
        {MEAN: x.astype(int), OFF: points[OFF], "fit off": fits[OFF](x), TAIL: points[TAIL],
         "fit tail": fits[TAIL](x), "speedup": points[OFF] / points[TAIL]}
    )  # fmt: skip
    return made.shown(keys=[MEAN], constant={"recorded": found.about})


def curves(found: Fitted | None) -> pd.DataFrame:
    """For `plots.fits`: points and coefficients by curve."""
    points = pd.DataFrame(columns=[MEAN, OFF, TAIL]) if found is None else found.points
    rows = []
    for column in (OFF, TAIL) if len(points) else ():
        a, b, c = quadratic(points, column)
        name = f"skip_masked_kv={column.partition(' ')[2]}: {a:.2g} + {b:.2g} x + {c:.2g} x²"
        rows += [
            {"curve": name, "x": x, "y": y, "a": a, "b": b, "c": c}
            for x, y in zip(points[MEAN], points[column], strict=True)
        ]
    frame = pd.DataFrame(rows, columns=["curve", "x", "y", "a", "b", "c"])
    frame.attrs |= {"x": "mean length of a prompt, tokens", "y": "seconds for all requests"}
    return frame


def words(found: Fitted | None) -> str:
    """The recorded fits in a sentence; empty where nothing is recorded."""
    return f"Recorded: {found.said}" if found and found.said else ""


def gains(found: Fitted | None) -> str:
    """The recorded gain at the least and the greatest mean length, in front of what was found here;
    empty where nothing is recorded."""
    if found is None:
        return ""
    points = found.points.sort_values(MEAN).iloc[[0, -1]]
    first, last = (
        f"{row[OFF] / row[TAIL]:.2f} {what} {row[MEAN]:,.0f} tokens a prompt"
        for what, (_, row) in zip(("times as fast at", "at"), points.iterrows(), strict=True)
    )
    card = found.about.partition("; ")[2].partition(" (")[0]
    return (
        f"with tail, recorded, a server with {found.slots} slots and prompts of random lengths is "
        f"{first} in the mean and {last} ({card}); "
    )
