"""The pictures: what is on them, that they show themselves, and that nothing is left behind."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
from comparisons import comparison

from tests.trace.test_trace_files import token
from workbench.answers import launches
from workbench.report import plots, tables
from workbench.report.style import few_colours
from workbench.trace.profile import Timeline
from workbench.trace.spans import Span

matplotlib.use("agg")


def timeline(n_tokens: int = 3, n_launches: int = 600) -> Timeline:
    """Tokens of the size of a 32-layer model's."""
    spans = [token(n, 10**9 + n * 10**8, n_launches) for n in range(n_tokens)]
    return Timeline([s for part in spans for s in part])


def n_boxes(ax) -> int:
    return sum(len(c.get_paths()) for c in ax.collections if isinstance(c, PolyCollection))


def texts(fig) -> list[str]:
    legends = [t.get_text() for legend in fig.legends for t in legend.get_texts()]
    found = [t.get_text() for ax in fig.axes for t in ax.texts]
    return legends + found + [ax.get_title(loc="left") for ax in fig.axes]


def test_timeline_draws_every_span_of_the_step() -> None:
    source = timeline()
    fig = plots.timeline(source, steps=1)
    (ax,) = fig.axes
    n_spans = int((source.to_frame()["step"] == 1).sum())
    n_lanes = 3  # each has a background of its own
    assert n_boxes(ax) == n_spans + n_lanes
    assert [t.get_text() for t in ax.get_yticklabels()] == [
        "host", "embedded stream 0", "embedded stream 1",
    ]  # fmt: skip
    ys = ax.get_yticks()
    assert list(ys) == sorted(ys, reverse=True), "the host's lane is on top"
    assert ax.get_xlim()[0] == 0  # time counts from the step's start
    said = texts(fig)
    assert {"launch", "copy", "write", "sync (the host waits)"} <= set(said)
    assert "600 spans\n30 us busy" in said and "step" in said
    assert plots.timeline(source.to_frame(), steps=[1]).axes[0].get_xlim() == ax.get_xlim()


def test_kinds_differ_without_colour() -> None:
    from workbench.report.timelines import LOOKS

    assert len({(look.height, look.hatch) for look in LOOKS.values()}) >= len(LOOKS) - 1


def test_timeline_of_all_steps_and_of_none() -> None:
    fig = plots.timeline(timeline(), title="three tokens")
    assert texts(fig)[-1] == "three tokens"
    assert fig.axes[0].get_xlim()[1] > 2 * 10**5  # us: the third token begins at 2e5
    assert plots.timeline(Timeline([])).axes
    with pytest.raises(ValueError, match=r"steps \[9\]"):
        plots.timeline(timeline(), steps=9)


def test_window_draws_what_lies_in_it() -> None:
    fig = plots.timeline(timeline(), steps=0, window_us=(0.0, 0.2))
    (ax,) = fig.axes
    assert ax.get_xlim()[0] == 0 and ax.get_xlim()[1] < 0.21
    # the device has begun no launch but the first two by 200 ns
    assert "2 spans\n0.1 us busy" in texts(fig)


def test_pair_shares_one_time_axis_and_marks_both_ends() -> None:
    slow, fast = timeline(n_launches=600), timeline(n_launches=200)
    fig = plots.timeline_pair(slow, fast, ("off: per_copy", "on: implicit"))
    above, below = fig.axes
    assert above.get_xlim() == below.get_xlim()
    assert above.get_position().y0 > below.get_position().y0
    said = texts(fig)
    assert said[-2:] == ["off: per_copy", "on: implicit"]
    assert "30 us in all" in said and "10 us in all" in said  # their own ends
    assert n_boxes(above) > n_boxes(below) > 200
    with pytest.raises(ValueError, match="not in this timeline"):
        plots.timeline_pair(slow, fast, step=7)


def test_pair_takes_a_token_that_is_typical_of_both() -> None:
    def steps(*durations_us: int, first: int = 0) -> Timeline:
        return Timeline(
            [
                Span(f"step {n}", "step", "host", n * 10**6, n * 10**6 + 1000 * us, {"step": n})
                for n, us in enumerate(durations_us, start=first)
            ]
        )

    def drawn(before: Timeline, after: Timeline) -> list[str]:
        axes = plots.timeline_pair(before, after).axes
        return [t.get_text() for ax in axes for t in ax.texts if t.get_text().startswith("step")]

    assert drawn(steps(100, 100, 900, 101), steps(700, 50, 50, 51)) == ["step 1", "step 1"]
    assert drawn(steps(9, 5, 5), steps(2, 2, 8, first=10)) == ["step 1", "step 10"]
    with pytest.raises(ValueError, match="holds no step"):
        drawn(steps(1), Timeline([]))


def test_where_inputs_are_shown_their_way_has_to_be_typical() -> None:
    def steps(*copied_us: int) -> Timeline:
        """Steps of about 900 us each, whose input copy ends after so many."""
        spans = []
        for n, us in enumerate(copied_us):
            start, args = n * 10**6, {"step": n}
            end = start + 900_000 + 1000 * n
            spans.append(Span(f"step {n}", "step", "host", start, end, args))
            copy = start + 1000 * us - 500, start + 1000 * us
            spans.append(Span("inp_pos", "copy", "host", *copy, args | {"split": 1}))
        return Timeline(spans)

    def drawn(window_us: Any) -> str:
        side = steps(30, 200, 31)
        axes = plots.timelines({"a": side, "b": side}, window_us=window_us).axes
        return next(t.get_text() for t in axes[0].texts if t.get_text().startswith("step"))

    assert drawn(None) == "step 1"  # by the whole step
    assert drawn("inputs") == "step 2"


def test_figures_show_themselves_and_leave_no_state() -> None:
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    figures = [
        plots.timeline(timeline(1)),
        plots.timeline_pair(timeline(1), timeline(1)),
        plots.speedup(comparison()),
        plots.per_token(comparison().samples),
    ]
    for fig in figures:
        png, metadata = fig._repr_png_()
        assert len(metadata["alt"]) > 5
        assert png[:4] == b"\x89PNG"
        assert len(png) < 120_000, "a notebook may hold 250 kB of outputs"
        pixels = plt.imread(io.BytesIO(png))
        colours = (pixels[..., :3] * 255).astype(np.uint32) @ [1, 1 << 8, 1 << 16]
        assert len(np.unique(colours)) > 10
    assert plt.get_fignums() == before


@pytest.mark.parametrize("n_colours", [1, 200, 256, 3000])
def test_a_palette_keeps_the_most_frequent_colours_as_they_are(n_colours: int) -> None:
    rng = np.random.default_rng(n_colours)
    colours = rng.permutation(1 << 24)[:n_colours]
    pixels = colours[np.minimum(rng.geometric(0.02, 6000), n_colours) - 1].reshape(60, 100)
    image = np.stack([pixels >> shift & 255 for shift in (16, 8, 0)], axis=2).astype(np.uint8)
    png = io.BytesIO()
    Image.fromarray(image).save(png, "PNG")
    small = np.asarray(Image.open(io.BytesIO(few_colours(png.getvalue()))).convert("RGB"))
    found, counts = np.unique(pixels, return_counts=True)
    kept = np.isin(pixels, found[np.argsort(-counts, kind="stable")[:256]])
    assert np.array_equal(small[kept], image[kept]) and kept.mean() > 0.5
    assert small.shape == image.shape


def test_speedup_has_a_row_for_each_arm_and_its_verdict() -> None:
    found = comparison()
    fig = plots.speedup(found)
    (ax,) = fig.axes
    rows = found.summary()
    assert [t.get_text() for t in ax.get_yticklabels()] == [
        f"{t}  {label}" for t, label in zip(rows["test"], rows["label"], strict=True)
    ]
    said = [t.get_text() for t in ax.texts]
    assert [s.split("  ")[1] for s in said] == list(rows["verdict"])
    low, high = ax.get_xlim()
    assert low <= 0.98 and high >= 1.02
    markers = {line.get_marker() for line in ax.lines} - {"None", None}
    assert {">", "<", "o"} <= markers, "faster, slower and no difference differ in shape"
    several = tables.summary(found, comparison(device="cuda", model="other"))
    labels = [t.get_text() for t in plots.speedup(several).axes[0].get_yticklabels()]
    assert len(set(labels)) == len(several)


def test_per_token_draws_each_arm_of_a_generating_test() -> None:
    samples = comparison().samples
    fig = plots.per_token(samples)
    left, right = fig.axes
    assert left.get_title(loc="left") == "tg32"
    assert len(left.lines) == len(right.lines) == samples["arm"].nunique()
    styles = {(line.get_linestyle(), line.get_marker()) for line in left.lines}
    assert len(styles) == len(left.lines)
    assert len(right.lines[0].get_xdata()) == 32
    for line in left.lines:
        y = np.asarray(line.get_ydata())
        assert y[-1] == 1 and (np.diff(y) >= 0).all()
    with pytest.raises(ValueError, match="no test that times single tokens"):
        plots.per_token(samples[samples["test"] == "pp512"])
    with pytest.raises(ValueError, match="pp512"):
        plots.per_token(samples, test="pp512")


def test_an_interval_that_is_missing_is_not_drawn() -> None:
    rows = comparison().summary().assign(low=np.nan, high=np.nan, band_low=np.nan, band_high=np.nan)
    fig = plots.speedup(rows)
    assert not [c for c in fig.axes[0].collections if isinstance(c, PolyCollection)]
    assert isinstance(rows, pd.DataFrame) and len(fig.axes[0].texts) == len(rows)


def test_any_number_of_timelines_on_one_axis() -> None:
    sources = {name: timeline(n_launches=n) for name, n in (("a", 40), ("b", 20), ("c", 30))}
    fig = plots.timelines(sources)
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["a", "b", "c"]
    assert len({ax.get_xlim() for ax in fig.axes}) == 1
    assert len(plots.timelines({"one": timeline()}).axes) == 1


def per_copy(n_copies: int = 6, copy_us: int = 40, late_us: int = 0) -> Timeline:
    """A step as `per_copy` issues it on a slow host: wait, copy, wait for each input, then a
    launch; the device's copies are late_us behind."""
    spans, at, index = [], 0, 0
    for n in range(n_copies):
        for name, category in (
            ("wait stream", "sync"),
            (f"in{n}", "copy"),
            (f"wait in{n}", "sync"),
        ):
            args = {"index": index, "step": 0, "split": 1, "on": "embedded stream 1"}
            spans.append(Span(name, category, "host", at * 1000, (at + copy_us) * 1000, args))
            if category == "copy":
                start = (at + late_us) * 1000
                spans.append(
                    Span(name, "device", "embedded stream 1", start, start + 2000,
                         args | {"kind": "copy"})
                )  # fmt: skip
            at, index = at + copy_us, index + 1
    launch = {"index": index, "step": 0, "split": 1, "op": "mul_mat"}
    spans.append(Span("q", "launch", "host", at * 1000, at * 1000 + 5000, launch))
    spans.append(Span("q", "device", "embedded stream 0", at * 1000, at * 1000 + 10**7,
                      launch | {"kind": "launch"}))  # fmt: skip
    end = at * 1000 + 10**7
    spans.append(Span("wait logits", "sync", "host", at * 1000 + 6000, end, {"index": index + 1,
                 "step": 0, "split": -1}))  # fmt: skip
    spans.append(Span("step 0", "step", "host", 0, end, {"step": 0}))
    return Timeline(spans)


def drawn_copies(fig, lane: int) -> list[int]:
    """How many copies each axes shows whole in its lane number `lane`, within its limits."""
    from matplotlib.colors import to_rgba

    from workbench.report.timelines import LOOKS

    found, colour = [], to_rgba(LOOKS["copy"].colour)
    for ax in fig.axes:
        low, high = ax.get_xlim()
        y = ax.get_yticks()[lane]
        filled = [c for c in ax.collections if len(c.get_facecolor())]
        copies = [c for c in filled if tuple(c.get_facecolor()[0]) == colour]
        boxes = [path.get_extents() for c in copies for path in c.get_paths()]
        found.append(sum(low <= b.x0 and b.x1 <= high and b.y0 < y < b.y1 for b in boxes))
    return found


@pytest.mark.parametrize("copy_us", [3, 40, 900])
def test_the_window_of_the_inputs_shows_all_copies_of_every_side(copy_us: int) -> None:
    sides = {"slow": per_copy(copy_us=copy_us), "quick": per_copy(copy_us=max(copy_us // 10, 1))}
    fig = plots.timelines(sides, window_us="inputs")
    assert drawn_copies(fig, 0) == [6, 6] and drawn_copies(fig, 2) == [6, 6]
    inputs_us = 18 * copy_us
    assert inputs_us < fig.axes[0].get_xlim()[1] < 1.5 * inputs_us + 10, "and not the whole step"
    one = plots.timeline(sides["slow"], window_us="inputs")
    assert drawn_copies(one, 0) == [6]


def test_a_device_that_overslept_does_not_squeeze_the_host_s_copies() -> None:
    fig = plots.timelines({"late": per_copy(late_us=9000)}, window_us="inputs")
    assert drawn_copies(fig, 0) == [6] and fig.axes[0].get_xlim()[1] < 1000
    nothing = timeline(1)
    assert plots.timeline(nothing, window_us="inputs").axes[0].get_xlim()[1] > 0


@pytest.mark.parametrize("us", [3, 800, 9_000, 12_000, 19_999, 60_000, 2_000_000])
def test_ticks_are_numbers_as_people_write_them(us: int) -> None:
    span = Span("step 0", "step", "host", 0, us * 1000, {"step": 0})
    fig = plots.timeline(Timeline([span]))
    fig.draw_without_rendering()
    ticks = [t.get_text() for t in fig.axes[0].get_xticklabels()]
    assert len(ticks) >= 3 and not [t for t in ticks if "e" in t]
    assert all(float(t.replace(",", "").replace("−", "-")) >= 0 for t in ticks if t[0] != "-")


def test_no_picture_writes_powers_or_offsets() -> None:
    samples = comparison().samples
    close = samples.assign(ns=1_000_000_000_000 + samples["ns"] % 1000)  # 10^6 ms, and little more
    for fig in (plots.per_token(samples), plots.per_token(close), plots.speedup(comparison())):
        fig.draw_without_rendering()
        for ax in fig.axes:
            for axis in (ax.xaxis, ax.yaxis):
                assert axis.get_offset_text().get_text() == ""
                assert not [t for t in axis.get_ticklabels() if "e" in t.get_text()[:4].lower()
                            and t.get_text()[:1].isdigit()]  # fmt: skip


def test_a_tick_s_number() -> None:
    from workbench.report.style import plain_number

    wanted = {10_000: "10,000", 8_000: "8,000", 1e6: "1,000,000", 0.5: "0.5", 0: "0", 2.25: "2.25"}
    assert {x: plain_number(x) for x in wanted} == wanted


TITLES = {
    "short": ("off", "on"),
    "long": ("sync=per_copy, copy_stream=own, graph_reuse=rebuild " * 4, "sync=packed " * 12),
}


@pytest.mark.parametrize("titles", TITLES)
@pytest.mark.parametrize("n_launches", [(3, 400), (400, 3), (200, 200), (350, 400)])
def test_no_text_lies_on_another_or_leaves_the_picture(titles: str, n_launches) -> None:
    before, after = (timeline(n_launches=n) for n in n_launches)
    fig = plots.timeline_pair(before, after, TITLES[titles])
    fig.draw_without_rendering()
    whole = fig.bbox
    boxes = []
    for ax in fig.axes:
        found = [t for t in (ax._left_title, *ax.texts) if t.get_text().strip()]
        boxes += [(t.get_text(), t.get_window_extent()) for t in found]
    for text, box in boxes:
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 + 1, text
    for i, (text, box) in enumerate(boxes):
        for other, there in boxes[i + 1 :]:
            assert not box.overlaps(there), f"{text!r} lies on {other!r}"


@pytest.mark.parametrize("n_letters", [1, 6, 40])
def test_a_range_has_its_name_where_it_has_room(n_letters: int) -> None:
    rows = [
        {"name": f"{'a' * n_letters}{at}", "offset": 64 * at, "nbytes": nbytes, "first": first,
         "last": last, "stream": at % 3, "lost": []}
        for at, (nbytes, first, last) in enumerate(
            [(64, 0, 20), (64, 3, 3), (1, 0, 20), (64, 18, 20), (64, 5, 12), (2, 2, 2)]
        )
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    fig = plots.lifetimes({"one": frame, "other": frame})
    fig.canvas.draw()
    for ax in fig.axes:
        of = {row["name"]: patch for row, patch in zip(rows, ax.patches, strict=False)}
        drawn = [text for text in ax.texts if text.get_text() in of]
        assert len(drawn) < len(rows) and (drawn or n_letters > 20)
        for text in drawn:
            name, range_ = text.get_window_extent(), of[text.get_text()].get_window_extent()
            assert range_.x0 <= name.x0 and name.x1 <= range_.x1
            assert range_.y0 <= name.y0 and name.y1 <= range_.y1


def test_tables_of_a_notebook_show_their_cells_whole_and_no_backticks() -> None:
    from workbench.answers import proofs

    parts = "mul_mat + rms_scale + mul_mat + rms_scale + mul_mat + rms_scale + rope + set_rows"
    ops = [SimpleNamespace(op=op, parts=[]) for op in parts.split(" + ")]
    node = SimpleNamespace(op="qkv", name="qkv-0", layer=0, parts=ops)
    program = SimpleNamespace(singly=lambda: [SimpleNamespace(kind="launch", node=node)])
    for part in ops:
        part.layer = 0
    table = launches.nodes_table(program)
    assert table["parts"].tolist() == [parts]
    assert parts in table._repr_html_() and parts in repr(table).replace("\n  ", " ")
    row = dict.fromkeys(proofs.COLUMNS, "x") | {"pattern": "h saaaasg", "races": 0}
    shown = proofs.proof_frame([row, row | {"pattern": "h sasg"}])._repr_html_()
    assert "<code>h saaaasg</code>" in shown and "`" not in shown
