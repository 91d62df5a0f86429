"""ROOM #14924: steps of several sequences in few shapes, so that programs and plans are reused.

While a server runs, the number of its sequences changes from step to step. Each number is another
step shape, for which a program is built and captured. So numbers are rounded up:

    a token each   1 2 4 8 16 24 32 48 64 96 128 192 256 ..; as many tokens as sequences and outputs
    one sequence   tokens 16 24 32 48 ..
    several        tokens as for one, sequences and outputs 1 2 4 8 16 32 64 ..

An added token sees nothing, and has no cell. Where there are several sequences, it belongs to an
added sequence, which has no region of its own.
"""

from collections.abc import Callable
from typing import NamedTuple

from workbench.config import BatchSizes, Toggles

LEAST_TOKENS = 16  # of a step in which sequences have several


class Sizes(NamedTuple):
    """The sizes of a step: its tokens, sequences and outputs."""

    n_tokens: int
    n_seqs: int
    n_outputs: int


def size(n: int) -> int:
    """The least size that n things fit into: a power of two, or, from 16 on, half as much more."""
    whole = 1 << max(0, n - 1).bit_length()
    between = whole // 4 * 3
    return between if between >= max(n, 24) else whole


def padded(exact: Sizes, n_ubatch: int) -> Sizes:
    """The sizes of a step with so many tokens, sequences and outputs."""
    n_tokens, n_seqs, n_outputs = exact
    if n_seqs == n_tokens:
        whole = min(size(n_seqs), n_ubatch)
        return Sizes(whole, whole, whole if n_outputs else 0)
    more = min(size(max(n_tokens, LEAST_TOKENS)), n_ubatch)
    seqs = n_seqs
    if n_seqs > 1:
        # added tokens belong to an added sequence; there must be fewer sequences than tokens, or
        # each sequence would have one token
        wanted = n_seqs + (more > n_tokens)
        seqs = max(n_seqs, min(1 << (wanted - 1).bit_length(), more - 1))
    outputs = seqs if 0 < n_outputs <= seqs else min(size(n_outputs), more) if n_outputs else 0
    return Sizes(more, seqs, outputs)


def as_they_are(exact: Sizes, n_ubatch: int) -> Sizes:
    """The sizes as they are: nothing is added."""
    return exact


Rule = Callable[[Sizes, int], Sizes]


def sizes_of(toggles: Toggles) -> Rule:
    """The rule that toggles ask for: (sizes, n_ubatch) -> sizes."""
    return padded if toggles.batch_sizes == BatchSizes.PADDED else as_they_are
