"""A device and a CUPTI that exist only here: what is issued makes activity records, in real time.

`FakeCupti` has of `cupti.cupti` what `workbench.trace.cupti.collector` asks for, and can be told to
refuse (`refuse`), to spoil what it delivers (`spoil`) and to drop records. `CuptiBackend` issues on
it.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from workbench.backend.base import NO_PART, Captured, Issue, KernelName
from workbench.backend.issue.issued import Issued, Plannable
from workbench.backend.issue.prepared import Prepared
from workbench.backend.null import NullBackend
from workbench.backend.plan import gate
from workbench.backend.plan.life import plans_of
from workbench.config import EngineConfig, Toggles
from workbench.engine.look.watch import PLAIN, chosen
from workbench.graph.ir import F32, Node, StepShape, Tensor
from workbench.graph.ops import make
from workbench.program.capabilities import Capabilities
from workbench.program.commands import (
    HOST,
    RESULT,
    Buffer,
    Copy,
    Launch,
    Program,
    Range,
    Read,
    Record,
    Space,
    Stream,
    Sync,
    Wait,
    Write,
)
from workbench.program.plans import with_plans

Work = tuple[Any, int, int, dict[str, Any]]  # kind, stream, ns, fields of a record
OFFSET_NS = 1_700_000_000_000_000_000  # of CUPTI's clock to the recorder's
KERNEL_NS = 40_000
# Of a copy, by `held`: nothing beside the work in front of it that holds the host; where nothing
# does, longer than a call takes on a busy machine, so that no call ends behind its copy.
COPY_NS = {True: 3000, False: 60_000}
DIMS = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")
FIRST_NODE = 501  # CUPTI's number of the first node of a graph
MODEL = SimpleNamespace(
    name="fake", quant="F32", architecture="llama", n_layer=1, weight_bytes_per_token=16384,
    path="models/fake.gguf",
)  # fmt: skip
now = time.perf_counter_ns


def dims(function: str) -> tuple[int, ...]:
    """Grid and block of a kernel: no two of different names have the same."""
    return 1 + len(function), sum(function.encode()), 1, 32, 1, 1


class ActivityKind(enum.IntEnum):
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
    ERROR_QUEUE_EMPTY = 18
    ERROR_INSUFFICIENT_PRIVILEGES = 35
    ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED = 39


class SyncType(enum.IntEnum):
    EVENT_SYNCHRONIZE = 1
    STREAM_SYNCHRONIZE = 3


CALLS = ["", "cuLaunchKernel", "cudaLaunchKernel", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2",
         "cuStreamSynchronize", "cuEventSynchronize", "cuEventRecord", "cuGraphLaunch"]  # fmt: skip


class CuptiError(Exception):
    def __init__(self, status: int):
        super().__init__(f"{Result(status).name} ({status})")
        self.status = status


class FakeCupti:
    ActivityKind, Result, ActivitySynchronizationType = ActivityKind, Result, SyncType
    ActivityFlag = SimpleNamespace(FLUSH_FORCED=1)
    CallbackDomain = SimpleNamespace(DRIVER_API=1, RUNTIME_API=2)
    ExternalCorrelationKind = SimpleNamespace(CUSTOM0=3)
    SUBSCRIBER_PARAMS_SIZE = 32
    cuptiError = CuptiError

    def __init__(self) -> None:
        self.refuse: dict[str, Exception] = {}  # function -> what it raises
        self.spoil: Callable[[list], list] = lambda records: records
        self.dropped = 0
        self.lags: list[int] = []  # ns that the next readings of the clock take
        self.subscribers = 0
        self.enabled: set[int] = set()
        self.most_enabled: set[int] = set()
        self.stack: list[int] = []
        self._records: list[Any] = []
        self._correlation = itertools.count(1000)
        self.captured: list[Work] | None = None  # what a capture that is under way has recorded
        self.behind: list[tuple[int, ...]] = []  # of each of these, what it begins behind
        self.ends: dict[int, tuple[int, ...]] = {}  # of each stream, what its next begins behind
        self.events: dict[Any, tuple[int, ...]] = {}
        self._busy: dict[int, int] = defaultdict(int)  # stream -> when it is through
        self._completed: Any = None

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
        if self.subscribers:
            raise CuptiError(Result.ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED)
        self.subscribers += 1
        return 77

    def unsubscribe(self, subscriber: int) -> None:
        assert subscriber == 77
        self.subscribers -= 1

    def activity_register_callbacks(self, requested: Any, completed: Any) -> None:
        self._asked("activity_register_callbacks")
        nbytes, _ = requested()
        assert nbytes >= 1 << 20
        self._completed = completed

    def activity_enable(self, kind: int) -> None:
        self._asked("activity_enable")
        self.enabled.add(ActivityKind(kind))
        self.most_enabled |= self.enabled

    def activity_disable(self, kind: int) -> None:
        self.enabled.remove(ActivityKind(kind))

    def activity_flush_all(self, flag: int) -> None:
        self._asked("activity_flush_all")
        records, self._records = self._records, []
        if records:
            self._completed(self.spoil(records))

    def activity_get_num_dropped_records(self, context: int, stream: int, address: int) -> None:
        ctypes.c_size_t.from_address(address).value = self.dropped

    def activity_push_external_correlation_id(self, kind: int, number: int) -> None:
        self.stack.append(number)

    def activity_pop_external_correlation_id(self, kind: int) -> int:
        if not self.stack:
            raise CuptiError(Result.ERROR_QUEUE_EMPTY)
        return self.stack.pop()

    def get_timestamp(self) -> int:
        self._asked("get_timestamp")
        if self.lags:
            end = now() + self.lags.pop(0)
            while now() < end:
                pass
        return now() + OFFSET_NS

    def get_callback_name(self, domain: int, cbid: int) -> str:
        return CALLS[cbid]

    # the device -------------------------------------------------------------------------------

    def _record(self, kind: ActivityKind, start: int, end: int, **fields: Any) -> None:
        if kind in self.enabled:
            times = {"start": start + OFFSET_NS, "end": end + OFFSET_NS}
            self._records.append(SimpleNamespace(kind=int(kind), **times, **fields))

    def call(self, name: str, nested: str = "") -> int:
        """The host calls the driver, through the runtime where `nested` names the call inside."""
        number, start = next(self._correlation), now()
        if self.stack and ActivityKind.EXTERNAL_CORRELATION in self.enabled:
            tag = SimpleNamespace(
                kind=int(ActivityKind.EXTERNAL_CORRELATION), correlation_id=number,
                external_id=self.stack[-1],
            )  # fmt: skip
            self._records.append(tag)
        kinds = [(ActivityKind.RUNTIME, name), (ActivityKind.DRIVER, nested)]
        for kind, called in kinds if nested else [(ActivityKind.DRIVER, name)]:
            self._record(kind, start, now(), cbid=CALLS.index(called), correlation_id=number)
        return number

    def work(self, kind: ActivityKind, number: int, stream: int, ns: int, **fields: Any) -> None:
        if self.captured is not None:
            self.captured.append((kind, stream, ns, fields))
            self.behind.append(self.ends.get(stream, ()))
            self.ends[stream] = (len(self.behind) - 1,)
            return
        start = max(now() + 2000, self._busy[stream])
        self._busy[stream] = start + ns
        self._ran(kind, number, 13 + stream, start, ns, graph_node_id=0, **fields)

    def _ran(
        self, kind: ActivityKind, number: int, stream_id: int, start: int, ns: int, **fields: Any
    ) -> None:
        sizes = zip(DIMS, dims(fields.get("name", "")), strict=True)
        self._record(
            kind, start, start + ns, correlation_id=number, stream_id=stream_id, device_id=0,
            **fields, **dict(sizes),
        )  # fmt: skip

    def replay(self, stream: int, work: Sequence[Work], graph: CuptiGraph) -> None:
        """The nodes of a graph, each as soon as what it is behind is over. They are on streams of
        the graph's own: a node goes on on the stream of the first that it is behind, where no
        other does already."""
        number, ends, lanes = self.call("cuGraphLaunch"), list[int](), list[int]()
        begin, taken, free = max(now() + 2000, self._busy[stream]), set[int](), itertools.count(40)
        for (kind, _, ns, fields), behind, node in zip(work, graph.behind, graph.ids, strict=True):
            start = max([begin, *(ends[i] for i in behind)])
            first = next((i for i in behind if i not in taken), None)
            lanes.append(next(free) if first is None else lanes[first])
            taken.update(() if first is None else (first,))
            ends.append(start + ns)
            self._ran(kind, number, lanes[-1], start, ns, graph_node_id=node, **fields)
        self._busy[stream] = max([begin, *ends])

    def sync(self, stream: int, what: SyncType) -> None:
        name = (
            "cuStreamSynchronize" if what == SyncType.STREAM_SYNCHRONIZE else "cuEventSynchronize"
        )
        number, start = self.call(name), now()
        while now() < self._busy[stream]:
            pass
        self._record(
            ActivityKind.SYNCHRONIZATION, start, now(), correlation_id=number, type=int(what),
            stream_id=13 + stream,
        )  # fmt: skip


class CuptiGraph(Captured):
    """A graph on a fake CUPTI: all of its records have the number of one call. CUPTI's numbers of
    the nodes are `ids`, in the order of the nodes unless a test says otherwise."""

    def __init__(self, cupti: FakeCupti, work: Plannable):
        self._cupti, self._recorded, nodes = cupti, list[Work](), list[int]()
        self._stream, self.behind = work.stream, list[tuple[int, ...]]()
        cupti.behind, cupti.ends, cupti.events = self.behind, {}, {}
        parts = [*enumerate(work.parts), *([] if work.end is None else [(NO_PART, work.end)])]
        for number, part in parts:
            if number == NO_PART:
                cupti.ends[work.stream] = tuple({i for of in cupti.ends.values() for i in of})
            cupti.captured = []
            part.call()
            nodes += [number] * len(cupti.captured)
            self._recorded += cupti.captured
        cupti.captured = None
        self.nodes = tuple(nodes)
        self.ids = list(range(FIRST_NODE, FIRST_NODE + len(nodes)))

    def launch(self) -> None:
        self._cupti.replay(self._stream, self._recorded, self)

    def update(self, work: Plannable, changed: Any) -> bool:
        return True

    def destroy(self) -> None:
        """Nothing to give back."""


class CuptiBackend(NullBackend):
    """Issues on a fake CUPTI: a mul_mat is a conversion, a product of cuBLAS (two kernels of its
    own and a memset) and a bias; every other op one kernel. held: copies to the device make the
    host wait for their stream, as a pageable source can."""

    def __init__(self, cupti: FakeCupti, held: bool = False):
        super().__init__("cuda", Capabilities(True, True, True, True, 9))
        self.cupti, self.held = cupti, held
        self.graphs: list[CuptiGraph] = []

    def capture(self, work: Plannable) -> CuptiGraph:
        self.graphs.append(CuptiGraph(self.cupti, work))
        return self.graphs[-1]

    def kernels_of(self, node: Node) -> list[KernelName]:
        made = ["half_rows", None, "add_bias"] if node.op == "mul_mat" else [node.op]
        return [KernelName(name, False, dims(name) if name else ()) for name in made]

    def launch(self, node, address_of, scratch, stream, programmatic=False) -> Issued:
        cupti, kernels = self.cupti, self.kernels_of(node)

        def issue() -> None:
            launch = functools.partial(
                cupti.work, ActivityKind.CONCURRENT_KERNEL, stream=stream, ns=KERNEL_NS
            )
            for kernel in kernels:
                if kernel.function is not None:
                    launch(number=cupti.call("cuLaunchKernel"), name=kernel.function)
                else:
                    cupti.work(
                        ActivityKind.MEMSET, cupti.call("cuEventRecord"), stream, 10, bytes=4
                    )
                    for name in ("ampere_gemm", "splitKreduce"):
                        launch(number=cupti.call("cudaLaunchKernel", "cuLaunchKernel"), name=name)

        return Issued(issue, ("launch", node.op))

    def gate_end(self, counter, word, stream, programmatic) -> Issued:
        def issue() -> None:
            number, name = self.cupti.call("cuLaunchKernel"), gate.END_KERNEL
            self.cupti.work(ActivityKind.CONCURRENT_KERNEL, number, stream, KERNEL_NS, name=name)

        return Issued(issue, ("end",))

    def copy(self, dst, src, nbytes, stream, to_host) -> Issued:
        cupti = self.cupti

        def issue() -> None:
            number = cupti.call("cuMemcpyDtoHAsync_v2" if to_host else "cuMemcpyHtoDAsync_v2")
            cupti.work(ActivityKind.MEMCPY, number, stream, COPY_NS[self.held], bytes=nbytes)
            while self.held and not to_host and now() < cupti._busy[stream]:
                pass

        return Issued(issue, ("copy", nbytes))

    def record(self, event, stream) -> Issued:
        cupti = self.cupti

        def issue() -> None:
            cupti.call("cuEventRecord")
            if cupti.captured is not None:
                cupti.events[event] = cupti.ends.get(stream, ())

        return Issued(issue, ("record",))

    def wait(self, event, stream) -> Issued:
        cupti = self.cupti

        def issue() -> None:
            if cupti.captured is not None:
                cupti.ends[stream] = (*cupti.ends.get(stream, ()), *cupti.events.get(event, ()))

        return Issued(issue, ("wait",))

    def sync_stream(self, stream) -> Issue:
        return functools.partial(self.cupti.sync, stream, SyncType.STREAM_SYNCHRONIZE)

    def sync_event(self, event) -> Issue:
        return functools.partial(self.cupti.sync, 0, SyncType.EVENT_SYNCHRONIZE)


class CudaEngine:
    """An engine of one program on such a device: a host split, two copies, a product and a sum on
    the device, the result's copy, and the wait for it. lead: launches in front of the copies.
    plans, scope: the toggles `plans` and `plan_scope`. packed: one copy brings both inputs, in
    front of the launches on their stream. branches: K and V are made side by side in front of the
    sum, by kernels with the same names, and Q behind V."""

    device = "cuda"
    model, toggles, config, sync_mode = MODEL, Toggles(), EngineConfig(), "copy_boundary"
    chosen = "preset baseline"

    def __init__(
        self,
        cupti: FakeCupti,
        held: bool = False,
        lead: int = 0,
        plans: str = "off",
        scope: str = "split",
        packed: bool = False,
        branches: bool = False,
    ):
        self._loaded = self  # what it stands on, for `exclusive`
        self.cupti, self.backend = cupti, CuptiBackend(cupti, held)
        self.recorder: Any = None
        self.n_steps = 0
        self.program = _program(lead, packed, branches)
        if plans != "off":
            self.program = with_plans(self.program, scope)
        host = NullBackend("host", Capabilities(False, False, True, False, 0))
        memory = {b: self.backend.allocate(b.nbytes, b.space) for b in self.program.buffers}
        kept = plans_of(Toggles(plans=plans))
        self.prepared = Prepared(self.program, [host, self.backend], memory, {}, kept)

    def synchronize(self) -> None:
        self.backend.synchronize()

    def step(self) -> None:
        values = {"x": np.zeros((1, 64), np.float32)}
        step, self.n_steps, recorder = self.n_steps, self.n_steps + 1, self.recorder
        watch = chosen(recorder, PLAIN)(step)
        watch.begin(step, [(0, [1], "last")], step)
        try:
            self.prepared.run(values, watch.head(self.prepared))
            self.prepared.finish(watch.tail(self.prepared))
        except BaseException:
            watch.fail()
            raise
        watch.end(waited=True)


def _program(lead: int, packed: bool, branches: bool) -> Program:
    x, w = Tensor("x", F32, (1, 64)), Tensor("w", F32, (64, 64))
    host_node = make("add", "embd", x, x)
    product = make("mul_mat", "product", w, x)
    total = make("add", "sum", product.output, host_node.output)
    memory = {
        name: Buffer(name, space, nbytes, backend)
        for name, space, nbytes, backend in (
            ("staging", Space.PINNED, 1024, 1), ("arena", Space.DEVICE, 65536, 1),
            ("result", Space.PINNED, 256, 1),
        )
    }  # fmt: skip
    staging, arena, result = memory.values()

    def of(buffer: Buffer, at: int, nbytes: int = 256) -> Range:
        return Range(buffer, at, nbytes)

    on_host = {x: of(staging, 0), host_node.output: of(staging, 256)}
    on_device = {
        x: of(arena, 0), host_node.output: of(arena, 256), w: of(arena, 1024, 16384),
        product.output: of(arena, 512), total.output: of(arena, 768),
    }  # fmt: skip
    compute, copies = Stream(1, 0), Stream(1, 1)

    def launch(node: Node, stream: Stream, split: int) -> Launch:
        return Launch(node, stream, (), (), None, split)

    together = [Copy(of(arena, 0, 512), of(staging, 0, 512), compute, "inputs", 1)]
    apart = [
        Copy(on_device[x], on_host[x], compute if lead else copies, "x", 1),
        Copy(
            on_device[host_node.output], on_host[host_node.output],
            compute if lead else copies, "embd", 1,
        ),
        Sync(1, stream=compute if lead else copies),
        Record(1, copies, 1),
        Wait(1, compute, 1),
    ]  # fmt: skip
    commands = [
        Write(of(staging, 0), "x"),
        launch(host_node, Stream(HOST, 0), 0),
        *(launch(total, compute, 1) for _ in range(lead)),
        *(together if packed else apart),
        launch(product, compute, 1),
        *(_branches(launch, on_device, product.output, of(arena, 32768)) if branches else ()),
        launch(total, compute, 1),
        Copy(of(result, 0), on_device[total.output], compute, "sum", RESULT),
        Record(0, compute, RESULT),
        Sync(RESULT, event=0),
        Read(of(result, 0), "sum"),
    ]  # fmt: skip
    return Program(
        commands, list(memory.values()), [on_host, on_device], [HOST, 1], ("host", "cuda"),
        StepShape(1, 1, 256), "copy_boundary", "own",
    )  # fmt: skip


def _branches(
    launch: Callable[..., Launch], on_device: dict[Tensor, Range], x: Tensor, there: Range
) -> list[Any]:
    """Streams 2 and 3 fork from stream 0; each makes two sums and stream 3 a norm behind them,
    stream 0 a product and its square meanwhile. Joined are 3, then 2."""
    weight = next(tensor for tensor in on_device if tensor.name == "w")
    made: dict[str, list[Node]] = {}
    for name, ops in {"k": "add add", "v": "add add rms_norm", "q": "mul_mat mul"}.items():
        made[name], source = [], x
        for i, op in enumerate(ops.split()):
            given = {"rms_norm": (source,), "mul_mat": (weight, source)}.get(op, (source, source))
            more: dict[str, Any] = {"eps": 1e-5} if op == "rms_norm" else {}
            node = make(op, f"{name}{i}", *given, **more)
            made[name].append(node)
            on_device[node.output], source = there, node.output
    home, k, v = Stream(1, 0), Stream(1, 2), Stream(1, 3)
    return [
        Record("fork", home, 1, forks=True),
        *(Wait("fork", k, 1, forks=True), *(launch(node, k, 1) for node in made["k"])),
        Record("of k", k, 1, forks=True),
        *(Wait("fork", v, 1, forks=True), *(launch(node, v, 1) for node in made["v"])),
        Record("of v", v, 1, forks=True),
        *(launch(node, home, 1) for node in made["q"]),
        Wait("of v", home, 1, forks=True),
        launch(make("mul", "joined", x, x), home, 1),
        Wait("of k", home, 1, forks=True),
    ]
