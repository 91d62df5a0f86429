"""One step's tokens as input values: what the host writes into staging memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from workbench.engine.kv_cache import KVCache
from workbench.errors import UsageError
from workbench.graph.ir import StepShape

Outputs = Literal["last", "all", "none"]


class Batch(NamedTuple):
    """Tokens computed together: the step shape, the values by input name, where they go."""

    shape: StepShape
    values: Mapping[str, np.ndarray]
    positions: np.ndarray  # (T,) int32
    cells: np.ndarray  # (T,) int64


def make_batch(
    tokens: Sequence[int], cache: KVCache, n_vocab: int, n_ubatch: int, outputs: Outputs
) -> Batch:
    """The next `tokens` of the sequence in `cache`.

    Raises UsageError for no tokens, more than n_ubatch, ids outside the vocabulary, and a full
    context.
    """
    t = len(tokens)
    if not 0 < t <= n_ubatch:
        raise UsageError(f"a step takes 1 to {n_ubatch} tokens, not {t}; use prefill, or n_ubatch")
    ids = check_ids(tokens, n_vocab)
    cells = cache.find(t)
    positions = np.arange(cache.n_used, cache.n_used + t, dtype=np.int32)
    rows = _ROWS[outputs](t)
    n_kv = cache.extent(t)
    values = {
        "inp_tokens": ids,
        "inp_pos": positions,
        "attn_inp_kq_mask": cache.mask(positions, cells, n_kv),
        "attn_inp_k_idxs": cells,
        "attn_inp_v_idxs": cells,
        "inp_out_ids": rows,
    }
    return Batch(StepShape(t, len(rows), n_kv), values, positions, cells)


_ROWS = {
    "last": lambda t: np.array([t - 1], dtype=np.int32),
    "all": lambda t: np.arange(t, dtype=np.int32),
    "none": lambda t: np.empty(0, dtype=np.int32),
}


def check_ids(tokens: Sequence[int], n_vocab: int) -> np.ndarray:
    """Token ids as (T,) int32; raises UsageError naming the first outside 0..n_vocab-1."""
    for place, token in enumerate(tokens):
        if not 0 <= token < n_vocab:
            raise UsageError(
                f"token id {token} at place {place} is outside the vocabulary of "
                f"0..{n_vocab - 1}; use ids of this model's tokenizer"
            )
    return np.array(tokens, dtype=np.int32)
