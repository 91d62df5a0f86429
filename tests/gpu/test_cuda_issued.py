"""Prepared commands on a GPU: patched in place, they work at other addresses, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.gates import hold
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.issue.issued import Issued
from workbench.graph.ir import F16, F32, I32, Q4_0, Q8_ACT, DType, Kind, Node, Tensor
from workbench.graph.ops import make
from workbench.model.gguf.quants import quantize_activations, random_blocks
from workbench.program.commands import COMPUTE_STREAM, COPY_STREAM, Space

pytestmark = pytest.mark.gpu

ROWS, COLS = 33, 256
POISON = 0xFF


class Room:
    """Device memory with the bytes of an array, for one test."""

    def __init__(self, backend: CudaBackend):
        self.backend = backend
        self.held: list = []

    def put(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        self.held.append(self.backend.allocate(max(array.nbytes, 16), Space.DEVICE))
        there = self.held[-1].address
        self.backend.copy(there, array.ctypes.data, array.nbytes, 0, to_host=False)()
        self.backend.sync_stream(0)()
        return there

    def poison(self, nbytes: int) -> int:
        return self.put(np.full(nbytes, POISON, np.uint8))

    def get(self, address: int, nbytes: int) -> np.ndarray:
        found = np.empty(nbytes, np.uint8)
        self.backend.copy(found.ctypes.data, address, nbytes, 0, to_host=True)()
        self.backend.sync_stream(0)()
        return found


@pytest.fixture
def room(backend: CudaBackend) -> Iterator[Room]:
    made = Room(backend)
    yield made
    for memory in made.held:
        memory.free()


def move(issued: Issued, addresses: dict[int, int]) -> int:
    """Patches each of `addresses` to its other one, in every part; how many fields that were."""
    n = 0
    for part in issued.parts or (issued,):
        for field in part.block.pointers:
            if part.block[field] in addresses:
                part.block[field] = addresses[part.block[field]]
                n += 1
    return n


def product(dtype: DType, tokens: int) -> tuple[Node, np.ndarray, Callable[[int], np.ndarray]]:
    """A product, its weight's bytes, and activations by seed."""
    weight = random_blocks(np.random.default_rng(1), dtype, ROWS, COLS, COLS**-0.5).reshape(-1)

    def x(seed: int) -> np.ndarray:
        floats = np.random.default_rng(seed).standard_normal((tokens, COLS), np.float32)
        return floats if dtype == F16 else quantize_activations(floats)

    w = Tensor("w", dtype, (ROWS, COLS), Kind.WEIGHT)
    node = make("mul_mat", "y", w, Tensor("x", F32 if dtype == F16 else Q8_ACT, (tokens, COLS)))
    return node, weight, x


@pytest.mark.parametrize("programmatic", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tokens"), [(Q4_0, 1), (Q4_0, 40), (F16, 3), (F16, 40), (Q4_0, 1100)], ids=str
)
def test_a_patched_launch_computes_at_its_new_addresses(
    backend: CudaBackend, weights: list, room: Room, dtype: DType, tokens: int, programmatic: bool
):
    """One kernel, tiles, cuBLAS with conversions: a launch that was moved gives the bits of one
    that was prepared there, and leaves its first result alone."""
    node, content, x = product(dtype, tokens)
    if programmatic and not (backend.capabilities.programmatic and backend.begins_early(node)):
        pytest.skip("cannot be launched programmatically here")
    weights.append(backend.load_weight(node.inputs[0], content))
    scratch = room.poison(max(backend.scratch_bytes(node), 16))
    n = node.output.nbytes
    here, there = ({"x": room.put(x(seed)), "y": room.poison(n)} for seed in (2, 3))

    def prepare(at: dict[str, int]) -> Issued:
        return backend.launch(
            node, lambda t: weights[-1].address if t.kind == Kind.WEIGHT else at[t.name],
            scratch, COMPUTE_STREAM, programmatic,
        )  # fmt: skip

    def run(issued: Issued, at: dict[str, int]) -> np.ndarray:
        issued()
        return room.get(at["y"], n)

    issued, expected = prepare(here), run(prepare(there), there)
    first, key = run(issued, here), issued.key
    assert not np.array_equal(first, expected)
    assert move(issued, {here[name]: there[name] for name in here}) >= 2
    assert issued.key == key == prepare(there).key
    there_again = room.poison(n)
    assert move(issued, {there["y"]: there_again}) >= 1
    assert np.array_equal(run(issued, {"y": there_again}), expected)
    assert np.array_equal(room.get(here["y"], n), first)
    assert move(issued, {there_again: here["y"], there["x"]: here["x"]}) >= 2
    assert np.array_equal(run(issued, here), first)


def test_a_patched_copy_reads_and_writes_elsewhere(backend: CudaBackend, room: Room):
    n = 4096
    host = [backend.allocate(n, Space.PINNED) for _ in range(4)]
    for i, memory in enumerate(host):
        assert memory.array is not None
        memory.array[:] = i
    device = [room.poison(n) for _ in range(2)]
    up = backend.copy(device[0], host[0].address, n, COPY_STREAM, to_host=False)
    down = backend.copy(host[3].address, device[0], n, COPY_STREAM, to_host=True)
    up()
    assert up.addresses == (device[0], host[0].address)
    assert move(up, {device[0]: device[1], host[0].address: host[1].address}) == 2
    up()
    backend.sync_stream(COPY_STREAM)()
    assert [int(room.get(at, n).max()) for at in device] == [0, 1]
    assert move(down, {device[0]: device[1], host[3].address: host[2].address}) == 2
    down()
    backend.sync_stream(COPY_STREAM)()
    assert host[2].array is not None and host[3].array is not None
    assert (host[2].array == 1).all() and (host[3].array == 3).all()
    for memory in host:
        memory.free()


def test_a_patched_value_is_computed_with(backend: CudaBackend, room: Room):
    """The number of rows that a table has: an id that was outside of it is found."""
    table = np.arange(8 * 32, dtype=np.float32).reshape(8, 32)
    ids = np.array([5], np.int32)
    w, given = Tensor("w", F32, (4, 32)), Tensor("i", I32, (1,))
    node = make("get_rows", "y", w, given)
    at = {"w": room.put(table), "i": room.put(ids), "y": room.poison(node.output.nbytes)}
    issued = backend.launch(node, lambda t: at[t.name], 0, COMPUTE_STREAM)
    issued()
    assert not room.get(at["y"], 128).any(), "rows of the table: 4"
    (rows,) = (i for i in range(len(issued.block)) if issued.block[i] == 4)
    key = issued.key
    issued.block[rows] = 8
    issued()
    assert np.array_equal(room.get(at["y"], 128).view(np.float32), table[5])
    assert issued.key != key


def test_records_and_waits_are_issued_like_any_command(backend: CudaBackend):
    """Patched, they are of another event: the host then waits for that one."""
    event, other = backend.event(), backend.event()
    record, wait = backend.record(event, COPY_STREAM), backend.wait(event, COMPUTE_STREAM)
    assert record.addresses == wait.addresses == (int(event.handle),)
    assert record.key == backend.record(other, COPY_STREAM).key != wait.key
    assert move(record, {int(event.handle): int(other.handle)}) == 1
    assert move(wait, {int(event.handle): int(other.handle)}) == 1
    query, result = backend._driver.api.cuEventQuery, backend._driver.api.CUresult
    with hold(backend, COPY_STREAM):
        record()
        wait()
        assert query(other.handle)[0] == result.CUDA_ERROR_NOT_READY
        assert query(event.handle)[0] == result.CUDA_SUCCESS, "never recorded"
    backend.synchronize()
    assert query(other.handle)[0] == result.CUDA_SUCCESS
