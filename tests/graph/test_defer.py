"""Halved norms: which they are, that the graph stays whole, and that the numbers stay the same."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs import PRODUCTS, Decoder
from tests.profiles import examples
from workbench.graph.defer import MOST_TOKENS, defer
from workbench.graph.ir import (
    BF16,
    F16,
    F32,
    I32,
    Q4_0,
    Q4_K,
    Q8_0,
    Q8_ACT,
    Graph,
    Kind,
    Node,
    StepShape,
    Tensor,
)
from workbench.graph.ops import OPS, make
from workbench.graph.shapes import SQUARES

MODELS = ["tiny-llama", "tiny-qwen3", "tiny-llama-bias"]
MIXED = {"attn_v": F16, "ffn_up": F16}  # of x once quantised and once as floats


def halved(graph: Graph) -> set[str]:
    """The names of the norms that `defer` halves; nothing else may become of them."""
    deferred = defer(graph)
    kept = {n.name for n in deferred.nodes if n.op == "rms_norm"}
    found = {n.name for n in graph.nodes if n.op == "rms_norm"} - kept
    assert {n.name.removesuffix(" (squares)") for n in deferred.nodes if n.op == "square_sums"} == (
        found
    )
    return found


def expected(n_layer: int, outputs: bool) -> set[str]:
    """All norms of rows but the first, and the one behind the gather of the rows asked for."""
    last = n_layer - 1
    names = {f"attn_norm-{i}" for i in range(1, n_layer)} | {f"ffn_norm-{i}" for i in range(last)}
    return names | ({"result_norm"} if outputs else set())


@pytest.mark.parametrize("activations", ["q8", "float"])
@pytest.mark.parametrize("dtype", [F32, F16, Q8_0, Q4_K])
@pytest.mark.parametrize("preset", MODELS)
def test_norms_behind_a_product_are_halved(preset: str, dtype, activations: str):
    for n_layer, dtypes in ((1, {}), (3, {}), (3, MIXED)):
        model = Decoder(preset, dtype, dtypes, n_layer=n_layer)
        for tokens, outputs in ((1, 1), (MOST_TOKENS, 3), (3, 0)):
            graph = model.graph(tokens, outputs, activations=activations)
            assert halved(graph) == expected(n_layer, outputs > 0)


# graphs in which something is in the way ----------------------------------------------------------


def small(cols: int = 64, tokens: int = 2, **changed: Callable[..., Any]) -> Graph:
    """product + residual -> norm -> product; `changed[stage](nodes, tensors)` spoils a stage."""
    nodes: list[Node] = []
    w = Tensor("w", F32, (cols, 64), Kind.WEIGHT)
    head = Tensor("head", F32, (48, cols), Kind.WEIGHT)
    shapes = {"x": (tokens, 64), "residual": (tokens, cols)}
    inputs = [Tensor(name, F32, shape, Kind.INPUT) for name, shape in shapes.items()]

    def add(op: str, name: str, *sources: Tensor, **params) -> Tensor:
        nodes.append(make(op, name, *sources, **params))
        return nodes[-1].output

    product = add("mul_mat", "p", w, inputs[0])
    if "product" in changed:
        product = changed["product"](add, product, inputs)
    total = add("add", "sum", product, inputs[1])
    norm = add("rms_norm", "n", total, eps=1e-5)
    y = add("mul", "y", norm, Tensor("factors", F32, (cols,), Kind.WEIGHT))
    outputs = [add("mul_mat", "z", head, y)]
    if "readers" in changed:
        outputs += changed["readers"](add, total, norm, y)
    for t in outputs:
        t.kind = Kind.OUTPUT
    return Graph(nodes, inputs, outputs, StepShape(tokens, tokens, 0))


ROW = Tensor("row", F32, (64,), Kind.WEIGHT)
UNTOUCHED = {
    "no product": lambda: small(product=lambda add, p, inputs: add("swiglu", "s", p, p)),
    "gathered rows": lambda: small(
        product=lambda add, p, inputs: add("get_rows", "g", p, Tensor("i", I32, (2,), Kind.INPUT))
    ),
    "no whole sums": lambda: small(cols=SQUARES + 16),
    "the norm is read without its weight": lambda: small(
        readers=lambda add, total, norm, y: [add("mul", "m", norm, ROW)]
    ),
    "the norm is an output": lambda: small(readers=lambda add, total, norm, y: [norm]),
    "the weighted norm is an output": lambda: small(readers=lambda add, total, norm, y: [y]),
    "something else reads it": lambda: small(
        readers=lambda add, total, norm, y: [add("swiglu", "s", y, y)]
    ),
    "something else reads it quantised": lambda: small(
        readers=lambda add, total, norm, y: [add("quantize", "q", y)]
    ),
}


@pytest.mark.parametrize("what", UNTOUCHED)
def test_what_is_left_alone(what: str):
    graph = UNTOUCHED[what]()
    assert defer(graph) is graph


def test_a_bias_between_is_no_obstacle_nor_are_other_readers_of_the_sum():
    biased = small(product=lambda add, p, inputs: add("add", "b", p, ROW))
    assert halved(biased) == {"n"}
    assert halved(small(readers=lambda add, total, norm, y: [add("swiglu", "s", total, total)]))


# the graph ----------------------------------------------------------------------------------------


def check_dataflow(before: Graph, after: Graph) -> None:
    """Every tensor is made once, before it is read, of the shape its op gives; what comes out is
    what came out; and all that was not halved is the very node it was."""
    made: set[Tensor] = set()
    for node in after.nodes:
        for t in node.inputs:
            known = t.kind in (Kind.WEIGHT, Kind.CACHE, Kind.INPUT)
            assert t.storage in made or known, (node, t)
        assert OPS[node.op].infer(node.op, node.inputs, node.params) == (
            node.output.dtype, node.output.shape,
        )  # fmt: skip
        assert node.output.kind == Kind.CACHE or node.output.storage not in made
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


# the numbers --------------------------------------------------------------------------------------


def rope(x: np.ndarray, positions: np.ndarray, *factors: np.ndarray, **p) -> np.ndarray:
    pairs = np.arange(p["n_rot"] // 2)
    angle = positions[:, None] * p["freq_scale"] * p["theta_base"] ** (-2.0 * pairs / p["n_rot"])
    angle = (angle / (factors[0] if factors else 1.0))[:, None, :]
    a, b = (pairs, pairs + len(pairs)) if p["neox"] else (2 * pairs, 2 * pairs + 1)
    y = x.copy()
    y[..., a] = x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle)
    y[..., b] = x[..., a] * np.sin(angle) + x[..., b] * np.cos(angle)
    return y


def attention(q, k, v, mask, n_kv: int, n_head_kv: int, scale: float) -> np.ndarray:
    tokens, heads, dim = q.shape
    k, v = (
        c[:n_kv].reshape(n_kv, n_head_kv, dim).repeat(heads // n_head_kv, axis=1) for c in (k, v)
    )
    p = np.exp(scale * np.einsum("thd,nhd->thn", q, k) + mask[:, None, :])
    return np.einsum("thn,nhd->thd", p / p.sum(axis=-1, keepdims=True), v).reshape(tokens, -1)


def store(cache: np.ndarray, x: np.ndarray, cells: np.ndarray, n_kv: int) -> np.ndarray:
    cache = cache.copy()
    cache[cells] = x
    return cache


EVALUATE: dict[str, Callable[..., np.ndarray]] = {
    "get_rows": lambda table, ids: table[ids],
    "rms_norm": lambda x, eps: x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps),
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "mul_mat": lambda w, x, **_: x @ w.T,
    "rope": rope,
    "set_rows": store,
    "attention": attention,
    "swiglu": lambda gate, up: gate / (1 + np.exp(-gate)) * up,
    "square_sums": lambda x: (x**2).reshape(len(x), -1, SQUARES).sum(axis=-1),
    "rms_scale": lambda x, squares, eps: (
        x / np.sqrt(squares.sum(axis=-1, keepdims=True) / (SQUARES * squares.shape[1]) + eps)
    ),
}


def evaluated(graph: Graph, values: dict[Tensor, np.ndarray]) -> dict[Tensor, np.ndarray]:
    """All tensors of `graph` by storage, in float64, from its inputs and weights."""
    found = dict(values)
    for node in graph.nodes:
        given = [found[t.storage].reshape(t.shape) for t in node.inputs]
        found[node.output.storage] = EVALUATE[node.op](*given, **node.params)
    return found


def values_of(graph: Graph, rng: np.random.Generator) -> dict[Tensor, np.ndarray]:
    """Values for what `graph` is given. Rows are small, so that eps counts."""
    values: dict[Tensor, np.ndarray] = {}
    for t in {t.storage for node in graph.nodes for t in node.inputs}:
        n = t.shape[0]
        if t.kind == Kind.INPUT:
            values[t] = np.zeros(t.shape) if t.dtype == F16 else rng.permutation(64)[:n]
            if t.name == "inp_out_ids":
                values[t] = np.arange(n)
        elif t.kind in (Kind.WEIGHT, Kind.CACHE):
            spread = 1.0 if len(t.shape) == 1 or t.kind == Kind.CACHE else t.cols**-0.5
            values[t] = rng.standard_normal(t.shape) * spread
    return values


@given(
    preset=st.sampled_from(MODELS),
    biases=st.sets(st.sampled_from(PRODUCTS)),
    n_layer=st.integers(1, 3),
    n_tokens=st.integers(1, MOST_TOKENS),
    outputs=st.integers(0, MOST_TOKENS),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(25))
def test_halves_make_the_whole(
    preset: str, biases: Collection[str], n_layer: int, n_tokens: int, outputs: int, seed: int
):
    model = Decoder(preset, F32, biases=biases, n_layer=n_layer)
    graph = model.graph(n_tokens, min(outputs, n_tokens))
    deferred = defer(graph)
    check_dataflow(graph, deferred)
    values = values_of(graph, np.random.default_rng(seed))
    wanted, found = evaluated(graph, values), evaluated(deferred, values)
    weighted = {n.output for n in deferred.nodes if n.op == "mul" and n not in graph.nodes}
    for t in wanted:
        if t in found and t not in weighted:  # which are the rows before their scale
            np.testing.assert_allclose(found[t], wanted[t], rtol=1e-7, atol=1e-9, err_msg=t.name)
    assert n_layer == 1 or weighted


DTYPES = st.sampled_from([F32, F16, BF16, Q8_0, Q4_0, Q4_K])


@given(
    preset=st.sampled_from(MODELS),
    dtype=DTYPES,
    dtypes=st.dictionaries(st.sampled_from(PRODUCTS), DTYPES),
    biases=st.sets(st.sampled_from(PRODUCTS)),
    n_layer=st.integers(1, 3),
    n_tokens=st.integers(1, 2 * MOST_TOKENS),
    outputs=st.integers(0, 3),
    activations=st.sampled_from(["q8", "float"]),
)
@settings(max_examples=examples(150))
def test_any_model_stays_whole(
    preset, dtype, dtypes, biases, n_layer, n_tokens, outputs, activations
):
    model = Decoder(preset, dtype, dtypes, biases, n_layer=n_layer)
    outputs = min(outputs, n_tokens)
    graph = model.graph(n_tokens, outputs, activations=activations)
    deferred = defer(graph)
    check_dataflow(graph, deferred)
    few = n_tokens <= MOST_TOKENS
    assert halved(graph) == (expected(n_layer, outputs > 0) if few else set())
    makers = {n.output: n for n in deferred.nodes}
    weighted = {n.output for n in deferred.nodes if n.op == "mul" and n not in graph.nodes}
    for node in deferred.nodes:  # what reads a row without its scale is scaled, by that row's
        if node.op == "mul_mat":
            x = node.inputs[1]
            x = makers[x].inputs[0] if x.dtype == Q8_ACT else x
            scaled = [
                n for n in deferred.nodes if n.op == "rms_scale" and n.inputs[0] is node.output
            ]
            assert len(scaled) == (x in weighted)
            assert x not in weighted or makers[scaled[0].inputs[1]].inputs == makers[x].inputs[:1]


def test_one_token_alone():
    model = Decoder("tiny-llama", Q8_0)
    one, two = model.graph(1), model.graph(2, 2)
    assert [n.name for n in defer(one, "one").nodes] == [n.name for n in defer(one).nodes]
    assert defer(one, "one") is not one
    assert defer(two, "one") is two and defer(two, "on") is not two
    assert defer(one, "off") is one
