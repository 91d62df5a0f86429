"""The common part of the commands `python -m data.measure.NAME`: flags, runs that stay, and the
recorder of runs that `wb.ab` cannot make: a run folder that grows while arms take turns.

A command measures run folders, one after the other, and prints their tables. A folder that holds a
complete run of this commit stays, so a call that was cut off goes on where it ended.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from cyclopts import App, Parameter

import workbench as wb
from data.measure.session import ROOT, is_complete, model_file, parsed
from workbench.benchmarks.compare import answers
from workbench.benchmarks.compare.arms import answer_between
from workbench.benchmarks.compare.rounds import interleave
from workbench.benchmarks.runs.draft import Draft, kept, new_arm, new_run
from workbench.benchmarks.times.gaps import CONTROL
from workbench.common.errors import UsageError, WorkbenchError

RESULTS, MODELS = ROOT / "data" / "results", ROOT / "data" / "models"
PAD = 256  # the cells of a step are rounded up to a multiple of it
Found = TypeVar("Found")


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
        self, name: str, folder: Path, measure: Callable[[], None],
        shown: Callable[[Path], str] | None = None,
    ) -> None:  # fmt: skip
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


class Recording:
    """A run folder that grows by the turns of its arms; arms and rounds are as in `wb.ab`, and the
    kind of the run says what a repetition does. result: the `result` of run.json."""

    def __init__(
        self, kind: str, out: Path, found: Mapping[str, Any],
        arms: Mapping[str, Mapping[str, str]], tests: Iterable[str], rounds: int, name: str = "",
        complete: Callable[[], Mapping[str, Any]] = dict,
    ):  # fmt: skip
        """out: the run folder, which is emptied.
        found: what `provenance.collect` returned.
        arms: toggles by name, the baseline's first.
        name: of the run; by default its kind.
        complete: as for `Draft`.
        """
        shutil.rmtree(out, ignore_errors=True)
        made = [new_arm(arm, dict(toggles), arm.endswith(CONTROL)) for arm, toggles in arms.items()]
        self.run = new_run(kind, out.name, name or kind, found, made, list(tests), rounds, seed=0)
        self.arms, self.rounds = list(arms), rounds
        self.result: dict[str, Any] = self.run["result"]
        self.draft = Draft(self.run, out, complete)

    def arm(self, name: str) -> dict[str, Any]:
        """The record of an arm in run.json."""
        found: dict[str, Any] = self.run["arms"][self.arms.index(name)]
        return found

    def add(self, arm: str, test: str, round_: int, ns: Any, n_tokens: Any) -> None:
        """Adds a repetition: the ns of its parts, and the tokens of each part."""
        taken, n = np.rint(ns).astype(np.int64), np.array(n_tokens, np.int64)
        self.draft.samples.add(arm, arm.endswith(CONTROL), test, round_, taken, n)
        self.draft.checkpoint()

    def kept(self) -> AbstractContextManager[None]:
        """In the body the run is measured. At the end of the body the run is saved, also after an
        error."""
        return kept(self.draft, raises=True)

    def take(
        self, turn: Callable[[int, str], Found], rounds: Iterable[int] | None = None,
        whole: Callable[[int, dict[str, Found]], None] = lambda round_, found: None,
    ) -> None:  # fmt: skip
        """Calls turn(round, arm) for every arm in every round. rounds: by default all. whole(round,
        found) is called after each round with what each arm's turn returned."""

        def ended(round_: int, found: dict[int, Found]) -> None:
            if rounds is not None:
                self.run["repetitions"] = round_ + 1
            whole(round_, {self.arms[i]: found[i] for i in sorted(found)})

        wanted = range(self.rounds) if rounds is None else rounds
        interleave(wanted, len(self.arms), lambda round_, i: turn(round_, self.arms[i]), ended)


def same_answers(engines: Mapping[str, wb.Engine], seed: int) -> dict[str, Any]:
    """The answers of each arm's engine beside the first engine's, by arm. The last engine is the
    first arm's control; its name is `A/A`."""
    first, *others = engines.values()
    kinds = [answer_between(first.toggles, other.toggles) for other in others]
    found = answers.compare_engines([first, *others], kinds, seed)
    names = [*list(engines)[1:-1], "A/A"]
    return {name: answer.to_dict() for name, answer in zip(names, found, strict=True)}
