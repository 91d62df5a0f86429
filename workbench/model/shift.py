"""The graph that shifts a cache: stored K turns to the positions that its cells have now.

Where the cells of a sequence move by some positions, their K must turn by as many, for RoPE was
applied before K was stored. V has no positions. (llama.cpp: `llama_kv_cache::build_graph_shift`.)
"""

from workbench.graph.ir import Graph, StepShape
from workbench.graph.ops import make
from workbench.model.blocks import Caches
from workbench.model.decoder import Model
from workbench.model.inputs import DELTAS, input_of


def shift_graph(model: Model, caches: Caches, n_cells: int) -> Graph:
    """The graph that turns K of the first n_cells cells of every layer, in place.

    The one input is inp_k_shift (n_cells,) I32: by how many positions each cell moves, 0 for a cell
    that stays. caches: as `Model.caches` has them. The graph has no outputs, and its shape has no
    tokens and no sequences. Raises UsageError where the caches have fewer cells.
    """
    h = model.hparams
    shape = StepShape(0, 0, n_cells, n_seqs=0)
    deltas = input_of(DELTAS, shape)
    nodes = [
        make(
            "rope_shift", f"k_shift-{i}", k, deltas, model.rope_freqs,
            layer=i, n_head_kv=h.n_head_kv, **h.rope,
        )
        for i, (k, _) in enumerate(caches)
    ]  # fmt: skip
    return Graph(nodes, [deltas], [], shape)
