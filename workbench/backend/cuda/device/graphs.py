"""Plans of the cuda backend: CUDA graphs, captured from the calls of prepared commands.

The captured graph is kept beside its executable forms (`graph_nodes.py`). The capture has one, and
each twin one with other addresses at single nodes. An update that is captured anew brings every
parameter along.

Everything goes through cuda-bindings on CuPy's stream pointers. Importing this module loads
neither CuPy nor the driver.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from workbench.backend.base import NO_PART, Captured
from workbench.backend.cuda.device.driver import CAPTURES, Driver
from workbench.backend.cuda.device.graph_nodes import (
    Change,
    OtherMemoryError,
    Template,
    commands_of,
    edges,
)
from workbench.backend.issue.issued import Plannable
from workbench.backend.issue.issued import changed as changed_parts
from workbench.common.errors import DeviceError

# the capture ------------------------------------------------------------------------------------


def record(
    driver: Driver,
    what: str,
    stream: Any,
    others: Sequence[Any],
    issue: Callable[[], None],
    end: Callable[[], None] = lambda: None,
) -> Any:
    """The graph of what `issue` queues on the CUstream `stream`, and on `others`, which begin with
    it and end in it; and of what `end` queues on `stream` behind all of them. Nothing runs. what:
    for messages.

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
            end()
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


def instantiate(
    driver: Driver,
    what: str,
    graph: Any,
    stream: Any,
    finish: Callable[[Any], None] = lambda executable: None,
) -> Any:
    """The executable form of `graph`, on its way to the device; `finish` is called with it before.
    Raises DeviceError, and what `finish` raises."""
    executable = driver.call("cuGraphInstantiate", what, graph, 0)
    try:
        finish(executable)
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


# what is captured ---------------------------------------------------------------------------------


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

    def end(self) -> None:
        """What tells the host that all of it is over, where the work has that."""
        if self._work.end is not None:
            self._work.end()
            self.nodes = (*self.nodes, NO_PART)


class Owner(NamedTuple):
    """What a graph has of its backend. stream_of: a stream's CUstream. graphs: all that live."""

    driver: Driver
    attach: Callable[[], None]
    stream_of: Callable[[int], Any]
    graphs: weakref.WeakSet[CudaGraph]

    def record(self, what: str, work: Plannable) -> tuple[Any, Tape]:
        """The graph of `work`, and which part made which of its nodes."""
        there = self.stream_of(work.stream)
        others = [self.stream_of(s) for s in sorted(set(work.streams) - {work.stream})]
        tape = Tape(self.driver, what, there, work)
        return record(self.driver, what, there, others, tape, tape.end), tape


def capture(owner: Owner, work: Plannable) -> CudaGraph:
    """Records `work` and makes it launchable. Raises DeviceError; nothing stays behind then."""
    what, identity = f"plan of {len(work.parts)} commands", work.identity
    start = time.perf_counter_ns()
    graph, tape = owner.record(what, work)
    taken = time.perf_counter_ns() - start
    template = Template(owner.driver, what, graph, identity, tape.nodes, tape.made)
    try:
        made = CudaGraph(owner, template, work.stream)
    except BaseException:
        template.release()
        raise
    made.capture_ns = taken
    return made


class CudaGraph(Captured):
    """See `backend/base.py`: an executable form of a template, which may have several.

    changes: what sets the nodes of the parts `moved`, where they are not as in the template.
    nodes_set, recaptured: how often `update` set single nodes, and captured the whole work anew.

    What a graph refers to (memory, modules, workspaces of cuBLAS) is its backend's. `destroy` does
    not wait: the driver frees an executable graph when its queued launches are over.
    """

    def __init__(
        self,
        owner: Owner,
        template: Template,
        stream: int,
        moved: frozenset[int] = frozenset(),
        changes: Sequence[Change] = (),
    ):
        self.nodes_set = self.recaptured = 0
        self.owner, self._driver, self._what = owner, owner.driver, template.what
        self._stream, self._there = stream, owner.stream_of(stream)
        self._launch = self._driver.api.cuGraphLaunch
        self.template: Template | None = template
        self._moved: frozenset[int] | None = moved  # None where every part may have moved
        self._known = True  # whether nodes have the numbers that they have in the template
        start = time.perf_counter_ns()

        def set_nodes(executable: Any) -> None:
            template.apply(changes, executable)

        executable = instantiate(
            self._driver, self._what, template.graph, self._there, set_nodes
        )  # fmt: skip
        self.instantiate_ns = time.perf_counter_ns() - start
        # A graph that nobody destroys goes with this object.
        template.n_forms += 1
        self._give_back = weakref.finalize(self, _give_back, self._driver.api, executable, template)
        self._give_back.atexit = False  # the driver gives everything back then
        self._executable, self.nodes = executable, template.nodes
        owner.graphs.add(self)

    def _alive(self, asked: str) -> Template:
        if self.template is None:
            raise DeviceError(f"{self._what} was destroyed and {asked}; capture it anew")
        return self.template

    def launch(self) -> None:
        self.owner.attach()
        if self._executable is None:
            self._alive("cannot be launched")
        error = self._launch(self._executable, self._there)[0]
        if error:
            raise self._driver.failure(error, "cuGraphLaunch", self._what)

    def update(self, work: Plannable, changed: Sequence[int] | None) -> bool:
        template = self._alive("cannot be updated")
        self.owner.attach()
        if work.stream != self._stream:
            return False
        changes = None
        if changed is not None and self._known:
            changes = template.changes(work, changed)
        if changes is None:
            return self._update_all(work)
        try:
            template.apply(changes, self._executable)
        except OtherMemoryError:
            return self._update_all(work)
        if self._moved is not None:
            self._moved = self._moved.union(changed or ())
        self.nodes_set += 1
        return True

    def twin(self, work: Plannable, changed: Sequence[int]) -> CudaGraph | None:
        template = self._alive("cannot have a twin")
        self.owner.attach()
        if work.stream != self._stream or self._moved is None:
            return None
        moved = self._moved.union(changed)
        changes = template.changes(work, sorted(moved))
        if changes is None:
            return None
        try:
            return CudaGraph(self.owner, template, self._stream, moved, changes)
        except OtherMemoryError:
            return None

    def _update_all(self, work: Plannable) -> bool:
        """Captures `work` and takes over everything, where the topology is the same."""
        driver, template = self._driver, self._alive("cannot be updated")
        start = time.perf_counter_ns()
        graph, tape = self.owner.record(self._what, work)
        self.capture_ns = time.perf_counter_ns() - start
        try:
            error = driver.api.cuGraphExecUpdate(self._executable, graph)[0]
        finally:
            driver.api.cuGraphDestroy(graph)
        if error == driver.api.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE:
            return False
        if error:
            raise driver.failure(error, "cuGraphExecUpdate", self._what)
        self.recaptured += 1
        self.nodes, self._moved = tape.nodes, None
        # Only equal commands were captured in the same order: then nodes keep their numbers.
        self._known = changed_parts(template.identity, work.identity) is not None
        return True

    def destroy(self) -> None:
        if self.template is not None:
            self._executable = None
            self.owner.attach()
            self._give_back()
            self.template = None

    def edges(self) -> tuple[int, int]:
        """How many edges the captured graph has, and how many of them are programmatic."""
        return edges(self._driver, self._alive("has no edges").graph)


def _give_back(api: Any, executable: Any, template: Template) -> None:
    """The driver frees an executable form behind its queued launches."""
    api.cuGraphExecDestroy(executable)
    template.release()
