"""What the steps of `data.measure` share: where runs go, which are kept, models, devices.

Every run records in `result` the read bandwidth that its own process measured beside it, so that a
share of it compares nothing across processes:

    read_gbps      GB/s of the fastest of several reading kernels; read_rates: of each of them
    product_tflops of an F16 product of 8192 x 8192 x 8192 by cuBLAS, where there is cuBLAS
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import workbench as wb
from workbench.backend.cuda.kernel import Gemm
from workbench.bench import provenance, results
from workbench.bench.kernel_rigs import rig_of
from workbench.graph import ops
from workbench.graph.ir import Node
from workbench.model.presets import find_preset, quant_name, tensor_type, tensors
from workbench.model.synth import write_model
from workbench.output import write_text
from workbench.program.commands import COMPUTE_STREAM, Launch, Space

SIZE = 8192  # of the large product: rows, columns and tokens
PRODUCTS = 8  # of them in one replay


@dataclass(frozen=True)
class Session:
    """One call of `measure`. most_gb: models with larger files are left out. quick: tiny models of
    the same types and few repetitions, to see that every step works; no figures. only: the one
    model that is taken, as folders name it (llama-3-8b-q8_0)."""

    out: Path
    models: Path
    device: str
    most_gb: float
    quick: bool
    only: str = ""

    @property
    def prefix(self) -> str:
        """What names begin with: quick runs must not be taken for real ones."""
        return f"quick-{self.device}" if self.quick else self.device

    def folder(self, name: str, needs: str = "") -> Path | None:
        """Where run `name` goes, emptied; None where a complete run of this commit is there. needs:
        a key without which the `result` of a run is not complete."""
        folder = self.out / f"{self.prefix}-{name}"
        if self._holds(folder, needs):
            print(f"{folder.name}: there already, of this commit", flush=True)
            return None
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def _holds(self, folder: Path, needs: str) -> bool:
        try:
            run = json.loads((folder / results.RUN_JSON).read_text())
        except (OSError, ValueError):
            return False
        commit = provenance.commit()
        same = run["commit"] == commit and commit["hash"] != provenance.UNKNOWN
        whole = not needs or needs in run["result"]
        return bool(same and whole and run["status"] == results.COMPLETE)

    def _file(self, name: str) -> Path:
        return self.out / f"{self.prefix}-{name}.json"

    def wants(self, name: str) -> bool:
        """Whether file `name` (of `write`) is still to be made at this commit."""
        try:
            found = json.loads(self._file(name).read_text())["commit"]
        except (OSError, ValueError, KeyError):
            return True
        there = found == provenance.commit() and found["hash"] != provenance.UNKNOWN
        if there:
            print(f"{self._file(name).name}: there already, of this commit", flush=True)
        return not there

    def write(self, name: str, found: dict[str, Any]) -> None:
        """Writes what was found, with the date, as one JSON file that appears whole."""
        path = self._file(name)
        record = {"date": provenance.utc_now()} | found
        write_text(path, json.dumps(record, indent=1) + "\n", parents=True)

    def takes(self, preset: str, quant: str) -> bool:
        """Whether a model is wanted and small enough; says so where it is too large."""
        if self.only not in ("", slug(preset, quant)):
            return False
        gb = 0.0 if self.quick else file_gb(preset, quant)
        if gb > self.most_gb:
            print(f"{preset} {quant}: left out, {gb:.1f} GB is above the limit", flush=True)
        return gb <= self.most_gb

    def path(self, preset: str, quant: str) -> Path:
        """The model's file, written where it is missing."""
        if self.quick:
            preset = "tiny-qwen3" if preset.startswith("qwen3") else "tiny-llama"
        quant = quant_name(quant)
        return write_model(preset, quant, self.models / f"{preset}-{quant}.gguf")

    @contextmanager
    def engine(
        self, preset: str, quant: str, n_ctx: int = 1024, **config: Any
    ) -> Iterator[wb.Engine]:
        """An engine of the model, everything off but kept programs; run its variants."""
        path, kept = self.path(preset, quant), wb.Toggles(graph_reuse="set_rows")
        with wb.Engine.load(
            path, device=self.device, n_ctx=n_ctx, toggles=kept, **config
        ) as engine:
            print(f"{path.stem}: {engine.backend.description}", flush=True)
            yield engine

    def rates(self, backend: Any) -> dict[str, Any]:
        """What the device can do, measured now: the keys of the docstring above."""
        read = rig_of(backend, self.quick).read_rates()
        found: dict[str, Any] = {"read_gbps": max(read.values()), "read_rates": read}
        if backend.name == "cuda":
            found["product_tflops"] = product_tflops(backend)
        return found


def everything(engine: wb.Engine) -> wb.Toggles:
    """Everything on but plans; pdl where the device has it."""
    toggles = wb.Toggles(graph_reuse="set_rows", sync="implicit", copy_stream="compute")
    pdl = "on" if engine.backend.capabilities.programmatic else "off"
    return toggles.switched("fuse", "on").switched("defer_norm", "on").switched("pdl", pdl)


def file_gb(preset: str, quant: str) -> float:
    """About the size of a model's file, in GB."""
    shape, quant = find_preset(preset), quant_name(quant)
    typed = ((spec.shape, tensor_type(spec, shape, quant)) for spec in tensors(shape))
    return sum(math.prod(s[:-1]) * dtype.row_bytes(s[-1]) for s, dtype in typed) / 1e9


def slug(preset: str, quant: str) -> str:
    return f"{preset}-{quant.lower()}"


def add_to_result(folder: Path, **found: Any) -> None:
    """Writes more keys into the `result` of a run folder."""
    run = results.load_run(folder)
    run.run["result"] |= found
    results.write_run(folder, run.run, run.samples)


def product_flops(engine: wb.Engine, n_tokens: int) -> int:
    """Arithmetic operations of the products with weights in a step of n_tokens and one output."""
    nodes = [c.node for c in engine.program(n_tokens).commands if isinstance(c, Launch)]
    return sum(ops.flops(part) for node in nodes for part in _parts(node) if part.op == "mul_mat")


def _parts(node: Node) -> Iterator[Node]:
    if not node.parts:
        yield node
    for part in node.parts:
        yield from _parts(part)


def product_tflops(backend: Any) -> float:
    """TFLOP/s of the fastest replay of PRODUCTS large F16 products by cuBLAS, on random numbers (on
    zeros a device draws less power and is faster than it can be with data)."""
    from workbench.backend.cuda.replay import Replay

    rng, nbytes = np.random.default_rng(0), SIZE * SIZE * 2
    some = rng.standard_normal((SIZE // 8, SIZE), np.float32).astype(np.float16)
    staging = backend.allocate(nbytes, Space.PINNED)
    x, w, dst = (backend.allocate(n, Space.DEVICE) for n in (nbytes, nbytes, 2 * nbytes))
    try:
        staging.array[:] = np.tile(some, (8, 1)).reshape(-1).view(np.uint8)
        for memory in (x, w):
            copy = backend.copy(memory.address, staging.address, nbytes, COMPUTE_STREAM, False)
            copy()
        backend.synchronize()
        gemm = Gemm("F16", dst.address, w.address, x.address, SIZE, SIZE, SIZE, SIZE)
        issue = backend._prepare(gemm, backend._stream(COMPUTE_STREAM), "large product")
        with Replay(backend, [issue] * PRODUCTS) as replay:
            us = min(replay.time_us(5)) / PRODUCTS
    finally:
        backend.synchronize()
        for memory in (staging, x, w, dst):
            memory.free()
    return 2 * SIZE**3 / us / 1e6
