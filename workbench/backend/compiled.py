"""Where compiled kernels are kept, and how long this process has compiled kernels: the cost of the
first use of a device.

Every compiler of kernels reports here. Kernels that come out of the cache do not count.
"""

from __future__ import annotations

import os
import stat
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from workbench.common import progress
from workbench.common.errors import UsageError
from workbench.common.output import writing

WORTH_SAYING_NS = 100_000_000


class Compiled(NamedTuple):
    """How many kernels were compiled, in how much time, and the folder where they are cached."""

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


_lock = threading.Lock()
_found, _until_ns, _said = Compiled(), 0, Compiled()


def took(begun_ns: int, folder: Path) -> None:
    """Reports a kernel that was compiled. Time in which several threads compile counts once.

    begun_ns: when its compilation began, by `perf_counter_ns`.
    folder: where the kernel is cached.
    """
    global _found, _until_ns
    with _lock:
        now = time.perf_counter_ns()
        spent = now - max(begun_ns, _until_ns)
        _found, _until_ns = Compiled(_found.n + 1, _found.ns + spent, folder), now


def say() -> None:
    """Prints a line on what was compiled since the last such line, if it took long enough to be
    noticed."""
    global _said
    if (new := _found.since(_said)).ns > WORTH_SAYING_NS:
        progress.note(str(new))
        _said = _found


def so_far() -> Compiled:
    """What this process has compiled so far."""
    return _found


def cache_dir() -> Path:
    """~/.cache/workbench/kernels. Where it cannot be written: this user's own folder in the
    temporary directory. Where that folder cannot be trusted: a new folder for this process."""
    for folder in (
        Path.home() / ".cache" / "workbench" / "kernels",
        Path(tempfile.gettempdir()) / f"workbench-kernels-{_user()}",
    ):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = folder.lstat()
        except OSError:
            continue
        mine = not hasattr(os, "getuid") or info.st_uid == os.getuid()
        if mine and stat.S_ISDIR(info.st_mode) and os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="workbench-kernels-"))


def keep(path: Path, content: bytes) -> None:
    """Writes a kernel to the cache where the disk has room. Without the file, the next process
    compiles again."""
    with suppress(UsageError), writing(path) as file:
        file.write(content)


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else "user"
