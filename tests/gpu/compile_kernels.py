"""Compiles what the GPU tests want, before they begin: `python -m tests.gpu.compile_kernels [SM]`.

Into the cache on disk, by one process for each core: in a single process only one thread at a time
can be in the compiler's front end. What a test wants besides is compiled at its first launch.

SM: what to compile for, 90 for 9.0; else the capability of the GPU. Compiling needs no GPU.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.twins.product import FOLDER
from workbench.backend.cuda.device.driver import device_properties, libraries
from workbench.backend.cuda.kernels import nvrtc
from workbench.common.errors import WorkbenchError

TESTS = sorted(Path(__file__).parent.glob("test_cuda_*.py"))
MODULES = [path.stem for path in TESTS if "\ndef kernels(sm: int)" in path.read_text()]
HELPERS = ("device", "gate", "read", "repack", "stamp")  # files without macros that no module names
Source = tuple[str, tuple[str, ...], Path | None]  # as `nvrtc.cubin` has them


def of_module(name: str, sm: int) -> set:
    module: Any = importlib.import_module(f"tests.gpu.{name}")
    return module.kernels(sm)


def compile_one(source: Source, sm: int) -> None:
    file, defines, folder = source
    nvrtc.cubin(file, f"sm_{sm}", defines, sources=folder)


def main() -> int:
    start, n = time.perf_counter(), len(os.sched_getaffinity(0))
    try:
        if sys.argv[1:]:
            sm = int(sys.argv[1])
        else:
            properties = device_properties(libraries()[0], 0)
            sm = 10 * int(properties["major"]) + int(properties["minor"])
        # a fresh interpreter for each: CUDA does not survive a fork
        with ProcessPoolExecutor(n, multiprocessing.get_context("spawn")) as pool:
            lists = pool.map(of_module, MODULES, [sm] * len(MODULES))
            wanted = set().union(*lists, {(file, ()) for file in HELPERS})
            sources: list[Source] = [(file, defines, None) for file, defines in sorted(wanted)]
            sources += [(path.stem, (), FOLDER) for path in sorted(FOLDER.glob("*.cu"))]
            list(pool.map(compile_one, sources, [sm] * len(sources), chunksize=2))
    except WorkbenchError as error:
        print(f"kernels are compiled as tests want them: {error}", file=sys.stderr)
        return 1
    took = time.perf_counter() - start
    print(f"{len(sources)} kernels compiled or found, {n} at a time, in {took:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
