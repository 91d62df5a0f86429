"""The host's side of a stream: it fills the ring, waits for it, reads its stamps and ends it.

The threads that run the entries are in `loops.py`.
"""

from __future__ import annotations

import os
import struct
import threading
from array import array
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from workbench.backend.cpu.device import loops, signals
from workbench.backend.cpu.device.loops import push
from workbench.backend.issue.issued import Block, Issued
from workbench.common.errors import DeviceError


def aligned_zeros(nbytes: int, alignment: int = 64) -> np.ndarray:
    """A zeroed uint8 array (nbytes,) whose address is a multiple of `alignment`. A page takes
    memory only once it is used. Raises DeviceError where there is no such memory."""
    try:
        block = np.zeros(nbytes + alignment, np.uint8)
    except (MemoryError, ValueError) as error:
        raise DeviceError(
            f"no memory for {nbytes} bytes; use a smaller model, n_ctx or n_ubatch"
        ) from error
    start = -block.ctypes.data % alignment
    return block[start : start + nbytes]


def command_words(function: int, parts: int, args: Sequence[int | float]) -> array[int]:
    """The command that `push` takes, int64: function, parts, number of arguments, arguments (a
    float as its bits). Raises DeviceError for more than MAX_ARGS."""
    if len(args) > loops.MAX_ARGS:
        raise DeviceError(f"a kernel with {len(args)} arguments; the ring takes {loops.MAX_ARGS}")
    words = [_float_bits(arg) if type(arg) is float else arg for arg in args]
    return array("q", [function, parts, len(args), *words])  # type: ignore[list-item]


def _float_bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<d", number))[0]


class MemoryBlock(Block):
    """The argument block of a command that compiled code reads. A plan has a copy of the block's
    words (`recorded.py`).

    memory: all of the command, int64.
    address: of `memory`.
    first, n: the first word that is a field, and the number of fields.
    """

    __slots__ = ("address", "first", "memory", "n")

    def __init__(self, memory: array[int], pointers: tuple[int, ...], first: int, n: int):
        self.memory = memory
        self.address = memory.buffer_info()[0]
        self.pointers = pointers
        self.first = first
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(self.memory[self.first : self.first + self.n])

    def __getitem__(self, field: int) -> int:
        return self.memory[self._word(field)]

    def __setitem__(self, field: int, value: int) -> None:
        self.memory[self._word(field)] = value

    def held(self, field: int) -> tuple[array[int], int]:
        return self.memory, self._word(field)

    def taken(self) -> bytes:
        return self.memory[self.first : self.first + self.n].tobytes()

    def _word(self, field: int) -> int:
        if not 0 <= field < self.n:
            raise IndexError(f"field {field} of a block of {self.n}")
        return self.first + field


@cache
def kernel_work(function: int, parts: int) -> tuple[int, int]:
    """`Issued.same` of a kernel. All its launches share one object, which spares the garbage
    collector work."""
    return function, parts


def kernel_block(
    function: int, parts: int, args: Sequence[int | float], pointers: tuple[int, ...]
) -> MemoryBlock:
    """A kernel's command for `push`, with the arguments as fields. Raises DeviceError."""
    return MemoryBlock(command_words(function, parts, args), pointers, 3, len(args))


class Ring:
    """A FIFO of kernels with `n_workers` threads that run them, each kernel with a number.

    Nothing runs before `start`. Safe to push from several Python threads.
    """

    def __init__(self, name: str, n_workers: int, yield_ns: int = signals.WORKER_YIELD_NS):
        self.name = name
        self.n_workers = n_workers
        self.yield_ns = yield_ns
        self.control = aligned_zeros(loops.CONTROL_BYTES)
        self.entries = aligned_zeros(loops.RING_SIZE * loops.ENTRY_BYTES)
        self.stamps = aligned_zeros(loops.STAMP_SIZE * 16)
        self.address = int(self.control.ctypes.data)
        words = self.control.view(np.int64)
        words[loops.ENTRIES // 8] = self.entries.ctypes.data
        words[loops.STAMPS // 8] = self.stamps.ctypes.data
        signals.init_signal(self.address + loops.ISSUED)
        signals.init_signal(self.address + loops.COMPLETED)
        self.words = memoryview(words.data)
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()  # of starts, and of the end of starts
        self._process = os.getpid()
        self.closed = False

    def start(self) -> None:
        """Starts the workers, once; none in a process that was forked after the ring was made. They
        are daemon threads: a device that is never closed holds up no exit."""
        if self._threads or self._forked:
            return
        memory = (self.control, self.entries, self.stamps)  # lives while a worker may touch it
        with self._starting:
            while len(self._threads) < self.n_workers and not self.closed:
                thread = threading.Thread(
                    target=_worker,
                    args=(self.address, self.yield_ns, memory),
                    name=f"{self.name} worker {len(self._threads)}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    @property
    def issued(self) -> int:
        """Kernels queued so far, nodes of plans among them: the number of the next one."""
        return self.words[loops.ISSUED // 8]

    @property
    def completed(self) -> int:
        return self.words[loops.COMPLETED // 8]

    def prepare(
        self,
        function: int,
        parts: int,
        args: Sequence[int | float],
        pointers: tuple[int, ...] = (),
    ) -> Issued:
        """A command that queues this kernel when called, with the arguments then in its block.

        pointers: which arguments are addresses.
        """
        block = kernel_block(function, parts, args, pointers)

        # defaults, because a closure gives the garbage collector five objects more to go through
        def issue(
            control: int = self.address,
            command: int = block.address,
            ring: Ring = self,
            _block: MemoryBlock = block,
        ) -> None:
            if push(control, command):
                ring.push_slowly(command)

        return Issued(issue, kernel_work(function, parts), block)

    def push(self, function: int, parts: int, args: Sequence[int | float]) -> None:
        """Queues a kernel once."""
        self.prepare(function, parts, args)()

    def push_slowly(self, command: int) -> None:
        """Pushes where the ring was full: waits for room, a slice at a time."""
        while True:
            self.await_room()
            if push(self.address, command) == loops.PUSHED:
                return

    def await_room(self) -> None:
        """The host waits until the ring takes another entry. Raises DeviceError as `wait` does.

        What is complete is read before the room is: the ring may empty itself in between, and
        no worker completes a kernel that is not queued.
        """
        self.check()
        words = self.words
        while True:
            completed = self.completed
            if words[loops.FILLED // 8] - words[loops.OVER // 8] < loops.RING_SIZE:
                return
            self.wait(completed + 1)

    def wait(self, number: int) -> None:
        """The host waits until `number` kernels are complete. Ctrl-C interrupts within 20 ms.

        Raises DeviceError where the ring is closed or has lost its threads.
        """
        signal = self.address + loops.COMPLETED
        while not signals.wait_slice(signal, number, signals.HOST_YIELD_NS, signals.SLICE_NS):
            self.check()

    def check(self) -> None:
        """Raises DeviceError where the ring is closed or has lost its threads."""
        if self.closed:
            raise DeviceError(f"{self.name} is closed; open a new backend")
        if self._forked:
            raise DeviceError(
                f"{self.name} has lost its threads; open the backend after a fork, not before"
            )

    def stamp(self, number: int) -> tuple[int, int]:
        """Start and end of a completed kernel, ns of time.perf_counter_ns.

        Raises DeviceError where the kernel is not complete or more than STAMP_SIZE kernels old.
        """
        if not self.issued - loops.STAMP_SIZE <= number < self.completed:
            raise DeviceError(
                f"{self.name}: kernel {number} has no stamp; resolve marks after waiting for the "
                f"work between them and within {loops.STAMP_SIZE} kernels"
            )
        row = self.stamps.view(np.int64).reshape(loops.STAMP_SIZE, 2)[number % loops.STAMP_SIZE]
        return int(row[0]), int(row[1])

    def halt(self) -> None:
        """No kernel begins any more. Sleeping threads are not woken: `close` wakes them."""
        self.words[loops.STATE // 8] = loops.STOPPED

    def close(self) -> None:
        """Ends and joins the workers, after the parts they hold. Idempotent."""
        if self.closed:
            return
        with self._starting:
            self.closed = True
        issued = self.issued
        loops.stop(self.address)
        for thread in self._threads:
            thread.join()
        self.words[loops.ISSUED // 8] = issued  # `stop` raised it to wake the workers


def _worker(control: int, yield_ns: int, memory: tuple[np.ndarray, ...]) -> None:
    """A worker's thread: one call into compiled code, until shutdown. It holds `memory`."""
    loops.run_worker(control, signals.NOBODY, yield_ns)
