"""Notes: each kernel of a program writes down when it ran, by the device's own clock.

A kernel that notes has a note of its own in device memory:

    note    cell 0      | cell 1      | .. | cell 63
    cell    begin, ~end                       words of 8 bytes, ns; all bits set where nobody wrote

A begin is the earliest of a cell's blocks, an end the latest of its threads. (The end is stored as
its complement, so that both words only ever sink.) The host reads and resets the notes between two
steps, when nothing runs. So a step has no more commands than without notes, and a captured plan
keeps its notes.

A launch that begins early (`pdl`) waits on the device for the launch before it. That wait does not
count: here, no kernel begins before the kernel before it on its stream has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from workbench.backend.base import Backend, Memory
from workbench.backend.issue.args import AddressOf
from workbench.backend.issue.bind import Launching
from workbench.backend.issue.issued import Issued
from workbench.common.errors import DeviceError
from workbench.common.progress import HIDDEN
from workbench.graph.ir import Node
from workbench.program.commands import COMPUTE_STREAM, Launch, Program, Space

CELLS, CELL_WORDS = 64, 2  # as in kernels/launch_span.cuh
NOTE_BYTES = 8 * CELL_WORDS * CELLS


class NotedKernel(NamedTuple):
    """A kernel of a launch.

    number: of the launch, or of its plan, among the program's commands.
    part: the number of the launch in its plan, if it is in one.
    function: the kernel's name.
    note: the number of its note on its backend.
    """

    number: int
    part: int | None
    command: Launch
    function: str
    note: int


class NotedSpan(NamedTuple):
    """When a kernel ran, in ns of its device's clock."""

    kernel: NotedKernel
    begin_ns: int
    end_ns: int


class LaunchNotes(Launching):
    """The notes of one program on its backends.

    kernels: all kernels that note, in the order of their launches.
    n_silent: how many kernels of libraries there are, which note nothing.
    """

    def __init__(self, program: Program, backends: Sequence[Backend]):
        self._backends = backends
        self.kernels: list[NotedKernel] = []
        self.n_silent = 0
        self._first: dict[Launch, int] = {}  # a launch's first note
        self._n = [0] * len(backends)
        noted: list[list[Node]] = [[] for _ in backends]
        for _, number, command, part in program.located():
            if not isinstance(command, Launch) or command.by_host:
                continue
            if backends[command.stream.backend].note_bytes:
                self._seat(number, part, command)
                noted[command.stream.backend].append(command.node)
        for backend, nodes in zip(backends, noted, strict=True):
            if nodes:
                backend.make_ready(nodes, HIDDEN, noted=True)
        self._device: dict[int, Memory] = {}
        self._host: dict[int, Memory] = {}
        self._unwritten: dict[int, Memory] = {}
        try:
            for b, n in enumerate(self._n):
                if n:
                    self._allocate(b, n)
        except BaseException:
            self.free()
            raise

    def _seat(self, number: int, part: int | None, command: Launch) -> None:
        b = command.stream.backend
        self._first[command] = self._n[b]
        for kernel in self._backends[b].kernels_of(command.node) or ():
            if kernel.function is None:
                self.n_silent += 1
            else:
                noted = NotedKernel(number, part, command, kernel.function, self._n[b])
                self.kernels.append(noted)
                self._n[b] += 1

    def _allocate(self, b: int, n: int) -> None:
        backend = self._backends[b]
        nbytes = n * backend.note_bytes
        self._device[b] = backend.allocate(nbytes, Space.DEVICE)
        self._host[b] = backend.allocate(nbytes, Space.PINNED)
        self._unwritten[b] = unwritten = backend.allocate(nbytes, Space.PINNED)
        assert unwritten.array is not None, "pinned memory is the host's too"
        unwritten.array[:] = 0xFF

    def launch(self, backend: Backend, c: Launch, address_of: AddressOf, scratch: int) -> Issued:
        """See `Launching`."""
        memory = self._device.get(c.stream.backend)
        if memory is None or not backend.note_bytes:
            return super().launch(backend, c, address_of, scratch)
        notes = memory.address + self._first[c] * backend.note_bytes
        return backend.launch_noted(c.node, address_of, scratch, c.stream.id, c.programmatic, notes)

    def reset(self) -> None:
        """Empties every note. Call it while nothing of the program is queued."""
        for b, memory in self._device.items():
            self._copied(b, memory, self._unwritten[b], to_host=False)

    def read(self) -> list[NotedSpan]:
        """When each kernel ran in the program's latest run, which is over. Raises DeviceError where
        a kernel has not run since `reset`."""
        found: dict[int, np.ndarray] = {}
        for b, memory in self._host.items():
            self._copied(b, memory, self._device[b], to_host=True)
            assert memory.array is not None, "pinned memory is the host's too"
            found[b] = times_of(memory.array)
        return list(self._spans(found))

    def _spans(self, found: dict[int, np.ndarray]) -> Iterator[NotedSpan]:
        """found: the times of the notes of each backend."""
        before: dict[tuple[int, int], int] = {}  # end of the latest kernel of a stream
        for kernel in self.kernels:
            stream = kernel.command.stream
            begin, end = (int(time) for time in found[stream.backend][kernel.note])
            if begin > end:
                raise DeviceError(
                    f"kernel {kernel.function} of {kernel.command.node.name} noted no time in the "
                    "latest step; reset the notes, and run the step again"
                )
            begin = max(begin, before.get(stream, 0))
            before[stream] = end = max(begin, end)
            yield NotedSpan(kernel, begin, end)

    def _copied(self, b: int, dst: Memory, src: Memory, to_host: bool) -> None:
        backend = self._backends[b]
        backend.attach()
        backend.copy(dst.address, src.address, dst.nbytes, COMPUTE_STREAM, to_host)()
        backend.sync_stream(COMPUTE_STREAM)()

    def free(self) -> None:
        """Gives the memory back. Call it when nothing is queued any more."""
        for memories in (self._device, self._host, self._unwritten):
            for memory in memories.values():
                memory.free()
            memories.clear()


def times_of(notes: np.ndarray) -> np.ndarray:
    """The begin and end of each note, in ns: uint64 (n, 2). Of a note that nobody wrote, the begin
    is after the end. notes: the bytes of n notes."""
    words = notes.view(np.uint64).reshape(-1, CELLS, CELL_WORDS).min(axis=1)
    words[:, 1] = ~words[:, 1]
    return words
