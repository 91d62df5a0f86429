"""Workbench: where the time between tokens goes. The public names, imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from workbench.bench.ab import ab
    from workbench.bench.results import new_run_folder, runs
    from workbench.config import EngineConfig, Toggles
    from workbench.engine.engine import Engine
    from workbench.model.sampler import Sampling
    from workbench.trace.profile import profile

_LAZY = {
    "Engine": "workbench.engine.engine",
    "EngineConfig": "workbench.config",
    "Sampling": "workbench.model.sampler",
    "Toggles": "workbench.config",
    "ab": "workbench.bench.ab",
    "new_run_folder": "workbench.bench.results",
    "profile": "workbench.trace.profile",
    "runs": "workbench.bench.results",
}

__all__ = [
    "Engine",
    "EngineConfig",
    "Sampling",
    "Toggles",
    "ab",
    "new_run_folder",
    "profile",
    "runs",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
