"""The pictures: what is on them, that they show themselves, and that nothing is left behind."""

from __future__ import annotations

import io

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from PIL import Image

from tests.benchmarks.comparisons import comparison
from tests.trace.test_trace_files import token
from workbench.report import plots, roofline, tables
from workbench.report.plots import BLOCK_LOOKS
from workbench.report.style import few_colours, plain_number
from workbench.report.timelines import LOOKS
from workbench.trace.profile import Timeline
from workbench.trace.spans import Span


def timeline(n_tokens: int = 3, n_launches: int = 600) -> Timeline:
    """Tokens of the size of a 32-layer model's."""
    spans = [token(n, 10**9 + n * 10**8, n_launches) for n in range(n_tokens)]
    return Timeline([s for part in spans for s in part])


def step(n: int, us: int, start_us: int = 0) -> Span:
    return Span(f"step {n}", "step", "host", start_us * 1000, (start_us + us) * 1000, {"step": n})


def boxes(ax) -> list:
    """The polygons of an axes, each with its colour."""
    filled = [c for c in ax.collections if isinstance(c, PolyCollection) and len(c.get_facecolor())]
    return [(tuple(c.get_facecolor()[0]), path) for c in filled for path in c.get_paths()]


def texts(fig) -> list[str]:
    legends = [t.get_text() for legend in fig.legends for t in legend.get_texts()]
    found = [t.get_text() for ax in fig.axes for t in ax.texts]
    return legends + found + [ax.get_title(loc="left") for ax in fig.axes]


def first_step(fig) -> list[str]:
    return [t.get_text() for ax in fig.axes for t in ax.texts if t.get_text().startswith("step")]


# timelines ----------------------------------------------------------------------------------------


def test_a_timeline_draws_every_span_of_its_steps():
    source = timeline()
    fig = plots.timeline(source, steps=1)
    (ax,) = fig.axes
    labels = [t.get_text() for t in ax.get_yticklabels()]
    assert labels == ["host", "embedded stream 0", "embedded stream 1"]
    n_spans = int((source.to_frame()["step"] == 1).sum())
    assert len(boxes(ax)) == n_spans + len(labels)  # each lane has a background of its own
    assert list(ax.get_yticks()) == sorted(ax.get_yticks(), reverse=True), "the host is on top"
    assert ax.get_xlim()[0] == 0, "time counts from the step's start"
    assert {"launch", "copy", "write", "sync (the host waits)", "step"} <= set(texts(fig))
    assert "600 spans\n30 us busy" in texts(fig)
    assert len({(look.height, look.hatch) for look in LOOKS.values()}) >= len(LOOKS) - 1, "in grey"
    whole = plots.timeline(source, title="three tokens")
    assert texts(whole)[-1] == "three tokens"
    assert whole.axes[0].get_xlim()[1] > 2 * 10**5  # us: the third token begins at 2e5
    assert plots.timeline(Timeline([])).axes
    with pytest.raises(ValueError, match=r"steps \[9\]"):
        plots.timeline(source, steps=9)
    part = plots.timeline(source, steps=0, window_us=(0.0, 0.2))
    assert part.axes[0].get_xlim()[1] < 0.21 and "2 spans\n0.1 us busy" in texts(part)


def test_timelines_share_one_axis_and_mark_their_ends():
    slow, fast = timeline(n_launches=600), timeline(n_launches=200)
    fig = plots.timeline_pair(slow, fast, ("off: per_copy", "on: implicit"))
    above, below = fig.axes
    assert above.get_xlim() == below.get_xlim()
    assert above.get_position().y0 > below.get_position().y0
    assert len(boxes(above)) > len(boxes(below)) > 200
    said = texts(fig)
    assert said[-2:] == ["off: per_copy", "on: implicit"]
    assert "30 us in all" in said and "10 us in all" in said
    with pytest.raises(ValueError, match="not in this timeline"):
        plots.timeline_pair(slow, fast, step=7)
    many = plots.timelines({name: timeline(n_launches=n) for name, n in (("a", 40), ("b", 20))})
    assert [ax.get_title(loc="left") for ax in many.axes] == ["a", "b"]


def test_the_step_drawn_is_typical_of_both_sides():
    def steps(*us: int, first: int = 0) -> Timeline:
        return Timeline([step(n, one, 1000 * n) for n, one in enumerate(us, first)])

    before, after = steps(100, 100, 900, 101), steps(700, 50, 50, 51)
    assert first_step(plots.timeline_pair(before, after)) == ["step 1", "step 1"]
    apart = plots.timeline_pair(steps(9, 5, 5), steps(2, 2, 8, first=10))
    assert first_step(apart) == ["step 1", "step 10"]
    with pytest.raises(ValueError, match="holds no step"):
        plots.timeline_pair(steps(1), Timeline([]))


def test_where_inputs_are_shown_their_way_is_typical():
    spans = []
    for n, us in enumerate((30, 200, 31)):  # when the copy of the inputs ends
        spans.append(step(n, 900 + n, 1000 * n))
        at = (1000 * n + us) * 1000
        spans.append(Span("inp_pos", "copy", "host", at - 500, at, {"step": n, "split": 1}))
    sides = {"a": Timeline(spans), "b": Timeline(spans)}
    for window_us, drawn in ((None, "step 1"), ("inputs", "step 2")):
        assert first_step(plots.timelines(sides, window_us=window_us))[0] == drawn


def per_copy(n_copies: int = 6, copy_us: int = 40, late_us: int = 0) -> Timeline:
    """A step as `per_copy` issues it on a slow host: wait, copy, wait for each input, then a
    launch; the device's copies are late_us late."""
    spans, at, copying = [], 0, "embedded stream 1"
    for n in range(n_copies):
        for name, category in (("wait", "sync"), (f"in{n}", "copy"), (f"wait in{n}", "sync")):
            args = {"index": len(spans), "step": 0, "split": 1, "on": copying}
            spans.append(Span(name, category, "host", at * 1000, (at + copy_us) * 1000, args))
            if category == "copy":
                start = (at + late_us) * 1000
                there = args | {"kind": "copy"}
                spans.append(Span(name, "device", copying, start, start + 2000, there))
            at += copy_us
    start, end, launch = at * 1000, at * 1000 + 10**7, {"step": 0, "split": 1, "op": "mul_mat"}
    there = launch | {"kind": "launch"}
    return Timeline([
        *spans, Span("q", "launch", "host", start, start + 5000, launch),
        Span("q", "device", "embedded stream 0", start, end, there),
        Span("wait logits", "sync", "host", start + 6000, end, {"step": 0, "split": -1}),
        Span("step 0", "step", "host", 0, end, {"step": 0}),
    ])  # fmt: skip


def drawn_copies(fig, lane: int) -> list[int]:
    """How many copies each axes shows whole in its lane number `lane`, within its limits."""
    found = []
    for ax in fig.axes:
        (low, high), y = ax.get_xlim(), ax.get_yticks()[lane]
        there = [p.get_extents() for of, p in boxes(ax) if of == to_rgba(LOOKS["copy"].colour)]
        found.append(sum(low <= b.x0 and b.x1 <= high and b.y0 < y < b.y1 for b in there))
    return found


@pytest.mark.parametrize("copy_us", [3, 900])
def test_the_window_of_the_inputs_shows_all_copies(copy_us):
    sides = {"slow": per_copy(copy_us=copy_us), "quick": per_copy(copy_us=max(copy_us // 10, 1))}
    fig = plots.timelines(sides, window_us="inputs")
    assert drawn_copies(fig, 0) == [6, 6] and drawn_copies(fig, 2) == [6, 6]
    assert 18 * copy_us < fig.axes[0].get_xlim()[1] < 27 * copy_us + 10, "and not the whole step"
    late = plots.timelines({"late": per_copy(late_us=9000)}, window_us="inputs")
    assert drawn_copies(late, 0) == [6] and late.axes[0].get_xlim()[1] < 1000
    assert plots.timeline(timeline(1), window_us="inputs").axes[0].get_xlim()[1] > 0


@pytest.mark.parametrize("us", [3, 12_000, 2_000_000])
def test_ticks_are_numbers_as_people_write_them(us):
    fig = plots.timeline(Timeline([step(0, us)]))
    fig.draw_without_rendering()
    ticks = [t.get_text() for t in fig.axes[0].get_xticklabels()]
    assert len(ticks) >= 3 and not [t for t in ticks if "e" in t]
    assert all(float(t.replace(",", "").replace("−", "-")) >= 0 for t in ticks if t[0] != "-")
    wanted = {10_000: "10,000", 1e6: "1,000,000", 0.5: "0.5", 0: "0", 2.25: "2.25"}
    assert {x: plain_number(x) for x in wanted} == wanted


LONG = ("sync=per_copy, copy_stream=own, graph_reuse=rebuild " * 4, "sync=packed " * 12)


@pytest.mark.parametrize("titles", [("off", "on"), LONG], ids=["short", "long"])
@pytest.mark.parametrize("n_launches", [(3, 400), (400, 3), (350, 400)])
def test_no_text_lies_on_another_or_leaves_the_picture(titles, n_launches):
    fig = plots.timeline_pair(*(timeline(n_launches=n) for n in n_launches), titles)
    fig.draw_without_rendering()
    said = [t for ax in fig.axes for t in (ax._left_title, *ax.texts) if t.get_text().strip()]
    for i, text in enumerate(said):
        box = text.get_window_extent()
        assert fig.bbox.x0 <= box.x0 and box.x1 <= fig.bbox.x1 + 1, text
        for other in said[i + 1 :]:
            assert not box.overlaps(other.get_window_extent()), f"{text} lies on {other}"


# speedups and tokens ------------------------------------------------------------------------------


def test_figures_show_themselves_and_leave_no_state():
    before, samples = plt.get_fignums(), comparison().samples
    close = samples.assign(ns=1_000_000_000_000 + samples["ns"] % 1000)  # 10^6 ms, and little more
    pair = plots.timeline_pair(timeline(1), timeline(1))
    graphs = [plots.speedup(comparison()), plots.per_token(samples), plots.per_token(close)]
    for fig in (pair, *graphs):
        png, metadata = fig._repr_png_()
        assert len(metadata["alt"]) > 5
        assert len(png) < 120_000, "a notebook may hold 250 kB of outputs"
        pixels = (plt.imread(io.BytesIO(png))[..., :3] * 255).astype(np.uint32)
        assert len(np.unique(pixels @ [1, 1 << 8, 1 << 16])) > 10
    for axis in (a for fig in graphs for ax in fig.axes for a in (ax.xaxis, ax.yaxis)):
        assert axis.get_offset_text().get_text() == "", "no powers, no offsets"
        ticks = [t.get_text() for t in axis.get_ticklabels()]
        assert not [t for t in ticks if "e" in t[:4].lower() and t[:1].isdigit()]
    assert plt.get_fignums() == before


@pytest.mark.parametrize("n_colours", [1, 256, 3000])
def test_a_palette_keeps_the_most_frequent_colours(n_colours):
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


def test_a_speedup_has_a_row_for_each_arm_and_verdict():
    found = comparison()
    (ax,) = plots.speedup(found).axes
    rows = found.summary()
    assert [t.get_text() for t in ax.get_yticklabels()] == list(rows["test"] + "  " + rows["label"])
    assert [t.get_text().split("  ")[1] for t in ax.texts] == list(rows["verdict"])
    assert ax.get_xlim()[0] <= 0.98 and ax.get_xlim()[1] >= 1.02
    markers = {line.get_marker() for line in ax.lines}
    assert {">", "<", "o"} <= markers, "faster, slower and no difference differ in shape"
    several = tables.summary(found, comparison(device="cuda", model="other"))
    labels = [t.get_text() for t in plots.speedup(several).axes[0].get_yticklabels()]
    assert len(set(labels)) == len(several)
    bare = plots.speedup(rows.assign(low=np.nan, high=np.nan, band_low=np.nan, band_high=np.nan))
    assert not boxes(bare.axes[0]) and len(bare.axes[0].texts) == len(rows)


def test_per_token_draws_each_arm_of_a_generating_test():
    samples = comparison().samples
    left, right = plots.per_token(samples).axes
    assert left.get_title(loc="left") == "tg32"
    assert len(left.lines) == len(right.lines) == samples["arm"].nunique()
    assert len({(line.get_linestyle(), line.get_marker()) for line in left.lines}) == 5
    for line, (_, part) in zip(left.lines, samples.groupby("arm", sort=False), strict=True):
        x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
        assert y[-1] == 1 and (np.diff(y) >= 0).all()
        assert x == pytest.approx(np.sort(part[part["test"] == "tg32"]["ns"] / 1e6)), "in ms"
    assert len(right.lines[0].get_xdata()) == 32
    for given in ({"samples": samples[samples["test"] == "pp512"]}, {"test": "pp512"}):
        with pytest.raises(ValueError, match="no test that times single tokens"):
            plots.per_token(**{"samples": samples} | given)


def by_size(*labels: str, xs=(64, 512)) -> pd.DataFrame:
    rows = [(x, label, 1 + i / 10, 0.95 + i / 10, 1.3 + i / 10, 0.98, 1.02)
            for x in xs for i, label in enumerate(labels)]  # fmt: skip
    names = ["x", "label", "speedup", "low", "high", "band_low", "band_high"]
    frame = pd.DataFrame(rows, columns=names)
    frame.attrs["x"] = "tokens at once"
    return frame


def test_an_arm_looks_the_same_in_every_panel():
    fig = plots.speedup_by({"one": by_size("tail", "classes"), "two": by_size("classes")})
    left, right = fig.axes
    one, two = (
        {c.get_label(): (c[0].get_color(), c[0].get_marker()) for c in ax.containers}
        for ax in fig.axes
    )
    assert set(one) == {"tail", "classes"} and one["classes"] != one["tail"]
    assert two == {"classes": one["classes"]}
    (bars,) = left.containers[0][2]
    assert bars.get_segments()[0][:, 1] == pytest.approx([0.95, 1.3])
    assert left.get_xlabel() == "tokens at once" and right.get_title(loc="left") == "two"
    assert [t.get_text() for t in left.get_xticklabels()] == ["64", "512"]
    shown = [text.get_text() for text in fig.legends[0].get_texts()]
    assert shown == ["tail", "classes", "A/A band: what no change looks like"]
    bare = by_size("tail", xs=(64,)).assign(low=np.nan, high=np.nan, band_low=np.nan)
    assert plots.speedup_by({"one": bare})._repr_png_()[0].startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no speedup"):
        plots.speedup_by({})


# masks and memory ---------------------------------------------------------------------------------

SEEN = ["all", "some", "none", "none", "all", "all", "some", "none"]


def blocks(way: str, visited: list[bool], width: int = 4) -> pd.DataFrame:
    n = np.arange(len(SEEN))
    where = {"token": 8 * (n // width), "n_tokens": 8, "cell": 16 * (n % width), "n_cells": 16}
    return pd.DataFrame({"way": way, **where, "seen": SEEN, "visited": visited})


def test_a_block_is_drawn_by_what_is_seen_and_visited():
    frame = pd.concat([blocks("off", [True] * 8), blocks("in_loop", [s != "none" for s in SEEN])])
    fig = plots.kv_blocks({"one": frame, "two": frame.assign(sequence=[0] * 4 + [1] * 4 + [0] * 8)})
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["off: 8 of 8", "in_loop: 5 of 8"] * 2
    of = {kind: to_rgba(BLOCK_LOOKS[kind].colour) for kind in BLOCK_LOOKS}
    for ax, in_vain in ((fig.axes[0], True), (fig.axes[1], False)):
        drawn = [colour for colour, _ in boxes(ax)]
        wanted = {of["all", True]: 3, of["some", True]: 2, of["none", in_vain]: 3}
        assert {colour: drawn.count(colour) for colour in drawn} == wanted
        assert ax.get_xlim() == (0, 64) and ax.get_ylim() == (16, 0)
    corners = {tuple(p) for p in boxes(fig.axes[0])[0][1].vertices[:4]}
    assert corners == {(0, 0), (16, 0), (16, 8), (0, 8)}
    words = [text.get_text() for text in fig.legends[0].get_texts()]
    assert words == [BLOCK_LOOKS[kind].word for kind in BLOCK_LOOKS if kind[1] or kind[0] == "none"]
    broken = plots.kv_blocks({"broken": blocks("tail", [False] * 8)})
    assert "left unread, though all of it is seen" in texts(broken)
    with pytest.raises(ValueError, match="no mask"):
        plots.kv_blocks({})


@pytest.mark.parametrize("n_letters", [1, 6, 40])
def test_a_range_has_its_name_where_it_has_room(n_letters):
    sizes = [(64, 0, 20), (64, 3, 3), (1, 0, 20), (64, 18, 20), (64, 5, 12), (2, 2, 2)]
    frame = pd.DataFrame([
        {"name": f"{'a' * n_letters}{at}", "offset": 64 * at, "nbytes": nbytes, "first": first,
         "last": last, "stream": at % 3, "lost": []} for at, (nbytes, first, last) in
        enumerate(sizes)
    ])  # fmt: skip
    fig = plots.lifetimes({"one": frame, "other": frame})
    fig.canvas.draw()
    for ax in fig.axes:
        of = dict(zip(frame["name"], ax.patches, strict=False))
        drawn = [text for text in ax.texts if text.get_text() in of]
        assert len(drawn) < len(frame) and (drawn or n_letters > 20)
        for text in drawn:
            name, room = text.get_window_extent(), of[text.get_text()].get_window_extent()
            assert room.x0 <= name.x0 and name.x1 <= room.x1
            assert room.y0 <= name.y0 and name.y1 <= room.y1


# rooflines ----------------------------------------------------------------------------------------


@pytest.fixture
def kernels() -> dict:
    """The run of `bench-kernels` that reads at 3100 GB/s."""
    rows = []
    for type_, shape, batch, launch, us in (
        ("Q4_0", "8b.o", 1, "plain", 5.4), ("Q4_0", "8b.o", 1, "pdl", 4.2),
        ("Q4_0", "8b.o", 8, "plain", 6.0), ("F16", "8b.qkv", 1, "plain", 9.0),
    ):  # fmt: skip
        gbps = 9_437_184 / us / 1e3
        rows.append({
            "type": type_, "shape": shape, "rows": 4096, "cols": 4096, "batch": batch,
            "launch": launch, "us": us, "us_min": us, "spread": 0.05, "gbps": gbps,
            "share": gbps / 3100, "gflops": 2 * 4096**2 * batch / us / 1e3,
            "intensity": 3.5556 * batch, "bytes": 9_437_184, "launches": 1, "copies": 29,
            "per_replay": 348, "replays": 15,
        })  # fmt: skip
    result = {"rows": rows, "read_gbps": 3100.0, "void": "", "quick": False,
              "cache_bytes": 50 << 20, "rotating_bytes": 256 << 20, "how": "replayed"}  # fmt: skip
    arms = [{"name": "plain"}, {"name": "pdl"}]
    return {"engine": {"device_description": "a GPU, CUDA 13.0"}, "arms": arms, "result": result}


def test_ways_to_launch_stand_side_by_side(kernels):
    table = roofline.table(kernels)
    assert list(table["type"]) == ["Q4_0", "Q4_0", "F16"] and list(table["batch"]) == [1, 8, 1]
    wanted = {"us plain": "5.40", "us pdl": "4.20", "GB/s plain": "1747.6", "% pdl": "72.5",
              "MB": "9.44", "F/B": "3.56", "spread plain": "5.0"}  # fmt: skip
    assert wanted.items() <= dict(table.iloc[0]).items()
    assert table.iloc[1]["us pdl"] == "" == table.iloc[2]["% pdl"]


@pytest.mark.parametrize(
    ("given", "told", "title"),
    [
        ({}, "read bandwidth 3100.0 GB/s", ""),
        ({"void": "void: it reads 2500 GB/s"}, "void: it reads 2500 GB/s", "VOID"),
        ({"quick": True}, "268.44 MB of weights in turn", "quick: no figures to quote"),
    ],
)
def test_the_caption_says_whether_the_shares_count(kernels, given, told, title):
    run = kernels | {"result": kernels["result"] | given}
    assert told in roofline.caption(run) and ("void" in roofline.caption(run)) == ("void" in given)
    shown = roofline.roofline(run).axes[0].get_title(loc="left")
    assert title in shown and ("quick" in shown) == ("quick" in given)


def test_the_roof_is_the_bandwidth_and_a_row_is_a_point(kernels, tmp_path):
    rows, fig = kernels["result"]["rows"], roofline.roofline(kernels)
    left, right = fig.axes
    roof, *points = left.get_lines()
    assert roof.get_ydata() == pytest.approx(3100 * np.asarray(roof.get_xdata()))
    drawn = sorted(xy for line in points for xy in zip(*line.get_data(), strict=True))
    wanted = sorted((r["intensity"], r["gflops"]) for r in rows)
    assert np.array(drawn) == pytest.approx(np.array(wanted))
    shares = sorted(x for line in right.get_lines()[:-1] for x in line.get_data()[0])
    assert shares == pytest.approx(sorted(100 * r["share"] for r in rows if r["batch"] == 1))
    assert [t.get_text() for t in right.get_yticklabels()] == ["8b.qkv", "8b.o"]
    hollow = [line.get_markerfacecolor() == "white" for line in points]
    assert hollow == [True, False, True], "plain is, the last way is filled"
    shown = [t.get_text() for t in fig.legends[0].get_texts()]
    assert shown == ["3100 GB/s read", "Q4_0", "F16"]
    assert roofline.save(kernels, tmp_path).stat().st_size > 5000
    kernels["result"]["rows"] = []
    with pytest.raises(ValueError, match="no rows"):
        roofline.roofline(kernels)
