"""Timing of short kernels, by replays of a CUDA graph, and the rate at which kernels read memory.

A kernel of a few microseconds cannot be timed between two events, because the host needs as long to
launch it. A graph holds many launches and is launched once, so the device runs at its own speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from workbench.backend.base import Captured, Issue
from workbench.backend.cuda.kernels.kernel import Kernel, blocks
from workbench.backend.issue.bind import plannable
from workbench.backend.issue.issued import Issued
from workbench.common.errors import DeviceError, UsageError
from workbench.program.commands import COMPUTE_STREAM, Space

if TYPE_CHECKING:
    from workbench.backend.cuda.device.backend import CudaBackend

READ_THREADS, WORD_BYTES = 256, 16  # of kernels/read.cu
READ_WORDS = (4, 8, 16)  # read_4, read_8, read_16: words that a thread reads in one round
READ_GRIDS = (4, 8, 16, 32, 0)  # blocks a multiprocessor; 0: a block for each tile
READ_BYTES = 4 << 30  # read in one replay


class TimedReplay(AbstractContextManager["TimedReplay"]):
    """A graph of `issues`, captured in order from the compute stream, that can be replayed.

    The memory and kernels of the issues must live as long as the replay. Only one thread may use
    it. `close`, or the end of a `with`, gives everything back.

    Raises UsageError where `issues` is empty or the stream is already being captured, and
    DeviceError where an issue does something that a capture forbids.
    """

    def __init__(self, backend: CudaBackend, issues: Sequence[Issue]):
        self._driver, stream = backend._driver, COMPUTE_STREAM
        self._stream = backend._stream(stream)
        self._what = f"replay of {len(issues)} launches"
        self._graph: Captured | None = None
        self._events: list[Any] = []
        if not issues:
            raise UsageError("a replay of no launches; give at least one")
        status = self._call("cuStreamIsCapturing", self._stream)
        if status != self._driver.api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            raise UsageError(f"stream {stream} is being captured already; end that capture first")
        # The first launch of a product loads code, and a capture forbids that.
        for issue in dict.fromkeys(issues):
            issue()
        self._call("cuStreamSynchronize", self._stream)
        # they own the memory that the graph names
        self._parts = [Issued(issue, ("timed",)) for issue in issues]
        work = plannable(backend, self._parts, stream, [stream] * len(issues))
        self._graph = backend.capture(work)

    def _call(self, function: str, *args: Any) -> Any:
        return self._driver.call(function, self._what, *args)

    def _queue(self) -> None:
        if self._graph is None:
            raise UsageError(f"{self._what} is closed; capture again")
        self._graph.launch()

    def run(self, n: int = 1) -> None:
        """Replays n times, then waits."""
        for _ in range(n):
            self._queue()
        self._call("cuStreamSynchronize", self._stream)

    def time_us(self, n: int) -> list[float]:
        """The device's time for each of n replays, in us, from timing events between them.

        One more replay runs before them and is not timed. The host queues all others while the
        device runs that replay, so the times include no time of the host.
        """
        while len(self._events) <= n:
            self._events.append(self._driver.event(timing=True))
        self._queue()
        self._call("cuEventRecord", self._events[0].handle, self._stream)
        for i in range(n):
            self._queue()
            self._call("cuEventRecord", self._events[i + 1].handle, self._stream)
        self._call("cuStreamSynchronize", self._stream)
        handles = [event.handle for event in self._events[: n + 1]]
        return [
            self._call("cuEventElapsedTime", begin, end) * 1e3 for begin, end in pairwise(handles)
        ]

    def close(self) -> None:
        """Waits for what is queued, then destroys the graph and the events. Safe to call twice."""
        graph, self._graph = self._graph, None
        if graph is not None:
            self._driver.api.cuStreamSynchronize(self._stream)  # another call reports a failure
            graph.destroy()
        self._events.clear()
        self._parts.clear()

    def __exit__(self, *error: object) -> None:
        self.close()


def l2_bytes(backend: CudaBackend) -> int:
    """Bytes of the last cache before memory."""
    return int(backend._driver.properties["l2CacheSize"])


def read_rates(backend: CudaBackend, nbytes: int = READ_BYTES, n: int = 5) -> dict[str, float]:
    """GB/s at which each of several kernels reads memory: the fastest of n replays of `nbytes`.

    Keys name kernel and grid: `read_8 x16` has 16 blocks for each multiprocessor, `read_8 tiles`
    has a block for each tile. Where the device has no room for `nbytes`, one replay reads a smaller
    buffer several times. The smallest buffer has 8 times the size of the L2 cache. Raises
    DeviceError where it does not fit.
    """
    memory = _room(backend, nbytes, 8 * l2_bytes(backend))
    sink = backend.allocate(4, Space.DEVICE)
    n_words, times = memory.nbytes // WORD_BYTES, blocks(nbytes, memory.nbytes)
    stream = backend._stream(COMPUTE_STREAM)
    n_sm = backend._driver.properties["multiProcessorCount"]
    rates: dict[str, float] = {}
    try:
        for words in READ_WORDS:
            tiles = blocks(n_words, READ_THREADS * words)
            for per_sm in READ_GRIDS:
                grid = min(per_sm * n_sm or tiles, tiles)
                kernel = Kernel(
                    "read", f"read_{words}", (grid, 1), READ_THREADS,
                    [memory.address, n_words, -1, sink.address], waits=True,
                )  # fmt: skip
                name = f"read_{words} " + (f"x{per_sm}" if per_sm else "tiles")
                issue = backend._prepare(kernel, stream, name)
                with TimedReplay(backend, [issue] * times) as replay:
                    us = min(replay.time_us(n))
                rates[name] = times * n_words * WORD_BYTES / us / 1e3
    finally:
        backend.synchronize()
        memory.free()
        sink.free()
    return rates


def _room(backend: CudaBackend, nbytes: int, least: int) -> Any:
    """Device memory of `nbytes`, or of a half, a quarter and so on where there is less."""
    while True:
        try:
            return backend.allocate(nbytes, Space.DEVICE)
        except DeviceError:
            if nbytes // 2 < least:
                raise
            nbytes //= 2
