"""Fusion: neighbouring nodes that one launch can compute become one node.

A fused node stands for its `parts`. It reads what they read, and writes those of their results that
other nodes read. It must give what the parts give one after the other, so its unfused twin is
always at hand. Each pattern has a toggle (`Toggles.fuse_*`). The more are on, the fewer launches a
step has:

    fuse_norm_mul           rms_norm + mul by the norm's weight
    fuse_norm_quantize      (norm +) mul + quantize of the activations
    fuse_add_norm           the residual add + the norm that follows it
    fuse_bias               mul_mat + add of its bias
    fuse_qkv                the products of one x: Q + K + V, whatever their weight types
    fuse_rope_store         rope of Q and K + set_rows of K and V; where fuse_norm_mul is on too,
                            with a norm of the heads before them; after Q + K + V, in that launch.
                            Other stores (copy_to_view, copy_by_table) have launches of their own
    fuse_glu                gate + up + swiglu
    fuse_epilogue_quantize  attention, or swiglu, + quantize of its result
    fuse_product_norm       where norms are halved (`defer.py`): the output product, or the down
                            product, + the residual add + the left half of the norm after it; the
                            right half + the products that read it

With all of them a layer has 7 launches: norm, QKV to the cache, attention, output product, norm,
gate + up + swiglu, down product. With halved norms it has 5. The patterns go further than
llama.cpp's (ggml_cuda_can_fuse of its CUDA backend), whose graph has a launch for each
quantisation, rope, store, norm and product of Q, K and V.

Where streams run branches side by side (`forks.py`), fusion may stay inside a branch
(`branch_fusion=inside`): each of Q, K and V keeps its product, and only its own nodes are joined.

    op of the fused node   parts
    norm                   [add] [rms_norm] [mul] [quantize], two of them at least
    product                mul_mat [rms_scale] [add], two of them at least
    product_norm           mul_mat [rms_scale] [add] add square_sums mul [quantize]
    qkv                    (mul_mat [rms_scale] [add]) x 3
    qkv_rope_store         qkv, rope_store
    rope_store             [rms_norm mul rms_norm mul] rope rope set_rows set_rows
    glu                    (mul_mat [rms_scale] [add]) x 2, swiglu [quantize]
    rope_set_rows          [rms_norm mul] rope set_rows, inside the branch of K
    norm_rope              rms_norm mul rope, inside the branch of Q
    swiglu_quantize        swiglu quantize
    attention_quantize     attention quantize

Pure: a graph goes in, a graph comes out, and nothing is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from workbench.config import Switch, Toggles
from workbench.graph.ir import F16, Graph, Kind, Node, Tensor
from workbench.graph.ops import OPS

FUSIONS = tuple(n for n in Toggles.names() if n.startswith("fuse_"))


def chosen(toggles: Toggles) -> frozenset[str]:
    """The names of the patterns that `toggles` switches on."""
    return frozenset(n for n in FUSIONS if getattr(toggles, n) == Switch.ON)


def fuse(
    graph: Graph,
    fusions: Iterable[str],
    backend_of: Callable[[Node], int] = lambda node: 0,
    branch_of: Mapping[Node, int] | None = None,
) -> Graph:
    """`graph` with the patterns that `fusions` name joined; `graph` itself where there are none.

    Only nodes of one backend are joined.

    branch_of: the branch number of each node. Then only nodes of one number are joined, and nodes
        are in the order of the numbers. No node may need a node with a larger number, as
        `forks.branch_of` has it.
    """
    on = frozenset(fusions)
    if not on:
        return graph
    readers: dict[Tensor, int] = {}
    for node in graph.nodes:
        for t in {t.storage for t in node.inputs}:
            readers[t] = readers.get(t, 0) + 1
    nodes: list[Node] = []
    number = branch_of or dict.fromkeys(graph.nodes, 0)
    in_order = sorted(graph.nodes, key=number.__getitem__)
    for _, part in groupby(in_order, lambda node: (number[node], backend_of(node))):
        matcher = _Matcher(list(part), on, inside=branch_of is not None)
        while matcher.at < len(matcher.nodes):
            nodes += matcher.next(readers)
    return Graph(nodes, graph.inputs, graph.outputs, graph.shape)


def join(op: str, name: str, parts: Sequence[Node], readers: dict[Tensor, int]) -> Node:
    """One node of `op` for `parts`. A result that only the parts themselves read is no output.

    readers: how many nodes of the graph read each storage.
    """
    made = [part.output.storage for part in parts]
    inside: dict[Tensor, int] = {}
    inputs: dict[Tensor, Tensor] = {}
    for part in parts:
        for t in part.inputs:
            if t.storage not in made or t.kind == Kind.CACHE:
                inputs.setdefault(t.storage, t)
        for t in {t.storage for t in part.inputs}:
            inside[t] = inside.get(t, 0) + 1
    shared = [
        part.output
        for part in parts
        if part.output.kind != Kind.ACTIVATION
        or readers.get(part.output.storage, 0) > inside.get(part.output.storage, 0)
    ]
    node = Node(op, name, parts[-1].output, tuple(inputs.values()), {}, parts[-1].layer)
    node.outputs = tuple(shared) or node.outputs
    node.parts = tuple(parts)
    return node


class Product(NamedTuple):
    """A product with the scale and the bias that may follow it at once."""

    mul_mat: Node
    scale: Node | None  # rms_scale
    bias: Node | None  # add of one row

    @property
    def unbiased(self) -> list[Node]:
        return [self.mul_mat] if self.scale is None else [self.mul_mat, self.scale]

    @property
    def nodes(self) -> list[Node]:
        return self.unbiased if self.bias is None else [*self.unbiased, self.bias]

    @property
    def output(self) -> Tensor:
        return self.nodes[-1].output


def named(nodes: Sequence[Node], at: int, ops: tuple[str, ...]) -> list[Node]:
    """The nodes from `at` on, as many as `ops`, if those are their ops; else none."""
    found = list(nodes[at : at + len(ops)])
    return found if tuple([n.op for n in found]) == ops else []


def chain(nodes: Sequence[Node], at: int, ops: tuple[str, ...]) -> list[Node]:
    """As `named`, where each node reads the result of the node before it; else none."""
    found = named(nodes, at, ops)
    for before, node in pairwise(found):
        if all(t.storage is not before.output.storage for t in node.inputs):
            return []
    return found


def reads(nodes: Sequence[Node], at: int, op: str, made: Tensor) -> Node | None:
    """Node `at`, if it is an `op` whose first input is `made`; else None."""
    node = nodes[at] if at < len(nodes) else None
    found = node is not None and node.op == op and node.inputs[0].storage is made.storage
    return node if found else None


def product_at(nodes: Sequence[Node], at: int) -> Product | None:
    """The product that begins with node `at`, if one does."""
    if at >= len(nodes) or nodes[at].op not in _MULTIPLIES:
        return None
    last = mul_mat = nodes[at]
    scale = reads(nodes, at + 1, "rms_scale", last.output)
    if scale is not None:
        last, at = scale, at + 1
    bias = reads(nodes, at + 1, "add", last.output)
    return Product(mul_mat, scale, bias if bias and has_row(bias) else None)


def has_row(node: Node) -> bool:
    """Whether the second input is one row for all rows of the first, as a bias or a weight is."""
    return len(node.inputs[1].shape) == 1


class _Products(NamedTuple):
    """Neighbouring products of one x."""

    all: list[Product]
    end: int

    @property
    def biased(self) -> bool:
        return any(product.bias is not None for product in self.all)

    @property
    def nodes(self) -> list[Node]:
        return [n for product in self.all for n in product.nodes]


class _Matcher:
    """Goes through the nodes of a graph; `next` takes the longest pattern it can join."""

    def __init__(self, nodes: list[Node], on: frozenset[str], inside: bool):
        self.nodes = nodes
        self.on = on
        self.inside = inside  # a branch: these nodes are one, so nothing joins several
        self.at = 0

    def next(self, readers: dict[Tensor, int]) -> list[Node]:
        node = self.nodes[self.at]
        rule = _RULES.get(node.op)
        taken = rule(self) if rule else None
        if taken is None:
            self.at += 1
            return [node]
        groups, self.at = taken
        return [
            join(op, name, parts, readers) if len(parts) > 1 else parts[0]
            for op, name, parts in groups
        ]

    # the rules: groups (op, name, parts) in order, and where matching goes on; None: no pattern ---

    def norm(self) -> _Taken:
        """[add] [rms_norm] [mul] [quantize], from whichever of them comes first."""
        parts = [self.nodes[self.at]]
        for before, op, toggle, by_row in _NORM_JOINTS:
            if parts[-1].op == before and toggle in self.on:
                node = reads(self.nodes, self.at + len(parts), op, parts[-1].output)
                if node is not None and (not by_row or has_row(node)):
                    parts.append(node)
        if len(parts) < 2:
            return None
        names = {p.op: p.name for p in parts}
        return [("norm", names.get("rms_norm", parts[0].name), parts)], self.at + len(parts)

    def residual(self) -> _Taken:
        """A norm that begins with the residual add; the add of a bias begins none."""
        return None if has_row(self.nodes[self.at]) else self.norm()

    def heads(self) -> _Taken:
        """The norm of the query heads may begin a rope_store; else it is a norm like any other."""
        return self.rope_store() or self.norm()

    def rope_store(self) -> _Taken:
        if "fuse_rope_store" not in self.on:
            return None
        parts = self.rope_store_at(self.at)
        if not parts:
            return self.heads_inside() if self.inside else None
        return [("rope_store", f"rope_store-{parts[0].layer}", parts)], self.at + len(parts)

    def heads_inside(self) -> _Taken:
        """[rms_norm mul] rope set_rows, or rms_norm mul rope, of a branch by itself."""
        normed = "fuse_norm_mul" in self.on
        for op, pattern, wants_norm in _INSIDE:
            parts = chain(self.nodes, self.at, pattern)
            if parts and _stores_halves(parts) and (normed or not wants_norm):
                return [(op, parts[-1].name, parts)], self.at + len(parts)
        return None

    def rope_store_at(self, at: int) -> list[Node]:
        """[rms_norm mul rms_norm mul] rope rope set_rows set_rows from `at` on, or nothing."""
        parts = named(self.nodes, at, _ROPE_STORE)
        if not parts and "fuse_norm_mul" in self.on:
            parts = named(self.nodes, at, _NORMED_ROPE_STORE)
        return parts if _stores_halves(parts) else []

    def products(self) -> _Products:
        """The neighbouring products of one x from here on."""
        x, at = self.nodes[self.at].inputs[1].storage, self.at
        found: list[Product] = []
        while (product := product_at(self.nodes, at)) and product.mul_mat.inputs[1].storage is x:
            if product.scale is not None and "fuse_product_norm" not in self.on:
                break
            found.append(product)
            at += len(product.nodes)
        return _Products(found, at)

    def product(self) -> _Taken:
        found, on = self.products(), self.on
        if not found.all:
            return None
        layer = self.nodes[self.at].layer
        whole = "fuse_bias" in on or not found.biased  # a bias is inside, or there is none
        if len(found.all) == 3 and "fuse_qkv" in on:
            if not whole:
                multiply = [n for product in found.all for n in product.unbiased]
                add = [product.bias for product in found.all if product.bias is not None]
                singles = [("add", bias.name, [bias]) for bias in add]
                return [("qkv", f"qkv-{layer}", multiply), *singles], found.end
            tail = self.rope_store_at(found.end) if "fuse_rope_store" in on else []
            if tail:
                parts = [*found.nodes, *tail]
                return [("qkv_rope_store", f"qkv-{layer}", parts)], found.end + len(tail)
            return [("qkv", f"qkv-{layer}", found.nodes)], found.end
        if len(found.all) == 2 and "fuse_glu" in on and whole:
            glu = self.glu_after(found)
            if glu:
                return [("glu", f"ffn_glu-{layer}", [*found.nodes, *glu])], found.end + len(glu)
        first = found.all[0]
        alone = first.nodes if "fuse_bias" in on else first.unbiased
        norm = self.norm_after(found) if whole and len(found.all) == 1 else []
        if norm:
            return [("product_norm", first.mul_mat.name, [*alone, *norm])], found.end + len(norm)
        if len(alone) == 1:
            return None
        return [("product", first.mul_mat.name, alone)], self.at + len(alone)

    def norm_after(self, found: _Products) -> list[Node]:
        """The residual add that follows a product, and the left half of a norm; or nothing."""
        parts = named(self.nodes, found.end, _RESIDUAL_HALF)
        if not parts or "fuse_product_norm" not in self.on:
            return []
        if found.all[0].output.storage not in {t.storage for t in parts[0].inputs}:
            return []
        if any(n.inputs[0].storage is not parts[0].output.storage for n in parts[1:]):
            return []
        quantize = reads(self.nodes, found.end + 3, "quantize", parts[-1].output)
        joined = quantize is not None and "fuse_norm_quantize" in self.on
        return [*parts, quantize] if quantize is not None and joined else parts

    def glu_after(self, found: _Products) -> list[Node]:
        """swiglu [quantize] after two products of one weight type; or nothing."""
        gate, up = found.all
        node = reads(self.nodes, found.end, "swiglu", gate.output)
        same = gate.mul_mat.inputs[0].dtype == up.mul_mat.inputs[0].dtype
        if node is None or node.inputs[1].storage is not up.output.storage or not same:
            return []
        return [node, *self.quantize_of(found.end + 1, node)]

    def quantize_of(self, at: int, node: Node) -> list[Node]:
        if "fuse_epilogue_quantize" not in self.on:
            return []
        quantize = reads(self.nodes, at, "quantize", node.output)
        return [] if quantize is None else [quantize]

    def epilogue(self) -> _Taken:
        node = self.nodes[self.at]
        quantize = self.quantize_of(self.at + 1, node)
        if not quantize:
            return None
        return [(f"{node.op}_quantize", node.name, [node, *quantize])], self.at + 2


def _stores_halves(parts: Sequence[Node]) -> bool:
    """Whether all stores are into F16 caches: no launch joins RoPE and a store of another type."""
    return all(p.output.dtype == F16 for p in parts if OPS[p.op].stores)


_Taken = tuple[list[tuple[str, str, list[Node]]], int] | None

_MULTIPLIES = frozenset({"mul_mat"})
_RESIDUAL_HALF = ("add", "square_sums", "mul")
_ROPE_STORE = ("rope", "rope", "set_rows", "set_rows")
_NORMED_ROPE_STORE = ("rms_norm", "mul", "rms_norm", "mul", *_ROPE_STORE)
_INSIDE = (  # op of the fused node, its parts, whether heads are normed
    ("rope_set_rows", ("rms_norm", "mul", "rope", "set_rows"), True),
    ("norm_rope", ("rms_norm", "mul", "rope"), True),
    ("rope_set_rows", ("rope", "set_rows"), False),
)
_NORM_JOINTS = (  # op, the op that may join it, the toggle that says so, only with one row
    ("add", "rms_norm", "fuse_add_norm", False),
    ("rms_norm", "mul", "fuse_norm_mul", True),
    ("mul", "quantize", "fuse_norm_quantize", False),
)
_RULES: dict[str, Callable[[_Matcher], _Taken]] = {
    "add": _Matcher.residual,
    "rms_norm": _Matcher.heads,
    "mul": _Matcher.norm,
    "rope": _Matcher.rope_store,
    "mul_mat": _Matcher.product,
    "attention": _Matcher.epilogue,
    "swiglu": _Matcher.epilogue,
}
