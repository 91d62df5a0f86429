"""Extents by each way to grow, and when masked cells are looked for (the launch gate of #14924)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.config import EngineConfig, Toggles
from workbench.engine.cache.extent import way_of
from workbench.engine.cache.growth import Growth, geometric, growth_of
from workbench.graph.ir import StepShape

FEW = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
GROWTHS = [("step", 1, range(1, 65)), ("full", 4, [16]), ("geometric", 1, FEW),
           ("geometric", 4, FEW[:8])]  # fmt: skip


@pytest.mark.parametrize(("growth", "regions", "wanted"), GROWTHS)
def test_extents_of_a_cache_that_fills(growth, regions, wanted):
    config = EngineConfig(n_ctx=16384, n_seqs=4, n_kv_pad=256)
    found = growth_of(Toggles(graph_reuse="set_rows", kv_growth=growth), config, regions)
    extents = dict.fromkeys(found.extent(n) for n in range(1, 16384 // regions + 1))
    assert [*extents] == [256 * i for i in wanted]


@given(st.integers(1, 5000), st.integers(1, 300), st.booleans())
def test_an_extent_is_whole_pads_and_not_beyond_the_end(n: int, pad: int, is_geometric: bool):
    most = -(-n // pad) * pad
    found = Growth(pad, most, is_geometric).extent(n)
    assert n <= found <= most and found % pad == 0
    few = geometric(n)
    assert n <= few < max(n + 1, 1.5 * n) and geometric(few) == few


CASES = [  # tokens, n_kv, sequences, regions; whether a gate opens; what auto does
    (1023, 2048, 1, False, False, "off"),  # too few tokens
    (1024, 2048, 1, False, True, "classes"),
    (1024, 2000, 1, False, False, "off"),  # cells that are no multiple of 256
    (1, 256, 1, True, False, "off"),  # one region is none apart
    (2, 256, 2, True, True, "off"),  # what would be saved is less than a launch
    (8, 8192, 8, False, False, "off"),  # sequences that share a region
    (1024, 2048, 8, False, True, "classes"),
    (4096, 4096, 4, True, True, "classes"),  # 1024 tokens of each
    (4096, 4096, 8, True, True, "tail"),
    (4096, 1024, 8, True, True, "off"),
]


@pytest.mark.parametrize(("n_tokens", "n_kv", "n_seqs", "regions", "opens", "auto"), CASES)
def test_a_gate_opens_by_size(n_tokens, n_kv, n_seqs, regions, opens, auto):
    shape = StepShape(n_tokens, 1, n_kv, n_seqs)
    for way in ("off", "tail", "classes"):
        assert way_of("reference", way, shape, regions) == (way if opens else "off")
        assert way_of("always", way, shape, regions) == way
        assert way_of("never", way, shape, regions) == "off"
    assert way_of("always", "in_loop", shape, regions) == "in_loop"  # it has no gate
    assert way_of("reference", "auto", shape, regions) == auto
    rows = n_tokens // (n_seqs if regions else 1)
    assert way_of("always", "auto", shape, regions) == ("classes" if rows >= 1024 else "tail")
