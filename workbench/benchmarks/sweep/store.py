"""The folder of a sweep: what was asked for, and a run folder for each group of cells.

    OUT/sweep.json          axes, cells by key, cells left out, groups: which cells are in each
    OUT/groups/NAME/        a run folder of kind `ab` or `bench` (`measured.py`)

`sweep.json` is written before a group begins, and says nothing about whether a group is finished:
its run folder does. Each file appears whole (`common/output.py`). So a process may be killed at any
time. A finished group is found and not measured again. An unfinished group goes on from its last
save, which is at most 10 s old.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from workbench.benchmarks.runs import provenance, results
from workbench.benchmarks.runs.nameless import portable
from workbench.benchmarks.runs.results import GROUPS, SWEEP_JSON
from workbench.benchmarks.sweep.cells import Cell, CellGroup, LeftOut
from workbench.benchmarks.sweep.matrix import MODEL, Matrix
from workbench.common.errors import UsageError
from workbench.common.output import check_folder, write_text
from workbench.common.progress import note


class SweepRecord(NamedTuple):
    """`sweep.json`.

    axes: the values of each axis; a model is the name of its file.
    cells: the axes of each cell, by key, in the order of the matrix.
    left_out: the cells that are not measured, with the reason.
    failed: why a cell's measuring failed, by key.
    groups: the keys of each group's cells, by the group's name, in the order in which they began.
    repetitions, seed: as asked for.
    commit: of the sources that measured it.
    """

    axes: dict[str, list[Any]]
    cells: dict[str, dict[str, Any]]
    left_out: list[LeftOut]
    failed: dict[str, str]
    groups: dict[str, list[str]]
    repetitions: int
    seed: int
    commit: dict[str, Any]

    @classmethod
    def of(
        cls, matrix: Matrix, cells: Mapping[str, Cell], left_out: Iterable[LeftOut]
    ) -> SweepRecord:
        """The record of a sweep that begins."""
        axes = {name: list(values) for name, values in matrix.axes.items()}
        axes[MODEL] = [Path(path).stem for path in axes[MODEL]]
        return cls(
            axes, {key: cell.axes for key, cell in cells.items()}, list(left_out), {}, {},
            matrix.repetitions, matrix.seed, provenance.commit(),
        )  # fmt: skip


def _maps(kind: type) -> Callable[[Any], bool]:
    return lambda made: isinstance(made, dict) and all(isinstance(v, kind) for v in made.values())


# whether a part of sweep.json is what `SweepRecord` says
HOLDS: dict[str, Callable[[Any], bool]] = {
    "axes": _maps(list), "cells": _maps(dict), "failed": _maps(str), "groups": _maps(list),
    "commit": lambda made: isinstance(made, dict) and "hash" in made,
    "repetitions": lambda made: type(made) is int and made >= 1,
    "seed": lambda made: type(made) is int and made >= 0,
}  # fmt: skip


class FoundGroup(NamedTuple):
    """A group's run folder as read. keys: of its arms in order, without the A/A control."""

    name: str
    keys: list[str]
    run: results.Run

    @property
    def complete(self) -> bool:
        return bool(self.run.run["status"] == results.COMPLETE)

    @property
    def seconds(self) -> float:
        """How long a repetition of an arm took, warm-up and logits included."""
        run = self.run.run
        return float(run["duration_s"]) / (len(run["arms"]) * max(1, run["repetitions"]))


class SweepFolder:
    """The folder of a sweep on disk."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def group(self, name: str) -> Path:
        """The run folder of a group."""
        return self.path / GROUPS / name

    def write(self, record: SweepRecord) -> None:
        content: dict[str, Any] = {
            "schema": results.TOGETHER_SCHEMAS[SWEEP_JSON]
        } | record._asdict()
        content["left_out"] = [one._asdict() for one in record.left_out]
        text = json.dumps(portable(content), indent=1, ensure_ascii=False) + "\n"
        write_text(self.path / SWEEP_JSON, text, parents=True)

    def read(self) -> SweepRecord:
        """Raises UsageError, in one line, where the folder holds no sweep that can be read."""
        found = results.read_together(self.path, SWEEP_JSON, "sweep")
        try:
            made = SweepRecord(**{name: found[name] for name in SweepRecord._fields})
            left_out = [LeftOut(one["axes"], one["reason"]) for one in found["left_out"]]
        except (KeyError, TypeError) as error:
            raise UsageError(f"{self.path}: {SWEEP_JSON} has no valid {error}") from error
        for name, holds in HOLDS.items():
            if not holds(getattr(made, name)):
                raise UsageError(f"{self.path}: {SWEEP_JSON} has no valid {name!r}")
        return made._replace(left_out=left_out)

    def found(self, record: SweepRecord) -> Iterator[FoundGroup]:
        """The groups that have a run folder, in the order in which they began."""
        for name, keys in record.groups.items():
            if self.group(name).exists():
                yield FoundGroup(name, keys, results.load_run(self.group(name)))

    def begin(self, record: SweepRecord, resume: bool) -> tuple[SweepRecord, list[FoundGroup]]:
        """The record to go on with, and the groups that have a run folder.

        With `resume` a folder may be missing or empty, as a kill before the first group leaves it.
        Raises UsageError for a folder that exists without `resume`, and for a folder of anything
        else, or measured with other sources, another seed or other repetitions.
        """
        there = self.path.exists()
        if not resume or not there or (self.path.is_dir() and not any(self.path.iterdir())):
            check_folder(self.path)
            if resume:
                note(f"nothing of the sweep is in {self.path} yet: it begins")
            elif there:
                raise UsageError(f"{self.path} exists already; resume it, or choose another folder")
            return record, []
        old = self.read()
        for name, was, now in (
            ("seed", old.seed, record.seed), ("repetitions", old.repetitions, record.repetitions),
            ("commit", old.commit.get("hash"), record.commit.get("hash")),
        ):  # fmt: skip
            if was != now:
                raise UsageError(
                    f"{self.path} cannot be resumed: its {name} is {was}, and now it would be {now}"
                )
        going = record._replace(groups=dict(old.groups))
        return going, list(self.found(going))

    def add(self, record: SweepRecord, groups: Iterable[CellGroup]) -> SweepRecord:
        """The record with these groups, written."""
        made = record._replace(
            groups=record.groups | {group.name: list(group.keys) for group in groups}
        )
        self.write(made)
        return made


def write_group(folder: Path, run: dict[str, Any], samples: pd.DataFrame) -> None:
    """Writes a group that another process measured. A group that is there already stays."""
    if not folder.exists():
        results.write_run(folder, run, samples, new=True)
