"""Slots with prompts of random lengths, masked cells skipped or not (llama.cpp #14924).

    python -m data.measure.random_lengths [MODEL] [--means 1024,..] [--prompts 200] [--slots 32]

As llama.cpp's `server-bench.py` has it: as many requests in flight as there are slots, prompts of 0
to twice a mean length, and 256 tokens each. Each arm is an engine process of its own, and both take
every mean length in turn. Runtime is fitted by a quadratic in the mean length (`fits.py`).
The run folder is `data/results/random-lengths/MODEL`.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from cyclopts import App

from data.measure.random_tables import FOLDER, shown
from data.measure.served_arms import Point, Recording
from tests.peer.cuda import is_there, model_file
from workbench.bench.draft import kept
from workbench.bench.rounds import order_of
from workbench.config import BEST, EngineConfig, TogglePreset
from workbench.errors import UsageError, WorkbenchError
from workbench.serve.bench import BenchSpec
from workbench.serve.load import normal_ids
from workbench.serve.served import reached
from workbench.serve.serving import serving
from workbench.serve.worker import WorkerSettings
from workbench.sizes import round_up

ROOT = Path(__file__).resolve().parents[2]
PAD = 256
# both with llama.cpp's extents: with a server's own, reading all would read more than there
ARMS = {way: {"skip_masked_kv": way, "kv_growth": "step"} for way in ("off", "tail")}

app = App(help=__doc__, result_action="return_none")


@app.default
def main(
    model: str = "llama-3.2-1b-q4_k_m",
    *,
    means: str = "1024,2048,4096,6144,8192",
    prompts: int = 200,
    slots: int = 32,
    n_gen: int = 256,
    n_ubatch: int = 512,
    rounds: int = 1,
    device: str = "cuda",
    out: Path = ROOT / "data" / "results" / FOLDER,
    files: Path = ROOT / "data" / "models",
    again: bool = False,
    at_most_s: float = math.inf,
) -> None:
    """Measures both arms at every mean length, and prints the table.

    Parameters
    ----------
    model: as folders name it.
    means: mean lengths of prompts; a quadratic wants three or more.
    prompts: requests of each point.
    slots: requests served at once, and in flight.
    n_gen: tokens that each request generates.
    n_ubatch: tokens computed at once.
    rounds: how often each point is measured.
    out: where the run folder goes.
    files: where model files are, and where missing ones are written.
    again: measure what was measured, too.
    at_most_s: no point begins after so many seconds.
    """
    lengths = sorted({int(n) for n in means.split(",")})
    if min(lengths[0], prompts, slots, n_gen, rounds) < 1:
        raise UsageError("--means, --prompts, --slots, --n-gen and --rounds are 1 or more")
    folder, begun = out / model, time.monotonic()
    if is_there(folder) and not again:
        print(f"{model}: there already, of this commit", flush=True)
        return
    path = model_file(model, files)
    shutil.rmtree(folder, ignore_errors=True)
    each = round_up(2 * lengths[-1] + n_gen, PAD)
    config = EngineConfig(
        device=device, n_ctx=slots * each, n_seqs=slots, n_ubatch=n_ubatch, n_kv_pad=PAD
    )
    wanted = {name: TogglePreset(BEST, changes) for name, changes in ARMS.items()}
    points = _points(lengths, prompts, slots, n_gen, path)
    toggles = {name: serving(device, preset).changes for name, preset in wanted.items()}
    recording = Recording(
        FOLDER, path, folder, toggles, [point.test for point in points], rounds, device
    )
    recording.run["result"] |= {"slots": slots, "n_ubatch": n_ubatch}
    with ExitStack() as stack, kept(recording.draft, raises=True):
        targets = [
            stack.enter_context(reached(WorkerSettings(str(path), config, slots, preset)))
            for preset in wanted.values()
        ]
        names, number = list(wanted), 0
        for round_ in range(rounds):
            for point in points:
                if number and time.monotonic() - begun > at_most_s:
                    break
                for i in order_of(number, len(names)):
                    row = recording.measure(names[i], round_, targets[i], point)
                    seconds = row.figures["duration"]
                    print(f"  {point.test} {names[i]}: {seconds:.2f} s", flush=True)
                number += 1
    print(shown(folder), flush=True)
    print(f"== {model}: {time.monotonic() - begun:.0f} s", flush=True)


def _points(lengths: list[int], prompts: int, slots: int, n_gen: int, path: Path) -> list[Point]:
    """Both arms are sent the same prompts; those of each length are others."""
    ids, found = normal_ids(path), list[Point]()
    for seed, mean in enumerate(lengths):
        spec = BenchSpec.of(
            f"rng-0-{2 * mean}", str(n_gen), ids, n_requests=prompts,
            n_warm_up=min(slots, prompts), seed=seed, parallel=slots,
        )  # fmt: skip
        found.append(Point(f"mean {mean}", slots, spec))
    return found


if __name__ == "__main__":
    try:
        app()
    except (RuntimeError, WorkbenchError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
