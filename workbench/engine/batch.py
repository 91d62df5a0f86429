"""One step's tokens as input values: what the host writes into staging memory.

While a device computes a step, the host has nothing to do. Behind the step the device has nothing
to do until the host has made the next inputs. Where each sequence goes on by one token, all of them
but the tokens are known before: `Batches` makes them while the device computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from workbench.config import EngineConfig
from workbench.engine.kv_cache import KVCache, check_room, padded
from workbench.errors import UsageError
from workbench.graph.ir import StepShape
from workbench.model.shift import DELTAS
from workbench.trace.spans import now_ns

Outputs = Literal["last", "all", "none"]


# sequence, its next tokens, and which of their logits are wanted
Entry = tuple[int, Sequence[int], Outputs]
Work = Sequence[Entry]


class Batch(NamedTuple):
    """Tokens computed together: the step shape, the values by input name, where they go.

    sequences, positions, cells: of each token, (T,). counts: outputs of each entry of the work.
    """

    shape: StepShape
    values: dict[str, np.ndarray]
    sequences: np.ndarray  # (T,) int64
    positions: np.ndarray  # (T,) int32
    cells: np.ndarray  # (T,) int64
    counts: tuple[int, ...]


class Batches:
    """The batches of one cache. A batch belongs to the step it is made for.

    spent: told of the time that making them took.
    """

    def __init__(
        self,
        cache: KVCache,
        n_vocab: int,
        n_ubatch: int,
        spent: Callable[[str, int, int], None] = lambda phase, start_ns, end_ns: None,
    ):
        self._cache = cache
        self._n_vocab = n_vocab
        self._n_ubatch = n_ubatch
        self._spent = spent
        self._next: Batch | None = None
        self._next_is_for: object = None  # sequences and outputs, and the state of the cache

    def take(self, work: Work) -> Batch:
        """As `make_batch`; what `look_ahead` made for such work and this state is used."""
        start = now_ns()
        if self._next is not None and self._next_is_for == (
            _one_each(work),
            self._cache.n_changes,
        ):
            batch = self._next
            tokens = [token for _, (token,), _ in work]
            batch.values["inp_tokens"] = check_ids(tokens, self._n_vocab)
        else:
            batch = make_batch(work, self._cache, self._n_vocab, self._n_ubatch)
        self._spent("batch", start, now_ns())
        return batch

    def look_ahead(self, work: Work) -> int:
        """Makes what the next step needs but its tokens, where it is one like `work` of one token
        for each sequence. Returns the ns it took."""
        start, alike = now_ns(), _one_each(work)
        if not alike or self._cache.n_used + len(work) > self._cache.n_ctx:
            return 0
        following = [(sequence, [0], outputs) for sequence, _, outputs in work]
        self._next = make_batch(following, self._cache, self._n_vocab, self._n_ubatch)
        self._next_is_for = alike, self._cache.n_changes
        end = now_ns()
        self._spent("batch", start, end)
        return end - start


def _one_each(work: Work) -> tuple[tuple[int, Outputs], ...] | None:
    """Sequences and outputs of work with one token for each sequence; None for other work."""
    if any(len(tokens) != 1 for _, tokens, _ in work):
        return None
    return tuple([(sequence, outputs) for sequence, _, outputs in work])


def make_batch(work: Work, cache: KVCache, n_vocab: int, n_ubatch: int) -> Batch:
    """The next tokens of each sequence of `work`, in its order.

    Raises UsageError for no tokens, more than n_ubatch in all, a sequence that does not exist or is
    given twice, ids outside the vocabulary, and a full context. Nothing has changed then.
    """
    sizes = [len(tokens) for _, tokens, _ in work]
    t = sum(sizes)
    if not 0 < t <= n_ubatch or 0 in sizes:
        raise UsageError(f"a step takes 1 to {n_ubatch} tokens, not {t}; use prefill, or n_ubatch")
    given = [sequence for sequence, _, _ in work]
    for sequence in given:
        cache.reserve(sequence)
        if given.count(sequence) > 1:
            raise UsageError(f"sequence {sequence} is given twice in one step; give it once")
    ids = check_ids([i for _, tokens, _ in work for i in tokens], n_vocab)
    cells = cache.find(t)
    n_kv = cache.extent(cells)
    ends = np.cumsum(sizes)
    sequences = np.repeat(np.array(given, np.int64), sizes)
    starts = [cache.length(sequence) for sequence in given]
    positions = np.concatenate(
        [np.arange(at, at + n, dtype=np.int32) for at, n in zip(starts, sizes, strict=True)]
    )
    if t == len(work):
        mask = cache.masks_of_one(sequences, cells, n_kv)
    else:
        mask = np.empty((t, n_kv), np.uint16)
        for sequence, end, n in zip(given, ends, sizes, strict=True):
            own = slice(end - n, end)
            cache.mask(sequence, positions[own], cells[own], mask[own])
    rows = [
        _ROWS[outputs](n) + (end - n)
        for (_, _, outputs), end, n in zip(work, ends, sizes, strict=True)
    ]
    values = {
        "inp_tokens": ids,
        "inp_pos": positions,
        "attn_inp_kq_mask": mask.view(np.float16),
        "attn_inp_k_idxs": cells,
        "attn_inp_v_idxs": cells,
        "inp_out_ids": np.concatenate(rows).astype(np.int32),
    }
    counts = tuple(map(len, rows))
    shape = StepShape(t, sum(counts), n_kv, len(work))
    return Batch(shape, values, sequences, positions, cells, counts)


def shift_batch(cache: KVCache) -> Batch:
    """The step that rotates the stored K of cells that have moved; it has no tokens."""
    assert cache.moved is not None
    none = np.empty(0, np.int64)
    shape = StepShape(0, 0, cache.n_cells, n_seqs=0)
    return Batch(shape, {DELTAS: cache.moved}, none, none.astype(np.int32), none, ())


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
    for i, token in enumerate(tokens):
        if not 0 <= token < n_vocab:
            raise UsageError(
                f"token id {token} at index {i} is outside the vocabulary of "
                f"0..{n_vocab - 1}; use ids of this model's tokenizer"
            )
    return np.array(tokens, dtype=np.int32)
