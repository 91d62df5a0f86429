"""The graph that copies cells of a cache: K and V of a sequence, for one with cells of its own.

Where sequences share a region, they share cells, and nothing is copied. (llama.cpp:
`llama_kv_cache::seq_cp` of several streams copies their buffers whole.)
"""

from workbench.graph.ir import Graph, StepShape
from workbench.graph.ops import make
from workbench.model.blocks import Caches
from workbench.model.inputs import COPIES, input_of


def copy_shape(n: int) -> StepShape:
    """The shape of a step that copies n cells. It has no tokens; a shift has no sequence either."""
    return StepShape(0, 0, n, n_seqs=1)


def copy_graph(caches: Caches, n: int) -> Graph:
    """The graph that copies up to n cells of K and V of every layer. caches: as `Model.caches` has
    them. The one input is inp_copies (n, 2) I64; there are no outputs."""
    shape = copy_shape(n)
    pairs = input_of(COPIES, shape)
    nodes = [
        make("copy_cells", f"{name}_copy-{i}", cache, pairs, layer=i)
        for i, pair in enumerate(caches)
        for name, cache in zip("kv", pair, strict=True)
    ]
    return Graph(nodes, [pairs], [], shape)
