"""Several sequences of one engine: what each is answered, together and alone, and what becomes of
cells that are copied, removed and shifted.

On the devices of a CPU a token's answer does not depend on what stands beside it in a step, so a
mixed batch is exact: bit-equal to steps of its own with the same cells. Where the sequence has
other cells than alone, attention adds the same terms in another order: rounding.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import numpy as np
import pytest

import workbench as wb
from tests.clashes import clashing
from tests.orderings import PLACED
from tests.profiles import share
from workbench.backend.issue.prepared import Prepared
from workbench.benchmarks.compare.answers import compare_logits
from workbench.common.errors import DeviceError, UsageError
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.graph.ir import StepShape
from workbench.model.inputs import DELTAS
from workbench.program.check.hazards import races
from workbench.program.commands import Buffer, Launch, Sync, Wait
from workbench.trace.profile import profile

RNG = np.random.default_rng(16)
PROMPTS = [RNG.integers(3, 900, n).tolist() for n in (5, 1, 17, 9)]
NEXT = RNG.integers(3, 900, (4, 5)).tolist()  # by sequence
# NMSE. Measured: 1e-11 at most without 8-bit activations; with them 1e-13 mostly, and 2e-5 where
# one of them rounds the other way.
ROUNDING, QUANTISED = 1e-9, 2e-4


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[Engine]:
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(
        path, device="embedded", n_ctx=256, n_seqs=64, n_ubatch=32, threads=2, toggles=Toggles()
    ) as made:
        yield made


@pytest.fixture(scope="module")
def of_few(tiny_model) -> Iterator[Engine]:
    """For few sequences, so that each may have a region of its own that its tokens fit in."""
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(
        path, device="embedded", n_ctx=256, n_seqs=8, n_ubatch=32, threads=2, toggles=Toggles()
    ) as made:
        yield made


@pytest.fixture(autouse=True)
def fresh(request):
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").reset()


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


def equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


# together and alone -------------------------------------------------------------------------------

MODELS = [
    ("tiny-llama", "F32"), ("tiny-llama", "Q4_0"), ("tiny-llama-bias", "Q8_0"),
    ("tiny-qwen2", "F32"), ("tiny-qwen3", "BF16"), ("tiny-qwen3", "Q4_K"),
]  # fmt: skip


@pytest.mark.parametrize("device", ["embedded", "host"])
@pytest.mark.parametrize(("preset", "quant"), MODELS)
def test_each_sequence_is_answered_as_alone(tiny_model, preset, quant, device):
    with wb.Engine.load(
        tiny_model(preset, quant), device=device, n_ctx=256, n_seqs=64, n_ubatch=32, threads=2,
        toggles=Toggles(graph_reuse="set_rows"),
    ) as engine:  # fmt: skip
        allowed = QUANTISED if quant.startswith("Q") else ROUNDING
        wanted = alone(engine)
        assert len({int(i) for rows in wanted for i in rows.argmax(axis=1)}) > 10
        mixed = together(engine)
        engine.reset()
        assert equal(mixed, one_by_one(engine))
        for turn in range(4):
            engine.reset()
            for ours, theirs in zip(together(engine, turn), wanted, strict=True):
                assert compare_logits(theirs, ours, "rounding", allowed).holds


TOGGLES = [
    {name: value} for name in Toggles.names() for value in Toggles.values(name)
    if value != getattr(Toggles(), name)
    and (name, value) not in [("pdl", "on"), ("launch_ahead", "on"), ("plan_end", "word")]
] + [
    {"launch_ahead": "on", "plan_end": end, "plans": "ours", "plan_scope": "step",
     "sync": "packed_implicit", "graph_reuse": "set_rows"}
    for end in Toggles.values("plan_end")
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
    "values",
    share([*TOGGLES, *TRAINS], every=3),
    ids=lambda v: ",".join(f"{n}={w}" for n, w in v.items()),
)
def test_every_toggle_answers_the_same(engine, of_few, values):
    wanted = together(engine)
    if values.get("attn_kernel") == "mma":
        with pytest.raises(DeviceError, match="wants the matrix units of a GPU"):
            engine.variant(Toggles(**values))
        return
    if values.get("kv_cache") == "per_sequence":
        with (
            engine.variant(Toggles(**values)) as variant,
            pytest.raises(UsageError, match="do not fit the context of 4"),
        ):
            together(variant)
        engine = of_few
    if values.get("results") == "behind":
        with pytest.raises(UsageError, match="results=behind race"):
            engine.variant(Toggles(sync="implicit", copy_stream="compute", **values))
    if values == {"sync": "implicit"}:
        values = values | {"copy_stream": "compute"}
    if clashing({}, values):
        values = values | {"graph_reuse": "set_rows"}
    toggles = Toggles(**values)
    kind = max(map(Toggles.answer_class, values))  # rounding where one of them is
    with engine.variant(toggles) as variant:
        for ours, theirs in zip(together(variant), wanted, strict=True):
            answer = compare_logits(theirs, ours, kind)
            assert answer.holds, (toggles, str(answer))


def test_programmatic_launches_are_refused_as_before(engine):
    with pytest.raises(DeviceError, match="cannot honour pdl=on"):
        engine.variant(Toggles(pdl="on"))


@pytest.mark.parametrize("reuse", Toggles.values("graph_reuse"))
def test_the_number_of_sequences_is_part_of_the_shape(engine, reuse):
    with engine.variant(Toggles(graph_reuse=reuse)) as variant:
        made = [variant.submit(work) for work in (
            [(0, [1, 2, 3], "last")], [(1, [1, 2], "last"), (2, [3], "none")],
            [(0, [4], "last"), (1, [5], "none"), (2, [6], "none")],
        )]  # fmt: skip
        assert [p.step.batch.shape.n_seqs for p in made] == [1, 2, 3]
        assert variant.counters["programs_built"] == 3
        made[-1].wait()


# copy, remove, keep -------------------------------------------------------------------------------


def close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return compare_logits(theirs, ours, "rounding", QUANTISED).holds


def test_a_copied_prefix_is_shared_and_then_each_goes_on(engine):
    prefix, one, other = PROMPTS[2], NEXT[0], NEXT[1]
    wanted = []
    for tail in (one, other):
        engine.reset()
        engine.step(prefix, "none")
        wanted.append(engine.step(tail, "all"))
    engine.reset()
    engine.step(prefix, "none")
    engine.cache.copy(0, 5)
    assert engine.n_past == len(prefix) and engine.cache.owners(3) == {0, 5}
    first, second = engine.submit([(0, one, "all"), (5, other, "all")]).each()
    assert np.array_equal(first, wanted[0]) and close(second, wanted[1])
    # what is removed from one is the other's still; the copy of a part is a part
    engine.cache.remove(0)
    engine.cache.copy(5, 1, 0, len(prefix))
    assert engine.cache.owners(3) == {1, 5}
    assert close(engine.step(one, "all", 1), wanted[0])


def test_cells_are_removed_at_the_tail_and_used_again(engine):
    wanted = engine.step([*PROMPTS[2], *NEXT[0]], "all")[-5:]
    engine.reset()
    engine.step([*PROMPTS[2], *NEXT[1], *NEXT[2]], "none")
    engine.cache.remove(0, len(PROMPTS[2]))
    assert engine.cache.length() == len(PROMPTS[2])
    assert np.array_equal(engine.step(NEXT[0], "all"), wanted)
    assert engine.n_past == len(PROMPTS[2]) + 5


def test_cells_in_the_middle_leave_holes_that_are_filled(engine):
    """A token that does not see removed ones is what it is with a mask that hides them."""
    engine.step(PROMPTS[2], "none")
    engine.step(PROMPTS[3], "none", 1)
    engine.cache.remove(0, 4, 9)
    batch = engine.steps.batches.take([(0, NEXT[0], "all"), (1, NEXT[1][:2], "all")])
    assert batch.cells.tolist() == [4, 5, 6, 7, 8, 26, 27]
    assert batch.positions.tolist() == [17, 18, 19, 20, 21, 9, 10]
    without, beside = engine.submit([(0, NEXT[0], "all"), (1, NEXT[1][:2], "all")]).each()
    engine.reset()
    engine.step(PROMPTS[3], "none", 1)
    assert close(beside, engine.step(NEXT[1][:2], "all", 1))
    engine.reset()
    whole = engine.step([*PROMPTS[2], *NEXT[0]], "all")[-5:]
    assert not close(without, whole)  # it misses them


def test_removing_all_is_a_new_beginning_and_keep_removes_the_others(engine):
    wanted = engine.step(PROMPTS[0], "all")
    engine.step(PROMPTS[1], "none", 7)
    engine.step(PROMPTS[2], "none", 3)
    engine.cache.keep(3)
    assert (engine.cache.length(0), engine.cache.length(7), engine.n_past) == (0, 0, 17)
    engine.cache.remove(3)
    assert engine.n_past == 0
    assert np.array_equal(engine.step(PROMPTS[0], "all"), wanted)


def test_generate_and_prefill_are_a_sequence_of_several(engine):
    wanted = engine.generate(tokens=PROMPTS[2], max_tokens=6).tokens
    engine.reset()
    engine.prefill(PROMPTS[3] * 4, sequence=9)
    assert engine.generate(tokens=PROMPTS[2], max_tokens=6).tokens == wanted
    with pytest.raises(UsageError, match="sequence 64 does not exist"):
        engine.prefill([1], sequence=64)


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


def test_a_shift_there_and_back_is_no_shift(engine):
    wanted = engine.step([*PROMPTS[2], *NEXT[0]], "all")[-5:]
    engine.reset()
    engine.step(PROMPTS[2], "none")
    before = stored_k(engine)
    for delta in (6, -6):
        engine.cache.shift(0, delta)
        engine.step([5], "none", 1)  # rotates
        engine.cache.remove(1)
    after = stored_k(engine)[: len(PROMPTS[2])]
    assert np.abs(after - before[: len(after)]).max() < 4e-3 * np.abs(before).max()
    assert compare_logits(wanted, engine.step(NEXT[0], "all"), "rounding").holds


def test_shifts_that_undo_each_other_before_a_step_are_none(engine):
    wanted = engine.step([*PROMPTS[2], *NEXT[0]], "all")[-5:]
    engine.reset()
    engine.step(PROMPTS[2], "none")
    engine.cache.shift(0, 6)
    engine.cache.shift(0, -6)
    engine.cache.shift(0, 0)
    n = engine.n_steps
    assert np.array_equal(engine.step(NEXT[0], "all"), wanted) and engine.n_steps == n + 1


@pytest.mark.parametrize(("preset", "quant"), [("tiny-llama", "F32"), ("tiny-qwen3", "Q8_0"),
                                               ("tiny-qwen2", "F32")])  # fmt: skip
@pytest.mark.parametrize("device", ["embedded", "host"])
def test_a_whole_sequence_that_moved_is_answered_as_before(tiny_model, preset, quant, device):
    """RoPE is relative: with every position 40 further on, each answer is the same but for rounding
    (of K to halves, and of larger angles)."""
    with wb.Engine.load(
        tiny_model(preset, quant), device=device, n_ctx=64, n_seqs=8, threads=2, toggles=Toggles()
    ) as engine:
        wanted = engine.step([*PROMPTS[2], *NEXT[0]], "all")[-5:]
        engine.reset()
        engine.step(PROMPTS[2], "none")
        engine.step(PROMPTS[3], "none", 1)
        before = engine.step(NEXT[1], "all", 1)
        engine.cache.remove(1, len(PROMPTS[3]))
        engine.cache.shift(0, 40)
        assert engine.cache.length() == 57
        moved, stays = engine.submit([(0, NEXT[0], "all"), (1, NEXT[1], "all")]).each()
        assert compare_logits(wanted, moved, "rounding").holds
        assert close(stays, before)


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


@pytest.mark.parametrize("values", [{}, {"step_wait": "outputs"}, *TRAINS],
                         ids=lambda v: ",".join(v.values()))  # fmt: skip
def test_cells_may_go_while_a_step_is_under_way(engine, values):
    wanted = submitted(engine, waits=True)
    assert all(np.isfinite(rows).all() for rows in wanted)
    with engine.variant(Toggles(**values)) as variant:
        for _ in range(3):
            variant.reset()
            for ours, theirs in zip(submitted(variant, waits=False), wanted, strict=True):
                assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("values", [{}, {"step_wait": "outputs"}, *TRAINS],
                         ids=lambda v: ",".join(v.values()))  # fmt: skip
def test_the_checker_proves_such_a_train(engine, values):
    """Stores into cells that were free or were given free come behind whatever read them before,
    in stream order; a cell's K is rotated behind its store and before it is read."""
    shapes = [
        StepShape(8, 0, 256, 1), StepShape(9, 2, 256, 3), StepShape(0, 0, 256, 0),
        StepShape(3, 3, 256, 3), StepShape(3, 0, 256, 2), StepShape(0, 0, 256, 0),
        StepShape(1, 1, 256, 1), StepShape(3, 1, 256, 3),
    ]  # fmt: skip
    with engine.variant(Toggles(**values)) as variant:
        make, buffers = variant._step_programs, dict[str, Buffer]()
        train = [make.of(shape, i % variant.period, buffers) for i, shape in enumerate(shapes)]
        assert [c.node.op for c in train[2].commands if isinstance(c, Launch)] == ["rope_shift"] * 2
        assert not list(races(train * 2, one_order=variant.backend.capabilities.one_order))
        # and it would see it: nothing waits any more
        bare = [copy.copy(program) for program in train]
        for program in bare:
            program.commands = [c for c in program.commands if not isinstance(c, Sync | Wait)]
        assert list(races(bare * 2))


@pytest.mark.parametrize("placed", PLACED)
def test_wherever_layers_are(engine, tiny_model, placed):
    """On two devices, or partly on the host: the cache of each layer turns where it is."""
    wanted = submitted(engine, waits=True)
    toggles = Toggles(step_wait="outputs", graph_reuse="set_rows")
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=256, n_seqs=64, n_ubatch=32,
        threads=2, toggles=toggles, **PLACED[placed],
    ) as other:  # fmt: skip
        for ours, theirs in zip(submitted(other, waits=False), wanted, strict=True):
            assert np.array_equal(ours, theirs)


def test_who_looks_on_changes_nothing(engine):
    """Traced, a rotation is a step without tokens; stamped, it is a step like any other."""
    wanted = submitted(engine, waits=True)
    engine.reset()
    with profile(engine) as traced:
        seen = submitted(engine, waits=False)
    assert all(map(np.array_equal, seen, wanted))
    steps = [span.args for span in traced.recorder.spans if span.category == "step"]
    assert [args["n_tokens"] for args in steps].count(0) == 2
    assert steps[0]["n_tokens"] == len(PROMPTS[2]) + len(PROMPTS[3])
    engine.reset()
    n_steps = engine.n_steps
    with engine.stamped() as stamps:
        stamped = submitted(engine, waits=False)
    assert all(map(np.array_equal, stamped, wanted))
    assert len(stamps) == engine.n_steps - n_steps
    assert all(begin <= end for begin, end in stamps)


def test_a_second_submit_waits_for_the_first_and_both_are_right(engine):
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
    held = [p.wait() for p in pending]
    for i in range(8):
        engine.step([i], sequence=9)
    assert equal(held, kept) and len({rows.tobytes() for rows in kept}) == 8


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
def test_a_wait_that_fails_gives_the_cells_back(engine, monkeypatch, error):
    """As with Ctrl-C in the wait: the tokens are submitted again, and nothing else is needed."""
    engine.step(PROMPTS[2], "none")
    engine.step(PROMPTS[3], "none", 1)
    wanted = engine.submit([(0, NEXT[0], "all"), (1, NEXT[1][:1], "last")]).wait()
    engine.cache.remove(0, len(PROMPTS[2]))
    engine.cache.remove(1, len(PROMPTS[3]))
    before = table(engine)
    pending = engine.submit([(0, NEXT[0], "all"), (1, NEXT[1][:1], "last")])

    def fails(self, watch):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Prepared, "finish", fails)
        with pytest.raises(error):
            pending.wait()
    assert table(engine) == before and not pending.done
    with pytest.raises(UsageError, match="has no results, for its wait failed or its engine was"):
        pending.wait()
    engine.synchronize()
    again = engine.submit([(0, NEXT[0], "all"), (1, NEXT[1][:1], "last")])
    assert np.array_equal(again.wait(), wanted)


def test_a_closed_engine_has_no_results_to_wait_for(engine):
    with engine.variant(Toggles()) as variant:
        kept = variant.submit([(0, PROMPTS[0], "last")])
        rows = kept.wait()
        pending = variant.submit([(0, NEXT[0], "last")])
    assert kept.wait() is rows
    with pytest.raises(UsageError, match="has no results, for its wait failed or its engine was"):
        pending.wait()


def test_a_submit_whose_wait_for_the_first_fails_submits_nothing(engine, monkeypatch):
    engine.step(PROMPTS[2], "none")
    before = table(engine)
    engine.submit([(0, NEXT[0], "last")])
    with monkeypatch.context() as patched:
        patched.setattr(Prepared, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.submit([(1, NEXT[1], "last")])
    assert table(engine) == before
    engine.synchronize()
    assert engine.step(NEXT[1], "all", 1).shape[0] == 5


def test_what_was_done_to_a_step_s_cells_before_its_wait_failed(engine, monkeypatch):
    engine.step(PROMPTS[2], "none")
    pending = engine.submit([(0, NEXT[0], "last"), (1, NEXT[1], "last")])
    engine.cache.copy(0, 2)
    engine.cache.remove(1, 3)
    engine.cache.shift(1, 4)
    monkeypatch.setattr(Prepared, "finish", lambda *_: (_ for _ in ()).throw(Broken))
    with pytest.raises(Broken):
        pending.wait()
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


# bad input ----------------------------------------------------------------------------------------


def table(engine: Engine) -> bytes:
    """Who owns which cell at which position, and what a step would see of it."""
    cache = engine.cache
    rows = max((s + 1 for s in range(cache.n_seqs) if cache.length(s)), default=0)
    arrays = [cache._positions[:rows], cache._masks[:rows], cache._next[:rows]]
    arrays += [cache.free.n_owners, cache.free.ends]
    moved = None if cache.moved is None else cache.moved.tolist()
    return pickle.dumps(([a.tolist() for a in arrays], moved, cache.n_used))


REFUSED = {
    "a sequence that does not exist": (
        lambda e: e.submit([(0, [1], "last"), (64, [1], "last")]),
        "sequence 64 does not exist; this engine has 0 to 63 (n_seqs=64); load it with n_seqs=65 "
        "or more",
    ),
    "a sequence given twice": (
        lambda e: e.submit([(1, [1], "last"), (1, [2], "last")]),
        "sequence 1 is given twice in one step; give it once",
    ),
    "more tokens than a step takes": (
        lambda e: e.submit([(0, [1] * 30, "last"), (1, [1] * 3, "last")]),
        "a step takes 1 to 32 tokens, not 33; use prefill, or n_ubatch",
    ),
    "more tokens than the cache holds": (
        lambda e: e.submit([(s, [1] * 7, "last") for s in range(4)]),
        "230 + 28 tokens do not fit the context of 256; use a longer context (--n-ctx) or fewer "
        "tokens",
    ),
    "no tokens": (
        lambda e: e.submit([(0, [1], "last"), (3, [], "last")]),
        "sequence 3 has no tokens in a step; give at least one, or leave the sequence out",
    ),
    "no work": (
        lambda e: e.submit([]), "a step takes 1 to 32 tokens, not 0; use prefill, or n_ubatch"
    ),
    "a token that is none": (
        lambda e: e.submit([(0, [1], "last"), (1, [9999], "last")]),
        "token id 9999 at index 1 is outside the vocabulary of 0..1023; use ids of this model's "
        "tokenizer",
    ),
    "a copy into cells in use": (
        lambda e: e.cache.copy(1, 0),
        "sequence 0 has a cell at position 0 already; remove its cells before copying sequence 1 "
        "into it",
    ),
    "a shift into cells in use": (
        lambda e: e.cache.shift(1, -3, 5),
        "a shift by -3 would move a cell of sequence 1 to position 2, which another of its cells "
        "has; remove that one first",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_one_line_and_changes_nothing(tiny_model, what):
    call, wanted = REFUSED[what]
    toggles = Toggles(graph_reuse="set_rows")
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=256, n_seqs=64, n_ubatch=32,
        threads=2, toggles=toggles,
    ) as engine:  # fmt: skip
        engine.prefill([1, 2, 3] * 70, "none")
        engine.step(PROMPTS[2], "none", 1)
        engine.step([5] * 3, "none", 2)
        engine.cache.shift(2, 4)  # and K has yet to be turned
        before, n_steps, built = table(engine), engine.n_steps, engine.counters["programs_built"]
        with pytest.raises(UsageError) as error:
            call(engine)
        assert str(error.value) == wanted
        assert table(engine) == before and engine.n_steps == n_steps
        assert engine.counters["programs_built"] == built
        assert engine.step([3], sequence=2).shape == (1, 1024)
