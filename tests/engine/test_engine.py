"""The engine on the CPU devices: steps, generation, variants, failures, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.engine.finite import is_finite
from workbench.model.sampler import Sampling

PROMPT = [1, 17, 300, 4, 99, 512, 7]


@pytest.fixture(scope="module")
def loaded(tiny_model):
    with Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=300, n_ubatch=64,
        toggles=Toggles(),
    ) as e:  # fmt: skip
        yield e


def test_generation_is_greedy_by_default_else_seeded(engine):
    def tokens(**kwargs):
        engine.reset()
        return engine.generate(tokens=PROMPT, max_tokens=12, **kwargs).tokens

    greedy = tokens()
    engine.reset()
    assert greedy[0] == int(np.argmax(engine.prefill(PROMPT)[0]))
    assert tokens() == greedy
    hot = Sampling(temperature=5.0, top_k=0, top_p=1.0)
    assert tokens(sampling=hot, seed=3) == tokens(sampling=hot, seed=3)
    assert tokens(sampling=hot, seed=3) != tokens(sampling=hot, seed=4)


def test_text_streams_in_pieces_that_make_the_whole(engine):
    pieces: list[str] = []
    made = engine.generate("The engine", max_tokens=20, on_text=pieces.append, stop_at_eos=False)
    assert "".join(pieces) == made.text
    assert len(made.tokens) == 20 and len(made.token_us) == 19


def test_growing_memory_drops_kept_programs(engine):
    """Logits of many rows need more room than was reserved; kept programs must not see it move."""
    with engine.variant(Toggles(graph_reuse="set_rows")) as e:
        first = e.step([3])
        e.reset()
        everything = e.prefill(list(range(150)), outputs="all")  # of three ubatches
        assert everything.shape[0] == 150
        e.reset()
        assert np.array_equal(e.step([3]), first)
        e.reset()
        rows = [e.step(list(range(i, min(i + 64, 150))), "all") for i in (0, 64, 128)]
        assert np.array_equal(np.concatenate(rows), everything)


def test_an_engine_outlives_the_one_it_came_from(tiny_model):
    """A variant shares weights and nothing else."""
    path = tiny_model("tiny-llama", "F16")
    first = Engine.load(path, device="embedded", n_ctx=64, toggles=Toggles())
    wanted = first.prefill(PROMPT)
    second = first.variant(Toggles(sync="copy_boundary"))
    assert (first.n_past, second.n_past) == (len(PROMPT), 0) and first.backend is second.backend
    first.close()
    first.close()
    assert np.array_equal(second.prefill(PROMPT), wanted)
    second.close()
    with pytest.raises(UsageError, match="closed"):
        second.step([1])


REFUSED = [
    (lambda e: e.prefill([1, 1024]), "token id 1024 at index 1 is outside the vocabulary of 0..10"),
    (lambda e: e.prefill([-1]), "token id -1"),
    (lambda e: e.prefill([1] * 301), "do not fit the context of 300"),
    (lambda e: e.prefill([]), "empty"),
    (lambda e: e.generate("x", tokens=[1]), "either a prompt or token ids"),
    (lambda e: Engine.load(e.model.path, n_contexts=4, toggles=Toggles()), "'n_contexts' does not"),
    (lambda e: e.cycle(0), "a prompt of 0 tokens has no steps"),
    *((lambda e, asked=asked: e.program(*asked), r"a step has 1 to \d+ tokens|do not fit the con")
      for asked in ((0,), (65,), (1, 2), (1, 1, -1), (1, 1, 300))),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_bad_requests_change_nothing(engine, asked, says):
    engine.prefill(PROMPT)
    with pytest.raises(UsageError, match=says):
        asked(engine)
    assert engine.n_past == len(PROMPT)


def test_logits_whose_sum_is_too_large_are_finite():
    most = np.finfo(np.float32).max
    assert is_finite(np.full(4, most, np.float32))
    assert not is_finite(np.array([most, np.inf], np.float32))
    assert not is_finite(np.array([0, np.nan], np.float32))
