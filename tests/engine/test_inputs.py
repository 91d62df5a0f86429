"""Each input of a step says which steps a graph with it serves; what says nothing serves none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs import Decoder
from tests.profiles import examples
from workbench.graph.ir import F32, I32, Kind, StepShape, Tensor
from workbench.model.cache_graphs import copy_graph, shift_graph
from workbench.model.decoder import build_graph
from workbench.model.inputs import INPUTS, input_of

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
