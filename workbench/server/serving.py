"""The toggles that a server has, where nobody says otherwise."""

from __future__ import annotations

from workbench.config import BEST, TogglePreset
from workbench.config.presets import served


def serving(device: str, wanted: TogglePreset) -> TogglePreset:
    """The toggles of a server: what is wanted; where that is `best`, for several sequences, and
    with what only a server can have. device: as EngineConfig has it."""
    if wanted.name != BEST:
        return wanted
    return TogglePreset(BEST, served(device) | wanted.changes, n_seqs=2)
