"""Compiles a Python function that writes vector code into a kernel with an address.

Every kernel has one signature, `void kernel(int64 args, int64 part, int64 n_parts)`. Its body is
one call of the intrinsic that writes its code. numba compiles, links and caches it.
"""

from __future__ import annotations

import hashlib
import time
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite.binding as llvm
from numba import cfunc, types
from numba.extending import intrinsic

from workbench.backend import compiled
from workbench.backend.cpu.isa import Isa, available
from workbench.backend.cpu.vector import Body, Emit, Value
from workbench.model import draw_weights


@cache
def host_isas() -> list[Isa]:
    """The instruction sets of this machine; kernels are compiled for the first."""
    return available(dict(llvm.get_host_cpu_features()))


@cache
def source_digest() -> str:
    """A digest of this folder's source, of the words of gates and of stamps, and of the weights of
    draws; everything that is cached has it in its name.

    numba looks only at the file of the function it caches, and the code here comes from other
    files, too.
    """
    digest, here = hashlib.sha256(), Path(__file__).parent
    others = (here.parent / "gate.py", here.parent / "stamps.py", Path(draw_weights.__file__))
    for path in (*sorted(here.glob("*.py")), *others):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def dated(function: Any) -> Any:
    """Names a function after the folder's source. numba then finds only code made of this source,
    also of the functions that are called."""
    function.__qualname__ += f"_{source_digest()}"
    return function


def _kernel(args, part, n_parts):
    BODY(args, part, n_parts)  # type: ignore[name-defined]  # noqa: F821


def compile_kernel(name: str, body: Body, keep: bool = True):
    """The numba CFunc whose code `body` writes, cached on disk under `name` where it is kept.

    Each kernel has its own function object, with the body among the globals. numba keys its cache
    by a function's closure, and would never find an intrinsic there again. The name holds
    everything that a kernel depends on, so no two kernels share an index file.
    """

    @intrinsic
    def write(typing_context, args, part, n_parts):
        def generate(context, builder, signature, values):
            emit = Emit(builder)
            body(emit, *(Value(emit, "i64", 1, v) for v in values))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    function = FunctionType(_kernel.__code__, {**globals(), "BODY": write}, name)
    function.__qualname__ = f"{name}_{source_digest()}"
    function.__module__ = __name__
    begun_ns = time.perf_counter_ns()
    made = cfunc("void(int64,int64,int64)", cache=keep)(function)
    if keep and not made.cache_hits:
        compiled.took(begun_ns, compiled.kept_by(made))
    return made
