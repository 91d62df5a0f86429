"""Compiles a Python function that writes vector code into a kernel with an address.

Every kernel has one signature, `void kernel(int64 args, int64 part, int64 n_parts)`. Its body
writes LLVM's text, and LLVM makes machine code of the text for this machine's CPU.

Compiling takes seconds, so machine code is kept in the user's cache (`compiled.cache_dir`), which
all checkouts and processes share. It is kept under two names:

    NAME-SOURCES.key  named by the kernel and a digest of this folder's sources; holds DIGEST
    text-DIGEST.o     named by a digest of the text that the body writes; holds the machine code

Both have the compiler and the CPU in their digests. A process that starts finds the first name, and
no body runs. Where a source was edited, the body runs and the second name is looked for. So an edit
that changes no instruction compiles nothing: a docstring, or another kernel.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from workbench.backend import compiled
from workbench.backend.clock import stamps
from workbench.backend.cpu.isa import Isa, available
from workbench.backend.cpu.kernels.vector import Body, Emit, Value
from workbench.backend.plan import gate
from workbench.model import draw_weights

ENTRY = "kernel"  # the function's name in its text
DIGEST_BYTES = 32  # of the code; a kept file begins with the digest

_I64 = ir.IntType(64)
_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_compiling = threading.Lock()
_loaded: list[Any] = []  # engines that own the code; kernels stay to the end of the process


class CompiledKernel(NamedTuple):
    """A kernel in memory. address: of its code. ctypes: calls it from Python, without the GIL."""

    address: int
    ctypes: Callable[[int, int, int], None]


@cache
def host_isas() -> list[Isa]:
    """The instruction sets of this machine; kernels are compiled for the first."""
    return available(dict(llvm.get_host_cpu_features()))


@cache
def source_digest() -> str:
    """A digest of the sources that decide a body's text, and of the compiler."""
    digest, here = hashlib.sha256(_compiler()), Path(__file__).parent
    others = (Path(gate.__file__), Path(stamps.__file__), Path(draw_weights.__file__))
    for path in (*sorted(here.rglob("*.py")), *others):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def compile_kernel(name: str, body: Body, keep: bool = True) -> CompiledKernel:
    """The kernel whose code `body` writes.

    name: says everything that decides the body's text, except the sources.
    keep: whether the machine code is taken from the cache, and kept there.
    """
    with _compiling:
        if not keep:
            return _load(_machine_code(text_of(body)))
        folder = compiled.cache_dir()
        by_name = _by_name(name, folder)
        with suppress(OSError):
            code = _read(folder / by_name.read_text())
            if code is not None:
                return _load(code)
        return _load(_of_text(text_of(body), folder, by_name))


def is_kept(name: str) -> bool:
    """Whether the cache has the machine code of the kernel of this name, of today's sources."""
    folder = compiled.cache_dir()
    try:
        return (folder / _by_name(name, folder).read_text()).is_file()
    except OSError:
        return False


def _by_name(name: str, folder: Path) -> Path:
    return folder / f"{name}-{source_digest()}.key"


def text_of(body: Body) -> str:
    """The text that a body writes: an LLVM module with the function ENTRY."""
    module = ir.Module(ENTRY)
    module.triple = llvm.get_default_triple()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * 3), ENTRY)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    emit = Emit(builder)
    args, part, n_parts = (Value(emit, "i64", 1, argument) for argument in function.args)
    body(emit, args, part, n_parts)
    builder.ret_void()
    return str(module)


def _of_text(text: str, folder: Path, by_name: Path) -> bytes:
    """The machine code of a text, out of the cache or compiled. by_name: the .key file, which then
    holds the text's digest."""
    key = hashlib.sha256(_compiler() + text.encode()).hexdigest()[:32]
    by_text = folder / f"text-{key}.o"
    code = _read(by_text)
    if code is None:
        begun_ns = time.perf_counter_ns()
        code = _machine_code(text)
        compiled.took(begun_ns, folder)
        compiled.keep(by_text, hashlib.sha256(code).digest() + code)
    compiled.keep(by_name, by_text.name.encode())
    return code


def _read(path: Path) -> bytes | None:
    """A kept object file; None where there is none, or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return code if digest == hashlib.sha256(code).digest() else None


def _compiler() -> bytes:
    """The compiler that makes machine code of a text, and the CPU it compiles for."""
    version = ".".join(map(str, llvm.llvm_version_info))
    features = llvm.get_host_cpu_features().flatten()
    cpu = (llvm.get_default_triple(), llvm.get_host_cpu_name(), features)
    return repr((llvmlite.__version__, version, *cpu)).encode()


@cache
def _target() -> Any:
    """This machine's CPU, for code that is loaded where it is compiled."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3,
        reloc="static" if target.name.startswith("x86") else "default", codemodel="jitdefault",
        jit=True,
    )  # fmt: skip


def _machine_code(text: str) -> bytes:
    """An object file of the text, optimized. No float operation is contracted or reassociated."""
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    passes = llvm.create_pass_builder(_target(), options).getModulePassManager()
    passes.run(module, llvm.create_pass_builder(_target(), options))
    code: bytes = _target().emit_object(module)
    return code


def _load(code: bytes) -> CompiledKernel:
    """The kernel of an object file, in executable memory."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _loaded.append(engine)
    address = engine.get_function_address(ENTRY)
    return CompiledKernel(address, _SIGNATURE(address))
