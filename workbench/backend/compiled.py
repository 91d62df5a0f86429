"""How long this process has compiled kernels: what the first use of a device costs.

Every compiler of kernels reports here. Kernels out of a cache do not count.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

WORTH_SAYING_NS = 100_000_000


class Compiled(NamedTuple):
    """n: how many kernels were compiled; ns: in how much time; folder: where they are cached."""

    n: int = 0
    ns: int = 0
    folder: Path = Path()

    def since(self, before: Compiled) -> Compiled:
        return Compiled(self.n - before.n, self.ns - before.ns, self.folder)

    def __str__(self) -> str:
        """`compiling kernels for this device: 12.3 s, kept in ~/.cache/workbench/kernels`"""
        folder, home = self.folder, Path.home()
        if folder.is_relative_to(home):
            folder = "~" / folder.relative_to(home)
        return f"compiling kernels for this device: {self.ns / 1e9:.1f} s, kept in {folder}"


def kept_by(kernel: Any) -> Path:
    """The folder of numba's cache for `kernel`."""
    return Path(kernel._cache.cache_path)


_lock = threading.Lock()
_found, _until_ns = Compiled(), 0


def took(begun_ns: int, folder: Path) -> None:
    """Reports a kernel, cached in `folder`, whose compilation began at begun_ns of perf_counter_ns.
    Time in which several threads compile counts once."""
    global _found, _until_ns
    with _lock:
        now = time.perf_counter_ns()
        spent = now - max(begun_ns, _until_ns)
        _found, _until_ns = Compiled(_found.n + 1, _found.ns + spent, folder), now


def so_far() -> Compiled:
    """All that this process has compiled."""
    return _found
