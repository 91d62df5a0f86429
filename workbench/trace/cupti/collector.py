"""The CUPTI collector: records what the device and the driver did for each command.

NVIDIA's profiling interface CUPTI records kernels, copies, driver and runtime calls and
synchronizations, in windows of a few steps. The package cupti-python (extra `cupti`) gives access
to it. Each record is matched with the command during whose issue it was made (`correlate.py`), and
becomes a span. The spans have the same form as those made of events, so frames, plots and Perfetto
take them.

A window is complete only if its kernels and copies are exactly those of the programs, in number and
order, no record was dropped, and no timestamp is zero. An incomplete window says what is missing.

With CUDA 13.2 or older, or a driver older than r610, a process can have only one subscriber of
CUPTI. With nsys, ncu or torch.profiler attached there is no room for this collector. `probe` finds
that out before a trace begins, and also a missing package, or a libcupti that does not fit the
driver. The spans then come from the backend's events.

A Python callback that runs while CUPTI holds its lock can deadlock with a thread that holds the GIL
and waits for that lock (pytorch#186295). So a buffer has room for a whole window. It then completes
only inside the flush of `take`, while no thread issues. `clock.py` aligns the clocks.

Importing this module loads no CUPTI.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.common.errors import WorkbenchError
from workbench.common.extras import install
from workbench.trace.cupti import correlate
from workbench.trace.cupti.activity import COPY, DRIVER, KERNEL, MEMSET, RUNTIME, SYNC, Activity
from workbench.trace.cupti.clock import Clock, read_clocks
from workbench.trace.spans import Recorder, Window

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

BUFFER_BYTES = 16 << 20  # a step of 500 launches is about 0.2 MB of records
WINDOW_STEPS = 16  # the most steps before the records are taken; they must fit one buffer

# kind of record (`cupti.ActivityKind`) -> kind of row. KERNEL would make kernels run one after
# another, so CONCURRENT_KERNEL is used. MEMCPY2 is a copy from device to device. Without DRIVER and
# RUNTIME there would be no correlation ids.
KINDS = {
    "CONCURRENT_KERNEL": KERNEL, "MEMCPY": COPY, "MEMCPY2": COPY, "MEMSET": MEMSET,
    "DRIVER": DRIVER, "RUNTIME": RUNTIME, "SYNCHRONIZATION": SYNC,
}  # fmt: skip
EXTERNAL = "EXTERNAL_CORRELATION"
# functions and types that some versions of the bindings lack
NEEDED = (
    "ActivityFlag", "ActivityKind", "ActivitySynchronizationType", "CallbackDomain",
    "ExternalCorrelationKind", "Result", "SUBSCRIBER_PARAMS_SIZE", "SubscriberParams",
    "activity_disable", "activity_enable", "activity_flush_all",
    "activity_get_num_dropped_records", "activity_pop_external_correlation_id",
    "activity_push_external_correlation_id", "activity_register_callbacks", "cuptiError",
    "finalize", "get_callback_name", "get_timestamp", "subscribe_v2", "unsubscribe",
)  # fmt: skip
INSTALL = install("cupti")


class Unavailable(WorkbenchError):
    """CUPTI cannot be used; the message says why, and what to do."""


# a session ----------------------------------------------------------------------------------------


def load() -> Any:
    """The module `cupti.cupti`. Raises Unavailable where it is missing or lacks a function."""
    try:
        from cupti import cupti
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or ["not installed"])[0]
        raise Unavailable(f"cupti-python cannot be imported ({reason}); {INSTALL}") from None
    lacking = [name for name in NEEDED if not hasattr(cupti, name)]
    if lacking:
        raise Unavailable(
            f"this version of cupti-python has no {', '.join(lacking)}; {INSTALL}, which has one "
            "that does"
        )
    return cupti


def probe(cupti: Any) -> None:
    """Attaches CUPTI and detaches it again. Raises Unavailable with the reason where that fails."""
    Session(cupti).close()


@contextmanager
def _answered(cupti: Any, what: str, params: Any = None) -> Iterator[None]:
    """Turns a failure of CUPTI at `what` into Unavailable."""
    result = cupti.Result
    try:
        yield
    except cupti.cuptiError as error:
        status = error.status
        if status == result.ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED:
            other = getattr(params, "old_subscriber_name", None) or "another profiler"
            reason = (
                f"CUPTI has room for one subscriber and {other} is attached; run without nsys, "
                "ncu, compute-sanitizer and torch.profiler"
            )
        elif status in (result.ERROR_NOT_INITIALIZED, result.ERROR_NOT_COMPATIBLE):
            reason = (
                f"libcupti does not fit the driver ({error} at {what}); install the cupti-python "
                "of the driver's CUDA version (nvidia-smi shows it)"
            )
        else:
            reason = f"CUPTI refuses {what} ({error})"
        raise Unavailable(reason) from None
    except RuntimeError as error:  # from the binding: no driver, an old driver, no such function
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Unavailable(
            f"libcupti does not fit the driver, or there is none ({reason} at {what}); install "
            "the cupti-python of the driver's CUDA version (nvidia-smi shows it)"
        ) from None


class Recording(NamedTuple):
    """The records of a session.

    external: correlation id -> external id.
    faults: a line for each thing that may be missing.
    """

    rows: list[Activity]
    external: dict[int, int]
    clock: Clock
    faults: list[str]


class Session:
    """CUPTI attached to the process, until `close` or `take`. Raises Unavailable."""

    def __init__(self, cupti: Any):
        self._cupti = cupti
        self._rows: list[Activity] = []
        self._external: dict[int, int] = {}
        self._failures: list[str] = []
        self._enabled: list[Any] = []
        self._depth = 0
        self._names: dict[tuple[str, int], str] = {}
        kinds = cupti.ActivityKind
        self._kinds = {int(getattr(kinds, name)): row for name, row in KINDS.items()}
        self._external_kind = int(getattr(kinds, EXTERNAL))
        self._tag = cupti.ExternalCorrelationKind.CUSTOM0
        self._subscriber: Any = None
        params = cupti.SubscriberParams()
        params.struct_size = cupti.SUBSCRIBER_PARAMS_SIZE
        params.subscriber_name = "workbench"
        with _answered(cupti, "a subscription", params):
            self._subscriber = cupti.subscribe_v2(_no_callback, None, params.ptr)
        try:
            with _answered(cupti, "activity records"):
                cupti.activity_register_callbacks(_give_buffer, self._completed)
                for kind in (*self._kinds, self._external_kind):
                    cupti.activity_enable(kind)
                    self._enabled.append(kind)
                self._first = read_clocks(cupti.get_timestamp)
        except BaseException:
            self.close()
            raise

    def push(self, number: int) -> None:
        """Marks the calls of the calling thread with `number`, until `pop`."""
        self._cupti.activity_push_external_correlation_id(self._tag, number)
        self._depth += 1

    def pop(self) -> None:
        self._depth -= 1
        self._cupti.activity_pop_external_correlation_id(self._tag)

    def take(self) -> Recording:
        """Detaches CUPTI and returns the records. The device must be idle. Never raises: a failure
        is one of the faults."""
        cupti, faults = self._cupti, list[str]()
        last = self._first
        try:
            with _answered(cupti, "the end of a window"):
                last = read_clocks(cupti.get_timestamp)
                cupti.activity_flush_all(0)
                # The first flush keeps a buffer back that has a record without an end.
                cupti.activity_flush_all(int(cupti.ActivityFlag.FLUSH_FORCED))
                dropped = ctypes.c_size_t(0)
                cupti.activity_get_num_dropped_records(0, 0, ctypes.addressof(dropped))
                if dropped.value:
                    faults.append(f"{dropped.value} records dropped for want of buffers")
        except Unavailable as error:
            faults.append(str(error))
        rows = [self._named(row) for row in self._rows]  # before CUPTI is gone
        self.close()
        faults += self._failures
        return Recording(rows, self._external, Clock(self._first, last), faults)

    def close(self) -> None:
        """Detaches CUPTI. A failure to detach is ignored: the part is then not attached.

        Without `finalize` CUPTI stays in every later call of the driver, and each launch takes
        longer for the rest of the process.
        """
        cupti = self._cupti
        gone = (cupti.cuptiError, RuntimeError)
        while self._depth:  # an interrupt left commands without `pop`
            with contextlib.suppress(*gone):
                self.pop()
        while self._enabled:
            with contextlib.suppress(*gone):
                cupti.activity_disable(self._enabled.pop())
        if self._subscriber is not None:
            subscriber, self._subscriber = self._subscriber, None
            with contextlib.suppress(*gone):
                cupti.unsubscribe(subscriber)
            with contextlib.suppress(*gone):
                cupti.finalize()

    def _completed(self, activities: list) -> None:
        """Takes the records of a complete buffer; CUPTI calls it. The records are views of the
        buffer, so they are read at once, without calls of CUPTI. No exception may reach CUPTI."""
        try:
            for activity in activities:
                kind = int(activity.kind)
                if kind == self._external_kind:
                    self._external[int(activity.correlation_id)] = int(activity.external_id)
                elif kind in self._kinds:
                    self._rows.append(_row(self._kinds[kind], activity))
        except Exception as error:
            self._failures.append(f"a buffer of records was lost ({error!r})")

    def _named(self, row: Activity) -> Activity:
        """A row with the name of its call or synchronization, in place of a number."""
        if row.kind not in (DRIVER, RUNTIME, SYNC):
            return row
        key = row.kind, int(row.name)
        if key not in self._names:
            cupti, (kind, number) = self._cupti, key
            if kind == SYNC:
                name = cupti.ActivitySynchronizationType(number).name.lower().replace("_", " ")
            else:
                domains = cupti.CallbackDomain
                domain = domains.DRIVER_API if kind == DRIVER else domains.RUNTIME_API
                name = str(cupti.get_callback_name(domain, number))
            self._names[key] = name
        return row._replace(name=self._names[key])


def _row(kind: str, activity: Any) -> Activity:
    """The row of a record. It reads fields by name, because the types of records change with the
    version (Kernel10, Kernel12)."""
    a, stream, nbytes, device, node = activity, -1, 0, 0, 0
    dims: tuple[int, ...] = ()
    match kind:
        case "driver" | "runtime":
            name = str(int(a.cbid))
        case "sync":
            name, stream = str(int(a.type)), int(a.stream_id)
        case "kernel":
            name, stream, device = str(a.name), int(a.stream_id), int(a.device_id)
            node = int(a.graph_node_id)
            sizes = a.grid_x, a.grid_y, a.grid_z, a.block_x, a.block_y, a.block_z
            dims = tuple(map(int, sizes))
        case _:
            name, stream, device = kind, int(a.stream_id), int(a.device_id)
            nbytes, node = int(a.bytes), int(a.graph_node_id)
    return Activity(
        kind, name, int(a.start), int(a.end), int(a.correlation_id), stream, nbytes, device, node,
        dims,
    )  # fmt: skip


def _give_buffer() -> tuple[int, int]:
    """The bytes of a buffer, and the most records that it may hold (0: as many as fit)."""
    return BUFFER_BYTES, 0


def _no_callback(*_: Any) -> None:
    """The callback that a subscriber must have. No domain is enabled, so CUPTI never calls it."""


# the recorder -------------------------------------------------------------------------------------


class CuptiRecorder(Recorder):
    """A recorder whose device spans, and spans of calls, come from CUPTI. Host spans are as usual.

    engine: its `backend.kernels_of` and its `synchronize` are used.

    Where CUPTI cannot be attached at the begin of a window, the device spans of that window come
    from the backend's marks. `fallback` says why.
    """

    marks = False

    def __init__(
        self,
        cupti: Any,
        engine: Engine,
        window: tuple[int, int] | None = None,
        nvtx: bool = True,
    ):
        super().__init__(window, nvtx)
        self._cupti, self._synchronize = cupti, engine.synchronize
        self._kernels_of = engine.backend.kernels_of
        self._session: Session | None = None
        self._programs: dict[int, Any] = {}
        self._issued: dict[int, correlate.CommandKey] = {}
        self._replayed: dict[correlate.CommandKey, Sequence[int] | None] = {}
        self._n_ids = 0
        self._steps: list[int] = []

    @contextmanager
    def span(self, name: str, category: str, **args: Any) -> Iterator[None]:
        traced = category == "step" and self.wants(args["step"])
        if traced:
            self._open_window()
        try:
            with super().span(name, category, **args):
                yield
        finally:
            if traced:
                self._steps.append(args["step"])
                if len(self._steps) == WINDOW_STEPS or not self.wants(args["step"] + 1):
                    self.close_window()

    def begin(self, name: str) -> Any:
        super().begin(name)
        if self._session is None:
            return None
        self._n_ids += 1
        self._session.push(self._n_ids)
        return self._n_ids

    def end(
        self, handle: Any, name: str, category: str, start_ns: int, args: dict[str, Any]
    ) -> None:
        super().end(handle, name, category, start_ns, args)
        if handle is not None and self._session is not None:
            self._session.pop()
            if "index" in args:
                self._issued[handle] = args["step"], args["index"]

    def add(
        self, name: str, category: str, lane: str, start_ns: int, end_ns: int, **args: Any
    ) -> None:
        if category != "device" or self.marks:  # CUPTI records device spans better
            super().add(name, category, lane, start_ns, end_ns, **args)

    def runs(self, program: Any, step: int) -> None:
        super().runs(program, step)
        if self.wants(step):
            self._programs[step] = program

    def replayed(self, step: int, index: int, nodes: Sequence[int] | None) -> None:
        if self._session is not None:
            self._replayed[step, index] = nodes

    def _open_window(self) -> None:
        if self._session is not None:
            return
        self._synchronize()  # the window must not record work of earlier steps
        try:
            self._session = Session(self._cupti)
            self.marks = False
            self._synchronize()  # in the first call of the driver CUPTI attaches, for milliseconds
        except Unavailable as error:
            self.fallback, self.marks = str(error), True

    def close_window(self) -> None:
        """Takes the records of the open window and detaches CUPTI. Without an open window nothing
        happens."""
        session, self._session = self._session, None
        steps, self._steps = tuple(self._steps), []
        programs, self._programs = self._programs, {}
        issued, self._issued = self._issued, {}
        replayed, self._replayed = self._replayed, {}
        if session is None:
            return
        faults = []
        try:
            self._synchronize()
        except WorkbenchError as error:  # a wait of the step raises it; here it is a fault
            faults.append(str(error))
        recording = session.take()
        matched = correlate.match(
            recording.rows, recording.external, issued, programs, self._kernels_of,
            recording.clock.to_host, replayed,
        )  # fmt: skip
        self.spans += matched.spans
        untold = sorted(set(steps) - programs.keys())
        faults += [f"the program of step {step} is unknown" for step in untold[:1]]
        faults += recording.faults + matched.faults
        error_ns = max(recording.clock.error_ns, matched.early_ns)
        missing, n_records = "; ".join(faults), len(recording.rows)
        self.windows.append(Window(steps, missing, error_ns, n_records, matched.n_named))
