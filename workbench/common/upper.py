"""The one way up: rooms above are named here as text, and imported when somebody asks for them.

Imports point down only, so that a room can be read and loaded without the rooms above it. But two
things are asked of a lower room that only an upper room can do. Whoever holds a result asks the
result itself to be drawn, and pictures are made in `report`. Whoever has a run folder asks for the
result in it, whichever room recorded the folder. No room does its own work with the help of these
names: without the rooms above, a lower room lacks only these two conveniences.
"""

from __future__ import annotations

import importlib
from typing import Any

PLOT = "workbench.report.plot:plot"  # result, **how -> Figure
# kind of a run -> what reads its folder into a result; folders of other kinds are a `results.Run`
OF_KIND = {
    "ab": "workbench.benchmarks.compare.comparison:AB.load",
    "bench": "workbench.benchmarks.llama.bench:Bench.load",
    "gaps": "workbench.benchmarks.times.gaps:load",
    "kernels": "workbench.benchmarks.kernels.kernel_bench:KernelRun.load",
    "serve": "workbench.traffic.bench:load_served",
}
# kind of a folder of run folders (`results.TOGETHER`) -> what reads it
OF_TOGETHER = {
    "sweep": "workbench.benchmarks.sweep.result:Sweep.load",
    "advise": "workbench.benchmarks.advise.record:load",
}
# ending of a trace's file -> what reads it
OF_TRACE = dict.fromkeys(
    (".pftrace", ".pftrace.gz", ".json", ".json.gz", ".sqlite", ".sqlite.gz"),
    "workbench.trace.profile:Profile.load",
)


def upper(name: str) -> Any:
    """What `module:attribute.attribute` names."""
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
