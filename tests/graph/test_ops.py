"""The op table: shapes that fit, what a node costs, and which of its accesses depend on values."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.graphs import Decoder
from tests.ranges import cases
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
    for _, node, _ in cases():
        seen.add(node.op)
        read, written = VAGUE.get(node.op, (set(), set()))
        for numbers, found in zip((read, written), ops.vague(node), strict=True):
            assert {t for t, *_ in found} == {node.inputs[i].storage for i in numbers}, node
            assert found <= {*ops.reads(node), *ops.writes(node)}
    assert seen == set(ops.OPS) > VAGUE.keys()


def test_only_the_tables_and_patterns_name_ops():
    """In the pure layers no code asks for an op by name: it is data of a table or of a pattern."""
    package = Path(ops.__file__).parents[1]
    asked = []
    for path in (
        p for layer in ("graph", "model", "program") for p in (package / layer).rglob("*")
    ):
        for node in ast.walk(ast.parse(path.read_text())) if path.suffix == ".py" else ():
            if isinstance(node, ast.Compare):
                inside = [*ast.walk(node)]
                by_op = any(isinstance(n, ast.Attribute) and n.attr == "op" for n in inside)
                named = {n.value for n in inside if isinstance(n, ast.Constant)} & set(ops.OPS)
                if by_op and named:
                    asked.append(f"{path.name}:{node.lineno}")
            if isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Constant):
                assert node.value.value not in ops.OPS, f"{path.name}:{node.lineno}"
    assert not asked


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
    model = Decoder("tiny-llama", Q8_0)
    graph = model.graph()
    names = [n.name for n in graph.nodes]
    assert "l_out-1" in names and not any("ffn_gate" in name for name in names)
    assert not any(t.name == "blk.0.ffn_up.weight" for n in graph.nodes for t in n.inputs)
    assert graph.outputs[0].shape == (1, 1024)
