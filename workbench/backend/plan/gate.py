"""A gate: what a plan that is launched ahead waits at until the host has written its inputs.

A device stands still between two steps: the host wakes, makes the next step and launches it. With
`launch_ahead=on` the host launches the next step's plan while the device still computes this one.
Such a plan begins with `gate_copy` (`kernels/gate.cu`, `cpu/loops.py`) in place of its packed copy
of inputs. It holds the stream until the host has written the inputs and opens the gate:

    host      launch 1 . wait    launch 2 . . . woken, writes inputs of 2, opens . wait
    device    gate copy kernels of 1 . . . . . | gate holds ................. copy kernels of 2

Launches of gates are numbered from 1, on host and device alike, for they run in stream order. Gate
n is open once `opened` is at least n. A plain launch opens its gate before it is queued.

Nothing can hang. A gate holds the stream for LIMIT_NS at most, and no longer than until the host
cancels it: bit n % N_CANCELLED of `cancelled` is its own, whatever was opened since. Then it copies
nothing, and `went` is -n. The graph computes the step before once more, from the inputs that are
still on the device: the same K and V into the same cells, and logits into a block that nobody has.
Nothing changes by that. So whatever else waits for the device (memory that is freed, a collector,
another engine on the same backend) waits for the limit and a token at most. It is right only behind
a step of the very same shape, whose inputs lie where this one's do (`engine/step.py`).

After its wait for a step that was launched ahead, the host reads `went`. Where that is not n, the
host launches the step again, and waits again. A gate that was open writes `went` when the inputs
have been read. So from then on the host may write the next ones (`engine/step.py`).

A host that is late for every step, because it samples or prints, would have each step computed
twice. So behind a second miss in a row 4 steps are not launched ahead, behind a third 8, and so on,
up to MOST_PASSED.

With `plan_end=word` such a plan also ends with a kernel, `gate_end`. It counts launches, and writes
the number of this one to `ended`. The host looks at that word until the number is there that it
waits for. The driver tells of an event behind a graph later. What never comes, because a kernel has
failed, or is long in coming is left to the event (`WORD_NS`).

The host stores the inputs first, then `opened`. x86 keeps this order for the device, and so a plain
store of 8 bytes does. Other processors need a store that waits for those before it (`_store_of`).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence

import numpy as np

from workbench.backend.base import Backend, Captured, Issue
from workbench.backend.issue.issued import Issued
from workbench.program.commands import Space

KERNEL = "gate_copy"  # what runs at a gate on a GPU, by its name
END_KERNEL = "gate_end"
LIMIT_NS = 500_000
# bytes of the control block. The host writes the first two words, the device the others; each side
# has cache lines of its own. WENT: N_WENT words, one for each of the last gates.
OPENED, CANCELLED, RAN, WENT, N_WENT = 0, 8, 64, 128, 8
ENDED = WENT + 8 * N_WENT
N_CANCELLED = 32  # launches; fewer are ever queued, for each writes staging memory
CONTROL_BYTES = ENDED + 64
WORD_NS = 10_000_000  # that the host looks at `ended`; then it waits for the event
COUNTS = ("plans_ahead", "plans_ahead_missed")
MOST_PASSED = 64  # steps in a row that are not launched ahead, because the host was late
MOST_BYTES = 1 << 17  # that a gate copies; one block of threads is slow with more


class Gate:
    """The gates of one engine on its device, and which plan stands at one.

    counts: `plans_ahead`, launches ahead that were opened in time, and `plans_ahead_missed`, the
    others that were wanted. `launch` and `arm` number launches. Where one was interrupted, nobody
    knows whether it was queued; the next one waits for the device and goes on with its number.
    by_word: whether plans tell of their ends.
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
        self._misses = self._to_pass = 0  # misses in a row; steps that are not launched ahead

    def copy(self, addresses: Sequence[int], nbytes: int, stream: int) -> Issued:
        """What copies nbytes of pinned memory behind a gate. addresses: to and from."""
        dst, src = addresses
        control = self._memory.address
        return self._backend.gate_copy(dst, src, nbytes, control, self._limit_ns, stream)

    def end(self, stream: int, programmatic: bool) -> Issued | None:
        """What ends a plan, where its end is told by a word. programmatic: as of `Backend.launch`,
        where a kernel is in front of it."""
        if self._counter is None:
            return None
        word = self._memory.address + ENDED
        return self._backend.gate_end(self._counter.address, word, stream, programmatic)

    def ended(self, number: int) -> bool:
        """Waits until launch `number` is over; False where no word tells, or not in time."""
        if self._await_word is None or not number:
            return False
        return self._await_word(self._memory.address + ENDED, number, WORD_NS)

    def launch(self, queue: Issue) -> int:
        """Opens the gate of a plan, then calls what queues the plan; the launch's number."""
        if self._unsure:
            self._backend.synchronize()
            self._launched, self._unsure = self._words[RAN // 8], False
        number = self._launched + 1
        self._store(OPENED, number)
        self._queue(queue, number)
        return number

    def arm(self, captured: Captured, queue: Issue) -> None:
        """Launches a plan whose gate is opened later, or cancelled. A host that has been late again
        and again is passed over. queue: launches `captured`."""
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
        """Lets `captured` go on where it stands at the gate: the launch's number. Else 0: where
        another plan or none stands there, or the limit has passed."""
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
        """Whatever stands at the gate copies nothing and goes on."""
        if self._armed is not None:
            self._armed = None
            self._cancel(self._cancelled | _bit(self._launched))

    def _cancel(self, numbers: int) -> None:
        self._cancelled = numbers
        self._store(CANCELLED, numbers)

    def missed(self, number: int) -> bool:
        """Whether launch `number`, which was opened and is over, had gone on before."""
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
        """Whether the device has read the inputs behind gate `number`, one of the latest two."""
        return self._went(number) == number != 0

    def _went(self, number: int) -> int:
        return self._words[WENT // 8 + number % N_WENT]

    def free(self) -> None:
        """Gives the control block back, once nothing is queued any more."""
        self.cancel()
        self._words.release()
        self._memory.free()
        if self._counter is not None:
            self._counter.free()


def _store_of(words: memoryview, address: int) -> Callable[[int, int], None]:
    """What sets the word at a number of bytes, behind all that the host has stored before. words:
    of the memory at `address`."""
    if platform.machine() in ("x86_64", "AMD64"):

        def store(at: int, value: int) -> None:
            words[at // 8] = value

    else:
        from workbench.backend.cpu.device.signals import (
            set_word,  # compiled, so not where nobody asks
        )

        def store(at: int, value: int) -> None:
            set_word(address + at, value)

    return store


def _await_word() -> Callable[[int, int, int], bool]:
    """What waits without the GIL. Compiled, so not where nobody asks."""
    from workbench.backend.cpu.device.signals import await_word

    return await_word


def _bit(number: int) -> int:
    return 1 << number % N_CANCELLED
