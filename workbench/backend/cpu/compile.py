"""From a Python function that writes vector code to the address of a compiled kernel.

Every kernel has one signature, `void kernel(int64 args, int64 lane, int64 n_lanes)`, and one body,
a call of the intrinsic that writes its code; numba compiles, links and caches it.
"""

from __future__ import annotations

import hashlib
import time
from functools import cache
from pathlib import Path
from types import FunctionType

import llvmlite.binding as llvm
from numba import cfunc, types
from numba.extending import intrinsic

from workbench.backend import compiled
from workbench.backend.cpu.isa import Isa, available
from workbench.backend.cpu.vector import Body, Emit, Value


@cache
def host_isas() -> list[Isa]:
    """What this machine can run; kernels are compiled for the first."""
    return available(dict(llvm.get_host_cpu_features()))


@cache
def source_digest() -> str:
    """Names this version of the package's source in the names of cached kernels.

    numba looks only at the file of the function it caches, and here all code comes from others.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _kernel(args, lane, n_lanes):
    BODY(args, lane, n_lanes)  # type: ignore[name-defined]  # noqa: F821


def compile_kernel(name: str, body: Body):
    """The numba CFunc whose code `body` writes, cached on disk under `name`.

    One function object per kernel, with the body among its globals and not in a closure: numba
    keys its cache by the closure, and would never find an intrinsic there again. The name holds
    all a kernel depends on, so that no two kernels share an index file.
    """

    @intrinsic
    def write(typing_context, args, lane, n_lanes):
        def generate(context, builder, signature, values):
            emit = Emit(builder)
            body(emit, *(Value(emit, "i64", 1, v) for v in values))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    function = FunctionType(_kernel.__code__, {**globals(), "BODY": write}, name)
    function.__qualname__ = f"{name}_{source_digest()}"
    function.__module__ = __name__
    begun_ns = time.perf_counter_ns()
    made = cfunc("void(int64,int64,int64)", cache=True)(function)
    if not made.cache_hits:
        compiled.took(begun_ns, compiled.kept_by(made))
    return made
