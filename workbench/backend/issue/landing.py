"""Where results land: in pinned memory, which the caller is given without a copy.

A caller owns the array of a step's logits for as long as it likes. Copying half a megabyte out of
pinned memory costs the host tens of microseconds a token, while a GPU waits. So a landing has
several blocks. The block that a copy from the device has filled is handed out. The next results
land in a block that nobody holds.

    step     n        n + 1    n + 2    n + 3      the caller keeps the last logits only
    lands    block 0  block 1  block 2  block 0
    held     -        block 0  block 1  block 2

Where the caller holds the arrays of all other blocks, the results are copied.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from workbench.backend.base import Backend, Memory
from workbench.program.commands import Buffer, Space

N_BLOCKS = 3  # one where results land, one that the caller holds, and one to land in next
# logits of 128 sequences and 128 K words; a larger result is copied, not handed out
MOST_BYTES = 66 << 20


def hands_out(buffer: Buffer) -> bool:
    """Whether results in `buffer` are handed out where they land."""
    return buffer.lands and buffer.nbytes <= MOST_BYTES


def _array(block: Memory) -> Any:
    assert block.array is not None, "pinned memory is the host's too"
    return block.array


def nobody() -> None:
    """In place of a weak reference: there is no object yet."""


class Landing:
    """N_BLOCKS blocks of pinned memory; as Memory, it is the block that the next results land in.

    A block is free once no array that was handed out, and no view made of it, is alive.
    """

    def __init__(self, backend: Backend, nbytes: int):
        self.nbytes = nbytes
        self.blocks: list[Memory] = [
            backend.allocate(nbytes, Space.PINNED) for _ in range(N_BLOCKS)
        ]
        # An array on a ctypes buffer is the base of all its views, and they keep it alive. An array
        # on another array would not be: it may die before its views.
        kind = ctypes.c_uint8 * nbytes
        self._buffers: list[Any] = [kind.from_buffer(_array(b)) for b in self.blocks]
        self._held: list[Callable[[], np.ndarray | None]] = [nobody] * N_BLOCKS
        self.now = 0  # number of the block that results land in
        self._reserved: int | None = None  # the number of the block after it, if it was chosen
        self._early: np.ndarray | None = None  # the array of the next `take`, made in advance

    @property
    def address(self) -> int:
        return self.blocks[self.now].address

    @property
    def array(self) -> np.ndarray | None:
        return self.blocks[self.now].array

    def take(self, nbytes: int) -> np.ndarray:
        """The first bytes of what has landed, uint8 (nbytes,); the caller may keep them. Call it
        after the host has waited for them."""
        landed, array, self._early = self.now, self._early, None
        if array is None or array.nbytes != nbytes:
            array = np.ndarray((nbytes,), np.uint8, self._buffers[landed])
        if self._reserved is not None:  # it is free: only the block of now is handed out
            self._held[landed] = weakref.ref(array)
            self.now, self._reserved = self._reserved, None
            return array
        for other, held in enumerate(self._held):
            if other != landed and held() is None:
                self._held[landed] = weakref.ref(array)
                self.now = other
                return array
        return array.copy()

    def early(self, nbytes: int) -> np.ndarray | None:
        """The array that the next `take` of nbytes will hand out, before anything has landed there.
        So a host that needs it at once has less to do after its wait. None where `take` must
        copy."""
        if self._reserved is None and self.reserve() is None:
            return None
        self._early = array = np.ndarray((nbytes,), np.uint8, self._buffers[self.now])
        return array

    def reserve(self) -> int | None:
        """Chooses the block that results land in after the next `take`, and returns its number.
        None where the caller holds the arrays of all other blocks."""
        for other, held in enumerate(self._held):
            if other != self.now and held() is None:
                self._reserved = other
                return other
        return None

    def free(self) -> None:
        """Gives the blocks back. A block whose array is held is given back with the array."""
        self._buffers.clear()
        for block in self.blocks:
            block.free()


@contextmanager
def landing_in(landings: Sequence[Landing], numbers: Sequence[int]) -> Iterator[None]:
    """Within, results land in the blocks of these numbers, so that commands can be looked at as
    they will be then."""
    before = [landing.now for landing in landings]
    try:
        for landing, number in zip(landings, numbers, strict=True):
            landing.now = number
        yield
    finally:
        for landing, number in zip(landings, before, strict=True):
            landing.now = number
