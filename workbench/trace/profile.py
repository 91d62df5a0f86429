"""`profile(engine)`: a trace of the host's and the device's work for each token, with all waits.

    with wb.profile(eng, window=(3, 8)) as prof:
        eng.generate("Hello", max_tokens=16)
    prof.timeline.to_frame()  # one row per span
    prof.summary()            # one row per step
    prof.kernels()            # one row per op: time, share, bytes, GB/s, launch to start
    prof.phases()             # what the host did in a step
    prof.gaps()               # one row per time in which no kernel ran
    prof.note                 # the source of the spans, and the cost of tracing
    prof.save("t.pftrace.gz")  # opens in Perfetto; t.json.gz: Chrome's JSON
    wb.Profile.load("t.pftrace.gz")  # and files of torch.profiler and nsys

A traced run shows where time goes. It does not measure throughput, because recording a span costs
the host about as much as issuing a command. Every table made here carries that note.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from workbench import __version__
from workbench.common.checkout import commit
from workbench.common.collector import nothing_collected
from workbench.common.devices import is_gpu
from workbench.common.errors import UsageError
from workbench.common.framed import Framed
from workbench.common.nearest import choices
from workbench.common.output import check_extension
from workbench.engine import exclusive, ready
from workbench.trace import analysis, critical, perfetto
from workbench.trace.cupti import collector as cupti
from workbench.trace.cupti.collector import CuptiRecorder, Unavailable
from workbench.trace.imports import files, saved
from workbench.trace.lanes import nesting_order
from workbench.trace.spans import (
    CATEGORIES,
    HOST_LANE,
    Recorded,
    Recorder,
    Slowdown,
    Span,
    Window,
)

if TYPE_CHECKING:
    from workbench.config import Toggles
    from workbench.engine.engine import Engine

TRACED = "traced, not for throughput"
TRACES = (".pftrace.gz", ".pftrace", ".json.gz", ".json")  # ends of names that `save` knows
COLLECTORS = ("auto", "events", "cupti")

# column of a frame -> its pandas type
COLUMNS = {
    "name": "str",  # tensor, node or value of the command
    # one of trace.spans.CATEGORIES; of a foreign trace also "op", "range" or "python"
    "category": "str",
    "lane": "str",  # "host", or "<backend> stream <id>"; foreign: also "host thread <id>"
    "start_us": "float64",  # from the start of the first span
    "dur_us": "float64",
    "step": "Int64",  # number of the engine's step, <NA> outside every step
    "split": "Int64",  # number of the split, -1 for commands outside every split
    # position in program.commands, <NA> for a span of no command; foreign: the call's number
    "index": "Int64",
    "part": "Int64",  # position in the parts of a plan, <NA> for a span of no part
    "bytes": "Int64",  # bytes that a copy, write or read moved, or that a launch must move
    "op": "str",  # of launches
    "kind": "str",  # device spans: "copy", "launch", "memset", "replay"; elsewhere the category
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
        """One row per span, by start, enclosing spans first. COLUMNS lists the columns.

        A host span without a step belongs to the step span around it.
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
        """The number of spans and the total time of each category, enclosing categories first."""
        frame = self.to_frame()
        groups = frame.groupby("category")["dur_us"]
        table = pd.DataFrame({"spans": groups.size(), "total_us": groups.sum()})
        order = [c for c in CATEGORIES if c in table.index]
        return table.loc[order + sorted(set(table.index) - set(order))]

    def summary(self) -> pd.DataFrame:
        """One row per step: the host's commands and time, and the device's busy and idle time.

        * n_tokens, n_past: of the step.
        * waits, copies, launches, copied_bytes: the host's commands, as `Program.counts()`. Where
          there are plans, also replays.
        * step_us: time of the step on the host. It has four parts: the next three, and Python
          between the commands, with the recording of spans.
        * build_us: time in which batch, graph and program were made.
        * host_us: time in commands other than waits.
        * wait_us: time in waits.
        * device_us: time in which at least one stream had work of this step.
        * idle_us: time between the step's first and last device work in which no stream had work.
        * gap_us: time from the last device work of the step before to the first device work of
          this step. Missing for the first step, and on a backend without device lanes.
        """
        frame = self.to_frame()
        shapes = {s.args.get("step"): s.args for s in self.spans if s.category == "step"}
        rows = []
        last_end = np.nan
        for step, part in frame[frame["step"].notna()].groupby("step"):
            host = part[part["lane"] == HOST_LANE]
            device = part[part["category"] == "device"]
            start, end = device["start_us"].min(), (device["start_us"] + device["dur_us"]).max()
            busy = analysis.busy_us(device)
            shape = shapes.get(int(step), {})
            copies, replays = host["category"] == "copy", host["category"] == "replay"
            commands = host[host["index"].notna()]
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


class Profile(Framed):
    """The result of `profile`. All spans are there once the body has ended or has raised.

    recorder: what collects the spans; `wb.profile` makes it.
    collector: the source of the device spans, `events` or `cupti`.
    fallback: why CUPTI was not used where it was asked for; else empty.
    windows: with CUPTI, the groups of steps that were recorded together.
    about: data about the engine, for the file; the caller may add more.

    `load` and `save` raise UsageError for a file that cannot be read or written, `kernels` for an
    unknown `by`.
    """

    def __init__(
        self,
        recorder: Recorder | Recorded,
        fallback: str = "",
        about: dict[str, Any] | None = None,
    ):
        self.recorder = recorder
        self._fallback = fallback
        self.about: dict[str, Any] = about or {}

    @classmethod
    def load(cls, path: str | PathLike[str], step: str | None = None) -> Profile:
        """Reads a trace file: what `save` wrote, without loss; Chrome's JSON of torch.profiler; or
        the SQLite file of `nsys export --type sqlite`. All become the same table (`COLUMNS`).

        step: for a foreign file, a regular expression that matches the whole name of a range, or
            of a call as `cudaGraphLaunch`. Each such range is a step; with a call a step lasts to
            the next call. None: the ranges that torch.profiler, vLLM or this package make for
            each step. Without them the trace has no steps. A file of `save` has its own steps.

        Chrome's JSON of another `schemaVersion` is refused. An export of nsys of another schema is
        read where it has the tables and columns that are needed, and `note` says so: its schema
        changes often, mostly in what is not read here. One whose version is no number is refused.

        Raises UsageError, in one line, for a file that is missing, cut, of such a version or of
        another format, and where nothing matches `step`.
        """
        recorded, about = files.read(path, step)
        return cls(recorded, about=about)

    @property
    def timeline(self) -> Timeline:
        """All spans. The spans of launches have the bytes that they must move."""
        return Timeline(analysis.with_bytes(self.recorder.spans, self.recorder.program_of))

    @property
    def collector(self) -> str:
        """The source of the device spans: `events` or `cupti`; of a foreign file the tool."""
        return self.recorder.collector

    @property
    def fallback(self) -> str:
        """Why CUPTI was not used where it was asked for; else empty."""
        return self._fallback or self.recorder.fallback

    @property
    def windows(self) -> list[Window]:
        """With CUPTI the groups of steps that were recorded together; else none."""
        return list(self.recorder.windows)

    @property
    def complete(self) -> bool | None:
        """Whether all work of the programs was recorded; None without CUPTI."""
        windows = self.windows
        if not windows or self.recorder.marks:
            return None
        return all(w.complete for w in windows)

    @property
    def missing(self) -> str:
        """What the first incomplete window lacks, in one line; empty where all are complete."""
        return next((w.missing for w in self.windows if not w.complete), "")

    @property
    def slowdown(self) -> Slowdown | None:
        """The cost of tracing; None where no step of as many tokens ran untraced in the body."""
        return self.recorder.slowdown

    @property
    def note(self) -> str:
        """One line: the source of the spans, what they lack, the largest error of the clocks, and
        the cost of tracing. For a file: its own line."""
        if self.recorder.source:
            return self.recorder.source
        if isinstance(self.recorder, Recorder) and (why := self.recorder.why_empty):
            return why
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
        """One row per span; see `Timeline.to_frame`."""
        frame = self.timeline.to_frame()
        frame.attrs["collector"] = self.note
        return frame

    def summary(self) -> pd.DataFrame:
        """One row per step; see `Timeline.summary`."""
        return self.timeline.summary()

    def kernels(self, by: str = "op", read_gbps: float | None = None) -> pd.DataFrame:
        """A row per op, node or kernel (`by`): calls, time in us, share, bytes, GB/s, and the share
        of `read_gbps`, the read bandwidth of the device in GB/s.

        Small steps come before large ones. Within a size the longest time comes first, by the
        median over the steps (`traced_us_per_step`). `analysis.kernels` lists the columns. Raises
        UsageError for another `by`.
        """
        return analysis.kernels(self.to_frame(), by, read_gbps)

    def phases(self) -> pd.DataFrame:
        """The host's time in a step: a row for each phase and part, by step size.

        * step_tokens: tokens of the steps.
        * phase, part: `build` with its phases; `issue` and `results` with kinds of command; `rest`,
          Python between the commands or the time outside of steps.
        * traced_calls_per_step: missing for `rest`.
        * traced_us_per_step: us, the median of the steps.
        * traced_share: of the time from the start of a step to the start of the next.

        `analysis.phases` says more of each.
        """
        return analysis.phases(self.to_frame())

    def gaps(self) -> pd.DataFrame:
        """A row for each time in which no kernel ran. All times are in us.

        * step: of the kernel after the gap.
        * between: `steps`, or `launches` of one step.
        * before, after: ops of the two kernels.
        * traced_us: length of the gap.
        * host_us, device_us: its parts before and after the host's call of the next kernel began.
        * a column for each kind of command: the host's time in the gap.
        * python: the host's time in the gap between the commands of a step.
        * outside: the host's time in the gap between two steps.

        From the first kind to `outside` the columns add up to traced_us. `analysis.gaps` says more.
        """
        return analysis.gaps(self.to_frame())

    def critical_path(self, step: int | None = None) -> pd.DataFrame:
        """What bounds each part of a step, from its begin to its end; see
        `critical.critical_path`."""
        return critical.critical_path(self.timeline.spans, step)

    def save(self, path: str | PathLike[str]) -> int:
        """Writes a trace with model, toggles and commit, and returns its size in bytes.

        The format is Perfetto's, or Chrome's JSON where `path` ends in .json; .gz after either
        means gzipped. `load` reads both. Raises UsageError where the file cannot be written, and
        for an extension that is none of TRACES.
        """
        check_extension(Path(path), *TRACES, bare=False)
        spans = self.timeline.spans
        kept = saved.recording(
            len(spans), self.note, self.collector, self.fallback, self.windows, self.slowdown
        )
        # A trace that was loaded says already which commit took it.
        about = origin(self.note) | self.about | {saved.RECORDING: kept}
        return perfetto.write(spans, path, about)

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
    """Traces steps that `engine` makes in the body (`with`), which is given a Profile. Afterwards
    the engine has its earlier recorder. Where the body raises, the spans up to then are kept.

    In the body no cyclic garbage is collected: a full collection looks through a model's whole
    vocabulary, and would stand in the trace as the host's work on one token.

    window: (first, n) traces n steps, from number `first` of the steps in the body on, counted from
        0. So a trace stays small and leaves out the warm-up, and the other steps show the cost of
        tracing. None: all steps.
    nvtx: whether a tool that listens to NVTX also gets traced steps and commands.
    collector: the source of device spans.

        * `events`: two marks of the backend around each command. On CUDA they delay the host. Where
          the device waits for the host, a span then has the time of issuing the command.
        * `cupti`: NVIDIA's profiling interface, which records every kernel and call. Where it
          cannot be used the spans come from events, and `Profile.fallback` says why.
        * `auto`: `cupti` on a CUDA device, else `events`.

    Raises UsageError for what is no open engine, for a window without a step, for an unknown
    collector, and while another thread measures.
    """
    from workbench.engine.engine import Engine

    if not isinstance(engine, Engine):
        what = repr(engine) if isinstance(engine, str) else type(engine).__name__
        raise UsageError(f"{what} is no open engine; give the result of wb.Engine.load")
    exclusive.check(engine._loaded)
    if collector not in COLLECTORS:
        raise UsageError(
            f"collector={collector!r} does not exist; {choices(collector, COLLECTORS)}"
        )
    if window is not None and not (
        isinstance(window, tuple | list)
        and len(window) == 2
        and all(isinstance(n, Integral) for n in window)
        and window[0] >= 0
        and window[1] >= 1
    ):
        raise UsageError(
            f"window={window!r} holds no step; give (first, n) with first >= 0 and n >= 1"
        )
    recorder, fallback = _recorder(engine, window, nvtx, collector)
    engine.synchronize()  # a step that was launched ahead is not traced
    before = engine.recorder
    engine.recorder = recorder
    try:
        with nothing_collected():
            yield Profile(recorder, fallback, about(engine))
    finally:
        engine.recorder = before
        if isinstance(recorder, CuptiRecorder):
            recorder.close_window()


def parse_window(text: str | None) -> tuple[int, int] | None:
    """Parses `8,1` to (first step, number of steps); None stays None. Raises UsageError."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+),(\d+)", text)
    if found is None or int(found[2]) < 1:
        raise UsageError(
            f"--window {text!r} holds no step; write FIRST,N without a space, "
            "FIRST from 0 and N from 1, as 8,1"
        )
    return int(found[1]), int(found[2])


def profile_each(
    engine: Engine, arms: Mapping[str, Toggles], n_tokens: int = 16, **asked: Any
) -> dict[str, Profile]:
    """Traces variants of `engine`: the last 8 of n_tokens tokens that each of them generates.

    arms: name -> toggles of the variant.
    asked: arguments of `profile`.

    Where no trace shows a first token, all kernels are compiled before. Returns name -> profile.
    """
    tokens, found = [1, 2, 3], dict[str, Profile]()
    window = (max(0, n_tokens - 8), 8)
    steps = [(len(tokens), 1), *[(1, 1)] * (n_tokens - 1)] if window[0] else []
    with ExitStack() as stack:
        variants = {
            name: stack.enter_context(engine.variant(toggles)) for name, toggles in arms.items()
        }
        ready.make_ready(
            launched
            for one in variants.values()
            for launched in one.unready(one.rehearsal.alone(0, steps))
        )
        for name, variant in variants.items():
            with profile(variant, window=window, **asked) as found[name]:
                variant.generate(tokens=tokens, max_tokens=n_tokens)
    return found


def about(engine: Engine) -> dict[str, Any]:
    """Data about the engine for a trace: model, device, preset, toggles, sync mode, config."""
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
    """Data about the trace itself: the version and commit of the program, and how it was taken."""
    made = commit()
    dirty = " with uncommitted changes" if made["dirty"] else ""
    return {
        "workbench": __version__, "commit": f"{made['hash']}{dirty}", "traced": f"{TRACED}; {note}"
    }  # fmt: skip


def _recorder(
    engine: Engine, window: tuple[int, int] | None, nvtx: bool, collector: str
) -> tuple[Recorder, str]:
    """The recorder for a collector, and why CUPTI is not used where it was asked for; else ""."""
    if collector == "events" or (collector == "auto" and not is_gpu(engine.device)):
        return Recorder(window, nvtx), ""
    try:
        if not is_gpu(engine.device):
            raise Unavailable(f"CUPTI sees CUDA devices, and this is the {engine.device} device")
        module = cupti.load()
        cupti.probe(module)
    except Unavailable as reason:
        return Recorder(window, nvtx), str(reason)
    return CuptiRecorder(module, engine, window, nvtx), ""


def _steps_of(spans: list[Span]) -> list[int | None]:
    """The step of each span: its own, or that of the step span around it. spans: by start."""
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
