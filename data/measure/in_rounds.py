"""The recorder of runs that `wb.ab` cannot make: a run folder that grows while arms take turns.

The kind of a run says what a repetition does. Arms, rounds, order and run folder are as in `wb.ab`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import workbench as wb
from workbench.benchmarks.compare import answers
from workbench.benchmarks.compare.arms import answer_between
from workbench.benchmarks.compare.rounds import interleave
from workbench.benchmarks.runs.draft import Draft, kept, new_arm, new_run
from workbench.benchmarks.times.gaps import CONTROL

Found = TypeVar("Found")


class Recording:
    """A run folder that grows by the turns of its arms.

    run: its run.json.
    arms: their names.
    result: the `result` of run.json.
    """

    def __init__(
        self,
        kind: str,
        out: Path,
        found: Mapping[str, Any],
        arms: Mapping[str, Mapping[str, str]],
        tests: Iterable[str],
        rounds: int,
        name: str = "",
        complete: Callable[[], Mapping[str, Any]] = dict,
    ):
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
        self,
        turn: Callable[[int, str], Found],
        rounds: Iterable[int] | None = None,
        whole: Callable[[int, dict[str, Found]], None] = lambda round_, found: None,
    ) -> None:
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
