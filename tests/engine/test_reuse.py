"""The engine on the CPU devices: generation, refusals, which steps reuse a program, what each layer
of reuse saves, programs that are patched."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.profiles import examples
from tests.reuse import view_addresses, views_of
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.engine import programs as programs_room
from workbench.engine.engine import OPENED
from workbench.engine.look.phases import PHASES, Phases
from workbench.engine.programs import Key
from workbench.graph.ir import I32, Input, StepShape
from workbench.model.inputs import INPUTS, MASK, POSITIONS, input_of
from workbench.model.sampler import Sampling
from workbench.program.commands import Launch
from workbench.program.first_cell import at_cell, first_cell
from workbench.trace.profile import profile

N_CTX, PAD, N_UBATCH = 128, 32, 16
TOKENS = np.random.default_rng(8).integers(0, 1024, N_CTX).tolist()
KEPT = Toggles(graph_reuse="set_rows")
MADE = ("graph", "fuse", "split", "layout", "lower", "prepare")  # phases that reuse saves


@pytest.fixture(scope="module")
def base(tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=N_CTX, n_kv_pad=PAD, n_seqs=4,
        n_ubatch=N_UBATCH, threads=2, toggles=Toggles(),
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture
def engine(base) -> Iterator[wb.Engine]:
    with base.variant(KEPT) as made:
        yield made


def test_generation_is_greedy_by_default_else_seeded(engine):
    def tokens(**kwargs):
        engine.reset()
        return engine.generate(tokens=TOKENS[:7], max_tokens=12, **kwargs).tokens

    greedy, hot = tokens(), Sampling(temperature=5.0, top_k=0, top_p=1.0)
    engine.reset()
    assert greedy[0] == int(np.argmax(engine.prefill(TOKENS[:7])[0])) and tokens() == greedy
    assert tokens(sampling=hot, seed=3) == tokens(sampling=hot, seed=3)
    assert tokens(sampling=hot, seed=3) != tokens(sampling=hot, seed=4)


def test_text_streams_in_pieces_that_make_the_whole(engine):
    pieces: list[str] = []
    made = engine.generate("The engine", max_tokens=20, on_text=pieces.append, stop_at_eos=False)
    assert "".join(pieces) == made.text
    assert len(made.tokens) == 20 and len(made.token_us) == 19


def test_growing_memory_drops_kept_programs(engine):
    """Logits of many rows need more room than was reserved; kept programs must not see it move."""
    first = engine.step([3])
    engine.reset()
    assert len(engine.prefill(TOKENS[:40], outputs="all")) == 40  # of three ubatches
    engine.reset()
    assert np.array_equal(engine.step([3]), first)


def test_an_engine_outlives_the_one_it_came_from(tiny_model):
    """A variant shares weights and nothing else."""
    path = tiny_model("tiny-llama", "F16")
    first = wb.Engine.load(path, device="embedded", n_ctx=64, toggles=Toggles())
    wanted = first.prefill(TOKENS[:7])
    second = first.variant(Toggles(sync="copy_boundary"))
    assert (first.n_past, second.n_past) == (7, 0) and first.backend is second.backend
    first.close()
    first.close()
    assert second in OPENED and first not in OPENED
    assert np.array_equal(second.prefill(TOKENS[:7]), wanted)
    second.close()
    with pytest.raises(UsageError, match="closed"):
        second.step([1])


REFUSED = [
    (lambda e: e.prefill([1, 1024]), "token id 1024 at index 1 is outside the vocabulary of 0..10"),
    (lambda e: e.prefill([-1]), "token id -1"),
    (lambda e: e.prefill([1] * 129), "do not fit the context of 128"),
    (lambda e: e.prefill([]), "empty"),
    (lambda e: e.generate("x", tokens=[1]), "either a prompt or token ids"),
    (lambda e: e.generate(3), "int is no text; give token ids as tokens="),
    (lambda e: e.generate([1, 2]), "list is no text; give token ids as tokens="),
    (lambda e: e.generate(tokens="Hello"), "tokens='Hello' is no list of ids; give a text as"),
    (lambda e: e.generate(tokens=3), "tokens=3 is no list of ids"),
    (lambda e: wb.Engine.load(None), "None is no path; give the path of a GGUF file, or 'auto'"),
    (lambda e: wb.Engine.load(e.model.path, n_contexts=4, toggles=KEPT), "'n_contexts' does not"),
    (lambda e: e.cycle(0), "a prompt of 0 tokens has no steps"),
    *((lambda e, asked=asked: e.program(*asked), r"a step has 1 to \d+ tokens|do not fit the con")
      for asked in ((0,), (17,), (1, 2), (1, 1, -1), (1, 1, 128))),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_bad_requests_change_nothing(engine, asked, says):
    engine.prefill(TOKENS[:7])
    with pytest.raises(UsageError, match=says):
        asked(engine)
    assert engine.n_past == 7


def grown(engine: wb.Engine, *names: str):
    """Calls of what this returns say how far counters have grown since the one before."""
    names, before = names or ("programs_built", "programs_reused"), engine.counters

    def grow() -> tuple[int, ...]:
        nonlocal before
        last, before = before, engine.counters
        return tuple(before[name] - last[name] for name in names)

    return grow


# which steps reuse --------------------------------------------------------------------------------


@settings(max_examples=examples(10))
@given(n_prompt=st.integers(1, 40), n=st.integers(2, 80))
def test_tokens_reuse_but_for_the_first_and_at_boundaries(base, n_prompt, n):
    with base.variant(KEPT) as engine:
        engine.prefill(TOKENS[:n_prompt])
        if n_prompt % N_UBATCH == 1 or n_prompt == 1:
            return  # the prompt ends with a step of one token
        steps = grown(engine)
        for token in TOKENS[n_prompt : n_prompt + n]:
            engine.step([token])
        ends = range(n_prompt + 1, n_prompt + n + 1)
        boundaries = sum((end - 1) % PAD == 0 for end in ends[1:])
        assert steps() == (1 + boundaries, n - 1 - boundaries)


def test_a_shift_has_a_program_and_a_reset_keeps_all(engine):
    steps = grown(engine)
    wanted = [engine.step([token]) for token in TOKENS[:4]]
    assert steps() == (1, 3)
    for built, reused in ((1, 1), (0, 2)):
        engine.cache.remove(0, 0, 1)
        engine.cache.shift(0, -1)
        engine.step([2])
        assert steps() == (built, reused)
    engine.reset()
    assert np.array_equal([engine.step([token]) for token in TOKENS[:4]], wanted)
    assert steps() == (0, 4)


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1), st.integers(0, 1)), max_size=40))
def test_no_two_shapes_or_turns_share_a_program(base, keys):
    with base.variant(KEPT) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs_room, "KEPT", 5)
        policy, known = engine.steps.programs, dict[Key, object]()  # least recently used first
        for n_tokens, n_outputs, turn in keys:
            key = Key(engine.program(n_tokens, n_outputs).shape, turn)
            found = policy.get(key)
            assert known.pop(key, found) is found and found not in known.values()
            known[key] = found
            while len(known) > 5:
                del known[next(iter(known))]
        assert policy.built + policy.reused == len(keys) and len(policy._kept) == len(known)


SHAPES = st.builds(StepShape, *[st.integers(1, 600)] * 3, n_seqs=st.integers(1, 4))


@pytest.mark.parametrize("name", INPUTS)
@given(made_for=SHAPES, asked=SHAPES)
@settings(max_examples=examples(40))
def test_an_input_serves_steps_of_its_shape_alone(name, made_for, asked):
    made = input_of(name, made_for)
    assert made.can_reuse(made_for)
    assert made.can_reuse(asked) == (made.shape == input_of(name, asked).shape)


class Silent(Input):
    """A new kind of input, which does not say whether a step can be given it again."""


class FourPositions(Input):
    """Four positions for each token, which answers as if there were one (llama.cpp #18191)."""

    def can_reuse(self, step) -> bool:
        return self.shape == (4 * step.n_tokens,)


@pytest.mark.parametrize("other", [Silent, FourPositions])
def test_an_input_that_does_not_answer_is_named(engine, monkeypatch, other):
    """And nothing is reused. It may compare with another shape, too."""
    wanted = [engine.step([token]) for token in TOKENS[:6]]
    monkeypatch.setitem(INPUTS, POSITIONS, lambda step: other(POSITIONS, I32, (step.n_tokens,)))
    with engine.variant(KEPT) as variant:
        steps = grown(variant, "programs_built", "programs_reused", "programs_refused")
        assert np.array_equal([variant.step([token]) for token in TOKENS[:6]], wanted)
        assert variant.steps.programs.refused == {POSITIONS: 5} and steps() == (6, 0, 5)


# what each layer saves ----------------------------------------------------------------------------


def test_programs_for_reserved_memory_are_no_step(engine):
    with engine.variant(KEPT) as fresh:
        assert not any(n for name, n in fresh.counters.items() if name.endswith(("_n", "_ns")))
        assert not any(row.us for row in fresh.phases())


def test_phases_are_shown_us_a_step(engine):
    engine.prefill(TOKENS[:8])
    engine.step([1])
    before = engine.counters
    for token in TOKENS[:5]:
        engine.step([token])
    table, after = engine.phases(since=before), engine.counters
    assert table.steps == 5 and [row.phase for row in table] == list(PHASES)
    for row in table:
        ns = after[f"{row.phase}_ns"] - before[f"{row.phase}_ns"]
        assert row.us == pytest.approx(ns / 5e3) and (row.us > 0) == (row.phase not in MADE)
        # inputs are made ahead, and taken
        assert row.times == {"batch": 2, **dict.fromkeys(MADE, 0)}.get(row.phase, 1)
    assert sum(row.share for row in table) == pytest.approx(1)
    with profile(engine, nvtx=False):
        for token in TOKENS[:9]:
            engine.step([token])
    mixed = {row.phase: row.us for row in engine.phases(since=before)}  # of untraced steps alone
    assert all(mixed[row.phase] == row.us for row in table if row.phase in ("issue", "wait"))
    assert engine.counters["untraced_steps"] == 7 and engine.counters["steps"] == 16


def test_a_phase_done_again_does_all_of_its_work(base):
    """It makes what it made before, from what it was given then: so it costs what it cost."""
    toggles = Toggles(graph_reuse="set_rows", fuse="on", defer_norm="on", plans="ours", redo="on")
    with base.variant(toggles) as engine:
        key = Key(engine.program().shape, 0)
        assert engine.steps.programs.get(key) is engine.steps.programs.get(key)
        phases = Phases(engine._spent)
        prepared = engine.bound.build(key, phases, 0)
        again = {name: work() for name, work in phases.again.items()}
    assert set(again) == set(MADE)
    program, made = prepared.program, again["prepare"]
    nodes = [c.node.name for c in program.singly() if isinstance(c, Launch)]
    fused = again["fuse"][0].nodes
    assert [node.name for node in fused] == nodes and len(again["graph"].nodes) > len(nodes)
    assert [node.name for part in again["split"] for node in part.nodes] == nodes
    for found, wanted in zip(again["layout"].ranges, program.layout, strict=True):
        places = [{t.name: r[1:] for t, r in ranges.items()} for ranges in (found, wanted)]
        assert places[0] == places[1]
    assert again["lower"].pattern() == program.pattern()
    assert made is not prepared and made.program is program
    keys = [{n: i.key for n, i in each.issued.items()} for each in (made, prepared)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("scope", ["split", "step"])
@pytest.mark.parametrize("name", [POSITIONS, MASK])
def test_inputs_of_another_shape_are_refused_at_once(base, name, scope):
    """Also where their bytes would fit, or be spread over the input. The engine is usable then."""
    plans = {"plans": "ours", "plan_scope": scope, "sync": "implicit", "copy_stream": "compute"}
    with base.variant(Toggles(graph_reuse="set_rows", **plans)) as engine:
        wanted = [engine.step([token]) for token in TOKENS[:6]]
        engine.reset()
        found = [engine.step([token]) for token in TOKENS[:3]]
        replayed = grown(engine, "plans_replayed")
        batch = engine.steps.batches.take([(0, [1], "last")])
        prepared = engine.steps.programs.get(Key(batch.shape, engine.issuer.turn))
        value, says = batch.values[name], rf"input {name} is \[.*\] where its program has \["
        for other in (value.reshape(-1, 1)[:1], np.repeat(value, 2, axis=0)):
            with pytest.raises(UsageError, match=says):
                prepared.run(batch.values | {name: other}, prepared.head)
        assert replayed() == (0,)
        found += [engine.step([token]) for token in TOKENS[3:6]]
        assert np.array_equal(found, wanted)


# programs that are patched ------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["embedded", "host"])
def test_a_patched_program_is_the_one_that_would_be_built(tiny_model, device):
    """Ranges, parameters and addresses: of the kept program as of one built for the cell."""
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q4_0"), device=device, n_ctx=N_CTX, n_ubatch=16, threads=1,
        toggles=Toggles(graph_reuse="patch_pointers"),
    ) as engine:  # fmt: skip
        kept = None
        for n_past in range(6):
            engine.step([7])
            ((prepared, *_),) = engine.steps.programs._kept.values()
            assert kept in (None, prepared)
            kept, built = prepared, engine.program(n_past=n_past)
            assert first_cell(prepared.program) == n_past == prepared.binding.cell
            assert views_of(prepared.program) == views_of(built) == views_of(at_cell(built, n_past))
            at = {b.name: m.address for b, m in prepared.binding.memory.items()}
            wanted = [at[name] + offset for _, (name, offset, _), _ in views_of(prepared.program)]
            assert view_addresses(prepared) == ([] if device == "host" else wanted)
        program = prepared.program
        assert prepared.program is program  # made once
        cells = [first_cell(p) for p in engine.programs(35, 2, laps=2)]  # what a checker is given
        assert cells == [0, 16, 32, 35, 36] * 2
        prepared.store_at(40)
        assert first_cell(prepared.program) == 40 and first_cell(program) == 5


@pytest.mark.parametrize("way", ["patch_pointers", "pointer_table"])
def test_no_cells_in_a_row_is_refused_and_it_goes_on(base, way):
    with base.variant(Toggles(graph_reuse=way)) as variant:
        variant.prefill(TOKENS)
        variant.cache.remove(0, 5, 8)
        variant.cache.remove(0, 20, 22)
        for call in (variant.step, variant.prefill):
            with pytest.raises(UsageError, match=r"no 4 free cells in a row.* 5 free.* are 3;"):
                call([1, 2, 3, 4])
        assert variant.n_past == N_CTX - 5
        variant.step([1, 2, 3])
        variant.step([4])  # the inputs made ahead are for cells that are there
        variant.submit([(1, [5], "last")]).wait()
        with pytest.raises(UsageError, match="do not fit the context"):
            variant.step([1])
        variant.reset()
        assert variant.step([1, 2, 3, 4]).shape == (1, variant.model.n_vocab)
