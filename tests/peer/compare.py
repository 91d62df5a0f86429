"""llama.cpp and this engine on the same files in one run: the same logits? and how fast?

`make peer` runs `python -m tests.peer.compare`. It builds llama-cpp-python in an environment of its
own (`.venv-peer/`, needs a C++ compiler, about ten minutes once), starts one process for each side
(`worker.py`), and writes `data/results/peer-cpu.json`:

* reference: llama.cpp in F32 throughout against `tests/reference.py`, on the F32 files. This is
  what entitles the reference to judge the engine.
* logits: llama.cpp against this engine, every tensor type, teacher-forced token by token, with the
  F16 cache and the quantised activations that both use when they decode.
* decode: tokens per second. Both processes keep the model loaded, and one computes at a time;
  repetitions alternate A B B A, B A A B, so that a drifting clock meets both. Two threads, the same
  tokens, an empty cache; a token ends when its float32 logits are on the host. The A/A control
  compares the first runs of a side's blocks with its second ones.
* prefill: the same for one step of 128 tokens, until the last one's logits are on the host.

`--no-speed` and `--no-logits` leave a part out, and then nothing is written unless --out is given.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cyclopts import App

from data.measure.command import start
from tests import reference
from workbench.benchmarks.compare.stats import speedup
from workbench.benchmarks.runs import provenance
from workbench.common.output import write_text
from workbench.model.gguf.file import model_hash
from workbench.model.synth.models import file_name, write_model, write_named
from workbench.model.synth.shapes import QUANTS

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "data" / "results" / "peer-cpu.json"
MODELS = ROOT / "data" / "models"
LLAMA_CPP_PYTHON = "0.3.36"
LLAMA, OURS = "llama.cpp", "workbench"
LOGITS_MODELS = [(preset, quant) for preset in ("tiny-llama", "tiny-qwen3") for quant in QUANTS]
SPEED_MODELS = [("llama-3.2-1b", "Q8_0"), ("llama-3.2-1b", "Q4_0")]
EXACT_MODELS = [("tiny-llama", "F32"), ("tiny-qwen3", "F32")]
N_LOGITS_TOKENS = 16
N_CTX, N_UBATCH, THREADS = 512, 512, 2
MIN_BLOCKS = 5

# NMSE between llama.cpp and this engine: three times what was measured, and about the sum of what
# separates each from float64. For F32, F16 and BF16 that is llama.cpp's: sums in F16 inside flash
# attention, activations in the type of the weights. Where weights are quantised both round
# activations to 8 bits: here in blocks of 32, there in blocks of 256 for K-quants.
NMSE_TOLERANCE = {
    "F32": 2e-6, "F16": 3e-6, "BF16": 1e-4, "Q8_0": 2e-3, "Q4_0": 2e-3, "MXFP4": 2e-3,
    "Q4_K": 3e-3, "Q5_K": 3e-3, "Q6_K": 3e-3,
}  # fmt: skip
REFERENCE_TOLERANCE = 1e-10  # llama.cpp in F32 throughout against float64
RATIO_TOLERANCE = 0.5  # decode speed, this engine over llama.cpp


class Timed(NamedTuple):
    """A request to a worker that answers with times, and what is made of it."""

    do: str  # the request; also the key of the results
    test: str  # as llama-bench names it
    n_tokens: int
    steps: str  # the field of the reply, and of a sample: ns of each step
    n_steps: int


TIMED = [Timed("decode", "tg32", 32, "token_ns", 32), Timed("prefill", "pp128", 128, "step_ns", 1)]

app = App(help=__doc__)


class Worker:
    """A side's process. `ask` sends one request and returns its reply; raises RuntimeError where
    the side reports an error or its process has died."""

    def __init__(self, side: str, python: Path):
        self.side = side
        self._process = subprocess.Popen(
            [python, Path(__file__).with_name("worker.py"), side],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        reply = json.loads(line) if line else {"error": f"died ({self._process.wait()})"}
        if "error" in reply:
            raise RuntimeError(f"{self.side}, {do} {arguments}: {reply['error']}")
        return reply

    def load(self, model: Path, **options: Any) -> dict[str, Any]:
        shape = {"threads": THREADS, "n_ctx": N_CTX, "n_ubatch": N_UBATCH}
        return self.ask("load", model=str(model), **shape, **options)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process; it frees its model when its input ends."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def build(venv: Path) -> Path:
    """The Python of `venv`, made and given llama-cpp-python where it is missing."""
    python = venv / "bin" / "python"
    wanted = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"
    probe = "from importlib.metadata import version as v; print(v('llama-cpp-python'))"
    if python.exists():
        found = subprocess.run([python, "-c", probe], capture_output=True, text=True)
        if found.stdout.strip() == LLAMA_CPP_PYTHON:
            return python
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise RuntimeError(f"{wanted} is built from source and needs a C++ compiler; install g++")
    print(f"building {wanted} in {venv} (about ten minutes, once)", file=sys.stderr)
    if uv := shutil.which("uv"):
        made, pip = (
            [uv, "venv", "--python", sys.executable],
            [uv, "pip", "install", "--python", python],
        )
    else:
        made, pip = [sys.executable, "-m", "venv"], [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*made, "--clear", venv], check=True)
    subprocess.run([*pip, wanted, "numpy"], check=True)
    return python


def model_file(preset: str, quant: str) -> Path:
    """The file of a synth model under data/models, written where it is missing."""
    if preset.startswith("tiny-"):
        return write_named(MODELS, preset, quant)
    return write_model(preset, quant, MODELS / file_name(preset, quant))


def random_tokens(n: int, n_vocab: int) -> list[int]:
    return np.random.default_rng(n).integers(0, n_vocab, n).tolist()


def computed(
    side: Worker, path: Path, scratch: Path, n: int = N_LOGITS_TOKENS, one_by_one: bool = True,
    **options: Any,
) -> tuple[np.ndarray, list[int]]:  # fmt: skip
    """Logits of a side, float64 (n, n_vocab), and the tokens. options: of `load`."""
    tokens = random_tokens(n, side.load(path, **options)["n_vocab"])
    out = scratch / "rows.npy"
    side.ask("logits", tokens=tokens, out=str(out), one_by_one=one_by_one)
    return np.load(out).astype(np.float64), tokens


def of_model(path: Path, preset: str, quant: str) -> dict[str, Any]:
    return {"model": path.name, "preset": preset, "quant": quant, "hash": model_hash(path)}


def compare_logits(
    sides: dict[str, Worker], preset: str, quant: str, scratch: Path
) -> dict[str, Any]:
    """Both sides' logits over the same tokens, token by token: how far apart, and whose argmax."""
    path = model_file(preset, quant)
    ours, theirs = (computed(sides[name], path, scratch)[0] for name in (OURS, LLAMA))
    return of_model(path, preset, quant) | {
        "n_tokens": len(ours), "nmse": reference.nmse(ours, theirs),
        "max_abs": float(np.abs(ours - theirs).max()),
        "rms_logit": float(np.sqrt(np.mean(theirs**2))),
        "argmax_agreement": float(np.mean(ours.argmax(-1) == theirs.argmax(-1))),
        "decided_mismatches": reference.decided_argmax_mismatches(ours, theirs),
    }  # fmt: skip


def check_reference(llama: Worker, preset: str, quant: str, scratch: Path) -> dict[str, Any]:
    """llama.cpp in F32 throughout against the float64 reference, a whole batch at once."""
    path = model_file(preset, quant)
    rows, tokens = computed(llama, path, scratch, 40, one_by_one=False, exact=True)
    nmse = reference.nmse(rows, reference.forward(path, tokens))
    return {"model": path.name, "hash": model_hash(path), "n_tokens": len(tokens), "nmse": nmse}


def ratio(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Ratio of medians with its 95 % bootstrap interval, as every table of this project has it."""
    found = speedup(np.array(theirs), np.array(ours))
    return {"ratio": found.value, "ci95": [found.low, found.high]}


def warm_up(worker: Worker, timed: Timed, tokens: list[int], most: int = 6) -> int:
    """Runs until two runs in a row differ by less than 5 %; returns how many that took."""
    last = 0.0
    for n in range(1, most + 1):
        now = float(sum(worker.ask(timed.do, tokens=tokens)[timed.steps]))
        if abs(now - last) < 0.05 * now:
            return n
        last = now
    return most


def compare_speed(
    sides: dict[str, Worker], timed: Timed, preset: str, quant: str, n_blocks: int
) -> dict[str, Any]:
    """Speed of both, in n_blocks blocks of two runs each, alternating ABBA and BAAB."""
    path = model_file(preset, quant)
    loaded = {name: worker.load(path) for name, worker in sides.items()}
    tokens = random_tokens(timed.n_tokens, loaded[OURS]["n_vocab"])
    warm = {name: warm_up(worker, timed, tokens) for name, worker in sides.items()}
    samples = []
    for block in range(n_blocks):
        first, second = (OURS, LLAMA) if block % 2 == 0 else (LLAMA, OURS)
        for position, name in enumerate((first, second, second, first)):
            time.sleep(0.2)  # the other side's threads stop spinning
            steps_ns = sides[name].ask(timed.do, tokens=tokens)[timed.steps]
            where = {"side": name, "block": block, "place": position}
            t_s = 1e9 * len(tokens) / sum(steps_ns)
            samples.append(where | {"t_s": t_s, timed.steps: steps_ns})
        print(f"  {path.name} {timed.test} block {block + 1}/{n_blocks}", file=sys.stderr)
    speeds = {name: [s["t_s"] for s in samples if s["side"] == name] for name in sides}
    return of_model(path, preset, quant) | {
        "test": timed.test, "threads": THREADS, "device": loaded[OURS]["device"],
        "sync": loaded[OURS]["sync"], "warm_up_runs": warm,
        "order": "".join("A" if s["side"] == OURS else "B" for s in samples),
        "median_t_s": {name: float(np.median(s)) for name, s in speeds.items()},
        **ratio(speeds[OURS], speeds[LLAMA]),
        "a_a": {name: ratio(s[0::2], s[1::2]) for name, s in speeds.items()}, "samples": samples,
    }  # fmt: skip


@contextmanager
def both(venv: Path) -> Iterator[tuple[dict[str, Worker], Path, dict[str, Any]]]:
    """Both sides' processes, a folder, and where and with what this is run."""
    llama_cpp = build(venv)
    with (
        Worker(OURS, Path(sys.executable)) as ours,
        Worker(LLAMA, llama_cpp) as llama,
        tempfile.TemporaryDirectory() as scratch,
    ):
        sides = {OURS: ours, LLAMA: llama}
        about: dict[str, Any] = {"date": provenance.utc_now(), "commit": provenance.commit()}
        about["machine"] = provenance.machine()
        about["versions"] = provenance.versions() | {"llama-cpp-python": LLAMA_CPP_PYTHON}
        about["sides"] = {name: worker.ask("about") for name, worker in sides.items()}
        yield sides, Path(scratch), about


@app.default
def main(
    *,
    out: Path | None = None,
    venv: Path = ROOT / ".venv-peer",
    n_blocks: int = MIN_BLOCKS,
    speed: bool = True,
    logits: bool = True,
) -> None:
    """Compare, print a table, and write the result.

    Parameters
    ----------
    out: where the result goes; data/results/peer-cpu.json for a whole run.
    venv: the environment llama-cpp-python is built in.
    n_blocks: blocks of two runs of each side, in the speed part; at least 5 for a result.
    """
    whole = speed and logits
    if out is None and whole and n_blocks < MIN_BLOCKS:
        raise RuntimeError(f"a result needs {MIN_BLOCKS} blocks, not {n_blocks}; give --out")
    with both(venv) as (sides, scratch, result):
        if logits:
            result |= {"reference": [], "logits": []}
            for model in EXACT_MODELS:
                row = check_reference(sides[LLAMA], *model, scratch)
                result["reference"].append(row)
                print(f"{row['model']:28} llama.cpp against float64: NMSE {row['nmse']:.2e}")
            for model in LOGITS_MODELS + (SPEED_MODELS if speed else []):
                row = compare_logits(sides, *model, scratch)
                result["logits"].append(row)
                print(
                    f"{row['model']:28} NMSE {row['nmse']:.2e}  max {row['max_abs']:.2e}  "
                    f"argmax {row['argmax_agreement']:.0%}  wrong {len(row['decided_mismatches'])}"
                )
        for timed in TIMED if speed else ():
            result[timed.do] = []
            for model in SPEED_MODELS:
                row = compare_speed(sides, timed, *model, n_blocks)
                result[timed.do].append(row)
                (low, high), t_s = row["ci95"], row["median_t_s"]
                print(
                    f"{row['model']:28} {row['test']}: {t_s[OURS]:.2f} t/s, llama.cpp "
                    f"{t_s[LLAMA]:.2f}; ratio {row['ratio']:.2f} ({low:.2f} to {high:.2f})"
                )
    if out := out or (RESULT if whole else None):
        write_text(out, json.dumps(result, indent=1) + "\n", parents=True)
        print(f"wrote {out}")


if __name__ == "__main__":
    start(app)
