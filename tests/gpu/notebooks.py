"""Records the notebooks: `python -m tests.gpu.notebooks [NAMES]`, on a committed tree.

Each notebook runs in place with the parameters it holds. Its outputs stay, without counts and
metadata. The run folders that it wrote become `data/results/notebook-*`. The pair of timelines that
README shows is drawn here, too, and `timelines.json` beside it says of what.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import papermill
from cyclopts import App

import workbench as wb
from workbench.bench import provenance, results
from workbench.config import SyncMode, Toggles
from workbench.model.synth import write_tiny_models
from workbench.report import plots
from workbench.trace.profile import profile_each

ROOT = Path(__file__).resolve().parents[2]
RESULTS, RUNS, MODELS = ROOT / "data" / "results", ROOT / "data" / "runs", ROOT / "data" / "models"
NOTEBOOKS = ("00_tour", "02_sync_modes", "10_fusion")
PICTURE_MODEL = "tiny-llama-Q8_0.gguf"
PICTURE_MODES = (SyncMode.PER_COPY, SyncMode.COPY_BOUNDARY)
PICTURE_US = 350  # of a step's beginning
METADATA = (
    "metadata.papermill cell.metadata.papermill cell.metadata.execution metadata.language_info"
)

app = App(help=__doc__, result_action="return_none")


@app.default
def record(*names: str) -> None:
    """Runs the notebooks named (default: all) and keeps what they wrote."""
    write_tiny_models(MODELS)
    for name in names or NOTEBOOKS:
        notebook(name)
    picture()


def notebook(name: str) -> None:
    path = ROOT / "notebooks" / f"{name}.ipynb"
    before = set(results.runs(RUNS)["folder"])
    papermill.execute_notebook(
        str(path), str(path), cwd=str(path.parent), kernel_name="python3", progress_bar=False
    )
    strip = ["nbstripout", "--keep-output", "--keep-id", "--extra-keys", METADATA, str(path)]
    subprocess.run([sys.executable, "-m", *strip], check=True)
    for run in results.runs(RUNS).to_dict("records"):
        if run["folder"] in before or run["kind"] not in ("ab", "gaps"):
            continue
        short = Path(run["folder"]).name.split("-", 2)[2]  # behind date and time
        kept = RESULTS / f"notebook-{short}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(run["folder"], kept)
        print(f"{name}: {kept.name}", flush=True)


def picture() -> None:
    """The start of one token before and after #17795, copies on their own stream."""
    own = Toggles(graph_reuse="set_rows", copy_stream="own")
    arms = {mode.value: own.switched("sync", mode.value) for mode in PICTURE_MODES}
    with wb.Engine.load(MODELS / PICTURE_MODEL, device="auto", toggles=own) as engine:
        traces = profile_each(engine, arms)
        about = {
            "date": provenance.utc_now(),
            **provenance.collect(engine),
            "arms": {name: toggles.to_dict() for name, toggles in arms.items()},
            "window_us": [0, PICTURE_US],
            "notes": {name: trace.note for name, trace in traces.items()},
        }
        plots.timelines(traces, window_us=(0, PICTURE_US)).savefig(RESULTS / "timelines.png")
    (RESULTS / "timelines.json").write_text(json.dumps(about, indent=1, default=str) + "\n")


if __name__ == "__main__":
    app()
