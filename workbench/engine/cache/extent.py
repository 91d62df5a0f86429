"""ROOM #14924: where each token's live cache ends, so that attention leaves the rest unread.

Attention reads every cell of a step's n_kv, and masks the cells that a token does not see. Cells
that no token of a tile sees need not be read. There are three ways to find them:

    in_loop   attention looks at the mask of each tile before it reads the tile, and skips the tile
              where all of the mask is -inf (#13584)
    tail      a kernel goes through the mask of each token from the end, in steps of 256 cells, and
              notes where the last step with a visible cell ends. Attention's loop ends there, at
              the greatest extent of a tile's tokens (#14924)
    classes   a kernel notes for each token and each 64 cells whether the token sees none, some or
              all of them. Attention skips cells that no token of a tile sees, also between cells
              that are seen. Where all tokens see all cells, it does not read the mask

    auto      classes where a region has 1024 query tokens in a step. Tail where several regions
              have 2048 cells each, so that the kernel saves more than its launch costs. Else
              nothing. The sizes follow from runs (`data/results/README.md`)

In llama.cpp the kernel runs before attention of each layer. Here it is one node of the step, whose
result all layers read. A tile that is left unread would have added nothing. So all ways give equal
bits, and attention would be right without any of them.

#14924 skips only where n_kv is a multiple of 256, and where there are at least 1024 query tokens or
several regions (`fattn-common.cuh`). Toggle `skip_gate=reference` has this condition for tail and
classes; in_loop has none.
"""

import numpy as np

from workbench.common.sizes import round_up
from workbench.config import SkipGate, SkipMaskedKV
from workbench.graph.attend import CLASSES, EXTENTS, with_inputs
from workbench.graph.ir import Graph, Node, StepShape, Tensor
from workbench.graph.ops import REGIONS, make
from workbench.graph.shapes import CLASS_CELLS, EXTENT_CELLS

GATE_TOKENS = 1024
TAIL_CELLS = 2048  # of each of several regions, from which `auto` looks for their ends
# for each way: the op that finds the cells, and the name of its result among attention's inputs
_FOUND_BY: dict[str, tuple[str, str]] = {
    SkipMaskedKV.TAIL: ("kv_extents", EXTENTS),
    SkipMaskedKV.CLASSES: ("kv_classes", CLASSES),
}
# how a program can skip; `auto` is one of these, by size
WAYS = (SkipMaskedKV.OFF, SkipMaskedKV.IN_LOOP, SkipMaskedKV.TAIL, SkipMaskedKV.CLASSES)
UNSEEN, MIXED, SEEN = range(3)  # classes


def way_of(gate: str, way: str, shape: StepShape, regions: bool) -> str:
    """How masked cells are skipped in steps of a shape: `off`, `in_loop`, `tail` or `classes`.
    gate, way: values of the toggles. regions: as `build_graph` has it."""
    n_regions = max(shape.n_seqs, 1) if regions else 1
    rows = shape.n_tokens // n_regions
    if way == SkipMaskedKV.AUTO:
        deep = n_regions > 1 and shape.n_kv >= TAIL_CELLS
        way = (
            SkipMaskedKV.CLASSES if rows >= GATE_TOKENS
            else SkipMaskedKV.TAIL if deep or gate == SkipGate.ALWAYS
            else SkipMaskedKV.OFF
        )  # fmt: skip
    if way == SkipMaskedKV.OFF or gate == SkipGate.NEVER:
        return str(SkipMaskedKV.OFF)
    if gate == SkipGate.ALWAYS or way == SkipMaskedKV.IN_LOOP:
        return str(way)
    is_open = shape.n_kv % EXTENT_CELLS == 0 and (rows >= GATE_TOKENS or n_regions > 1)
    return str(way if is_open else SkipMaskedKV.OFF)


def skip_masked(graph: Graph, way: str, gate: str) -> Graph:
    """The graph whose attention leaves masked cells unread, by values of the toggles
    `skip_masked_kv` and `skip_gate`; the same graph where nothing is skipped."""
    attending = [node for node in graph.nodes if node.op == "attention"]
    if not attending:
        return graph
    regions = REGIONS in attending[0].params.get("more", ())
    way = way_of(gate, way, graph.shape, regions)
    if way == SkipMaskedKV.OFF:
        return graph
    finding: dict[Tensor, Node] = {}  # by mask
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op != "attention":
            nodes.append(node)
            continue
        more = {}
        if way in _FOUND_BY:
            op, name = _FOUND_BY[way]
            mask = node.inputs[3]
            if mask not in finding:
                finding[mask] = make(op, f"{mask.name} ({name})", mask, layer=node.layer)
                nodes.append(finding[mask])
            more[name] = finding[mask].output
        nodes.append(with_inputs(node, {"skip": way}, **more))
    return Graph(nodes, graph.inputs, graph.outputs, graph.shape)


# what the kernels find, computed by the host ------------------------------------------------------


def extents(mask: np.ndarray) -> np.ndarray:
    """The result of op kv_extents, (T,) int32, for a mask (T, n_kv) float16."""
    seen = mask != -np.inf
    n_kv = mask.shape[1]
    last = np.where(seen.any(axis=1), n_kv - np.argmax(seen[:, ::-1], axis=1), 0)
    return np.minimum(-(-last // EXTENT_CELLS) * EXTENT_CELLS, n_kv).astype(np.int32)


def classes(mask: np.ndarray) -> np.ndarray:
    """The result of op kv_classes, (T, blocks) uint8, for a mask (T, n_kv) float16."""
    t, n_kv = mask.shape
    n = round_up(n_kv, CLASS_CELLS)
    seen = np.zeros((t, n), bool)
    seen[:, :n_kv] = mask != -np.inf
    each = seen.reshape(t, -1, CLASS_CELLS)
    whole = np.asarray(each.all(axis=2))
    if n != n_kv:  # cells after n_kv do not count
        whole[:, -1] = seen[:, n - CLASS_CELLS : n_kv].all(axis=1)
    return np.where(whole, SEEN, np.where(each.any(axis=2), MIXED, UNSEEN)).astype(np.uint8)
