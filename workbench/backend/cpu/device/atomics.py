"""Operations of compiled loops below numba: atomic words, indirect calls, the C library's waits.

Addresses are int64, so a loop can walk memory that it shares with other threads and with Python.
Every operation is LLVM IR, or a symbol of the C library found when the code is loaded. None bakes
in a pointer, so numba can cache its callers.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import wraps
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing import signature
from numba.extending import intrinsic as numba_intrinsic

# compiled code calls the result, without the declared first argument
intrinsic: Any = numba_intrinsic

I64 = ir.IntType(64)
ORDER = "seq_cst"

_word, _int = types.int64, types.int32
_external: Any = types.ExternalFunction
clock_gettime = _external("clock_gettime", signature(_int, _int, _word))
sched_yield = _external("sched_yield", signature(_int))
mutex_init = _external("pthread_mutex_init", signature(_int, _word, _word))
mutex_lock = _external("pthread_mutex_lock", signature(_int, _word))
mutex_unlock = _external("pthread_mutex_unlock", signature(_int, _word))
cond_init = _external("pthread_cond_init", signature(_int, _word, _word))
cond_wait = _external("pthread_cond_wait", signature(_int, _word, _word))
cond_timedwait = _external("pthread_cond_timedwait", signature(_int, _word, _word, _word))
cond_broadcast = _external("pthread_cond_broadcast", signature(_int, _word))


def _pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, I64.as_pointer())


def operation(result: Any, *operands: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes an operation of numba types `operands` that gives a `result`. The decorated function
    writes the operation's code, and returns the operation's value, if any."""

    def made(write: Callable[..., Any]) -> Any:
        def typed(typingctx, *types_):
            def codegen(context, builder, sig, args):
                value = write(builder, *args)
                return context.get_dummy_value() if value is None else value

            return result(*operands), codegen

        return intrinsic(wraps(write)(typed))

    return made


@operation(_word, _word)
def load(builder, address):
    """The word at `address`, sequentially consistent."""
    return builder.load_atomic(_pointer(builder, address), ORDER, 8)


@operation(types.void, _word, _word)
def store(builder, address, value):
    """Sets the word at `address`, sequentially consistent."""
    builder.store_atomic(value, _pointer(builder, address), ORDER, 8)


@operation(types.void, _word, _word)
def put(builder, address, value):
    """Sets the word at `address`; only the next `store` orders it."""
    builder.store_atomic(value, _pointer(builder, address), "monotonic", 8)


@operation(_word, _word, _word)
def fetch_add(builder, address, value):
    """Adds to the word at `address`; returns the old value."""
    return builder.atomic_rmw("add", _pointer(builder, address), value, ORDER)


@operation(types.boolean, _word, _word, _word)
def swap_if(builder, address, expected, value):
    """Sets the word at `address` where it is `expected`; True where it was set."""
    pair = builder.cmpxchg(_pointer(builder, address), expected, value, ORDER)
    return builder.extract_value(pair, 1)


# The instruction that tells a core of a spin loop: LLVM intrinsic and operands. An unlisted machine
# spins without it.
_PAUSE: dict[str, tuple[str, tuple[int, ...]]] = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "aarch64": ("llvm.aarch64.hint", (1,)),
    "arm64": ("llvm.aarch64.hint", (1,)),
}


@operation(types.void)
def pause(builder):
    """Tells the core that this is a spin loop."""
    if platform.machine() in _PAUSE:
        name, operands = _PAUSE[platform.machine()]
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [word] * len(operands))
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(function, [ir.Constant(word, o) for o in operands])


@operation(types.void, _word, _word, _word, _word)
def call_kernel(builder, function, args, part, n_parts):
    """Calls the C function `void(int64 args, int64 part, int64 n_parts)` at address `function`."""
    kernel = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
    builder.call(builder.inttoptr(function, kernel.as_pointer()), (args, part, n_parts))


@operation(types.void, _word, _word, _word)
def copy_bytes(builder, dst, src, nbytes):
    """memmove: the ranges may overlap."""
    byte = ir.IntType(8).as_pointer()
    dst, src = (builder.inttoptr(a, byte) for a in (dst, src))
    cgutils.raw_memmove(builder, dst, src, nbytes, 1)


@operation(_word)
def two_words(builder):
    """Address of 16 bytes of the calling function's stack: enough for a timespec."""
    room = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
    return builder.ptrtoint(room, I64)
