"""Programmatic dependent launch, proved on PTX: nothing that depends comes before the wait.

A kernel launched programmatically begins while the one before it still runs. Until it has executed
`griddepcontrol.wait` it may read constants and nothing else, and it must execute it before it ends,
for the kernel after it counts on that. `check` walks the statements of a PTX text from the entry
along every edge up to a wait. On the way must be no end of the kernel, and of memory that is global
or of no named space no store, atomic or reduction, no load but a non-coherent one (`ld.global.nc`:
weights), and no `cp.async` but one with an L2 prefetch size, which kernels/staged.cuh gives to
copies of weights and nothing else has.

A wait under a predicate proves nothing. Shared, local, constant and parameter memory belong to the
kernel. What `ld.global.nc` and such copies point to cannot be seen in PTX: they are listed, not
judged.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from workbench.backend.cuda.kernels import nvrtc
from workbench.backend.cuda.kernels.noting import NOTING, noting

ARCH = "sm_90"  # the first that has the instruction
WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


class Statement(NamedTuple):
    """One instruction without its predicate, and the labels before it."""

    text: str
    predicated: bool
    labels: tuple[str, ...]

    @property
    def opcode(self) -> str:
        return self.text.split(None, 1)[0]

    @property
    def op(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def operands(self) -> list[str]:
        return [x.strip() for x in self.text[len(self.opcode) :].split(",")]


class Verdict(NamedTuple):
    """violations: instructions of a kernel that break the contract, each with the reason.
    early_loads: non-coherent loads it may execute before the wait. triggers: whether every path
    lets the next kernel begin before it waits."""

    violations: tuple[str, ...]
    early_loads: tuple[str, ...]
    triggers: bool


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
# a result list may stand before the name, the parameters stand after it
_BEGIN = re.compile(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)[^{;]*\{")
_LABEL = re.compile(r"[{}\s]*([$%\w]+)\s*:(?!:)")
_PREDICATE = re.compile(r"@!?%?[\w$]+\s+")


def functions(text: str) -> dict[str, list[Statement]]:
    """The statements of every kernel and device function defined in `text`, by name."""
    text = _COMMENT.sub(" ", text)
    found = {}
    for begin in _BEGIN.finditer(text):
        end, depth = begin.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        found[begin[1]] = list(_statements(text[begin.end() : end - 1]))
    return found


def _statements(body: str) -> Iterator[Statement]:
    labels: list[str] = []
    for piece in body.split(";"):
        text = piece
        while label := _LABEL.match(text):
            labels.append(label[1])
            text = text[label.end() :]
        text = " ".join(text.lstrip("{} \n\t").split())
        plain = _PREDICATE.sub("", text, count=1) if text.startswith("@") else text
        if plain:
            yield Statement(plain, plain != text, tuple(labels))
            labels = []
    if labels:  # at the very end
        yield Statement("ret", False, tuple(labels))


def parameters(text: str, kernel: str) -> list[str]:
    """Types of the parameters of a kernel (`u64`, `f32`), in order."""
    begin = re.search(rf"\.entry\s+{re.escape(kernel)}\s*\(([^)]*)\)", _COMMENT.sub(" ", text))
    assert begin is not None, kernel
    return re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", begin[1])


_OWN = {"shared", "local", "param", "const"}  # spaces no other kernel sees
_HARMLESS = ("wait_all", "wait_group", "commit_group", "mbarrier", "bulk.prefetch.L2")


def memory(statement: Statement) -> str:
    """`load`, `store`, `early load` (non-coherent) or `` for what is none of global memory."""
    op, parts = statement.op, re.split(r"\.|::", statement.opcode)
    if op == "cp" and parts[1] == "async":
        if ".".join(parts[2:]).startswith(_HARMLESS):
            return ""
        return "early load" if parts[-2:] == ["L2", "128B"] else "load"
    if op in ("sust", "sured", "multimem"):
        return "store"
    if op in ("cp", "tensormap", "suld", "tex", "tld4"):
        return "load"
    if op not in ("ld", "ldu", "st", "atom", "red") or _OWN.intersection(parts):
        return ""
    if op in ("ld", "ldu"):
        return "early load" if {"nc", "global"} <= {*parts} else "load"
    return "store"


def _edges(body: list[Statement]) -> list[list[int]]:
    """For each statement, those that may follow; len(body) is the end of the function."""
    where = {label: i for i, s in enumerate(body) for label in s.labels}
    tables = {k: s.operands for s in body if s.opcode == ".branchtargets" for k in s.labels}
    edges = []
    for i, s in enumerate(body):
        follows = [i + 1]
        if s.op in ("bra", "brx"):
            targets = tables[s.operands[-1]] if s.op == "brx" else s.operands[:1]
            follows = [where[label] for label in targets]
        elif s.op in ("ret", "exit", "trap"):
            follows = []
        edges.append(follows + [i + 1] * s.predicated)
    return edges


def _before(body: list[Statement], opcode: str) -> list[int]:
    """Statements reachable from the entry without an unconditional `opcode` in between."""
    edges, seen, todo = _edges(body), set(), [0]
    while todo:
        at = todo.pop()
        if at not in seen:
            seen.add(at)
            if at < len(body) and (body[at].opcode != opcode or body[at].predicated):
                todo += edges[at]
    return sorted(seen)


def _why_not(statement: Statement, called: dict[str, list[Statement]]) -> str:
    """What is wrong with executing `statement` before the wait; `` if nothing is."""
    kind = memory(statement)
    if kind in ("load", "store"):
        return f"{kind} before the wait"
    if statement.op in ("ret", "exit"):
        return "ends without the wait"
    if statement.op == "call":
        named = [name for name in re.findall(r"[\w$]+", statement.text) if name in called]
        if not named:
            return "calls something unknown before the wait"
        for s in called[named[0]]:
            if s.op not in ("ret", "exit") and (why := _why_not(s, called)):
                return f"calls {named[0]}: {s.text}: {why}"
    return ""


def check(text: str, kernel: str) -> Verdict:
    """Judges one kernel of a PTX text; KeyError where it is not there."""
    called = functions(text)
    body = called[kernel]
    reached = [[*body, Statement("ret", False, ())][at] for at in _before(body, WAIT)]
    violations = [f"{s.text}: {why}" for s in reached if (why := _why_not(s, called))]
    early = [s.text for s in reached if memory(s) == "early load"]
    waits = {i for i, s in enumerate(body) if s.opcode == WAIT}
    return Verdict(tuple(violations), tuple(early), not waits.intersection(_before(body, TRIGGER)))


def compiled(name: str, source: bytes, headers: dict, defines, *options: str) -> tuple[bytes, str]:
    """PTX of a source, and what the compiler says."""
    api, call = nvrtc._nvrtc(), nvrtc._call
    given = len(headers), [*headers.values()], [h.encode() for h in headers]
    program = call(api, "nvrtcCreateProgram", source, name.encode(), *given)
    try:
        wanted = [o.encode() for o in (*options, *nvrtc.OPTIONS, *(f"-D{d}" for d in defines))]
        (error,) = api.nvrtcCompileProgram(program, len(wanted), wanted)
        log = bytes(call(api, "nvrtcGetProgramLogSize", program))
        call(api, "nvrtcGetProgramLog", program, log)
        said = log.rstrip(b"\0").decode()
        assert not error, said
        text = bytes(call(api, "nvrtcGetPTXSize", program))
        call(api, "nvrtcGetPTX", program, text)
    finally:
        api.nvrtcDestroyProgram(program)
    return text.rstrip(b"\0"), said


def compile_ptx(name: str, source: bytes, defines: Sequence[str] = ()) -> str:
    """PTX of a CUDA source that may include the headers of kernels/, kept on disk by content, for
    the virtual architecture that an engine's cubin is made of. With macro NOTING its kernels note
    when they ran."""
    headers = nvrtc._headers()
    arch = nvrtc.SPECIFIC.get((name, ARCH), ARCH).replace("sm_", "compute_")
    if NOTING in defines:
        source, headers = noting(source, headers)
    decides = repr((headers, nvrtc.OPTIONS, arch, nvrtc._nvrtc().nvrtcVersion(), defines, source))
    key = hashlib.sha256(decides.encode()).hexdigest()[:24]
    kept = nvrtc.cache_dir() / f"{name}-{arch}-{key}.ptx"
    if not kept.is_file():
        nvrtc.compiled.keep(kept, compiled(name, source, headers, defines, f"-arch={arch}")[0])
    return kept.read_text()


def kernel_ptx(file: str, defines: Sequence[str] = ()) -> str:
    """PTX of `kernels/<file>.cu` compiled with `defines`."""
    return compile_ptx(file, (nvrtc.source_dir() / f"{file}.cu").read_bytes(), tuple(defines))
