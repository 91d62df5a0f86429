"""The default toggles of a server."""

from __future__ import annotations

from workbench.config import BEST, TogglePreset
from workbench.config.presets import served


def serving(device: str, wanted: TogglePreset) -> TogglePreset:
    """The toggles of a server: `wanted`. Preset `best` is taken for several sequences, with the
    values that only a server can have. device: as in EngineConfig."""
    if wanted.name != BEST:
        return wanted
    return TogglePreset(BEST, served(device) | wanted.changes, n_seqs=2)
