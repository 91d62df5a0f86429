"""Kernels of `kernels/` compiled as C++ for this machine, and run: their logic, without a GPU.

What is CUDA's alone stands in `on_host.hpp`. Some instructions in assembler are replaced by what
they compute, all others end the process. Arithmetic is a CPU's: 2^x has another last bit.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from workbench.backend.cuda.kernels import nvrtc, op_table
from workbench.backend.cuda.kernels.kernel import Kernel, Operands, packed
from workbench.graph.ir import Node, Tensor

HEADER = Path(__file__).with_name("on_host.hpp")
COMPILER = shutil.which("g++")
FLAGS = ("-O2", "-std=c++20", "-march=native", "-shared", "-fPIC", "-w", "-fno-strict-aliasing")
STOP = 'on_host::fail("no such instruction");'
INSTRUCTIONS = {
    "cvt.f32.f16": "f = on_host::half_to_float(h);",
    "cvt.rn.f16.f32": "h = on_host::float_to_half(f);",
    "ex2.approx.ftz.f32": "r = std::exp2(x);",
    "mov.u64": "t = 0;",
}
ASSEMBLER = re.compile(r"\basm\b(?:\s+volatile)?\s*\(")
INCLUDE = re.compile(r'^#include "(\S+)"', re.M)
KERNEL = re.compile(r'extern "C" __global__[^;{]*?(\w+)\((?=[\w ]*\*)', re.S)


def without_assembler(text: str) -> str:
    """A source whose assembler is C++."""
    out, at = [], 0
    while found := ASSEMBLER.search(text, at):
        end, depth, quoted = found.end(), 1, False
        while depth:
            if text[end] == '"':
                quoted = not quoted
            elif not quoted:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        opcode = text[found.end() : end].strip().lstrip('"').split()[0]
        out += [text[at : found.start()], INSTRUCTIONS.get(opcode, STOP)]
        at = end + text[end:].index(";") + 1
    return "".join([*out, text[at:]])


@cache
def library(file: str, defines: tuple[str, ...], edits: tuple = ()) -> ctypes.CDLL:
    """A source with macros, compiled: `launch_` and a kernel's name. edits: of the source,
    old text and new."""
    folder = nvrtc.source_dir()
    texts = {p.name: without_assembler(p.read_text()) for p in folder.glob("*.cu*")}
    for old, new in edits:
        assert texts[f"{file}.cu"].count(old) == 1, old
        texts[f"{file}.cu"] = texts[f"{file}.cu"].replace(old, new)
    name, shared = f"{file}.cu", "static u8* const memory = shared_memory;"
    texts[name] = re.sub(r"extern __shared__ [^;]*\bmemory\[\];", shared, texts[name])
    sources = [name, *INCLUDE.findall(texts[name])]
    kernels = [kernel for source in sources for kernel in KERNEL.findall(texts[source])]
    entries = "\n".join(
        f'extern "C" void launch_{k}(const uint64_t* a, unsigned x, unsigned y, unsigned n, '
        f"unsigned seed) {{ on_host::launch({k}, a, x, y, n, seed); }}"
        for k in dict.fromkeys(kernels)
    )
    macros = "\n".join(f"#define {d.replace('=', ' ', 1)}" for d in defines)
    whole = f'#include "on_host.hpp"\n{macros}\n#include "{name}"\n{entries}\n'
    key = hashlib.sha256(repr((texts, whole, HEADER.read_text(), FLAGS)).encode()).hexdigest()
    made = nvrtc.cache_dir() / f"{file}-on-host-{key[:24]}.so"
    if not made.is_file():
        with tempfile.TemporaryDirectory() as build:
            for source, text in texts.items():
                Path(build, source).write_text(text)
            Path(build, "whole.cpp").write_text(whole)
            shutil.copy(HEADER, build)
            assert COMPILER is not None
            command = [COMPILER, *FLAGS, "-o", "whole.so", "whole.cpp"]
            done = subprocess.run(command, cwd=build, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:4000]
            shutil.move(Path(build, "whole.so"), made)
    return ctypes.CDLL(str(made))


def compute(node: Node, arrays: dict[Tensor, np.ndarray], seed: int = 0, edits: Any = ()) -> Any:
    """The bytes of the node's output; fails where bytes beside it or beside the scratch are
    written. seed: the order of threads and blocks. edits: of every launch but those that combine.
    """
    out = node.output
    nothing = np.full(max(out.nbytes, op_table.scratch_bytes(node)), 0xFF, np.uint8)
    rooms = {t: _aligned(a) for t, a in arrays.items()} | {out: _aligned(nothing[: out.nbytes])}
    scratch = _aligned(nothing[: op_table.scratch_bytes(node)])
    at = lambda tensor: int(rooms[tensor][1].ctypes.data)  # noqa: E731
    for work in op_table.launches(node, Operands(at, int(scratch[1].ctypes.data), 0)):
        assert isinstance(work, Kernel)
        own = library(work.file, work.defines, edits if "combine" not in work.function else ())
        launch, (block, _) = getattr(own, f"launch_{work.function}"), packed(work.args)
        launch(ctypes.byref(block), *map(ctypes.c_uint, (*work.grid, work.block, seed)))
    for room, body in (*rooms.values(), scratch):
        begin = body.ctypes.data - room.ctypes.data
        assert (room[:begin] == 0xA5).all() and (room[begin + body.nbytes :] == 0xA5).all()
    return rooms[out][1]


def _aligned(content: np.ndarray, guard: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Memory with these bytes between two guards of 0xA5, on a multiple of 256; and the bytes."""
    data = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
    room = np.full(data.nbytes + 3 * guard, 0xA5, np.uint8)
    begin = guard + -(room.ctypes.data + guard) % guard
    body = room[begin : begin + data.nbytes]
    body[:] = data
    return room, body
