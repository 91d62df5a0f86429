"""Steps in few shapes: what is added changes no answer, and no shape says what it is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workbench.engine.slots.padding import Sizes, padded


@given(st.data())
def test_as_many_sequences_as_tokens_is_a_token_each(data):
    """Kernels take a step with as many regions as tokens for one of single tokens."""
    n_ubatch = data.draw(st.integers(1, 600))
    n_tokens = data.draw(st.integers(1, n_ubatch))
    n_seqs = data.draw(st.integers(1, n_tokens))
    n_outputs = data.draw(st.integers(0, n_seqs))
    found = padded(Sizes(n_tokens, n_seqs, n_outputs), n_ubatch)
    assert n_tokens <= found.n_tokens <= n_ubatch and n_seqs <= found.n_seqs <= found.n_tokens
    assert n_outputs <= found.n_outputs <= found.n_tokens
    assert (found.n_seqs == found.n_tokens) == (n_seqs == n_tokens)
    if found.n_tokens > n_tokens and n_seqs > 1:  # what is added belongs to none of them
        assert found.n_seqs > n_seqs


def test_a_server_has_few_shapes():
    """Whatever mixture of prompts and sequences a step has."""
    n_ubatch = 512
    every = {
        padded(Sizes(n_tokens, n_seqs, n_outputs), n_ubatch)
        for n_tokens in range(1, n_ubatch + 1)
        for n_seqs in range(1, min(n_tokens, 128) + 1, 3)
        for n_outputs in {0, 1, n_seqs // 2, n_seqs}
    }
    mixed = {found for found in every if found.n_seqs != found.n_tokens}
    assert len(every) - len(mixed) <= 2 * 11 and len(mixed) <= 200
    assert {found.n_tokens for found in mixed} == {16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512}
