"""What the first use of a device costs: how long this process has compiled kernels.

Whoever has compiled one says so here. What comes out of a cache counts for nothing.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

WORTH_SAYING_NS = 100_000_000


class Compiled(NamedTuple):
    """How many times something was compiled, in how many ns, and where it is kept."""

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
    """The folder in which numba keeps what it compiled for `kernel`."""
    return Path(kernel._cache.cache_path)


_lock = threading.Lock()
_found, _until_ns = Compiled(), 0


def took(begun_ns: int, folder: Path) -> None:
    """A kernel that is kept in `folder` has been compiled since begun_ns, by perf_counter_ns. While
    several threads compile, time counts once."""
    global _found, _until_ns
    with _lock:
        now = time.perf_counter_ns()
        spent = now - max(begun_ns, _until_ns)
        _found, _until_ns = Compiled(_found.n + 1, _found.ns + spent, folder), now


def so_far() -> Compiled:
    """What this process has compiled."""
    return _found
