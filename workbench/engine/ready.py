"""The kernels of steps, compiled before any of the steps is taken.

A step compiles what it launches and no cache has, one kernel after the other. Here the kernels of
many steps are found first, of several engines together, and a backend compiles several at a time.
So variants of an engine wait for the slowest kernel once, and not each for its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext

from workbench.backend import compiled
from workbench.backend.base import Backend
from workbench.common.progress import HIDDEN, bar
from workbench.graph.ir import Node


def make_ready(launched: Iterable[tuple[Backend, Node]]) -> None:
    """Compiles the kernels of these nodes, and says so where it took long.

    launched: of `Engine.unready`, of one engine or of several.

    Raises DeviceError for a kernel that does not compile.
    """
    wanted = defaultdict[Backend, list[Node]](list)
    for backend, node in launched:
        wanted[backend].append(node)
    n = sum(map(len, wanted.values()))
    # the first launch of a kernel takes long; the cache has it for all others
    with bar("compiling kernels", n, "launches", alike=False) if n else nullcontext(HIDDEN) as left:
        for backend, nodes in wanted.items():
            backend.make_ready(nodes, left)
    compiled.say()
