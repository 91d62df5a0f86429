"""The recorder, and what `profile` makes of its spans: frame, summary, window, restore."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.oracles.trace_pattern import fold_group, trace_pattern
from tests.unit.fake_cupti import MODEL
from workbench.common.errors import UsageError
from workbench.config import EngineConfig, Toggles
from workbench.trace.profile import COLUMNS, TRACED, Timeline, profile
from workbench.trace.spans import CATEGORIES, HOST_LANE, Recorder, Span
from workbench.trace.window import WindowRecorder

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
        self.device = "embedded"
        self.model, self.toggles, self.config = MODEL, Toggles(), EngineConfig()
        self.backend, self.sync_mode = SimpleNamespace(description="made up"), "per_copy"
        self.chosen = "preset baseline"
        self.n_steps = 40
        self._loaded = self  # what it stands on, for `exclusive`

    def synchronize(self) -> None:
        """Nothing is queued."""

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
    engine = FakeEngine()
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
    assert page.startswith(prof.timeline._repr_html_()) and "device spans from events" in page
    assert ">launch</td><td>2</td><td>6.0</td>" in page and TRACED in page
    assert prof.save(tmp_path / "t.pftrace.gz") == (tmp_path / "t.pftrace.gz").stat().st_size


def test_nothing_recorded() -> None:
    timeline = Timeline([])
    assert list(timeline.to_frame().columns) == list(COLUMNS) and len(timeline.summary()) == 0
    assert "0 spans" in timeline._repr_html_()
    assert set(timeline.categories().index) <= set(CATEGORIES)


# patterns as recorded -----------------------------------------------------------------------------


class Pieces:
    """Spans of steps of one host split and one device split, made by hand, 1 ms a step (us).

    letters: the device split's, where `c` is a copy and its wait, `g` two launches. calls: by
    copy's name, how long its call takes. busy: how long the copies' stream works from the step's
    start; its copies take 5 us each behind that.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def step(
        self, n: int, letters: str, calls: dict[str, float] | None = None, busy: float = 0
    ) -> Pieces:
        self.at, self.n, self.index = 1000.0 * n, n, 0
        self._host("embd", "launch", 0, 3)
        self._split(0, "host")
        free = self.at + busy
        if busy:
            self._device("before", "launch", self.at, free, index=None)
        for letter in letters:
            name = f"in{self.index}"
            if letter in "ac":
                started = self.at
                index = self._host(name, "copy", 1, (calls or {}).get(name, 2))
                end = max(started, free) + 5
                self._device(name, "copy", max(started, free), end, index=index)
                free = end
                if letter == "c":
                    self._host(f"wait {name}", "sync", 1, 10, blocks=index)
            elif letter == "g":
                self._host("q", "launch", 1, 3)
                self._host("k", "launch", 1, 3)
            else:
                category = {"s": "sync", "r": "record", "w": "wait"}[letter]
                self._host("wait stream" if letter == "s" else category, category, 1, 4)
        self._split(1, "embedded")
        self._host("wait logits", "sync", -1, 50)
        self._host(f"step {n}", "step", None, 0)
        return self

    def _host(self, name: str, category: str, split: int | None, us: float, **about: int) -> int:
        args: dict[str, Any] = {"step": self.n} | about
        if split is not None:
            args |= {"split": split, "index": self.index}
            self.index += 1
        self._add(name, category, HOST_LANE, self.at, self.at + us, args)
        self.at += us
        return self.index - 1

    def _split(self, split: int, backend: str) -> None:
        args = {"step": self.n, "split": split, "backend": backend}
        self._add(f"split {split}", "split", HOST_LANE, self.at, self.at, args)

    def _device(self, name: str, kind: str, start: float, end: float, index: int | None) -> None:
        args = {"step": self.n, "split": 1, "kind": kind} | (
            {} if index is None else {"index": index}
        )
        self._add(name, "device", "embedded stream 1", start, end, args)

    def _add(
        self, name: str, category: str, lane: str, start: float, end: float, args: Any
    ) -> None:
        self.spans.append(Span(name, category, lane, round(1e3 * start), round(1e3 * end), args))


@pytest.mark.parametrize(
    "letters", ["scscscg", "sccccsg", "saaasg", "aasg", "aaag", "saaarwg", "sag", "scg", "g"]
)
def test_the_pattern_is_read_off_the_spans(letters: str) -> None:
    spans = Pieces().step(3, letters).spans
    assert trace_pattern(spans) == f"h {letters}"
    assert trace_pattern(Timeline(spans), 3, fold=True) == f"h {fold_group(letters)}"


def test_a_copy_whose_call_outlasts_it_behind_work_is_a_hidden_wait() -> None:
    spans = Pieces().step(0, "aaag", {"in1": 120}, busy=100).spans
    assert trace_pattern(spans) == "h a(s)aag"
    every = Pieces().step(0, "aaag", {"in1": 80, "in2": 80, "in3": 80}, busy=70).spans
    assert trace_pattern(every) == "h a(s)aag", "behind the first the stream is idle"


def test_a_call_that_returns_while_its_stream_works_holds_nobody() -> None:
    assert trace_pattern(Pieces().step(0, "aaag", {"in1": 60}, busy=100).spans) == "h aaag"


def test_on_an_idle_stream_a_slow_call_is_not_a_wait() -> None:
    assert trace_pattern(Pieces().step(0, "aaag", {"in1": 500, "in2": 500}).spans) == "h aaag"


def test_a_host_that_was_stopped_once_is_outvoted() -> None:
    pieces = Pieces()
    for n in range(5):
        pieces.step(n, "aag", {"in1": 150 if n == 2 else 2}, busy=100)
    assert trace_pattern(pieces.spans, 2) == "h aag"
    for n in range(5, 12):
        pieces.step(n, "aag", {"in1": 150}, busy=100)
    assert trace_pattern(pieces.spans) == trace_pattern(pieces.spans, 0) == "h a(s)ag"


def test_a_blocking_copy_is_drawn_once_and_hidden_waits_fold_only_together() -> None:
    blocking = Pieces().step(0, "scg", {"in2": 200}, busy=150).spans
    assert trace_pattern(blocking) == "h scg"
    mixed = Pieces().step(0, "aaag", {"in1": 120}, busy=100).spans
    assert trace_pattern(mixed, fold=True) == "h a(s)aag"
    alone = Pieces().step(0, "sag", {"in2": 120}, busy=100).spans
    assert trace_pattern(alone, fold=True) == "h sa(s)g"


def test_steps_that_differ_or_are_missing_are_refused() -> None:
    spans = Pieces().step(0, "aag").step(1, "sag").spans
    with pytest.raises(UsageError, match=r"2 patterns: 'h aag' \(step 0\), 'h sag' \(step 1\)"):
        trace_pattern(spans)
    assert trace_pattern(spans, 1) == "h sag"
    with pytest.raises(UsageError, match="step 7 is not in the trace; it has steps 0 to 1"):
        trace_pattern(spans, 7)
    with pytest.raises(UsageError, match="0 patterns"):
        trace_pattern([])


def test_a_window_recorder_says_which_steps_it_wants() -> None:
    recorder = WindowRecorder((2, 2), nvtx=False)
    assert [recorder.wants(step) for step in range(10, 16)] == [False] * 2 + [True] * 2 + [
        False
    ] * 2
    assert all(WindowRecorder(nvtx=False).wants(step) for step in (0, 1000))
    assert recorder.slowdown is None


def test_slowdown_compares_steps_of_as_many_tokens() -> None:
    recorder = WindowRecorder((0, 4), nvtx=False)
    for n, (tokens, us) in enumerate([(64, 9000), (1, 300), (1, 320), (1, 310)]):
        recorder.add(f"step {n}", "step", HOST_LANE, 0, 1000 * us, step=n, n_tokens=tokens)
    for ns in (200_000, 150_000, 155_000):
        recorder.untraced(1, ns)
    recorder.untraced(64, 1)
    slowdown = recorder.slowdown
    assert slowdown == (1, 310.0, 3, 155.0, 3) and slowdown.ratio == 2.0
    assert "2.00 times" in str(slowdown)
