"""Several sequences of one engine: cells that are copied, removed and shifted, also while a step is
under way, and what becomes of them where a wait fails. (What each sequence is answered, together
and alone: `contract/test_contract_batches.py`.)"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import workbench as wb
from tests.served import ids
from workbench.backend.issue.prepared import Prepared
from workbench.benchmarks.compare.answers import compare_logits
from workbench.common.errors import UsageError
from workbench.config import BEST, TogglePreset, Toggles
from workbench.engine.engine import Engine
from workbench.graph.ir import StepShape
from workbench.model.cache_graphs import copy_shape
from workbench.model.inputs import DELTAS
from workbench.program.check.hazards import races
from workbench.program.commands import Buffer, Launch, Sync, Wait
from workbench.server.serving import serving

RNG = np.random.default_rng(16)
PROMPTS = [RNG.integers(3, 900, n).tolist() for n in (5, 1, 17, 9)]
NEXT = RNG.integers(3, 900, (4, 5)).tolist()  # by sequence
QUANTISED = 2e-4  # NMSE. Measured: 2e-5 where an 8-bit activation rounds the other way


def opened(path, device: str = "embedded", **more) -> Engine:
    sizes = {"n_ctx": 256, "n_seqs": 64, "n_ubatch": 32, "threads": 2, "toggles": Toggles()} | more
    return wb.Engine.load(path, device=device, **sizes)


@pytest.fixture(scope="module")
def loaded(tiny_model) -> Iterator[Engine]:
    with opened(tiny_model("tiny-llama", "Q8_0")) as made:
        yield made


# company ------------------------------------------------------------------------------------------

OWN, PAST = 2, 288  # the sequence looked at, and its cells before: it looks at 512, in parts
COMPANIES = [  # of each sequence its tokens, in order: 33 to 48 of 5 to 7 are padded to 48 of 8
    {0: 3, 1: 9, OWN: 7, 3: 1, 4: 5, 5: 11, 6: 4}, {0: 6, 1: 2, OWN: 7, 3: 8, 4: 1, 5: 10, 6: 3},
    {0: 12, 1: 5, OWN: 7, 3: 8, 6: 2}, {5: 4, 7: 9, 0: 1, 3: 12, OWN: 7},
]  # fmt: skip


@pytest.mark.parametrize(("preset", "quant"), [("tiny-llama", "F32"), ("tiny-qwen3", "Q4_K")])
def test_company_changes_no_bit_in_batches_of_a_shape(tiny_model, preset, quant):
    """As a server has them: whoever stands beside a sequence, it has the same logits, exactly."""
    with wb.Engine.load(
        tiny_model(preset, quant), device="embedded", n_ctx=8 * 512, n_seqs=8, n_ubatch=64,
        threads=2, toggles=serving("embedded", TogglePreset(BEST)),
    ) as engine:  # fmt: skip
        found, others = [], []
        for seed, company in enumerate(COMPANIES):
            engine.reset()
            engine.prefill(ids(PAST).tolist(), "none", sequence=OWN)
            rows = []
            for step in range(4):  # prompts, then a token of each
                work = [(s, ids(n if not step else 1, 10 * step + (s != OWN) * (100 * seed + s + 1))
                         .tolist(), "last") for s, n in company.items()]  # fmt: skip
                pending = engine.submit(work)
                assert pending.step.batch.shape[:2] == ((8, 8) if step else (48, 8))
                each = dict(zip(company, pending.each(), strict=True))
                rows.append(each[OWN])
            found.append(np.concatenate(rows).copy())
            others.append(each[0])
    assert all(np.array_equal(found[0], rows) for rows in found)
    assert not np.array_equal(others[0], others[1])  # and others are others


# shifts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "quant", "device"),
    [("tiny-llama", "F32", "embedded"), ("tiny-qwen3", "Q8_0", "embedded"),
     ("tiny-qwen2", "F32", "host")],
)  # fmt: skip
def test_a_sequence_that_moved_is_answered_as_before(tiny_model, preset, quant, device):
    """RoPE is relative: with every position 40 further on, each answer is the same but for rounding
    (of K to halves, and of larger angles). So it is where it moved back. Shifts that undo each
    other before a step are none."""
    with opened(tiny_model(preset, quant), device, n_ctx=64, n_seqs=8) as engine:
        cache = engine.cache
        wanted = engine.step([*PROMPTS[2], *NEXT[0]], "all")[-5:]
        engine.reset()
        engine.step(PROMPTS[2], "none")
        engine.step(PROMPTS[3], "none", 1)
        before = engine.step(NEXT[1], "all", 1)
        for delta, length in ((40, 57), (-40, 17)):
            cache.remove(1, len(PROMPTS[3]))
            for by in (6, -6, 0, delta):
                cache.shift(0, by)
            assert cache.length() == length
            moved, stays = engine.submit([(0, NEXT[0], "all"), (1, NEXT[1], "all")]).each()
            assert compare_logits(wanted, moved, "rounding").holds
            assert compare_logits(before, stays, "rounding", QUANTISED).holds
            cache.remove(0, length)
        n = engine.n_steps
        cache.shift(0, 3)
        cache.shift(0, -3)
        engine.step([7])
        assert engine.n_steps == n + 1


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
    engine.reset()
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


TRAINS = [
    {}, {"step_wait": "outputs"},
    *({"sync": sync, "copy_stream": stream, "host_source": source, "n_copies": n,
       "step_wait": "outputs", "graph_reuse": "set_rows"}
      for sync, stream, source, n in (
          ("per_copy", "own", "pinned", "1"), ("packed", "own", "pinned_ring_2", "4"),
          ("implicit", "compute", "pinned_ring_4", "1"), ("auto", "auto", "pinned_ring_2", "1"),
          ("event_guarded", "own", "pinned_ring_4", "4"))),
]  # fmt: skip
SHAPES = [  # as above, with steps without tokens: they turn K, and copy cells
    StepShape(8, 0, 256, 1), StepShape(9, 2, 256, 3), SHIFT := StepShape(0, 0, 256, 0),
    StepShape(3, 3, 256, 3), StepShape(3, 0, 256, 2), copy_shape(256), copy_shape(256), SHIFT,
    StepShape(1, 1, 256, 1), SHIFT, copy_shape(256), StepShape(3, 1, 256, 3),
]  # fmt: skip


@pytest.mark.parametrize("values", TRAINS, ids=lambda v: ",".join(v.values()))
def test_cells_may_go_while_a_step_is_under_way(engine, values):
    wanted = submitted(engine, waits=True)
    assert all(np.isfinite(rows).all() for rows in wanted)
    with engine.variant(Toggles(**values)) as variant:
        for _ in range(2):
            assert all(map(np.array_equal, submitted(variant, waits=False), wanted))


@pytest.mark.parametrize("values", TRAINS, ids=lambda v: ",".join(v.values()))
def test_trains_with_copies_and_shifts_do_not_race(engine, values):
    """Stores into cells that were free or were given free come behind whatever read them before, in
    stream order; a cell's K is turned, or its K and V are copied, after its store and before it is
    read."""
    with engine.variant(Toggles(**values)) as variant:
        make, buffers = variant._step_programs, dict[str, Buffer]()
        train = [make.of(shape, i % variant.period, buffers) for i, shape in enumerate(SHAPES)]
        one_order = variant.backend.capabilities.one_order
    ops = [{c.node.op for c in p.commands if isinstance(c, Launch)} for p in train]
    assert ops[2] == {"rope_shift"} and ops[5] == {"copy_cells"}
    assert not races(train * 2, one_order=one_order)
    bare = [replace(p, commands=[c for c in p.commands if not isinstance(c, Sync | Wait)])
            for p in train]  # fmt: skip
    assert races(bare * 2, one_order=one_order)  # and it would see it: nothing waits any more


def test_a_second_submit_waits_for_the_first(engine):
    """Results stay the caller's while others land."""
    wanted = [engine.step(PROMPTS[2], "all"), engine.step(PROMPTS[3], "all", 1)]
    engine.reset()
    first = engine.submit([(0, PROMPTS[2], "all")])
    assert not first.done
    second = engine.submit([(1, PROMPTS[3], "all")])
    assert first.done and not second.done
    kept = first.wait()
    assert np.array_equal(second.wait(), wanted[1]) and np.array_equal(kept, wanted[0])
    assert first.wait() is kept and second.done
    pending = [engine.submit([(s, [s + 5], "last")]) for s in range(2, 10)]
    rows = [p.wait().copy() for p in pending]
    for i in range(8):
        spoiled = engine.step([i], sequence=11)
        spoiled[:] = np.nan  # the caller's to write to
    assert all(map(np.array_equal, [p.wait() for p in pending], rows))
    assert len({row.tobytes() for row in rows}) == 8


# waits that fail ----------------------------------------------------------------------------------


NO_RESULTS = "has no results, for its wait failed or its engine was"


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
    """As with Ctrl-C in the wait: the tokens are submitted again, and nothing else is needed. A
    submit whose wait fails submits nothing."""
    work = [(0, NEXT[0], "all"), (1, NEXT[1][:1], "last")]
    engine.step(PROMPTS[2], "none")
    engine.step(PROMPTS[3], "none", 1)
    wanted = engine.submit(work).wait()
    engine.cache.remove(0, len(PROMPTS[2]))
    engine.cache.remove(1, len(PROMPTS[3]))
    before = looks(engine)
    for call in (lambda pending: pending.wait(), lambda _: engine.submit([(2, NEXT[2], "last")])):
        pending = engine.submit(work)
        interrupted(error, lambda call=call, pending=pending: call(pending))
        assert looks(engine) == before and not pending.done
        with pytest.raises(UsageError, match=NO_RESULTS):
            pending.wait()
    engine.synchronize()
    assert np.array_equal(engine.submit(work).wait(), wanted)
    with engine.variant(Toggles()) as variant:
        kept = variant.submit([(0, PROMPTS[0], "last")])
        rows, pending = kept.wait(), variant.submit([(0, NEXT[0], "last")])
    assert kept.wait() is rows  # a closed engine has no others
    with pytest.raises(UsageError, match=NO_RESULTS):
        pending.wait()


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
