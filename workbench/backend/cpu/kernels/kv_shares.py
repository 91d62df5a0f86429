"""Which tiles of 16 cells each share of a CPU's attention reads.

Shares follow from the step shape and the padded n_kv alone. `attention.attention_combine` merges
their results in the order of the shares.
"""

from typing import NamedTuple

from workbench.config import KVParts, SkipMaskedKV

CELLS = 16  # of a tile
TOKENS = 8  # most tokens of a sequence that a tile serves at once; attn_kernel=vec: one
SHARES = 8  # most parts that the cells of a token are split into
LEAST_TILES = 8  # of a share
STREAM_PIECES = 16  # into how many the tiles of all rows are cut (stream_k)

SKIPS: dict[str, int] = {
    SkipMaskedKV.OFF: 0,
    SkipMaskedKV.IN_LOOP: 1,
    SkipMaskedKV.TAIL: 2,
    SkipMaskedKV.CLASSES: 3,
}


class Shares(NamedTuple):
    """How the tiles of 16 cells are dealt out.

    n: shares of each row of tiles.
    piece: 0: share i has tiles i, i + n, ... Else the tiles of all rows form one sequence, which is
        cut every `piece` tiles.
    """

    n: int
    piece: int


def shares_of(kv_parts: str, n_tokens: int, n_head_kv: int, n_kv: int) -> Shares:
    """The shares of a step of this shape, for a value of the toggle `kv_parts`. Each (token, kv
    head) has a row of tiles."""
    tiles = -(-n_kv // CELLS)
    most = max(1, tiles // LEAST_TILES)
    if kv_parts == KVParts.OFF or most == 1:
        return Shares(1, 0)
    if kv_parts == KVParts.PARALLEL_BLOCKS:
        return Shares(min(SHARES, most), 0)
    rows = n_tokens * n_head_kv
    piece = max(LEAST_TILES, -(-rows * tiles // STREAM_PIECES))
    return Shares(-(-tiles // piece) + 1, piece) if piece < rows * tiles else Shares(1, 0)


def found_bytes(n_tokens: int, n_head: int, head_dim: int, n_shares: int) -> int:
    """Bytes of the shares' results: (tokens, heads, shares, 2 + head_dim) float32."""
    return n_tokens * n_head * n_shares * 4 * (2 + head_dim) if n_shares > 1 else 0
