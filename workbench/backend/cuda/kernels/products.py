"""Launches of products, alone or fused with the ops around them.

Pure. The weight type and the number of tokens choose the kernel of a product:

    weights      tokens      launch                                  file
    any          1 to 8      kernels/product.cu, product_qkv.cu      matvec.py
    quantised    9 to 128    kernels/tensor_product.cu               gemm.py
                 to 512..1024, by type, with warpgroups (9.0)
    quantised    more        kernels/dequantise.cu, then cuBLAS      gemm.py
    F16, BF16    9 or more   kernels/dequantise.cu (x), then cuBLAS  gemm.py
    F32          9 or more   cuBLAS                                  gemm.py
    any          any, with   kernels/mul_mat_float.cu                here
                 activations=float

A fused node that no single kernel computes becomes the launches of its parts. Take a llama layer of
one quantised type with more than 8 tokens, every pattern of `graph/fuse.py` and tiles
(`gemm.by_tile`). It is 12 launches: norm, Q + K + V, rope and store, attention, output, norm, gate
+ up + swiglu, down, and a conversion of x to tiles before each of the four products.
"""

from collections.abc import Sequence

from workbench.backend.cuda.kernels import elementwise as elementwise_
from workbench.backend.cuda.kernels import gemm, matvec
from workbench.backend.cuda.kernels.gemm import Epilogue
from workbench.backend.cuda.kernels.kernel import CLUSTERS, HOPPER, Kernel, Operands, Work, blocks
from workbench.backend.cuda.kernels.matvec import HeadNorm, Norm, Scale, Segment, X
from workbench.backend.issue.args import pack, variant
from workbench.graph.fuse import Product, product_at
from workbench.graph.ir import Q8_ACT, Node, Tensor

# one product, or several of one x -----------------------------------------------------------------


def mul_mat(node: Node, p: Operands) -> list[Work]:
    return _one_product(Product(node, None, None), p)


def _float_product(node: Node, p: Operands) -> list[Work]:
    """A product of the float path: decoded weights times float32 activations."""
    args = pack(node, p.at)
    rows, tokens = int(args[3]), int(args[5])
    grid = (blocks(rows, 8) * blocks(tokens, 8), 1)
    return [Kernel("mul_mat_float", "_".join(variant(node)), grid, 256, args, waits=True)]


def _is_float(product: Product) -> bool:
    return variant(product.mul_mat)[0] == "mul_mat_float"


def _segment(product: Product, p: Operands, output: Tensor | None = None) -> Segment:
    """The data of one product in a launch. output: where its result is stored; None for the
    product's own output."""
    w = product.mul_mat.inputs[0]
    out = output or product.output
    bias = p.at_if(elementwise_.second(product.bias))
    return Segment(w.dtype.name, p.at(w), w.shape[0], bias, p.at(out))


def _scale(product: Product, p: Operands) -> Scale | None:
    """The half of a norm that scales a product's results. Products of one x have the same."""
    if product.scale is None:
        return None
    return Scale(p.at(product.scale.inputs[1]), float(product.scale.params["eps"]))


def _products_of(parts: Sequence[Node]) -> tuple[list[Product], list[Node]]:
    """The products at the begin of `parts`, and the other parts."""
    products: list[Product] = []
    at = 0
    while product := product_at(parts, at):
        products.append(product)
        at += len(product.nodes)
    return products, list(parts[at:])


def few(node: Node) -> bool:
    """Whether the tokens of `node` are so few that one launch makes all its products."""
    products = [part for part in node.parts or (node,) if part.op == "mul_mat"]
    return products[0].inputs[1].shape[0] <= matvec.MOST_TOKENS and all(
        variant(product)[0] != "mul_mat_float" for product in products
    )


def _one_product(product: Product, p: Operands) -> list[Work]:
    """One product of any number of tokens, with its scale and its bias."""
    tokens = product.mul_mat.inputs[1].shape[0]
    if not tokens:
        return []
    if not _is_float(product) and tokens <= matvec.MOST_TOKENS:
        return _in_one([product], p)
    if _is_float(product) or product.scale is not None:
        multiply = _float_product if _is_float(product) else mul_mat
        works = multiply(product.mul_mat, p)
        works += [] if product.scale is None else elementwise_.elementwise(product.scale, p)
        return works + ([] if product.bias is None else elementwise_.elementwise(product.bias, p))
    return _together([product], p)


def _in_one(products: list[Product], p: Operands) -> list[Work]:
    """Up to three products of one x of few tokens, in one launch."""
    segments = [_segment(product, p) for product in products]
    return [matvec.plain(segments, _x(products[0], p), _scale(products[0], p))]


def many(product: Product) -> bool:
    """Whether `gemm.py` makes the product: its tokens are many."""
    tokens = product.mul_mat.inputs[1].shape[0]
    return not _is_float(product) and product.scale is None and tokens > matvec.MOST_TOKENS


def _x(product: Product, p: Operands) -> X:
    x = product.mul_mat.inputs[1]
    return X(p.at(x), x.dtype == Q8_ACT, x.cols, x.rows)


def _together(products: list[Product], p: Operands) -> list[Work]:
    """Products of one x of many tokens, with one launch for all weights of one type."""
    segments = [_segment(product, p) for product in products]
    return gemm.product(segments, _x(products[0], p), p.scratch, p.counters, hopper=p.sm == HOPPER)


def _one_by_one(products: list[Product], p: Operands) -> list[Work]:
    """Products of one x, in separate launches where necessary. A conversion of x to the same
    address is not repeated."""
    if all(many(product) for product in products):
        return _together(products, p)
    works: list[Work] = []
    for product in products:
        works += [work for work in _one_product(product, p) if work not in works]
    return works


def fused_products(node: Node, p: Operands) -> list[Work]:
    """The launches of the fused ops product and qkv."""
    products, _ = _products_of(node.parts)
    return _in_one(products, p) if few(node) else _one_by_one(products, p.inside(node))


# what is fused with them --------------------------------------------------------------------------


def product_norm(node: Node, p: Operands) -> list[Work]:
    """The launches of product_norm: one launch, or a launch for each part."""
    (product,), (add, squares, mul, *quantize) = _products_of(node.parts)
    inside = p.inside(node)
    if not product_norm_is_one(node):
        works = _one_by_one([product], inside) + elementwise_.elementwise(add, inside)
        works += elementwise_.elementwise(squares, inside)
        return works + elementwise_.norm(node, inside, [mul, *quantize])
    made = product.output.storage
    residual = next(t for t in add.inputs if t.storage is not made)
    last = (*quantize, mul)[0].output
    norm = Norm(
        inside.at(add.output), inside.at(squares.output), p.at(residual), p.at(mul.inputs[1]),
        bool(quantize),
    )  # fmt: skip
    segment, scale = _segment(product, inside, last), _scale(product, p)
    return [matvec.normed(segment, _x(product, p), norm, scale)]


def product_norm_is_one(node: Node) -> bool:
    """Whether one launch computes product_norm: for few tokens, whole groups of rows, and a result
    that is not read both quantised and in float."""
    (product,), (_, _, mul, *quantize) = _products_of(node.parts)
    rows = product.mul_mat.inputs[0].shape[0]
    both = bool(quantize) and mul.output in node.outputs
    return few(node) and matvec.whole_groups(rows) and not both


def qkv_rope_store(node: Node, p: Operands) -> list[Work]:
    """The launches of qkv_rope_store: one launch, or the products and then rope_store."""
    products, tail = _products_of(node.parts)
    if not qkv_is_one(node) or (len(tail) > 4 and p.sm < CLUSTERS):
        inside = p.inside(node)
        made = _in_one(products, inside) if few(node) else _one_by_one(products, inside)
        return made + elementwise_.rope_store(tail, inside)
    *norms, q_rope, _, k_store, v_store = tail
    p = p.inside(node) if elementwise_.unread(node) else p
    outputs = (q_rope.output, k_store.output, v_store.output)
    segments = [_segment(product, p, out) for product, out in zip(products, outputs, strict=True)]
    rotate = elementwise_.rotation(q_rope, k_store, v_store, p)
    if norms:
        q_norm, q_mul, _, k_mul = norms
        q_factors, k_factors = p.at(q_mul.inputs[1]), p.at(k_mul.inputs[1])
        norm = HeadNorm(q_factors, k_factors, float(q_norm.params["eps"]))
        rotate = rotate._replace(norm=norm)
    scale = _scale(products[0], p)
    return [matvec.qkv(segments, _x(products[0], p), rotate, scale)]


def qkv_is_one(node: Node) -> bool:
    """Whether one launch computes qkv_rope_store. Where heads are normed, the device must also have
    clusters."""
    products, tail = _products_of(node.parts)
    if not few(node) or tail[0].op == "rope":
        return few(node)
    weights = [product.mul_mat.inputs[0] for product in products]
    tokens, _, head_dim = next(part for part in tail if part.op == "rope").output.shape
    return matvec.can_norm_heads(
        [w.dtype.name for w in weights], [w.shape[0] for w in weights], weights[0].cols, tokens,
        head_dim,
    )  # fmt: skip


def glu(node: Node, p: Operands) -> list[Work]:
    """The launches of glu: one launch, for many tokens after the conversion of x; or the products
    and then swiglu."""
    products, (swiglu, *quantize) = _products_of(node.parts)
    quantised = bool(quantize)
    if few(node) and glu_is_one(node):
        gate_w, up_w = [_segment(product, p, node.output) for product in products]
        scale = _scale(products[0], p)
        return [matvec.glu(gate_w, up_w, _x(products[0], p), quantised, scale)]
    if glu_in_tiles(node, p.sm == HOPPER):
        gate_w, up_w = [_segment(product, p, node.output) for product in products]
        return gemm.glu(
            gate_w, up_w, _x(products[0], p), quantised, p.scratch, p.counters,
            hopper=p.sm == HOPPER,
        )  # fmt: skip
    inside = p.inside(node)
    works = _one_by_one(products, inside)
    if quantised:
        return works + elementwise_.swiglu_quantize([swiglu, *quantize], inside)
    return works + elementwise_.elementwise(swiglu, inside)


def glu_is_one(node: Node) -> bool:
    """Whether one launch computes glu, where the tokens are few."""
    quantised = node.parts[-1].op == "quantize"
    return not quantised or matvec.whole_groups(node.parts[0].inputs[0].shape[0])


def glu_in_tiles(node: Node, hopper: bool) -> bool:
    """Whether `gemm.glu` computes glu: tiles of many tokens."""
    products, tail = _products_of(node.parts)
    w, x = products[0].mul_mat.inputs
    quantised = tail[-1].op == "quantize"
    return all(many(product) for product in products) and gemm.can_glu(
        w.dtype.name, w.shape[0], x.shape[0], quantised, hopper
    )


def scratch_bytes(node: Node) -> int:
    """Bytes of scratch that `gemm.py` needs for the products of a node; 0 where it makes none.
    Weights of one type share a launch."""
    rows: dict[str, list[int]] = {}
    for product in _products_of(node.parts or (node,))[0]:
        if many(product):
            w, x = product.mul_mat.inputs
            rows.setdefault(w.dtype.name, []).append(w.shape[0])
    if not rows:
        return 0
    tiled = node.op == "glu" and any(glu_in_tiles(node, on) for on in (False, True))
    end = Epilogue.GLU if tiled else Epilogue.PLAIN
    return max(
        gemm.scratch_bytes(dtype, tuple(each), x.cols, x.rows, end) for dtype, each in rows.items()
    )
