"""Graphs that change the cache between steps: they copy cells, or rotate stored K.

Both have one input and no outputs, and their shapes have no tokens.
"""

from workbench.graph.ir import Graph, StepShape
from workbench.graph.ops import make
from workbench.model.blocks import Caches
from workbench.model.decoder import Model
from workbench.model.inputs import COPIES, DELTAS, input_of


def copy_shape(n: int) -> StepShape:
    """The shape of a step that copies n cells."""
    return StepShape(0, 0, n, n_seqs=1)


def shift_shape(n_cells: int) -> StepShape:
    """The shape of a step that rotates K of n_cells cells. It has no sequence, and so is not that
    of a copy."""
    return StepShape(0, 0, n_cells, n_seqs=0)


def copy_graph(caches: Caches, n: int) -> Graph:
    """The graph that copies up to n cells of K and V of every layer, to another region.

    Sequences that share a region share cells, and nothing is copied. (llama.cpp:
    `llama_kv_cache::seq_cp` of several streams copies their buffers whole.)

    caches: as `Model.caches` has them. The input is inp_copies (n, 2) I64.
    """
    shape = copy_shape(n)
    pairs = input_of(COPIES, shape)
    nodes = [
        make("copy_cells", f"{name}_copy-{i}", cache, pairs, layer=i)
        for i, pair in enumerate(caches)
        for name, cache in zip("kv", pair, strict=True)
    ]
    return Graph(nodes, [pairs], [], shape)


def shift_graph(model: Model, caches: Caches, n_cells: int) -> Graph:
    """The graph that rotates K of the first n_cells cells of every layer, in place.

    Where the cells of a sequence move by some positions, their K must rotate by as many, because
    RoPE was applied before K was stored. V has no positions. (llama.cpp: `build_graph_shift`.)

    caches: as `Model.caches` has them. The input is inp_k_shift (n_cells,) I32: by how many
    positions each cell moves, 0 for a cell that stays. Raises UsageError where the caches have
    fewer cells.
    """
    h = model.hparams
    shape = shift_shape(n_cells)
    deltas = input_of(DELTAS, shape)
    nodes = [
        make(
            "rope_shift", f"k_shift-{i}", k, deltas, model.rope_freqs,
            layer=i, n_head_kv=h.n_head_kv, **h.rope,
        )
        for i, (k, _) in enumerate(caches)
    ]  # fmt: skip
    return Graph(nodes, [deltas], [], shape)
