"""Records of CUPTI, and the commands and parts of plans that they belong to: made-up rows of
programs, and a `cupti.cupti` that delivers them."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import itertools
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.oracles.trace_pattern import trace_pattern
from workbench.backend import null
from workbench.backend.base import NO_PART, KernelName, open_backend
from workbench.backend.null import NullBackend
from workbench.backend.plan import gate
from workbench.common.errors import DeviceError, UsageError
from workbench.engine import load
from workbench.graph.ir import Node
from workbench.graph.ops import touched_bytes
from workbench.program.commands import Copy, Launch, Program, Record, Replay, Space, Sync, Wait
from workbench.trace.cupti import activity, collector, correlate
from workbench.trace.cupti.activity import COPY, KERNEL, Activity, Want
from workbench.trace.cupti.clock import Clock, Reading, read_clocks
from workbench.trace.cupti.correlate import Match, match
from workbench.trace.cupti.parted import parted
from workbench.trace.profile import profile
from workbench.trace.spans import HOST_LANE

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
                kind = activity.MEMSET if name == activity.MEMSET else KERNEL
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
            self.rows.append(Activity(activity.SYNC, what, at, at + CALL_NS, made))
        elif isinstance(command, Record | Wait):
            self._call(number, "cuEventRecord", at)
        for n, work in enumerate(works(command, self.of)):
            own = ("cudaLaunchKernel", "cuLaunchKernel") if work.name in CUBLAS[1:] else (
                "cuMemcpyAsync" if work.kind == COPY else "cuMemsetD8Async"
                if work.kind == activity.MEMSET else "cuLaunchKernel",
            )  # fmt: skip
            made = self._call(number, own[0], at + 2 * CALL_NS * n, *own[1:])
            self._ran(work, made, 13 + command.stream.id, at + 100)
        return None

    def _call(self, number: int, name: str, at: int, nested: str = "") -> int:
        """The host calls the driver, through the runtime where `nested` is the call inside."""
        made = next(self._numbers)
        self.external[made] = number
        kind = activity.RUNTIME if nested else activity.DRIVER
        self.rows.append(Activity(kind, name, at, at + CALL_NS, made))
        if nested:
            self.rows.append(Activity(activity.DRIVER, nested, at + 1, at + CALL_NS - 1, made))
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
    KERNEL: Kind.CONCURRENT_KERNEL, COPY: Kind.MEMCPY, activity.MEMSET: Kind.MEMSET,
    activity.DRIVER: Kind.DRIVER, activity.RUNTIME: Kind.RUNTIME,
    activity.SYNC: Kind.SYNCHRONIZATION,
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
        self.in_calls = False  # whether it is in every call of the driver
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
        self.in_calls = True
        self._commands.clear()
        return 77

    def unsubscribe(self, subscriber: int) -> None:
        self.subscribers -= 1

    def finalize(self) -> None:
        assert not self.enabled and not self.subscribers
        self.in_calls = False

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
        if row.kind in (activity.DRIVER, activity.RUNTIME):
            self._names.append(row.name)
            more["cbid"] = len(self._names) - 1
        elif row.kind == activity.SYNC:
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


KEPT = {"graph_reuse": "set_rows"}
WHOLE = KEPT | {
    "plans": "ours", "plan_scope": "step", "sync": "packed_implicit", "copy_stream": "compute"
}  # fmt: skip
WAYS: dict[str, dict[str, str]] = {
    "no plans": KEPT,
    "plans of splits": KEPT | {"plans": "ours"},
    "a plan of the step": WHOLE,
    "branches": KEPT | {"streams": "3"},
    "branches in plans": KEPT | {"plans": "ours", "streams": "3"},
    "branches in a plan": WHOLE | {"streams": "3"},
}


@pytest.fixture(scope="module")
def base(tiny_model) -> Iterator[wb.Engine]:
    """An engine on a null device that is called cuda."""
    made = null.open_backend(name="cuda", capture=True)
    made.kernels_of = kernels_of  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        opened = lambda name, *how: made if name == "cuda" else open_backend(name, *how)  # noqa: E731
        patch.setattr(load, "open_backend", opened)
        path, toggles = tiny_model("tiny-llama", "Q8_0"), wb.Toggles(**KEPT)
        with wb.Engine.load(path, device="cuda", n_ctx=64, toggles=toggles) as engine:
            yield engine


def recorded(base: wb.Engine, way: str = "no plans", graphs: bool = True, n: int = 2) -> Recording:
    """Steps that end alike."""
    with base.variant(wb.Toggles(**WAYS[way])) as engine:
        program = engine.program(n_past=2)
    made = Recording()
    for step in range(n):
        made.step(step, program, graphs)
    return made


def ran(found: Match, step: int) -> list[tuple[Any, ...]]:
    """What `wanted` says of a program."""
    rows = [
        (a["index"], a.get("part"), s.name, s.lane, a["kind"], str(a.get("kernel", a.get("bytes"))))
        for s in found.spans
        if s.category == "device" and (a := s.args)["step"] == step
    ]
    return sorted(rows, key=str)


def stale(made: Recording) -> None:
    """A name of an unloaded module's kernel for each that is no product's of cuBLAS."""
    other = {"half_rows": "add_bias"}
    for n, row in enumerate(made.rows):
        if row.kind == KERNEL and row.name not in CUBLAS:
            made.rows[n] = row._replace(name=other.get(row.name, "half_rows"))


def reversed_nodes(made: Recording) -> None:
    """CUPTI's numbers of nodes are in another order than the capture's."""
    made.rows = [row._replace(node=row.node and 10_000 - row.node) for row in made.rows]


def gated(made: Recording) -> None:
    """Each plan begins with a kernel in place of its first copy, and ends with one more."""
    for n, row in enumerate(made.rows):
        if row.node == FIRST_NODE:
            assert row.kind == COPY
            made.rows[n] = row._replace(kind=KERNEL, name=gate.KERNEL, nbytes=0)
    for nodes in made.replayed.values():
        nodes.append(NO_PART)
    end = FIRST_NODE + len(nodes) - 1
    made.rows += [
        row._replace(kind=KERNEL, name=gate.END_KERNEL, start=row.end, end=row.end + 9, node=end)
        for row in made.rows
        if row.node == end - 1
    ]


CASES = [
    *((way, graphs, None) for way in WAYS for graphs in (True, False) if graphs or "plan" in way),
    *((way, True, stale) for way in WAYS),
    ("plans of splits", True, reversed_nodes),
    ("a plan of the step", True, gated),
]


@pytest.mark.parametrize(("way", "graphs", "change"), CASES)
def test_every_kernel_and_copy_is_a_span_of_its_command(base, way, graphs, change):
    """Issued one by one or replayed. Neither names of other kernels nor numbers of nodes in another
    order than the capture's do harm."""
    made = recorded(base, way, graphs)
    if change:
        change(made)
    found, program = made.match(), made.programs[0]
    assert not found.faults and not found.early_ns and bool(found.n_named) == (change is stale)
    assert ran(found, 0) == ran(found, 1) == wanted(program)
    lanes = {s.lane for s in found.spans if s.name in ("Qcur-0", "Kcur-0") and s.lane != HOST_LANE}
    assert len(lanes) == (2 if "branches" in way else 1)
    assert {s.args["api"] for s in found.spans if s.lane == HOST_LANE} >= {"driver", "sync"}


def without(gone: Callable[[Any], bool], made: Recording) -> None:
    made.rows = [row for row in made.rows if not gone(row)]


def edited(kind: str, n: int, **changes: Any) -> Callable[[Recording], None]:
    return lambda made: made.edit(kind, n, **changes)


def more(kind: str, **changes: Any) -> Callable[[Recording], None]:
    return lambda made: made.rows.append(
        next(row for row in made.rows if row.kind == kind)._replace(**changes)
    )


def out_of_order(made: Recording) -> None:
    first, second = [row for row in made.rows if row.kind == COPY][:2]
    for n, other in enumerate((second, first)):
        made.edit(COPY, n, start=other.start, end=other.end)


def half(made: Recording) -> None:
    del made.rows[len(made.rows) // 2 :]


def on_one_stream(made: Recording) -> None:
    made.rows = [row._replace(stream=13) if row.stream > 0 else row for row in made.rows]


LAUNCHED = "command with fewer kernels than launch calls (first: step "
SPOILED: dict[str, tuple[Callable[[Recording], None], str]] = {
    "the last kernel": (
        lambda made: made.rows.remove([r for r in made.rows if r.kind == KERNEL][-1]),
        f"1 x {LAUNCHED}"),
    "half": (half, "command not as recorded"),
    "a part of a product": (partial(without, lambda r: r.name == "splitKreduce"), LAUNCHED),
    "a second copy": (more(COPY), "2 records for 1"),
    "another kernel": (
        edited(KERNEL, 0, name="memset_kernel", dims=(99, 1, 1, 1, 1, 1)),
        "kernel memset_kernel (grid 99x"),
    "fewer bytes": (edited(COPY, 0, nbytes=5), "copy copy instead of "),
    "a zero end": (edited(KERNEL, 2, end=0), "1 x zero timestamp (first: step "),
    "out of order": (out_of_order, "1 x record out of order"),
    "another stream": (
        edited(KERNEL, 0, stream=99),
        "cuda stream 0 has CUPTI's (device, stream) [(0, 13), (0, 99)]"),
    "two streams on one": (on_one_stream, "stream that is not one of CUPTI's"),
    "somebody else's work": (
        more(KERNEL, correlation=7, name="theirs"), "1 x kernel of no command (first: theirs)"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILED)
def test_a_spoiled_window_says_what_is_missing(base, what):
    spoil, said = SPOILED[what]
    made = recorded(base)
    spoil(made)
    found = made.match()
    assert any(said in line for line in found.faults), found.faults
    assert all(s.start_ns and s.end_ns >= s.start_ns for s in found.spans)


def test_a_record_before_its_call_is_an_error_of_the_clock(base):
    made = recorded(base)
    (kernel, *_) = [row for row in made.rows if row.kind == KERNEL]
    made.edit(KERNEL, 0, start=kernel.start - 5_000)
    assert 4_000 < made.match().early_ns < 5_000


@pytest.mark.parametrize("graphs", [False, True])
def test_a_plan_with_a_lost_record_is_said_once(base, graphs):
    made = recorded(base, "plans of splits", graphs)
    without(lambda row: row.name == "add_bias", made)
    found = made.match()
    (said,) = [line for line in found.faults if "calls" not in line]
    assert said.startswith("2 x plan not as recorded (")
    assert not [s for s in found.spans if "part" in s.args]


@pytest.mark.parametrize(("second", "as_one"), [(64, True), (32, False)])
def test_a_copy_through_the_hosts_memory_is_one_copy(tiny_model, second, as_one):
    """Devices that are not connected: one record on each."""
    path = tiny_model("tiny-llama", "F16")
    with wb.Engine.load(path, device="null", n_ctx=64, n_devices=2, toggles=wb.Toggles()) as engine:
        program = engine.program()
    (copy,) = (
        c for c in program.commands
        if isinstance(c, Copy) and c.src.buffer.space == c.dst.buffer.space == Space.DEVICE
    )  # fmt: skip
    program.commands[:], nbytes = [copy], copy.src.nbytes
    rows = [
        Activity("copy", "copy", 1000, 3000, 7, 13, nbytes, device=0),
        Activity("copy", "copy", 2000, 4000, 7, 9, nbytes * second // 64, device=1),
    ]
    found = match(rows, {7: 1}, {1: (0, 0)}, {0: program}, lambda node: [], lambda ns: ns)
    assert any("copy l_out-0: 2 records for 1" in line for line in found.faults) != as_one
    times = [(s.start_ns, s.end_ns) for s in found.spans]
    assert times == ([(1000, 4000)] if as_one else [(1000, 3000), (2000, 4000)])


def test_the_narrowest_bracket_of_both_clocks_counts():
    """And between two readings of clocks that part the offset is interpolated."""
    ticks = iter([0, 100, *[1000 + 50 * i for i in range(4)], *range(10_000, 30_000, 100)])
    # brackets: 0..100, 1000..1050, 1100..1150, then 100 wide
    assert read_clocks(lambda: 5_000, lambda: next(ticks)) == Reading(1025, 5_000, 25)
    clock = Clock(Reading(1_000, 501_000, 40), Reading(2_100, 502_000, 30))
    assert [clock.to_host(t) for t in (501_000, 501_500, 502_000)] == [1_000, 1_550, 2_100]
    assert clock.error_ns == 40 + 100


@pytest.fixture
def cupti(base, monkeypatch) -> Module:
    package = ModuleType("cupti")
    package.cupti = Module(base.backend)
    monkeypatch.setitem(sys.modules, "cupti", package)
    base.reset()
    return package.cupti


def traced(engine: wb.Engine, n: int = 3, window: Any = (1, 1), **options: Any) -> Any:
    if package := sys.modules.get("cupti"):
        package.cupti.program = engine.program(n_past=engine.n_past + 1)
    with profile(engine, window=window, nvtx=False, **options) as prof:
        for token in range(n):
            engine.step([token])
    return prof


def let_go(cupti: Module) -> bool:
    return not (cupti.enabled or cupti.subscribers or cupti.in_calls)


@pytest.mark.parametrize("way", ["no plans", "plans of splits", "a plan of the step"])
def test_a_window_is_complete_with_and_without_plans(base, cupti, monkeypatch, way):
    """Captured in the window, and replayed. Spans lie in their steps and commands."""
    monkeypatch.setattr(base.backend, "kernels_of", single_kernels_of)
    cupti.of = single_kernels_of
    with base.variant(wb.Toggles(**WAYS[way])) as engine:
        prof = traced(engine, 4, (0, 3))
        program = cupti.program
    assert prof.collector == "cupti" and prof.complete and not prof.fallback, prof.missing
    slack = prof.windows[0].clock_error_ns
    assert 0 < slack < 1_000_000 and trace_pattern(prof) == program.pattern()
    of = {s.args["step"]: s for s in prof.timeline.spans if s.category == "step"}
    inside = [s for s in prof.timeline.spans if s.category in ("device", "call")]
    for span in inside:
        step = of[span.args["step"]]
        assert step.start_ns - slack <= span.start_ns <= span.end_ns <= step.end_ns + slack
    launched = sum(s.args.get("kind") == "launch" for s in inside)
    assert launched == 3 * sum(isinstance(c, Launch) and not c.by_host for c in program.singly())
    assert {s.args["api"] for s in inside if s.category == "call"} == {"driver", "sync"}
    assert any(isinstance(c, Replay) for c in program.commands) == (way != "no plans")


def test_tables_take_the_spans_as_they_are(base, cupti):
    """Bytes come from the op table; a launch of several kernels is counted once."""
    prof = traced(base, n=6, window=(2, 2))
    assert (prof.summary()["copied_bytes"] == cupti.program.counts()["copied_bytes"]).all()
    launches = [c.node for c in cupti.program.commands if isinstance(c, Launch)]
    products = [node for node in launches if node.op == "mul_mat"]
    by_op = prof.kernels().set_index("op")
    assert by_op.loc["mul_mat", "calls"] == 2 * len(products)
    assert by_op.loc["mul_mat", "bytes"] == 2 * sum(map(touched_bytes, products))
    by_kernel = prof.kernels(by="kernel").set_index("kernel")
    assert by_kernel.loc["half_rows", "calls"] == 2 * len(products)
    on_device, ours = (t[t["on"] != HOST_LANE] for t in (by_op, by_kernel))
    assert ours["traced_us"].sum() == pytest.approx(on_device["traced_us"].sum())


def test_long_windows_are_taken_in_parts(base, cupti, monkeypatch):
    """One that is spoiled makes the profile incomplete. CUPTI is let go behind each."""
    monkeypatch.setattr(collector, "WINDOW_STEPS", 2)
    turns = iter([lambda made: None, half, lambda made: None])
    cupti.spoil, first = lambda made: next(turns)(made), base.n_steps + 1
    prof = traced(base, n=7, window=(1, 5))
    assert [[n - first for n in w.steps] for w in prof.windows] == [[0, 1], [2, 3], [4]]
    assert [w.complete for w in prof.windows] == [True, False, True] and prof.complete is False
    assert prof.missing == prof.windows[1].missing and len(prof.summary()) == 5
    assert f"incomplete: {prof.missing}" in prof.note
    assert cupti.most_enabled == set(Kind) and let_go(cupti) and not cupti.stack


def test_cupti_attaches_before_the_step_that_it_traces(base, cupti, monkeypatch):
    """And when what was asked of the device before is over. CUPTI's first call to the driver takes
    milliseconds, which are no step's."""
    waited: list[bool] = []
    monkeypatch.setattr(base.backend, "synchronize", lambda: waited.append(bool(cupti.enabled)))
    traced(base, 1, None)
    assert [False, True] in [waited[n : n + 2] for n in range(len(waited))]


def test_what_a_window_lost_is_said_and_cupti_let_go(base, cupti, monkeypatch):
    cupti.dropped = 12
    assert "12 records dropped for want of buffers" in traced(base).missing
    cupti.spoil = edited(KERNEL, 0, stream=None)
    assert "a buffer of records was lost" in traced(base).missing
    with monkeypatch.context() as patch:
        patch.setattr(base.backend, "kernels_of", lambda node: None)
        assert "the backend does not say which kernels a launch is made" in traced(base).missing
    with monkeypatch.context() as patch:
        patch.setattr(collector.CuptiRecorder, "runs", lambda self, program, step: None)
        assert "the program of step" in traced(base).missing
    cupti.refuse["activity_flush_all"] = CuptiError(15)
    prof = traced(base)
    assert not prof.complete and "at the end of a window" in prof.missing and let_go(cupti)


@pytest.mark.parametrize("broken", [KeyboardInterrupt, DeviceError])
def test_a_failing_body_keeps_its_trace_and_lets_go(base, cupti, monkeypatch, broken):
    """Or a device that fails at the end of the window."""

    def fails(*_: object) -> None:
        raise broken("it fell off")

    cupti.program = base.program(n_past=1)
    with contextlib.suppress(KeyboardInterrupt), profile(base, nvtx=False) as prof:
        base.step([0])
        if broken is DeviceError:
            monkeypatch.setattr(base.backend, "synchronize", fails)
        else:
            monkeypatch.setattr(cupti, "activity_pop_external_correlation_id", fails)
            base.step([1])
    monkeypatch.undo()
    base.reset()
    assert base.recorder is None and prof.complete is False
    assert broken is KeyboardInterrupt or "it fell off" in prof.missing
    assert [s for s in prof.timeline.spans if s.category == "device"] and let_go(cupti)


@pytest.mark.parametrize(("function", "error", "said"), [
    ("subscribe_v2", CuptiError(39), "nsys is attached; run without nsys"),
    ("activity_enable", CuptiError(14), "libcupti does not fit the driver"),
    ("activity_enable", CuptiError(35), "CUPTI refuses activity records"),
    ("get_timestamp", RuntimeError("function cuptiGetTimestamp is not found"), "is not found"),
])  # fmt: skip
@pytest.mark.parametrize("later", [False, True])
def test_a_refusal_is_answered_with_events(base, cupti, function, error, said, later):
    """later: a profiler attaches before the window."""
    if not later:
        cupti.refuse[function] = error
    with profile(base, window=(1, 1), collector="cupti", nvtx=False) as prof:
        base.step([0])
        cupti.refuse[function] = error
        base.step([1])
        base.step([2])
    assert prof.collector == "events" and prof.complete is None
    assert said in prof.fallback and prof.fallback in prof.note and "\n" not in prof.fallback
    assert let_go(cupti)


def test_events_are_taken_where_cupti_is_not(base, cupti, monkeypatch, loaded):
    assert traced(base, collector="events").fallback == traced(loaded).fallback == ""
    assert "embedded device" in traced(loaded, collector="cupti").fallback
    assert not cupti.most_enabled
    with pytest.raises(UsageError, match="choose one of auto, events, cupti"):
        traced(base, collector="nsys")
    monkeypatch.delattr(Module, "subscribe_v2")
    prof = traced(base)
    assert prof.collector == "events" and "has no subscribe_v2" in prof.fallback
    monkeypatch.setitem(sys.modules, "cupti", None)
    assert "cupti-python cannot be imported" in traced(base).fallback


KERNELS = [
    KernelName(name, False, (8 + i, 1, 1, 32, 1, 1))
    for i, name in enumerate(("norm", "product", "rope"))
]
GEMM_DIMS = (7, 7, 1, 128, 1, 1)
launches = st.lists(st.sampled_from([*KERNELS, None]), max_size=3)
copies = st.sampled_from([[64], [4096]])
plans = st.lists(st.one_of(launches, launches, copies, st.just([])), min_size=1, max_size=12)


def replayed(
    wanted: Sequence[Sequence[Want]], chance: random.Random
) -> tuple[list[Activity], list[int], dict[Activity, int]]:
    """Records of a replay, the part of each node, and the part of each record. A product has some
    kernels of cuBLAS's own, and maybe a memset before. Copies are on a stream of their own."""
    rows: list[Activity] = []
    nodes: list[int] = []
    clocks = {COPY: chance.randrange(500), KERNEL: 0}
    owner: dict[Activity, int] = {}

    def ran(part: int, kind: str, name: str, nbytes: int = 0, dims: tuple[int, ...] = ()) -> None:
        clock = COPY if kind == COPY else KERNEL
        start = clocks[clock] = clocks[clock] + chance.randrange(1, 50)
        nodes.append(part)
        row = Activity(kind, name, start, start + 40, 7, 13, nbytes, 0, 100 + len(nodes), dims)
        rows.append(row)
        owner[row] = part

    for part, wants in enumerate(wanted):
        for want in wants:
            if isinstance(want, int):
                ran(part, COPY, COPY, want)
            elif want is not None:
                assert want.function is not None
                ran(part, KERNEL, want.function, dims=want.dims)
            else:
                if chance.random() < 0.3:
                    ran(part, activity.MEMSET, activity.MEMSET, 4)
                for i in range(chance.randrange(1, 4)):
                    ran(part, KERNEL, f"gemm_{i}", dims=GEMM_DIMS)
    return rows, nodes, owner


@given(plans, st.randoms(use_true_random=False), st.booleans())
def test_every_record_of_a_replay_finds_its_part(wanted, chance, late):
    """In whatever order CUPTI delivers; late: it knows no order in time, but that of the nodes."""
    rows, nodes, owner = replayed(wanted, chance)
    if late:
        owner = {row._replace(start=1000 - row.start): part for row, part in owner.items()}
        rows = list(owner)
    chance.shuffle(rows)
    found, reason = parted(rows, wanted, nodes)
    if late and reason == "" and {r: p for p, of in found.items() for r in of} != owner:
        return  # the names fit in the order of time, too
    assert reason == ""
    assert {row: part for part, of_part in found.items() for row in of_part} == owner


@given(plans, st.randoms(use_true_random=False))
def test_parts_issued_one_by_one_are_told_by_names(wanted, chance):
    rows, _, owner = replayed(wanted, chance)
    found, reason = parted([row._replace(node=0) for row in rows], wanted, None)
    assert reason == ""
    told = {row: part for part, of_part in found.items() for row in of_part}
    flat = [(part, want) for part, wants in enumerate(wanted) for want in wants
            if not isinstance(want, int)]  # fmt: skip
    near = {
        part
        for (one, a), (two, b) in pairwise(flat)
        if a is None and b is None
        for part in (one, two)
    }  # products in a row: nobody knows how many kernels each has
    for row, part in owner.items():
        if row.kind in activity.COUNTED and part not in near:
            assert told[row._replace(node=0)] == part


@given(plans, st.randoms(use_true_random=False), st.data())
def test_a_record_too_few_is_never_taken_for_another(wanted, chance, data):
    rows, nodes, _ = replayed(wanted, chance)
    if rows:
        rows.remove(data.draw(st.sampled_from(rows)))
        found, reason = parted(rows, wanted, nodes)
        assert not found and reason == f"{len(rows)} records for {len(nodes)} nodes"


@given(plans, st.randoms(use_true_random=False))
def test_kernels_with_names_of_others_are_told(wanted, chance):
    """Some have a name of another kernel. Only between products of cuBLAS does it stay."""
    rows, nodes, owner = replayed(wanted, chance)
    names = [kernel.function for kernel in KERNELS if kernel.function]
    stale = {
        row: row._replace(name=chance.choice(names))
        if row.name in names and chance.random() < 0.5 else row
        for row in rows
    }  # fmt: skip
    between = {
        part
        for part, wants in enumerate(wanted)
        for i, want in enumerate(wants)
        if want is not None and None in wants[:i] and None in wants[i:]
    }
    found, reason = parted(chance.sample(list(stale.values()), len(rows)), wanted, nodes)
    if reason:
        assert between
        return
    told = {row: part for part, of_part in found.items() for row in of_part}
    assert all(told[row] == part for row, part in owner.items() if part not in between)


def test_what_ran_for_a_capture_is_no_node_of_the_graph():
    """And a part begins behind the last kernel of the part that it waits for."""
    norm, product, rope = ([kernel] for kernel in KERNELS)
    rows = [
        Activity(KERNEL, k.function or "", at, at + 5, 7, 40, node=501 + n, dims=k.dims)
        for n, (k, at) in enumerate(zip((KERNELS[0], *KERNELS), (10, 20, 30, 40), strict=True))
    ]
    wants, nodes = [norm * 2, product, rope], [0, 0, 1, 2]
    outside = rows[0]._replace(node=0)
    assert parted([outside, *rows], wants, nodes)[0] == {0: rows[:2], 1: [rows[2]], 2: [rows[3]]}
    behind = [(), (0,), (1,)]
    assert parted(rows, wants, nodes, behind)[1] == ""
    early = [rows[0], rows[1]._replace(start=35), *rows[2:]]
    assert "it began before part 0" in parted(early, wants, nodes, behind)[1]


def test_a_name_is_given_only_to_what_was_launched_so():
    one, other = KERNELS[:2]
    row = Activity(KERNEL, "stale", 10, 20, 7, 13, dims=one.dims)
    assert [r.name for r in activity.named([row], [one])] == ["norm"]
    for wants in ([other], [one, other], [None], [KernelName("norm", False)]):
        assert activity.named([row], wants) == [row], wants
    assert activity.named([row, row], [one]) == [row, row], "one too many"
