"""Workbench: where the time between tokens goes. The public names, imported when first used."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from workbench.benchmarks.advise.advise import advise as advise
    from workbench.benchmarks.compare.ab import ab as ab
    from workbench.benchmarks.compare.compare import compare as compare
    from workbench.benchmarks.compare.comparison import AB as AB
    from workbench.benchmarks.llama.bench import bench as bench
    from workbench.benchmarks.proof import check as check
    from workbench.benchmarks.runs.loading import load as load
    from workbench.benchmarks.runs.loading import runs as runs
    from workbench.benchmarks.runs.results import Run as Run
    from workbench.benchmarks.runs.results import new_run_folder as new_run_folder
    from workbench.benchmarks.sweep.sweep import sweep as sweep
    from workbench.config import EngineConfig as EngineConfig
    from workbench.config import Toggles as Toggles
    from workbench.engine.cache.visits import kv_visits as kv_visits
    from workbench.engine.engine import Engine as Engine
    from workbench.jupyter import lab as lab
    from workbench.model.sampler import Sampling as Sampling
    from workbench.program.commands import Program as Program
    from workbench.report.plot import plot as plot
    from workbench.trace.diff import diff as diff
    from workbench.trace.profile import Profile as Profile
    from workbench.trace.profile import profile as profile
    from workbench.traffic.served import serve_bench as serve_bench

# public name -> its module, a line each
_LAZY = {
    "AB": "workbench.benchmarks.compare.comparison",
    "Engine": "workbench.engine.engine",
    "EngineConfig": "workbench.config",
    "Profile": "workbench.trace.profile",
    "Program": "workbench.program.commands",
    "Run": "workbench.benchmarks.runs.results",
    "Sampling": "workbench.model.sampler",
    "Sweep": "workbench.benchmarks.sweep.result",
    "Toggles": "workbench.config",
    "ab": "workbench.benchmarks.compare.ab",
    "advise": "workbench.benchmarks.advise.advise",
    "bench": "workbench.benchmarks.llama.bench",
    "check": "workbench.benchmarks.proof",
    "compare": "workbench.benchmarks.compare.compare",
    "diff": "workbench.trace.diff",
    "kv_visits": "workbench.engine.cache.visits",
    "lab": "workbench.jupyter",
    "load": "workbench.benchmarks.runs.loading",
    "new_run_folder": "workbench.benchmarks.runs.results",
    "plot": "workbench.report.plot",
    "profile": "workbench.trace.profile",
    "runs": "workbench.benchmarks.runs.loading",
    "serve_bench": "workbench.traffic.served",
    "sweep": "workbench.benchmarks.sweep.sweep",
}

__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        from workbench.common.nearest import nearest

        # Python itself adds the nearest name to a traceback, but IPython does not. Without the
        # module as `obj`, Python does not say it twice.
        meant = None if name.startswith("_") else nearest(name, __all__)
        hint = f". Did you mean: {meant!r}?" if meant else ""
        said = f"module 'workbench' has no attribute {name!r}{hint}"
        raise AttributeError(said, name=name, obj=None)
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    """The public names and nothing else. Python finds every other attribute without this list."""
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext workbench`: adds the magic `%%wb_profile`."""
    from workbench.jupyter import magics

    magics.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext workbench`: takes it away again."""
    from workbench.jupyter import magics

    magics.unload(shell)
