"""Several sequences of one engine: in any batch each has the logits that it has alone, as the class
of its toggles says. And their cells: copied, removed and shifted, also while a step is under way,
and what becomes of them where a wait fails.

On the devices of a CPU a row of a product does not depend on the rows beside it. So with cells of
its own, in one part, a sequence has alone what it has in a batch, to the bit. In a unified cache it
has other cells than alone, and where cells are dealt out, n_kv says into how many shares: then
attention adds the same terms in another order, which rounds. With the very same cells, a step for
each entry of the batch, it is exact again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.cache.test_cache_table import looks
from tests.profiles import examples, long
from tests.served import ids
from workbench.backend.issue.prepared import Prepared
from workbench.benchmarks.compare.answers import compare_logits
from workbench.common.errors import DeviceError, UsageError
from workbench.config import BEST, TogglePreset, Toggles
from workbench.engine.engine import Engine
from workbench.engine.slots.draws import FED
from workbench.graph.ir import StepShape
from workbench.model.cache_graphs import copy_shape
from workbench.model.inputs import DELTAS
from workbench.program.check.hazards import races
from workbench.program.commands import Buffer, Launch, Sync, Wait
from workbench.server.serving import serving


def opened(path, device: str = "embedded", **more) -> Engine:
    sizes = {"n_ctx": 256, "n_seqs": 64, "n_ubatch": 32, "threads": 2, "toggles": Toggles()} | more
    return Engine.load(path, device=device, **sizes)


# batches ------------------------------------------------------------------------------------------

N_SEQS, N_UBATCH, MOST = 6, 24, 60  # MOST: tokens of a sequence
TEXTS = np.random.default_rng(18).integers(3, 900, (N_SEQS, MOST)).tolist()
# NMSE against the sequence alone, by the types of weights and cache: of sums in another order, of
# values of the cache that round the other way, and of 8-bit activations that do (one gives 2e-5)
TOLERANCE = {("F32", "f32"): 1e-11, ("F32", "f16"): 1e-6, ("Q8_0", "f16"): 2e-4}
NAMES = ("kv_cache", "batch_sizes", "kv_parts", "skip_masked_kv", "results")
EVERY = [*itertools.product(*(Toggles.values(name) for name in NAMES))]
PLAIN = ("per_sequence", "exact", "off", "off", "copy")
BEHIND = {"sync": "packed_implicit", "copy_stream": "compute", "host_source": "pinned_ring_2"}

Entry = tuple[int, int, str]  # sequence, tokens, outputs
Room = Callable[..., Engine]


QUICK = [("embedded", "Q8_0", "f16"), ("host", "F32", "f32")]
WAYS = [(device, *of) for device in ("embedded", "host") for of in TOLERANCE]


@pytest.fixture(
    scope="module", params=[way if way in QUICK else long(way) for way in WAYS], ids="-".join
)
def room(request, tiny_model) -> Iterator[tuple[Room, str, float]]:
    """An empty engine of these toggles; the device; and the tolerance."""
    device, quant, cache = request.param
    variants: dict[str, Engine] = {}
    sizes = {"n_ctx": N_SEQS * 64, "n_seqs": N_SEQS, "n_kv_pad": 32, "n_ubatch": N_UBATCH}
    types = {"cache_type_k": cache, "cache_type_v": cache}
    with opened(tiny_model("tiny-llama", quant), device, **sizes, **types) as first:

        def get(*values: str, **more: str) -> Engine:
            more |= dict(zip(NAMES, values, strict=True))
            more |= BEHIND if more["results"] == "behind" else {}
            toggles = Toggles(graph_reuse="set_rows", skip_gate="always", **more)
            if str(toggles) not in variants:
                variants[str(toggles)] = first.variant(toggles)
            variants[str(toggles)].reset()
            return variants[str(toggles)]

        yield get, device, TOLERANCE[quant, cache]
        for variant in variants.values():
            variant.close()


@st.composite
def batches(draw: st.DrawFn) -> list[list[Entry]]:
    """Steps of several sequences that fit n_ubatch and the context: prompts, parts of prompts and
    single tokens, mixed; or a token of each."""
    left, found = [MOST] * N_SEQS, []
    for _ in range(draw(st.integers(1, 5))):
        some = draw(st.permutations(range(N_SEQS)))[: draw(st.integers(1, N_SEQS))]
        singly, room, step = draw(st.booleans()), N_UBATCH, []
        for sequence in some:
            if most := min(1 if singly else 12, room, left[sequence]):
                n = draw(st.integers(1, most))
                step.append((sequence, n, draw(st.sampled_from(["last", "all", "none"]))))
                room, left[sequence] = room - n, left[sequence] - n
        found.append(step)
    return found


def together(engine: Engine, steps: list[list[Entry]]) -> dict[int, np.ndarray]:
    """Logits of each sequence, whose entries take its text in turn. Each step is submitted before
    anybody waits for the one before."""
    texts, pending = [iter(text) for text in TEXTS], []
    for step in steps:
        work = [(s, [*itertools.islice(texts[s], n)], outputs) for s, n, outputs in step]
        pending.append((step, engine.submit(work)))
    found: dict[int, list[np.ndarray]] = {}
    for step, submitted in pending:
        for (sequence, *_), rows in zip(step, submitted.each(), strict=True):
            found.setdefault(sequence, []).append(rows)
    return {sequence: np.concatenate(rows) for sequence, rows in found.items()}


@given(st.sampled_from(EVERY), batches())
@settings(max_examples=examples(150))
def test_each_sequence_is_answered_as_alone(room, values, steps):
    get, device, tolerance = room
    if device == "host" and values[-1] == "behind":
        with pytest.raises(DeviceError, match="cannot honour results=behind"):
            get(*values)
        values = *values[:-1], "copy"
    kv_cache, _, kv_parts, *_ = values
    found = together(get(*values), steps)
    assert {*found} == {sequence for step in steps for sequence, *_ in step}
    for sequence, rows in found.items():
        own = [[entry] for step in steps for entry in step if entry[0] == sequence]
        wanted = together(get(*values), own)[sequence]
        assert rows.shape == wanted.shape
        if kv_cache == "per_sequence" and kv_parts == "off":
            assert np.array_equal(rows, wanted), sequence
        elif len(rows):
            answer = compare_logits(wanted, rows, "rounding", tolerance)
            assert answer.holds, (sequence, str(answer))
    if kv_parts == "off":  # each token has the cell that it has together
        singly = together(get(*values), [[entry] for step in steps for entry in step])
        assert all(np.array_equal(found[sequence], rows) for sequence, rows in singly.items())


@given(st.lists(st.integers(1, 4), min_size=1, max_size=N_SEQS), st.integers(1, 5))
@settings(max_examples=examples(40))
def test_tokens_that_the_device_draws_are_those_of_the_logits(room, lengths, n):
    """Greedily, of prompts of these lengths, n tokens each, which the device goes on with."""
    get, device, _ = room
    if device == "host":  # which refuses
        return
    drawing, drawn = get(*PLAIN, sampling="device"), []
    work = [(s, TEXTS[s][:length], "last") for s, length in enumerate(lengths)]
    for _ in range(n):
        drawn.append(drawing.submit(work, True).wait()[:, 0])
        work = [(s, [FED], "last") for s in range(len(lengths))]
    host = get(*PLAIN)
    for s, length in enumerate(lengths):
        text = TEXTS[s][:length]
        for row in drawn:
            text = [int(host.step(text, "last", s).argmax())]
            assert text == [row[s]]


OWN, PAST = 2, 288  # the sequence looked at, and its cells before: it looks at 512, in parts
COMPANIES = [  # of each sequence its tokens, in order: 33 to 48 of 5 to 7 are padded to 48 of 8
    {0: 3, 1: 9, OWN: 7, 3: 1, 4: 5, 5: 11, 6: 4}, {0: 6, 1: 2, OWN: 7, 3: 8, 4: 1, 5: 10, 6: 3},
    {0: 12, 1: 5, OWN: 7, 3: 8, 6: 2}, {5: 4, 7: 9, 0: 1, 3: 12, OWN: 7},
]  # fmt: skip


@pytest.mark.parametrize(("preset", "quant"), [("tiny-llama", "F32"), ("tiny-qwen3", "Q4_K")])
def test_company_changes_no_bit_in_batches_of_a_shape(tiny_model, preset, quant):
    """As a server has them: whoever stands beside a sequence, it has the same logits, exactly."""
    sizes = {"n_ctx": 8 * 512, "n_seqs": 8, "n_ubatch": 64}
    toggles = serving("embedded", TogglePreset(BEST))
    with opened(tiny_model(preset, quant), toggles=toggles, **sizes) as engine:
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

RNG = np.random.default_rng(16)
PROMPTS = [RNG.integers(3, 900, n).tolist() for n in (5, 1, 17, 9)]
NEXT = RNG.integers(3, 900, (4, 5)).tolist()  # by sequence
QUANTISED = 2e-4  # NMSE. Measured: 2e-5 where an 8-bit activation rounds the other way


@pytest.fixture(scope="module")
def loaded(tiny_model) -> Iterator[Engine]:
    with opened(tiny_model("tiny-llama", "Q8_0")) as made:
        yield made


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
        engine.step([i], sequence=11)[:] = np.nan  # the caller's to write to
    assert all(map(np.array_equal, [p.wait() for p in pending], rows))
    assert len({row.tobytes() for row in rows}) == 8


# waits that fail ----------------------------------------------------------------------------------


NO_RESULTS = "has no results, for its wait failed or its engine was"


def interrupted(error, call) -> None:
    """The wait of a step fails in this call."""

    def fails(self, watch):
        raise error

    with pytest.MonkeyPatch.context() as patched, pytest.raises(error):
        patched.setattr(Prepared, "finish", fails)
        call()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_wait_that_fails_gives_the_cells_back(engine, error):
    """As with Ctrl-C in the wait: the tokens are submitted again, and nothing else is needed. A
    submit whose wait fails submits nothing."""
    work = [(0, NEXT[0], "all"), (1, NEXT[1][:1], "last")]
    engine.step(PROMPTS[2], "none")
    engine.step(PROMPTS[3], "none", 1)
    wanted = engine.submit(work).wait()
    engine.cache.remove(0, len(PROMPTS[2]))
    engine.cache.remove(1, len(PROMPTS[3]))
    before = looks(engine.cache)
    for call in (lambda pending: pending.wait(), lambda _: engine.submit([(2, NEXT[2], "last")])):
        pending = engine.submit(work)
        interrupted(error, lambda call=call, pending=pending: call(pending))
        assert looks(engine.cache) == before and not pending.done
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


def test_cells_that_went_before_a_wait_failed_stay_gone(engine):
    engine.step(PROMPTS[2], "none")
    pending = engine.submit([(0, NEXT[0], "last"), (1, NEXT[1], "last")])
    engine.cache.copy(0, 2)
    engine.cache.remove(1, 3)
    engine.cache.shift(1, 4)
    interrupted(RuntimeError, pending.wait)
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
