"""Ranges are true: runs an op on a backend and holds it to what it declares to read and write.

Every tensor of the op lies in one block of device memory, with gaps between. All of it is filled
with a poison byte, then only what the op declares to read is given values. After the run every
byte outside the declared writes must be as before, and the written bytes must be the same
whatever the poison was.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workbench.backend.base import Backend
from workbench.graph import ops
from workbench.graph.ir import (
    F16,
    F32,
    I32,
    I64,
    Q8_ACT,
    QUANTISED,
    WEIGHT_DTYPES,
    DType,
    Kind,
    Node,
    Tensor,
)
from workbench.model.quants import quantize_activations, random_blocks
from workbench.program.commands import Space

GAP = 512  # bytes of poison around each tensor
# bytes whose repetition is a NaN as float32 and as float16
POISONS = (0xFF, 0x7F)
N_KV, CELLS, T = 64, 96, 3


def cases() -> Iterator[tuple[str, Node, dict[Tensor, np.ndarray]]]:
    """(name, node, values): every op, and every weight type of those that read weights."""
    rng = np.random.default_rng(7)

    def f32(*shape: int) -> tuple[Tensor, np.ndarray]:
        return Tensor("x", F32, shape), rng.standard_normal(shape).astype(np.float32)

    def ints(dtype: DType, values) -> tuple[Tensor, np.ndarray]:
        array = np.asarray(values, np.int32 if dtype == I32 else np.int64)
        return Tensor("i", dtype, array.shape), array

    def f16(*shape: int) -> tuple[Tensor, np.ndarray]:
        return Tensor("c", F16, shape), rng.standard_normal(shape).astype(np.float16)

    def case(name, op, *given, **params):
        return name, ops.make(op, "out", *(t for t, _ in given), **params), dict(given)

    def weight(dtype: DType, rows: int, cols: int) -> tuple[Tensor, np.ndarray]:
        blocks = random_blocks(rng, dtype, rows, cols, cols**-0.5)
        return Tensor("w", dtype, (rows, cols), Kind.WEIGHT), blocks

    yield case("rms_norm", "rms_norm", f32(T, 5, 96), eps=1e-5)
    yield case("mul row", "mul", f32(T, 96), f32(96))
    yield case("add", "add", f32(T, 96), f32(T, 96))
    yield case("swiglu", "swiglu", f32(T, 96), f32(T, 96))
    yield case("quantize", "quantize", f32(T, 96))
    rope = {"n_rot": 16, "theta_base": 1e4, "freq_scale": 1.0}
    positions, factors = ints(I32, [4, 0, 300]), (Tensor("f", F32, (8,)), np.full(8, 2, np.float32))
    yield case("rope", "rope", f32(T, 4, 32), positions, neox=False, **rope)
    yield case("rope neox", "rope", f32(T, 4, 32), positions, factors, neox=True, **rope)
    rows = ints(I64, [5, 63, 0])
    yield case("set_rows", "set_rows", f16(CELLS, 64), f32(T, 64), rows, n_kv=N_KV)
    yield case("gather", "get_rows", f32(9, 64), ints(I32, [8, 0, 8]))
    mask = np.where(rng.random((T, N_KV)) < 0.5, np.float16(0), np.float16(-np.inf))
    yield case(
        "attention", "attention", f32(T, 4, 32), f16(CELLS, 64), f16(CELLS, 64),
        (Tensor("m", F16, mask.shape), mask), n_kv=N_KV, n_head_kv=2, scale=32**-0.5,
    )  # fmt: skip
    for dtype in WEIGHT_DTYPES:
        yield case(f"get_rows {dtype.name}", "get_rows", weight(dtype, 9, 256), ints(I32, [8, 0]))
        x = rng.standard_normal((T, 256)).astype(np.float32)
        given = (Tensor("x", F32, x.shape), x)
        if dtype in QUANTISED:
            given = (Tensor("q", Q8_ACT, x.shape), quantize_activations(x))
        yield case(f"mul_mat {dtype.name}", "mul_mat", weight(dtype, 33, 256), given)


def run(backend: Backend, node: Node, values: dict[Tensor, np.ndarray], poison: int):
    """Runs `node` among poison; returns (block before, block after, offsets by tensor)."""
    weights = [t for t in values if t.kind == Kind.WEIGHT and backend_keeps(node, t)]
    placed = [t for t in {**values, node.output: None} if t not in weights]
    offsets, end = {}, GAP
    for t in placed:
        offsets[t] = end
        end += -(-(t.nbytes + GAP) // 256) * 256
    scratch_bytes = backend.scratch_bytes(node)
    before = np.full(end, poison, np.uint8)
    for tensor, offset, nbytes in ops.reads(node):
        if tensor in offsets:
            raw = values[tensor].view(np.uint8).reshape(-1)
            before[offsets[tensor] + offset :][:nbytes] = raw[offset : offset + nbytes]

    synchronous = backend.capabilities.synchronous
    memory = backend.allocate(end, Space.HOST if synchronous else Space.DEVICE)
    staging = backend.allocate(end, Space.HOST if synchronous else Space.PINNED)
    scratch = backend.allocate(max(scratch_bytes, 256), Space.DEVICE)
    loaded = {t: backend.load_weight(t, values[t].view(np.uint8).reshape(-1)) for t in weights}
    assert staging.array is not None
    staging.array[:end] = before
    backend.copy(memory.address, staging.address, end, 0, to_host=False)()
    backend.synchronize()

    def address_of(t: Tensor) -> int:
        s = t.storage
        return loaded[s].address if s in loaded else memory.address + offsets[s]

    backend.launch(node, address_of, scratch.address, 0)()
    backend.copy(staging.address, memory.address, end, 0, to_host=True)()
    backend.synchronize()
    after = staging.array[:end].copy()
    for m in (memory, staging, scratch, *loaded.values()):
        m.free()
    return before, after, offsets


def backend_keeps(node: Node, tensor: Tensor) -> bool:
    """Whether `tensor` goes through load_weight; embeddings are looked up in the file's blocks."""
    return node.op == "mul_mat"


def check(backend: Backend, node: Node, values: dict[Tensor, np.ndarray]) -> None:
    """Asserts that `node` touches nothing it did not declare."""
    written = {}
    for poison in POISONS:
        before, after, offsets = run(backend, node, values, poison)
        allowed = np.zeros(len(before), bool)
        for tensor, offset, nbytes in ops.writes(node):
            allowed[offsets[tensor] + offset :][:nbytes] = True
        strays = np.flatnonzero((before != after) & ~allowed)
        assert not len(strays), f"{len(strays)} bytes outside the declaration, first {strays[0]}"
        written[poison] = (after[allowed], before[allowed])
    (first, was_first), (second, was_second) = written.values()
    if ops.OPS[node.op].stores:  # a superset is declared: what was not stored keeps its poison
        stored = first != was_first
        assert stored.any() and np.array_equal(first[stored], second[stored])
        assert np.array_equal(second[~stored], was_second[~stored]) or not stored.all()
        return
    meaningful = np.ones(len(first), bool)
    if node.output.dtype == Q8_ACT:  # rows are padded; padding may stay as it was
        cols = node.output.cols
        row = np.arange(node.output.dtype.row_bytes(cols)) < cols + cols // 32 * 4 + cols // 16 * 2
        meaningful = np.tile(row, node.output.rows)
    assert np.array_equal(first[meaningful], second[meaningful]), "depends on undeclared bytes"
    if node.output.dtype == F32:
        assert np.isfinite(first.view(np.float32)).all()
