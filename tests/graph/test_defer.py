"""Halved norms: which they are, that the graph stays whole, and that the numbers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.test_fuse import models
from tests.graphs import Decoder
from tests.profiles import examples
from workbench.graph import ir
from workbench.graph.defer import MOST_TOKENS, defer
from workbench.graph.ops import OPS, make
from workbench.graph.shapes import SQUARES


def halved(graph: ir.Graph) -> set[str]:
    """The names of the norms that `defer` halves; nothing else may become of them."""
    deferred = defer(graph)
    kept = {n.name for n in deferred.nodes if n.op == "rms_norm"}
    found = {n.name for n in graph.nodes if n.op == "rms_norm"} - kept
    assert found == {
        n.name.removesuffix(" (squares)") for n in deferred.nodes if n.op == "square_sums"
    }
    return found


def expected(n_layer: int, outputs: bool) -> set[str]:
    """All norms of rows but the first, and the one after the gather of the rows asked for."""
    last = n_layer - 1
    names = {f"attn_norm-{i}" for i in range(1, n_layer)} | {f"ffn_norm-{i}" for i in range(last)}
    return names | ({"result_norm"} if outputs else set())


def small(cols: int = 64, tokens: int = 2, **changed: Callable[..., Any]) -> ir.Graph:
    """product + residual -> norm -> product; `changed[stage](nodes, tensors)` spoils a stage."""
    nodes: list[ir.Node] = []
    w = ir.Tensor("w", ir.F32, (cols, 64), ir.Kind.WEIGHT)
    head = ir.Tensor("head", ir.F32, (48, cols), ir.Kind.WEIGHT)
    shapes = {"x": (tokens, 64), "residual": (tokens, cols)}
    inputs = [ir.Tensor(name, ir.F32, shape, ir.Kind.INPUT) for name, shape in shapes.items()]

    def add(op: str, name: str, *sources: ir.Tensor, **params) -> ir.Tensor:
        nodes.append(make(op, name, *sources, **params))
        return nodes[-1].output

    product = add("mul_mat", "p", w, inputs[0])
    if "product" in changed:
        product = changed["product"](add, product, inputs)
    total = add("add", "sum", product, inputs[1])
    norm = add("rms_norm", "n", total, eps=1e-5)
    y = add("mul", "y", norm, ir.Tensor("factors", ir.F32, (cols,), ir.Kind.WEIGHT))
    outputs = [add("mul_mat", "z", head, y)]
    if "readers" in changed:
        outputs += changed["readers"](add, total, norm, y)
    for t in outputs:
        t.kind = ir.Kind.OUTPUT
    return ir.Graph(nodes, inputs, outputs, ir.StepShape(tokens, tokens, 0))


ROW = ir.Tensor("row", ir.F32, (64,), ir.Kind.WEIGHT)
READERS: dict[str, Callable[..., list[ir.Tensor]]] = {
    "the norm is read without its weight": lambda add, total, n, y: [add("mul", "r", n, ROW)],
    "the norm is an output": lambda add, total, norm, y: [norm],
    "the weighted norm is an output": lambda add, total, norm, y: [y],
    "something else reads it": lambda add, total, norm, y: [add("swiglu", "r", y, y)],
    "something else reads it quantised": lambda add, total, norm, y: [add("quantize", "r", y)],
}
UNTOUCHED = {
    "no product": small(product=lambda add, p, inputs: add("swiglu", "s", p, p)),
    "no whole sums": small(cols=SQUARES + 16),
    **{what: small(readers=readers) for what, readers in READERS.items()},
}


@pytest.mark.parametrize("what", UNTOUCHED)
def test_what_is_left_alone(what: str):
    assert defer(UNTOUCHED[what]) is UNTOUCHED[what]


def check_dataflow(before: ir.Graph, after: ir.Graph) -> None:
    """Every tensor is made once, before it is read, of the shape its op gives; what comes out is
    what came out; and all that was not halved is the very node it was."""
    made: set[ir.Tensor] = set()
    for node in after.nodes:
        for t in node.inputs:
            known = t.kind in (ir.Kind.WEIGHT, ir.Kind.CACHE, ir.Kind.INPUT)
            assert t.storage in made or known, (node, t)
        assert OPS[node.op].infer(node.op, node.inputs, node.params) == (
            node.output.dtype, node.output.shape,
        )  # fmt: skip
        assert node.output.kind == ir.Kind.CACHE or node.output.storage not in made
        made.add(node.output.storage)
    assert all(t in made for t in after.outputs)
    assert (after.inputs, after.outputs, after.shape) == (
        before.inputs, before.outputs, before.shape,
    )  # fmt: skip
    new = [n for n in after.nodes if n not in before.nodes]
    assert {n.op for n in new} <= {"square_sums", "mul", "mul_mat", "rms_scale"}
    gone = [n for n in before.nodes if n not in after.nodes]
    assert {n.op for n in gone} <= {"rms_norm", "mul", "mul_mat"}
    assert [n for n in after.nodes if n not in new] == [n for n in before.nodes if n not in gone]
    dropped = {n.output for n in gone if n.op == "rms_norm"}
    assert {n.output for n in gone} - dropped <= made  # what others read is the tensor it was


EVALUATE: dict[str, Callable[..., np.ndarray]] = {
    "rms_norm": lambda x, eps: x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps),
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "mul_mat": lambda w, x, **_: x @ w.T,
    "square_sums": lambda x: (x**2).reshape(len(x), -1, SQUARES).sum(axis=-1),
    "rms_scale": lambda x, squares, eps: (
        x / np.sqrt(squares.sum(axis=-1, keepdims=True) / (SQUARES * squares.shape[1]) + eps)
    ),
}


def evaluated(graph: ir.Graph, values: dict[ir.Tensor, np.ndarray]) -> dict[ir.Tensor, np.ndarray]:
    """All tensors of `graph`, in float64, from its inputs and weights."""
    found = dict(values)
    for node in graph.nodes:
        found[node.output] = EVALUATE[node.op](*(found[t] for t in node.inputs), **node.params)
    return found


@given(
    st.sampled_from([32, 64, 96]), st.integers(1, MOST_TOKENS), st.integers(0, 2),
    st.sampled_from([1e-4, 1.0]), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=examples(100))
def test_halves_make_the_whole(cols, tokens, biases, magnitude, seed):
    """Where rows are small eps counts."""
    bias = ir.Tensor("bias", ir.F32, (cols,), ir.Kind.WEIGHT)
    changed: dict[str, Callable[..., Any]] = {}
    if biases:
        changed["product"] = lambda add, p, inputs: add("add", "b", p, bias)
    if biases == 2:
        w2 = ir.Tensor("w2", ir.F32, (cols, cols), ir.Kind.WEIGHT)
        changed["readers"] = lambda add, total, norm, y: [
            add("add", "z2", add("mul_mat", "p2", w2, y), total)
        ]
    graph = small(cols, tokens, **changed)
    deferred = defer(graph)
    check_dataflow(graph, deferred)
    assert halved(graph) == {"n"}
    rng = np.random.default_rng(seed)
    known = {
        t for node in graph.nodes for t in node.inputs if t.kind in (ir.Kind.WEIGHT, ir.Kind.INPUT)
    }
    values = {t: magnitude * rng.standard_normal(t.shape) for t in sorted(known, key=str)}
    wanted, found = evaluated(graph, values), evaluated(deferred, values)
    for t in graph.outputs:
        np.testing.assert_allclose(found[t], wanted[t], rtol=1e-7, atol=1e-15, err_msg=t.name)


@given(models, st.integers(1, 2 * MOST_TOKENS), st.integers(0, 3), st.sampled_from(["q8", "float"]))
@settings(max_examples=examples(150))
def test_any_model_stays_whole(model, n_tokens, outputs, activations):
    outputs = min(outputs, n_tokens)
    graph = model.graph(n_tokens, outputs, activations=activations)
    deferred = defer(graph)
    check_dataflow(graph, deferred)
    few = n_tokens <= MOST_TOKENS
    assert halved(graph) == (expected(model.hparams.n_layer, outputs > 0) if few else set())
    makers = {n.output: n for n in deferred.nodes}
    weighted = {n.output for n in deferred.nodes if n.op == "mul" and n not in graph.nodes}
    for node in deferred.nodes:  # what reads a row without its scale is scaled, by that row's
        if node.op == "mul_mat":
            x = node.inputs[1]
            x = makers[x].inputs[0] if x.dtype == ir.Q8_ACT else x
            scaled = [
                n for n in deferred.nodes if n.op == "rms_scale" and n.inputs[0] is node.output
            ]
            assert len(scaled) == (x in weighted)
            assert x not in weighted or makers[scaled[0].inputs[1]].inputs == makers[x].inputs[:1]


def test_the_toggle_bounds_the_tokens():
    one, two = (Decoder("tiny-llama", ir.Q8_0).graph(n, n) for n in (1, 2))
    assert defer(one, "one") is not one and defer(two, "one") is two
    assert defer(two, "on") is not two and defer(one, "off") is one
