"""Saves of two files that are killed before their n-th call of the operating system, for every n.

    python killed_saves.py FOLDER exchange|two-renames

A third file in the folder is somebody else's. After each kill the folder is read, saved once more,
and listed. A line of JSON says what was found.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from workbench.common import output_swap
from workbench.common.output import writing_folder
from workbench.common.output_swap import read_files

CALLS = ("open", "dup", "write", "close", "mkdir", "chmod", "rename", "link", "unlink", "rmdir")
OTHER = "timeline"


def no_exchange(*_: object) -> None:
    raise OSError(errno.EINVAL, "Invalid argument")


def killed(n: int, body: Callable[[], Any]) -> bool:
    """Runs the body in a child that is killed before call n; whether it got so far."""
    if (child := os.fork()) == 0:
        left = [n]

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return real(*arguments, **named)

            return call

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        output_swap.exchange = counted(output_swap.exchange)
        body()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def save(folder: Path, value: object, **how: Any) -> None:
    with writing_folder(folder, **how) as made:
        for name in ("a", "b"):
            with made.writing(name, "t") as file:
                file.write(str(value))


def seen(folder: Path) -> list[list[int | None]]:
    """By path, as somebody does who knows no package; and as load_run reads them."""
    by_path = [(folder / n).read_text() if (folder / n).exists() else None for n in ("a", "b")]
    try:
        read: list[Any] = list(read_files(folder, "a", "b"))
    except FileNotFoundError:
        read = [None, None]
    return [[None if v is None else int(v) for v in each] for each in (by_path, read)]


def main(root: Path, swap: str) -> None:
    if swap == "two-renames":
        output_swap.exchange = no_exchange
    n, was_killed = 0, True
    while was_killed:
        folder = root / str(n) / "run"
        for starts in ("new", "old"):
            if starts == "old":
                save(folder, 1)
                (folder / OTHER).write_text("x")
            was_killed = killed(n, partial(save, folder, 2))
            found = {"starts": starts, "killed": was_killed, "after": seen(folder)}
            save(folder, 3)
            found |= {"next": seen(folder), "listed": os.listdir(folder.parent)}
            print(json.dumps(found | {"other": (folder / OTHER).exists()}))
        n += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
