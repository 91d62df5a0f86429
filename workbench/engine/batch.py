"""One step's tokens as input values: what the host writes into staging memory.

While a device computes a step of one token the host has nothing to do, and after it the device has
nothing to do until the host has made the inputs of the next step. All of these but the token are
known before: `Batches` makes them then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from workbench.config import EngineConfig
from workbench.engine.kv_cache import KVCache, check_room, padded
from workbench.errors import UsageError
from workbench.graph.ir import StepShape

Outputs = Literal["last", "all", "none"]


class Batch(NamedTuple):
    """Tokens computed together: the step shape, the values by input name, where they go."""

    shape: StepShape
    values: dict[str, np.ndarray]
    positions: np.ndarray  # (T,) int32
    cells: np.ndarray  # (T,) int64


class Batches:
    """The batches of one sequence. A batch belongs to the step it is made for."""

    def __init__(self, cache: KVCache, n_vocab: int, n_ubatch: int):
        self._cache = cache
        self._n_vocab = n_vocab
        self._n_ubatch = n_ubatch
        self._next: Batch | None = None
        self._next_is_for: tuple[Outputs, int] | None = None  # outputs, and state of the cache

    def take(self, tokens: Sequence[int], outputs: Outputs) -> Batch:
        """As `make_batch`; what `look_ahead` made for these outputs and this state is used."""
        if len(tokens) == 1 and self._next_is_for == (outputs, self._cache.n_changes):
            assert self._next is not None
            self._next.values["inp_tokens"] = check_ids(tokens, self._n_vocab)
            return self._next
        return make_batch(tokens, self._cache, self._n_vocab, self._n_ubatch, outputs)

    def look_ahead(self, outputs: Outputs) -> None:
        """Makes what a step of one token needs after those the cache knows of, but the token."""
        if self._cache.n_used < self._cache.n_ctx:
            self._next = make_batch([0], self._cache, self._n_vocab, self._n_ubatch, outputs)
            self._next_is_for = outputs, self._cache.n_changes


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


def step_shape(n_tokens: int, n_outputs: int, n_past: int, config: EngineConfig) -> StepShape:
    """The shape of a step behind n_past tokens. Raises UsageError where no step has it."""
    if not (1 <= n_tokens <= config.n_ubatch and 0 <= n_outputs <= n_tokens and n_past >= 0):
        raise UsageError(
            f"n_tokens={n_tokens}, n_outputs={n_outputs}, n_past={n_past}: a step has 1 to "
            f"{config.n_ubatch} tokens (n_ubatch) and at most an output of each"
        )
    check_room(n_past, n_tokens, config.n_ctx)
    return StepShape(n_tokens, n_outputs, padded(n_past + n_tokens, config.n_kv_pad))


def prompt_shapes(n_prompt: int, n_decoded: int, n_ubatch: int, pad: int) -> list[StepShape]:
    """The shapes of the steps of a prompt, on an empty cache, of which the last ubatch has an
    output, and of single tokens after it."""
    sizes = [min(n_ubatch, n_prompt - i) for i in range(0, n_prompt, n_ubatch)]
    made, past = [], 0
    for i, size in enumerate([*sizes, *[1] * n_decoded]):
        past += size
        made.append(StepShape(size, int(i >= len(sizes) - 1), padded(past, pad)))
    return made


def check_prompt(tokens: Sequence[int], n_vocab: int, n_ctx: int, n_past: int = 0) -> None:
    """Raises UsageError for no tokens, ids outside the vocabulary, and more than a context of n_ctx
    holds beside n_past."""
    if not len(tokens):
        raise UsageError("the prompt is empty; give at least one token")
    check_ids(tokens, n_vocab)
    check_room(n_past, len(tokens), n_ctx)


def check_ids(tokens: Sequence[int], n_vocab: int) -> np.ndarray:
    """Token ids as (T,) int32; raises UsageError naming the first outside 0..n_vocab-1."""
    for place, token in enumerate(tokens):
        if not 0 <= token < n_vocab:
            raise UsageError(
                f"token id {token} at place {place} is outside the vocabulary of "
                f"0..{n_vocab - 1}; use ids of this model's tokenizer"
            )
    return np.array(tokens, dtype=np.int32)
