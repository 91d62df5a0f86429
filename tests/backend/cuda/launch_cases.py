"""What the launch table asks for: the kernels of nodes of every op and type, fused and not."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

from tests.graphs import Decoder, fused_nodes, wiring
from workbench.backend.cuda.kernels import op_table
from workbench.backend.cuda.kernels.kernel import CLUSTERS, Kernel, Operands, Work
from workbench.config import KVParts, SkipMaskedKV
from workbench.graph import ir
from workbench.graph.attend import with_inputs
from workbench.graph.fuse import FUSIONS
from workbench.graph.ir import F16, F32, I32, I64, DType, Kind, Node, Tensor
from workbench.graph.ops import make
from workbench.graph.shapes import CLASS_CELLS

TOKENS = (1, 2, 4, 8, 9, 33, 512)
N_KV = 4096
PARTS = (str(KVParts.OFF), str(KVParts.PARALLEL_BLOCKS))
WAYS = tuple(map(str, SkipMaskedKV))
ALL = frozenset(FUSIONS)
# every pattern, and those that change what a fused node consists of left out one by one
FUSED = [ALL, *(ALL - {name} for name in FUSIONS)]
TUNED = (ir.Q4_K, F16)  # the types whose every tuning and epilogue is compiled


class LaunchCase(NamedTuple):
    """A node, how many tokens it is for, and the weight type it was made for (None: none)."""

    node: Node
    tokens: int
    dtype: DType | None


def plain_nodes(tokens: int, n_kv: int = N_KV) -> Iterator[LaunchCase]:
    """One node of every op and weight type."""
    x, last = Tensor("x", F32, (tokens, 1280)), Tensor("last_tokens", I32, (tokens,), Kind.CACHE)
    mask, each = Tensor("mask", F16, (tokens, n_kv)), Tensor("p", I32, (tokens,))
    rope: dict[str, Any] = {"n_rot": 128, "neox": True, "theta_base": 1e4, "freq_scale": 1.0}
    nodes = [
        make("rms_norm", "n", x, eps=1e-5),
        make("mul", "m", x, Tensor("b", F32, (1280,))),
        make("add", "a", x, x),
        make("swiglu", "s", x, x),
        make("quantize", "q", x),
        make("square_sums", "ss", x),
        make("rms_scale", "rs", x, Tensor("sq", F32, (tokens, 3)), eps=1e-5),
        make("rope", "r", Tensor("h", F32, (tokens, 10, 128)), each, **rope),
        make("kv_extents", "e", mask),
        make("kv_classes", "c", mask),
        make("feed", "f", each, last),
        make("draw", "d", Tensor("l", F32, (tokens, 19000)), Tensor("s", F32, (tokens, 5))),
        make("keep_tokens", "t", last, Tensor("i", I32, (tokens, 2)), each),
    ]
    for dtype in ir.CACHE_DTYPES:
        k, to = Tensor("k", dtype, (n_kv, 1280), Kind.CACHE), Tensor("i", I64, (tokens,))
        nodes += [
            make("set_rows", "k", k, x, to, n_kv=n_kv),
            make("copy_to_view", "k", k, x, cell=7),
            make("copy_by_table", "k", k, x, Tensor("t", I64, (4,)), store=2, n_kv=n_kv),
            make("rope_shift", "k", k, each, n_head_kv=10, **rope),
            make("copy_cells", "k", k, Tensor("p", I64, (tokens, 2))),
        ]
    yield from (LaunchCase(node, tokens, None) for node in nodes)
    yield from attending(tokens, n_kv)
    for dtype in ir.WEIGHT_DTYPES:
        w, y = Tensor("w", dtype, (19, 1280), Kind.WEIGHT), Tensor("y", F32, (tokens, 1280))
        fast = Tensor("y", ir.Q8_ACT if dtype in ir.QUANTISED else F32, y.shape)
        ids, plain = Tensor("ids", I32, (tokens,)), make("mul_mat", "z", w, y, activations="float")
        for node in (make("get_rows", "e", w, ids), make("mul_mat", "z", w, fast), plain):
            yield LaunchCase(node, tokens, dtype)


def attending(tokens: int, n_kv: int) -> Iterator[LaunchCase]:
    """Attention of every head size, in one part and in several; and, of one head size, with all
    that it may be given: regions for one token each or for more, ways to skip cells, sinks."""
    for head_dim, extent, kv_parts in itertools.product((64, 128, 256), (256, n_kv), PARTS):
        yield LaunchCase(attention(tokens, head_dim, n_kv, extent, kv_parts), tokens, None)
    for n_regions, way, kv_parts in itertools.product((0, tokens, tokens // 2), WAYS, PARTS):
        more: dict[str, Tensor] = {"sinks": Tensor("s", F32, (32,))}
        if n_regions > 1:
            more["regions"] = Tensor("r", I32, (n_regions, 2))
        if way == "tail":
            more["extents"] = Tensor("e", I32, (tokens,))
        if way == "classes":
            more["classes"] = Tensor("c", ir.U8, (tokens, n_kv // CLASS_CELLS))
        plain = attention(tokens, 64, n_kv, n_kv, kv_parts)
        yield LaunchCase(with_inputs(plain, {"skip": way}, **more), tokens, None)


def attention(tokens: int, head_dim: int, cells: int, n_kv: int, kv_parts: str) -> Node:
    """32 query heads over 8 kv heads."""
    q, k = Tensor("q", F32, (tokens, 32, head_dim)), Tensor("k", F16, (cells, 8 * head_dim))
    mask = Tensor("mask", F16, (tokens, n_kv))
    made = make("attention", "o", q, k, k, mask, n_kv=n_kv, n_head_kv=8, scale=0.1)
    return with_inputs(made, {"kv_parts": kv_parts})


def fused(tokens: int, dtype: DType, n_kv: int = N_KV) -> Iterator[LaunchCase]:
    """The fused nodes of both architectures in one weight type, with biases and without."""
    mixed = {"attn_v": ir.Q6_K if dtype in ir.QUANTISED else ir.BF16}
    for model in (
        Decoder("tiny-llama", dtype),
        Decoder("tiny-llama-bias", dtype, mixed, biases=("ffn_gate", "ffn_up")),
        Decoder("tiny-qwen3", dtype),
        Decoder("tiny-llama", dtype, {"attn_v": ir.Q8_0}),  # of one x only with float activations
    ):
        kinds = ("q8", "float") if dtype in (ir.Q8_0, F16) else ("q8",)
        for activations, deferred in itertools.product(kinds, (False, True)):
            graph = model.graph(tokens, tokens, n_kv, activations, n_kv, deferred)
            for fusions, inside in ((f, i) for f in FUSED for i in (False, f is ALL)):
                for node in fused_nodes(graph, fusions, inside):
                    yield LaunchCase(node, tokens, dtype)


@cache
def joined(tokens: int, dtype: DType) -> tuple[LaunchCase, ...]:
    """Of `fused` one node of each wiring: its launches are the others'."""
    found: dict[tuple, LaunchCase] = {}
    for case in fused(tokens, dtype):
        found.setdefault(wiring(case.node), case)
    return tuple(found.values())


def every(tokens: int, dtypes: Iterable[DType] = ir.WEIGHT_DTYPES) -> Iterator[LaunchCase]:
    """All plain nodes; and of the fused ones whose weights have these types, one of each wiring."""
    yield from plain_nodes(tokens)
    for dtype in dtypes:
        yield from joined(tokens, dtype)


def works(node: Node, sm: int = CLUSTERS) -> list[Work]:
    """What computes `node`, everything at addresses that are no accident."""
    return op_table.launches(node, Operands(lambda t: 4096, 8192, 16384, sm))


@cache
def one_of_each(sm: int = CLUSTERS) -> tuple[Kernel, ...]:
    """Of `chosen_works` one tuning of each kernel for each weight type and each way of ending."""
    found: dict[tuple, Kernel] = {}
    ways = ("TYPE", "HEAD_BLOCKS", "EPILOGUE")
    for work in chosen_works(sm):
        kinds = (d for d in work.defines if d.startswith(ways) or "=" not in d)
        found.setdefault((work.file, work.function, *kinds), work)
    return tuple(found.values())


def some_works(sm: int = CLUSTERS) -> tuple[Kernel, ...]:
    """Of `chosen_works` a fourth."""
    return chosen_works(sm)[::4]


@cache
def chosen_works(sm: int = CLUSTERS) -> tuple[Kernel, ...]:
    """The kernels that are compiled here, one of each (file, defines, function): of one weight type
    for each kind of activations in every tuning and epilogue, of every other type for one token,
    unfused."""
    found: dict[tuple, Kernel] = {}
    tuned = [dtype for dtype in ir.WEIGHT_DTYPES if dtype in TUNED]
    for node, tokens, dtype in (case for n in TOKENS for case in every(n, tuned)):
        if dtype is None or dtype in TUNED or (tokens == 1 and not node.parts):
            for work in works(node, sm):
                if isinstance(work, Kernel):
                    found.setdefault((work.file, work.defines, work.function), work)
    return tuple(found.values())
