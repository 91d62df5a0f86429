"""Extents by each way to grow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workbench.config import EngineConfig, Toggles
from workbench.engine.cache.growth import Growth, geometric, growth_of

CONFIG = EngineConfig(n_ctx=16384, n_seqs=4, n_kv_pad=256)


def extents(growth: str, regions: int = 1) -> list[int]:
    """All that a cache has while it fills, each once."""
    found = growth_of(Toggles(graph_reuse="set_rows", kv_growth=growth), CONFIG, regions)
    return list(dict.fromkeys(found.extent(n) for n in range(1, 16384 // regions + 1)))


def test_a_step_grows_by_pads_a_full_cache_not_at_all():
    assert extents("step") == [256 * i for i in range(1, 65)]
    assert extents("full") == [16384] and extents("full", 4) == [4096]


def test_geometric_extents_are_few():
    wanted = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert extents("geometric") == [256 * i for i in wanted]
    assert extents("geometric", 4) == [256 * i for i in wanted[:8]]


@given(st.integers(1, 1 << 20))
def test_no_geometric_extent_is_much_too_large(n: int):
    found = geometric(n)
    assert n <= found < max(n + 1, 1.5 * n)
    assert found & (found - 1) == 0 or (found % 3 == 0 and (found // 3) & (found // 3 - 1) == 0)
    assert geometric(found) == found


@given(st.integers(1, 5000), st.integers(1, 300), st.booleans())
def test_an_extent_is_whole_pads_and_no_more_than_there_are(n: int, pad: int, is_geometric: bool):
    most = -(-n // pad) * pad
    found = Growth(pad, most, is_geometric).extent(n)
    assert n <= found <= most and found % pad == 0
