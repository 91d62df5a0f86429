"""Workbench: where the time between tokens goes. The public names, imported when first used."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from workbench.benchmarks.compare.ab import ab as ab
    from workbench.benchmarks.compare.compare import compare as compare
    from workbench.benchmarks.runs.results import new_run_folder as new_run_folder
    from workbench.benchmarks.runs.results import runs as runs
    from workbench.config import EngineConfig as EngineConfig
    from workbench.config import Toggles as Toggles
    from workbench.engine.cache.visits import kv_visits as kv_visits
    from workbench.engine.engine import Engine as Engine
    from workbench.jupyter import lab as lab
    from workbench.model.sampler import Sampling as Sampling
    from workbench.trace.diff import diff as diff
    from workbench.trace.profile import Profile as Profile
    from workbench.trace.profile import profile as profile
    from workbench.traffic.served import serve_bench as serve_bench

_LAZY = {
    "Engine": "workbench.engine.engine",
    "EngineConfig": "workbench.config",
    "Profile": "workbench.trace.profile",
    "Sampling": "workbench.model.sampler",
    "Toggles": "workbench.config",
    "ab": "workbench.benchmarks.compare.ab",
    "compare": "workbench.benchmarks.compare.compare",
    "diff": "workbench.trace.diff",
    "kv_visits": "workbench.engine.cache.visits",
    "lab": "workbench.jupyter",
    "new_run_folder": "workbench.benchmarks.runs.results",
    "profile": "workbench.trace.profile",
    "runs": "workbench.benchmarks.runs.results",
    "serve_bench": "workbench.traffic.served",
}

__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext workbench`: adds the magic `%%wb_profile`."""
    from workbench.jupyter import magics

    magics.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext workbench`: takes it away again."""
    from workbench.jupyter import magics

    magics.unload(shell)
