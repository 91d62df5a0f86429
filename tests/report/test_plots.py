"""The pictures and tables: what is on them, and that nothing that a file brought runs."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from bs4 import BeautifulSoup
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from PIL import Image

from tests.benchmarks.made_runs import comparison
from tests.profiles import long, rest, share
from tests.trace.test_trace_files import token
from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.answers import Answer
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.runs import results
from workbench.config import Toggles
from workbench.engine.generation import Generation
from workbench.jupyter.pair import Pair
from workbench.report import plots, profiles, tables
from workbench.report.plots import BLOCK_LOOKS
from workbench.report.style import few_colours
from workbench.trace.analysis import LAUNCHES
from workbench.trace.profile import Profile, Timeline
from workbench.trace.spans import Recorder, Span


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
    return [text for text in texts(fig) if text.startswith("step")]


def test_the_step_drawn_is_typical_of_both_sides():
    def steps(*us: int, first: int = 0) -> Timeline:
        return Timeline([step(n, one, 1000 * n) for n, one in enumerate(us, first)])

    before, after = steps(100, 100, 900, 101), steps(700, 50, 50, 51)
    assert first_step(plots.timeline_pair(before, after)) == ["step 1", "step 1"]
    apart = plots.timeline_pair(steps(9, 5, 5), steps(2, 2, 8, first=10))
    assert first_step(apart) == ["step 1", "step 10"]
    with pytest.raises(ValueError, match="holds no step"):
        plots.timeline_pair(steps(1), Timeline([]))


LONG = ("sync=per_copy, copy_stream=own, graph_reuse=rebuild " * 4, "sync=packed " * 12)


@pytest.mark.parametrize("titles", [("off", "on"), LONG], ids=["short", "long"])
@pytest.mark.parametrize(("n_launches",), share([((350, 400),), ((400, 3),), ((3, 400),)], every=3))
def test_no_text_lies_on_another_or_leaves_the_picture(titles, n_launches):
    fig = plots.timeline_pair(*(timeline(n_launches=n) for n in n_launches), titles)
    fig.draw_without_rendering()
    said = [t for ax in fig.axes for t in (ax._left_title, *ax.texts) if t.get_text().strip()]
    for i, box in enumerate(found := [text.get_window_extent() for text in said]):
        assert fig.bbox.x0 <= box.x0 and box.x1 <= fig.bbox.x1 + 1, said[i]
        assert not any(box.overlaps(other) for other in found[i + 1 :]), said[i]


@pytest.mark.parametrize("n_colours", [long(256), *rest([3000], slow=1)])
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
    markers = {line.get_marker() for line in ax.lines}
    assert {">", "<", "o"} <= markers, "faster, slower and no difference differ in shape"
    several = tables.summary(found, comparison(device="cuda", model="other"))
    labels = [t.get_text() for t in plots.speedup(several).axes[0].get_yticklabels()]
    assert len(set(labels)) == len(several)
    bare = plots.speedup(rows.assign(low=np.nan, high=np.nan, band_low=np.nan, band_high=np.nan))
    assert not boxes(bare.axes[0]) and len(bare.axes[0].texts) == len(rows)


def test_points_that_lie_together_are_named_once():
    """At 1 the curves are 1 % apart, at 8 far apart."""
    rows = [("a", "1", 1.0, 100.0), ("a", "8", 4.0, 300.0), ("b", "1", 1.01, 101.0),
            ("b", "8", 8.0, 200.0)]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["curve", "label", "latency_ms", "tokens_per_s"])
    (ax,) = plots.throughput_against_latency(frame).axes
    assert [text.get_text() for text in ax.texts] == ["1", "8", "8"]


def test_per_token_draws_each_arm_of_a_generating_test():
    before, samples = plt.get_fignums(), comparison().samples
    left, right = plots.per_token(samples).axes
    assert plt.get_fignums() == before, "no figure is left in pyplot"
    close = samples.assign(ns=1_000_000_000_000 + samples["ns"] % 1000)  # 10^6 ms, and little more
    (fig := plots.per_token(close)).draw_without_rendering()
    assert not any(ax.xaxis.get_offset_text().get_text() for ax in fig.axes), "no offsets"
    assert len(left.lines) == len(right.lines) == samples["arm"].nunique()
    assert len({(line.get_linestyle(), line.get_marker()) for line in left.lines}) == 5
    for line, (_, part) in zip(left.lines, samples.groupby("arm", sort=False), strict=True):
        x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
        assert y[-1] == 1 and (np.diff(y) >= 0).all()
        assert x == pytest.approx(np.sort(part[part["test"] == "tg32"]["ns"] / 1e6)), "in ms"
    with pytest.raises(ValueError, match="no test that times single tokens"):
        plots.per_token(samples, test="pp512")


def by_size(*labels: str, xs=(64, 512)) -> pd.DataFrame:
    rows = [(x, label, 1 + i / 10, 0.95 + i / 10, 1.3 + i / 10, 0.98, 1.02)
            for x in xs for i, label in enumerate(labels)]  # fmt: skip
    names = ["x", "label", "speedup", "low", "high", "band_low", "band_high"]
    frame = pd.DataFrame(rows, columns=names)
    frame.attrs["x"] = "tokens at once"
    return frame


def test_an_arm_looks_the_same_in_every_panel():
    fig = plots.speedup_by({"one": by_size("tail", "classes"), "two": by_size("classes")})
    one, two = (
        {c.get_label(): (c[0].get_color(), c[0].get_marker()) for c in ax.containers}
        for ax in fig.axes
    )
    assert set(one) == {"tail", "classes"} and one["classes"] != one["tail"]
    assert two == {"classes": one["classes"]}
    (bars,) = fig.axes[0].containers[0][2]
    assert bars.get_segments()[0][:, 1] == pytest.approx([0.95, 1.3])
    assert [t.get_text() for t in fig.axes[0].get_xticklabels()] == ["64", "512"]
    bare = by_size("tail", xs=(64,)).assign(low=np.nan, high=np.nan, band_low=np.nan)
    assert plots.speedup_by({"one": bare})._repr_png_()


def test_timelines_draw_every_span_on_one_axis():
    slow, fast = timeline(n_launches=600), timeline(n_launches=200)
    fig = plots.timeline_pair(slow, fast, ("off: per_copy", "on: implicit"), step=1)
    above, below = fig.axes
    labels = [t.get_text() for t in above.get_yticklabels()]
    assert labels == ["host", "embedded stream 0", "embedded stream 1"]
    n_spans = int((slow.to_frame()["step"] == 1).sum())
    assert len(boxes(above)) == n_spans + len(labels)  # each lane has a background of its own
    assert above.get_xlim() == below.get_xlim() and above.get_xlim()[0] == 0, "the step's start"
    said = texts(fig)
    assert said[-2:] == ["off: per_copy", "on: implicit"]
    assert {"sync (the host waits)", "600 spans\n30 us busy", "10 us in all"} <= set(said)
    part = plots.timeline(slow, steps=0, window_us=(0.0, 0.2))
    assert part.axes[0].get_xlim()[1] < 0.21 and "2 spans\n0.1 us busy" in texts(part)
    assert plots.timeline(Timeline([])).axes and len(plots.timelines({"a": fast}).axes) == 1
    for wrong in (lambda: plots.timeline(slow, steps=9),
                  lambda: plots.timeline_pair(slow, slow, step=9)):  # fmt: skip
        with pytest.raises(ValueError, match="9"):
            wrong()


def test_where_inputs_are_shown_their_way_is_typical():
    spans = []
    for n, us in enumerate((30, 200, 31)):  # when the copy of the inputs ends
        spans.append(step(n, 900 + n, 1000 * n))
        at = (1000 * n + us) * 1000
        spans.append(Span("inp_pos", "copy", "host", at - 500, at, {"step": n, "split": 1}))
    sides = {"a": Timeline(spans), "b": Timeline(spans)}
    for window_us, drawn, low, high in ((None, "step 1", 900, 1000), ("inputs", "step 2", 31, 60)):
        fig = plots.timelines(sides, window_us=window_us)
        assert first_step(fig)[0] == drawn and low <= fig.axes[0].get_xlim()[1] < high
    for window in ((0, 50), [0, 50], np.array([0, 50]), pd.Series([0.0, 50.0])):
        for fig in (
            plots.timelines(sides, window_us=window), plots.timeline(sides["a"], window_us=window)
        ):  # fmt: skip
            assert fig.axes[0].get_xlim() == pytest.approx((0, 50), abs=5), "an array is a window"


def test_a_block_is_drawn_by_what_is_seen_and_visited():
    seen = ["all", "some", "none", "none", "all", "all", "some", "none"]
    n = np.arange(8)
    where = {"token": n // 4 * 8, "n_tokens": 8, "cell": n % 4 * 16, "n_cells": 16, "seen": seen}
    off = pd.DataFrame({"way": "off", "visited": True, **where})
    frame = pd.concat([off, off.assign(way="in_loop", visited=[s != "none" for s in seen])])
    fig = plots.kv_blocks({"one": frame})
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["off: 8 of 8", "in_loop: 5 of 8"]
    of = {kind: to_rgba(BLOCK_LOOKS[kind].colour) for kind in BLOCK_LOOKS}
    for ax, in_vain in ((fig.axes[0], True), (fig.axes[1], False)):
        drawn = [colour for colour, _ in boxes(ax)]
        wanted = {of["all", True]: 3, of["some", True]: 2, of["none", in_vain]: 3}
        assert {colour: drawn.count(colour) for colour in drawn} == wanted
        assert ax.get_xlim() == (0, 64) and ax.get_ylim() == (16, 0)
    broken = plots.kv_blocks({"broken": off.assign(visited=False)})
    assert "left unread, though all of it is seen" in texts(broken)


def test_a_table_has_the_comparison_s_numbers():
    found = comparison()
    table = tables.speedup_table(found)
    columns = "Test,Toggled,t/s baseline,t/s toggled,Speedup,95% CI,n,verdict"
    assert ",".join(table.columns) == columns
    assert table.attrs["constant"] == {
        "Model": "tiny Q8_0", "Device": "embedded, 2 workers", "Toggle": "sync",
        "Baseline": "per_copy", "Background": "copy_stream=own, all else off",
        "Settings": "", "Commit": "aaaaaaaa", "Date": "2026-11-21",
        "answer": str(found.answer("copy_boundary")),
    }  # fmt: skip
    arms = table[table["Test"] != tables.GEOMETRIC_MEAN]
    numbers = found.summary()
    assert list(arms["Speedup"].astype(float)) == pytest.approx(list(numbers["speedup"]), abs=6e-4)
    assert list(arms["verdict"]) == list(numbers["verdict"])
    assert dict(zip(arms["Toggled"], arms["verdict"], strict=True)) == {
        "copy_boundary": "faster", "write_read_boundary": "slower",
        "blocking_copies": "no difference", "per_copy (A/A)": "A/A control",
    }  # fmt: skip


def test_the_geometric_mean_comes_last_without_the_control():
    ab = comparison()
    numbers = ab.summary()
    numbers.loc[numbers["test"] == "pp512", "speedup"] *= 4
    ab.summary = lambda: numbers
    table = tables.speedup_table(ab)
    assert list(table["Test"][-3:]) == [tables.GEOMETRIC_MEAN] * 3
    for toggled, said in table[-3:].set_index("Toggled")["Speedup"].items():
        both = numbers[numbers["label"] == toggled]["speedup"]
        assert float(said) == pytest.approx(np.sqrt(both.prod()), abs=6e-4)


def test_several_devices_and_models_stand_apart():
    several = comparison(), comparison(device="cuda", model="big"), comparison(model="big")
    n = len(several[0].summary())
    devices = ["embedded, 2 workers"] * 2 * n + ["cuda, 2 workers"] * n
    assert list(tables.summary(*several)["device"]) == devices, "rows of one stand together"
    assert {"Model", "Device"} <= set(tables.speedup_table(*several).columns)


def test_steps_without_gaps_count_for_the_one_in_the_middle():
    gap = {"step": 3, "between": LAUNCHES, "before": "a", "after": "b", "traced_us": 5.0}
    for n_steps, n_gaps in ((1, "1"), (3, "0")):
        table = profiles.gaps_table(pd.DataFrame([gap]), n_steps).set_index("traced us")
        assert table.loc["gaps (count)", f"between {LAUNCHES}"] == n_gaps


EVIL = "<script>alert('&\"')</script><img src=x onerror=alert(1)>"
OWN_TAGS = {"table", "caption", "thead", "tbody", "tr", "th", "td", "p", "br", "small", "b", "code"}


def hostile() -> AB:
    """A comparison whose every name is a script: a run folder from a stranger."""
    made = comparison(model=EVIL, device=EVIL, rounds=5, tests=("tg32",))
    run, samples = made.run, made.samples
    names = {arm["name"]: f"{EVIL} {arm['name']}" for arm in run["arms"]}
    for arm in run["arms"]:
        arm["name"] = names[arm["name"]]
    run["result"] |= {"toggle": EVIL, "warm_up": {EVIL: {"stable": False, "rounds": 1}}}
    run["result"]["answers"] = {names[k]: v for k, v in run["result"]["answers"].items()}
    run |= {"run_id": EVIL, "started": EVIL, "tests": [EVIL], "commit": {"hash": EVIL}}
    return AB(run, samples.assign(arm=samples["arm"].map(names), test=EVIL))


def pair() -> Pair:
    traces = [Profile(Recorder(nvtx=False))] * 2
    return Pair(
        "tg4", Toggles(), Toggles(sync="packed"), (EVIL, EVIL), (1.0, 2.0),
        stats.Ratio(2.0, 1.9, 2.1, 5), stats.Band(0.9, 1.1), Answer("exact", True, 3, 0, 0.0),
        *traces, False,
    )  # fmt: skip


@pytest.mark.parametrize("make", [
    hostile, pair, lambda: results.Run(Path(EVIL), hostile().run, hostile().samples),
    lambda: Generation(text=EVIL * 2),
])  # fmt: skip
def test_names_from_files_are_text_and_never_tags(make):
    page = BeautifulSoup(make()._repr_html_(), "html.parser")
    assert {tag.name for tag in page.find_all()} <= OWN_TAGS and EVIL[:20] in page.get_text()


def test_a_pair_says_whether_it_is_of_a_gpu():
    one = pair()
    assert BeautifulSoup(one._repr_html_(), "html.parser").get_text() == one.line == repr(one)
    assert "faster, 2.000x" in one.line and "not of a GPU" in one.line
    assert "not of a GPU" not in one._replace(device_is_gpu=True).line
