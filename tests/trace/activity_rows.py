"""What CUPTI would record of programs, as rows; and a `cupti.cupti` that delivers them.

Work takes RUN_NS on each stream, beginning behind its call."""

from __future__ import annotations

import ctypes
import enum
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from workbench.backend.base import KernelName
from workbench.backend.null import NullBackend
from workbench.graph.ir import Node
from workbench.program.commands import Copy, Launch, Program, Record, Replay, Sync, Wait
from workbench.trace.cupti import correlate
from workbench.trace.cupti.activity import COPY, DRIVER, KERNEL, MEMSET, RUNTIME, SYNC, Activity

RUN_NS, CALL_NS, FIRST_NODE = 200, 10, 501
CUBLAS = ("memset", "ampere_gemm", "splitKreduce")
OFFSET_NS = 1_700_000_000_000_000_000  # of CUPTI's clock to the recorder's
Key = tuple[int, int]


def dims(function: str) -> tuple[int, ...]:
    """Grid and block of a kernel: no two of different names have the same."""
    return 1 + len(function), sum(function.encode()), 1, 32, 1, 1


def kernels_of(node: Node) -> list[KernelName]:
    """A mul_mat is a conversion, a product of cuBLAS and a bias; every other op is one kernel."""
    names = ["half_rows", None, "add_bias"] if node.op == "mul_mat" else [node.op]
    return [KernelName(name, False, dims(name) if name else ()) for name in names]


def single_kernels_of(node: Node) -> list[KernelName]:
    """As a null backend's graphs have it: a node for each part."""
    return [KernelName(node.op, False, dims(node.op))]


def works(command: Any, of: Callable[[Node], list[KernelName]] = kernels_of) -> Iterator[Activity]:
    """What the device does for a command."""
    blank = Activity("", "", 0, 0, 0)
    if isinstance(command, Copy):
        yield blank._replace(kind=COPY, name=COPY, nbytes=command.src.nbytes)
    elif isinstance(command, Launch) and not command.by_host:
        for kernel in of(command.node):
            for name in (kernel.function,) if kernel.function else CUBLAS:
                kind = MEMSET if name == MEMSET else KERNEL
                yield blank._replace(kind=kind, name=name, dims=dims(name))


class Recording:
    """Rows, and what `correlate.match` takes beside them."""

    def __init__(self, of: Callable[[Node], list[KernelName]] = kernels_of):
        self.of = of
        self.rows: list[Activity] = []
        self.external: dict[int, int] = {}
        self.issued: dict[int, Key] = {}
        self.replayed: dict[Key, list[int] | None] = {}
        self.programs: dict[int, Program] = {}
        self._numbers = itertools.count(1000)
        self._busy: dict[int, int] = defaultdict(int)

    def step(self, step: int, program: Program, graphs: bool = True) -> None:
        """All commands of a step. graphs: plans are replayed, not issued part by part."""
        self.programs[step] = program
        for index, command in enumerate(program.commands):
            number = len(self.issued) + 1
            self.issued[number] = step, index
            nodes = self.command(number, command, 100_000 * number, graphs)
            if isinstance(command, Replay):
                self.replayed[step, index] = nodes

    def command(self, number: int, command: Any, at: int, graph: bool) -> list[int] | None:
        """The rows of a command that is issued at a time as `number`; of a graph, the parts of its
        nodes."""
        if isinstance(command, Replay):
            if graph:
                return self._replay(number, command, at)
            for n, part in enumerate(command.parts):
                self.command(number, part, at + 200 * n, False)
        elif isinstance(command, Sync):
            made = self._call(number, f"cu{'Event' if command.event else 'Stream'}Synchronize", at)
            what = "event synchronize" if command.event else "stream synchronize"
            self.rows.append(Activity(SYNC, what, at, at + CALL_NS, made))
        elif isinstance(command, Record | Wait):
            self._call(number, "cuEventRecord", at)
        for n, work in enumerate(works(command, self.of)):
            own = ("cudaLaunchKernel", "cuLaunchKernel") if work.name in CUBLAS[1:] else (
                "cuMemcpyAsync" if work.kind == COPY else "cuMemsetD8Async"
                if work.kind == MEMSET else "cuLaunchKernel",
            )  # fmt: skip
            made = self._call(number, own[0], at + 2 * CALL_NS * n, *own[1:])
            self._ran(work, made, 13 + command.stream.id, at + 100)
        return None

    def _call(self, number: int, name: str, at: int, nested: str = "") -> int:
        """The host calls the driver, through the runtime where `nested` is the call inside."""
        made = next(self._numbers)
        self.external[made] = number
        self.rows.append(Activity(RUNTIME if nested else DRIVER, name, at, at + CALL_NS, made))
        if nested:
            self.rows.append(Activity(DRIVER, nested, at + 1, at + CALL_NS - 1, made))
        return made

    def _ran(self, work: Activity, made: int, stream: int, at: int, node: int = 0) -> None:
        start = max(at, self._busy[stream])
        self._busy[stream] = end = start + RUN_NS
        self.rows.append(
            work._replace(start=start, end=end, correlation=made, stream=stream, node=node)
        )

    def _replay(self, number: int, plan: Replay, at: int) -> list[int]:
        """On streams of the graph's own; each node as soon as what it is behind is over."""
        made, nodes = self._call(number, "cuGraphLaunch", at), list[int]()
        events: dict[str, int] = {}
        for n, part in enumerate(plan.parts):
            lane = 40 + part.stream.id
            if isinstance(part, Record):
                events[part.event] = self._busy[lane]
            elif isinstance(part, Wait):
                self._busy[lane] = max(self._busy[lane], events[part.event])
            for work in works(part, self.of):
                self._ran(work, made, lane, at + 100, FIRST_NODE + len(nodes))
                nodes.append(n)
        return nodes

    def edit(self, kind: str, n: int, **changes: Any) -> None:
        """Spoils the n-th row of a kind."""
        at = [i for i, row in enumerate(self.rows) if row.kind == kind][n]
        self.rows[at] = self.rows[at]._replace(**changes)

    def match(self) -> correlate.Match:
        return correlate.match(
            self.rows, self.external, self.issued, self.programs, self.of, lambda ns: ns,
            self.replayed,
        )  # fmt: skip


def wanted(program: Program) -> list[tuple[Any, ...]]:
    """Of each device span of a step: its command and part, name, lane, kind, and what ran."""
    found = []
    for at in program.located():
        c = at.command
        for work in works(c):
            what = str(work.nbytes or work.name)
            found.append((at.index, at.part, c.label, f"cuda stream {c.stream.id}", c.kind, what))
    return sorted(found, key=str)


class Kind(enum.IntEnum):
    MEMCPY, MEMSET, MEMCPY2, DRIVER, RUNTIME = 1, 2, 22, 4, 5
    CONCURRENT_KERNEL, SYNCHRONIZATION, EXTERNAL_CORRELATION = 10, 38, 39


class Result(enum.IntEnum):
    ERROR_NOT_COMPATIBLE, ERROR_NOT_INITIALIZED = 14, 15
    ERROR_INSUFFICIENT_PRIVILEGES, ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED = 35, 39


class CuptiError(Exception):
    def __init__(self, status: int):
        super().__init__(f"{Result(status).name} ({status})")
        self.status = status


KIND_OF = {
    KERNEL: Kind.CONCURRENT_KERNEL, COPY: Kind.MEMCPY, MEMSET: Kind.MEMSET, DRIVER: Kind.DRIVER,
    RUNTIME: Kind.RUNTIME, SYNC: Kind.SYNCHRONIZATION,
}  # fmt: skip
DIMS = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")


class Module:
    """Of `cupti.cupti` what the collector asks for. While it is attached, the innermost numbers
    that are pushed are those of commands: of `program`, step by step.

    It can refuse functions (`refuse`), spoil what it delivers (`spoil`), drop records."""

    ActivityKind, Result = Kind, Result
    ActivitySynchronizationType = enum.IntEnum(
        "SyncType", {"EVENT_SYNCHRONIZE": 1, "STREAM_SYNCHRONIZE": 3}
    )
    ActivityFlag = SimpleNamespace(FLUSH_FORCED=1)
    CallbackDomain = SimpleNamespace(DRIVER_API=1, RUNTIME_API=2)
    ExternalCorrelationKind = SimpleNamespace(CUSTOM0=3)
    SUBSCRIBER_PARAMS_SIZE = 32
    cuptiError = CuptiError

    def __init__(self, backend: NullBackend):
        self.program: Program | None = None
        self.refuse: dict[str, Exception] = {}  # function -> what it raises
        self.spoil: Callable[[Recording], None] = lambda recording: None
        self.dropped = self.subscribers = 0
        self.enabled: set[int] = set()
        self.most_enabled: set[int] = set()
        self.stack: list[int] = []
        self.of, self._log = kernels_of, backend.log
        self._commands: list[tuple[int, int, bool]] = []  # number, ns, whether a graph was launched
        self._pushed = 0, 0  # when, and what the backend had logged
        self._names: list[str] = []

    def _asked(self, function: str) -> None:
        if function in self.refuse:
            raise self.refuse[function]

    def SubscriberParams(self) -> Any:
        return SimpleNamespace(ptr=1, old_subscriber_name="nsys", subscriber_name="", struct_size=0)

    def subscribe_v2(self, callback: Any, userdata: Any, params: int) -> int:
        self._asked("subscribe_v2")
        self.subscribers += 1
        assert self.subscribers == 1, "it was let go before"
        self._commands.clear()
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
        commands, self._commands = self._commands, []
        if not commands:
            return
        recording = Recording(self.of)
        for n, (number, at, graph) in enumerate(commands):
            command = self.program.commands[n % len(self.program.commands)]
            recording.command(number, command, at, graph)
        self.spoil(recording)
        externals = [
            SimpleNamespace(kind=39, correlation_id=made, external_id=number)
            for made, number in recording.external.items()
        ]
        self._completed([*externals, *map(self._record, recording.rows)])

    def _record(self, row: Activity) -> Any:
        times = {"start": row.start + OFFSET_NS, "end": row.end + OFFSET_NS}
        more: dict[str, Any] = {"correlation_id": row.correlation, "name": row.name}
        if row.kind in (DRIVER, RUNTIME):
            self._names.append(row.name)
            more["cbid"] = len(self._names) - 1
        elif row.kind == SYNC:
            more["type"] = self.ActivitySynchronizationType[row.name.upper().replace(" ", "_")]
        if row.stream is not None:
            more["stream_id"] = row.stream
        more |= {"device_id": row.device, "graph_node_id": row.node, "bytes": row.nbytes}
        more |= dict(zip(DIMS, row.dims, strict=False))
        return SimpleNamespace(kind=int(KIND_OF[row.kind]), **times, **more)

    def activity_get_num_dropped_records(self, context: int, stream: int, address: int) -> None:
        ctypes.c_size_t.from_address(address).value = self.dropped

    def activity_push_external_correlation_id(self, kind: int, number: int) -> None:
        self.stack.append(number)
        self._pushed = time.perf_counter_ns(), len(self._log)

    def activity_pop_external_correlation_id(self, kind: int) -> int:
        at, n_logged = self._pushed
        if at:
            graph = any(one[:2] == ("issue", "replay") for one in self._log[n_logged:])
            self._commands.append((self.stack[-1], at, graph))
        self._pushed = 0, 0
        return self.stack.pop()

    def get_timestamp(self) -> int:
        self._asked("get_timestamp")
        return time.perf_counter_ns() + OFFSET_NS

    def get_callback_name(self, domain: int, cbid: int) -> str:
        return self._names[cbid]
