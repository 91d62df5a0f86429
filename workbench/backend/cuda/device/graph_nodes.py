"""A captured CUDA graph, from which executable forms are made, and changes of single nodes.

The captured graph is never changed. It gives the edges, and the handle that names a node in every
executable form. A new executable form begins with the parameters of the captured graph.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from workbench.backend.cuda.device.driver import Driver
from workbench.backend.issue.bind import LandingBlock
from workbench.backend.issue.issued import Identity, Issued, Plannable, Words
from workbench.common.errors import DeviceError

COPIES = ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync")
_SET_KERNEL, _SET_COPY = "cuGraphExecKernelNodeSetParams", "cuGraphExecMemcpyNodeSetParams"

Change = tuple[str, tuple[Any, ...]]  # the function that sets a node, its arguments


class OtherMemoryError(DeviceError):
    """The driver refuses to set a copy node, because the new memory is of another kind."""


@functools.cache
def _words(n: int) -> Any:
    """The type of n words. A new type for every block would be a cycle for the collector."""
    return ctypes.c_int64 * n


class GraphArguments(Words):
    """The argument block of a kernel launch.

    arguments: n values of 8 bytes, followed by the n addresses of these values.
    params: the address of the n addresses, which the driver calls kernelParams.
    function, grid: of the launch.
    """

    __slots__ = ("function", "grid", "params")

    def __init__(
        self,
        arguments: Any,
        n: int,
        pointers: tuple[int, ...],
        function: Any,
        grid: tuple[int, int],
    ):
        super().__init__(_words(n).from_buffer(arguments), pointers)
        self.params = ctypes.addressof(arguments) + 8 * n
        self.function, self.grid = function, grid

    def taken(self) -> bytes:
        return bytes(self._words)


def commands_of(issued: Issued) -> Iterator[Issued]:
    """The calls that an issued command is made of, in order."""
    if not issued.parts:
        yield issued
    for part in issued.parts:
        yield from commands_of(part)


class Template:
    """A graph as it was captured. It is destroyed with the last of its executable forms.

    what: the graph's name in messages.
    identity: of the work that was captured.
    nodes: for each node, its part.
    made: for each part, the numbers of the nodes of each of its calls.
    n_forms: how many executable forms exist.
    """

    def __init__(
        self,
        driver: Driver,
        what: str,
        graph: Any,
        identity: Identity,
        nodes: tuple[int, ...],
        made: Sequence[Sequence[range]],
    ):
        self.what, self.graph, self.identity, self.nodes = what, graph, identity, nodes
        self._driver, self._made = driver, made
        self._handles: Sequence[Any] = ()
        self._params: dict[int, Any] = {}  # node number -> parameters
        self.n_forms = 0

    def release(self) -> None:
        """Counts an executable form less, because the form was destroyed."""
        self.n_forms -= 1
        if self.n_forms <= 0:
            self._driver.api.cuGraphDestroy(self.graph)

    def changes(self, work: Plannable, parts: Sequence[int]) -> list[Change] | None:
        """The changes that give the nodes of `parts` the addresses that `work` has there. Apply
        them at once. None where setting single nodes does not do: products of cuBLAS, records,
        waits."""
        if not self._handles:
            n = self._driver.api.cuGraphGetNodes(self.graph)[2]
            self._handles = self._driver.api.cuGraphGetNodes(self.graph, n)[1]
        changes: list[Change] = []
        recorded = work.recorded
        for part in parts:
            for issued, numbers in zip(commands_of(recorded[part]), self._made[part], strict=True):
                found = self._change(issued, numbers)
                if found is None:
                    return None
                changes.append(found)
        return changes

    def apply(self, changes: Sequence[Change], executable: Any) -> None:
        """Sets nodes in an executable form. Its next launch uses them.

        Raises OtherMemoryError where the driver refuses to set a copy, else DeviceError. The nodes
        of earlier changes are then set.
        """
        for function, args in changes:
            error = getattr(self._driver.api, function)(executable, *args)[0]
            if error:
                failure = self._driver.failure(error, function, self.what)
                raise OtherMemoryError(str(failure)) if function == _SET_COPY else failure

    def _change(self, issued: Issued, numbers: range) -> Change | None:
        """The function that sets the node of a command, and its arguments after the graph."""
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
        """Parameters of the node of a launch; None where the node belongs to another launch."""
        error, params = self._driver.api.cuGraphKernelNodeGetParams(node)
        same = not error and int(params.func) == int(block.function) and block.grid == (
            params.gridDimX, params.gridDimY
        )  # fmt: skip
        return params if same else None

    def _copy(self, node: Any) -> Any:
        error, params = self._driver.api.cuGraphMemcpyNodeGetParams(node)
        return None if error else params


def _point(api: Any, params: Any, dst: int, src: int) -> None:
    """Gives a CUDA_MEMCPY3D other addresses, in memory of the same kinds."""
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
