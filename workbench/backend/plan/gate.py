"""A gate: a plan that is launched ahead waits there until the host has written its inputs.

A device stands still between two steps: the host wakes, makes the next step and launches it. With
`launch_ahead=on` the host launches the next step's plan while the device still computes this step.
Such a plan begins with `gate_copy` (`kernels/gate.cu`, `cpu/device/loops.py`) in place of its
packed copy of inputs. The gate holds the stream until the host has written the inputs and opens it:

    host      launch 1 . wait    launch 2 . . . woken, writes inputs of 2, opens . wait
    device    gate copy kernels of 1 . . . . . | gate holds ................. copy kernels of 2

Launches of gates are numbered from 1. Host and device count alike, because gates run in stream
order. Gate n is open once `opened` is at least n. A plain launch opens its gate before it is
queued.

Nothing can hang. A gate holds the stream for LIMIT_NS at most, and only until the host cancels it:
each gate n has bit n % N_CANCELLED of `cancelled`, whatever was opened since. A gate that was
cancelled, or reached its limit, copies nothing, and writes -n to `went`. The graph then computes
the previous step once more, from the inputs that are still on the device: the same K and V into the
same cells, and logits into a block that nobody holds. So nothing changes. Whatever else waits for
the device (memory that is freed, a collector, another engine on the same backend) waits for the
limit and a token at most. This is right only after a step of exactly the same shape, whose inputs
lie at the same place (`engine/step.py`).

After its wait for a step that was launched ahead, the host reads `went`. Where it is not n, the
host launches the step again, and waits again. A gate that was open writes `went` when it has read
the inputs. From then on the host may write the next inputs (`engine/step.py`).

A host that is late for every step, because it samples or prints, would have each step computed
twice. So after a second miss in a row 4 steps are not launched ahead, after a third 8, and so on,
up to MOST_PASSED.

With `plan_end=word` such a plan also ends with a kernel, `gate_end`. It counts launches, and writes
the launch's number to `ended`. The host looks at this word until the number that it waits for is
there. The driver reports an event after a graph later than that. Where the number does not come
within WORD_NS, because a kernel has failed or takes long, the host waits for the event.

The host stores the inputs first, then `opened`. x86 keeps this order for the device, so a plain
store of 8 bytes is enough. Other processors need a store that waits for earlier stores
(`_store_of`).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence

import numpy as np

from workbench.backend.base import Backend, Captured, Issue
from workbench.backend.issue.issued import Issued
from workbench.program.commands import Space

KERNEL = "gate_copy"  # the kernel of a gate on a GPU
END_KERNEL = "gate_end"
LIMIT_NS = 500_000
# where words lie in the control block, in bytes. The host writes the first two words, the device
# the others; each side has cache lines of its own. WENT: N_WENT words, one for each of the last
# gates.
OPENED, CANCELLED, RAN, WENT, N_WENT = 0, 8, 64, 128, 8
ENDED = WENT + 8 * N_WENT
N_CANCELLED = 32  # launches; fewer are queued at any time, because each writes staging memory
CONTROL_BYTES = ENDED + 64
WORD_NS = 10_000_000  # how long the host looks at `ended`; then it waits for the event
COUNTS = ("plans_ahead", "plans_ahead_missed")
MOST_PASSED = 64  # steps in a row that are not launched ahead, because the host was late
MOST_BYTES = 1 << 17  # the most that a gate copies: one block of threads is slow with more


class Gate:
    """The gates of one engine on its device, and the plan that waits at a gate.

    counts: `plans_ahead` counts launches ahead whose gates were opened in time,
        `plans_ahead_missed` those whose gates were opened too late.
    by_word: plans tell of their ends by a word.

    `launch` and `arm` number launches. Where a launch was interrupted, nobody knows whether it was
    queued. The next launch then waits for the device, and takes the device's count.
    """

    def __init__(
        self,
        backend: Backend,
        counts: dict[str, int],
        limit_ns: int = LIMIT_NS,
        by_word: bool = False,
    ):
        self._backend, self._counts, self._limit_ns = backend, counts, limit_ns
        self._counter = backend.allocate(8, Space.DEVICE) if by_word else None
        self._await_word = _await_word() if by_word else None
        self._memory = backend.allocate(CONTROL_BYTES, Space.PINNED)
        assert self._memory.array is not None, "pinned memory is the host's too"
        self._words = memoryview(self._memory.array.view(np.int64).data)
        self._store = _store_of(self._words, self._memory.address)
        self._launched = self._cancelled = 0
        self._unsure = False
        self._armed: Captured | None = None
        self._misses = self._to_pass = 0  # misses in a row; steps not to be launched ahead

    def copy(self, addresses: Sequence[int], nbytes: int, stream: int) -> Issued:
        """The command that copies nbytes of pinned memory at a gate. addresses: the destination and
        the source."""
        dst, src = addresses
        control = self._memory.address
        return self._backend.gate_copy(dst, src, nbytes, control, self._limit_ns, stream)

    def end(self, stream: int, programmatic: bool) -> Issued | None:
        """The last command of a plan whose end is told by a word; None without a word.
        programmatic: as of `Backend.launch`, where a kernel is right before it."""
        if self._counter is None:
            return None
        word = self._memory.address + ENDED
        return self._backend.gate_end(self._counter.address, word, stream, programmatic)

    def ended(self, number: int) -> bool:
        """Waits until launch `number` is over. False where no word tells of it, or not in time."""
        if self._await_word is None or not number:
            return False
        return self._await_word(self._memory.address + ENDED, number, WORD_NS)

    def launch(self, queue: Issue) -> int:
        """Opens the gate of a plan, then calls `queue`, which queues the plan. Returns the number
        of the launch."""
        if self._unsure:
            self._backend.synchronize()
            self._launched, self._unsure = self._words[RAN // 8], False
        number = self._launched + 1
        self._store(OPENED, number)
        self._queue(queue, number)
        return number

    def arm(self, captured: Captured, queue: Issue) -> None:
        """Launches a plan whose gate is opened, or cancelled, later. Does nothing for a host that
        has been late again and again. queue: launches `captured`."""
        if self._to_pass:
            self._to_pass -= 1
        elif self._armed is None and not self._unsure:
            self._queue(queue, self._launched + 1)
            self._armed = captured

    def _queue(self, queue: Issue, number: int) -> None:
        self._unsure = True
        if self._cancelled:
            self._cancel(self._cancelled & ~_bit(number))  # of a launch that is long over
        queue()
        self._launched, self._unsure = number, False

    def open(self, captured: Captured | None) -> int:
        """Opens the gate if `captured` waits at it, and returns the number of the launch. Returns 0
        where another plan or none waits there, or where the limit has passed."""
        if captured is None or self._armed is not captured:
            return 0
        self._armed, number = None, self._launched
        if self._went(number) == -number:
            self._late()
            return 0
        self._store(OPENED, number)
        self._counts["plans_ahead"] += 1
        return number

    def cancel(self) -> None:
        """A plan that waits at the gate goes on without copying anything."""
        if self._armed is not None:
            self._armed = None
            self._cancel(self._cancelled | _bit(self._launched))

    def _cancel(self, numbers: int) -> None:
        self._cancelled = numbers
        self._store(CANCELLED, numbers)

    def missed(self, number: int) -> bool:
        """Whether launch `number`, which is over, passed its gate before the gate was opened."""
        if self._went(number) == number:
            self._misses = 0
            return False
        self._counts["plans_ahead"] -= 1
        self._late()
        return True

    def _late(self) -> None:
        self._counts["plans_ahead_missed"] += 1
        self._misses += 1
        if self._misses > 1:
            self._to_pass = min(1 << self._misses, MOST_PASSED)

    def has_read(self, number: int) -> bool:
        """Whether the device has read the inputs at gate `number`, one of the latest two."""
        return self._went(number) == number != 0

    def _went(self, number: int) -> int:
        return self._words[WENT // 8 + number % N_WENT]

    def free(self) -> None:
        """Gives the control block back. Call it when nothing is queued any more."""
        self.cancel()
        self._words.release()
        self._memory.free()
        if self._counter is not None:
            self._counter.free()


def _store_of(words: memoryview, address: int) -> Callable[[int, int], None]:
    """A function that stores a value to the word at a byte offset, after all earlier stores of the
    host. words: the memory at `address`, as words."""
    if platform.machine() in ("x86_64", "AMD64"):

        def store(at: int, value: int) -> None:
            words[at // 8] = value

    else:
        from workbench.backend.cpu.device.signals import (
            set_word,  # compiled, so imported only where it is needed
        )

        def store(at: int, value: int) -> None:
            set_word(address + at, value)

    return store


def _await_word() -> Callable[[int, int, int], bool]:
    """A function that waits without the GIL. It is compiled, so imported only where needed."""
    from workbench.backend.cpu.device.signals import await_word

    return await_word


def _bit(number: int) -> int:
    return 1 << number % N_CANCELLED
