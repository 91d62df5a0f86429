"""The cells of a sweep, their keys, and which of them are measured together.

A cell has a key: a hash of the model's content, the test, the engine's settings, the toggles and
the seed. The key depends neither on the order of axes nor on other cells. So a sweep that is
resumed, or that gets more values, finds the cells that it has.

Cells that differ in their toggles alone are measured together, as the arms of a comparison:
interleaved in rounds, with an A/A control. The first is the baseline. Other cells need an engine
with other settings, so they come one after the other.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from workbench.benchmarks.compare.arms import Arm, ComparisonSpec, answer_between
from workbench.benchmarks.workload import Workload
from workbench.config import EXACT, EngineConfig, TogglePreset, Toggles

MOST_TOGETHER = 6  # engines of a comparison, beside its A/A control: each has a cache of its own
KEY_DIGITS = 16
FIRST = ("model", "test")  # the axes that name a cell without saying what they are


class LeftOut(NamedTuple):
    """A cell that is not measured. axes: its value of each axis."""

    axes: dict[str, Any]
    reason: str


class Cell(NamedTuple):
    """One place in a matrix.

    axes: its value of each axis, for tables.
    path: the model's file.
    workload: the test, with depth and sequences.
    config: the engine's settings, with a context and sequences that hold the test.
    wanted: the toggles, with `best` not resolved yet.
    """

    axes: dict[str, Any]
    path: Path
    workload: Workload
    config: EngineConfig
    wanted: TogglePreset

    def key(self, model_hash: str, seed: int) -> str:
        """16 hex digits, the same for the same measurement. model_hash: of `gguf.model_hash`."""
        toggles = _toggles_key(self.wanted)
        return _hash([model_hash, self.workload.name, self.config.to_dict(), toggles, seed])

    def words(self, varying: Collection[str] = ()) -> str:
        """Its values as text: `tiny-llama-Q8_0 tg8 sync=packed n_ubatch=128`. varying: of the axes
        but the model and the test only these."""
        rest = [f"{k}={v}" for k, v in self.axes.items() if k not in FIRST and k in varying]
        return " ".join([str(self.axes[name]) for name in FIRST] + rest)

    def arm_name(self, varying: Collection[str]) -> str:
        """What tells it from the cells measured with it. varying: axes with several values."""
        own = [f"{k}={v}" for k, v in self.axes.items() if k in varying and k in _OF_TOGGLES]
        return " ".join(own) or "engine"


_OF_TOGGLES = ("preset", "set", "fuse", "redo", *Toggles.names())


class CellGroup(NamedTuple):
    """Cells that are measured together, and their keys. The first cell is the baseline."""

    keys: tuple[str, ...]
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        """The name of its folder: a hash of its keys, in order."""
        return _hash(list(self.keys))

    @property
    def n_arms(self) -> int:
        """How many engines are measured, the A/A control included."""
        return len(self.cells) + (len(self.cells) > 1)

    def spec(
        self, resolve: Callable[[TogglePreset], Toggles], varying: Iterable[str]
    ) -> ComparisonSpec:
        """The comparison of its cells. resolve: the toggles of a preset on the device."""
        varying = set(varying)
        names = [cell.arm_name(varying) for cell in self.cells]
        every = [resolve(cell.wanted) for cell in self.cells]
        arms = [Arm(name, made, False, answer_between(every[0], made))
                for name, made in zip(names, every, strict=True)]  # fmt: skip
        control = Arm(f"{names[0]} (A/A)", every[0], True, EXACT)
        return ComparisonSpec(" | ".join(names), "", [*arms, control], [self.cells[0].workload])


def grouped(
    cells: Mapping[str, Cell], found: Collection[str] = (), most: int = MOST_TOGETHER
) -> list[CellGroup]:
    """The groups in which the cells that are not in `found` are measured, in order.

    cells: by key. most: how many cells a group has. Where cells that belong together are more, or
    some of them are found already, each further group begins with the baseline again.
    """
    alike: dict[Any, list[str]] = {}
    for key, cell in cells.items():
        alike.setdefault((cell.path, cell.config, cell.workload), []).append(key)
    groups = list[tuple[str, ...]]()
    for first, *others in alike.values():
        missing = [key for key in others if key not in found]
        if first not in found and not missing:
            groups.append((first,))
        for begin in range(0, len(missing), max(1, most - 1)):
            groups.append((first, *missing[begin : begin + max(1, most - 1)]))
    return [CellGroup(keys, tuple(cells[key] for key in keys)) for keys in groups]


@functools.lru_cache(maxsize=4096)
def _toggles_key(wanted: TogglePreset) -> str:
    """What a cell's key has of its toggles. Those of a preset that no device has to resolve count
    by their values: equal toggles are one cell, however they were named."""
    if wanted.of_device:
        return _hash([wanted.name, dict(wanted.changes), wanted.n_seqs])
    return _hash(wanted.toggles().to_dict())


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]
