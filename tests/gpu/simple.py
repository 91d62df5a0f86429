"""The slow twin of every product: kernels/mul_mat.cu, a warp for a few rows, no splits, no tensor
cores; activations of 8 bits meet quantised weights in integers whatever the number of tokens."""

from __future__ import annotations

from workbench.backend.args import AddressOf, pack, variant
from workbench.backend.cuda.kernel import Kernel, blocks
from workbench.graph.ir import Node

THREADS = 128
# Weight rows of a block by the tokens it takes together; more tokens are tiles of 8. Types with
# blocks of 256 need more registers.
ROWS = {1: 8, 4: 8, 8: 16}
ROWS_K = {1: 8, 4: 8, 8: 8}


def simple_product(node: Node, address_of: AddressOf) -> Kernel:
    """The kernel of a mul_mat whose quantised weights have Q8_ACT activations."""
    args = pack(node, address_of)
    rows, tokens = int(args[3]), int(args[5])
    together = 1 if tokens == 1 else 4 if tokens <= 4 else 8
    per_block = (ROWS_K if node.inputs[0].dtype.block == 256 else ROWS)[together]
    grid = (blocks(rows, per_block) * blocks(tokens, together), 1)
    return Kernel("mul_mat", f"{'_'.join(variant(node))}_n{together}", grid, THREADS, args)
