"""Norms in two halves, so that no launch waits for a whole row.

`rms_norm(x) * w` is `x * w` times one number a row, the scale 1 / sqrt(mean(x^2) + eps), and a
product is linear: (scale * y) W = scale * (y W). So what a product reads can be made of each part
of a row by itself, and the scale, which needs all of it, applied to what the product gives:

    x = add(..)                              x = add(..)
    n = rms_norm(x)                          s = square_sums(x)
    y = mul(n, w)             becomes        y = mul(x, w)
    q = quantize(y)                          q = quantize(y)
    p = mul_mat(W, q) ..                     u = mul_mat(W, q);  p = rms_scale(u, s) ..

Quantised activations have a scale of their own for each 32 columns, which takes x's size in; the
quants stay the same but for rounding. It pays where `fuse.py` can join the left half to the product
that made x and the right half to those that read y, in kernels for few tokens.

Pure, as fuse.py: nothing is changed in place.
"""

from __future__ import annotations

from workbench.graph.ir import Graph, Kind, Node, Tensor
from workbench.graph.ops import SQUARES, make

MOST_TOKENS = 8


def defer(graph: Graph) -> Graph:
    """`graph` with every norm halved that stands between the residual add of a product and other
    products, of up to MOST_TOKENS tokens; the same graph where there is none."""
    if graph.shape.n_tokens > MOST_TOKENS:
        return graph
    readers: dict[Tensor, list[Node]] = {}
    makers: dict[Tensor, Node] = {}
    for node in graph.nodes:
        makers.setdefault(node.output.storage, node)
        for t in {t.storage for t in node.inputs}:
            readers.setdefault(t, []).append(node)
    halves: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "rms_norm" and _behind_a_product(node, makers):
            halves |= _halved(node, readers)
    if not halves:
        return graph
    nodes = [new for node in graph.nodes for new in halves.get(node, [node])]
    return Graph(nodes, graph.inputs, graph.outputs, graph.shape)


def _behind_a_product(norm: Node, makers: dict[Tensor, Node]) -> bool:
    """Whether the row that is normed is the sum of a product and a residual."""
    (x,) = norm.inputs
    add = makers.get(x.storage)
    if add is None or add.op != "add" or add.inputs[0].shape != add.inputs[1].shape:
        return False
    made = [makers[t.storage] for t in add.inputs if t.storage in makers]
    made += [makers[n.inputs[0].storage] for n in made if _is_bias(n)]
    return any(n.op == "mul_mat" for n in made)


def _is_bias(node: Node) -> bool:
    return node.op == "add" and len(node.inputs[1].shape) == 1


def _halved(norm: Node, readers: dict[Tensor, list[Node]]) -> dict[Node, list[Node]]:
    """What becomes of the nodes of one norm, if it can be halved."""
    (x,) = norm.inputs
    if len(x.shape) != 2 or x.cols % SQUARES:
        return {}
    after = readers.get(norm.output.storage, [])
    if len(after) != 1 or after[0].op != "mul" or len(after[0].inputs[1].shape) != 1:
        return {}
    (mul,) = after
    behind = readers.get(mul.output.storage, [])
    quantised = [n for n in behind if n.op == "quantize"]
    products = [n for n in behind if n not in quantised]
    products += [n for q in quantised for n in readers.get(q.output.storage, [])]
    changed = [n.output for n in (norm, mul, *quantised)]
    if any(t.kind != Kind.ACTIVATION for t in changed) or any(n.op != "mul_mat" for n in products):
        return {}
    squares = make("square_sums", f"{norm.name} (squares)", x, layer=norm.layer)
    weighted = Node("mul", mul.name, mul.output, (x, mul.inputs[1]), mul.params, mul.layer)
    return {norm: [squares], mul: [weighted]} | {
        n: _scaled(n, squares.output, norm.params["eps"]) for n in products
    }


def _scaled(product: Node, squares: Tensor, eps: float) -> list[Node]:
    """A product of half a norm, and the other half. The result is the tensor it was."""
    out = product.output
    unscaled = Tensor(f"{out.name} (unscaled)", out.dtype, out.shape)
    return [
        Node("mul_mat", product.name, unscaled, product.inputs, product.params, product.layer),
        Node(
            "rms_scale", f"{product.name} (scale)", out, (unscaled, squares), {"eps": eps},
            product.layer,
        ),
    ]  # fmt: skip
