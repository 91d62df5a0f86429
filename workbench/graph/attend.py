"""ROOM #14924: how attention is computed: by which kernels, and in how many parts of the cells.

An attention node has both in its params (`kernel` and `kv_parts`), where backends read them. Absent
params mean `auto` and `off`. Parts follow from the step shape and the padded n_kv alone. So the
cells that a token sees never change the order of a sum. `off`, `parallel_blocks` and `stream_k`
differ by rounding.

    off              one block goes through all cells of a query row
    parallel_blocks  several blocks share the cells of a row (flash-decoding, Dao et al. 2023)
    stream_k         the tiles of all rows, in one line, are cut into equal pieces, one a block
                     (Osama et al. 2023, arXiv 2301.03598)

    auto             parallel_blocks, but off where a head has fewer than AUTO_ELEMENTS elements of
                     K: there the combining costs more than the parts save. (Tokens at depth 0 with
                     256 cells: heads of 64 lose 1.4 % by parts, heads of 128 gain 1.9 %.)

Parts that belong together are combined in the order of their cells.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from workbench.config import AttnKernel, KVParts
from workbench.graph.ir import Graph, Node, Tensor
from workbench.graph.ops import REGIONS

EXTENTS, CLASSES, SINKS = "extents", "classes", "sinks"
_ATTEND = frozenset({"attention"})
# how a node can split its cells; `auto` is one of these, by size
PARTS = (KVParts.OFF, KVParts.PARALLEL_BLOCKS, KVParts.STREAM_K)
AUTO_ELEMENTS = 256 * 128  # cells by elements of a head


class Attended(NamedTuple):
    """The inputs of an attention node by name; None for an input that it does not have."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    regions: Tensor | None = None
    extents: Tensor | None = None
    classes: Tensor | None = None
    sinks: Tensor | None = None


def attended(node: Node) -> Attended:
    """What an attention node reads."""
    q, k, v, mask, *others = node.inputs
    return Attended(q, k, v, mask, **dict(zip(node.params.get("more", ()), others, strict=True)))


def with_inputs(node: Node, params: Mapping[str, Any], **more: Tensor) -> Node:
    """An attention node with more inputs, by name, and other params; its output is the same."""
    have = attended(node)._asdict() | more
    names = tuple(n for n in (REGIONS, EXTENTS, CLASSES, SINKS) if have[n] is not None)
    inputs = (*node.inputs[:4], *(have[n] for n in names))
    return Node(
        node.op, node.name, node.output, inputs, {**node.params, **params, "more": names},
        node.layer,
    )  # fmt: skip


def attend_by(graph: Graph, kernel: str, kv_parts: str) -> Graph:
    """The graph whose attention is computed by these kernels and parts, values of the toggles
    `attn_kernel` and `kv_parts`; the same graph where these are `auto` and `off`."""
    if (kernel, kv_parts) == (AttnKernel.AUTO, KVParts.OFF):
        return graph
    nodes = [
        with_inputs(n, {"kernel": str(kernel), "kv_parts": parts_of(n, kv_parts)})
        if n.op in _ATTEND
        else n
        for n in graph.nodes
    ]
    return Graph(nodes, graph.inputs, graph.outputs, graph.shape)


def parts_of(node: Node, kv_parts: str) -> str:
    """How an attention node splits its cells: `off`, `parallel_blocks` or `stream_k`. kv_parts: a
    value of the toggle."""
    if kv_parts != KVParts.AUTO:
        return str(kv_parts)
    head_dim = node.inputs[0].shape[2]
    few = node.params["n_kv"] * head_dim < AUTO_ELEMENTS
    return str(KVParts.OFF if few else KVParts.PARALLEL_BLOCKS)
