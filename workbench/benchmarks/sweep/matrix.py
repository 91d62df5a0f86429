"""What a sweep measures: axes, their product, and the cells that are left out. Pure data.

    models x tests x n_depth x n_parallel x engine settings x presets x sets x toggles

An axis has values. A *cell* has one value of each axis. A cell that can never be measured (two
toggles that clash, a test that has a depth and several sequences) is left out with the reason, and
so is a cell that an exclusion names. A matrix that is wrong altogether (an axis that does not
exist, an axis without a value) raises UsageError before anything is opened.
"""

from __future__ import annotations

import functools
import itertools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from workbench.benchmarks.sweep.cells import Cell, LeftOut
from workbench.benchmarks.workload import parse_tests
from workbench.common import devices
from workbench.common.errors import UsageError
from workbench.common.nearest import choices
from workbench.common.paths import path_of
from workbench.config import BASELINE, BEST, EngineConfig, TogglePreset, Toggles, parse_changes
from workbench.config.table import FAMILIES
from workbench.config.toggles import as_value, no_setting

MODEL, TEST, DEPTH, PARALLEL, PRESET, SET = (
    "model", "test", "n_depth", "n_parallel", "preset", "set",
)  # fmt: skip
SETTINGS = {f.name: f.default for f in fields(EngineConfig)}
_SWITCHES = (*FAMILIES, *Toggles.names())
AXES = (MODEL, TEST, DEPTH, PARALLEL, *SETTINGS, PRESET, SET, *_SWITCHES)
MOST_CELLS = 100_000  # of a product: more take days at a second each
Rule = Mapping[str, Any]  # of an exclusion: axis -> a value, or several
# keys of a TOML file outside of the tables `toggles` and `engine`: the argument of `matrix_of`
KEYS = ("models", "tests", "n_depth", "n_parallel", "presets", "sets", "exclude")
NUMBERS = {"repetitions": 5, "seed": 0}


@dataclass(frozen=True)
class Matrix:
    """A sweep as it was asked for; `matrix_of` makes it.

    axes: the values of each axis, in order. `model` has paths.
    exclude: each leaves out the cells that have all its values.
    repetitions: of every cell.
    seed: of everything that is drawn.
    """

    axes: dict[str, tuple[Any, ...]]
    exclude: tuple[dict[str, tuple[str, ...]], ...] = ()
    repetitions: int = 5
    seed: int = 0

    @property
    def varying(self) -> list[str]:
        """The axes with several values."""
        return [name for name, values in self.axes.items() if len(values) > 1]

    def cells(self) -> tuple[list[Cell], list[LeftOut]]:
        """The cells in order, the first axis slowest; and those left out, each with the reason.

        Raises UsageError where no cell is left.
        """
        kept, left_out = list[Cell](), list[LeftOut]()
        for values in itertools.product(*self.axes.values()):
            given = dict(zip(self.axes, values, strict=True))
            shown = given | {MODEL: Path(given[MODEL]).stem}
            try:
                if rule := self._rule_for(shown):
                    raise UsageError(f"excluded by {rule}")
                kept.append(_cell(given, shown))
            except UsageError as error:
                left_out.append(LeftOut(shown, str(error)))
        if not kept:
            raise UsageError(
                f"the matrix has no cell: {len(left_out)} of {len(left_out)} are left out, the "
                f"first because: {left_out[0].reason}"
            )
        return kept, left_out

    def _rule_for(self, shown: Mapping[str, Any]) -> str:
        """The first exclusion that names this cell, in words; empty where none does."""
        for rule in self.exclude:
            if all(str(shown[axis]) in values for axis, values in rule.items()):
                return " ".join(f"{axis}={','.join(values)}" for axis, values in rule.items())
        return ""


def _cell(given: Mapping[str, Any], shown: dict[str, Any]) -> Cell:
    """The cell with these values. Raises UsageError where it can never be measured."""
    workload = parse_tests(given[TEST])[0]
    depth, parallel = given.get(DEPTH, 0), given.get(PARALLEL, 0)
    if depth and parallel > 1:
        raise UsageError(
            f"a depth is filled for one sequence alone; n_depth={depth} with "
            f"n_parallel={parallel} is no test"
        )
    if depth:  # one sequence is a test as without n_parallel
        workload = workload._replace(n_depth=depth)
    elif parallel:
        workload = workload._replace(n_seqs=parallel)
    settings = {name: given[name] for name in SETTINGS if name in given}
    config = EngineConfig(**settings)
    config = replace(config, n_seqs=max(config.n_seqs, workload.width))
    if "n_ctx" not in settings:  # then as long as the test needs, with cells of any kind
        config = replace(config, n_ctx=max(config.n_ctx, workload.n_ctx(config.n_seqs)))
    changes = {name: given[name] for name in (*FAMILIES, *Toggles.names()) if name in given}
    for name, value in parse_changes(given.get(SET, "")).items():
        if changes.get(name, value) != value:
            raise UsageError(f"set {given[SET]!r} has another {name} than {name}={changes[name]}")
        changes[name] = value
    wanted = _wanted(given.get(PRESET, BEST), tuple(changes.items()), workload.width)
    return Cell(shown, Path(given[MODEL]), workload, config, wanted)


@functools.lru_cache(maxsize=4096)
def _wanted(preset: str, changes: tuple[tuple[str, str], ...], n_seqs: int) -> TogglePreset:
    """The toggles of a cell; many cells have the same. Raises UsageError where they clash."""
    made = TogglePreset(preset, dict(changes))
    # `best` has its values once a device is known; a clash of two changes is known now
    (TogglePreset(BASELINE, dict(changes)) if made.of_device else made).toggles()
    return made.for_sequences(n_seqs) if made.of_device else made


# from what a person gives -------------------------------------------------------------------------


def matrix_of(
    models: Any,
    tests: Any = "tg32",
    *,
    toggles: Mapping[str, Any] | str | None = None,
    sets: Any = (),
    presets: Any = BEST,
    n_depth: Any = (),
    n_parallel: Any = (),
    engine: Mapping[str, Any] | None = None,
    exclude: Any = (),
    repetitions: int = 5,
    seed: int = 0,
) -> Matrix:
    """The matrix of these axes. A single value stands for a list of one. A text with commas stands
    for a list of tests, of presets, or of values of a toggle.

    Raises UsageError, with one line, for an axis or a value that does not exist, for an axis
    without a value or with a value twice, and for two models of one name.
    """
    axes: dict[str, tuple[Any, ...]] = {}

    def add(name: str, values: Any, kind: type = str) -> None:
        found = tuple(several(values))
        if not found:
            raise UsageError(f"{name} has no value, so the matrix has no cell; give one or more")
        for value in found:
            if type(value) is not kind:
                raise UsageError(f"{name}={value!r} is no {_KINDS[kind]}")
        _check_once(name, found)
        axes[name] = found

    add(MODEL, [str(path_of(path, "the path of a GGUF file")) for path in several(models)])
    named = list(filter(None, _split(tests)))
    _check_once(TEST, named)
    add(TEST, [workload.name for workload in parse_tests(named)])
    for name, numbers in ((DEPTH, n_depth), (PARALLEL, n_parallel)):
        if several(numbers):
            add(name, numbers, int)
            least = 0 if name == DEPTH else 1
            if low := [n for n in axes[name] if n < least]:
                raise UsageError(f"{name}={low[0]} must be {least} or more")
    for name in (engine := dict(engine or {})):
        if name in (*FAMILIES, *Toggles.names()):
            raise UsageError(no_setting(name, engine[name]))
        if name not in SETTINGS:
            raise UsageError(f"axis {name!r} does not exist; {choices(name, SETTINGS)}")
    for name in (n for n in SETTINGS if n in engine):
        if name == "override_tensor":  # a list is its one value
            axes[name] = (tuple(several(engine[name])),)
        else:
            add(name, engine[name], type(SETTINGS[name]))
        for value in axes[name]:
            EngineConfig(**{name: value})
    for device in axes.get("device", ()):
        if not devices.computes(device):
            raise UsageError(f"device {device!r} computes nothing: it has no times; name another")
    add(PRESET, _split(presets))
    for preset in axes[PRESET]:
        TogglePreset(preset)
    if several(sets):
        add(SET, sets)
        for text in axes[SET]:
            TogglePreset(BASELINE, parse_changes(text))
    if isinstance(toggles, str):
        toggles = parse_changes(toggles)
    for name, values in (toggles or {}).items():
        known = Toggles.values(name)
        add(name, [as_value(name, value, known) for value in _split(values)])
    _check(axes)
    if repetitions < 1:
        raise UsageError(f"repetitions={repetitions}: give 1 or more")
    if seed < 0:
        raise UsageError(f"seed={seed} must be 0 or more")
    return Matrix(axes, tuple(_rules(exclude, axes)), repetitions, seed)


_KINDS = {int: "whole number", str: "text", bool: "true or false"}


def several(values: Any) -> list[Any]:
    """A list of values; a single value is a list of one."""
    if isinstance(values, str | Path) or not isinstance(values, Iterable):
        return [values]
    return list(values)


def _split(values: Any) -> list[Any]:
    """Tests, presets, or values of a toggle; a text may have several, as `pp64,tg32`."""
    found = list[Any]()
    for value in several(values):
        found += map(str.strip, value.split(",")) if isinstance(value, str) else [value]
    return found


def _check_once(name: str, values: Sequence[Any]) -> None:
    if twice := [value for n, value in enumerate(values) if value in values[:n]]:
        raise UsageError(f"{name} has {twice[0]} twice; give each value once")


def _check(axes: Mapping[str, Sequence[Any]]) -> None:
    """Raises UsageError for axes that contradict each other, and for far too many cells."""
    names = [Path(model).stem for model in axes[MODEL]]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two models have the name {twice[0]}; copy or rename a file")
    if axes.get(DEPTH, (0,)) != (0,) or PARALLEL in axes:
        for workload in parse_tests(list(axes[TEST])):
            if workload.n_depth or workload.n_seqs:
                raise UsageError(
                    f"test {workload.name} has a depth or sequences of its own; leave n_depth and "
                    f"n_parallel out, or name it without"
                )
    n = 1
    for values in axes.values():
        n *= len(values)
    if n > MOST_CELLS:
        raise UsageError(f"the matrix has {n:,} cells, and {MOST_CELLS:,} are the most; give fewer")


_WRITE_RULE = "write it as 'sync=packed n_ubatch=128'"


def _rules(exclude: Any, axes: Mapping[str, Sequence[Any]]) -> Iterable[dict[str, tuple[str, ...]]]:
    """The exclusions, each as the values of its axes. Raises UsageError for an axis that the matrix
    does not have, for a value that no cell has, and for what is neither a text nor a mapping."""
    for one in [exclude] if isinstance(exclude, Mapping) else several(exclude):
        if not isinstance(one, str | Mapping):
            raise UsageError(f"exclude={one!r} is no exclusion; {_WRITE_RULE}")
        rule = dict(_pair(part) for part in one.split()) if isinstance(one, str) else dict(one)
        if not rule:
            raise UsageError(f"an exclusion names no axis; {_WRITE_RULE}")
        made = {}
        for axis, values in rule.items():
            if axis not in axes:
                raise UsageError(f"no cell has an axis {axis!r} to exclude; {choices(axis, axes)}")
            own = [Path(v).stem if axis == MODEL else str(v) for v in axes[axis]]
            made[axis] = tuple(_said(v, axis) for v in several(values))
            for value in made[axis]:
                if value not in own:
                    raise UsageError(
                        f"exclusion {axis}={value}: no cell has it; {axis} is {', '.join(own)}"
                    )
        yield made


def _pair(part: str) -> tuple[str, list[str]]:
    axis, equals, values = part.partition("=")
    if not equals:
        raise UsageError(f"exclusion {part!r} has no value; write it as {axis}=VALUE")
    return axis, values.split(",")


def _said(value: Any, axis: str) -> str:
    """A value of an exclusion as text. A model is named as a path, or as the frame names it."""
    return Path(str(value)).name.removesuffix(".gguf") if axis == MODEL else str(value)


# from a file --------------------------------------------------------------------------------------


def read_matrix(path: str | Path) -> dict[str, Any]:
    """The arguments of `matrix_of` that a TOML file gives.

    Its keys: models, tests, n_depth, n_parallel, presets, sets, repetitions, seed; the tables
    [toggles] and [engine], an axis a line; and exclude, a list of texts or of tables. Paths of
    models start where the command does. Raises UsageError, in one line, for a file that cannot be
    read, for one that is no TOML, and for an unknown key.
    """
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; name a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML file: {str(error).splitlines()[0]}") from error
    known = (*KEYS, *NUMBERS, "toggles", "engine")
    for name, value in found.items():
        table = "engine" if name in SETTINGS else "toggles" if name in _SWITCHES else ""
        if table and name not in known:
            raise UsageError(f"{path}: {name} belongs in a table; write it below a line [{table}]")
        if name not in known:
            raise UsageError(f"{path}: key {name!r} does not exist; {choices(name, known)}")
        if name in ("toggles", "engine") and not isinstance(value, dict):
            raise UsageError(f"{path}: {name} must be a table, as [{name}]")
        if name in NUMBERS and type(value) is not int:
            raise UsageError(f"{path}: {name}={value!r} is no whole number")
    return found
