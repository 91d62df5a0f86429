"""Saves that are killed before their n-th call of the operating system, for every n.

    python killed_saves.py FOLDER files|runs exchange|two-renames

`files`: a folder with two files, and a third that is somebody else's. `runs`: a run of kind
`perplexity`, whose run.json says how many windows the two tables have. After each kill the folder
is read, saved once more, and listed. A line of JSON says what was found.
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


def write_files(folder: Path, value: int) -> None:
    with writing_folder(folder) as made:
        for name in ("a", "b"):
            with made.writing(name, "t") as file:
                file.write(str(value))


def seen_files(folder: Path) -> list[list[int | None]]:
    """By path, as somebody does who knows no package; and as load_run reads them."""
    by_path = [(folder / n).read_text() if (folder / n).exists() else None for n in ("a", "b")]
    try:
        read: list[Any] = list(read_files(folder, "a", "b"))
    except FileNotFoundError:
        read = [None, None]
    return [[None if v is None else int(v) for v in each] for each in (by_path, read)]


def write_windows(folder: Path, value: int) -> None:
    """A run of so many windows, of two tokens each."""
    import numpy as np
    import pandas as pd

    from tests.unit.test_results import a_run
    from workbench.benchmarks.runs.results import SampleTable, write_run

    samples, of = SampleTable("r1"), np.repeat(np.arange(value), 2)
    for window in range(value):
        samples.add("engine", False, "pp2", window, np.array([5, 6]), np.array([1, 1]))
    tables = {"tokens.parquet": pd.DataFrame({"window": of})}
    write_run(folder, a_run(kind="perplexity", repetitions=value), samples.frame(), tables)


def seen_windows(folder: Path) -> list[list[int | None]]:
    import pandas as pd

    from workbench.benchmarks.runs.results import load_run
    from workbench.common.errors import UsageError

    if not (folder / "run.json").exists():
        by_path: list[Any] = [None] * 3
    else:
        by_path = [json.loads((folder / "run.json").read_text())["repetitions"]] + [
            pd.read_parquet(folder / name)[column].nunique()
            for name, column in (("samples.parquet", "repetition"), ("tokens.parquet", "window"))
        ]
    try:
        found = load_run(folder)
        read = [found.run["repetitions"], found.samples["repetition"].nunique()]
    except UsageError:
        read = [None, None]
    return [by_path, read]


KINDS = {"files": (write_files, seen_files), "runs": (write_windows, seen_windows)}


def main(root: Path, kind: str, swap: str) -> None:
    if swap == "two-renames":
        output_swap.exchange = no_exchange
    write, seen = KINDS[kind]
    n, was_killed, before = 0, True, 1
    while was_killed:
        parent = root / str(n)
        folder = parent / "run"
        for starts in ("new", "old"):
            if starts == "old":
                write(folder, before)
                (folder / OTHER).write_text("x")
            was_killed = killed(n, partial(write, folder, before + 1))
            after = seen(folder)
            write(folder, before + 2)
            print(
                json.dumps({
                    "n": n, "starts": starts, "killed": was_killed, "before": before,
                    "after": after, "next": seen(folder), "listed": sorted(os.listdir(parent)),
                    "other": (folder / OTHER).exists(),
                })
            )  # fmt: skip
        n += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
