"""`profile(engine)`: what did the host and the device do for each token, and who waited for whom?

    with wb.profile(eng, window=(3, 8)) as prof:
        eng.generate("Hello", max_tokens=16)
    prof.timeline.to_frame()  # one row per span
    prof.summary()            # one row per step
    prof.kernels()            # one row per op: time, share, bytes, GB/s, launch to start
    prof.phases()             # what the host did in a step
    prof.gaps()               # one row per time in which no kernel ran
    prof.note                 # where the spans come from, and what tracing cost
    prof.save("t.pftrace.gz")  # opens in Perfetto; t.json.gz: Chrome's JSON

A traced run attributes time; it does not measure throughput, since recording a span costs the host
about as much as issuing a command. Every table made here says so.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from workbench import __version__
from workbench.common.checkout import commit
from workbench.common.devices import is_gpu
from workbench.common.errors import UsageError
from workbench.engine import exclusive
from workbench.trace import analysis, perfetto
from workbench.trace.cupti import collector as cupti
from workbench.trace.cupti.collector import CuptiRecorder, Unavailable
from workbench.trace.cupti.correlate import CALL
from workbench.trace.lanes import nesting_order
from workbench.trace.spans import CATEGORIES, HOST_LANE, Span
from workbench.trace.window import Slowdown, Window, WindowRecorder

if TYPE_CHECKING:
    from workbench.config import Toggles
    from workbench.engine.engine import Engine

TRACED = "traced, not for throughput"
COLLECTORS = ("auto", "events", "cupti")

# column of a frame -> its pandas type
COLUMNS = {
    "name": "str",  # tensor, node or value the command is about
    "category": "str",  # one of trace.spans.CATEGORIES, or "call" (of the driver; CUPTI's)
    "lane": "str",  # "host", or "<backend> stream <id>"
    "start_us": "float64",  # from the start of the first span
    "dur_us": "float64",
    "step": "Int64",  # number of the engine's step, <NA> outside every step
    "split": "Int64",  # number of the split, -1 for commands outside every split
    "index": "Int64",  # position in program.commands, <NA> for what is no command
    "part": "Int64",  # position in the parts of a plan, <NA> for what is no part
    "bytes": "Int64",  # bytes moved, of copies, writes and reads; those a launch must move
    "op": "str",  # of launches
    "kind": "str",  # device spans: "copy" or "launch"; elsewhere the category
    "kernel": "str",  # device spans from CUPTI: the function that ran
    "on": "str",  # host spans of commands: the lane that their work is queued on
    "n_tokens": "Int64",  # of steps
}


class Timeline:
    """The spans of a traced run, in the order in which they ended."""

    def __init__(self, spans: Iterable[Span]):
        self.spans = list(spans)

    def __len__(self) -> int:
        return len(self.spans)

    def to_frame(self) -> pd.DataFrame:
        """One row per span, by start, enclosing spans first; COLUMNS has the columns.

        A host span that names no step belongs to the step span around it.
        `frame.attrs["origin_ns"]` is the clock's value at start_us = 0.
        """
        spans = sorted(self.spans, key=nesting_order)
        origin = spans[0].start_ns if spans else 0
        data: dict[str, list[Any]] = {
            "name": [s.name for s in spans],
            "category": [s.category for s in spans],
            "lane": [s.lane for s in spans],
            "start_us": [(s.start_ns - origin) / 1e3 for s in spans],
            "dur_us": [(s.end_ns - s.start_ns) / 1e3 for s in spans],
            "step": _steps_of(spans),
            "kind": [s.args.get("kind", s.category) for s in spans],
        }
        data |= {name: [s.args.get(name) for s in spans] for name in COLUMNS.keys() - data.keys()}
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
        * waits, copies, launches, copied_bytes: the host's commands, as `Program.counts()`. Where
          there are plans, also replays.
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
            device = part[part["category"] == "device"]
            start, end, busy = _extent(device)
            shape = shapes.get(int(step), {})
            copies, replays = host["category"] == "copy", host["category"] == "replay"
            commands = host[~host["category"].isin(["step", "split", "build", CALL])]
            syncs = commands["category"] == "sync"
            rows.append(
                {
                    "step": int(step),
                    "n_tokens": shape.get("n_tokens"),
                    "n_past": shape.get("n_past"),
                    "waits": int(syncs.sum()),
                    "copies": int(copies.sum()),
                    "launches": int((host["category"] == "launch").sum()),
                    "replays": int(replays.sum()),
                    "copied_bytes": int(host.loc[copies | replays, "bytes"].fillna(0).sum()),
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
        if not table["replays"].any():
            table = table.drop(columns="replays")
        table.attrs["note"] = TRACED
        return table

    def _repr_html_(self) -> str:
        body = "".join(
            f'<tr><td style="text-align:left">{html.escape(str(name))}</td>'
            f"<td>{row.spans:.0f}</td>"
            f"<td>{row.total_us:,.1f}</td></tr>"
            for name, row in self.categories().iterrows()
        )
        return (
            f"<table><caption>{len(self)} spans ({TRACED})</caption>"
            f"<tr><th>category</th><th>spans</th><th>total us</th></tr>{body}</table>"
        )


SUMMARY_COLUMNS = [
    "step", "n_tokens", "n_past", "waits", "copies", "launches", "replays", "copied_bytes",
    "step_us", "build_us", "host_us", "wait_us", "device_us", "idle_us", "gap_us",
]  # fmt: skip


class Profile:
    """The result of `profile`: complete once the body has ended, or has raised.

    collector: where device spans come from, `events` or `cupti`. fallback: why they do not come
    from CUPTI where they were to, else nothing. windows: with CUPTI, what was recorded together,
    and whether it is complete. about: of what engine it is; what else a reader of the file should
    know can be added.
    """

    def __init__(
        self, recorder: WindowRecorder, fallback: str = "", about: dict[str, Any] | None = None
    ):
        self.recorder = recorder
        self._fallback = fallback
        self.about: dict[str, Any] = about or {}

    @property
    def timeline(self) -> Timeline:
        return Timeline(analysis.with_bytes(self.recorder.spans, self.recorder.program_of))

    @property
    def collector(self) -> str:
        return "events" if self.recorder.marks else "cupti"

    @property
    def fallback(self) -> str:
        return self._fallback or self.recorder.fallback

    @property
    def windows(self) -> list[Window]:
        return list(self.recorder.windows)

    @property
    def complete(self) -> bool | None:
        """Whether everything the programs asked for was recorded; None where nobody checks it."""
        windows = self.windows
        if not windows or self.recorder.marks:
            return None
        return all(w.complete for w in windows)

    @property
    def missing(self) -> str:
        """What the first incomplete window lacks, one line."""
        return next((w.missing for w in self.windows if not w.complete), "")

    @property
    def slowdown(self) -> Slowdown | None:
        """What tracing cost; None where no step of as many tokens ran untraced in the body."""
        return self.recorder.slowdown

    @property
    def note(self) -> str:
        """One line: where the spans come from, what they lack, how far the clocks may be apart,
        and what tracing cost."""
        parts = [f"device spans from {self.collector}"]
        if self.fallback:
            parts[0] += f" ({self.fallback})"
        if self.complete is not None:
            n = sum(w.n_records for w in self.windows)
            state = "complete" if self.complete else f"incomplete: {self.missing}"
            error = max(w.clock_error_ns for w in self.windows)
            parts += [f"{n} records, {state}", f"clocks within {error} ns"]
            if n_named := sum(w.n_named for w in self.windows):
                parts.append(f"{n_named} kernels named by their launches: CUPTI had other names")
        parts.append(str(self.slowdown or "slowdown unknown: no step of this size ran untraced"))
        return "; ".join(parts)

    def to_frame(self) -> pd.DataFrame:
        frame = self.timeline.to_frame()
        frame.attrs["collector"] = self.note
        return frame

    def summary(self) -> pd.DataFrame:
        return self.timeline.summary()

    def kernels(self, by: str = "op", read_gbps: float | None = None) -> pd.DataFrame:
        """A row per op, node or kernel; see `analysis.kernels`."""
        return analysis.kernels(self.to_frame(), by, read_gbps)

    def phases(self) -> pd.DataFrame:
        """What the host did in a step; see `analysis.phases`."""
        return analysis.phases(self.to_frame())

    def gaps(self) -> pd.DataFrame:
        """A row for each time in which no kernel ran; see `analysis.gaps`."""
        return analysis.gaps(self.to_frame())

    def save(self, path: str | PathLike[str]) -> int:
        """Writes a trace, with model, toggles and commit in it, and returns its size in bytes: for
        Perfetto, or Chrome's JSON where `path` ends in .json, gzipped where .gz follows."""
        return perfetto.write(self.timeline.spans, path, self.about | origin(self.note))

    def __repr__(self) -> str:
        spans = self.recorder.spans
        steps = len({s.args.get("step") for s in spans if s.category == "step"})
        return f"<Profile: {steps} steps, {len(spans)} spans ({TRACED})\n {self.note}>"

    def _repr_html_(self) -> str:
        return f"{self.timeline._repr_html_()}<p>{html.escape(self.note)}</p>"


@contextmanager
def profile(
    engine: Engine,
    window: tuple[int, int] | None = None,
    nvtx: bool = True,
    collector: str = "auto",
) -> Iterator[Profile]:
    """Traces steps that `engine` makes in the body; the recorder it had before is put back.

    window=(first, n) traces n steps, the first of them number `first` of those made in the body,
    counted from 0: traces stay small, the warm-up stays out of them, and the other steps show what
    tracing costs. With nvtx, a tool that listens to NVTX hears of traced steps and commands, too. A
    body that raises keeps its trace.

    collector: where device spans come from. `events`: two marks of the backend around each command;
    on CUDA they hold the host up, and where the device waits for the host a span is what issuing
    the command took.
    `cupti`: NVIDIA's profiling interface, which sees every kernel and call; where it cannot be used
    the spans come from events, and the profile's `fallback` says why. `auto`: `cupti` on a CUDA
    device, else `events`.

    Raises UsageError for a window that holds no step, for a collector that does not exist, and
    while another thread measures.
    """
    exclusive.check(engine._loaded)
    if collector not in COLLECTORS:
        raise UsageError(
            f"collector={collector!r} does not exist; choose one of {', '.join(COLLECTORS)}"
        )
    recorder, fallback = _recorder(engine, window, nvtx, collector)
    engine.synchronize()  # a step that was launched ahead is in nobody's trace
    before = engine.recorder
    engine.recorder = recorder
    try:
        yield Profile(recorder, fallback, about(engine))
    finally:
        engine.recorder = before
        if isinstance(recorder, CuptiRecorder):
            recorder.close_window()


def profile_each(
    engine: Engine, arms: Mapping[str, Toggles], n_tokens: int = 16, **asked: Any
) -> dict[str, Profile]:
    """Traces, by name, of the last 8 of n_tokens tokens that variants of `engine` with these
    toggles generate. asked: as for `profile`."""
    found = {}
    for name, toggles in arms.items():
        with engine.variant(toggles) as variant:
            window = (max(0, n_tokens - 8), 8)
            with profile(variant, window=window, **asked) as found[name]:
                variant.generate(tokens=[1, 2, 3], max_tokens=n_tokens)
    return found


def about(engine: Engine) -> dict[str, Any]:
    """What a trace says of the engine: model, device, toggles, and the order of its waits."""
    model = engine.model
    names = ("name", "quant", "architecture", "n_layer", "weight_bytes_per_token")
    return {
        "model": {name: getattr(model, name) for name in names} | {"file": Path(model.path).name},
        "device": engine.backend.description,
        "preset": engine.chosen,
        "toggles": engine.toggles.to_dict(),
        "sync_mode": engine.sync_mode,
        "config": engine.config.to_dict(),
    }


def origin(note: str) -> dict[str, Any]:
    """What a trace says of itself: the program's version and commit, and how it was taken."""
    made = commit()
    dirty = " with uncommitted changes" if made["dirty"] else ""
    return {
        "workbench": __version__, "commit": f"{made['hash']}{dirty}", "traced": f"{TRACED}; {note}"
    }  # fmt: skip


def _recorder(
    engine: Engine, window: tuple[int, int] | None, nvtx: bool, collector: str
) -> tuple[WindowRecorder, str]:
    """The recorder for a collector, and why it is another than the one asked for."""
    if collector == "events" or (collector == "auto" and not is_gpu(engine.device)):
        return WindowRecorder(window, nvtx), ""
    try:
        if not is_gpu(engine.device):
            raise Unavailable(f"CUPTI sees CUDA devices, and this is the {engine.device} device")
        module = cupti.load()
        cupti.probe(module)
    except Unavailable as reason:
        return WindowRecorder(window, nvtx), str(reason)
    return CuptiRecorder(module, engine, window, nvtx), ""


def _steps_of(spans: list[Span]) -> list[int | None]:
    """The step of each span (sorted by start): its own, or the number of the step around it."""
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
