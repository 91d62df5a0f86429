"""Ranges are true: runs an op on a backend and holds it to what it declares to read and write.

Its tensors lie in one block of device memory, with gaps between. All of it is filled with a poison
byte, then only what the op declares to read is given values. After the run every byte outside the
declared writes must be as before, and the written bytes the same whatever the poison was.
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

Values = dict[Tensor, np.ndarray]
Tried = Iterator[tuple[str, Node, Values]]  # name, node, values


def cases() -> Tried:
    """Every op, and every weight type of those that read weights."""
    rng = np.random.default_rng(7)

    def of(array, dtype: DType, *shape: int) -> tuple[Tensor, np.ndarray]:
        return Tensor("x", dtype, shape or array.shape), array

    def f32(*shape: int):
        return of(rng.standard_normal(shape).astype(np.float32), F32)

    def f16(*shape: int):
        return of(rng.standard_normal(shape).astype(np.float16), F16)

    def ints(dtype: DType, values):
        return of(np.asarray(values, np.int32 if dtype == I32 else np.int64), dtype)

    def case(name, op, *given, **params):
        return name, ops.make(op, "out", *(t for t, _ in given), **params), dict(given)

    def weight(dtype: DType, rows: int, cols: int):
        blocks = random_blocks(rng, dtype, rows, cols, cols**-0.5)
        return Tensor("w", dtype, (rows, cols), Kind.WEIGHT), blocks

    yield case("rms_norm", "rms_norm", f32(T, 5, 96), eps=1e-5)
    yield case("mul row", "mul", f32(T, 96), f32(96))
    for op in ("add", "swiglu"):
        yield case(op, op, f32(T, 96), f32(T, 96))
    for op in ("quantize", "square_sums"):
        yield case(op, op, f32(T, 96))
    yield case("rms_scale", "rms_scale", f32(T, 100), f32(T, 3), eps=4.0)
    rope = {"n_rot": 16, "theta_base": 1e4, "freq_scale": 1.0}
    positions, factors = ints(I32, [4, 0, 300]), of(np.full(8, 2, np.float32), F32)
    deltas, rows = ints(I32, [0, 7, -4, *[0] * (N_KV - 5), -300, 1]), ints(I64, [5, 63, 0])
    for neox, more in ((False, ()), (True, (factors,))):
        of_neox = rope | {"neox": neox}
        yield case(f"rope{' neox' * neox}", "rope", f32(T, 4, 32), positions, *more, **of_neox)
        name, given = f"rope_shift{' neox' * neox}", (f16(CELLS, 64), deltas, *more)
        yield case(name, "rope_shift", *given, n_head_kv=2, **of_neox)
    yield case("copy_to_view odd", "copy_to_view", f16(CELLS, 33), f32(1, 33), cell=CELLS - 1)
    for name, first in ((" ahead", -1), (" behind", N_KV - 2)):
        table, given = ints(I64, [999, first, 999]), (f16(CELLS, 64), f32(T, 64))
        yield case(f"copy_by_table{name}", "copy_by_table", *given, table, store=1, n_kv=N_KV)
    yield case("gather", "get_rows", f32(9, 64), ints(I32, [8, 0, 8]))
    mask = of(np.where(rng.random((T, N_KV)) < 0.5, np.float16(0), np.float16(-np.inf)), F16)
    given = f32(T, 4, 32), f16(CELLS, 64), of(rng.random((CELLS, 64)).astype(np.float16), F16), mask
    yield case("attention", "attention", *given, n_kv=N_KV, n_head_kv=2, scale=32**-0.5)
    for op in ("kv_extents", "kv_classes"):
        yield case(op, op, mask)
    last, known = ints(I32, [7, 8, 9, 10]), ints(I32, [5, -1, -4])  # sequences 0 and 3 have drawn
    yield case("feed", "feed", known, last)
    drawing = [(Sampling(), 0.5), (Sampling(0.7, 40, 0.9, 0.02), 0.3), (Sampling(1, 0, 1), 0.99)]
    how = np.stack([sampling.settings(uniform) for sampling, uniform in drawing])
    yield case("draw", "draw", f32(T, 640), of(how, F32))
    drawn = ints(I32, [[11, 300], [12, 301], [13, 302]])
    yield case("keep_tokens", "keep_tokens", last, drawn, ints(I32, [2, -1, 0]))
    for dtype in CACHE_DTYPES:
        kept = stored(rng.standard_normal((CELLS, 64)).astype(np.float32), dtype)[0]
        cache, row, table = of(kept, dtype, CELLS, 64), f32(T, 64), ints(I64, [999, 7, 999])
        pairs = ints(I64, [[3, 90], [-1, 5], [40, 41], [7, CELLS]])  # two leave the cache
        for op, given, params in (
            ("copy_cells", (pairs,), {}),
            ("set_rows", (row, rows), {"n_kv": N_KV}),
            ("copy_to_view", (row,), {"cell": 11}),
            ("copy_by_table", (row, table), {"store": 1, "n_kv": N_KV}),
            ("rope_shift", (deltas,), rope | {"n_head_kv": 2, "neox": True}),
        ):
            yield case(f"{op} {dtype.name}", op, cache, *given, **params)
    for way in WAYS:
        yield attention_range(f"attention {way}", way)
    parts = str(KVParts.PARALLEL_BLOCKS)
    yield attention_range(f"attention {parts}", SkipMaskedKV.CLASSES, parts)
    for dtype in WEIGHT_DTYPES:
        yield case(f"get_rows {dtype.name}", "get_rows", weight(dtype, 9, 256), ints(I32, [8, 0]))
        x = rng.standard_normal((T, 256)).astype(np.float32)
        given = of(x, F32)
        if dtype in QUANTISED:
            given = of(quantize_activations(x), Q8_ACT, *x.shape)
        yield case(f"mul_mat {dtype.name}", "mul_mat", weight(dtype, 33, 256), given)


def attention_range(
    name: str, way: str, kv_parts: str = KVParts.OFF, k_type: DType = F16, v_type: DType = F16,
    kernel: str = AttnKernel.AUTO,
) -> tuple[str, Node, Values]:  # fmt: skip
    """A case of attention whose sequences have regions, with sinks. Cells that nobody sees hold no
    numbers. way: of skip_masked_kv."""
    of = Case((1, 2, 9), 4, 2, 64, 320, regions=True, sinks=True, k_type=k_type, v_type=v_type)
    node, values, _ = attention_case(of, causal(of, 100))
    return name, *skipping(parted(node, str(kv_parts), str(kernel)), values, str(way))


def attention_cases() -> Tried:
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


def fused_cases(n_tokens: int = T) -> Tried:
    """Every op of a fused node, with each of its optional parts and without, from the graphs of
    small decoders. Of nodes that are launched alike there is one."""
    rng, seen, every = np.random.default_rng(8), set(), frozenset(FUSIONS)
    sets = [(every, False), (every, True), *((every - {gone}, False) for gone in FUSIONS)]
    biased = Decoder("tiny-llama-bias", Q4_0, biases=("ffn_gate", "ffn_up"))
    mixed = Decoder("tiny-qwen3", Q4_K, {"attn_v": Q6_K})
    for name, model, activations, halved in (
        ("llama", Decoder("tiny-llama", Q8_0), "q8", (False,)),
        ("llama bias", biased, "q8", (False, True)),
        ("qwen3 mixed", mixed, "q8", (False, True)),
        ("qwen3 two x", Decoder("tiny-qwen3", Q8_0, {"attn_v": F16}), "q8", (False,)),
        ("llama F16", Decoder("tiny-llama", F16), "q8", (False, True)),
        ("qwen3 float", Decoder("tiny-qwen3", Q4_0), "float", (False, True)),
    ):
        for deferred, (fusions, inside) in itertools.product(halved, sets):
            graph = model.graph(n_tokens, n_tokens, N_KV, activations, CELLS, deferred)
            for node in fused_nodes(graph, fusions, inside):
                if wiring(node) not in seen:
                    seen.add(wiring(node))
                    made = " ".join([name, *["halved"] * deferred])
                    parts = " ".join(part.op for part in node.parts)
                    yield f"{made}: {parts} {len(seen)}", node, values_for(node, N_KV, rng)


def run(backend: Backend, node: Node, values: Values, poison: int, programmatic: bool = False):
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


def check(backend: Backend, node: Node, values: Values) -> None:
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
        if tensor.kind == Kind.CACHE or (node.op in ops.OPS and ops.OPS[node.op].stores):
            # a superset is declared: what was not stored keeps its poison
            kept = (first != was_first) | (second != was_second)
            assert kept.any() and np.array_equal(first[kept], second[kept])
            continue
        used = meaningful(tensor, node.op)
        assert np.array_equal(first[used], second[used]), f"{tensor!r} depends on undeclared bytes"
        if tensor.dtype == F32:
            assert np.isfinite(first.view(np.float32)).all(), tensor
