"""The op table: shapes that fit, accesses that depend on values, and every op on both CPU backends
against what it declares (see tests/ranges.py)."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import ranges
from tests.graphs import Decoder
from tests.profiles import share
from workbench.backend.base import open_backend
from workbench.common.errors import UsageError
from workbench.graph import ops
from workbench.graph.ir import F32, Q8_0, Tensor
from workbench.model import architectures, blocks
from workbench.model.architectures import Architecture
from workbench.model.blocks import BLOCKS, DecoderBlock, Step


def test_ops_refuse_shapes_that_do_not_fit():
    w, x = Tensor("w", F32, (8, 32)), Tensor("x", F32, (2, 64))
    with pytest.raises(UsageError, match=r"mul_mat.*columns differ"):
        ops.make("mul_mat", "y", w, x)
    with pytest.raises(UsageError, match=r"mul.*wants F32 of one shape"):
        ops.make("mul", "y", x, w)


VAGUE: dict[str, tuple[set[int], set[int]]] = {  # the inputs, by number, read and written in part
    "get_rows": ({0}, set()),  # the table
    "set_rows": (set(), {0}),  # the cache
    "copy_by_table": (set(), {0}),
    "rope_shift": ({0}, {0}),
    "attention": ({1, 2}, set()),  # K and V
    "feed": ({1}, set()),  # last tokens
    "keep_tokens": (set(), {0}),
    "copy_cells": ({0}, {0}),
}


def test_value_dependent_ops_say_which_access_is_vague():
    seen = set()
    for _, node, _ in ranges.cases():
        seen.add(node.op)
        read, written = VAGUE.get(node.op, (set(), set()))
        for numbers, found in zip((read, written), ops.vague(node), strict=True):
            assert {t for t, *_ in found} == {node.inputs[i].storage for i in numbers}, node
            assert found <= {*ops.reads(node), *ops.writes(node)}
    assert seen == set(ops.OPS) > VAGUE.keys()


CASES = {n: (node, values) for n, node, values in (*ranges.cases(), *ranges.attention_cases())}
FUSED = {name: (node, values) for name, node, values in ranges.fused_cases()}
# each fused node has a kernel of its own, which must be compiled where no cache has it
FUSED_NAMES = [
    pytest.param(name, marks=pytest.mark.long) if n % 3 else name for n, name in enumerate(FUSED)
]


@pytest.fixture(scope="module", params=["host", "embedded"])
def backend(request):
    b = open_backend(request.param)
    yield b
    b.close()


@pytest.mark.parametrize("name", [*share(CASES, every=3, slow=2), *FUSED_NAMES])
def test_declared_ranges_hold(backend, name):
    ranges.check(backend, *(CASES | FUSED)[name])


def test_only_the_tables_and_patterns_name_ops():
    """In the pure layers no code asks for an op by name: it is data of a table or of a pattern."""
    package = Path(ops.__file__).parents[1]
    for layer in ("graph", "model", "program"):
        for path in (package / layer).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                inside = [*ast.walk(node)] if isinstance(node, ast.Compare | ast.MatchValue) else []
                named = {n.value for n in inside if isinstance(n, ast.Constant)} & set(ops.OPS)
                by_op = any(isinstance(n, ast.Attribute) and n.attr == "op" for n in inside)
                assert not named or (isinstance(node, ast.Compare) and not by_op), path.name


class _NormOnly(NamedTuple):
    ffn_norm: Tensor


def test_a_new_block_is_one_entry(monkeypatch: pytest.MonkeyPatch):
    """An architecture whose layers are attention and half a block: nothing else is touched."""

    def normed(s: Step, i: int, w: _NormOnly, x: Tensor) -> Tensor:
        return s.add("add", f"l_out-{i}", x, s.norm(f"ffn_norm-{i}", x, w.ffn_norm, i), layer=i)

    norm = next(spec for spec in BLOCKS["dense_ffn"].specs if spec.field == "ffn_norm")
    monkeypatch.setitem(blocks.BLOCKS, "normed", DecoderBlock((norm,), _NormOnly, normed))
    made = Architecture(("attention", "normed"), neox=False, qk_norm=False)
    monkeypatch.setitem(architectures.ARCHITECTURES, "llama", made)
    graph = Decoder("tiny-llama", Q8_0).graph()
    names = {n.name for n in graph.nodes} | {t.name for n in graph.nodes for t in n.inputs}
    assert "l_out-1" in names and not any("ffn_gate" in n or "ffn_up" in n for n in names)
    assert graph.outputs[0].shape == (1, 1024)
