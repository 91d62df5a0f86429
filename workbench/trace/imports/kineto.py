"""Reads Chrome's JSON as Kineto writes it: torch.profiler's `export_chrome_trace`.

Kineto's categories say what an event is. Times are microseconds, with nanoseconds after the point,
from `baseTimeNanoseconds`. `correlation` connects a call of the CUDA runtime or driver with its
work on the device; `External id` connects a call with the operator around it. HIP's events have the
same categories.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.common.errors import UsageError
from workbench.trace.chrome import SCHEMA, whole_ns
from workbench.trace.imports import foreign
from workbench.trace.imports.foreign import Call, Range, Trace, Work
from workbench.trace.spans import Recorded

# Kineto's category (in lower case: older versions wrote `Kernel`) -> kind of work
WORK = {
    "kernel": "launch",
    "gpu_memcpy": "copy", "memcpy": "copy",
    "gpu_memset": "memset", "memset": "memset",
}  # fmt: skip
CALLS = ("cuda_runtime", "runtime", "cuda_driver", "driver")
RANGES = {
    "cpu_op": foreign.OP, "operator": foreign.OP, "user_annotation": foreign.RANGE,
    "python_function": foreign.PYTHON,
}  # fmt: skip
SYNC = "cuda_sync"  # says for which event or stream a call waited
# what says nothing of work: the profiler's own time, arrows, and ranges drawn again on the device
LEFT_OUT = ("trace", "overhead", "ac2g", "fwdbwd", "async_cpu_to_gpu", "gpu_user_annotation")


def read(
    path: Path, about: Mapping[str, Any], events: list[dict[str, Any]], step: str | None
) -> tuple[Recorded, dict[str, Any]]:
    """The spans of a trace. about: the keys of the JSON object besides `traceEvents`."""
    version = about.get("schemaVersion", SCHEMA)
    if version != SCHEMA:
        raise UsageError(
            f"{path} has Kineto's schemaVersion {version!r}, and this program reads {SCHEMA}; "
            "write the trace with a torch.profiler that has that version"
        )
    base = about.get("baseTimeNanoseconds", 0)
    trace, unknown = Trace(), Counter[str]()
    for number, event in enumerate(events):
        category = str(event.get("cat", "")).lower()
        if event.get("ph") != "X" or category in LEFT_OUT:
            continue
        if category not in WORK and category not in RANGES and category not in (*CALLS, SYNC):
            unknown[str(event.get("cat"))] += 1
            continue
        try:
            _take(trace, event, category, base)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UsageError(
                f"{path}: event {number} ({event.get('name')!r}) is not as Kineto writes it "
                f"({type(error).__name__}: {error}); write the trace again"
            ) from None
    if not (trace.works or trace.calls or trace.ranges):
        raise UsageError(
            f"{path} is Chrome JSON, but no event has a category of Kineto (cpu_op, cuda_runtime, "
            "kernel, ...); give a trace of torch.profiler or of wb.profile"
        )
    made_by = f"Kineto's JSON, schemaVersion {version}"
    left = [f"{n} events of {name!r} left out" for name, n in unknown.most_common(3)]
    kept = {name: about[name] for name in ("deviceProperties", "traceName") if name in about}
    return foreign.recorded(path, "kineto", [made_by, *left], trace, step), kept


def _take(trace: Trace, event: dict[str, Any], category: str, base: int) -> None:
    name, args = str(event["name"]), event.get("args", {})
    start = int(base) + whole_ns(float(event["ts"]))
    end = start + whole_ns(float(event.get("dur", 0)))
    if end < start:
        raise ValueError("dur is negative")
    if category in WORK:
        device, stream = int(args.get("device", event["pid"])), int(args["stream"])
        nbytes = args.get("bytes")
        trace.works.append(
            Work(WORK[category], name, start, end, 0, device, stream,
                 int(args.get("correlation", 0)), None if nbytes is None else int(nbytes))
        )  # fmt: skip
        return
    thread = 0, event["tid"]
    hash(thread)  # a list or an object is no thread
    if category in CALLS:
        correlation = int(args.get("correlation", 0))
        trace.calls.append(Call(name, start, end, thread, correlation))
    elif category == SYNC:
        _sync(trace, args)
    else:
        trace.ranges.append(Range(RANGES[category], name, start, end, thread))


def _sync(trace: Trace, args: Mapping[str, Any]) -> None:
    """Notes for which event, and on which stream, the call with this correlation waited."""
    key = 0, int(args.get("correlation", 0))
    event = args.get("wait_on_cuda_event_id")
    if event is not None and int(event) >= 0:
        trace.event_of[key] = str(event)
        record = args.get("wait_on_cuda_event_record_corr_id")
        if record is not None:
            trace.event_of[0, int(record)] = str(event)
            if int(args.get("wait_on_stream", -1)) >= 0:
                recorded_on = int(args.get("device", 0)), int(args["wait_on_stream"])
                trace.stream_of[0, int(record)] = recorded_on
    if int(args.get("stream", -1)) >= 0:
        trace.stream_of[key] = int(args.get("device", 0)), int(args["stream"])
