"""Operations of compiled loops below numba: atomic words, indirect calls, the C library's waits.

Addresses are int64, so a loop can walk memory that it shares with other threads and with Python.
Every operation is LLVM IR, or a symbol of the C library found when the code is loaded. None bakes
in a pointer, so numba can cache its callers.
"""

from __future__ import annotations

import platform
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


@intrinsic
def load(typingctx, address):
    """The word at `address`, sequentially consistent."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(_pointer(builder, args[0]), ORDER, 8)

    return types.int64(types.int64), codegen


@intrinsic
def store(typingctx, address, value):
    """Sets the word at `address`, sequentially consistent."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[1], _pointer(builder, args[0]), ORDER, 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def put(typingctx, address, value):
    """Sets the word at `address`; only the next `store` orders it."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[1], _pointer(builder, args[0]), "monotonic", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def fetch_add(typingctx, address, value):
    """Adds to the word at `address`; returns the old value."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], ORDER)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def swap_if(typingctx, address, expected, value):
    """Sets the word at `address` where it is `expected`; True where it was set."""

    def codegen(context, builder, sig, args):
        pair = builder.cmpxchg(_pointer(builder, args[0]), args[1], args[2], ORDER)
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


# The instruction that tells a core of a spin loop: LLVM intrinsic and operands. An unlisted machine
# spins without it.
_PAUSE: dict[str, tuple[str, tuple[int, ...]]] = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "aarch64": ("llvm.aarch64.hint", (1,)),
    "arm64": ("llvm.aarch64.hint", (1,)),
}


@intrinsic
def pause(typingctx):
    """Tells the core that this is a spin loop."""

    def codegen(context, builder, sig, args):
        if platform.machine() in _PAUSE:
            name, operands = _PAUSE[platform.machine()]
            word = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [word] * len(operands))
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            builder.call(function, [ir.Constant(word, o) for o in operands])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_kernel(typingctx, function, args, part, n_parts):
    """Calls the C function `void(int64 args, int64 part, int64 n_parts)` at address `function`."""

    def codegen(context, builder, sig, values):
        kernel = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
        builder.call(builder.inttoptr(values[0], kernel.as_pointer()), values[1:])
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, word, word), codegen


@intrinsic
def copy_bytes(typingctx, dst, src, nbytes):
    """memmove: the ranges may overlap."""

    def codegen(context, builder, sig, args):
        byte = ir.IntType(8).as_pointer()
        dst, src = (builder.inttoptr(a, byte) for a in args[:2])
        cgutils.raw_memmove(builder, dst, src, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def two_words(typingctx):
    """Address of 16 bytes of the calling function's stack: enough for a timespec."""

    def codegen(context, builder, sig, args):
        room = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
        return builder.ptrtoint(room, I64)

    return types.int64(), codegen
