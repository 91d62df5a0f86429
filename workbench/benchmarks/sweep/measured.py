"""Opens models for cells, and measures a group of cells into a run folder.

A group of several cells is a comparison (a run of kind `ab`): its cells are arms, and each is
measured once a round, in the order of `compare/rounds.py`. A group of one cell is a run of kind
`bench`. Both are what `workbench ab` and `workbench bench` write, so every reader of run folders
reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

from workbench.benchmarks.compare.ab import compare_arms
from workbench.benchmarks.compare.stats import MIN_REPETITIONS
from workbench.benchmarks.energy.windows import EnergyAsked, counter_of
from workbench.benchmarks.llama.llama_bench import measured
from workbench.benchmarks.sweep.cells import Cell, CellGroup
from workbench.benchmarks.workload import bos_token, check_fits, draw_tokens, take_sample
from workbench.common.errors import WorkbenchError
from workbench.config import EngineConfig, Toggles
from workbench.engine.choose import choose
from workbench.engine.engine import Engine
from workbench.engine.load import Loaded


class Enough(Exception):
    """Ends an opening before weights are read: everything is known by then."""


def refusals(cells: Mapping[str, Cell], energy: EnergyAsked = False) -> dict[str, str]:
    """Why cells cannot be measured on this machine, by key; the others have no entry. Models are
    opened, and no weight is read."""
    found: dict[str, str] = {}
    alike: dict[tuple[Path, EngineConfig], dict[str, Cell]] = {}
    for key, cell in cells.items():
        alike.setdefault((cell.path, cell.config), {})[key] = cell
    for (path, config), own in alike.items():
        try:
            Engine.load(
                path, config=config, toggles=Toggles(), check=partial(_ask, own, found, energy)
            )
        except Enough:
            continue
        except WorkbenchError as error:
            found |= dict.fromkeys(own, str(error))
    return found


def _ask(
    cells: Mapping[str, Cell], found: dict[str, str], energy: EnergyAsked, loaded: Loaded
) -> None:
    """Enters what an opened model and its device refuse. Raises Enough."""
    for key, cell in cells.items():
        try:
            toggles = choose(cell.wanted, loaded).toggles
            check_fits(toggles, loaded.config, cell.workload)
            if energy is not False:
                counter_of(energy, loaded.backends[-1], loaded.config, [cell.workload])
        except WorkbenchError as error:
            found[key] = str(error)
    raise Enough


class OneEngine:
    """The engine of the cells that come next. A group on the same model with the same settings
    uses it again; for any other group it is closed first."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._of: tuple[Path, EngineConfig] | None = None

    def of(self, cell: Cell) -> Engine:
        """An engine on the cell's model, with its settings. Raises as `Engine.load`."""
        wanted = (cell.path, cell.config)
        if self._engine is None or self._of != wanted:
            self.close()
            self._engine = Engine.load(cell.path, config=cell.config, toggles=cell.wanted)
            self._of = wanted
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def measure_group(
    engine: Engine,
    group: CellGroup,
    folder: Path,
    repetitions: int,
    seed: int,
    varying: Collection[str] = (),
    resume: bool = False,
    energy: EnergyAsked = False,
) -> None:
    """Measures a group into a run folder, which is saved every 10 s and at the end.

    varying: the axes that arms are named by. resume: the folder has a part of it. Ctrl-C keeps
    what is finished, as `ab` and `bench` do. Raises WorkbenchError where the engine fails.
    """
    first = group.cells[0]
    if len(group.cells) > 1:
        compare_arms(
            engine, group.spec(engine.resolve, varying), repetitions, seed, folder,
            smoke=repetitions < MIN_REPETITIONS, resume=resume, energy=energy,
        )  # fmt: skip
        return
    with closing(engine.variant(first.wanted)) as side:
        measured(
            side, [first.workload], repetitions, seed=seed, out=folder, resume=resume,
            energy=energy,
        )  # fmt: skip


def seconds_of(engine: Engine, cell: Cell, seed: int) -> float:
    """How long one repetition of a cell takes, after one that compiles and warms up."""
    with closing(engine.variant(cell.wanted)) as side:
        bos, n_vocab = bos_token(side), side.model.n_vocab
        for repetition in range(2):
            tokens = draw_tokens(cell.workload, n_vocab, seed, repetition, bos)
            sample = take_sample(side, cell.workload, tokens)
    return sample.ns_total / 1e9
