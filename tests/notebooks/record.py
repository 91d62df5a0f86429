"""Runs the notebooks on a GPU, and keeps what they showed and measured with the sources.

    python -m tests.notebooks.record run OUT     # there: OUT/<notebook>.ipynb, OUT/runs.tar.gz
    python -m tests.notebooks.record take OUT    # here: into notebooks/ and data/results/

The parameters of a recorded run are not the notebook's own: it keeps its defaults, and loses the
cell that papermill put in. README's picture of timelines is the first one of 02_sync_modes.
"""

from __future__ import annotations

import base64
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import nbformat

from workbench.backend.base import choose_device
from workbench.model.synth import write_model
from workbench.report.render import render_notebook

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "data" / "results"
RUNS = "runs.tar.gz"
# notebook -> the run folders it makes, by how their names end
MADE = {
    "00_tour": ["tour"],
    "02_sync_modes": ["gaps", "sync-off", "sync-on"],
    "10_fusion": ["fusion", "defer"],
}
# a layer of the tiny model is its first or its last: 10_fusion asks a model with one in the middle
MODELS = {
    "00_tour": ("tiny-llama", "Q8_0"),
    "02_sync_modes": ("tiny-llama", "Q8_0"),
    "10_fusion": ("llama-3.2-1b", "Q8_0"),
}
PARAMETERS: dict[str, dict[str, Any]] = {"10_fusion": {"quick": False}}
PICTURE = ("02_sync_modes", "timelines.png")


def stripped(notebook: Any) -> Any:
    """Without the cell of given parameters, counts, and what papermill notes."""
    notebook.cells = [c for c in notebook.cells if "injected-parameters" not in _tags(c)]
    for cell in notebook.cells:
        cell.metadata = {"tags": ["parameters"]} if "parameters" in _tags(cell) else {}
        for output in cell.get("outputs", ()):
            if "execution_count" in output:
                output.execution_count = None
        if cell.cell_type == "code":
            cell.execution_count = None
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def _tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def run(out: Path, device: str = "cuda", given: dict[str, Any] | None = None) -> None:
    """Runs each notebook; writes them, and one archive of their run folders, to `out`."""
    device, _ = choose_device(device)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(out / RUNS, "w:gz") as archive:
        for name, ends in MADE.items():
            runs = Path(folder, name)
            runs.mkdir()
            preset, quant = MODELS[name]
            model = write_model(preset, quant, Path(folder, f"{preset}-{quant}.gguf"))
            chosen = {"device": device, "model": str(model), "runs": str(runs)}
            chosen |= PARAMETERS.get(name, {}) | (given or {})
            source = ROOT / "notebooks" / f"{name}.ipynb"
            render_notebook(source, Path(folder, f"{name}.html"), chosen, runs_dir=folder)
            notebook = nbformat.read(Path(folder, f"{name}.ipynb"), 4)
            nbformat.write(stripped(notebook), out / f"{name}.ipynb")
            for end in ends:
                (found,) = runs.glob(f"*-{end}")
                archive.add(found, arcname=f"notebook-{end}")


def take(out: Path, root: Path = ROOT) -> None:
    """Puts what `run` wrote among the sources."""
    results = root / "data" / "results"
    for ends in MADE.values():
        for end in ends:
            shutil.rmtree(results / f"notebook-{end}", ignore_errors=True)
    with tarfile.open(out / RUNS) as archive:
        archive.extractall(results, filter="data")
    for name in MADE:
        shutil.copyfile(out / f"{name}.ipynb", root / "notebooks" / f"{name}.ipynb")
    name, picture = PICTURE
    outputs = [
        o for c in nbformat.read(out / f"{name}.ipynb", 4).cells for o in c.get("outputs", ())
    ]
    first = next(o.data["image/png"] for o in outputs if "image/png" in o.get("data", {}))
    (results / picture).write_bytes(base64.b64decode(first))


if __name__ == "__main__":
    {"run": run, "take": take}[sys.argv[1]](Path(sys.argv[2]))
