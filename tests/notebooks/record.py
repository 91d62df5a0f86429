"""Runs the notebooks on a GPU, and keeps what they showed and measured with the sources.

    python -m tests.notebooks.record run OUT [NAMES] [--again-s S]   # there
    python -m tests.notebooks.record take OUT   # here: into notebooks/ and data/results/

OUT gets the notebooks, `runs.tar.gz` with their run folders, and `notebooks.json`, the seconds that
each took: with kernels to compile where the machine's cache has none. NAMES are notebooks,
04_plans; without any, all are run. With S, those are run again, for so many seconds, in whose
tables noise swallows an effect, or that a slow host made: a busy machine has quieter minutes, and
noisier ones. They are run one after the other, and of each the run that leaves less untold is kept.
Ctrl-C keeps what has been run.

A recorded run has the parameters that the notebook shows, except the folder of its runs; the cell
that papermill put in for it is dropped. README's pair of timelines is drawn by the way;
`timelines.json` says of which model, device and commit it is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat

import workbench as wb
from tests.notebooks.told import POISSON, held_up, paces, rows, slow, slow_host, untold
from workbench.answers import loaded, skipped
from workbench.backend.base import choose_device
from workbench.benchmarks.runs import provenance
from workbench.common.devices import is_gpu
from workbench.common.errors import UsageError, WorkbenchError
from workbench.common.output import write_text
from workbench.config import SyncMode
from workbench.engine.cache.extent import WAYS
from workbench.report import plots
from workbench.report.kernels import Kernels
from workbench.report.render import execute_notebook
from workbench.trace.profile import profile_each

ROOT = Path(__file__).resolve().parents[2]
RUNS = "runs.tar.gz"
SERVED = [loaded.slug(name) for name in (loaded.SERVING, *loaded.SUSPECTS, loaded.CONTROL)]
ARRIVING = [loaded.slug(name) for name in (loaded.ONE_BY_ONE, loaded.AT_ONCE)]
# notebook -> the run folders it makes, by how their names end
MADE = {
    "00_tour": ["tour"],
    "01_baseline_gaps": ["waiting"],
    "02_sync_modes": ["gaps", "sync-on"],
    "03_graph_reuse": ["reuse-on", "redo"],
    "04_plans": ["plans-half", "plans-on"],
    "05_streams": ["streams-off", "streams-on", "streams-fused"],
    "06_masked_kv": [
        *(f"prompts-in-{part}" for part in skipped.PARTS), "side-by-side",
        *(f"ragged-{way.replace('_', '-')}" for way in WAYS), "ragged-off-again", "attn-kernel",
    ],
    "07_batched_serving": [
        "together-start", "together-serving", *(f"served-{name}" for name in SERVED),
        *(f"arriving-{name}" for name in ARRIVING),
    ],
    "09_together": ["together", "reuse"],
    "10_fusion": ["fusion", "defer"],
}  # fmt: skip
FOLDERS = "runs"
SAID = ["of", "test", "label", "speedup", "low", "high", "band_low", "band_high"]
PICTURE, ABOUT, TOOK = "timelines.png", "timelines.json", "notebooks.json"
PAIR = (SyncMode.PER_COPY.value, SyncMode.COPY_BOUNDARY.value)  # before and after #17795
KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def stripped(notebook: Any) -> Any:
    """Without the cell of given parameters, counts, and what papermill notes."""
    tagged = [(c, c.metadata.get("tags", [])) for c in notebook.cells]
    notebook.cells = [cell for cell, tags in tagged if "injected-parameters" not in tags]
    for cell, tags in tagged:
        cell.metadata = {"tags": tags} if tags else {}
        counted = [o for o in cell.get("outputs", ()) if "execution_count" in o]
        for one in (*counted, *([cell] if cell.cell_type == "code" else [])):
            one.execution_count = None
    notebook.metadata = KERNEL
    return notebook


def slowest(notebook: Any) -> str:
    """The code cells that took longest, by their number among all cells, with seconds."""
    took = [
        (cell.metadata.get("papermill", {}).get("duration") or 0.0, number)
        for number, cell in enumerate(notebook.cells, 1)
    ]
    return ", ".join(f"cell {number} {s:.0f} s" for s, number in sorted(took, reverse=True)[:5])


def run(out: Path, names: Sequence[str] = (), device: str = "auto", again_s: float = 0.0) -> None:
    """Runs each notebook that is named; writes them, their run folders, and one archive of all run
    folders there, to `out`. What `out` holds of other notebooks stays.

    again_s: for so many seconds, notebooks whose tables leave effects untold are run again.
    Raises UsageError for a name that is none, WorkbenchError for a cell that fails."""
    if unknown := [name for name in names if name not in MADE]:
        raise UsageError(f"notebook {unknown[0]!r} is not one of {', '.join(MADE)}")
    there, _ = choose_device(device)
    (out / FOLDERS).mkdir(parents=True, exist_ok=True)
    with Kernels() as kernels:
        first = [*(names or MADE)]
        for name in first:
            executed(name, out, device, kernels, is_gpu(there), name != first[-1])
        draw(out, device)
        archived(out)
        until, took = time.monotonic() + again_s, json.loads((out / TOOK).read_text())
        least_us = paces(out / FOLDERS).min()
        while found := weak(out, least_us):
            for name, n in found.most_common():
                if time.monotonic() + took[name] > until:
                    return
                print(f"again: {name}", flush=True)
                with tempfile.TemporaryDirectory() as temporary:
                    again = Path(temporary)
                    executed(name, again, device, kernels, is_gpu(there), False)
                    if weak(again, least_us)[name] < n:
                        replace(name, again, out)
                        archived(out)


def archived(out: Path) -> None:
    """Writes all run folders of `out` as one archive."""
    with tarfile.open(out / RUNS, "w:gz") as archive:
        for folder in sorted((out / FOLDERS).iterdir()):
            archive.add(folder, arcname=folder.name)


def weak(out: Path, least_us: float) -> Counter[str]:
    """The notebooks in `out` whose tables leave effects untold or are of a slow host, or whose load
    was held up (`told.py`), and how many of these each has."""
    found = untold(rows(out / FOLDERS))
    print(found[SAID].round(3).to_string(), flush=True)
    folders = [*found["folder"], *([POISSON] if held_up(out / FOLDERS) else [])]
    folders += slow(out / FOLDERS, least_us)
    of = {f"notebook-{end}": name for name, ends in MADE.items() for end in ends}
    by_slow = [path.stem for path in sorted(out.glob("*.ipynb")) if slow_host(path)]
    every = Counter([*(of[folder] for folder in folders), *by_slow])
    print(f"paces: {paces(out / FOLDERS).round(1).to_dict()}\nweak: {dict(every)}", flush=True)
    return every


def replace(name: str, source: Path, out: Path) -> None:
    """Puts a notebook and its run folders from `source` in the place of those in `out`."""
    shutil.copyfile(source / f"{name}.ipynb", out / f"{name}.ipynb")
    for end in MADE[name]:
        folder = Path(FOLDERS, f"notebook-{end}")
        shutil.rmtree(out / folder, ignore_errors=True)
        shutil.copytree(source / folder, out / folder)


def executed(
    name: str, out: Path, device: str, kernels: Kernels, on_gpu: bool, follows: bool
) -> None:
    """Runs one notebook, and replaces what `out` has of it. follows: another does; its kernel
    starts as `workbench report` starts it."""
    begin, sources = time.monotonic(), ROOT / "notebooks"
    with tempfile.TemporaryDirectory() as temporary:
        runs, copy = Path(temporary, "runs"), Path(temporary, f"{name}.ipynb")
        runs.mkdir()
        chosen = {"device": device, "runs": str(runs)}
        with kernels.taken(sources, spare=on_gpu) as kernel:
            if follows and on_gpu:
                kernels.start(sources)
            source = sources / f"{name}.ipynb"
            if failure := execute_notebook(source, copy, chosen, kernel=kernel):
                raise WorkbenchError(f"{source.name}: {failure}")
        seconds, slow = time.monotonic() - begin, slowest(nbformat.read(copy, 4))
        nbformat.write(stripped(nbformat.read(copy, 4)), out / f"{name}.ipynb")
        for end in MADE[name]:
            (made,) = runs.glob(f"*-{end}")
            shutil.rmtree(out / FOLDERS / f"notebook-{end}", ignore_errors=True)
            shutil.copytree(made, out / FOLDERS / f"notebook-{end}")
    took = json.loads((out / TOOK).read_text()) if (out / TOOK).is_file() else {}
    took.setdefault(name, round(seconds, 1))  # the first time, with kernels to compile
    write_text(out / TOOK, json.dumps(took, indent=1) + "\n")
    print(f"== {name}: {seconds:.1f} s; {slow}", flush=True)


def draw(out: Path, device: str) -> None:
    """The start of one token under both modes of PAIR, copies on their own stream."""
    own = wb.Toggles(graph_reuse="set_rows", copy_stream="own")
    arms = {mode: own.switched("sync", mode) for mode in PAIR}
    with wb.Engine.load("auto", device=device, toggles=own) as engine:
        traces = profile_each(engine, arms)
        about = {"date": provenance.utc_now()} | provenance.collect(engine)
    about["arms"] = {name: toggles.to_dict() for name, toggles in arms.items()}
    about["notes"] = {name: trace.note for name, trace in traces.items()}
    plots.timelines(traces, window_us="inputs").savefig(out / PICTURE)
    (out / ABOUT).write_text(json.dumps(about, indent=1) + "\n")


def take(out: Path, root: Path = ROOT) -> None:
    """Puts what `run` wrote among the sources. Raises UsageError, before anything is replaced,
    where the archive does not hold the runs of every notebook in `out`."""
    results = root / "data" / "results"
    taken = [name for name in MADE if (out / f"{name}.ipynb").is_file()]
    with tarfile.open(out / RUNS) as archive:
        held = {Path(member).parts[0] for member in archive.getnames()}
        made = {f"notebook-{end}": name for name in taken for end in MADE[name]}
        for folder, name in made.items():
            if folder not in held:
                raise UsageError(f"{out / RUNS} has no {folder} of {name}; run it into {out} again")
        for folder in made:
            shutil.rmtree(results / folder, ignore_errors=True)
        archive.extractall(results, filter="data")
    for name in taken:
        shutil.copyfile(out / f"{name}.ipynb", root / "notebooks" / f"{name}.ipynb")
    for name in (PICTURE, ABOUT, *([TOOK] if taken == [*MADE] else [])):
        shutil.copyfile(out / name, results / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "take"))
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--again-s", type=float, default=0.0)
    given = parser.parse_args()
    if given.what == "run":
        run(given.out, given.names, again_s=given.again_s)
    else:
        take(given.out)
