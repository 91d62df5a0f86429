"""Steps in few shapes: what is added changes no answer, and no shape says what it is not."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.engine.slots.padding import Sizes, padded

TOGGLES = wb.Toggles(graph_reuse="set_rows", kv_cache="per_sequence", batch_sizes="padded")
FULL = [[6, *[1] * 8], [*[2] * 7, 1], [15, 1], [1] * 11, [16], [5]]  # tokens of each; 16 at most


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


def test_full_steps_of_many_sequences_answer_as_alone(tiny_model):
    """Where the tokens of a step fill n_ubatch, or nearly so."""
    rng = np.random.default_rng(1)
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=512, n_seqs=16, n_ubatch=16,
        toggles=TOGGLES,
    ) as engine:  # fmt: skip
        for lengths in FULL:
            work = [(i, rng.integers(3, 900, n).tolist(), "all") for i, n in enumerate(lengths)]
            engine.reset()
            together = engine.submit(work).wait().copy()
            engine.reset()
            alone = [engine.submit([one]).wait().copy() for one in work]
            assert np.array_equal(together, np.concatenate(alone)), lengths
