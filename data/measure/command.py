"""The common part of the commands `python -m data.measure.NAME`: flags, runs that stay, errors.

A command measures run folders, one after the other, and prints their tables. A folder that holds a
complete run of this commit stays, so a call that was cut off goes on where it ended.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cyclopts import App, Parameter

from data.measure.session import is_complete, model_file, parsed
from workbench.common.errors import UsageError, WorkbenchError

ROOT = Path(__file__).resolve().parents[2]
RESULTS, MODELS = ROOT / "data" / "results", ROOT / "data" / "models"
PAD = 256  # the cells of a step are rounded up to a multiple of it


@Parameter(name="*")
@dataclass(frozen=True)
class Options:
    """The flags of every command.

    Parameters
    ----------
    device: cuda, embedded or host.
    out: folder for the run folders; default: the command's folder in data/results.
    files: folder with model files; a missing file is written there.
    again: measure runs again that are there already.
    at_most_s: after so many seconds no run begins, and no round except a run's first.
    """

    device: str = "cuda"
    out: Path | None = None
    files: Path = MODELS
    again: bool = False
    at_most_s: float = math.inf


USUAL = Options()


class Call:
    """One call of a command.

    out: folder for its run folders.
    """

    def __init__(self, folder: str, options: Options):
        """folder: name of the command's folder in data/results."""
        self.options, self.out = options, options.out or RESULTS / folder
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    @property
    def late(self) -> bool:
        return self.seconds > self.options.at_most_s

    def model_file(self, model: str) -> Path:
        """The file of a model by its name in folders. A missing file is written."""
        return model_file(*parsed(model), self.options.files)

    def rounds(self, n: int) -> Iterator[int]:
        """The rounds 0 to n - 1. After the first, none begins once the time is over."""
        for round_ in range(n):
            if round_ and self.late:
                return
            yield round_

    def make(
        self,
        name: str,
        folder: Path,
        measure: Callable[[], None],
        shown: Callable[[Path], str] | None = None,
    ) -> None:
        """Measures a run into `folder`, and prints what `shown` says of it and the seconds it took.
        A run that is there already is left, and so is a run for which no time is left; a line says
        so."""
        if is_complete(folder) and not self.options.again:
            print(f"{name}: there already, of this commit", flush=True)
        elif self.late:
            print(f"{name}: left, {self.options.at_most_s:.0f} s are over; call again", flush=True)
        else:
            begun = time.monotonic()
            measure()
            if shown is not None:
                print(shown(folder), flush=True)
            print(f"== {name}: {time.monotonic() - begun:.1f} s", flush=True)


def numbers(flag: str, text: str) -> list[int]:
    """`1,8,32` as numbers. Raises UsageError for anything else."""
    try:
        return [int(n) for n in text.split(",")]
    except ValueError:
        raise UsageError(f"{flag} {text}: give numbers with commas between them") from None


def at_least_one(*values: int, flags: str) -> None:
    """Raises UsageError where a value is below 1. flags: their names, for the message."""
    if min(values) < 1:
        raise UsageError(f"{flags} are 1 or more")


def start(app: App) -> None:
    """Runs a command. An error ends it with one line, Ctrl-C with exit status 130."""
    try:
        app()
    except (RuntimeError, WorkbenchError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
