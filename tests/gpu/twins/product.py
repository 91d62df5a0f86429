"""The slow twin of every product: how mul_mat.cu is launched.

A warp has a few rows, and no columns are shared. There are no tensor cores: 8-bit activations meet
quantised weights in integers, whatever the number of tokens.
"""

from __future__ import annotations

from pathlib import Path

from workbench.backend.cuda.kernels.kernel import Kernel, blocks
from workbench.backend.issue.args import AddressOf, pack, variant
from workbench.graph.ir import Node

FOLDER = Path(__file__).resolve().parent  # of the sources of both twins
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
    name = f"{'_'.join(variant(node))}_n{together}"
    return Kernel("mul_mat", name, grid, THREADS, args, sources=FOLDER)
