"""`wb.sweep`: a matrix of cells, measured group by group, resumed after any end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from workbench.backend.base import choose_device
from workbench.benchmarks.compare import pace
from workbench.benchmarks.compare.arms import IdleToggles
from workbench.benchmarks.energy.windows import EnergyAsked
from workbench.benchmarks.runs import results
from workbench.benchmarks.sweep.cells import Cell, CellGroup, LeftOut, grouped
from workbench.benchmarks.sweep.expected import (
    CALIBRATED,
    EARLIER,
    Expected,
    calibrated,
    expected,
    from_earlier,
)
from workbench.benchmarks.sweep.matrix import MODEL, Matrix, matrix_of, read_matrix, several
from workbench.benchmarks.sweep.measured import OneEngine, measure_group, refusals
from workbench.benchmarks.sweep.result import Sweep
from workbench.benchmarks.sweep.scheduler import Workers, workers_of
from workbench.benchmarks.sweep.store import FoundGroup, SweepFolder, SweepRecord, write_group
from workbench.common.devices import AUTO
from workbench.common.errors import UsageError, WorkbenchError
from workbench.common.progress import duration, note
from workbench.engine.load import model_for
from workbench.model.gguf.file import model_hash


def sweep(
    models: str | Path | Sequence[str | Path] | None = None,
    tests: str | Sequence[str] | None = None,
    *,
    toggles: Mapping[str, str | Sequence[str]] | str | None = None,
    sets: str | Sequence[str] | None = None,
    presets: str | Sequence[str] | None = None,
    n_depth: int | Sequence[int] | None = None,
    n_parallel: int | Sequence[int] | None = None,
    exclude: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    repetitions: int | None = None,
    seed: int | None = None,
    matrix: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    dry_run: bool = False,
    calibrate: bool = False,
    scheduler: str | None = None,
    energy: EnergyAsked = False,
    **engine: Any,
) -> Sweep:
    """Measures every cell of a matrix: models x tests x depths x sequences x settings x toggles.

    models: GGUF files; `auto` is tiny on a CPU and a real shape on a GPU, as in `Engine.load`.
    tests: llama-bench's names, as `["pp512", "tg128"]`; default tg32.
    toggles: values of toggles or families, as `{"sync": ["per_copy", "packed"]}`, or as the command
        takes them, `{"sync": "per_copy,packed"}`.
    sets: toggles that go together, as `["", "plans=ours plan_scope=step sync=packed_implicit"]`;
        an axis of its own.
    presets: where toggles begin; default `best`.
    n_depth: cells filled before a test (tg32 becomes tg32@d4096).
    n_parallel: sequences computed together (pp16+tg32 becomes pp16+tg32@b8).
    engine: fields of EngineConfig, each a value or a list: `n_ubatch=[128, 512], threads=[1, 2]`.
        n_ctx is as long as each test needs, unless it is given.
    exclude: cells to leave out, as `"sync=packed n_ubatch=128"` or `{"sync": ["packed"], ...}`.
    repetitions: of every cell; default 5. Below 5 no cell has a verdict.
    seed: of the random tokens, and of the intervals; default 0.
    matrix: a TOML file with any of these (`read_matrix`); arguments win over the file.
    out: the folder of the sweep; default: a new one in data/runs.
    resume: go on with the sweep in `out`, or begin it where nothing of it is there yet. Finished
        cells are found by their keys, whatever else the matrix has now. A sweep may be killed at
        any time.
    dry_run: nothing is measured; `Sweep.expected` says how many cells there are and how long they
        take. calibrate: a repetition of each test is timed for that.
    scheduler: the address of a dask.distributed scheduler (`scheduler.py`).
    energy: count joules a token of every cell, too, as `wb.ab` does.

    Interleaved are cells that differ in toggles alone: up to 6 at once on one loaded model, in
    rounds, with the first as the baseline and an A/A control. They have a speedup, a verdict and
    an answer. More than 6 are several comparisons, each with the baseline again. Cells that differ
    in model, test, depth, sequences or settings are measured one after the other. A difference
    between those may be a drift of the machine.

    Cells that cannot be measured (clashing toggles, a value that the device cannot honour, a test
    that does not fit) are left out; the result lists them with the reason.

    Returns a `Sweep`: `to_frame` has a row for each cell, `pivot` a table of two axes, `plot` a
    picture. `wb.load(out)` reads it again. Ctrl-C keeps what is finished, and the result says so.
    Raises UsageError for a matrix that is wrong altogether, and ModelFileError for a file that
    cannot be believed, before anything is measured.
    """
    given = {
        "models": models, "tests": tests, "toggles": toggles, "sets": sets, "presets": presets,
        "n_depth": n_depth, "n_parallel": n_parallel, "exclude": exclude,
        "repetitions": repetitions, "seed": seed, "engine": engine or None,
    }  # fmt: skip
    if resume and out is None:
        raise UsageError("a sweep is resumed in its folder; name that, as out= (--out)")
    made = _asked(matrix, {name: value for name, value in given.items() if value is not None})
    folder = SweepFolder(out or results.new_run_folder(name="sweep"))
    under_way = _UnderWay(made, folder, resume, energy)
    with _workers(scheduler) as workers:
        under_way.look(workers)
        if dry_run:
            return under_way.dry(calibrate)
        if workers is None:
            under_way.measure_here()
        else:
            under_way.measure_on(workers)
    return under_way.result()


def _asked(path: str | Path | None, given: dict[str, Any]) -> Matrix:
    """The matrix of a file and of arguments, which win. An axis of the tables is replaced alone. A
    refusal that is not of the arguments alone names the file."""
    found = {} if path is None else read_matrix(path)
    for name, value in given.items():
        table = name in ("toggles", "engine") and name in found
        found[name] = found[name] | dict(value) if table else value
    if "models" not in found:
        raise UsageError(
            "the matrix has no model; give a GGUF file, or auto (-m auto in the command); a sweep "
            "is resumed with the matrix that it was begun with"
        )
    if AUTO in several(found["models"]):
        auto = _auto(several((found.get("engine") or {}).get("device", AUTO)))
        found["models"] = [auto if one == AUTO else one for one in several(found["models"])]
    try:
        return matrix_of(**found)
    except UsageError as error:
        if path is None or str(error) == _refusal(given):
            raise
        raise UsageError(f"{path}: {error}") from None


def _refusal(given: Mapping[str, Any]) -> str:
    """Why these arguments, with any model where they name none, are no matrix; empty where they are
    one."""
    try:
        matrix_of(**{"models": "any.gguf", **given})
    except UsageError as error:
        return str(error)
    return ""


def _auto(devices: Sequence[str]) -> Path:
    """The file of the model `auto`, as `Engine.load` has it."""
    if len(devices) > 1:
        raise UsageError(
            f"model auto follows from the device, and there are {', '.join(devices)}; name a GGUF "
            "file"
        )
    return model_for(choose_device(devices[0])[0])


@contextmanager
def _workers(scheduler: str | None) -> Iterator[Workers | None]:
    if scheduler is None:
        yield None
        return
    with workers_of(scheduler) as workers:
        yield workers


class _UnderWay:
    """A sweep while it is measured."""

    def __init__(
        self, matrix: Matrix, folder: SweepFolder, resume: bool, energy: EnergyAsked = False
    ):
        self.matrix, self.folder, self.energy = matrix, folder, energy
        hashes = {path: model_hash(path) for path in matrix.axes[MODEL]}
        cells, left_out = matrix.cells()
        self.cells: dict[str, Cell] = {}
        for cell in cells:
            key = cell.key(hashes[str(cell.path)], matrix.seed)
            if key in self.cells:
                same = self.cells[key].words(matrix.varying)
                left_out.append(LeftOut(cell.axes, f"the same toggles as in {same}"))
            else:
                self.cells[key] = cell
        record = SweepRecord.of(matrix, self.cells, left_out)
        self.record, self.found = folder.begin(record, resume)
        self.groups: list[CellGroup] = []
        self.missing: set[str] = set()
        self.interrupted = False

    def look(self, workers: Workers | None) -> None:
        """Finds the cells that are missing, and leaves out those that the device refuses. Raises
        UsageError where the device refuses all."""
        complete = {key for group in self.found if group.complete for key in group.keys}
        ask = {key: cell for key, cell in self.cells.items() if key not in complete}
        asked = workers.refusals if workers is not None else refusals
        refused = asked(ask, self.energy)
        for key, reason in refused.items():
            self.record.left_out.append(LeftOut(self.cells.pop(key).axes, reason))
            del self.record.cells[key]
        if not self.cells:
            raise UsageError(
                f"every cell is left out, the first because: {next(iter(refused.values()))}"
            )
        self.missing = set(self.cells) - complete
        self.groups = grouped(self.cells, complete)

    def dry(self, calibrate: bool) -> Sweep:
        """The result with nothing measured, and nothing written."""
        known, by = from_earlier(self.found), EARLIER
        if calibrate:
            repetitions = self.matrix.repetitions
            more = calibrated(self.groups, known, repetitions, self.matrix.seed)
            known, by = known | more, CALIBRATED if more else by
        return Sweep(self.folder.path, self.record, self.found, self._expected(known, by))

    def _expected(self, known: Mapping[tuple[str, str], float], by: str = EARLIER) -> Expected:
        return expected(self.groups, len(self.missing), known, self.matrix.repetitions, by)

    def measure_here(self) -> None:
        """Measures the missing groups in this process."""
        with closing(OneEngine()) as engines:
            while self.groups and not self.interrupted:
                self.record = self.folder.add(self.record, self.groups)
                for group in list(self.groups):
                    if not self._measure(group, engines):
                        self.interrupted = True
                        return

    def _measure(self, group: CellGroup, engines: OneEngine) -> bool:
        """Measures a group. Returns whether the sweep goes on."""
        out = self.folder.group(group.name)
        try:
            measure_group(
                engines.of(group.cells[0]), group, out, self.matrix.repetitions, self.matrix.seed,
                self.matrix.varying, resume=out.exists(), energy=self.energy,
            )  # fmt: skip
        except KeyboardInterrupt:
            return False
        except WorkbenchError as error:
            self._failed(group, error)
            return True
        return self._taken(group)

    def measure_on(self, workers: Workers) -> None:
        """Measures the missing groups on workers; only this process writes."""
        matrix = self.matrix
        try:
            while self.groups:
                self.record = self.folder.add(self.record, self.groups)
                for group, one in workers.measured(
                    list(self.groups), matrix.repetitions, matrix.seed, matrix.varying, self.energy
                ):
                    if one.error is not None:
                        self._failed(group, one.error)
                        continue
                    write_group(self.folder.group(group.name), one.run, one.samples)
                    self._taken(group)
        except KeyboardInterrupt:
            self.interrupted = True

    def _taken(self, group: CellGroup) -> bool:
        """Reads a group that was measured, and says how far the sweep is. Returns whether the group
        is complete."""
        one = FoundGroup(
            group.name, list(group.keys), results.load_run(self.folder.group(group.name))
        )
        self.found = [old for old in self.found if old.name != one.name] + [one]
        if not one.complete:
            return False
        self.groups.remove(group)
        self.missing -= set(group.keys)
        n, left = len(self.cells), self._expected(from_earlier(self.found))
        about = f", about {duration(left.seconds)} left" if left.seconds else ""
        rates = (
            results.rates(pace.counted(one.run.run, one.run.samples))
            .groupby("arm", sort=False)["tps"]
            .median()
        )
        for cell, tps in zip(group.cells, rates, strict=False):
            note(f"{cell.words(self.matrix.varying)}: {tps:.2f} t/s")
        note(f"sweep: {n - len(self.missing)} of {n} cells{about}")
        return True

    def _failed(self, group: CellGroup, error: WorkbenchError) -> None:
        """Notes why a group could not be measured; the sweep goes on. Of a group whose cells all do
        what its baseline does, the baseline is left to measure."""
        self.groups.remove(group)
        first, *others = group.keys
        words = [cell.words(self.matrix.varying) for cell in group.cells]
        if isinstance(error, IdleToggles):
            for key in others:
                self.record.left_out.append(LeftOut(self.cells.pop(key).axes, str(error)))
                del self.record.cells[key]
            self.missing -= set(others)
            if first in self.missing and not any(first in group.keys for group in self.groups):
                self.groups.append(CellGroup((first,), group.cells[:1]))
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            note(f"left out: {words[1]}{more}: {error}")
            return
        self.record.failed.update((key, str(error)) for key in group.keys if key in self.missing)
        note(f"failed: {words[0]}: {error}")

    def result(self) -> Sweep:
        self.folder.write(self.record)
        left = self._expected(from_earlier(self.found))
        return Sweep(self.folder.path, self.record, self.found, left, self.interrupted)
