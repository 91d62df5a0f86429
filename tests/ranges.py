"""Ranges are true: runs an op on a backend and holds it to what it declares to read and write.

Every tensor of the op lies in one block of device memory, with gaps between. All of it is filled
with a poison byte, then only what the op declares to read is given values. After the run every
byte outside the declared writes must be as before, and the written bytes must be the same
whatever the poison was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from tests.attention import Case, attention_case, causal, parted, skipping, stored
from tests.graphs import Decoder, fused_nodes, values_for, wiring
from workbench.backend.base import Backend
from workbench.common.sizes import round_up
from workbench.config import AttnKernel, KVParts, SkipMaskedKV
from workbench.engine.cache.extent import WAYS
from workbench.graph import ops
from workbench.graph.attend import PARTS
from workbench.graph.fuse import FUSIONS
from workbench.graph.ir import (
    ALIGN,
    BF16,
    CACHE_DTYPES,
    F16,
    F32,
    I32,
    I64,
    Q4_0,
    Q4_K,
    Q6_K,
    Q8_0,
    Q8_ACT,
    QUANTISED,
    WEIGHT_DTYPES,
    DType,
    Kind,
    Node,
    Tensor,
)
from workbench.model.gguf.quants import quantize_activations, random_blocks
from workbench.model.sampler import Sampling
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
    yield case("square_sums", "square_sums", f32(T, 96))
    yield case("rms_scale", "rms_scale", f32(T, 100), f32(T, 3), eps=4.0)
    rope = {"n_rot": 16, "theta_base": 1e4, "freq_scale": 1.0}
    positions, factors = ints(I32, [4, 0, 300]), (Tensor("f", F32, (8,)), np.full(8, 2, np.float32))
    yield case("rope", "rope", f32(T, 4, 32), positions, neox=False, **rope)
    yield case("rope neox", "rope", f32(T, 4, 32), positions, factors, neox=True, **rope)
    deltas = ints(I32, [0, 7, -4, *[0] * (N_KV - 5), -300, 1])
    for neox, more in ((False, ()), (True, (factors,))):
        name, given = f"rope_shift{' neox' * neox}", (f16(CELLS, 64), deltas, *more)
        yield case(name, "rope_shift", *given, n_head_kv=2, neox=neox, **rope)
    rows = ints(I64, [5, 63, 0])
    yield case("set_rows", "set_rows", f16(CELLS, 64), f32(T, 64), rows, n_kv=N_KV)
    yield case("copy_to_view", "copy_to_view", f16(CELLS, 64), f32(T, 64), cell=11)
    yield case("copy_to_view odd", "copy_to_view", f16(CELLS, 33), f32(1, 33), cell=CELLS - 1)
    for name, first in (("", 7), (" ahead", -1), (" behind", N_KV - 2)):
        table, given = ints(I64, [999, first, 999]), (f16(CELLS, 64), f32(T, 64))
        yield case(f"copy_by_table{name}", "copy_by_table", *given, table, store=1, n_kv=N_KV)
    yield case("gather", "get_rows", f32(9, 64), ints(I32, [8, 0, 8]))
    mask = np.where(rng.random((T, N_KV)) < 0.5, np.float16(0), np.float16(-np.inf))
    yield case(
        "attention", "attention", f32(T, 4, 32), f16(CELLS, 64), f16(CELLS, 64),
        (Tensor("m", F16, mask.shape), mask), n_kv=N_KV, n_head_kv=2, scale=32**-0.5,
    )  # fmt: skip
    found = (Tensor("m", F16, mask.shape), mask)
    yield case("kv_extents", "kv_extents", found)
    yield case("kv_classes", "kv_classes", found)
    last, known = ints(I32, [7, 8, 9, 10]), ints(I32, [5, -1, -4])  # sequences 0 and 3 have drawn
    yield case("feed", "feed", known, last)
    drawing = [(Sampling(), 0.5), (Sampling(0.7, 40, 0.9, 0.02), 0.3), (Sampling(1, 0, 1), 0.99)]
    how = np.stack([drawing[t % 3][0].settings(drawing[t % 3][1]) for t in range(T)])
    yield case("draw", "draw", f32(T, 640), (Tensor("h", F32, how.shape), how))
    drawn = ints(I32, [[11, 300], [12, 301], [13, 302]])
    yield case("keep_tokens", "keep_tokens", last, drawn, ints(I32, [2, -1, 0]))
    for dtype in CACHE_DTYPES:
        kept = stored(rng.standard_normal((CELLS, 64)).astype(np.float32), dtype)[0]
        cache = (Tensor("c", dtype, (CELLS, 64)), kept)
        pairs = ints(I64, [[3, 90], [-1, 5], [40, 41], [7, CELLS]])  # two leave the cache
        yield case(f"copy_cells {dtype.name}", "copy_cells", cache, pairs)
        if dtype != F16:  # which has its cases above
            more, row = {"n_kv": N_KV}, f32(T, 64)
            yield case(f"set_rows {dtype.name}", "set_rows", cache, row, rows, **more)
            yield case(f"copy_to_view {dtype.name}", "copy_to_view", cache, row, cell=11)
            table = ints(I64, [999, 7, 999])
            given = (cache, row, table)
            yield case(f"copy_by_table {dtype.name}", "copy_by_table", *given, store=1, **more)
            name, params = f"rope_shift {dtype.name}", rope | {"n_head_kv": 2, "neox": True}
            yield case(name, "rope_shift", cache, deltas, **params)
    for way in WAYS:
        yield attention_range(f"attention {way}", way)
    parts = str(KVParts.PARALLEL_BLOCKS)
    yield attention_range(f"attention {parts}", SkipMaskedKV.CLASSES, parts)
    for dtype in WEIGHT_DTYPES:
        yield case(f"get_rows {dtype.name}", "get_rows", weight(dtype, 9, 256), ints(I32, [8, 0]))
        x = rng.standard_normal((T, 256)).astype(np.float32)
        given = (Tensor("x", F32, x.shape), x)
        if dtype in QUANTISED:
            given = (Tensor("q", Q8_ACT, x.shape), quantize_activations(x))
        yield case(f"mul_mat {dtype.name}", "mul_mat", weight(dtype, 33, 256), given)


def attention_range(
    name: str,
    way: str,
    kv_parts: str = KVParts.OFF,
    k_type: DType = F16,
    v_type: DType = F16,
    kernel: str = AttnKernel.AUTO,
) -> tuple[str, Node, dict[Tensor, np.ndarray]]:
    """A case of attention whose sequences have regions, with sinks. Cells that nobody sees hold no
    numbers. way: of skip_masked_kv."""
    of = Case((1, 2, 9), 4, 2, 64, 320, regions=True, sinks=True, k_type=k_type, v_type=v_type)
    node, values, _ = attention_case(of, causal(of, 100))
    return name, *skipping(parted(node, str(kv_parts), str(kernel)), values, str(way))


def attention_cases() -> Iterator[tuple[str, Node, dict[Tensor, np.ndarray]]]:
    """Attention by every kernel of all backends, with parts of every kind and caches of all
    types."""
    ways = itertools.cycle(WAYS)
    yield attention_range("attention stream_k", SkipMaskedKV.TAIL, KVParts.STREAM_K)
    for kernel, kv_parts in itertools.product((AttnKernel.VEC, AttnKernel.TILE), PARTS):
        name = f"attention {kernel} {kv_parts}"
        yield attention_range(name, next(ways), kv_parts, Q8_0, BF16, kernel)
    for k_type, v_type in itertools.product(CACHE_DTYPES, repeat=2):
        way = next(ways)
        name = f"attention {k_type.name} {v_type.name} {way}"
        yield attention_range(name, way, KVParts.OFF, k_type, v_type)


def fused_cases(n_tokens: int = T) -> Iterator[tuple[str, Node, dict[Tensor, np.ndarray]]]:
    """(name, node, values): every op of a fused node, with each of its optional parts and without,
    from the graphs of small decoders. Of nodes that are launched alike there is one."""
    rng = np.random.default_rng(8)
    seen = set()
    every = frozenset(FUSIONS)
    biased = Decoder("tiny-llama-bias", Q4_0, biases=("ffn_gate", "ffn_up"))
    for name, model, activations, deferred in (
        ("llama", Decoder("tiny-llama", Q8_0), "q8", False),
        ("llama bias", biased, "q8", False),
        ("qwen3 mixed", Decoder("tiny-qwen3", Q4_K, {"attn_v": Q6_K}), "q8", False),
        ("qwen3 two x", Decoder("tiny-qwen3", Q8_0, {"attn_v": F16}), "q8", False),
        ("llama F16", Decoder("tiny-llama", F16), "q8", False),
        ("qwen3 float", Decoder("tiny-qwen3", Q4_0), "float", False),
        ("llama bias halved", biased, "q8", True),
        ("llama F16 halved", Decoder("tiny-llama", F16), "q8", True),
        ("qwen3 mixed halved", Decoder("tiny-qwen3", Q4_K, {"attn_v": Q6_K}), "q8", True),
        ("qwen3 float halved", Decoder("tiny-qwen3", Q4_0), "float", True),
    ):
        graph = model.graph(n_tokens, n_tokens, N_KV, activations, CELLS, deferred)
        sets = [(every, False), (every, True)]
        sets += [(every - {left_out}, False) for left_out in FUSIONS]
        for fusions, inside in sets:
            for node in fused_nodes(graph, fusions, inside):
                if wiring(node) not in seen:
                    seen.add(wiring(node))
                    made = " ".join(part.op for part in node.parts)
                    yield f"{name}: {made} {len(seen)}", node, values_for(node, N_KV, rng)


def run(
    backend: Backend,
    node: Node,
    values: dict[Tensor, np.ndarray],
    poison: int,
    programmatic: bool = False,
):
    """Runs `node` among poison; returns (block before, block after, offsets by tensor). Scratch is
    poisoned too, with poison behind it that must stay."""
    weights = [t for t in values if t.kind == Kind.WEIGHT and backend_keeps(node, t)]
    placed = [t for t in {**values, **{t.storage: None for t in node.outputs}} if t not in weights]
    offsets, end = {}, GAP
    for t in placed:
        offsets[t] = end
        end += round_up(t.nbytes + GAP, ALIGN)
    scratch, scratch_bytes = end, backend.scratch_bytes(node)
    end += round_up(scratch_bytes + GAP, ALIGN)
    before = np.full(end, poison, np.uint8)
    for tensor, offset, nbytes in ops.reads(node):
        if tensor in offsets:
            raw = values[tensor].view(np.uint8).reshape(-1)
            before[offsets[tensor] + offset :][:nbytes] = raw[offset : offset + nbytes]

    synchronous = backend.capabilities.synchronous
    memory = backend.allocate(end, Space.HOST if synchronous else Space.DEVICE)
    staging = backend.allocate(end, Space.HOST if synchronous else Space.PINNED)
    loaded = {t: backend.load_weight(t, values[t].view(np.uint8).reshape(-1)) for t in weights}
    assert staging.array is not None
    staging.array[:end] = before
    backend.copy(memory.address, staging.address, end, 0, to_host=False)()
    backend.synchronize()

    def address_of(t: Tensor) -> int:
        s = t.storage
        return loaded[s].address if s in loaded else memory.address + offsets[s]

    backend.launch(node, address_of, memory.address + scratch, 0, programmatic)()
    backend.copy(staging.address, memory.address, end, 0, to_host=True)()
    backend.synchronize()
    after = staging.array[:end].copy()
    before[scratch : scratch + scratch_bytes] = after[scratch : scratch + scratch_bytes]
    for m in (memory, staging, *loaded.values()):
        m.free()
    return before, after, offsets


def backend_keeps(node: Node, tensor: Tensor) -> bool:
    """Whether `tensor` goes through load_weight; embeddings are looked up in the file's blocks."""
    return any(part.op == "mul_mat" and part.inputs[0] is tensor for part in node.parts or (node,))


def meaningful(tensor: Tensor, op: str = "") -> np.ndarray:
    """Which bytes of an op's output hold values that follow from its inputs. Rows of Q8_ACT are
    padded, and beside a drawn token stands how long that took. bool (nbytes,)"""
    used = np.ones(tensor.nbytes, bool)
    if op == "draw":
        used.reshape(tensor.rows, 2, -1)[:, 1] = False
    if tensor.dtype == Q8_ACT:
        cols = tensor.cols
        row = np.arange(tensor.dtype.row_bytes(cols)) < cols + cols // 32 * 4 + cols // 16 * 2
        used = np.tile(row, tensor.rows)
    return used


def check(backend: Backend, node: Node, values: dict[Tensor, np.ndarray]) -> None:
    """Asserts that `node` touches nothing it did not declare, and makes every output whole."""
    runs = [run(backend, node, values, poison) for poison in POISONS]
    for before, after, offsets in runs:
        allowed = np.zeros(len(before), bool)
        for tensor, offset, nbytes in ops.writes(node):
            allowed[offsets[tensor] + offset :][:nbytes] = True
        strays = np.flatnonzero((before != after) & ~allowed)
        assert not len(strays), f"{len(strays)} bytes outside the declaration, first {strays[0]}"
    for tensor in {t.storage for t in node.outputs}:
        (was_first, first), (was_second, second) = (
            [block[offsets[tensor] :][: tensor.nbytes] for block in (before, after)]
            for before, after, offsets in runs
        )
        if tensor.kind == Kind.CACHE or ops.OPS.get(node.op, _NO_OP).stores:
            # a superset is declared: what was not stored keeps its poison
            stored = (first != was_first) | (second != was_second)
            assert stored.any() and np.array_equal(first[stored], second[stored])
            continue
        used = meaningful(tensor, node.op)
        assert np.array_equal(first[used], second[used]), f"{tensor!r} depends on undeclared bytes"
        if tensor.dtype == F32:
            assert np.isfinite(first.view(np.float32)).all(), tensor


_NO_OP = ops.OPS["add"]  # an op that does not store into its input
