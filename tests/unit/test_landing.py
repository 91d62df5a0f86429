"""Results are handed out where they landed, and stay what they were while anybody holds them."""

from __future__ import annotations

import ctypes
import gc
import itertools
import weakref
from typing import Any

import numpy as np
import pytest

from workbench.backend.cuda.device.driver import CudaMemory
from workbench.backend.issue.landing import N_BLOCKS, Landing
from workbench.backend.null import open_backend
from workbench.program.commands import Space

N = 64


@pytest.fixture
def landing() -> Landing:
    return Landing(open_backend(), N)


def land(landing: Landing, value: int) -> np.ndarray:
    """What a step does: a copy fills the block of now, then the host takes it."""
    assert landing.array is not None
    landing.array[:] = value
    return landing.take(N)


def test_the_block_itself_is_handed_out_in_turn(landing: Landing):
    """A caller that keeps the latest result alone never pays for a copy."""
    addresses, kept = [], None
    for step in range(9):
        where = landing.address
        kept = land(landing, step)
        assert kept.ctypes.data == where and (kept == step).all()
        addresses.append(where)
    assert set(addresses) == {block.address for block in landing.blocks}
    assert all(a != b for a, b in itertools.pairwise(addresses))


VIEWS: dict[str, Any] = {
    "array": lambda a: a,
    "rows": lambda a: a.view(np.float32).reshape(1, -1),
    "part": lambda a: a.view(np.float32).reshape(1, -1)[-1][3:9],
    "buffer": memoryview,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_what_is_held_is_never_landed_on(landing: Landing, view):
    """Held in whatever form: by then the array that was handed out may be gone."""
    held = [view(land(landing, step)) for step in range(3 * N_BLOCKS)]
    wanted = [view(np.full(N, step, np.uint8)) for step in range(len(held))]
    for found, want in zip(held, wanted, strict=True):
        assert np.asarray(found).tobytes() == np.asarray(want).tobytes()
    blocks = [(b.address, b.address + N) for b in landing.blocks]
    owned = [np.asarray(h) for h in held]
    inside = [any(lo <= a.ctypes.data < hi for lo, hi in blocks) for a in owned]
    assert inside == [True] * (N_BLOCKS - 1) + [False] * (len(held) - N_BLOCKS + 1)


def test_a_result_let_go_makes_its_block_free(landing: Landing):
    held = [land(landing, step) for step in range(N_BLOCKS)]
    where = held[0].ctypes.data
    held.pop(0)
    land(landing, 7)  # where no other block was free
    assert landing.address == where
    assert [int(h[0]) for h in held] == list(range(1, N_BLOCKS))


def test_a_result_outlives_its_landing(landing: Landing):
    """Blocks nobody holds go at once; the one that is held when its array does."""
    blocks = [weakref.ref(buffer) for buffer in landing._buffers]
    held = land(landing, 5)[1:]
    landing.free()
    landing.free()
    gc.collect()
    assert [block() is None for block in blocks] == [False] + [True] * (N_BLOCKS - 1)
    assert (held == 5).all()
    del held
    assert blocks[0]() is None


class Pinned:
    """A backend whose pinned memory is the cuda backend's, at host addresses."""

    def __init__(self) -> None:
        self.released: list[int] = []

    def allocate(self, nbytes: int, space: Space) -> CudaMemory:
        view = (ctypes.c_uint8 * nbytes)()
        address, array = ctypes.addressof(view), np.ctypeslib.as_array(view)
        return CudaMemory(address, nbytes, array, self.released.append, view)


def test_pinned_memory_of_cuda_goes_with_the_last_array_of_it():
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


def test_device_memory_of_cuda_goes_when_it_is_freed():
    released: list[int] = []
    memory = CudaMemory(4096, N, None, released.append)
    memory.free()
    memory.free()
    assert released == [4096]


def test_the_block_that_is_reserved_is_landed_in_next(landing: Landing):
    """Also where another comes free in between."""
    held = [land(landing, step) for step in range(2)]
    assert landing.now == 2
    assert landing.reserve() is None  # both others are held
    held.pop()
    assert landing.reserve() == 1
    held.pop()
    kept = land(landing, 7)
    assert landing.now == 1
    land(landing, 8)
    assert (kept == 7).all()


def test_a_reservation_is_for_one_result(landing: Landing):
    order = []
    for step in range(8):
        if step % 2:
            assert landing.reserve() is not None
        order.append(landing.now)
        kept = land(landing, step)
    assert (kept == 7).all() and set(order) <= set(range(N_BLOCKS))


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_what_is_made_before_it_lands_is_what_is_taken(landing: Landing, view):
    """Views that were made early hold the block, too. Others are made where the next is shorter."""
    held: list[Any] = []
    for step in range(3 * N_BLOCKS):
        nbytes = N if step % 4 else N // 2
        early = landing.early(N)
        assert (early is None) == (len(held) >= N_BLOCKS - 1)  # a result would be copied
        seen = None if early is None else view(early)
        assert landing.array is not None
        landing.array[:] = step
        taken = landing.take(nbytes)
        assert (taken is early) == (early is not None and nbytes == N)
        held.append((seen if taken is early else view(taken), step, nbytes))
        del early, taken, seen
    for found, step, nbytes in held:
        want = view(np.full(nbytes, step, np.uint8))
        assert np.asarray(found).tobytes() == np.asarray(want).tobytes()
    held.clear()
    assert landing.early(N) is not None


def test_a_wait_that_failed_leaves_its_block_to_the_next_result(landing: Landing):
    assert landing.early(N) is not None
    kept = land(landing, 1)
    assert landing.early(N) is not None  # and nobody takes it
    again = landing.early(N)
    assert again is not None and land(landing, 2) is again
    assert (kept == 1).all() and (again == 2).all()
