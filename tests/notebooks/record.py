"""Runs the notebooks on a GPU, and keeps what they showed and measured with the sources.

    python -m tests.notebooks.record run OUT [NAMES]   # there: OUT/<name>.ipynb, OUT/runs.tar.gz
    python -m tests.notebooks.record take OUT          # here: into notebooks/ and data/results/

NAMES are notebooks, 04_plans; without any, all are run. How long each took is printed, and kept of
a run of all (`notebooks.json`): with kernels to compile where the machine's cache has none.

A recorded run has the parameters that the notebook shows, except the folder of its runs; the cell
that papermill put in for it is dropped. README's pair of timelines is drawn by the way;
`timelines.json` says of which model, device and commit it is.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat

import workbench as wb
from workbench.answers import loaded, skipped
from workbench.backend.base import choose_device
from workbench.benchmarks.runs import provenance
from workbench.common.devices import is_gpu
from workbench.common.errors import UsageError, WorkbenchError
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


def run(out: Path, names: Sequence[str] = (), device: str = "auto") -> None:
    """Runs each notebook that is named; writes them, and one archive of their run folders, to
    `out`. Raises UsageError for a name that is none, WorkbenchError for a cell that fails."""
    if unknown := [name for name in names if name not in MADE]:
        raise UsageError(f"notebook {unknown[0]!r} is not one of {', '.join(MADE)}")
    there, _ = choose_device(device)
    out.mkdir(parents=True, exist_ok=True)
    wanted, sources = [*(names or MADE)], ROOT / "notebooks"
    seconds: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory() as folder, tarfile.open(out / RUNS, "w:gz") as archive,
        Kernels() as kernels,
    ):  # fmt: skip
        for name in wanted:
            runs, begin = Path(folder, name), time.monotonic()
            runs.mkdir()
            chosen = {"device": device, "runs": str(runs)}
            source, executed = sources / f"{name}.ipynb", Path(folder, f"{name}.ipynb")
            with kernels.taken(sources) as kernel:
                if name != wanted[-1] and is_gpu(there):  # as `workbench report` does
                    kernels.start(sources)
                if failure := execute_notebook(source, executed, chosen, kernel=kernel):
                    raise WorkbenchError(f"{source.name}: {failure}")
            found, slow = nbformat.read(executed, 4), slowest(nbformat.read(executed, 4))
            nbformat.write(stripped(found), out / f"{name}.ipynb")
            for end in MADE[name]:
                (folder_of_run,) = runs.glob(f"*-{end}")
                archive.add(folder_of_run, arcname=f"notebook-{end}")
            seconds[name] = round(time.monotonic() - begin, 1)
            print(f"== {name}: {seconds[name]} s; {slow}", flush=True)
    draw(out, device)
    about = json.loads((out / ABOUT).read_text())
    took = {"seconds": seconds} | {key: about[key] for key in ("date", "commit", "machine")}
    (out / TOOK).write_text(json.dumps(took, indent=1) + "\n")


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
    where the archive does not hold the runs of every notebook in `out`: each call of `run` makes
    the archive anew."""
    results = root / "data" / "results"
    taken = [name for name in MADE if (out / f"{name}.ipynb").is_file()]
    with tarfile.open(out / RUNS) as archive:
        held = {Path(member).parts[0] for member in archive.getnames()}
        made = {f"notebook-{end}": name for name in taken for end in MADE[name]}
        for folder, name in made.items():
            if folder not in held:
                raise UsageError(
                    f"{out / RUNS} has no {folder} of {name}; name all notebooks in one run"
                )
        for folder in made:
            shutil.rmtree(results / folder, ignore_errors=True)
        archive.extractall(results, filter="data")
    for name in taken:
        shutil.copyfile(out / f"{name}.ipynb", root / "notebooks" / f"{name}.ipynb")
    for name in (PICTURE, ABOUT, *([TOOK] if taken == [*MADE] else [])):
        shutil.copyfile(out / name, results / name)


if __name__ == "__main__":
    what, folder, *chosen = sys.argv[1:]
    run(Path(folder), chosen) if what == "run" else take(Path(folder))
