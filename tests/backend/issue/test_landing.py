"""Results are handed out where they landed, and stay what they were while anybody holds them."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest

from workbench.backend.cuda.device.driver import CudaMemory
from workbench.backend.issue.landing import N_BLOCKS, Landing
from workbench.backend.null import open_backend

N = 64


@pytest.fixture
def landing() -> Landing:
    return Landing(open_backend(), N)


def land(landing: Landing, value: int) -> np.ndarray:
    """What a step does: a copy fills the block of now, then the host takes it."""
    assert landing.array is not None
    landing.array[:] = value
    return landing.take(N)


VIEWS: dict[str, Any] = {
    "array": lambda a: a,
    "rows": lambda a: a.view(np.float32).reshape(1, -1),
    "part": lambda a: a.view(np.float32).reshape(1, -1)[-1][3:9],
    "buffer": memoryview,
}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_what_is_held_is_never_landed_on(landing: Landing, view, early):
    """Held in whatever form, also one that was made before the result landed: by then the array
    that was handed out may be gone. Where the next is shorter, another array is made."""
    held: list[Any] = []
    for step in range(3 * N_BLOCKS):
        made, nbytes = landing.early(N) if early else None, N if step % 4 or not early else N // 2
        assert (made is None) == (not early or len(held) >= N_BLOCKS - 1)  # else it is copied
        seen = None if made is None else view(made)
        assert landing.array is not None
        landing.array[:] = step
        taken = landing.take(nbytes)
        assert (taken is made) == (made is not None and nbytes == N)
        held.append((seen if taken is made else view(taken), step, nbytes))
        del made, taken, seen
    for found, step, nbytes in held:
        want = view(np.full(nbytes, step, np.uint8))
        assert np.asarray(found).tobytes() == np.asarray(want).tobytes()
    blocks = [(b.address, b.address + N) for b in landing.blocks]
    inside = [any(lo <= np.asarray(h).ctypes.data < hi for lo, hi in blocks) for h, *_ in held]
    assert inside == [True] * (N_BLOCKS - 1) + [False] * (len(held) - N_BLOCKS + 1)


def test_blocks_take_turns_and_free_ones_are_landed_in(landing: Landing):
    """A caller that keeps the latest result alone never pays for a copy. A reserved block is landed
    in next and once, also where another comes free in between. A failed wait leaves its block."""
    addresses, kept = [], None
    for step in range(9):
        where = landing.address
        kept = land(landing, step)
        assert kept.ctypes.data == where and (kept == step).all()
        addresses.append(where)
    assert set(addresses) == {block.address for block in landing.blocks}
    del kept
    held = [land(landing, step) for step in range(2)]
    assert landing.now == 2 and landing.reserve() is None  # both others are held
    held.pop()
    assert landing.reserve() == 1
    held.pop()
    kept = land(landing, 7)
    assert landing.now == 1
    land(landing, 8)
    assert landing.early(N) is not None  # a wait that fails: nobody takes it
    again = landing.early(N)
    assert again is not None and land(landing, 9) is again
    assert (kept == 7).all() and (again == 9).all()


class Pinned:
    """A backend whose pinned memory is the cuda backend's, at host addresses."""

    def __init__(self) -> None:
        self.released: list[int] = []

    def allocate(self, nbytes: int, space: Any) -> CudaMemory:
        view = (ctypes.c_uint8 * nbytes)()
        address, array = ctypes.addressof(view), np.ctypeslib.as_array(view)
        return CudaMemory(address, nbytes, array, self.released.append, view)


def test_pinned_memory_goes_with_the_last_array_of_it():
    """Blocks nobody holds go with the landing; the one that is held when its array does."""
    backend: Any = Pinned()
    landing = Landing(backend, N)
    addresses = [block.address for block in landing.blocks]
    held = land(landing, 5).view(np.float32)[2:]
    landing.free()
    landing.free()
    gc.collect()
    assert sorted(backend.released) == sorted(addresses[1:])
    assert (held.view(np.uint8) == 5).all()
    del held
    assert sorted(backend.released) == sorted(addresses)
