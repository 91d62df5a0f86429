"""`profile(engine)`: what did the host and the device do for each token, and who waited for whom?

    with wb.profile(eng, window=(3, 8)) as prof:
        eng.generate("Hello", max_tokens=16)
    prof.timeline.to_frame()  # one row per span
    prof.summary()            # one row per step
    prof.save("t.pftrace.gz")  # opens in Perfetto

A traced run attributes time; it does not measure throughput, for recording a span costs the host
about as much as issuing a command. Every table made here says so.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np
import pandas as pd

from workbench.errors import UsageError
from workbench.trace import perfetto
from workbench.trace.spans import CATEGORIES, HOST_LANE, Recorder, Span

TRACED = "traced, not for throughput"

# column of a frame -> its pandas type
COLUMNS = {
    "name": "str",  # tensor, node or value the command is about
    "category": "str",  # one of trace.spans.CATEGORIES
    "lane": "str",  # "host", or "<backend> stream <id>"
    "start_us": "float64",  # from the start of the first span
    "dur_us": "float64",
    "step": "Int64",  # number of the engine's step, <NA> outside every step
    "split": "Int64",  # number of the split, -1 for commands outside every split
    "index": "Int64",  # position in program.commands, <NA> for what is no command
    "bytes": "Int64",  # bytes moved, of copies, writes and reads
    "op": "str",  # of launches
    "kind": "str",  # device spans: "copy" or "launch"; elsewhere the category
}


class Timeline:
    """The spans of a traced run, in the order in which they ended."""

    def __init__(self, spans: Iterable[Span]):
        self.spans = list(spans)

    def __len__(self) -> int:
        return len(self.spans)

    def to_frame(self) -> pd.DataFrame:
        """One row per span, by start, enclosing spans first; the columns are those of COLUMNS.

        A host span that names no step belongs to the step whose span encloses it.
        `frame.attrs["origin_ns"]` is the clock's value at start_us = 0.
        """
        spans = sorted(self.spans, key=perfetto.nesting_order)
        origin = spans[0].start_ns if spans else 0
        steps = _steps_of(spans)
        args = [s.args for s in spans]
        data: dict[str, list[Any]] = {
            "name": [s.name for s in spans],
            "category": [s.category for s in spans],
            "lane": [s.lane for s in spans],
            "start_us": [(s.start_ns - origin) / 1e3 for s in spans],
            "dur_us": [(s.end_ns - s.start_ns) / 1e3 for s in spans],
            "step": steps,
            "split": [a.get("split") for a in args],
            "index": [a.get("index") for a in args],
            "bytes": [a.get("bytes") for a in args],
            "op": [a.get("op") for a in args],
            "kind": [a.get("kind", s.category) for s, a in zip(spans, args, strict=True)],
        }
        frame = pd.DataFrame(
            {name: pd.Series(data[name], dtype=kind) for name, kind in COLUMNS.items()}
        )
        frame.attrs |= {"origin_ns": origin, "note": TRACED}
        return frame

    def categories(self) -> pd.DataFrame:
        """Spans and total time of each category, in the order in which categories nest."""
        frame = self.to_frame()
        groups = frame.groupby("category")["dur_us"]
        table = pd.DataFrame({"spans": groups.size(), "total_us": groups.sum()})
        order = [c for c in CATEGORIES if c in table.index]
        return table.loc[order + sorted(set(table.index) - set(order))]

    def summary(self) -> pd.DataFrame:
        """One row per step: what the host issued, and where the device stood still.

        * n_tokens, n_past: of the step.
        * waits, copies, launches, copied_bytes: the host's commands, as `Program.counts()`.
        * step_us: the step on the host. build_us: of that, making batch, graph and program.
          host_us: in commands other than waits. wait_us: in waits. The rest of step_us is Python
          between the commands, the recording of spans included.
        * device_us: time in which at least one stream had work of this step.
        * idle_us: time between the step's first and last device work with no stream at work.
        * gap_us: from the last device work of the step before to the first of this one; missing
          for the first step, and on a backend with no device lanes.
        """
        frame = self.to_frame()
        shapes = {s.args.get("step"): s.args for s in self.spans if s.category == "step"}
        rows = []
        last_end = np.nan
        for step, part in frame[frame["step"].notna()].groupby("step"):
            host = part[part["lane"] == HOST_LANE]
            device = part[part["lane"] != HOST_LANE]
            start, end, busy = _extent(device)
            shape = shapes.get(int(step), {})
            copies = host["category"] == "copy"
            commands = host[~host["category"].isin(["step", "split", "build"])]
            syncs = commands["category"] == "sync"
            rows.append(
                {
                    "step": int(step),
                    "n_tokens": shape.get("n_tokens"),
                    "n_past": shape.get("n_past"),
                    "waits": int(syncs.sum()),
                    "copies": int(copies.sum()),
                    "launches": int((host["category"] == "launch").sum()),
                    "copied_bytes": int(host.loc[copies, "bytes"].fillna(0).sum()),
                    "step_us": float(host.loc[host["category"] == "step", "dur_us"].sum()),
                    "build_us": float(host.loc[host["category"] == "build", "dur_us"].sum()),
                    "host_us": float(commands.loc[~syncs, "dur_us"].sum()),
                    "wait_us": float(commands.loc[syncs, "dur_us"].sum()),
                    "device_us": busy,
                    "idle_us": end - start - busy,
                    "gap_us": start - last_end,
                }
            )
            last_end = end
        table = pd.DataFrame(rows, columns=SUMMARY_COLUMNS).set_index("step")
        table.attrs["note"] = TRACED
        return table

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><td>{html.escape(str(name))}</td><td>{row.spans:.0f}</td>"
            f"<td>{row.total_us:,.1f}</td></tr>"
            for name, row in self.categories().iterrows()
        )
        return (
            f"<table><caption>{len(self)} spans ({TRACED})</caption>"
            f"<tr><th>category</th><th>spans</th><th>total us</th></tr>{body}</table>"
        )


SUMMARY_COLUMNS = [
    "step", "n_tokens", "n_past", "waits", "copies", "launches", "copied_bytes",
    "step_us", "build_us", "host_us", "wait_us", "device_us", "idle_us", "gap_us",
]  # fmt: skip


class Profile:
    """The result of `profile`: complete once the body has ended, or has raised."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    @property
    def timeline(self) -> Timeline:
        return Timeline(self.recorder.spans)

    def to_frame(self) -> pd.DataFrame:
        return self.timeline.to_frame()

    def summary(self) -> pd.DataFrame:
        return self.timeline.summary()

    def save(self, path: str | PathLike[str]) -> int:
        """Writes a Perfetto trace, gzipped where `path` ends in .gz; returns its size in bytes."""
        return perfetto.write(self.recorder.spans, path)

    def _repr_html_(self) -> str:
        return self.timeline._repr_html_()


@contextmanager
def profile(
    engine: Any, window: tuple[int, int] | None = None, nvtx: bool = True
) -> Iterator[Profile]:
    """Traces every step `engine` makes in the body; the recorder it had before is put back.

    window=(first, n) keeps the spans of n steps, the first of them number `first` of those made
    in the body, counted from 0: traces stay small and the warm-up stays out of them. With nvtx,
    the host's spans are NVTX ranges too. A body that raises keeps its trace.

    Raises UsageError for a window that holds no step.
    """
    if window is not None and (len(window) != 2 or window[0] < 0 or window[1] < 1):
        raise UsageError(
            f"window={window!r} holds no step; give (first, n) with first >= 0 and n >= 1"
        )
    recorder = Recorder(nvtx) if window is None else _WindowRecorder(*window, nvtx=nvtx)
    before = engine.recorder
    engine.recorder = recorder
    try:
        yield Profile(recorder)
    finally:
        engine.recorder = before


class _WindowRecorder(Recorder):
    """Keeps n steps from number `first` on, counted from the first step it hears of.

    A span that names no step belongs to the step of the span before it: inner spans end, and so
    arrive, before the split and the step around them.
    """

    def __init__(self, first: int, n: int, nvtx: bool):
        super().__init__(nvtx=nvtx)
        self._first, self._n = first, n
        self._origin: int | None = None
        self._step = 0

    def _keeps(self, args: dict[str, Any]) -> bool:
        step = args.get("step")
        if step is not None:
            self._step = step
            if self._origin is None:
                self._origin = step
        if self._origin is None:
            return self._first == 0
        return self._first <= self._step - self._origin < self._first + self._n

    def end(
        self, handle: Any, name: str, category: str, start_ns: int, args: dict[str, Any]
    ) -> None:
        super().end(handle, name, category, start_ns, args)
        if not self._keeps(args):
            self.spans.pop()

    def add(
        self, name: str, category: str, lane: str, start_ns: int, end_ns: int, **args: Any
    ) -> None:
        super().add(name, category, lane, start_ns, end_ns, **args)
        if not self._keeps(args):
            self.spans.pop()


def _steps_of(spans: list[Span]) -> list[int | None]:
    """The step of each span (sorted by start): its own, or that of the step span around it."""
    steps: list[int | None] = []
    current: Span | None = None
    for span in spans:
        if span.category == "step":
            current = span
        step = span.args.get("step")
        if step is None and span.lane == HOST_LANE and current is not None:
            step = current.args.get("step") if span.end_ns <= current.end_ns else None
        steps.append(step)
    return steps


def _extent(device: pd.DataFrame) -> tuple[float, float, float]:
    """First start, last end, and time covered by at least one span, all us; NaN where none is."""
    if device.empty:
        return np.nan, np.nan, np.nan
    starts = device["start_us"].to_numpy()  # sorted: the frame is
    ends = starts + device["dur_us"].to_numpy()
    # a span adds what it reaches beyond all spans before it
    reached = np.concatenate(([starts[0]], np.maximum.accumulate(ends)[:-1]))
    covered = np.clip(ends - np.maximum(starts, reached), 0, None).sum()
    return float(starts[0]), float(ends.max()), float(covered)
