"""The slow twin of attention: how attention_simple.cu is launched. It has the same constants."""

from __future__ import annotations

from tests.gpu.twins.product import FOLDER
from workbench.backend.cuda.kernels.attention import AttentionAt, AttentionShape, check
from workbench.backend.cuda.kernels.kernel import Kernel, blocks
from workbench.backend.issue.args import Args

SPLIT_THREADS = 512
SHARE_CELLS, MOST_SHARES = 256, 32  # attention_split: least cells of a share, most shares
# attention_tile: widest head_dim -> kernel, query tokens of a block
TILES = {
    32: ("attention_tile_d1", 16),
    64: ("attention_tile_d2", 16),
    128: ("attention_tile_d4", 16),
    256: ("attention_tile_d8", 8),
}


def shares_of(n_kv: int) -> int:
    """Shares the cells of one head are split into: from the padded n_kv alone."""
    share = max(SHARE_CELLS, blocks(blocks(n_kv, MOST_SHARES), 32) * 32)
    return blocks(n_kv, share)


def scratch_bytes(shape: AttentionShape) -> int:
    """What the shares need: per token, head and share, head_dim + 2 floats."""
    shares = shares_of(shape.n_kv)
    if not shape.few or shares == 1:
        return 0
    return shape.n_tokens * shape.n_head * shares * (shape.head_dim + 2) * 4


def launches(shape: AttentionShape, at: AttentionAt, scale: float) -> list[Kernel]:
    """As `launches` of the backend, in float throughout and without tensor cores; dst is F32, and
    the counters are not used."""
    check(shape.head_dim)
    rows = shape.n_tokens * shape.n_head
    args: Args = [*at[:6], *shape[:5], scale]
    if not shape.few:
        function, tile = next(TILES[d] for d in TILES if shape.head_dim <= d)
        return [_kernel(function, (blocks(shape.n_tokens, tile), shape.n_head), 128, args)]
    shares = shares_of(shape.n_kv)
    split = _kernel("attention_split", (rows, shares), SPLIT_THREADS, args)
    if shares == 1:
        return [split]
    combine: Args = [at.dst, at.scratch, shares, shape.head_dim]
    return [split, _kernel("attention_combine", (rows, 1), 256, combine)]


def _kernel(function: str, grid: tuple[int, int], threads: int, args: Args) -> Kernel:
    return Kernel("attention_simple", function, grid, threads, args, sources=FOLDER)
