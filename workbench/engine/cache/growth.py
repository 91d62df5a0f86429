"""ROOM #8366: how many cells attention looks at, as a cache fills.

The padded extent is part of a step's shape. So each extent has programs of its own, and plans:

    step        a multiple of n_kv_pad (llama.cpp: 256): for 16384 cells 64 extents
    geometric   n_kv_pad times a power of two, or half as much more: 12 extents. Attention looks at
                up to half as many cells more, unless masked cells are left unread (`extent.py`)
    full        the whole region: one extent
"""

from __future__ import annotations

from typing import NamedTuple

from workbench.common.sizes import round_up
from workbench.config import EngineConfig, KVGrowth, Toggles


class Growth(NamedTuple):
    """Rounds filled cells up to an extent.

    pad: every extent is a multiple of it.
    most: the cells of a region.
    geometric: extents grow geometrically.
    """

    pad: int
    most: int
    geometric: bool = False

    def extent(self, n: int) -> int:
        """The padded extent where n cells of a region are looked at."""
        n_pads = -(-n // self.pad)
        if self.geometric:
            n_pads = geometric(n_pads)
        return min(n_pads * self.pad, self.most)


def geometric(n: int) -> int:
    """The least power of two, or half as much more, that is n or more; n is 1 or more."""
    whole = 1 << (n - 1).bit_length()
    between = whole // 4 * 3
    return between if between >= n else whole


def growth_of(toggles: Toggles, config: EngineConfig, regions: int) -> Growth:
    """The growth that toggles ask for. regions: how many the cache has."""
    most = round_up(config.n_ctx // regions, config.n_kv_pad)
    pad = most if toggles.kv_growth == KVGrowth.FULL else config.n_kv_pad
    return Growth(pad, most, toggles.kv_growth == KVGrowth.GEOMETRIC)
