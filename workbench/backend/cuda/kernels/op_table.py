"""The launches that compute a node on CUDA, and the scratch that they need.

Pure: `launches` turns a node and addresses into data (`kernel.py`). Nothing here compiles or uses a
device. The table of ops names the function for each op: products are in `products.py`, attention is
in `attention.py` and `attention_plain.py`, all other ops are in `elementwise.py`.
"""

from collections.abc import Callable

from workbench.backend.cuda.kernels import attention, attention_plain, elementwise, matvec, products
from workbench.backend.cuda.kernels.attention import AttentionAt, AttentionShape
from workbench.backend.cuda.kernels.kernel import Kernel, Operands, Work
from workbench.config import AttnKernel, KVParts, SkipMaskedKV
from workbench.graph.attend import attended
from workbench.graph.ir import Node
from workbench.graph.ops import interior_bytes

# attention ----------------------------------------------------------------------------------------


def _attend(node: Node, quantize: Node | None, p: Operands) -> list[Work]:
    out = (node if quantize is None else quantize).output
    a = attended(node)
    q, k, v, mask = map(p.at, node.inputs[:4])
    at = AttentionAt(
        p.at(out), q, k, v, mask, p.scratch, p.counters,
        p.at_if(a.regions), p.at_if(a.extents or a.classes), p.at_if(a.sinks),
    )  # fmt: skip
    shape, scale = _shape(node), float(node.params["scale"])
    if attention.is_mma(shape):
        return list(attention.launches(shape, at, scale, quantize is not None))
    return list(attention_plain.launches(shape, at, scale))


def _attention_quantize(node: Node, p: Operands) -> list[Work]:
    attend, quantize = node.parts
    if _attention_can_quantise(node):
        return _attend(attend, quantize, p)
    inside = p.inside(node)
    return _attend(attend, None, inside) + elementwise.elementwise(quantize, inside)


def _attention_can_quantise(node: Node) -> bool:
    """Whether attention gives its result as Q8_ACT. Kernels without tensor cores cannot."""
    shape = _shape(node.parts[0])
    return attention.is_mma(shape) and attention.can_quantise(shape)


def _shape(attend: Node) -> AttentionShape:
    tokens, heads, head_dim = attend.inputs[0].shape
    n_head_kv, n_kv = attend.params["n_head_kv"], attend.params["n_kv"]
    a, said = attended(attend), attend.params
    n_regions = 0 if a.regions is None else a.regions.shape[0]
    return AttentionShape(
        tokens, heads, n_head_kv, head_dim, n_kv, n_regions, said.get("skip", SkipMaskedKV.OFF),
        said.get("kv_parts", KVParts.OFF), a.sinks is not None,
        said.get("kernel", AttnKernel.AUTO), a.k.dtype.name, a.v.dtype.name,
    )  # fmt: skip


# the table ----------------------------------------------------------------------------------------

_LAUNCHES: dict[str, Callable[[Node, Operands], list[Work]]] = {
    **dict.fromkeys(elementwise.GRIDS, elementwise.elementwise),
    **dict.fromkeys(("kv_extents", "kv_classes"), elementwise.seen),
    "copy_cells": elementwise.copy_cells,
    **dict.fromkeys(("feed", "draw", "keep_tokens"), elementwise.tokens),
    "rms_norm": elementwise.norm,
    "mul_mat": products.mul_mat,
    "attention": lambda node, p: _attend(node, None, p),
    "norm": elementwise.norm,
    "product": products.fused_products,
    "product_norm": products.product_norm,
    "qkv": products.fused_products,
    "qkv_rope_store": products.qkv_rope_store,
    "rope_store": lambda node, p: elementwise.rope_store(node.parts, p.inside(node)),
    "rope_set_rows": lambda node, p: elementwise.k_heads(node.parts, p.inside(node)),
    "norm_rope": lambda node, p: elementwise.q_heads(node.parts, p.inside(node)),
    "glu": products.glu,
    "swiglu_quantize": lambda node, p: elementwise.swiglu_quantize(node.parts, p),
    "attention_quantize": _attention_quantize,
}


def launches(node: Node, operands: Operands) -> list[Work]:
    """The kernels and cuBLAS products that compute `node`, in order; none where its outputs are
    empty. Raises DeviceError for a shape that no kernel takes."""
    if not any(t.nbytes for t in node.outputs):
        return []
    works = _LAUNCHES[node.op](node, operands)
    return [w for w in works if not isinstance(w, Kernel) or (w.grid[0] and w.grid[1])]


def begins_early(node: Node) -> bool:
    """Whether every kernel of `node` declares its wait (`Kernel.waits`). Kernels of `kernels/` do;
    cuBLAS does not. Only where cuBLAS may be used are the launches made, to look."""
    multiplied = [part for part in node.parts or (node,) if part.op == "mul_mat"]
    if all(part.inputs[1].shape[0] <= matvec.MOST_TOKENS for part in multiplied):
        return True
    works = launches(node, Operands(lambda tensor: 0, 0, 0))
    return all(isinstance(w, Kernel) and w.waits for w in works)


def scratch_bytes(node: Node) -> int:
    """Bytes of scratch that `node` needs for partial results, converted activations and expanded
    weights. Where the parts of a fused node are separate launches, scratch also holds the results
    that they share."""
    if not node.parts:
        return _own_scratch(node)
    if node.op in ("norm", "rope_store", "rope_set_rows", "norm_rope", "swiglu_quantize"):
        return interior_bytes(node) if elementwise.unread(node) else 0
    if node.op == "attention_quantize":
        own = _own_scratch(node.parts[0])
        return own + (0 if _attention_can_quantise(node) else interior_bytes(node))
    if products.few(node) and _IS_ONE.get(node.op, products.few)(node):
        # Space for a sum that no other node reads, or for heads where a separate launch norms them.
        uses = node.op == "product_norm" or any(part.op == "rms_norm" for part in node.parts)
        return interior_bytes(node) if uses or elementwise.unread(node) else 0
    together = products.scratch_bytes(node)
    if node.op == "glu" and all(products.glu_in_tiles(node, on) for on in (False, True)):
        return together  # on every device
    return interior_bytes(node) + max(together, *(_own_scratch(part) for part in node.parts))


# Fused ops -> whether one launch computes them, where the tokens are few.
_IS_ONE: dict[str, Callable[[Node], bool]] = {
    "glu": products.glu_is_one,
    "product_norm": products.product_norm_is_one,
    "qkv_rope_store": products.qkv_is_one,
}


def _own_scratch(node: Node) -> int:
    if node.op == "attention":
        shape = _shape(node)
        return (attention if attention.is_mma(shape) else attention_plain).scratch_bytes(shape)
    return products.scratch_bytes(node) if node.op == "mul_mat" else 0
