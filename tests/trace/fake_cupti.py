"""A CUPTI that exists only here, and a null device whose work makes its records, in real time.

`FakeCupti` has of `cupti.cupti` what `workbench.trace.cupti.collector` asks for, and can be told to
refuse (`refuse`), to spoil what it delivers (`spoil`) and to drop records (`dropped`).
"""

from __future__ import annotations

import ctypes
import enum
import functools
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from workbench.backend.base import NO_PART, Captured, KernelName
from workbench.backend.base import open_backend as open_real
from workbench.backend.issue.issued import Issued, Plannable
from workbench.backend.null import NullBackend
from workbench.backend.plan import gate
from workbench.config import Toggles
from workbench.engine import load
from workbench.engine.engine import Engine
from workbench.graph.ir import Node
from workbench.program.capabilities import Capabilities
from workbench.program.commands import Copy, Launch, Program

OFFSET_NS = 1_700_000_000_000_000_000  # of CUPTI's clock to the recorder's
KERNEL_NS, COPY_NS = 2_000, 3_000
DIMS = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")
FIRST_NODE = 501  # CUPTI's number of the first node of a graph
CUBLAS = ("memset", "ampere_gemm", "splitKreduce")  # what a product of cuBLAS is made of
CALLS = ["", "cuLaunchKernel", "cudaLaunchKernel", "cuMemcpyAsync", "cuStreamSynchronize",
         "cuEventSynchronize", "cuEventRecord", "cuGraphLaunch"]  # fmt: skip
now = time.perf_counter_ns


def dims(function: str) -> tuple[int, ...]:
    """Grid and block of a kernel: no two of different names have the same."""
    return 1 + len(function), sum(function.encode()), 1, 32, 1, 1


class Kind(enum.IntEnum):
    MEMCPY = 1
    MEMSET = 2
    MEMCPY2 = 22
    DRIVER = 4
    RUNTIME = 5
    CONCURRENT_KERNEL = 10
    SYNCHRONIZATION = 38
    EXTERNAL_CORRELATION = 39


class Result(enum.IntEnum):
    ERROR_NOT_COMPATIBLE = 14
    ERROR_NOT_INITIALIZED = 15
    ERROR_INSUFFICIENT_PRIVILEGES = 35
    ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED = 39


class SyncType(enum.IntEnum):
    EVENT_SYNCHRONIZE = 1
    STREAM_SYNCHRONIZE = 3


class CuptiError(Exception):
    def __init__(self, status: int):
        super().__init__(f"{Result(status).name} ({status})")
        self.status = status


class FakeCupti:
    ActivityKind, Result, ActivitySynchronizationType = Kind, Result, SyncType
    ActivityFlag = SimpleNamespace(FLUSH_FORCED=1)
    CallbackDomain = SimpleNamespace(DRIVER_API=1, RUNTIME_API=2)
    ExternalCorrelationKind = SimpleNamespace(CUSTOM0=3)
    SUBSCRIBER_PARAMS_SIZE = 32
    cuptiError = CuptiError

    def __init__(self) -> None:
        self.refuse: dict[str, Exception] = {}  # function -> what it raises
        self.spoil: Callable[[list], list] = lambda records: records
        self.dropped = self.subscribers = 0
        self.enabled: set[int] = set()
        self.most_enabled: set[int] = set()
        self.stack: list[int] = []
        self.records: list[Any] = []
        self._numbers = itertools.count(1000)
        self._busy: dict[int, int] = defaultdict(int)  # stream -> when it is through
        self.capturing: CuptiGraph | None = None

    def install(self, monkeypatch: Any) -> FakeCupti:
        package = ModuleType("cupti")
        package.cupti = self  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cupti", package)
        return self

    # the functions ----------------------------------------------------------------------------

    def _asked(self, function: str) -> None:
        if function in self.refuse:
            raise self.refuse[function]

    def SubscriberParams(self) -> Any:
        return SimpleNamespace(ptr=1, old_subscriber_name="nsys", subscriber_name="", struct_size=0)

    def subscribe_v2(self, callback: Any, userdata: Any, params: int) -> int:
        self._asked("subscribe_v2")
        self.subscribers += 1
        assert self.subscribers == 1, "it was let go before"
        return 77

    def unsubscribe(self, subscriber: int) -> None:
        self.subscribers -= 1

    def activity_register_callbacks(self, requested: Any, completed: Any) -> None:
        assert requested()[0] >= 1 << 20
        self._completed = completed

    def activity_enable(self, kind: int) -> None:
        self._asked("activity_enable")
        self.enabled.add(kind)
        self.most_enabled |= self.enabled

    def activity_disable(self, kind: int) -> None:
        self.enabled.remove(kind)

    def activity_flush_all(self, flag: int) -> None:
        self._asked("activity_flush_all")
        records, self.records = self.records, []
        if records:
            self._completed(self.spoil(records))

    def activity_get_num_dropped_records(self, context: int, stream: int, address: int) -> None:
        ctypes.c_size_t.from_address(address).value = self.dropped

    def activity_push_external_correlation_id(self, kind: int, number: int) -> None:
        self.stack.append(number)

    def activity_pop_external_correlation_id(self, kind: int) -> int:
        return self.stack.pop()

    def get_timestamp(self) -> int:
        self._asked("get_timestamp")
        return now() + OFFSET_NS

    def get_callback_name(self, domain: int, cbid: int) -> str:
        return CALLS[cbid]

    # the device -------------------------------------------------------------------------------

    def _record(self, kind: Kind, start: int, end: int, **fields: Any) -> None:
        if kind in self.enabled:
            times = {"start": start + OFFSET_NS, "end": end + OFFSET_NS}
            self.records.append(SimpleNamespace(kind=int(kind), **times, **fields))

    def call(self, name: str, nested: str = "") -> int:
        """The host calls the driver, through the runtime where `nested` names the call inside."""
        number, start = next(self._numbers), now()
        if self.stack and Kind.EXTERNAL_CORRELATION in self.enabled:
            self.records.append(SimpleNamespace(
                kind=int(Kind.EXTERNAL_CORRELATION), correlation_id=number,
                external_id=self.stack[-1],
            ))  # fmt: skip
        outer = (Kind.RUNTIME, name) if nested else (Kind.DRIVER, name)
        for kind, called in (outer, (Kind.DRIVER, nested)):
            if called:
                self._record(kind, start, now(), cbid=CALLS.index(called), correlation_id=number)
        return number

    def work(self, kind: Kind, number: int, stream: int, **fields: Any) -> None:
        if self.capturing is not None:
            self.capturing.add(stream, kind, fields)
            return
        start = max(now() + 2000, self._busy[stream])
        self._busy[stream] = self._ran(kind, number, 13 + stream, start, 0, fields)

    def _ran(
        self, kind: Kind, number: int, stream: int, start: int, node: int, fields: dict[str, Any]
    ) -> int:
        """When it is over."""
        end = start + (COPY_NS if kind == Kind.MEMCPY else KERNEL_NS)
        sizes = dict(zip(DIMS, dims(fields.get("name", "")), strict=True))
        self._record(kind, start, end, correlation_id=number, stream_id=stream, device_id=0,
                     graph_node_id=node, **sizes, **fields)  # fmt: skip
        return end

    def replay(self, graph: CuptiGraph) -> None:
        """The nodes of a graph, each as soon as what it is behind is over. They are on streams of
        the graph's own: a node goes on on the stream of the first that it is behind, where no
        other does already."""
        number, ends, lanes = self.call("cuGraphLaunch"), list[int](), list[int]()
        begin, taken = max(now() + 2000, self._busy[graph.stream]), set[int]()
        free = itertools.count(40)
        for (kind, fields, behind), node in zip(graph.work, graph.ids, strict=True):
            start = max([begin, *(ends[i] for i in behind)])
            first = next((i for i in behind if i not in taken), None)
            lanes.append(next(free) if first is None else lanes[first])
            taken.update(() if first is None else (first,))
            ends.append(self._ran(kind, number, lanes[-1], start, node, fields))
        self._busy[graph.stream] = max([begin, *ends])

    def sync(self, what: SyncType, stream: int | None = None) -> None:
        """Without a stream: for all."""
        name = "Stream" if what == SyncType.STREAM_SYNCHRONIZE else "Event"
        number, start = self.call(f"cu{name}Synchronize"), now()
        until = max(self._busy.values(), default=0) if stream is None else self._busy[stream]
        while now() < until:
            pass
        self._record(Kind.SYNCHRONIZATION, start, now(), correlation_id=number, type=int(what),
                     stream_id=13 + (stream or 0))  # fmt: skip


class CuptiGraph(Captured):
    """A graph on a fake CUPTI: all of its records have the number of one call. CUPTI's numbers of
    the nodes are `ids`, in the order of the nodes unless a test says otherwise."""

    def __init__(self, cupti: FakeCupti, plan: Plannable):
        self._cupti, self.stream = cupti, plan.stream
        self.work: list[tuple[Kind, dict[str, Any], tuple[int, ...]]] = []
        self.ends: dict[int, tuple[int, ...]] = {}  # of a stream, what its next begins behind
        self.events: dict[int, tuple[int, ...]] = {}
        nodes, cupti.capturing = list[int](), self
        for number, part in [*enumerate(plan.parts), (NO_PART, plan.end)]:
            if number == NO_PART:
                self.ends[plan.stream] = tuple({i for of in self.ends.values() for i in of})
            if part is not None:
                part.call()
                nodes += [number] * (len(self.work) - len(nodes))
        cupti.capturing, self.nodes = None, tuple(nodes)
        self.ids = list(range(FIRST_NODE, FIRST_NODE + len(nodes)))

    def add(self, stream: int, kind: Kind, fields: dict[str, Any]) -> None:
        self.work.append((kind, fields, self.ends.get(stream, ())))
        self.ends[stream] = (len(self.work) - 1,)

    def launch(self) -> None:
        self._cupti.replay(self)

    def update(self, work: Plannable, changed: Any) -> bool:
        return True

    def destroy(self) -> None:
        """Nothing to give back."""


class CuptiBackend(NullBackend):
    """Issues on a fake CUPTI: a mul_mat is a conversion, a product of cuBLAS (two kernels of its
    own and a memset) and a bias; every other op one kernel."""

    def __init__(self, cupti: FakeCupti):
        super().__init__("cuda", Capabilities(True, True, True, True, 9))
        self.cupti, self.ends = cupti, False  # ends: a kernel tells of the end of a plan
        self.graphs: list[CuptiGraph] = []

    def capture(self, work: Plannable) -> CuptiGraph:
        if self.ends:
            end = functools.partial(self._kernel, work.stream, gate.END_KERNEL)
            work.end = Issued(end, ("end",))
        self.graphs.append(CuptiGraph(self.cupti, work))
        return self.graphs[-1]

    def kernels_of(self, node: Node) -> list[KernelName]:
        return [KernelName(name, False, dims(name) if name else ()) for name in _made_of(node)]

    def _kernel(self, stream: int, name: str, *calls: str) -> None:
        number = self.cupti.call(*(calls or ("cuLaunchKernel",)))
        self.cupti.work(Kind.CONCURRENT_KERNEL, number, stream, name=name)

    def launch(self, node, address_of, scratch, stream, programmatic=False) -> Issued:
        def issue() -> None:
            for function in _made_of(node):
                if function is not None:
                    self._kernel(stream, function)
                    continue
                self.cupti.work(Kind.MEMSET, self.cupti.call("cuEventRecord"), stream, bytes=4)
                for name in CUBLAS[1:]:
                    self._kernel(stream, name, "cudaLaunchKernel", "cuLaunchKernel")

        return Issued(issue, ("launch", node.op))

    def copy(self, dst, src, nbytes, stream, to_host) -> Issued:
        def issue() -> None:
            self.cupti.work(Kind.MEMCPY, self.cupti.call("cuMemcpyAsync"), stream, bytes=nbytes)

        return Issued(issue, ("copy", nbytes))

    def record(self, event, stream) -> Issued:
        def issue() -> None:
            self.cupti.call("cuEventRecord")
            if (graph := self.cupti.capturing) is not None:
                graph.events[event] = graph.ends.get(stream, ())

        return Issued(issue, ("record",))

    def wait(self, event, stream) -> Issued:
        def issue() -> None:
            if (graph := self.cupti.capturing) is not None:
                graph.ends[stream] = (*graph.ends.get(stream, ()), *graph.events.get(event, ()))

        return Issued(issue, ("wait",))

    def sync_stream(self, stream) -> Any:
        return functools.partial(self.cupti.sync, SyncType.STREAM_SYNCHRONIZE, stream)

    def sync_event(self, event) -> Any:
        return functools.partial(self.cupti.sync, SyncType.EVENT_SYNCHRONIZE)


def _made_of(node: Node) -> list[str | None]:
    return ["half_rows", None, "add_bias"] if node.op == "mul_mat" else [node.op]


def engine_on(monkeypatch: Any, path: Any, cupti: FakeCupti) -> Engine:
    """An engine whose device is such a backend, and is called cuda."""

    def opened(name: str, *how: Any) -> Any:
        return CuptiBackend(cupti) if name == "cuda" else open_real(name, *how)

    monkeypatch.setattr(load, "open_backend", opened)
    toggles = Toggles(graph_reuse="set_rows")
    return Engine.load(path, device="cuda", n_ctx=64, toggles=toggles)


def wanted(program: Program) -> list[tuple[Any, ...]]:
    """Of each device span of a step: its command and part, name, lane, kind, and what ran."""
    found = []
    for at in program.located():
        command = at.command
        if isinstance(command, Launch) and not command.by_host:
            ran = [one for f in _made_of(command.node) for one in ((f,) if f else CUBLAS)]
        elif isinstance(command, Copy):
            ran = [command.src.nbytes]
        else:
            continue
        lane = f"cuda stream {command.stream.id}"
        found += [(at.index, at.part, command.label, lane, command.kind, str(one)) for one in ran]
    return sorted(found, key=str)
