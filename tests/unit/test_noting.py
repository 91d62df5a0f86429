"""Kernels that note when they ran: every kernel of every source does, and is otherwise the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.backend.cuda import ptx
from tests.backend.cuda.launch_cases import one_of_each
from tests.profiles import share, tiers
from workbench.backend.clock.launch_notes import CELLS, NOTE_BYTES
from workbench.backend.cuda.kernels import noting, nvrtc
from workbench.backend.cuda.kernels.kernel import Gemm, Kernel
from workbench.backend.issue.issued import Address

SOURCES = sorted(nvrtc.source_dir().glob("*.cu"))
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
OBJECT = "LaunchSpan launch_span(span_note);"


def entries(text: str) -> dict[str, list[str]]:
    """The kernels of a PTX text, and the types of their parameters."""
    names = re.findall(r"\.entry\s+([\w$]+)", text)
    return {name: ptx.parameters(text, name) for name in names}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_every_kernel_of_a_source_gets_a_note_and_keeps_its_lines(path: Path):
    source = path.read_bytes()
    noted, _ = noting.noting(source, {})
    found = noted.decode()
    kernels = COMMENT.sub("", source.decode()).count("__global__")
    assert (
        kernels and found.count(OBJECT) == found.count("unsigned long long* span_note)") == kernels
    )
    first, line, *rest = found.split("\n")
    assert (first, line) == (f'#include "{noting.HEADER}"', "#line 1")
    own = source.decode().split("\n")
    assert len(rest) == len(own)
    changed = [(a, b) for a, b in zip(own, rest, strict=True) if a != b]
    assert 1 <= len(changed) <= 2 * kernels
    taken_out = [b.replace(f" {OBJECT}", "").replace(", unsigned long long* span_note", "")
                 for _, b in changed]  # fmt: skip
    assert taken_out == [a for a, _ in changed], "nothing else is another"


@pytest.mark.parametrize("path", share(SOURCES, every=2), ids=lambda p: p.stem)
def test_every_kernel_notes_and_has_one_parameter_more(path: Path):
    plain = ptx.kernel_ptx(path.stem)
    noted = ptx.kernel_ptx(path.stem, (noting.NOTING,))
    assert entries(plain), "a source has kernels without macros, too"
    assert entries(noted) == {name: [*own, "u64"] for name, own in entries(plain).items()}
    for name, body in ptx.functions(noted).items():
        if name in entries(plain):
            opcodes = [statement.opcode for statement in body]
            notes = [op for op in opcodes if op == "red.global.min.u64"]
            assert len(notes) >= 2, f"{name} notes no begin and end"
    assert "red.global.min.u64" not in plain and "span_note" not in plain


def test_a_kernel_notes_at_every_return_whoever_returns():
    """What returns early notes its own end; the threads that stay note theirs. No barrier is
    added, so those that are there bear early returns as before."""
    source = b"""
extern "C" __global__ void __launch_bounds__(64)
    early(float* dst, int n) {
    if (threadIdx.x % 3 == n) return;
    __syncthreads();
    if (threadIdx.x > n) { dst[0] = 1; return; }
    dst[threadIdx.x] = n;
}
#define ONE(NAME) extern "C" __global__ void NAME(int* a) { \\
        a[threadIdx.x] = 1; \\
    }
ONE(first)
ONE(second)
extern "C" __global__ void nothing_inside(int unused) {}
"""
    text = ptx.compile_ptx("made_up", source, (noting.NOTING,))
    assert set(entries(text)) == {"early", "first", "second", "nothing_inside"}
    opcodes = {name: [s.opcode for s in body] for name, body in ptx.functions(text).items()}
    assert opcodes["early"].count("bar.sync") + opcodes["early"].count("barrier.sync") == 1
    timers = sum("globaltimer" in s.text for s in ptx.functions(text)["early"])
    assert timers == opcodes["early"].count("red.global.min.u64") >= 2
    for name, found in opcodes.items():
        assert found.count("red.global.min.u64") >= 2, name


def test_the_kernels_of_a_header_note_too():
    header = b'extern "C" __global__ void k(int* a) {\n    *a = 1;\n}\n'
    _, headers = noting.noting(b'#include "k.cuh"\n', {"k.cuh": header, "none.cuh": b"int f();"})
    changed = header.replace(
        b"int* a) {", b"int* a, unsigned long long* span_note) { " + OBJECT.encode()
    )
    assert headers == {"k.cuh": changed, "none.cuh": b"int f();"}


def test_cells_are_those_of_the_source():
    text = (nvrtc.source_dir() / noting.HEADER).read_text()
    assert re.findall(r"#define SPAN_CELLS (\d+)", text) == [str(CELLS)]
    assert NOTE_BYTES == CELLS * 16


@pytest.mark.timeout(0)
@pytest.mark.parametrize("share", tiers(4, 1), ids=["more", "all"])
def test_every_kernel_compiles_with_noting(share):
    works = one_of_each(90)[::share]
    wanted = {(w.file, (*w.defines, noting.NOTING)): w.function for w in works}
    nvrtc.compile_many(wanted, "sm_90")
    for (file, defines), name in wanted.items():
        cubin = nvrtc.cubin(file, "sm_90", defines)
        assert b".text." + name.encode() + b"\0" in cubin, f"{name} is not in {file}.cu"


@pytest.mark.slow
def test_every_source_compiles_with_noting():
    for path in SOURCES:
        noted = nvrtc.cubin(path.stem, "sm_90", (noting.NOTING,))
        assert noted.startswith(b"\x7fELF") and noted != nvrtc.cubin(path.stem, "sm_90")


def test_other_compilations_have_no_such_header(monkeypatch, tmp_path):
    """So what they are kept under is what it was."""
    seen: list[tuple[set[str], bytes]] = []

    def compiled(name, source, headers, arch, defines=()):
        seen.append((set(headers), source))
        return b"made"

    monkeypatch.setattr(nvrtc, "compile_source", compiled)
    for defines in ((), (noting.NOTING,)):
        nvrtc.cubin("rows", "sm_90", defines, folder=tmp_path)
    (plain, source), (noted, rewritten) = seen
    assert noted - plain == {noting.HEADER} and plain < noted
    assert source == (nvrtc.source_dir() / "rows.cu").read_bytes() != rewritten


def test_each_kernel_of_a_launch_has_the_next_note():
    kernel = Kernel("rows", "set_rows", (1, 1), 32, [4096, 1], ("A=1",), waits=True)
    gemm = Gemm("F16", 1, 2, 3, 4, 5, 6, 7)
    assert noting.noted([kernel, gemm], 0) == [kernel, gemm]
    first, product, second = noting.noted([kernel, gemm, kernel], 1 << 30)
    assert product is gemm, "a library's kernels note nothing"
    for n, one in enumerate((first, second)):
        assert isinstance(one, Kernel) and isinstance(one.args[-1], Address)
        assert one.args == [4096, 1, (1 << 30) + n * NOTE_BYTES]
        assert one._replace(args=kernel.args, defines=kernel.defines) == kernel
        assert one.defines == ("A=1", noting.NOTING)
