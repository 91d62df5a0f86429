"""The engine on the CPU devices: steps, cache, programs by shape, variants, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.backend.issue.prepared import Prepared
from workbench.common.errors import DeviceError, UsageError
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.model.sampler import Sampling

PROMPT = [1, 17, 300, 4, 99, 512, 7]


@pytest.fixture(scope="module")
def engine(tiny_model):
    with Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=300, toggles=Toggles()
    ) as e:
        yield e


@pytest.fixture(autouse=True)
def fresh(engine):
    engine.reset()


def test_reset_forgets(engine):
    first = engine.prefill(PROMPT)
    engine.reset()
    engine.prefill([5, 6, 7, 8, 9])
    engine.reset()
    assert np.array_equal(engine.prefill(PROMPT), first)


def test_generation_is_greedy_by_default_and_seeded_otherwise(engine):
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
    assert len(made.tokens) == 20
    assert len(made.token_us) == 19


def test_generation_stops_where_the_context_ends(tiny_model):
    with Engine.load(
        tiny_model("tiny-llama", "F16"), device="embedded", n_ctx=16, toggles=Toggles()
    ) as e:
        made = e.generate(tokens=PROMPT, max_tokens=100)
        assert e.n_past == 16
        assert len(made.tokens) == 16 - len(PROMPT) + 1


def test_growing_memory_drops_kept_programs(tiny_model):
    """Logits of many rows need more room than was reserved; kept programs must not see it move."""
    toggles = Toggles(graph_reuse="set_rows")
    path = tiny_model("tiny-llama", "F16")
    with Engine.load(path, device="embedded", toggles=toggles, n_ctx=256, n_ubatch=64) as e:
        first = e.step([3])
        e.reset()
        everything = e.prefill(list(range(64)), outputs="all")
        e.reset()
        assert np.array_equal(e.step([3]), first)
        assert everything.shape[0] == 64


def test_a_variant_shares_weights_and_nothing_else(engine):
    engine.prefill(PROMPT)
    with engine.variant(Toggles(sync="copy_boundary")) as other:
        assert other.n_past == 0
        assert np.array_equal(other.prefill(PROMPT), engine.variant(Toggles()).prefill(PROMPT))
        assert other.backend is engine.backend
    assert engine.n_past == len(PROMPT)


def test_an_engine_outlives_the_one_it_came_from(tiny_model):
    first = Engine.load(
        tiny_model("tiny-llama", "F16"), device="embedded", n_ctx=64, toggles=Toggles()
    )
    second = first.variant(Toggles())
    first.close()
    first.close()
    assert second.prefill(PROMPT).shape == (1, second.model.n_vocab)
    second.close()
    with pytest.raises(UsageError, match="closed"):
        second.step([1])


@pytest.mark.parametrize("asked", [(0,), (513,), (1, 2), (1, 1, -1), (1, 1, 300)], ids=str)
def test_a_shape_that_no_step_has_has_no_program(engine, asked):
    with pytest.raises(UsageError, match=r"a step has 1 to \d+ tokens|do not fit the context"):
        engine.program(*asked)
    with pytest.raises(UsageError, match="a prompt of 0 tokens has no steps"):
        engine.cycle(0)


def test_the_host_device_has_one_split_and_no_copies(tiny_model):
    with Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="host", n_ctx=64, toggles=Toggles()
    ) as e:
        program = e.program()
        assert program.pattern() == "h"
        assert program.counts()["copies"] == program.counts()["waits"] == 0
        with pytest.raises(DeviceError, match="host device cannot honour sync=copy_boundary"):
            e.variant(Toggles(sync="copy_boundary"))


def test_bad_requests_change_nothing(engine):
    engine.prefill(PROMPT)
    n_vocab = engine.model.n_vocab
    for tokens, says in (
        (
            [1, n_vocab],
            rf"token id {n_vocab} at index 1 is outside the vocabulary of 0..{n_vocab - 1}",
        ),
        ([-1], "token id -1"),
        ([1] * 300, "do not fit the context of 300"),
        ([], "empty"),
    ):
        with pytest.raises(UsageError, match=says):
            engine.prefill(tokens)
        assert engine.n_past == len(PROMPT)
    with pytest.raises(UsageError, match="either a prompt or token ids"):
        engine.generate("x", tokens=[1])
    with pytest.raises(UsageError, match="'n_contexts' does not exist"):
        Engine.load(engine.model.path, n_contexts=4, toggles=Toggles())


def test_logits_are_the_callers(tiny_model):
    """Of every step, kept or not, written to or not, and beyond the engine's end."""
    path = tiny_model("tiny-llama", "Q8_0")
    with Engine.load(path, device="embedded", n_ctx=64, toggles=Toggles()) as e:
        wanted = [e.step([t]).copy() for t in PROMPT]
        e.reset()
        kept = []
        for t in PROMPT:
            kept.append(e.step([t]))
            spoiled = e.step([t])  # the caller's to write to
            spoiled[:] = np.nan
            e.reset()
            for earlier in PROMPT[: len(kept)]:
                e.step([earlier])
    for found, want in zip(kept, wanted, strict=True):
        assert np.array_equal(found, want)


def test_what_was_made_ahead_serves_its_step_alone(engine):
    """A step of one token finds its inputs ready; other tokens, outputs, states do not use them."""
    wanted = engine.prefill(PROMPT, outputs="all")
    engine.reset()
    for t in PROMPT[:3]:
        engine.step([t])
    assert engine.step(PROMPT[3:4], outputs="none").shape[0] == 0
    rest = engine.step(PROMPT[4:], outputs="all")
    assert np.abs(rest - wanted[4:]).max() < 1e-3 * np.abs(wanted).max()
    engine.reset()
    first = engine.step(PROMPT[:1])
    engine.reset()  # what was made is for the second position
    assert np.array_equal(engine.step(PROMPT[:1]), first)


def test_an_interrupted_step_did_not_happen(engine, monkeypatch):
    wanted = [engine.step([t]) for t in PROMPT]
    engine.reset()
    for t in PROMPT[:-1]:
        engine.step([t])

    def interrupted(self, watch):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Prepared, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step([3])
    engine.backend.synchronize()
    assert engine.n_past == len(PROMPT) - 1
    assert np.array_equal(engine.step(PROMPT[-1:]), wanted[-1])
