"""Several sequences of one engine: what each is answered, together and alone, and what becomes of
cells that are copied, removed and shifted.

On the devices of a CPU a token's answer does not depend on what stands beside it in a step, so a
mixed batch is exact: bit-equal to steps of its own with the same cells. Where the sequence has
other cells than alone, attention adds the same terms in another order: rounding.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import workbench as wb
from tests.orderings import PLACED
from tests.profiles import share
from workbench.backend.issue.prepared import Prepared
from workbench.benchmarks.compare.answers import compare_logits
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.model.inputs import DELTAS

RNG = np.random.default_rng(16)
PROMPTS = [RNG.integers(3, 900, n).tolist() for n in (5, 1, 17, 9)]
NEXT = RNG.integers(3, 900, (4, 5)).tolist()  # by sequence
# NMSE. Measured: 1e-11 at most without 8-bit activations; with them 1e-13 mostly, and 2e-5 where
# one of them rounds the other way.
ROUNDING, QUANTISED = 1e-9, 2e-4


def opened(path, device: str = "embedded", **more) -> Engine:
    sizes = {"n_ctx": 256, "n_seqs": 64, "n_ubatch": 32, "threads": 2, "toggles": Toggles()} | more
    return wb.Engine.load(path, device=device, **sizes)


@pytest.fixture(scope="module")
def loaded(tiny_model) -> Iterator[Engine]:
    with opened(tiny_model("tiny-llama", "Q8_0")) as made:
        yield made


def alone(engine: Engine) -> list[np.ndarray]:
    """Each sequence's logits behind every token, with the engine to itself."""
    found = []
    for prompt, tokens in zip(PROMPTS, NEXT, strict=True):
        engine.reset()
        rows = [engine.step(prompt, "all"), *(engine.step([token]) for token in tokens)]
        found.append(np.concatenate(rows))
    engine.reset()
    return found


def steps(turn: int = 0) -> Iterator[list[tuple[int, list[int], str]]]:
    """Ragged prompts in one step, then a token of each, every time in another order; then prompts
    and single tokens mixed."""
    order = [2, 0, 3, 1]
    order = order[turn:] + order[:turn]
    yield [(s, PROMPTS[s], "all") for s in order]
    for i in range(3):
        order = order[1:] + order[:1]
        yield [(s, [NEXT[s][i]], "last") for s in order]
    yield [(3, NEXT[3][3:], "all"), (1, [NEXT[1][3]], "last"), (0, NEXT[0][3:], "all")]
    yield [(1, [NEXT[1][4]], "last"), (2, NEXT[2][3:], "all")]


def together(engine: Engine, turn: int = 0) -> list[np.ndarray]:
    found: dict[int, list[np.ndarray]] = {s: [] for s in range(len(PROMPTS))}
    for work in steps(turn):
        for (sequence, _, _), rows in zip(work, engine.submit(work).each(), strict=True):
            found[sequence].append(rows)
    return [np.concatenate(rows) for rows in found.values()]


def one_by_one(engine: Engine) -> list[np.ndarray]:
    """Every entry a step of its own: each token has the cell that it has together."""
    found: dict[int, list[np.ndarray]] = {s: [] for s in range(len(PROMPTS))}
    for work in steps():
        for sequence, tokens, outputs in work:
            found[sequence].append(engine.step(tokens, outputs, sequence))
    return [np.concatenate(rows) for rows in found.values()]


# together and alone -------------------------------------------------------------------------------

MODELS = [
    ("tiny-llama", "F32"), ("tiny-llama", "Q4_0"), ("tiny-llama-bias", "Q8_0"),
    ("tiny-qwen2", "F32"), ("tiny-qwen3", "BF16"), ("tiny-qwen3", "Q4_K"),
]  # fmt: skip


TRAINS = [
    {"sync": sync, "copy_stream": stream, "host_source": source, "n_copies": n,
     "step_wait": "outputs", "graph_reuse": "set_rows"}
    for sync, stream, source, n in (
        ("per_copy", "own", "pinned", "1"), ("packed", "own", "pinned_ring_2", "4"),
        ("implicit", "compute", "pinned_ring_4", "1"), ("auto", "auto", "pinned_ring_2", "1"),
        ("event_guarded", "own", "pinned_ring_4", "4"),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "quant", "device"),
    share([*((*m, d) for m in MODELS for d in ("embedded", "host"))], every=5),
)  # fmt: skip
def test_each_sequence_is_answered_as_alone(tiny_model, preset, quant, device):
    toggles = Toggles(graph_reuse="set_rows")
    with opened(tiny_model(preset, quant), device, toggles=toggles) as engine:
        allowed = QUANTISED if quant.startswith("Q") else ROUNDING
        wanted = alone(engine)
        assert len({int(i) for rows in wanted for i in rows.argmax(axis=1)}) > 10
        mixed = together(engine)
        engine.reset()
        assert all(map(np.array_equal, mixed, one_by_one(engine)))
        for turn in range(1, 3):
            engine.reset()
            for ours, theirs in zip(together(engine, turn), wanted, strict=True):
                assert compare_logits(theirs, ours, "rounding", allowed).holds


# copy, remove, keep -------------------------------------------------------------------------------


def close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return compare_logits(theirs, ours, "rounding", QUANTISED).holds

    return compare_logits(theirs, ours, "rounding", QUANTISED).holds


# shift --------------------------------------------------------------------------------------------


def stored_k(engine: Engine, layer: int = 0) -> np.ndarray:
    """K of a layer on the embedded device, as float32 (n_cells, n_embd_kv)."""
    engine.synchronize()
    tensor = engine._residents.caches[layer][0]
    (memory,) = (m for b, m in engine._residents.memory.items() if b.name == tensor.name)
    flat = np.ctypeslib.as_array(
        (np.ctypeslib.ctypes.c_uint8 * tensor.nbytes).from_address(memory.address)
    )
    return flat.view(np.float16).reshape(tensor.shape).astype(np.float32)


def test_shifts_that_undo_each_other_before_a_step_are_none(engine):
    wanted = engine.step([*PROMPTS[2], *NEXT[0]], "all")[-5:]
    engine.reset()
    engine.step(PROMPTS[2], "none")
    engine.cache.shift(0, 6)
    engine.cache.shift(0, -6)
    engine.cache.shift(0, 0)
    n = engine.n_steps
    assert np.array_equal(engine.step(NEXT[0], "all"), wanted) and engine.n_steps == n + 1


@pytest.mark.parametrize(
    ("preset", "quant", "device"),
    [("tiny-llama", "F32", "embedded"), ("tiny-qwen3", "Q8_0", "embedded"),
     ("tiny-qwen2", "F32", "host")],
)  # fmt: skip
def test_a_sequence_that_moved_is_answered_as_before(tiny_model, preset, quant, device):
    """RoPE is relative: with every position 40 further on, each answer is the same but for rounding
    (of K to halves, and of larger angles). So it is where it moved back."""
    with opened(tiny_model(preset, quant), device, n_ctx=64, n_seqs=8) as engine:
        wanted = engine.step([*PROMPTS[2], *NEXT[0]], "all")[-5:]
        engine.reset()
        engine.step(PROMPTS[2], "none")
        engine.step(PROMPTS[3], "none", 1)
        before = engine.step(NEXT[1], "all", 1)
        for delta, length in ((40, 57), (-40, 17)):
            engine.cache.remove(1, len(PROMPTS[3]))
            engine.cache.shift(0, delta)
            assert engine.cache.length() == length
            moved, stays = engine.submit([(0, NEXT[0], "all"), (1, NEXT[1], "all")]).each()
            assert compare_logits(wanted, moved, "rounding").holds
            assert close(stays, before)
            engine.cache.remove(0, length)


def test_a_context_shift_turns_k_as_recomputing_does(engine):
    """As llama.cpp's server does it: n_keep stay, n_discard go, the others move up. K of the first
    layer follows from token and position alone, so it is what the shorter text has; cells that do
    not move keep theirs to the bit."""
    tokens, n_keep, n_discard = [*PROMPTS[2], *PROMPTS[3]], 3, 8
    engine.step(tokens, "none")
    engine.step(PROMPTS[0], "none", 1)
    before = stored_k(engine)
    engine.cache.remove(0, n_keep, n_keep + n_discard)
    engine.cache.shift(0, -n_discard, n_keep + n_discard)
    assert engine.cache.length() == len(tokens) - n_discard
    engine.step([7])
    after = stored_k(engine)
    still = [*range(n_keep), *range(len(tokens), len(tokens) + len(PROMPTS[0]))]
    assert np.array_equal(after[still], before[still])
    engine.reset()
    engine.step([*tokens[:n_keep], *tokens[n_keep + n_discard :]], "none")
    recomputed = stored_k(engine)[n_keep : len(tokens) - n_discard]
    turned = after[n_keep + n_discard : len(tokens)]
    assert np.abs(turned - recomputed).max() < 4e-3 * np.abs(recomputed).max()
    assert not np.allclose(before[n_keep + n_discard : len(tokens)], recomputed, atol=0.05)


# steps under way ----------------------------------------------------------------------------------


def submitted(engine: Engine, waits: bool) -> list[np.ndarray]:
    """Trains of steps; between a submit and its wait cells go, come again in another sequence and
    move. With waits, everything is over before a cell is touched."""

    def submit(work):
        pending = engine.submit(work)
        if waits:
            pending.wait()
            engine.synchronize()
        return pending

    cache = engine.cache
    found = [submit([(0, PROMPTS[2], "none"), (1, PROMPTS[3], "last")])]
    cache.remove(0, 5)  # the step under way reads and writes them
    found.append(submit([(2, PROMPTS[3], "all"), (1, NEXT[1][:1], "last")]))
    cache.remove(1)
    submit([(3, PROMPTS[3], "none")])
    cache.copy(2, 4)
    cache.remove(2)
    submit([(3, PROMPTS[0], "none")])
    cache.shift(3, 11)
    found.append(submit([(3, NEXT[3], "all"), (0, NEXT[0], "all")]))
    cache.remove(3, 0, 14)
    cache.shift(3, -14)
    found += [submit([(3, [9], "last"), (4, [8], "last"), (s, [7], "last")]) for s in (5, 6)]
    return [pending.wait() for pending in found]


WAYS = pytest.mark.parametrize(
    "values", [{}, {"step_wait": "outputs"}, *TRAINS], ids=lambda v: ",".join(v.values())
)


@WAYS
def test_cells_may_go_while_a_step_is_under_way(engine, values):
    wanted = submitted(engine, waits=True)
    assert all(np.isfinite(rows).all() for rows in wanted)
    with engine.variant(Toggles(**values)) as variant:
        for _ in range(2):
            variant.reset()
            assert all(map(np.array_equal, submitted(variant, waits=False), wanted))


@pytest.mark.parametrize("placed", PLACED)
def test_wherever_layers_are_their_cache_turns_there(engine, tiny_model, placed):
    wanted = submitted(engine, waits=True)
    toggles = Toggles(step_wait="outputs", graph_reuse="set_rows")
    path = tiny_model("tiny-llama", "Q8_0")
    with opened(path, toggles=toggles, **PLACED[placed]) as other:
        assert all(map(np.array_equal, submitted(other, waits=False), wanted))


def test_a_second_submit_waits_for_the_first(engine):
    wanted = [engine.step(PROMPTS[2], "all"), engine.step(PROMPTS[3], "all", 1)]
    engine.reset()
    first = engine.submit([(0, PROMPTS[2], "all")])
    assert not first.done
    second = engine.submit([(1, PROMPTS[3], "all")])
    assert first.done and not second.done
    kept = first.wait()
    assert np.array_equal(second.wait(), wanted[1]) and np.array_equal(kept, wanted[0])
    assert first.wait() is kept and second.done
    assert engine.n_steps >= 2


def test_results_stay_the_caller_s_while_others_land(engine):
    pending = [engine.submit([(s, [s + 5], "last")]) for s in range(8)]
    kept = [p.wait().copy() for p in pending]
    for i in range(8):
        engine.step([i], sequence=9)
    assert all(map(np.array_equal, [p.wait() for p in pending], kept))
    assert len({rows.tobytes() for rows in kept}) == 8


# waits that fail, and bad input -------------------------------------------------------------------


class Broken(Exception):
    pass


def looks(engine: Engine):
    """Who owns which cell, and what a step finds."""
    cache = engine.cache
    owners = [cache.owners(cell) for cell in range(cache.n_cells)]
    moved = None if cache.moved is None else cache.moved.tolist()
    return owners, [cache.length(s) for s in range(4)], moved, cache.n_used


@pytest.fixture
def interrupted(monkeypatch):
    """interrupted(error, call): the wait of a step fails in this call."""

    def run(error, call):
        def fails(self, watch):
            raise error

        with monkeypatch.context() as patched, pytest.raises(error):
            patched.setattr(Prepared, "finish", fails)
            call()

    return run


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
def test_a_wait_that_fails_gives_the_cells_back(engine, interrupted, error):
    """As with Ctrl-C in the wait: the tokens are submitted again, and nothing else is needed."""
    work = [(0, NEXT[0], "all"), (1, NEXT[1][:1], "last")]
    engine.step(PROMPTS[2], "none")
    engine.step(PROMPTS[3], "none", 1)
    wanted = engine.submit(work).wait()
    engine.cache.remove(0, len(PROMPTS[2]))
    engine.cache.remove(1, len(PROMPTS[3]))
    before = looks(engine)
    pending = engine.submit(work)
    interrupted(error, pending.wait)
    assert looks(engine) == before and not pending.done
    with pytest.raises(UsageError, match="has no results, for its wait failed or its engine was"):
        pending.wait()
    engine.synchronize()
    assert np.array_equal(engine.submit(work).wait(), wanted)


def test_a_closed_engine_has_no_results_to_wait_for(engine):
    with engine.variant(Toggles()) as variant:
        kept = variant.submit([(0, PROMPTS[0], "last")])
        rows = kept.wait()
        pending = variant.submit([(0, NEXT[0], "last")])
    assert kept.wait() is rows
    with pytest.raises(UsageError, match="has no results, for its wait failed or its engine was"):
        pending.wait()


def test_a_submit_whose_wait_fails_submits_nothing(engine, interrupted):
    engine.step(PROMPTS[2], "none")
    before = looks(engine)
    engine.submit([(0, NEXT[0], "last")])
    interrupted(KeyboardInterrupt, lambda: engine.submit([(1, NEXT[1], "last")]))
    assert looks(engine) == before
    engine.synchronize()
    assert engine.step(NEXT[1], "all", 1).shape[0] == 5


def test_cells_that_went_before_a_wait_failed_stay_gone(engine, interrupted):
    engine.step(PROMPTS[2], "none")
    pending = engine.submit([(0, NEXT[0], "last"), (1, NEXT[1], "last")])
    engine.cache.copy(0, 2)
    engine.cache.remove(1, 3)
    engine.cache.shift(1, 4)
    interrupted(Broken, pending.wait)
    assert [engine.cache.length(s) for s in range(3)] == [17, 0, 22]
    assert engine.cache.moved is None and engine.n_past == 22


def test_a_rotation_that_is_interrupted_loses_what_moved(engine, monkeypatch):
    """Nobody knows how many layers have been turned; sequences that did not move go on."""
    wanted = engine.step([*PROMPTS[3], *NEXT[1]], "all")[-5:]
    engine.reset()
    engine.step(PROMPTS[3], "none", 1)
    engine.step(PROMPTS[2], "none")
    engine.cache.shift(0, 3)
    run = Prepared.run

    def fails(self, values, watch):
        if DELTAS in values:
            raise KeyboardInterrupt
        run(self, values, watch)

    with monkeypatch.context() as patched:
        patched.setattr(Prepared, "run", fails)
        with pytest.raises(KeyboardInterrupt):
            engine.step([1], sequence=1)
    assert [engine.cache.length(s) for s in (0, 1)] == [0, len(PROMPTS[3])]
    assert np.array_equal(engine.step(NEXT[1], "all", 1), wanted)
