"""Plans of the cuda backend: CUDA graphs, captured from the calls of prepared commands.

The captured graph is kept beside its executable form. It gives the handles of nodes, which an
update of single nodes needs, and the edges. Its parameters stay as they were first captured, and
nobody reads them. An update that is captured anew brings every parameter along.

Everything goes through cuda-bindings on CuPy's stream pointers. Importing this module loads
neither CuPy nor the driver.
"""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from workbench.backend.base import Captured
from workbench.backend.bind import LandingBlock
from workbench.backend.cuda.driver import CAPTURES, Driver
from workbench.backend.issued import Issued, Plannable, Words
from workbench.errors import DeviceError

COPIES = ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyPeerAsync")


class GraphArguments(Words):
    """The argument block of a kernel launch. arguments: n values of 8 bytes, and behind them n
    addresses of these values (`params`), which is what the driver calls kernelParams. function,
    grid: of the launch."""

    __slots__ = ("function", "grid", "params")

    def __init__(
        self,
        arguments: Any,
        n: int,
        pointers: tuple[int, ...],
        function: Any,
        grid: tuple[int, int],
    ):
        super().__init__((ctypes.c_int64 * n).from_buffer(arguments), pointers)
        self.params = ctypes.addressof(arguments) + 8 * n
        self.function, self.grid = function, grid


# the capture ------------------------------------------------------------------------------------


def record(
    driver: Driver, what: str, stream: Any, others: Sequence[Any], issue: Callable[[], None]
) -> Any:
    """The graph of what `issue` queues on the CUstream `stream`, and on `others`, which begin with
    it and end in it. Nothing runs. what: for messages.

    Raises DeviceError where the driver refuses, and whatever `issue` raises. The streams have left
    the capture then, and nothing stays behind.
    """
    # Relaxed: the collector may free device memory at any moment, and a library may load code. In
    # the other modes the capture would fail.
    mode = driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with CAPTURES, _no_collection():
        driver.call("cuStreamBeginCapture", what, stream, mode)
        try:
            events = [driver.event() for _ in others]
            _order(driver, what, [stream] * len(events), others, events)
            issue()
            _order(driver, what, others, [stream] * len(events), events)
        except BaseException:
            # Whatever state the failure left the capture in, the streams must leave it.
            _, graph = driver.api.cuStreamEndCapture(stream)
            if graph is not None and int(graph):
                driver.api.cuGraphDestroy(graph)
            raise
        return driver.call("cuStreamEndCapture", what, stream)


def _order(
    driver: Driver, what: str, first: Sequence[Any], then: Sequence[Any], events: Sequence[Any]
) -> None:
    """What comes on each stream of `then` begins behind what is on the same one of `first`."""
    for before, after, event in zip(first, then, events, strict=True):
        driver.call("cuEventRecord", what, event.handle, before)
        driver.call("cuStreamWaitEvent", what, after, event.handle, 0)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps the cyclic collector away. Pinned memory that it finds is freed behind a wait for the
    device, and such a wait would end the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def instantiate(driver: Driver, what: str, graph: Any, stream: Any) -> Any:
    """The executable form of `graph`, on its way to the device. Raises DeviceError."""
    executable = driver.call("cuGraphInstantiate", what, graph, 0)
    try:
        driver.call("cuGraphUpload", what, executable, stream)
    except BaseException:
        driver.api.cuGraphExecDestroy(executable)
        raise
    return executable


def give_back(api: Any, graph: Any, executable: Any) -> None:
    """Destroys both forms. The driver frees an executable graph behind its queued launches."""
    if executable is not None:
        api.cuGraphExecDestroy(executable)
    if graph is not None:
        api.cuGraphDestroy(graph)


def edges(driver: Driver, graph: Any) -> tuple[int, int]:
    """How many edges a graph has, and how many of them are programmatic."""
    what = "the edges of a graph"
    error, *_, n = driver.api.cuGraphGetEdges(graph)
    if not error and n:
        error, _, _, data, _ = driver.api.cuGraphGetEdges(graph, n)
    if error:
        raise driver.failure(error, "cuGraphGetEdges", what)
    if not n:
        return 0, 0
    kind = int(driver.api.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    return n, sum(int(edge.type) == kind for edge in data[:n])


# what is captured ---------------------------------------------------------------------------------


def commands_of(issued: Issued) -> Iterator[Issued]:
    """The calls that an issued command is made of, in order."""
    if not issued.parts:
        yield issued
    for part in issued.parts:
        yield from commands_of(part)


class Tape:
    """Issues the parts of a work during a capture, and counts the nodes that each call adds."""

    def __init__(self, driver: Driver, what: str, stream: Any, work: Plannable):
        self._driver, self._what, self._stream, self._work = driver, what, stream, work
        self.nodes: tuple[int, ...] = ()  # of each node, its part
        self.made: list[list[range]] = []  # of each part, the numbers of the nodes of each call

    def __call__(self) -> None:
        get_nodes = self._driver.api.cuGraphGetNodes
        info = self._driver.api.cuStreamGetCaptureInfo(self._stream)
        if info[0]:
            raise self._driver.failure(info[0], "cuStreamGetCaptureInfo", self._what)
        graph, n = info[3], 0
        nodes: list[int] = []
        for number, part in enumerate(self._work.recorded):
            made: list[range] = []
            for issued in commands_of(part):
                try:
                    issued.call()
                except DeviceError as error:
                    raise DeviceError(
                        f"{self._what}: its command {number} cannot be captured; use plans=off. "
                        f"{error}"
                    ) from None
                now = get_nodes(graph)[2]
                made.append(range(n, now))
                nodes += [number] * (now - n)
                n = now
            self.made.append(made)
        self.nodes = tuple(nodes)


class CudaGraph(Captured):
    """See `backend/base.py`. attach, stream_of: the backend's.

    nodes_set, recaptured: how often `update` set single nodes, and captured the whole work anew.

    What a graph refers to (memory, modules, workspaces of cuBLAS) is its backend's. `destroy` does
    not wait: the driver frees an executable graph when its queued launches are over.
    """

    def __init__(
        self,
        driver: Driver,
        attach: Callable[[], None],
        work: Plannable,
        stream_of: Callable[[int], Any],
    ):
        self.nodes_set = self.recaptured = 0
        self._driver, self._attach = driver, attach
        self._what = f"plan of {len(work.parts)} commands"
        self._stream, self._stream_of = work.stream, stream_of
        self._there, self._launch = stream_of(work.stream), driver.api.cuGraphLaunch
        self._graph, tape = self._record(work)
        start = time.perf_counter_ns()
        try:
            self._executable = instantiate(driver, self._what, self._graph, self._there)
        except BaseException:
            driver.api.cuGraphDestroy(self._graph)
            raise
        self.instantiate_ns = time.perf_counter_ns() - start
        # A graph that nobody destroys goes with this object.
        self._give_back = weakref.finalize(
            self, give_back, driver.api, self._graph, self._executable
        )
        self._give_back.atexit = False  # the driver gives everything back then
        self._captured_key = work.key  # of what `_graph` was captured from
        self._nodes = _GraphNodes(driver, self._what, self._graph, self._executable)
        self.nodes, self._made = tape.nodes, tape.made

    def _record(self, work: Plannable) -> tuple[Any, Tape]:
        others = [self._stream_of(s) for s in sorted(set(work.streams) - {work.stream})]
        tape = Tape(self._driver, self._what, self._there, work)
        start = time.perf_counter_ns()
        graph = record(self._driver, self._what, self._there, others, tape)
        self.capture_ns = time.perf_counter_ns() - start
        return graph, tape

    def launch(self) -> None:
        self._attach()
        if self._executable is None:
            raise DeviceError(f"{self._what} was destroyed and cannot be launched; capture it anew")
        error = self._launch(self._executable, self._there)[0]
        if error:
            raise self._driver.failure(error, "cuGraphLaunch", self._what)

    def update(self, work: Plannable, changed: Sequence[int] | None) -> bool:
        if self._executable is None:
            raise DeviceError(f"{self._what} was destroyed and cannot be updated; capture it anew")
        self._attach()
        if work.stream != self._stream:
            return False
        if changed is not None and self._nodes.set(self._moved(work, changed)):
            self.nodes_set += 1
            return True
        return self._update_all(work)

    def _moved(self, work: Plannable, changed: Sequence[int]) -> Iterator[tuple[Issued, range]]:
        """The calls of the parts `changed`, each with the numbers of its nodes."""
        recorded = work.recorded
        for number in changed:
            yield from zip(commands_of(recorded[number]), self._made[number], strict=True)

    def _update_all(self, work: Plannable) -> bool:
        """Captures `work` and takes over everything, where the topology is the same."""
        driver = self._driver
        graph, tape = self._record(work)
        try:
            error = driver.api.cuGraphExecUpdate(self._executable, graph)[0]
        finally:
            driver.api.cuGraphDestroy(graph)
        if error == driver.api.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE:
            return False
        if error:
            raise driver.failure(error, "cuGraphExecUpdate", self._what)
        self.recaptured += 1
        self.nodes, self._made = tape.nodes, tape.made
        # Only equal commands were captured in the same order: then nodes keep their numbers.
        self._nodes.known = work.key == self._captured_key
        return True

    def destroy(self) -> None:
        if self._executable is not None:
            self._executable = None
            self._attach()
            self._give_back()

    def edges(self) -> tuple[int, int]:
        """How many edges the captured graph has, and how many of them are programmatic."""
        if self._executable is None:
            raise DeviceError(f"{self._what} was destroyed and has no edges; capture it anew")
        return edges(self._driver, self._graph)


class _GraphNodes:
    """The nodes of a captured graph, to be set one by one in its executable form.

    known: whether the n-th node of the graph is the n-th that the latest capture made.
    """

    def __init__(self, driver: Driver, what: str, graph: Any, executable: Any):
        self.known = True
        self._driver, self._what, self._graph, self._executable = driver, what, graph, executable
        self._handles: Sequence[Any] = ()
        self._params: dict[int, Any] = {}  # by number of the node

    def set(self, moved: Iterator[tuple[Issued, range]]) -> bool:
        """Gives nodes the addresses of their commands, from the next launch on. False, and nothing
        was set, where that is no matter of single nodes: products of cuBLAS, records, waits."""
        if not self.known:
            return False
        if not self._handles:
            n = self._driver.api.cuGraphGetNodes(self._graph)[2]
            self._handles = self._driver.api.cuGraphGetNodes(self._graph, n)[1]
        calls: list[tuple[str, tuple[Any, ...]]] = []
        for issued, numbers in moved:
            found = self._call(issued, numbers)
            if found is None:
                return False
            calls.append(found)
        for function, args in calls:
            error = getattr(self._driver.api, function)(self._executable, *args)[0]
            if error and function == _SET_COPY:
                return False  # memory of another kind; a new capture sets what was set until here
            if error:
                raise self._driver.failure(error, function, self._what)
        return True

    def _call(self, issued: Issued, numbers: range) -> tuple[str, tuple[Any, ...]] | None:
        """The function that sets the node of a command, and its arguments behind the graph."""
        if len(numbers) != 1:
            return None
        (number,) = numbers
        node, block = self._handles[number], issued.block
        if isinstance(block, LandingBlock):
            block = block.current
        if isinstance(block, GraphArguments):
            params = self._params.get(number) or self._kernel(node, block)
            if params is not None:
                self._params[number] = params
                params.kernelParams = block.params
                return _SET_KERNEL, (node, params)
        elif issued.same[0] in COPIES:
            params = self._params.get(number) or self._copy(node)
            if params is not None:
                self._params[number] = params
                _point(self._driver.api, params, *issued.addresses)
                return _SET_COPY, (node, params, self._driver.context)
        return None

    def _kernel(self, node: Any, block: GraphArguments) -> Any:
        """Parameters of the node of a launch; None where the node is of another launch."""
        error, params = self._driver.api.cuGraphKernelNodeGetParams(node)
        same = not error and int(params.func) == int(block.function) and block.grid == (
            params.gridDimX, params.gridDimY
        )  # fmt: skip
        return params if same else None

    def _copy(self, node: Any) -> Any:
        error, params = self._driver.api.cuGraphMemcpyNodeGetParams(node)
        return None if error else params


_SET_KERNEL, _SET_COPY = "cuGraphExecKernelNodeSetParams", "cuGraphExecMemcpyNodeSetParams"


def _point(api: Any, params: Any, dst: int, src: int) -> None:
    """Lets a CUDA_MEMCPY3D copy from and to other memory of the same kinds."""
    on_host = api.CUmemorytype.CU_MEMORYTYPE_HOST
    if params.dstMemoryType == on_host:
        params.dstHost = dst
    else:
        params.dstDevice = api.CUdeviceptr(dst)
    if params.srcMemoryType == on_host:
        params.srcHost = src
    else:
        params.srcDevice = api.CUdeviceptr(src)
    params.dstXInBytes = params.srcXInBytes = 0
