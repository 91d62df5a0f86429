"""The common part of the steps of `data.measure`: folders, kept runs, models, devices.

Every run records in `result` the read bandwidth that its own process measured, so a share of the
bandwidth compares nothing across processes:

    read_gbps      GB/s of the fastest of several reading kernels; read_rates: of each of them
    product_tflops of an F16 product of 8192 x 8192 x 8192 by cuBLAS, where there is cuBLAS
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import workbench as wb
from data.measure.matrix import Row
from workbench.backend.base import open_backend
from workbench.backend.cuda.kernels.kernel import Gemm
from workbench.benchmarks.compare.arms import switched
from workbench.benchmarks.kernels.kernel_rigs import rig_of
from workbench.benchmarks.runs import provenance, results
from workbench.common.errors import DeviceError, UsageError
from workbench.common.output import write_text
from workbench.config import BEST, TogglePreset, parse_changes
from workbench.graph import ops
from workbench.model.synth.models import write_model
from workbench.model.synth.shapes import PRESETS, find_preset, quant_name, tensor_type, tensors
from workbench.program.commands import COMPUTE_STREAM, Launch, Space
from workbench.server.serving import serving

ROOT = Path(__file__).resolve().parents[2]
FILES = ("load", "ablation", "launches", "counters", "races")  # kinds that write one JSON file
QUICK_CELLS = {"perplexity": 64}  # cells of the cache in quick runs; else 1,024
SIZE = 8192  # of the large product: rows, columns and tokens
PRODUCTS = 8  # of them in one replay


@dataclass(frozen=True)
class Session:
    """One call of `measure`.

    most_gb: models with larger files are left out.
    quick: tiny models of the same types and few repetitions show that every step works; no figures.
    only: names of models in folders (`llama-3-8b-q8_0,llama-3.2-1b-bf16`) that are measured; empty
        for all.
    deadline: no row begins that would probably end later (`time.monotonic`).
    """

    out: Path
    models: Path
    device: str
    most_gb: float
    quick: bool
    only: str = ""
    deadline: float = math.inf

    @property
    def prefix(self) -> str:
        """The beginning of names. Quick runs must not be taken for real ones."""
        return f"quick-{self.device}" if self.quick else self.device

    def at(self, row: Row) -> Path:
        """The folder of a row, or its file, where its kind writes one file."""
        return self.out / f"{self.prefix}-{row.folder}{'.json' if row.kind in FILES else ''}"

    def emptied(self, row: Row) -> Path:
        """The emptied folder of a row."""
        shutil.rmtree(self.at(row), ignore_errors=True)
        return self.at(row)

    def write(self, row: Row, found: dict[str, Any]) -> None:
        """Writes a row's record, with the date, as one JSON file that appears whole."""
        record = {"date": provenance.utc_now()} | found
        write_text(self.at(row), json.dumps(record, indent=1) + "\n", parents=True)

    def takes(self, model: str) -> bool:
        """Whether a model is asked for and small enough. Where it is too large, a line says so."""
        if self.only and model not in self.only.split(","):
            return False
        preset, quant = parsed(model)
        gb = gigabytes(model)
        if self.quick or gb <= self.most_gb:
            return True
        print(f"{preset} {quant}: left out, {gb:.1f} GB is above the limit", flush=True)
        return False

    def late(self, row: Row) -> bool:
        """Whether a row would probably end after the deadline. Then a line says so."""
        if late := time.monotonic() + row.most_s > self.deadline:
            said = f"left, {row.most_s:.0f} s are too many; call again"
            print(f"{self.at(row).name}: {said}", flush=True)
        return late

    def has(self, row: Row) -> bool:
        """Whether the machine has as many GPUs as a row needs. If not, a line says so."""
        if row.gpus == 1:
            return True
        last = {"number": row.gpus - 1} if self.device == "cuda" else {}
        try:
            open_backend(self.device, **last).close()
        except DeviceError as reason:
            print(f"{row.step}: left out ({reason})", flush=True)
            return False
        return True

    def path(self, model: str) -> Path:
        """The model's file. A missing file is written."""
        preset, quant = parsed(model)
        if self.quick:
            preset = "tiny-qwen3" if preset.startswith("qwen3") else "tiny-llama"
        return model_file(preset, quant, self.models)

    @contextmanager
    def engine(self, row: Row) -> Iterator[wb.Engine]:
        """An engine of a row's model, with programs kept and everything else off; run variants of
        it."""
        path, kept = self.path(row.model), wb.Toggles(graph_reuse="set_rows")
        most = QUICK_CELLS.get(row.kind, 1024) if self.quick else row.n_ctx
        with wb.Engine.load(
            path, device=self.device, n_ctx=min(row.n_ctx, most), toggles=kept,
            n_ubatch=row.n_ubatch, n_seqs=row.n_seqs, n_kv_pad=row.n_kv_pad,
            n_devices=row.n_devices,
        ) as engine:  # fmt: skip
            print(f"{path.stem}: {engine.backend.description}", flush=True)
            yield engine

    def variant(self, engine: wb.Engine, row: Row) -> wb.Engine:
        """The engine with a row's toggles."""
        return engine.variant(toggles_of(row.toggles, engine))

    def rates(self, backend: Any) -> dict[str, Any]:
        """The rates of a device, measured now: the keys of the module's docstring."""
        read = rig_of(backend, self.quick).read_rates()
        found: dict[str, Any] = {"read_gbps": max(read.values()), "read_rates": read}
        if backend.name == "cuda":
            found["product_tflops"] = product_tflops(backend)
        return found


def everything(engine: wb.Engine) -> wb.Toggles:
    """The toggles with everything on except plans; pdl where the device has it."""
    toggles = wb.Toggles(graph_reuse="set_rows", sync="implicit", copy_stream="compute")
    pdl = "on" if engine.backend.capabilities.programmatic else "off"
    return toggles.switched("fuse", "on").switched("defer_norm", "on").switched("pdl", pdl)


SERVED = "serving"  # the toggles of `workbench serve`
RESOLVED = (BEST, SERVED)  # chosen for a device and a number of sequences
BACKGROUNDS: dict[str, Callable[[wb.Engine], wb.Toggles]] = {
    "baseline": lambda engine: wb.Toggles(),
    "kept": lambda engine: wb.Toggles(graph_reuse="set_rows"),
    "all": everything,
}


def toggles_of(spec: str, engine: wb.Engine, n_seqs: int = 0) -> wb.Toggles:
    """The toggles of a row: a background, and then each `NAME=VALUE`. Preset `best` is resolved
    with these changes for n_seqs sequences (0: as many as the engine's), and so are the toggles of
    `workbench serve` (`serving`)."""
    background, _, changes = spec.partition(" ")
    if background not in RESOLVED:
        return switched(BACKGROUNDS[background](engine), changes)
    wanted = TogglePreset(BEST, parse_changes(changes), n_seqs)
    return engine.resolve(serving(engine.device, wanted) if background == SERVED else wanted)


def parsed(model: str) -> tuple[str, str]:
    """Preset and type of a model by its name in folders: `llama-3-8b-q4_0` -> llama-3-8b, Q4_0.
    Raises UsageError for a preset that does not exist."""
    named = [preset for preset in PRESETS if model.startswith(f"{preset}-")]
    if not named:
        raise UsageError(f"{model}: no such model; give one as folders do, llama-3-8b-q8_0")
    preset = max(named, key=len)
    return preset, model.removeprefix(f"{preset}-").upper()


def gigabytes(model: str) -> float:
    """The size of a model's weights."""
    preset, quant = parsed(model)
    shape = find_preset(preset)
    typed = ((s.shape, tensor_type(s, shape, quant_name(quant))) for s in tensors(shape))
    return sum(math.prod(s[:-1]) * dtype.row_bytes(s[-1]) for s, dtype in typed) / 1e9


def path_of(preset: str, quant: str, folder: Path) -> Path:
    """The path of a model in a folder, whether its file is there or not."""
    return folder / f"{preset}-{quant_name(quant)}.gguf"


def model_file(preset: str, quant: str, folder: Path) -> Path:
    """The file of a model in a folder. A missing file is written."""
    return write_model(preset, quant_name(quant), path_of(preset, quant, folder))


def is_complete(path: Path, needs: str = "") -> bool:
    """Whether a folder holds a complete run of the commit that is checked out, or a file is of it.
    needs: a key that the `result` of a complete run has."""
    file, commit = path if path.suffix == ".json" else path / results.RUN_JSON, provenance.commit()
    try:
        run = json.loads(file.read_text())
    except (OSError, ValueError):
        return False
    ours = run.get("commit") == commit and commit["hash"] != provenance.UNKNOWN
    whole = path is file or (
        run["status"] == results.COMPLETE and (not needs or needs in run["result"])
    )
    return bool(ours and whole)


def add_to_result(folder: Path, **found: Any) -> None:
    """Adds keys to the `result` of a run folder."""
    run = results.load_run(folder)
    run.run["result"] |= found
    results.write_run(folder, run.run, run.samples)


def cell_bytes(engine: wb.Engine) -> int:
    """Bytes of K and V of a cell, in all layers."""
    cells = 256
    return sum(t.nbytes for pair in engine.model.caches(cells) for t in pair) // cells


def product_flops(engine: wb.Engine, n_tokens: int) -> int:
    """Arithmetic operations of the products with weights in a step of n_tokens and one output."""
    nodes = [c.node for c in engine.program(n_tokens).singly() if isinstance(c, Launch)]
    for node in nodes:
        nodes += node.parts
    return sum(ops.flops(n) for n in nodes if n.op == "mul_mat" and not n.parts)


@contextmanager
def memory(backend: Any, *wanted: tuple[int, Space]) -> Iterator[list[Any]]:
    """In the body, blocks of a backend's memory, each of so many bytes in a space. At the end they
    are freed, once the backend is idle."""
    found = list[Any]()
    try:
        for block in wanted:
            found.append(backend.allocate(*block))
        yield found
    finally:
        backend.synchronize()
        for one in found:
            one.free()


def product_tflops(backend: Any) -> float:
    """TFLOP/s of the fastest replay of PRODUCTS large F16 products by cuBLAS. The numbers are
    random: on zeros a device draws less power, and is faster than it can be with data."""
    from workbench.backend.cuda.device.replay import TimedReplay

    rng, nbytes = np.random.default_rng(0), SIZE * SIZE * 2
    some = rng.standard_normal((SIZE // 8, SIZE), np.float32).astype(np.float16)
    blocks = (nbytes, Space.PINNED), *((n, Space.DEVICE) for n in (nbytes, nbytes, 2 * nbytes))
    with memory(backend, *blocks) as (staging, x, w, dst):
        staging.array[:] = np.tile(some, (8, 1)).reshape(-1).view(np.uint8)
        for one in (x, w):
            backend.copy(one.address, staging.address, nbytes, COMPUTE_STREAM, False)()
        backend.synchronize()
        gemm = Gemm("F16", dst.address, w.address, x.address, SIZE, SIZE, SIZE, SIZE)
        issue = backend._prepare(gemm, backend._stream(COMPUTE_STREAM), "large product")
        with TimedReplay(backend, [issue] * PRODUCTS) as replay:
            us = min(replay.time_us(5)) / PRODUCTS
    return 2 * SIZE**3 / us / 1e6
