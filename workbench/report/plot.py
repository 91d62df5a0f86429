"""`wb.plot`: one function that draws any result.

Which picture belongs to which result stands in two tables: `OF_RESULT` by the result's class, and
`OF_FRAME` by the columns of a frame. A class is named as text, since some results come from rooms
above this one; class names are unique in the package.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from workbench.common.errors import UsageError
from workbench.common.nearest import choices
from workbench.report import pictures, plots, roofline, sweeps, tables

MOST_STEPS = 3  # of a trace that are drawn together: the spans of more are too narrow to read


def plot(result: Any, *more: Any, **how: Any) -> Figure:
    """Draws any result. Returns a matplotlib figure, which shows itself as the last line of a cell.

    result: what a function of `wb` returned or `wb.load` read:

        * a comparison (AB), several of them (also as a list), Comparisons, or a comparison of runs:
          speedups with intervals on the A/A band.
        * a Bench: every repetition, and the medians.
        * a Profile, or the trace of a cell: the timeline of a typical step; several traces: one
          below the other.
        * the host gaps of orderings (Gaps), a load (ServeBench), a run of kernels (KernelRun), the
          last run of the panel (Pair), a Sweep.
        * a frame: of `AB.to_frame` or `summary`, of a trace (`to_frame`), of `Profile.gaps`, or of
          samples.
        * a mapping: traces or loads by their names.
    more: further results of the same kind.
    how: as the picture's own function has it in `report/`: `steps` and `window_us` of a
        timeline, `labels` of a pair, `x`, `by` and `panels` of a sweep.

    Raises UsageError for what has no picture, with what has one, for a keyword that the picture
    does not have, and where there is nothing to draw.
    """
    results = _several(result, more)
    try:
        if len(results) == 1:
            ((_, one),) = results.items()
            return _drawn(_picture_of(one), one, **how)
        return _together(results)(results, **how)
    except ValueError as error:  # a picture's own refusal
        raise error if isinstance(error, UsageError) else UsageError(str(error)) from None


def _several(result: Any, more: tuple[Any, ...]) -> dict[str, Any]:
    """Results by name: that of a mapping, or their number."""
    if isinstance(result, Mapping) and not _has_picture(result) and not more:
        return {str(name): one for name, one in result.items()}
    every = [*result, *more] if isinstance(result, list | tuple) and not _has_picture(result) else [
        result, *more
    ]  # fmt: skip
    return {str(number): one for number, one in enumerate(every, 1)}


def _drawn(picture: Callable[..., Figure], *given: Any, **how: Any) -> Figure:
    """The picture. Raises UsageError for a keyword that it does not have. A function that passes
    its keywords on (`**how`) leaves that to the next."""
    known = inspect.signature(picture).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
        own = list(known)[len(given) :]
        for name in how:
            if name not in own:
                takes = choices(name, own) if own else "it takes none"
                raise UsageError(f"keyword {name!r} does not exist for this picture; {takes}")
    return picture(*given, **how)


# the pictures of one result -----------------------------------------------------------------------


def _trace(source: Any, steps: int | Iterable[int] | None = None, **how: Any) -> Figure:
    """The steps of a trace: those asked for, all where they are few, or the typical one."""
    frame = source if isinstance(source, pd.DataFrame) else source.to_frame()
    times = frame[frame["category"] == "step"].set_index("step")["dur_us"]
    if times.empty and frame.empty:
        raise UsageError("this trace has no span, so there is nothing to draw")
    if steps is None and len(times) > MOST_STEPS:
        steps = int((times - times.median()).abs().idxmin())
    return _drawn(plots.timeline, frame, steps=steps, **how)


def _cell(trace: Any, **how: Any) -> Figure:
    """The trace of a cell: of one engine as any trace; of several one below the other."""
    if len(trace.profiles) < 2:
        return _trace(trace, **how)
    return _drawn(plots.timelines, trace.profiles, **how)


def _pair(pair: Any, **how: Any) -> Figure:
    if pair.traces is None:
        raise UsageError(f"{pair.test} was {pair.stopped}, so there are no traces to draw")
    return _drawn(plots.timeline_pair, *pair.traces, **{"labels": pair.labels} | how)


def _speedups(*comparisons: Any, **how: Any) -> Figure:
    return _drawn(plots.speedup, tables.summary(*comparisons), **how)


OF_RESULT: dict[str, Callable[..., Figure]] = {
    "AB": _speedups,
    "Comparisons": lambda found, **how: _speedups(*found.values(), **how),
    "Compared": plots.speedup,
    "Bench": lambda found, **how: _drawn(pictures.rates, found.samples, **how),
    "Profile": _trace,
    "Timeline": _trace,
    "CellTrace": _cell,
    "Pair": _pair,
    "Gaps": lambda found, **how: _drawn(pictures.gaps, found.table(), **how),
    "KernelRun": lambda found, **how: _drawn(roofline.roofline, found.run, **how),
    "ServeBench": lambda found, **how: _drawn(
        plots.throughput_against_latency, found.points(), **how
    ),
    "Sweep": lambda found, **how: _drawn(sweeps.sweep, found.to_frame(), **how),
    "Run": lambda found, **how: _drawn(pictures.rates, found.samples, **how),
}
# columns that a frame has -> its picture; the first entry whose columns are all there
OF_FRAME: dict[tuple[str, ...], Callable[..., Figure]] = {
    ("status", "tps", "tps_low", "tps_high", "key", "group"): sweeps.sweep,
    ("speedup", "low", "high", "band_low", "band_high", "verdict", "label"): plots.speedup,
    ("category", "lane", "start_us", "dur_us"): _trace,
    ("between", "traced_us", "host_us", "device_us"): pictures.gap_parts,
    ("arm", "gap_us", "low_us", "high_us", "waits"): pictures.gaps,
    ("curve", "label", "latency_ms", "tokens_per_s"): plots.throughput_against_latency,
    ("test", "arm", "repetition", "n_tokens", "ns"): pictures.rates,
}


def _name_of(result: Any) -> str:
    """The class of a result that OF_RESULT has: its own, or one it is made from."""
    return next((c.__name__ for c in type(result).__mro__ if c.__name__ in OF_RESULT), "")


def _has_picture(result: Any) -> bool:
    return isinstance(result, pd.DataFrame) or bool(_name_of(result))


def _picture_of(result: Any) -> Callable[..., Figure]:
    if isinstance(result, pd.DataFrame):
        for columns, picture in OF_FRAME.items():
            if {*columns} <= {*result.columns}:
                return picture
        raise UsageError(
            f"a frame with the columns {', '.join(map(str, result.columns))} has no picture; give "
            "the result that it is of, or draw it with frame.plot()"
        )
    if name := _name_of(result):
        return OF_RESULT[name]
    raise UsageError(
        f"{type(result).__name__} has no picture; give what wb.ab, wb.bench, wb.profile, wb.sweep "
        f"or wb.load returned, or its frame (drawn are {', '.join(OF_RESULT)})"
    )


# several results together -------------------------------------------------------------------------


def _loads(results: Mapping[str, Any], **how: Any) -> Figure:
    parts = [load.points(name) for name, load in results.items()]
    frame = pd.concat(parts, ignore_index=True)
    frame.attrs = parts[0].attrs
    return _drawn(plots.throughput_against_latency, frame, **how)


def _benches(results: Mapping[str, Any], **how: Any) -> Figure:
    """The repetitions of several runs, a row for each test and run."""
    parts = [one.samples.assign(arm=f"run {name}") for name, one in results.items()]
    return _drawn(pictures.rates, pd.concat(parts, ignore_index=True), **how)


OF_SEVERAL: dict[str, Callable[..., Figure]] = {
    "AB": lambda results, **how: _speedups(*results.values(), **how),
    "Bench": _benches,
    "Profile": lambda results, **how: _drawn(plots.timelines, results, **how),
    "Timeline": lambda results, **how: _drawn(plots.timelines, results, **how),
    "CellTrace": lambda results, **how: _drawn(plots.timelines, results, **how),
    "ServeBench": _loads,
}


def _together(results: Mapping[str, Any]) -> Callable[..., Figure]:
    names = {_name_of(one) for one in results.values()}
    name = names.pop() if len(names) == 1 else ""
    if name not in OF_SEVERAL:
        kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in results.values()))
        raise UsageError(
            f"several results ({kinds or 'none'}) have no common picture; drawn together are "
            f"results of one kind: {', '.join(OF_SEVERAL)}"
        )
    return OF_SEVERAL[name]
