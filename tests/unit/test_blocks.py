"""The blocks of a layer: tables that agree, and a new block that enters as one entry."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.graphs import Decoder
from workbench.graph.ir import Q8_0, Tensor
from workbench.model import architectures, blocks
from workbench.model.architectures import ARCHITECTURES, Architecture
from workbench.model.blocks import BLOCKS, DecoderBlock, Step


def test_every_architecture_names_blocks_that_exist():
    for architecture in ARCHITECTURES.values():
        assert architecture.blocks and set(architecture.blocks) <= set(BLOCKS)
    assert {name for a in ARCHITECTURES.values() for name in a.blocks} == set(BLOCKS)


@pytest.mark.parametrize("name", BLOCKS)
def test_specs_are_the_fields_of_a_blocks_weights(name: str):
    block = BLOCKS[name]
    h = Decoder("tiny-llama", Q8_0).hparams
    assert len({s.name for s in block.specs}) == len(block.specs)
    taken = block.take(h, lambda spec: Tensor(spec.name, Q8_0, (32,)))
    assert set(taken._fields) == {s.field for s in block.specs}
    for spec in block.specs:
        found = getattr(taken, spec.field)
        assert found.name == spec.name if spec.used(h) else found is None


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
