"""A backend under check: rows of memory, and long work that the checks of `conformance` queue
commands behind.

Long work is a chain of launches that counts: each adds 1 to the float32 numbers that the one before
has made. How far a stream has come can be read off its count. So a command that overtakes is caught
with a number too small; and where something need not wait, a glance at the count must find the long
work unfinished, in one of TRIES tries.

A check that fails is to be about the clause it checks, and not about how it was prepared on a
backend whose waits lie: so setting up and reading back also settle for SETTLE_S.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from workbench.backend.base import Backend, Issue, Memory
from workbench.backend.issue.issued import in_order
from workbench.graph.ir import F32, Tensor
from workbench.graph.ops import make
from workbench.program.commands import Space

COLS = 4096  # of a row: 16 KiB, of the size of a step's copies
ROW_BYTES = 4 * COLS
LONG_S = 0.03
LAUNCH_S = 40e-6  # a launch of the long work takes this or more, many times what issuing it takes
LEAST_ROWS, MOST_ROWS = 256, 4096  # of such a launch: 4 to 64 MiB
MOST_PAIRS = 500
SETTLE_S = 0.01
TRIES = 5

Open = Callable[[], Backend]


class Broken(AssertionError):
    """What a backend did wrong, in one line."""


class Rig:
    """A backend and what checks need on it; `close` gives everything back.

    A *row* is COLS float32 numbers, all alike unless a copy was torn.
    """

    def __init__(self, open_backend: Open):
        self.open = open_backend
        self.backend = open_backend()
        self.able = self.backend.capabilities
        self.streams = range(max(1, self.able.n_streams))
        self._memory: list[Memory] = []
        # of the long work: rows of a launch, pairs of launches, the two blocks it counts in, a pair
        # of launches on each stream, and the number it has reached when all of it is done
        self._rows = self._pairs = self._count = 0
        self._blocks: list[Memory] = []
        self._issues: dict[int, Issue] = {}
        self.ones = self.device(1.0)  # what every launch adds

    def close(self) -> None:
        self.settle()
        for memory in self._memory:
            memory.free()
        self.backend.close()

    def other(self, stream: int) -> int:
        """A stream that is not `stream`."""
        return (stream + 1) % len(self.streams)

    # memory --------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, space: Space) -> Memory:
        memory = self.backend.allocate(nbytes, space)
        self._memory.append(memory)
        return memory

    def host(self, value: float = 0.0, space: Space = Space.PINNED) -> Memory:
        """A row of `value` in memory that the host sees."""
        memory = self.allocate(ROW_BYTES, space)
        numbers(memory)[:] = value
        return memory

    def device(self, value: float | None = None) -> Memory:
        """A row in device memory, of `value` or as it was allocated."""
        memory = self.allocate(ROW_BYTES, Space.DEVICE)
        if value is not None:
            self.up(memory, self.host(value), 0)()
            self.settle()
        return memory

    def fetch(self, memory: Memory) -> np.ndarray:
        """What a device row holds once nothing is under way."""
        self.settle()
        return self.peek(memory, 0)

    def peek(self, memory: Memory, stream: int) -> np.ndarray:
        """What a device row holds now; `stream` must be free to copy it."""
        landing = self.host(-1.0)
        self.down(landing, memory, stream)()
        self.backend.sync_stream(stream)()
        time.sleep(SETTLE_S)
        return numbers(landing).copy()

    def settle(self) -> None:
        """Waits until nothing is under way, also on a backend whose waits do not."""
        for stream in self.streams:
            self.backend.sync_stream(stream)()
        self.backend.synchronize()
        time.sleep(SETTLE_S)

    # commands ------------------------------------------------------------------------------------

    def up(self, to: Memory, source: Memory, stream: int) -> Issue:
        """A copy of a row from the host."""
        return self.backend.copy(to.address, source.address, ROW_BYTES, stream, to_host=False)

    def down(self, to: Memory, source: Memory, stream: int) -> Issue:
        """A copy of a row to the host."""
        return self.backend.copy(to.address, source.address, ROW_BYTES, stream, to_host=True)

    def brought(self, stream: int) -> tuple[np.ndarray, Issue]:
        """Numbers of the host, and a copy that brings 7s there."""
        landing = self.host()
        return numbers(landing), self.down(landing, self.device(7.0), stream)

    def taken(
        self, value: float, stream: int, space: Space = Space.PINNED
    ) -> tuple[np.ndarray, Memory, Issue]:
        """Numbers of the host, a device row, and a copy from the one to the other."""
        source, there = self.host(value, space), self.device()
        return numbers(source), there, self.up(there, source, stream)

    def uploads(self, stream: int) -> Issue:
        """A copy to a row that nobody looks at."""
        return self.taken(7.0, stream)[2]

    def launch(self, to: Memory, source: Memory, stream: int, rows: int = 1) -> Issue:
        """A launch: to = source + 1, or + what `ones` holds when it runs."""
        x, one = Tensor("x", F32, (rows, COLS)), Tensor("one", F32, (COLS,))
        node = make("add", "sum", x, one)
        memory = {x: source, one: self.ones, node.output: to}
        return self.backend.launch(node, lambda t: memory[t].address, 0, stream)

    def point(self, stream: int, waiting: int) -> tuple[Issue, Issue, Issue]:
        """Record of a new event on `stream`, Sync of it, and Wait for it on another."""
        event, of = self.backend.event(), self.backend
        return of.record(event, stream), of.sync_event(event), of.wait(event, waiting)

    # long work -----------------------------------------------------------------------------------

    @property
    def counter(self) -> Memory:
        """The device row that long work counts in."""
        if not self._pairs:
            self._measure()
        return self._blocks[0]

    def long(self, stream: int) -> float:
        """Queues long work on `stream`; returns the number that `counter` ends with.

        That on another stream must have been waited for.
        """
        if not self._pairs:
            self._measure()
        self._queue(stream, self._pairs)
        return float(self._count)

    @property
    def loads(self) -> tuple[Callable[[int], object], ...]:
        """What a check puts before its commands on a stream: nothing, for what comes late must be
        missed; and long work, for what comes early must be caught."""
        return lambda stream: self.settle(), self.long

    def _queue(self, stream: int, pairs: int) -> None:
        """Queues launches from one block to the other and back."""
        if stream not in self._issues:
            a, b = self._blocks
            there = self.launch(b, a, stream, self._rows)
            self._issues[stream] = in_order([there, self.launch(a, b, stream, self._rows)])
        for _ in range(pairs):
            self._issues[stream]()
        self._count += 2 * pairs

    def _measure(self) -> None:
        """Chooses how large a launch of the long work is, then how many there are."""
        self._rows = LEAST_ROWS
        while True:
            nbytes = self._rows * ROW_BYTES
            self._blocks = [self.allocate(nbytes, Space.DEVICE) for _ in range(2)]
            self._issues, self._count = {}, 0
            self._time(1)  # the first launches find memory that nobody has touched
            took = self._time(2) / 4
            if took >= LAUNCH_S or self._rows >= MOST_ROWS:
                break
            self._rows *= 4
        self._pairs = min(MOST_PAIRS, 1 + int(LONG_S / (2 * took)))

    def _time(self, pairs: int) -> float:
        """Seconds that pairs of launches take, waits and all."""
        self.backend.synchronize()
        start = time.perf_counter()
        self._queue(0, pairs)
        self.backend.sync_stream(0)()
        self.backend.synchronize()
        return time.perf_counter() - start

    def tries(self) -> Iterator[None]:
        """TRIES times, each begun when nothing is under way: a busy machine may keep the host from
        acting in time, so each has twice the long work of the one before."""
        for _ in range(TRIES):
            self.settle()
            yield
            self._pairs *= 2

    def goes_on(self, act: Issue, what: str, before: Issue = lambda: None) -> None:
        """Raises Broken(what) where `act`, called with long work on stream 0, waits for its end.

        before: called when nothing is under way, before that work. For a backend of two streams;
        stream 1 must be free when `act` has returned.
        """
        landing = self.host()
        glance = in_order([self.down(landing, self.counter, 1), self.backend.sync_stream(1)])
        for _ in self.tries():
            numbers(landing)[:] = -1.0
            before()
            count = self.long(0)
            act()
            glance()
            seen = numbers(landing).copy()
            if ((seen >= 0) & (seen < count)).any():
                return
        raise Broken(what)


def numbers(memory: Memory) -> np.ndarray:
    """The float32 numbers of a row that the host sees."""
    assert memory.array is not None, "device memory has no array"
    return memory.array[:ROW_BYTES].view(np.float32)


def said(row: np.ndarray) -> str:
    """The numbers in a row, for a message: `3`, or `3 and 7` where it is torn."""
    found = [f"{v:g}" for v in np.unique(row)]
    return " and ".join(found[:3]) + (f" and {len(found) - 3} others" if len(found) > 3 else "")


def expect(kept: bool | np.bool_, what: str) -> None:
    if not kept:
        raise Broken(what)


def must_be(row: np.ndarray, value: float, what: str = "") -> None:
    """Broken with `what`, and what was found, where a row is not all `value`."""
    row = row.copy()
    expect((row == value).all(), f"{what and what + ', '}{said(row)} is there, not {value:g}")


@contextmanager
def trying(what: str) -> Iterator[None]:
    """Whatever is raised inside is Broken."""
    try:
        yield
    except Exception as error:
        raise Broken(f"{what} raised {type(error).__name__}: {error}") from error
