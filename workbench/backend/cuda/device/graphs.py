"""Plans of the cuda backend: CUDA graphs, captured from the calls of prepared commands.

A plan is captured once. The captured graph is kept beside its executable forms (`graph_nodes.py`):
the form of the capture, and a form for each twin, with other addresses at single nodes. An update
that needs a new capture sets every parameter.

All calls go through cuda-bindings on CuPy's stream pointers. Importing this module loads
neither CuPy nor the driver.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
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
from workbench.common.collector import nothing_collected
from workbench.common.errors import DeviceError


def _order(
    driver: Driver, what: str, first: Sequence[Any], then: Sequence[Any], events: Sequence[Any]
) -> None:
    """Makes each stream of `then` wait for the stream of `first` with the same index."""
    for before, after, event in zip(first, then, events, strict=True):
        driver.call("cuEventRecord", what, event.handle, before)
        driver.call("cuStreamWaitEvent", what, after, event.handle, 0)


class Tape:
    """Issues the parts of `work` during a capture, and notes the nodes that each call adds."""

    def __init__(self, driver: Driver, what: str, stream: Any, work: Plannable):
        self._driver, self._what, self._stream, self._work = driver, what, stream, work
        self.nodes: tuple[int, ...] = ()  # for each node, its part
        self.made: list[list[range]] = []  # for each part, the numbers of the nodes of each call

    def issue(self) -> None:
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
        """Issues the command that tells the host of the end, where the work has such a command."""
        if self._work.end is not None:
            self._work.end()
            self.nodes = (*self.nodes, NO_PART)


class Owner(NamedTuple):
    """The parts of a backend that a graph uses.

    driver: the backend's driver.
    stream_of: the CUstream of a stream's number.
    graphs: all living graphs of the backend.
    """

    driver: Driver
    stream_of: Callable[[int], Any]
    graphs: weakref.WeakSet[CudaGraph]

    def record(self, what: str, work: Plannable) -> tuple[Any, Tape]:
        """The graph of `work`, none of which runs, and the tape that knows the part of each node.
        The graph begins and ends on the stream of `work`; other streams fork from it, and join it.

        Raises DeviceError where the driver refuses, and every error of the parts. The streams have
        then left the capture, and no graph remains.
        """
        driver, stream = self.driver, self.stream_of(work.stream)
        others = [self.stream_of(s) for s in sorted(set(work.streams) - {work.stream})]
        tape = Tape(driver, what, stream, work)
        # Python may free device memory at any moment, and a library may load code. Only the
        # relaxed mode allows this during a capture. The collector would wait for the device before
        # it frees pinned memory, and such a wait would end the capture.
        mode = driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        with CAPTURES, nothing_collected():
            driver.call("cuStreamBeginCapture", what, stream, mode)
            try:
                events = [driver.event() for _ in others]
                _order(driver, what, [stream] * len(events), others, events)
                tape.issue()
                _order(driver, what, others, [stream] * len(events), events)
                tape.end()
            except BaseException:
                # The streams must leave the capture, in whatever state the failure left it.
                _, graph = driver.api.cuStreamEndCapture(stream)
                if graph is not None and int(graph):
                    driver.api.cuGraphDestroy(graph)
                raise
            return driver.call("cuStreamEndCapture", what, stream), tape


def capture(owner: Owner, work: Plannable) -> CudaGraph:
    """Records `work` and makes it launchable. Raises DeviceError; no graph remains then."""
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
    """An executable form of a template, which may have several; see `backend/base.py`.

    moved: the parts that have other addresses than in the template.
    changes: set the nodes of these parts.
    nodes_set: how often `update` set single nodes.
    recaptured: how often `update` captured the whole work anew.

    The backend owns all that a graph refers to: memory, modules, workspaces of cuBLAS. `destroy`
    does not wait. The driver frees an executable graph when its queued launches have ended.
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
        self._moved: frozenset[int] | None = moved  # None: every part may have moved
        self._known = True  # whether nodes have the same numbers as in the template
        call, start = self._driver.call, time.perf_counter_ns()
        executable = call("cuGraphInstantiate", self._what, template.graph, 0)
        try:
            template.apply(changes, executable)
            call("cuGraphUpload", self._what, executable, self._there)
        except BaseException:
            self._driver.api.cuGraphExecDestroy(executable)
            raise
        self.instantiate_ns = time.perf_counter_ns() - start
        # Also frees the executable form where nobody calls `destroy`.
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
        self._driver.attach()
        if self._executable is None:
            self._alive("cannot be launched")
        error = self._launch(self._executable, self._there)[0]
        if error:
            raise self._driver.failure(error, "cuGraphLaunch", self._what)

    def update(self, work: Plannable, changed: Sequence[int] | None) -> bool:
        template = self._alive("cannot be updated")
        self._driver.attach()
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
        self._driver.attach()
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
        """Captures `work` and takes over every parameter, where the topology is the same."""
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
        # Nodes keep their numbers only where equal commands were captured in the same order.
        self._known = changed_parts(template.identity, work.identity) is not None
        return True

    def destroy(self) -> None:
        if self.template is not None:
            self._executable = None
            self._driver.attach()
            self._give_back()
            self.template = None

    def edges(self) -> tuple[int, int]:
        """How many edges the captured graph has, and how many of them are programmatic."""
        return edges(self._driver, self._alive("has no edges").graph)


def _give_back(api: Any, executable: Any, template: Template) -> None:
    """The end of an executable form. The driver frees it when its queued launches have ended."""
    api.cuGraphExecDestroy(executable)
    template.release()
