"""Each input of a step says which steps a graph with it serves; what says nothing serves none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs import Decoder
from tests.profiles import examples
from workbench.backend.issue.prepared import Prepared
from workbench.engine.batch import shift_batch
from workbench.engine.batches import NOBODY, Batches
from workbench.engine.cache.kv_cache import KVCache
from workbench.engine.programs import KEPT, KeepByShape, Key
from workbench.graph.ir import F16, F32, I32, I64, Input, Kind, StepShape, Tensor
from workbench.model.cache_graphs import copy_graph, shift_graph
from workbench.model.decoder import build_graph
from workbench.model.inputs import INPUTS, POSITIONS, input_of

N_VOCAB, N_CTX, N_UBATCH, PAD = 64, 96, 16, 32
NUMPY = {I32: np.int32, I64: np.int64, F16: np.float16, F32: np.float32}
DECODE = StepShape(1, 1, 256)
# which parts of a step shape an input must be asked about
DEPENDS = {
    "inp_tokens": {"n_tokens"}, "inp_pos": {"n_tokens"}, "attn_inp_kq_mask": {"n_tokens", "n_kv"},
    "attn_inp_k_idxs": {"n_tokens"}, "attn_inp_v_idxs": {"n_tokens"},
    "inp_out_ids": {"n_outputs"}, "inp_k_shift": {"n_kv"}, "attn_inp_regions": {"n_seqs"},
    "inp_draws": {"n_outputs"}, "inp_out_seqs": {"n_outputs"}, "inp_copies": {"n_kv"},
}  # fmt: skip

shapes = st.builds(StepShape, *[st.integers(1, 600)] * 3, n_seqs=st.integers(1, 4))


def test_each_input_of_a_graph_is_in_the_table():
    model = Decoder("tiny-llama", F32)
    shape = StepShape(4, 2, 256)
    step = build_graph(model, shape, model.caches(256)).inputs
    step += build_graph(model, shape, model.caches(512), regions=True).inputs
    last = Tensor("last_tokens", I32, (8,), Kind.CACHE)
    drawing = shape._replace(draws=True)
    step += build_graph(model, drawing, model.caches(256), last_tokens=last).inputs
    others = shift_graph(model, model.caches(256), 256).inputs
    others += copy_graph(model.caches(256), 8).inputs
    assert {t.name for t in (*step, *others)} == set(INPUTS) == set(DEPENDS)
    for t in step:
        made = input_of(t.name, shape)
        assert (type(t), t.dtype, t.shape) == (type(made), made.dtype, made.shape)


@pytest.mark.parametrize("name", INPUTS)
@given(made_for=shapes, asked=shapes)
@settings(max_examples=examples(40))
def test_an_input_serves_steps_of_its_shape_alone(name, made_for, asked):
    made = input_of(name, made_for)
    assert made.can_reuse(made_for)
    assert made.can_reuse(asked) == (made.shape == input_of(name, asked).shape)
    others = {"n_tokens", "n_outputs", "n_kv", "n_seqs"} - DEPENDS[name]
    assert made.can_reuse(asked._replace(**{n: getattr(made_for, n) for n in DEPENDS[name]}))
    assert made.can_reuse(made_for._replace(**{n: getattr(asked, n) for n in others}))


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    outputs=st.lists(st.sampled_from(["last", "all", "none"]), min_size=3, max_size=3),
    n_steps=st.integers(1, 4),
)
@settings(max_examples=examples(40))
def test_values_are_what_inputs_say(lengths, outputs, n_steps):
    """Shape and type of every value that a batch has, made ahead or not, are its input's."""
    cache = KVCache(N_CTX, PAD, 3)
    batches = Batches(cache, N_VOCAB, N_UBATCH)
    work = [(s, [7] * n, outputs[s]) for s, n in enumerate(lengths)]
    for _ in range(n_steps):
        batch = batches.take(work)
        made = {name: input_of(name, batch.shape) for name in batch.values}
        assert len(made) == 6
        for name, value in batch.values.items():
            assert value.shape == made[name].shape, name
            assert value.dtype == NUMPY[made[name].dtype], name
        cache.store(batch.sequences, batch.positions, batch.cells)
        work = [(s, [7], outputs[s]) for s in range(len(lengths))]
        batches.look_ahead(work)
    cache.shift(0, 1)
    batch = shift_batch(cache)
    (deltas,) = batch.values.values()
    made = input_of("inp_k_shift", batch.shape)
    assert (deltas.shape, deltas.dtype) == (made.shape, NUMPY[made.dtype])


# what is kept -------------------------------------------------------------------------------------


class Fake:
    """A program that was prepared, as far as what keeps it looks."""

    def __init__(self, inputs: list[Input]):
        self.program = self
        self.inputs = inputs


class Builder:
    """Counts what is built; `inputs` makes those of a graph for a step shape."""

    def __init__(self, inputs):
        self.inputs, self.keys = inputs, []

    def __call__(self, key: Key, phases, cell: int) -> Prepared:
        self.keys.append(key)
        return Fake(self.inputs(key.shape))  # type: ignore[return-value]


def own(shape: StepShape) -> list[Input]:
    return [input_of(name, shape) for name in INPUTS]


def kept(inputs=own) -> KeepByShape:
    return KeepByShape(Builder(inputs), NOBODY)


class Silent(Input):
    """A new kind of input that nobody has asked about reuse."""


class FourPositions(Input):
    """Four positions for each token, which answers as if there were one (llama.cpp #18191)."""

    def __init__(self, shape: StepShape):
        super().__init__(POSITIONS, I32, (4 * shape.n_tokens,))

    def can_reuse(self, step: StepShape) -> bool:
        return self.shape == (step.n_tokens,)


@pytest.mark.parametrize("other", [lambda s: Silent("inp_new", I32, (s.n_tokens,)), FourPositions])
def test_an_input_that_does_not_answer_says_no(other):
    """Or that compares with another shape: no reuse, silently. The counters name it."""
    policy = kept(lambda shape: [other(shape)])
    found = [policy.get(Key(DECODE, 0)) for _ in range(5)]
    assert (policy.built, policy.reused) == (5, 0) and len(set(map(id, found))) == 5
    assert policy.refused == {other(DECODE).name: 4}


@given(
    keys=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1), st.integers(0, 1)), max_size=60)
)
@settings(max_examples=examples(40))
def test_programs_are_reused_by_shape_and_turn_alone(keys):
    """And no two shapes share a program: with outputs and without, and of every turn of the rings,
    each has its own."""
    policy, seen = kept(), {}
    for n_tokens, n_outputs, turn in keys:
        key = Key(StepShape(n_tokens, n_outputs, 256), turn)
        found = policy.get(key)
        assert seen.setdefault(key, found) is found
    assert policy.built == len(seen) and policy.reused == len(keys) - len(seen)
    assert len(set(map(id, seen.values()))) == len(seen)


def test_the_least_recently_used_goes_first():
    policy = kept()
    keys = [Key(StepShape(n + 1, 1, 256), 0) for n in range(KEPT)]
    for key in keys:
        policy.get(key)
    policy.get(keys[0])
    policy.get(Key(StepShape(1, 1, 512), 0))
    for key, built in ((keys[0], KEPT + 1), (keys[1], KEPT + 2)):
        policy.get(key)
        assert policy.built == built
