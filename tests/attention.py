"""Cases of attention for the kernel tests, and their twin in float64. Cells that nobody sees hold
infinities and NaN."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.engine.cache.extent import classes, extents
from workbench.graph import ops
from workbench.graph.attend import CLASSES, EXTENTS, with_inputs
from workbench.graph.ir import BF16, F16, F32, I32, Q8_0, U8, DType, Node, Tensor


class Case(NamedTuple):
    """tokens: of each sequence. heads: of queries. cells: of a region. spare: cells behind each
    region that nobody may read."""

    tokens: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    n_kv: int
    regions: bool = False
    sinks: bool = False
    k_type: DType = F16
    v_type: DType = F16
    spare: int = 3

    @property
    def n_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def n_regions(self) -> int:
        return len(self.tokens) if self.regions else 1


def stored(values: np.ndarray, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """float32 rows as a cache has them, and the numbers that these are: bytes and float64."""
    from gguf import GGMLQuantizationType as Type
    from gguf.quants import dequantize, quantize

    if dtype == F16:
        return (halves := values.astype(np.float16)), halves.astype(np.float64)
    if dtype == F32:
        return values, values.astype(np.float64)
    kind = {BF16: Type.BF16, Q8_0: Type.Q8_0}[dtype]
    packed = quantize(values, kind)
    return packed, dequantize(packed, kind).astype(np.float64)


def attention_case(
    case: Case, mask: np.ndarray, seed: int = 0
) -> tuple[Node, dict[Tensor, np.ndarray], np.ndarray]:
    """The node, its arrays, and its twin (tokens, heads * dim) float64. mask: (T, n_kv) bool, what
    is seen."""
    rng = np.random.default_rng(seed)
    t, region = case.n_tokens, case.n_kv + case.spare
    q = rng.standard_normal((t, case.heads, case.dim)).astype(np.float32) * 2
    shape = (case.n_regions * region, case.kv_heads * case.dim)
    first = np.zeros(t, int)
    if case.regions:  # not in the order of the sequences
        order = rng.permutation(case.n_regions)
        first = np.repeat(order * region, case.tokens)
    dead = np.ones(shape[0], bool)
    for token in range(t):
        dead[first[token] + np.flatnonzero(mask[token])] = False
    tq, tm = Tensor("q", F32, q.shape), Tensor("mask", F16, mask.shape)
    arrays: dict[Tensor, np.ndarray] = {tq: q}
    inputs, wide = [tq], []
    for name, dtype, garbage in (("k", case.k_type, np.nan), ("v", case.v_type, np.inf)):
        values = rng.standard_normal(shape).astype(np.float32)
        data, numbers = stored(values, dtype)
        if dtype == Q8_0:  # a scale that is not finite
            rows = data.reshape(shape[0], -1, Q8_0.block_bytes)
            rows[dead, :, :2] = np.float16(garbage).view(np.uint16).astype("<u2").tobytes()[0], 0x7E
        elif dtype == BF16:
            data.view(np.uint16).reshape(shape)[dead] = 0x7FC0
        else:
            data[dead] = garbage
        tensor = Tensor(name, dtype, shape)
        arrays[tensor] = data
        inputs.append(tensor)
        wide.append(numbers.reshape(shape[0], case.kv_heads, case.dim))
    arrays[tm] = np.where(mask, 0, -np.inf).astype(np.float16)
    more = {}
    if case.regions:
        starts = np.cumsum([0, *case.tokens[:-1]])
        table = np.stack([starts, order * region], axis=1).astype(np.int32)
        more["regions"] = Tensor("regions", I32, table.shape)
        arrays[more["regions"]] = table
    sink = rng.standard_normal(case.heads).astype(np.float32)
    if case.sinks:
        more["sinks"] = Tensor("sinks", F32, sink.shape)
        arrays[more["sinks"]] = sink
    scale = case.dim**-0.5
    node = ops.make(
        "attention", "y", *inputs, tm, *more.values(), more=tuple(more), n_kv=case.n_kv,
        n_head_kv=case.kv_heads, scale=scale,
    )  # fmt: skip
    twin, sinks = np.zeros(q.shape), sink if case.sinks else np.full(case.heads, -np.inf)
    for token, h in np.ndindex(t, case.heads):
        live = first[token] + np.flatnonzero(mask[token])
        if len(live):
            head = h // (case.heads // case.kv_heads)
            scores = scale * wide[0][live, head] @ q[token, h].astype(np.float64)
            top = max(scores.max(), sinks[h])
            p = np.exp(scores - top)
            twin[token, h] = p @ wide[1][live, head] / (p.sum() + np.exp(sinks[h] - top))
    return node, arrays, twin.reshape(t, -1)


def skipping(
    node: Node, arrays: dict[Tensor, np.ndarray], way: str
) -> tuple[Node, dict[Tensor, np.ndarray]]:
    """The node with a way of `skip_masked_kv`, and what the step's kernel would have found."""
    ways = {"tail": (EXTENTS, I32, extents), "classes": (CLASSES, U8, classes)}
    if way not in ways:
        return with_inputs(node, {"skip": way}), arrays
    name, dtype, of = ways[way]
    known = of(arrays[node.inputs[3]])
    found = Tensor(name, dtype, known.shape)
    return with_inputs(node, {"skip": way}, **{name: found}), arrays | {found: known}


def parted(node: Node, kv_parts: str, kernel: str = "auto") -> Node:
    """The node with values of `kv_parts` and `attn_kernel`."""
    return with_inputs(node, {"kv_parts": kv_parts, "kernel": kernel})


def causal(case: Case, past: int) -> np.ndarray:
    """Token i of a sequence sees cells 0..past+i; bool (T, n_kv)."""
    at = np.concatenate([np.arange(n) for n in case.tokens])
    return np.arange(case.n_kv) <= past + at[:, None]


def windowed(case: Case, past: int, window: int) -> np.ndarray:
    """As `causal`, but only the last `window` of these cells; bool (T, n_kv)."""
    return causal(case, past) & ~causal(case, past - window)


def broadcast(case: Case, rng: np.random.Generator) -> np.ndarray:
    """All tokens of a region see the same cells of it, none in the last third; bool (T, n_kv)."""
    rows = rng.random((case.n_regions, case.n_kv)) < 0.3
    rows[:, case.n_kv - case.n_kv // 3 :] = False
    return np.repeat(rows, case.tokens if case.regions else case.n_tokens, axis=0)
