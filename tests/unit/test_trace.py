"""The recorder, and what `profile` makes of its spans: frame, summary, window, restore."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from workbench.errors import UsageError
from workbench.trace.profile import COLUMNS, TRACED, Timeline, profile
from workbench.trace.spans import CATEGORIES, HOST_LANE, Recorder, Span

STREAM = "embedded stream 0"


def test_recorder_keeps_order_times_and_a_failing_body() -> None:
    recorder = Recorder(nvtx=False)
    with pytest.raises(OSError), recorder.span("step", "step", step=3):
        with recorder.span("a", "copy", bytes=8):
            pass
        raise OSError
    recorder.add("a", "device", STREAM, 5, 9, kind="copy")
    inner, outer, device = recorder.spans
    assert [s.name for s in recorder.spans] == ["a", "step", "a"]
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    assert (inner.args, outer.args, device.args) == ({"bytes": 8}, {"step": 3}, {"kind": "copy"})
    assert (inner.lane, device.lane) == (HOST_LANE, STREAM)


class FakeEngine:
    """Makes steps of one copy, two launches and a wait, as the engine's traced path records them.

    Times are made up, so that the figures below can be worked out by hand (us):
    host   step 0..100: graph 2..5, copy 10..14, launch 20..23, launch 25..28, sync 30..95
    device copy 12..20, launch 40..60, launch 55..80
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.n_steps = 40

    def step(self) -> None:
        n, self.n_steps = self.n_steps, self.n_steps + 1
        r = self.recorder
        if r is None:
            return
        at = 1_000_000 * n

        def host(name: str, category: str, start: int, end: int, **args: Any) -> None:
            # begin/end stamp real times; made-up ones go in by `add`, with the host's lane
            r.add(name, category, HOST_LANE, at + 1000 * start, at + 1000 * end, **args)

        common = {"step": n, "split": 1}
        host("graph", "build", 2, 5, step=n)
        host("embd", "copy", 10, 14, index=0, bytes=256, **common)
        for i, (start, node) in enumerate(((20, "q"), (25, "k")), start=1):
            host(node, "launch", start, start + 3, index=i, op="mul_mat", **common)
        host("split 1", "split", 5, 29, split=1, backend="embedded")
        host("logits", "sync", 30, 95, index=3, step=n, split=-1)
        host(f"step {n}", "step", 0, 100, step=n, n_tokens=1, n_past=n)
        for i, (name, kind, start, end) in enumerate(
            (("embd", "copy", 12, 20), ("q", "launch", 40, 60), ("k", "launch", 55, 80))
        ):
            lane = "embedded stream 1" if kind == "copy" else STREAM
            r.add(
                name, "device", lane, at + 1000 * start, at + 1000 * end,
                index=i, kind=kind, op="mul_mat" if kind == "launch" else None, **common,
            )  # fmt: skip


def test_frame_has_the_documented_columns() -> None:
    engine = FakeEngine()
    with profile(engine, nvtx=False) as prof:
        engine.step()
    frame = prof.to_frame()
    assert {c: str(t) for c, t in frame.dtypes.items()} == COLUMNS
    assert len(frame) == len(prof.recorder.spans) == 10
    assert frame["start_us"].is_monotonic_increasing and frame["start_us"][0] == 0
    assert list(frame["name"][:4]) == ["step 40", "graph", "split 1", "embd"]
    # the split's span names no step: it lies in one
    assert (frame["step"] == 40).all()
    split = frame[frame["category"] == "split"].iloc[0]
    assert (split["start_us"], split["dur_us"], split["split"]) == (5, 24, 1)
    assert pd.isna(split["index"]) and pd.isna(split["op"]) and split["kind"] == "split"
    device = frame[frame["category"] == "device"]
    assert list(device["kind"]) == ["copy", "launch", "launch"]
    assert list(device["index"]) == [0, 1, 2]
    assert frame.attrs["note"] == TRACED and frame.attrs["origin_ns"] == 40_000_000


def test_summary_worked_out_by_hand() -> None:
    engine = FakeEngine()
    with profile(engine, nvtx=False) as prof:
        engine.step()
        engine.step()
    table = prof.summary()
    assert list(table.index) == [40, 41] and table.attrs["note"] == TRACED
    row = table.loc[41]
    assert (row.n_tokens, row.n_past) == (1, 41)
    assert (row.waits, row.copies, row.launches, row.copied_bytes) == (1, 1, 2, 256)
    assert (row.step_us, row.build_us, row.host_us, row.wait_us) == (100, 3, 4 + 3 + 3, 65)
    # device work 12..20 and 40..80 (the launches overlap), then nothing until 1012
    assert (row.device_us, row.idle_us, row.gap_us) == (48, 20, 1012 - 80)
    assert np.isnan(table.loc[40].gap_us)


def test_summary_without_a_device_lane() -> None:
    spans = [
        Span("n", "launch", HOST_LANE, 10, 20, {"step": 0, "index": 0}),
        Span("step", "step", HOST_LANE, 0, 30, {"step": 0}),
    ]
    row = Timeline(spans).summary().loc[0]
    assert row.launches == 1 and np.isnan(row.device_us) and np.isnan(row.gap_us)


def test_window_bounds_what_is_kept() -> None:
    engine = FakeEngine()
    with profile(engine, window=(2, 3), nvtx=False) as prof:
        for _ in range(9):
            engine.step()
    assert list(prof.summary().index) == [42, 43, 44]
    assert len(prof.recorder.spans) == 3 * 10
    assert prof.timeline.categories()["spans"].to_dict() == {
        "step": 3, "build": 3, "split": 3, "copy": 3, "launch": 6, "sync": 3, "device": 9,
    }  # fmt: skip


def test_window_of_a_recorder_that_stamps_real_times() -> None:
    engine = SimpleNamespace(recorder=None)
    with profile(engine, window=(1, 1), nvtx=False) as prof:
        for n in range(3):
            span = engine.recorder.span
            with (
                span("step", "step", step=n),
                span("split", "split", split=0),
                span("node", "launch", step=n, index=0),
            ):
                pass
    assert [s.category for s in prof.recorder.spans] == ["launch", "split", "step"]
    assert set(prof.to_frame()["step"]) == {1}


@pytest.mark.parametrize("window", [(-1, 2), (0, 0), (3,)])
def test_a_window_without_a_step_is_refused(window: Any) -> None:
    with pytest.raises(UsageError, match="holds no step"), profile(FakeEngine(), window=window):
        pass


def test_the_recorder_before_is_put_back_and_a_failing_body_keeps_its_trace() -> None:
    engine, before = FakeEngine(), Recorder(nvtx=False)
    engine.recorder = before
    with pytest.raises(OSError), profile(engine, nvtx=False) as prof:
        engine.step()
        raise OSError
    assert engine.recorder is before and not before.spans
    assert len(prof.timeline) == 10
    with profile(engine, nvtx=False) as second:
        engine.step()
    assert len(prof.timeline) == len(second.timeline) == 10


def test_html_is_a_table_by_category(tmp_path: Any) -> None:
    engine = FakeEngine()
    with profile(engine, nvtx=False) as prof:
        engine.step()
    page = prof._repr_html_()
    assert page == prof.timeline._repr_html_()
    assert "<td>launch</td><td>2</td><td>6.0</td>" in page and TRACED in page
    assert prof.save(tmp_path / "t.pftrace.gz") == (tmp_path / "t.pftrace.gz").stat().st_size


def test_nothing_recorded() -> None:
    timeline = Timeline([])
    assert list(timeline.to_frame().columns) == list(COLUMNS) and len(timeline.summary()) == 0
    assert "0 spans" in timeline._repr_html_()
    assert set(timeline.categories().index) <= set(CATEGORIES)
