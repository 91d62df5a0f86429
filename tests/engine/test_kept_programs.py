"""Which steps reuse a program, what each layer of reuse saves, and how far attention looks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.profiles import examples
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.engine.look.phases import PHASES, Phases
from workbench.engine.programs import Key
from workbench.graph.ir import I32, Input
from workbench.model.inputs import INPUTS, MASK, POSITIONS
from workbench.program.commands import Launch, Program, Range
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


class Steps:
    """The programs that steps of an engine build and reuse, since the last look."""

    def __init__(self, engine: wb.Engine):
        self._engine, self._before = engine, engine.counters

    def __call__(self) -> tuple[int, int]:
        before, self._before = self._before, self._engine.counters
        names = ("programs_built", "programs_reused")
        built, reused = (self._before[name] - before[name] for name in names)
        return built, reused


# which steps reuse --------------------------------------------------------------------------------


@settings(max_examples=examples(10))
@given(n_prompt=st.integers(1, 40), n=st.integers(2, 80))
def test_tokens_reuse_but_for_the_first_and_those_behind_a_boundary(base, n_prompt, n):
    with base.variant(KEPT) as engine:
        engine.prefill(TOKENS[:n_prompt])
        if n_prompt % N_UBATCH == 1 or n_prompt == 1:
            return  # the prompt ends with a step of one token
        steps = Steps(engine)
        for token in TOKENS[n_prompt : n_prompt + n]:
            engine.step([token])
        ends = range(n_prompt + 1, n_prompt + n + 1)
        boundaries = sum((end - 1) % PAD == 0 for end in ends[1:])
        assert steps() == (1 + boundaries, n - 1 - boundaries)


def test_a_shift_is_a_step_of_its_own_shape(engine):
    engine.prefill(TOKENS[:5])
    engine.step([1])
    steps = Steps(engine)
    engine.cache.remove(0, 0, 1)
    engine.cache.shift(0, -1)
    engine.step([2])
    assert steps() == (1, 1), "the shift is built, the step is not"
    engine.cache.remove(0, 0, 1)
    engine.cache.shift(0, -1)
    engine.step([3])
    assert steps() == (0, 2)


def test_a_reset_keeps_programs(engine):
    wanted = [engine.step([token]) for token in TOKENS[:4]]
    engine.reset()
    steps = Steps(engine)
    found = [engine.step([token]) for token in TOKENS[:4]]
    assert steps() == (0, 4) and np.array_equal(found, wanted)


class Silent(Input):
    """A new kind of input, which does not say whether a step can be given it again."""


def test_with_an_input_that_does_not_answer_nothing_is_reused_and_it_is_named(engine, monkeypatch):
    wanted = [engine.step([token]) for token in TOKENS[:6]]
    monkeypatch.setitem(INPUTS, POSITIONS, lambda step: Silent(POSITIONS, I32, (step.n_tokens,)))
    with engine.variant(KEPT) as variant:
        found = [variant.step([token]) for token in TOKENS[:6]]
        counters = variant.counters
        assert variant.steps.programs.refused == {POSITIONS: 5}
    assert np.array_equal(found, wanted)
    assert (counters["programs_built"], counters["programs_reused"]) == (6, 0)
    assert counters["programs_refused"] == 5


# what each layer saves ----------------------------------------------------------------------------


def test_the_same_program_is_issued_though_everything_is_done_again(base):
    with base.variant(KEPT.switched("redo", "on")) as engine:
        engine.step([1])
        key = Key(engine.program().shape, engine.turn)
        first = engine.steps.programs.get(key)
        assert engine.steps.programs.get(key) is first


def test_phases_are_shown_us_a_step(engine):
    engine.prefill(TOKENS[:8])
    engine.step([1])
    before = engine.counters
    for token in TOKENS[:5]:
        engine.step([token])
    table = engine.phases(since=before)
    after = engine.counters
    assert table.steps == 5 and [row.phase for row in table] == list(PHASES)
    for row in table:
        ns = after[f"{row.phase}_ns"] - before[f"{row.phase}_ns"]
        assert row.us == pytest.approx(ns / 5e3)
        # inputs are made ahead, and taken
        assert row.times == {"batch": 2, **dict.fromkeys(MADE, 0)}.get(row.phase, 1)
        assert (row.us > 0) == (row.phase not in MADE)
    assert sum(row.share for row in table) == pytest.approx(1)
    shown, page = repr(table).splitlines(), table._repr_html_()
    assert len(shown) == 1 + len(PHASES) and "times a step   us a step" in shown[0]
    assert page.count("<tr>") == 1 + len(PHASES)
    assert engine.phases().steps == 7


def test_issue_and_wait_are_of_steps_that_are_not_traced(engine):
    engine.step([1])
    before = engine.counters
    engine.step([2])
    plain = {row.phase: row.us for row in engine.phases(since=before)}
    with profile(engine, nvtx=False):
        for token in TOKENS[:9]:
            engine.step([token])
    mixed = {row.phase: row.us for row in engine.phases(since=before)}
    assert (mixed["issue"], mixed["wait"]) == (plain["issue"], plain["wait"])
    assert engine.counters["untraced_steps"] == 2 and engine.counters["steps"] == 11


# how far attention looks --------------------------------------------------------------------------


def n_kv_of(program: Program) -> set[int]:
    """The extents that attention and the cache stores of a program are built for."""
    nodes = [c.node for c in program.singly() if isinstance(c, Launch)]
    return {node.params["n_kv"] for node in nodes if "n_kv" in node.params}


def test_every_program_looks_at_the_whole_cache(base):
    """What predicts shapes follows: `program`, `programs`, `cycle`, and what steps then take."""
    with base.variant(KEPT.switched("kv_growth", "full")) as engine:
        for n_past in (0, 40, 100):
            program = engine.program(2, 1, n_past)
            assert program.shape.n_kv == N_CTX and n_kv_of(program) == {N_CTX}
        made = engine.programs(3 * N_UBATCH, 8)
        assert {p.shape.n_kv for p in (*made, *engine.cycle(20, 3))} == {N_CTX}
        assert len(set(map(id, made))) == 3, "ubatches without outputs, the last one, tokens"
        for part in (TOKENS[:N_UBATCH], TOKENS[16:32]):
            engine.step(part, "none")
        engine.step(TOKENS[32:48])
        for token in TOKENS[48:56]:
            engine.step([token])
        assert list(dict.fromkeys(p.shape for p in made)) == [
            k.shape for k in engine.steps.programs._kept
        ]


def test_n_ctx_need_be_no_multiple_of_the_pad(base):
    with wb.Engine.load(
        base.model.path, device="embedded", n_ctx=100, n_kv_pad=PAD, threads=1,
        toggles=KEPT.switched("kv_growth", "full"),
    ) as engine:  # fmt: skip
        assert engine.program().shape.n_kv == engine.cache.n_cells == 128
        assert engine.prefill(TOKENS[:100]).shape[0] == 1
        with pytest.raises(UsageError, match="do not fit the context of 100"):
            engine.step([1])


# steps with outputs and without -------------------------------------------------------------------


def alternated(engine: wb.Engine, n: int) -> list[np.ndarray]:
    """n times an ubatch without outputs, then a token with one."""
    rows = []
    for i in range(n):
        engine.step(TOKENS[4 * i : 4 * i + 4], "none")
        rows.append(engine.step([TOKENS[4 * i]]))
        engine.synchronize()
    return rows


def growth(engine: wb.Engine, names: tuple[str, ...], n: int) -> tuple[list[np.ndarray], list[int]]:
    """What `alternated` computes, and how far counters grow in all but the first four rounds."""
    rows = alternated(engine, 4)
    before = engine.counters
    engine.reset()
    rows += alternated(engine, n)
    return rows, [engine.counters[name] - before[name] for name in names]


MAKING = (
    "programs_built", "plans_captured", "plans_twinned", "plans_updated", "plans_reinstantiated",
)  # fmt: skip


@pytest.mark.parametrize("step_wait", ["every", "outputs"])
@pytest.mark.parametrize("rule", ["today", "ours"])
def test_steps_with_outputs_and_without_do_not_take_each_others_entries(base, rule, step_wait):
    """llama.cpp has two arenas of graphs, so that the two kinds of step have keys of their own."""
    full = {"kv_growth": "full", "step_wait": step_wait, "graph_reuse": "set_rows"}
    with base.variant(Toggles(**full)) as eager:
        wanted = alternated(eager, 4)
        eager.reset()
        wanted += alternated(eager, 12)
    with base.variant(Toggles(plans=rule, **full)) as engine:
        names = (*MAKING, "plans_issued", "plans_replayed", "programs_reused")
        found, grown = growth(engine, names, 12)
        assert grown == [*[0] * len(MAKING), 0, 24, 24], (
            "two programs, a plan of each, and nothing anew"
        )
    for ours, theirs in zip(found, wanted, strict=True):
        assert np.array_equal(ours, theirs)


def test_the_rule_of_the_pull_request_has_one_entry_for_both(base):
    """So its one plan becomes the other kind's in every step: what the two arenas repaired."""
    with base.variant(Toggles(plans="pr", graph_reuse="set_rows", kv_growth="full")) as engine:
        _, (built, captured, _, updated, again) = growth(engine, MAKING, 12)
        assert built == captured == 0 and updated + again == 24


# with plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("growth", "plans"), [("step", 3), ("full", 1)])
def test_a_plan_for_each_n_kv_or_one_for_all(base, growth, plans):
    """80 tokens cross two boundaries of 32 cells."""
    eager = Toggles(graph_reuse="set_rows", kv_growth=growth)
    answers = []
    for toggles in (eager, eager.switched("plans", "ours")):
        with base.variant(toggles) as engine:
            answers.append([engine.step([token]) for token in TOKENS[:80]])
            counters = engine.counters
        assert counters["programs_built"] == plans
    assert counters["plans_captured"] == plans and counters["plans_replayed"] == 80
    assert np.array_equal(*answers)


@pytest.mark.parametrize("scope", ["split", "step"])
@pytest.mark.parametrize("name", [POSITIONS, MASK])
def test_inputs_of_another_shape_are_refused_before_anything_is_issued(base, name, scope):
    """Also where their bytes would fit, or be spread over the input. The engine is usable then."""
    toggles = Toggles(
        graph_reuse="set_rows", plans="ours", plan_scope=scope, sync="implicit",
        copy_stream="compute",
    )  # fmt: skip
    with base.variant(toggles) as engine:
        wanted = [engine.step([token]) for token in TOKENS[:6]]
        engine.reset()
        found = [engine.step([token]) for token in TOKENS[:3]]
        counts = engine.counters
        batch = engine.steps.batches.take([(0, [1], "last")])
        prepared = engine.steps.programs.get(Key(batch.shape, engine.turn))
        value = batch.values[name]
        for other in (value.reshape(-1, 1)[:1], np.repeat(value, 2, axis=0)):
            with pytest.raises(
                UsageError, match=rf"input {name} is \[.*\] where its program has \["
            ):
                prepared.run(batch.values | {name: other}, prepared.head)
        assert engine.counters["plans_replayed"] == counts["plans_replayed"]
        found += [engine.step([token]) for token in TOKENS[3:6]]
        assert np.array_equal(found, wanted)


def commands_of(program: Program) -> list[tuple]:
    """What a program asks for, in order."""
    return [
        (c.kind, c.label, c.split, c.stream, tuple(_bytes(c.reads)), tuple(_bytes(c.writes)))
        for c in program.singly()
    ]


def _bytes(ranges: Iterable[Range]) -> Iterator[tuple[str, int, int]]:
    return ((r.buffer.name, r.offset, r.nbytes) for r in ranges)


def test_a_phase_done_again_does_all_of_its_work(base):
    """It makes what it made before, from what it was given then: so it costs what it cost."""
    toggles = Toggles(graph_reuse="set_rows", fuse="on", defer_norm="on", plans="ours")
    with base.variant(toggles) as engine:
        phases = Phases(engine._spent)
        prepared = engine.bound.build(Key(engine.program().shape, 0), phases, 0)
        again = {name: work() for name, work in phases.again.items()}
        assert set(again) == set(MADE)
    program, (fused, _) = prepared.program, again["fuse"]
    layout, made = again["layout"], again["prepare"]
    n_fused = sum(isinstance(c, Launch) for c in program.singly())
    assert len(again["graph"].nodes) > len(fused.nodes) == n_fused
    assert [part.backend for part in again["split"]] == program.splits
    assert sum(len(part.nodes) for part in again["split"]) == n_fused
    names = [{t.name: r[1:] for t, r in ranges.items()} for ranges in layout.ranges]
    assert names == [{t.name: r[1:] for t, r in ranges.items()} for ranges in program.layout]
    assert commands_of(again["lower"]) == commands_of(program)
    assert made is not prepared and made.program is program
    assert {n: i.key for n, i in made.issued.items()} == {
        n: i.key for n, i in prepared.issued.items()
    }
