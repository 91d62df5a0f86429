"""Kernels that note when they ran: the notes of a program, on a driver that logs what it is asked,
and what every source of kernels becomes."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.backend.cuda import ptx
from tests.backend.cuda.fake_cuda import Call, fake_backend
from tests.profiles import share
from workbench.backend.base import DeviceClock
from workbench.backend.clock.launch_notes import CELLS, NOTE_BYTES, LaunchNotes, NotedSpan
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.kernels import noting, nvrtc
from workbench.backend.null import open_backend
from workbench.common.errors import DeviceError, UsageError
from workbench.common.progress import Bar
from workbench.config import Toggles
from workbench.engine.look.kernel_spans import kernel_spans
from workbench.program.commands import Launch

KEPT = {"graph_reuse": "set_rows", "sync": "packed_implicit", "streams": "3"}
PLAN = {"plans": "ours", "plan_scope": "step", "copy_stream": "compute"}
WAYS: dict[str, dict[str, str]] = {
    "no plans": {},
    "dependent launch in a plan": PLAN | {"pdl": "on"},
    "fused inside branches": PLAN | {"fuse": "on", "branch_fusion": "inside"},
    "stores by pointer": PLAN | {"graph_reuse": "patch_pointers"},
    "several kernels a launch": {"attn_kernel": "vec", "kv_parts": "stream_k"},
}
FAR = 1 << 40  # addresses are no part of what a call does
SOURCES = sorted(nvrtc.source_dir().glob("*.cu"))
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
OBJECT, PARAMETER = "LaunchSpan launch_span(span_note);", ", unsigned long long* span_note)"


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[wb.Engine]:
    with pytest.MonkeyPatch.context() as patch:
        fake_backend(patch)
        patch.setattr(CudaBackend, "clock", lambda backend: DeviceClock(0, 0, 32))
        path = tiny_model("tiny-llama", "F16")
        with wb.Engine.load(path, device="cuda", n_ctx=512, toggles=Toggles(**KEPT)) as made:
            yield made


def split_off(call: Call) -> tuple[tuple[Any, ...], int]:
    """What a noting launch does besides, and its note. Addresses are no part of what it does; a
    function here says its file and macros."""
    function, *rest = call.args
    name, module = function.split(" of ")
    file, defines = ast.literal_eval(module)
    assert defines[-1] == noting.NOTING
    return plain(call, f"{name} of {(file, defines[:-1])!r}", *rest[:-1]), rest[-1]


def plain(call: Call, *args: Any) -> tuple[Any, ...]:
    return call.function, *(a for a in args or call.args if not isinstance(a, int) or a < FAR)


def decode(used: wb.Engine, n: int = 4) -> list[list[Call]]:
    """What the launches of each step are."""
    found, log = [], used.backend._driver.api.log  # type: ignore[attr-defined]
    used.reset()
    for token in range(n):
        log.clear()
        used.step([token])
        found.append([c for c in log if c.function.startswith(("cuLaunch", "cublasGemm"))])
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_noting_step_launches_the_same_with_notes(engine, monkeypatch, way):
    """Outside and inside plans: as many nodes and calls, in the same order, each with one argument
    more. So a kernel computes what it computed. Notes are read and emptied between steps."""
    done, reset = list[str](), LaunchNotes.reset

    def read(notes: LaunchNotes) -> list[NotedSpan]:  # nothing computes, so nothing is noted
        done.append("read")
        return [NotedSpan(kernel, 10 * i, 10 * i + 5) for i, kernel in enumerate(notes.kernels)]

    monkeypatch.setattr(LaunchNotes, "read", read)
    monkeypatch.setattr(LaunchNotes, "reset", lambda notes: done.append("reset") or reset(notes))
    with engine.variant(Toggles(**KEPT | WAYS[way])) as used:
        wanted = [[plain(call) for call in step] for step in decode(used)]
        with kernel_spans(used) as found:
            noting_steps = decode(used)
        for step, own, spans in zip(noting_steps, wanted, found.steps, strict=True):
            pairs = [split_off(call) for call in step]
            assert [one for one, _ in pairs] == own
            notes = sorted(note for _, note in pairs)
            assert {b - a for a, b in itertools.pairwise(notes)} == {NOTE_BYTES}
            assert len(notes) == len(spans)
        assert [s[0].args["step"] for s in found.steps] == list(range(len(wanted)))
        assert done == ["reset", *["read", "reset"] * len(wanted)]
        again = [[plain(call) for call in step] for step in decode(used)]
        assert again == wanted, "plain again, and nothing is captured anew"


def test_kernels_that_note_are_compiled_together(engine, monkeypatch):
    """Every kernel that a noting step loads was asked for in one call, before."""
    together, loaded, cubin = [], [], nvrtc.cubin

    def load(file: str, arch: str, defines: tuple[str, ...] = (), sources: Path | None = None):
        loaded.extend([(file, defines)] * (noting.NOTING in defines))
        return cubin(file, arch, defines, sources=sources)

    def compile_many(wanted: Iterable[Any], arch: str, left: Bar) -> None:
        assert not loaded
        together.append({*wanted})

    monkeypatch.setattr(LaunchNotes, "read", lambda notes: [])
    path = engine.model.path
    with wb.Engine.load(path, device="cuda", n_ctx=512, toggles=Toggles(**KEPT)) as used:
        decode(used)
        monkeypatch.setattr(nvrtc, "cubin", load)
        monkeypatch.setattr(nvrtc, "compile_many", compile_many)
        with kernel_spans(used):
            decode(used)
    (asked,) = together
    assert {*loaded} == asked and len(loaded) == len(asked) > 5


def fill(notes: LaunchNotes, times: dict[int, tuple[int, int]]) -> None:
    """Writes begin and end of notes as kernels do, with what is later and earlier beside it."""
    rng = np.random.default_rng(0)
    ((_, memory),) = notes._host.items()
    assert memory.array is not None
    words = memory.array.view(np.uint64).reshape(-1, CELLS, NOTE_BYTES // CELLS // 8)
    words[:] = ~np.uint64(0)
    for note, (begin, end) in times.items():
        for cell in rng.choice(CELLS, 4, replace=False):
            words[note, cell] = begin + 3, ~np.uint64(end - 3)
        words[note, rng.integers(CELLS), 0] = begin
        words[note, rng.integers(CELLS), 1] = ~np.uint64(end)


@pytest.mark.parametrize("pdl", ["off", "on"])
def test_notes_are_read_in_the_order_of_launches(engine, pdl):
    """The earliest begin and the latest end. On one stream no kernel begins before the last one has
    ended: a dependent launch begins early and waits. Two streams may run at once."""
    with engine.variant(Toggles(**KEPT | {"pdl": pdl})) as used:
        program = used.program()
        notes = LaunchNotes(program, used._open.backends)
        kernels = [
            (number, command, k.function)
            for number, command in enumerate(program.commands)
            if isinstance(command, Launch) and not command.by_host
            for k in used.backend.kernels_of(command.node) or () if k.function
        ]  # fmt: skip
        assert [(k.number, k.command, k.function) for k in notes.kernels] == kernels
        assert [k.note for k in notes.kernels] == list(range(len(kernels)))
        times = {i: (10_000 + 50 * i, 10_100 + 50 * i) for i in range(len(kernels))}
        fill(notes, times)
        ends: dict[int, int] = {}
        beside = 0
        for span in notes.read():
            stream, (begin, end) = span.kernel.command.stream.id, times[span.kernel.note]
            assert span.begin_ns == max(begin, ends.get(stream, 0)) and span.end_ns == end
            beside += any(span.begin_ns < e for s, e in ends.items() if s != stream)
            ends[stream] = end
        assert beside > 0
        last = notes.kernels[-1]
        fill(notes, {i: t for i, t in times.items() if i != last.note})
        with pytest.raises(DeviceError, match=f"kernel {last.function} of .* noted no time"):
            notes.read()


def test_what_notes_nothing_is_silent_or_refused(engine):
    """Products of a library; a device without notes; steps that are launched ahead."""
    program = engine.program(n_tokens=500)
    nodes = [c.node for c in program.singly() if isinstance(c, Launch) and not c.by_host]
    names = [k.function for node in nodes for k in engine.backend.kernels_of(node) or ()]
    notes = LaunchNotes(program, engine._open.backends)
    assert notes.n_silent == names.count(None) > 0
    assert len(notes.kernels) == len(names) - notes.n_silent
    silent = LaunchNotes(engine.program(), [open_backend() for _ in engine._open.backends])
    silent.reset()
    assert not silent.kernels and silent.read() == []
    ahead = KEPT | PLAN | {"launch_ahead": "on", "results": "direct", "streams": "1"}
    refused = pytest.raises(UsageError, match="use launch_ahead=off plan_end=event")
    with engine.variant(Toggles(**ahead)) as used, refused, kernel_spans(used):
        raise AssertionError("refused beforehand")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_every_kernel_gets_a_note_and_keeps_its_lines(path: Path):
    source = path.read_bytes()
    found = noting.noting(source, {})[0].decode()
    kernels = COMMENT.sub("", source.decode()).count("__global__")
    assert kernels and found.count(OBJECT) == found.count(PARAMETER) == kernels
    first, line, rest = found.split("\n", 2)
    assert (first, line) == (f'#include "{noting.HEADER}"', "#line 1")
    assert rest.replace(f" {OBJECT}", "").replace(PARAMETER, ")") == source.decode()


@pytest.mark.long
@pytest.mark.parametrize("path", share(SOURCES, every=5, slow=3), ids=lambda p: p.stem)
def test_every_kernel_notes_and_has_one_parameter_more(path: Path):
    own, noted = ptx.kernel_ptx(path.stem), ptx.kernel_ptx(path.stem, (noting.NOTING,))
    bodies, names = ptx.functions(noted), re.findall(r"\.entry\s+([\w$]+)", own)
    for name in names:
        assert ptx.parameters(noted, name) == [*ptx.parameters(own, name), "u64"]
        notes = [s.opcode for s in bodies[name]].count("red.global.min.u64")
        assert notes >= 2, f"{name} notes no begin and end"


def test_a_kernel_notes_at_every_return():
    """What returns early notes its own end; the threads that stay note theirs. No barrier is added,
    so those that are there bear early returns as before. Kernels of headers and macros note too."""
    header = b"""extern "C" __global__ void __launch_bounds__(64)
    early(float* dst, int n) {
    if (threadIdx.x % 3 == n) return;
    __syncthreads();
    if (threadIdx.x > n) { dst[0] = 1; return; }
    dst[threadIdx.x] = n;
}
"""
    source = b"""#define ONE(NAME) extern "C" __global__ void NAME(int* a) { a[threadIdx.x] = 1; }
ONE(first)
ONE(second)
"""
    functions = ptx.functions(ptx.compile_ptx("made_up", header + source, (noting.NOTING,)))
    assert {"early", "first", "second"} <= set(functions)
    opcodes = [s.opcode for s in functions["early"]]
    assert opcodes.count("bar.sync") + opcodes.count("barrier.sync") == 1
    timers = sum("globaltimer" in s.text for s in functions["early"])
    assert timers == opcodes.count("red.global.min.u64") >= 2
    _, headers = noting.noting(b'#include "k.cuh"\n', {"k.cuh": header, "none.cuh": b"int f();"})
    changed = header.replace(b") {\n", f"{PARAMETER} {{ {OBJECT}\n".encode(), 1)
    assert headers == {"k.cuh": changed, "none.cuh": b"int f();"}
    text = (nvrtc.source_dir() / noting.HEADER).read_text()
    assert re.findall(r"#define SPAN_CELLS (\d+)", text) == [str(CELLS)]
