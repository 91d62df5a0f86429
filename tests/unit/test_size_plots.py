"""Pictures of blocks that are visited, and of speedups by size: what is on them."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba

from workbench.report import plots
from workbench.report.plots import BLOCK_LOOKS


def blocks(way: str, seen: list[str], visited: list[bool], width: int = 4) -> pd.DataFrame:
    n = np.arange(len(seen))
    return pd.DataFrame(
        {
            "way": way, "token": 8 * (n // width), "n_tokens": 8, "cell": 16 * (n % width),
            "n_cells": 16, "seen": seen, "visited": visited,
        }
    )  # fmt: skip


SEEN = ["all", "some", "none", "none", "all", "all", "some", "none"]


def test_each_block_is_drawn_by_what_is_seen_of_it_and_whether_it_is_visited():
    some = [kind != "none" for kind in SEEN]
    frame = pd.concat([blocks("off", SEEN, [True] * 8), blocks("in_loop", SEEN, some)])
    fig = plots.kv_blocks(
        {"a prompt": frame, "again": frame.assign(sequence=[0] * 4 + [1] * 4 + [0] * 8)}
    )
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["off: 8 of 8", "in_loop: 5 of 8"] * 2
    for ax, in_vain in ((fig.axes[0], True), (fig.axes[1], False)):
        drawn = {
            tuple(c.get_facecolor()[0]): len(c.get_paths())
            for c in ax.collections if isinstance(c, PolyCollection)
        }  # fmt: skip
        of = {kind: to_rgba(BLOCK_LOOKS[kind].colour) for kind in BLOCK_LOOKS}
        assert drawn[of["all", True]] == 3 and drawn[of["some", True]] == 2
        assert drawn[of["none", in_vain]] == 3 and sum(drawn.values()) == 8
        assert ax.get_xlim() == (0, 64) and ax.get_ylim() == (16, 0)
    first = next(c for c in fig.axes[0].collections if isinstance(c, PolyCollection))
    corners = {tuple(p) for p in first.get_paths()[0].vertices[:4]}
    assert corners == {(0, 0), (16, 0), (16, 8), (0, 8)}
    words = [text.get_text() for text in fig.legends[0].get_texts()]
    assert words == [BLOCK_LOOKS[kind].word for kind in BLOCK_LOOKS if kind[1] or kind[0] == "none"]
    assert fig._repr_png_()[0].startswith(b"\x89PNG")


def test_a_wrong_bound_is_seen():
    fig = plots.kv_blocks({"broken": blocks("tail", SEEN, [False] * 8)})
    words = [text.get_text() for text in fig.legends[0].get_texts()]
    assert "left unread, though all of it is seen" in words
    with pytest.raises(ValueError, match="no mask"):
        plots.kv_blocks({})


def by_size(*labels: str, xs=(64, 512)) -> pd.DataFrame:
    rows = [
        {
            "x": x, "label": label, "speedup": 1.0 + i / 10, "low": 0.9 + i / 10,
            "high": 1.1 + i / 10, "band_low": 0.98, "band_high": 1.02,
        }
        for x in xs for i, label in enumerate(labels)
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    frame.attrs["x"] = "tokens at once"
    return frame


def test_an_arm_looks_the_same_in_every_panel():
    fig = plots.speedup_by({"one": by_size("tail", "classes"), "two": by_size("classes")})
    left, right = fig.axes
    of = [
        {c.get_label(): (c[0].get_color(), c[0].get_marker()) for c in ax.containers}
        for ax in fig.axes
    ]
    assert set(of[0]) == {"tail", "classes"} and set(of[1]) == {"classes"}
    assert of[0]["classes"] == of[1]["classes"] != of[0]["tail"]
    assert left.get_xlabel() == "tokens at once" and right.get_title(loc="left") == "two"
    assert [t.get_text() for t in left.get_xticklabels()] == ["64", "512"]
    shown = [text.get_text() for text in fig.legends[0].get_texts()]
    assert shown == ["tail", "classes", "A/A band: what no change looks like"]


def test_one_size_and_no_interval_can_be_drawn():
    frame = by_size("tail", xs=(64,)).assign(low=math.nan, high=math.nan, band_low=math.nan)
    fig = plots.speedup_by({"one": frame})
    assert fig._repr_png_()[0].startswith(b"\x89PNG")
    assert plots.speedup_by({"one": by_size("tail", xs=(64,))}).axes
    with pytest.raises(ValueError, match="no speedup"):
        plots.speedup_by({})
