"""Saves of two files that are killed before their n-th call of the operating system, for every n:
after each the folder has the files of one save, and one more save tidies up. A third file in the
folder is somebody else's.

    python -m tests.common.killed_saves FOLDER exchange|two-renames
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from workbench.common import output_swap
from workbench.common.output import writing_folder
from workbench.common.output_swap import read_files

CALLS = ("open", "dup", "write", "close", "mkdir", "chmod", "fchmod", "rename", "link", "unlink",
         "rmdir", "exchange")  # fmt: skip


@contextmanager
def watched(look: Callable[[str, bool], None], most: int = 1 << 20) -> Iterator[None]:
    """Within, `look(name, after)` is called before and after each call of the system, and a write
    takes at most `most` bytes."""

    def replaced(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if name == "write":
                arguments = (arguments[0], bytes(arguments[1])[:most])
            look(name, False)
            found = real(*arguments, **named)
            look(name, True)
            return found

        return call

    of_os = {name: replaced(name, getattr(os, name)) for name in CALLS[:-1]}
    swaps = replaced("exchange", output_swap.exchange)
    with mock.patch.multiple(os, **of_os), mock.patch.object(output_swap, "exchange", swaps):
        yield


def no_exchange(*_: object) -> None:
    raise OSError(errno.EINVAL, "Invalid argument")


def save(folder: Path, value: object) -> None:
    with writing_folder(folder) as made:
        for name in ("a", "b"):
            with made.writing(name, "t") as file:
                file.write(str(value))


def killed(n: int, folder: Path) -> bool:
    """Saves in a child that is killed before call n; whether it got so far."""
    if (child := os.fork()) == 0:
        left = iter(range(n))

        def kill(name: str, after: bool) -> None:
            if not after and next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        with watched(kill):
            save(folder, 2)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def seen(folder: Path) -> list[list[str | None]]:
    """By path, as somebody does who knows no package; and as load_run reads them."""
    by_path = [(folder / n).read_text() if (folder / n).exists() else None for n in ("a", "b")]
    try:
        return [by_path, [bytes(content).decode() for content in read_files(folder, "a", "b")]]
    except FileNotFoundError:
        return [by_path, [None, None]]


def every_kill(root: Path, old: bool, may_be_gone: bool) -> None:
    """old: there is a folder before. may_be_gone: for a moment there may be none, by path."""
    before, saved = "1" if old else None, []
    for n in itertools.count():
        folder = root / f"{n} {old}" / "run"
        if old:
            save(folder, 1)
            (folder / "other").write_text("x")
        was_killed = killed(n, folder)
        by_path, loaded = seen(folder)
        assert len(set(by_path)) == len(set(loaded)) == 1, "never a file of each"
        assert by_path[0] in (before, "2") or (by_path[0] is None and may_be_gone)
        assert loaded[0] in (before, "2"), "who loads it finds a save"
        saved.append(loaded[0] == "2")
        save(folder, 3)
        assert seen(folder) == [["3", "3"]] * 2 and (folder / "other").exists() == old
        assert os.listdir(folder.parent) == ["run"], "what the killed one left is removed"
        if not was_killed:
            break
    assert n > 10 and not saved[0] and saved[-1] and saved == sorted(saved)


if __name__ == "__main__":
    if sys.argv[2] == "two-renames":
        output_swap.exchange = no_exchange
    for old in (False, True):
        every_kill(Path(sys.argv[1]), old, sys.argv[2] == "two-renames")
