"""Which CUDA kernels compute a node, with which grid and block.

Pure: `launches` turns a node and its addresses into data (`backend/cuda_kernel.py`); nothing here
compiles or talks to a device. Products of up to 8 tokens are the business of
`backend/cuda_matvec.py`, of more tokens of `backend/cuda_gemm.py`, attention of
`backend/cuda_attention.py`; all other ops, and how fused nodes are put together, are here.

A kernel's argument order is that of `backend/args.py`, where its op stands there, else that of the
source file. The constants below repeat those of the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from workbench.backend import cuda_attention, cuda_gemm, cuda_matvec
from workbench.backend.args import (
    AddressOf,
    Args,
    interior_bytes,
    pack,
    parts_places,
    variant,
)
from workbench.backend.cuda_kernel import Kernel, Work, blocks
from workbench.backend.cuda_matvec import Rotate, Segment
from workbench.graph.ir import Q8_ACT, Node, Tensor

ROPE_HEADS, ROPE_THREADS = 4, 64  # rope: heads and threads of a block
HEADS_PER_BLOCK = 4  # rope_store: heads of a block, a warp each


class Place(NamedTuple):
    """Where the kernels of a node find things: tensors, scratch, and counters (u32, all zero) that
    only kernels of the same stream use."""

    at: AddressOf
    scratch: int
    counters: int

    def inside(self, node: Node) -> Place:
        """For the parts of a fused node that run as launches of their own."""
        at, scratch = parts_places(node, self.at, self.scratch)
        return Place(at, scratch, self.counters)


def _at(place: Place, tensor: Tensor | None) -> int:
    return 0 if tensor is None else place.at(tensor)


def _second(node: Node | None) -> Tensor | None:
    """What is added, or multiplied by; none where there is no such part."""
    return None if node is None else node.inputs[1]


# nodes without parts ------------------------------------------------------------------------------


def _elementwise(node: Node, p: Place) -> list[Work]:
    args = pack(node, p.at)
    rows, cols = int(args[3]), int(args[4])
    return [Kernel("elementwise", node.op, (rows, blocks(cols, 256)), 256, args, waits=True)]


def _quantize(node: Node, p: Place) -> list[Work]:
    args = pack(node, p.at)
    rows, cols = int(args[2]), int(args[3])
    return [Kernel("elementwise", "quantize", (rows, blocks(cols, 1024)), 256, args, waits=True)]


def _get_rows(node: Node, p: Place) -> list[Work]:
    args = pack(node, p.at)
    ids, cols = int(args[3]), int(args[4])
    name = "_".join(variant(node))
    return [Kernel("rows", name, (ids, blocks(cols, 256)), 256, args, waits=True)]


def _set_rows(node: Node, p: Place) -> list[Work]:
    args = pack(node, p.at)
    tokens, cols = int(args[3]), int(args[4])
    return [Kernel("rows", "set_rows", (tokens, blocks(cols, 256)), 256, args, waits=True)]


def _rope(node: Node, p: Place) -> list[Work]:
    args = pack(node, p.at)
    tokens, heads = int(args[4]), int(args[5])
    grid = (tokens, blocks(heads, ROPE_HEADS))
    return [Kernel("rope", "rope", grid, ROPE_THREADS, args, waits=True)]


def _mul_mat(node: Node, p: Place) -> list[Work]:
    if variant(node)[0] == "mul_mat_float":
        return _float_product(node, p)
    return _product(node, None, p)


def _float_product(node: Node, p: Place) -> list[Work]:
    """The float path: dequantised weights, float32 activations."""
    args = pack(node, p.at)
    rows, tokens = int(args[3]), int(args[5])
    grid = (blocks(rows, 8) * blocks(tokens, 8), 1)
    return [Kernel("mul_mat_float", "_".join(variant(node)), grid, 256, args, waits=True)]


def _attention(node: Node, p: Place) -> list[Work]:
    return _attend(node, None, p)


# products -----------------------------------------------------------------------------------------


def _segment(product: Node, bias: Node | None, p: Place, output: Tensor | None = None) -> Segment:
    """What a launch is told of one product; its result goes to `output`, or where it belongs."""
    w = product.inputs[0]
    out = output or (product if bias is None else bias).output
    return Segment(w.dtype.name, p.at(w), w.shape[0], _at(p, _second(bias)), p.at(out))


def _pairs(parts: Sequence[Node]) -> tuple[list[tuple[Node, Node | None]], list[Node]]:
    """The products at the head of `parts`, each with the add of its bias, and the other parts."""
    pairs: list[tuple[Node, Node | None]] = []
    rest = list(parts)
    while rest and rest[0].op == "mul_mat":
        product = rest.pop(0)
        biased = rest and rest[0].op == "add" and rest[0].inputs[0] is product.output
        pairs.append((product, rest.pop(0) if biased else None))
    return pairs, rest


def few(node: Node) -> bool:
    """Whether the products of `node` are for so few tokens that one launch makes them all."""
    products = [part for part in node.parts or (node,) if part.op == "mul_mat"]
    return products[0].inputs[1].shape[0] <= cuda_matvec.MOST_TOKENS and all(
        variant(product)[0] != "mul_mat_float" for product in products
    )


def _product(product: Node, bias: Node | None, p: Place) -> list[Work]:
    """One product of any number of tokens, with its bias or without."""
    w, x = product.inputs
    segment = _segment(product, bias, p)
    tokens = x.shape[0]
    if not tokens:
        return []
    if tokens <= cuda_matvec.MOST_TOKENS:
        return [cuda_matvec.plain([segment], p.at(x), w.cols, tokens)]
    return cuda_gemm.product(
        segment.dtype, segment.w, segment.rows, segment.bias, segment.dst,
        p.at(x), x.dtype == Q8_ACT, w.cols, tokens, p.scratch, p.counters,
    )  # fmt: skip


def _products(pairs: list[tuple[Node, Node | None]], p: Place) -> list[Work]:
    """Several products, one by one. Their x is converted once: the same conversion to the same
    place in scratch is not repeated."""
    works: list[Work] = []
    for product, bias in pairs:
        if variant(product)[0] == "mul_mat_float":
            works += _float_product(product, p)
            works += [] if bias is None else _elementwise(bias, p)
        else:
            works += [work for work in _product(product, bias, p) if work not in works]
    return works


def _fused_products(node: Node, p: Place) -> list[Work]:
    """product and qkv."""
    pairs, _ = _pairs(node.parts)
    if not few(node):
        return _products(pairs, p.inside(node))
    w, x = pairs[0][0].inputs
    segments = [_segment(product, bias, p) for product, bias in pairs]
    return [cuda_matvec.plain(segments, p.at(x), w.cols, x.shape[0])]


def _qkv_rope_store(node: Node, p: Place) -> list[Work]:
    pairs, tail = _pairs(node.parts)
    if not few(node):
        inside = p.inside(node)
        return _products(pairs, inside) + _rope_store_parts(tail, inside)
    q_rope, _, k_store, v_store = tail
    w, x = pairs[0][0].inputs
    p = p.inside(node) if _unread(node) else p
    outputs = (q_rope.output, k_store.output, v_store.output)
    segments = [
        _segment(product, bias, p, out) for (product, bias), out in zip(pairs, outputs, strict=True)
    ]
    rotate = _rotate(q_rope, k_store, v_store, p)
    return [cuda_matvec.qkv(segments, p.at(x), w.cols, x.shape[0], rotate)]


def _rotate(q_rope: Node, k_store: Node, v_store: Node, p: Place) -> Rotate:
    _, positions, *factors = q_rope.inputs
    r = q_rope.params
    return Rotate(
        p.at(positions), _at(p, factors[0] if factors else None), q_rope.output.cols, r["n_rot"],
        int(r["neox"]), float(r["theta_base"]), float(r["freq_scale"]),
        p.at(k_store.inputs[2]), p.at(v_store.inputs[2]), k_store.params["n_kv"],
    )  # fmt: skip


def _glu(node: Node, p: Place) -> list[Work]:
    pairs, (swiglu, *quantize) = _pairs(node.parts)
    gate = pairs[0][0]
    quantised = bool(quantize)
    rows = gate.inputs[0].shape[0]
    if few(node) and (not quantised or cuda_matvec.can_glu_quantise(rows)):
        w, x = gate.inputs
        gate_w, up_w = [_segment(product, bias, p, node.output) for product, bias in pairs]
        return [cuda_matvec.glu(gate_w, up_w, p.at(x), w.cols, x.shape[0], quantised)]
    inside = p.inside(node)
    works = _products(pairs, inside)
    tail = [swiglu, *quantize]
    return works + (
        _swiglu_quantize_parts(tail, inside) if quantised else _elementwise(tail[0], inside)
    )


def _swiglu_quantize(node: Node, p: Place) -> list[Work]:
    return _swiglu_quantize_parts(node.parts, p)


def _swiglu_quantize_parts(parts: Sequence[Node], p: Place) -> list[Work]:
    swiglu, quantize = parts
    gate, up = swiglu.inputs
    args: Args = [p.at(quantize.output), p.at(gate), p.at(up), gate.rows, gate.cols]
    grid = (gate.rows, blocks(gate.cols, 1024))
    return [Kernel("elementwise", "swiglu_quantize", grid, 256, args, waits=True)]


# norms and heads ----------------------------------------------------------------------------------


def _norm(node: Node, p: Place) -> list[Work]:
    """rms_norm, or a fused norm: [add] [rms_norm] [mul] [quantize]."""
    by_op = {part.op: part for part in node.parts or (node,)}
    add, rms, mul, quantize = (by_op.get(op) for op in ("add", "rms_norm", "mul", "quantize"))
    first = add or rms or mul
    assert first is not None
    a = first.inputs[0]
    outputs = set(node.outputs)

    def wanted(part: Node | None, last: bool) -> int:
        """Where the result of `part` goes: nowhere if no other node reads it."""
        return p.at(part.output) if part is not None and (last or part.output in outputs) else 0

    dst_sum = wanted(add, False)
    scaled = mul or rms
    args = [
        dst_sum, wanted(scaled, quantize is None), wanted(quantize, True),
        p.at(a), _at(p, _second(add)), _at(p, _second(mul)),
        a.rows, a.cols, float(rms.params["eps"]) if rms else 0.0, int(rms is not None),
    ]  # fmt: skip
    threads = min(1024, blocks(blocks(a.cols, 4), 32) * 32)
    if quantize:
        threads = max(threads, 64)  # zero_padding wants as many
    return [Kernel("norm", "norm_row", (a.rows, 1), threads, args, waits=True)]


def _unread(node: Node) -> bool:
    """Whether no node reads the turned Q (in a last layer without outputs): it is written all the
    same, to scratch."""
    if node.op not in ("rope_store", "qkv_rope_store"):
        return False
    q_rope = next(part for part in node.parts if part.op == "rope")
    return q_rope.output not in node.outputs


def _rope_store(node: Node, p: Place) -> list[Work]:
    return _rope_store_parts(node.parts, p.inside(node) if _unread(node) else p)


def _rope_store_parts(parts: Sequence[Node], p: Place) -> list[Work]:
    """[rms_norm mul rms_norm mul] rope rope set_rows set_rows: a warp for each head of Q, K, V."""
    *norms, q_rope, k_rope, k_store, v_store = parts
    q_norm, q_mul, k_norm, k_mul = norms or (None,) * 4
    q = (q_norm or q_rope).inputs[0]
    k = (k_norm or k_rope).inputs[0]
    v = v_store.inputs[1]
    tokens, heads, head_dim = q_rope.output.shape
    heads_kv = k_rope.output.shape[1]
    r = _rotate(q_rope, k_store, v_store, p)
    args = [
        p.at(q_rope.output), p.at(k_store.output), p.at(v_store.output),
        p.at(q), p.at(k), p.at(v),
        _at(p, _second(q_mul)), _at(p, _second(k_mul)),
        r.positions, r.freq_factors, r.k_indices, r.v_indices,
        heads, heads_kv, head_dim, r.n_rot, r.neox, r.n_kv,
        r.theta_base, r.freq_scale, float(q_norm.params["eps"]) if q_norm else 0.0,
    ]  # fmt: skip
    grid = (tokens, blocks(heads + 2 * heads_kv, HEADS_PER_BLOCK))
    return [Kernel("rope_store", "rope_store", grid, 32 * HEADS_PER_BLOCK, args, waits=True)]


# attention ----------------------------------------------------------------------------------------


def _attend(attention: Node, quantize: Node | None, p: Place) -> list[Work]:
    q, k, v, mask = attention.inputs
    n = attention.params
    tokens, heads, head_dim = q.shape
    out = (attention if quantize is None else quantize).output
    return list(
        cuda_attention.launches(
            p.at(out), p.at(q), p.at(k), p.at(v), p.at(mask), p.scratch, p.counters,
            tokens, heads, n["n_head_kv"], head_dim, n["n_kv"], float(n["scale"]),
            quantize is not None,
        )
    )  # fmt: skip


def _attention_quantize(node: Node, p: Place) -> list[Work]:
    attention, quantize = node.parts
    if _attention_can_quantise(node):
        return _attend(attention, quantize, p)
    inside = p.inside(node)
    return _attend(attention, None, inside) + _quantize(quantize, inside)


def _attention_can_quantise(node: Node) -> bool:
    tokens, _, head_dim = node.parts[0].inputs[0].shape
    return cuda_attention.can_quantise(tokens, head_dim)


# the table ----------------------------------------------------------------------------------------

_LAUNCHES: dict[str, Callable[[Node, Place], list[Work]]] = {
    "get_rows": _get_rows,
    "rms_norm": _norm,
    "mul": _elementwise,
    "add": _elementwise,
    "swiglu": _elementwise,
    "quantize": _quantize,
    "mul_mat": _mul_mat,
    "rope": _rope,
    "set_rows": _set_rows,
    "attention": _attention,
    "norm": _norm,
    "product": _fused_products,
    "qkv": _fused_products,
    "qkv_rope_store": _qkv_rope_store,
    "rope_store": _rope_store,
    "glu": _glu,
    "swiglu_quantize": _swiglu_quantize,
    "attention_quantize": _attention_quantize,
}


def launches(node: Node, place: Place) -> list[Work]:
    """The kernels and cuBLAS products that compute `node`, in order; none where it has nothing to
    compute. Raises DeviceError for a head_dim no kernel has."""
    if not any(t.nbytes for t in node.outputs):
        return []
    works = _LAUNCHES[node.op](node, place)
    return [w for w in works if not isinstance(w, Kernel) or (w.grid[0] and w.grid[1])]


def begins_early(node: Node) -> bool:
    """Whether every kernel of `node` declares its wait (`Kernel.waits`)."""
    works = launches(node, Place(lambda tensor: 0, 0, 0))
    return all(isinstance(w, Kernel) and w.waits for w in works)


def scratch_bytes(node: Node) -> int:
    """What the kernels of `node` want for partial results, converted activations and dequantised
    weights, and, where the parts of a fused node are launches of their own, for what they share."""
    if not node.parts:
        return _own_scratch(node)
    if node.op in ("norm", "rope_store", "swiglu_quantize"):
        return interior_bytes(node) if _unread(node) else 0
    if node.op == "attention_quantize":
        own = _own_scratch(node.parts[0])
        return own + (0 if _attention_can_quantise(node) else interior_bytes(node))
    if few(node) and not (node.op == "glu" and not _glu_is_one(node)):
        return interior_bytes(node) if _unread(node) else 0
    return interior_bytes(node) + max(_own_scratch(part) for part in node.parts)


def _glu_is_one(node: Node) -> bool:
    quantised = node.parts[-1].op == "quantize"
    return not quantised or cuda_matvec.can_glu_quantise(node.parts[0].inputs[0].shape[0])


def _own_scratch(node: Node) -> int:
    if node.op == "attention":
        tokens, heads, head_dim = node.inputs[0].shape
        p = node.params
        return cuda_attention.scratch_bytes(tokens, heads, p["n_head_kv"], head_dim, p["n_kv"])
    if node.op == "mul_mat" and not few(node) and variant(node)[0] == "mul_mat":
        w, x = node.inputs
        return cuda_gemm.scratch_bytes(w.dtype.name, w.shape[0], w.cols, x.shape[0])
    return 0
