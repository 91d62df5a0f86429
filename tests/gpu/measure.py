"""Records the GPU runs of data/results: `python -m tests.gpu.measure [--out DIR] [--models DIR]`.

For llama-3.2-1b F16 and llama-3-8b Q4_0, tg128 under every sync mode on both copy streams with
programs kept, and graph reuse itself; then the timelines of some tokens before and after. Needs
a GPU, about 8 GB of disk for the models, and some minutes. The tree must be committed: a run names
its commit.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from cyclopts import App

import workbench as wb
from workbench.bench.llama_bench import bench, format_rows
from workbench.model.synth import write_model

ROOT = Path(__file__).resolve().parents[2]
# preset, type, rounds of each comparison: the smaller the token, the more it takes to see a wait
MODELS = [("llama-3.2-1b", "F16", 30), ("llama-3-8b", "Q4_0", 10)]
KEPT = {"graph_reuse": "set_rows"}
ON_OWN = "sync=per_copy,blocking_copies,copy_boundary,write_read_boundary"
# run name -> toggle and values, test, background. Rebuilding is slow enough to be seen in tg32.
COMPARISONS = {
    "graph-reuse": ("graph_reuse=rebuild,set_rows", "tg32", {}),
    "sync-own": (ON_OWN, "tg128", {"copy_stream": "own", **KEPT}),
    "sync-compute": (f"{ON_OWN},implicit", "tg128", {"copy_stream": "compute", **KEPT}),
}

app = App(help=__doc__)


@app.default
def measure(
    *, out: Path = ROOT / "data" / "results", models: Path = ROOT / "data" / "models",
    device: str = "cuda",
) -> None:  # fmt: skip
    for preset, quant, rounds in MODELS:
        path = write_model(preset, quant, models / f"{preset}-{quant}.gguf")
        with wb.Engine.load(path, device=device, n_ctx=1024) as engine:
            print(engine.backend.description)
            for name, (toggle, test, fields) in COMPARISONS.items():
                folder = out / f"{device}-{name}-{preset}-{quant.lower()}"
                shutil.rmtree(folder, ignore_errors=True)
                found = wb.ab(
                    engine, toggle, tests=test, rounds=rounds,
                    background=wb.Toggles(**fields), out=folder, name=folder.name,
                )  # fmt: skip
                print(found.verdict, flush=True)
            kept = engine.variant(wb.Toggles(**KEPT))
            folder = out / f"{device}-bench-{preset}-{quant.lower()}"
            shutil.rmtree(folder, ignore_errors=True)
            print(format_rows(bench(kept, out=folder)), flush=True)
            if preset == MODELS[0][0]:
                trace_both(engine, out, device, f"{preset}-{quant.lower()}")


def trace_both(engine: wb.Engine, out: Path, device: str, model: str) -> None:
    """A few tokens with every wait, and with none but the logits', as traces beside their runs."""
    sides = {
        "sync-own": wb.Toggles(sync="per_copy", **KEPT),
        "sync-compute": wb.Toggles(sync="implicit", copy_stream="compute", **KEPT),
    }
    for name, toggles in sides.items():
        with engine.variant(toggles) as side:
            side.generate(tokens=[1, 2, 3], max_tokens=8)
            with wb.profile(side, window=(8, 8)) as trace:
                side.generate(tokens=[1, 2, 3], max_tokens=20)
            trace.save(out / f"{device}-{name}-{model}" / "timeline.pftrace.gz")


if __name__ == "__main__":
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
