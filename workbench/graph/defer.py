"""Norms in two halves, so that no launch waits for a whole row.

`rms_norm(x) * w` is `x * w` times one number a row: the scale 1 / sqrt(mean(x^2) + eps). A product
is linear: (scale * y) W = scale * (y W). So the left half, `x * w`, can be computed for each part
of a row by itself, and a product can read it. The right half, the scale, needs the whole row. It is
applied to the result of the product:

    x = add(..)                              x = add(..)
    n = rms_norm(x)                          s = square_sums(x)
    y = mul(n, w)             becomes        y = mul(x, w)
    q = quantize(y)                          q = quantize(y)
    p = mul_mat(W, q) ..                     u = mul_mat(W, q);  p = rms_scale(u, s) ..

Quantised activations have a scale of their own for each 32 columns. That scale absorbs the size of
x, and the quants stay the same but for rounding. Halving pays in kernels for few tokens. There
`fuse.py` can join the left half to the product that made x, and the right half to the products that
read y.

Pure, as fuse.py: nothing is changed in place.
"""

from collections.abc import Sequence

from workbench.config import Half
from workbench.graph.fuse import has_row
from workbench.graph.ir import Graph, Kind, Node, Tensor
from workbench.graph.ops import make
from workbench.graph.shapes import SQUARES

MOST_TOKENS = 8
_MOST: dict[str, int] = {Half.OFF: 0, Half.ONE: 1, Half.ON: MOST_TOKENS}
_Readers = dict[Tensor, list[Node]]
_Makers = dict[Tensor, Node]


def defer(graph: Graph, half: str = Half.ON) -> Graph:
    """`graph` with its norms halved; `graph` itself where no norm can be halved.

    A norm is halved where it stands between the residual add of a product and other products.

    half: a value of the toggle `defer_norm`. It says up to how many tokens of a step.
    """
    if graph.shape.n_tokens > _MOST[half]:
        return graph
    readers: _Readers = {}
    makers: _Makers = {}
    for node in graph.nodes:
        makers.setdefault(node.output.storage, node)
        for t in {t.storage for t in node.inputs}:
            readers.setdefault(t, []).append(node)
    halves: dict[Node, list[Node]] = {}
    for norm in _of("rms_norm", graph.nodes):
        if _follows_a_product(norm, makers):
            halves |= _halved(norm, readers)
    if not halves:
        return graph
    nodes = [new for node in graph.nodes for new in halves.get(node, [node])]
    return Graph(nodes, graph.inputs, graph.outputs, graph.shape)


def _of(op: str, nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if node.op == op]


def _made(tensors: Sequence[Tensor], makers: _Makers) -> list[Node]:
    """The nodes that make these tensors, without those that no node makes."""
    return [makers[t.storage] for t in tensors if t.storage in makers]


def _follows_a_product(norm: Node, makers: _Makers) -> bool:
    """Whether the row that is normed is the sum of a product and a residual."""
    for add in _of("add", _made(norm.inputs, makers)):
        if add.inputs[0].shape == add.inputs[1].shape:
            summands = _made(add.inputs, makers)
            biased = [makers[n.inputs[0].storage] for n in _of("add", summands) if has_row(n)]
            return bool(_of("mul_mat", [*summands, *biased]))
    return False


def _halved(norm: Node, readers: _Readers) -> dict[Node, list[Node]]:
    """The nodes that replace each node of one norm; empty where it cannot be halved."""
    (x,) = norm.inputs
    if len(x.shape) != 2 or x.cols % SQUARES:
        return {}
    after = readers.get(norm.output.storage, [])
    weighs = [n for n in _of("mul", after) if has_row(n)]
    if len(after) != 1 or weighs != after:
        return {}
    (mul,) = weighs
    reading = readers.get(mul.output.storage, [])
    quantised = _of("quantize", reading)
    products = [n for n in reading if n not in quantised]
    products += [n for q in quantised for n in readers.get(q.output.storage, [])]
    changed = [n.output for n in (norm, mul, *quantised)]
    if any(t.kind != Kind.ACTIVATION for t in changed) or _of("mul_mat", products) != products:
        return {}
    squares = make("square_sums", f"{norm.name} (squares)", x, layer=norm.layer)
    weighted = Node("mul", mul.name, mul.output, (x, mul.inputs[1]), mul.params, mul.layer)
    return {norm: [squares], mul: [weighted]} | {
        n: _scaled(n, squares.output, norm.params["eps"]) for n in products
    }


def _scaled(product: Node, squares: Tensor, eps: float) -> list[Node]:
    """A product of the left half, and the right half after it. The result is the same tensor."""
    out = product.output
    unscaled = Tensor(f"{out.name} (unscaled)", out.dtype, out.shape)
    return [
        Node("mul_mat", product.name, unscaled, product.inputs, product.params, product.layer),
        Node(
            "rms_scale", f"{product.name} (scale)", out, (unscaled, squares), {"eps": eps},
            product.layer,
        ),
    ]  # fmt: skip
