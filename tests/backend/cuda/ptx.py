"""Programmatic dependent launch, proved on PTX: nothing that depends comes before the wait.

A kernel launched programmatically begins while the one in front of it still runs. Until it has
executed `griddepcontrol.wait` it may read constants and nothing else, and it must execute it before
it ends, for the kernel behind it counts on that. `check` proves both on every path: it splits each
kernel of a PTX text into basic blocks and walks from the entry along every edge up to a wait.
What it meets on the way must not be

* a store, an atomic or a reduction to global memory, or to memory of no named space,
* a load from there, unless it is non-coherent (`ld.global.nc`: weights),
* an asynchronous copy from or to global memory (`cp.async`), unless it has an L2 prefetch size,
  which kernels/staged.cuh gives to copies of weights and nothing else has,
* the end of the kernel.

A wait under a predicate proves nothing. Shared, local, constant and parameter memory belong to the
kernel. What `ld.global.nc` and such copies point to cannot be seen in PTX: they are listed, not
judged.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from workbench.backend.cuda.kernels import nvrtc
from workbench.backend.cuda.kernels.noting import NOTING, noting

ARCH = "sm_90"  # the first that has the instruction
WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


class Statement(NamedTuple):
    """One instruction without its predicate, and the labels in front of it."""

    text: str
    predicated: bool
    labels: tuple[str, ...]

    @property
    def opcode(self) -> str:
        return self.text.split(None, 1)[0]

    @property
    def operands(self) -> str:
        return self.text[len(self.opcode) :].strip()


class Verdict(NamedTuple):
    """violations: instructions of a kernel that break the contract, each with the reason.
    early_loads: non-coherent loads it may execute before the wait. triggers: whether every path
    lets the next kernel begin before it waits."""

    violations: tuple[str, ...]
    early_loads: tuple[str, ...]
    triggers: bool


# reading ------------------------------------------------------------------------------------------

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_BEGIN = re.compile(r"\.(entry|func)\b([^{;]*)\{")
_LABEL = re.compile(r"([$%\w]+)\s*:(?!:)\s*")
_PREDICATE = re.compile(r"@!?%?[\w$]+\s+")


def functions(text: str) -> dict[str, list[Statement]]:
    """The statements of every kernel and device function defined in `text`, by name."""
    text = _COMMENT.sub(" ", text)
    found = {}
    for begin in _BEGIN.finditer(text):
        # a result list may stand before the name, the parameters stand behind it
        head = begin[2].strip()
        name = re.match(r"(?:\([^)]*\)\s*)?([\w$]+)", head)
        assert name, f"a function without a name: {head[:60]}"
        found[name[1]] = list(_statements(text[begin.end() : _end(text, begin.end())]))
    return found


def _end(text: str, at: int) -> int:
    """Where the braces opened before `at` close."""
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, at):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    raise ValueError("braces do not close")


def _statements(body: str):
    labels: list[str] = []
    for piece in body.split(";"):
        text = piece.strip()
        predicated = False
        while True:  # scopes, labels and declarations of scope in front of an instruction
            text = text.lstrip("{} \n\t")
            label = _LABEL.match(text)
            if not label:
                break
            labels.append(label[1])
            text = text[label.end() :]
        predicate = _PREDICATE.match(text)
        if predicate:
            predicated, text = True, text[predicate.end() :]
        if text:
            yield Statement(" ".join(text.split()), predicated, tuple(labels))
            labels = []
    if labels:  # at the very end
        yield Statement("ret", False, tuple(labels))


def parameters(text: str, kernel: str) -> list[str]:
    """Types of the parameters of a kernel (`u64`, `f32`), in order."""
    begin = re.search(rf"\.entry\s+{re.escape(kernel)}\s*\(([^)]*)\)", _COMMENT.sub(" ", text))
    if begin is None:
        raise KeyError(kernel)
    return re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", begin[1])


# judging ------------------------------------------------------------------------------------------

_OWN = ("shared", "local", "param", "const")  # spaces no other kernel sees


def _parts(statement: Statement) -> list[str]:
    return re.split(r"\.|::", statement.opcode)


def memory(statement: Statement) -> str:
    """`load`, `store`, `early load` (non-coherent) or `` for what is none of global memory."""
    op, *rest = _parts(statement)
    if op in ("cp", "multimem", "tensormap") or op in ("sust", "sured", "suld", "tex", "tld4"):
        if op == "cp" and rest[:2] in (["async", "wait_all"], ["async", "wait_group"]):
            return ""
        if op == "cp" and rest[:4] == ["async", "bulk", "prefetch", "L2"]:
            return ""  # to the cache: no value is read
        if op == "cp" and rest[:2] in (["async", "commit_group"], ["async", "mbarrier"]):
            return ""
        if op == "cp" and rest[:1] == ["async"] and rest[-2:] == ["L2", "128B"]:
            return "early load"
        return "store" if op in ("sust", "sured", "multimem") else "load"
    if op not in ("ld", "ldu", "st", "atom", "red"):
        return ""
    if any(space in rest for space in _OWN):
        return ""
    if op in ("ld", "ldu"):
        return "early load" if "nc" in rest and "global" in rest else "load"
    return "store"


def _targets(statement: Statement, tables: dict[str, list[str]]) -> list[str]:
    """Labels a branch may go to."""
    if statement.opcode.startswith("brx"):
        return tables[statement.operands.split(",")[-1].strip()]
    return [statement.operands.split(",")[0].strip()]


def _edges(body: list[Statement]) -> list[list[int]]:
    """For each statement, those that may follow; len(body) is the end of the function."""
    where = {label: i for i, s in enumerate(body) for label in s.labels}
    tables = {
        label: [name.strip() for name in s.operands.split(",")]
        for s in body
        if s.opcode == ".branchtargets"
        for label in s.labels
    }
    edges = []
    for i, s in enumerate(body):
        op = s.opcode.split(".")[0]
        follows = [i + 1]
        if op in ("bra", "brx"):
            follows = [where[label] for label in _targets(s, tables)]
        elif op in ("ret", "exit", "trap"):
            follows = []
        edges.append([*follows, i + 1] if s.predicated and i + 1 not in follows else follows)
    return edges


def _before(body: list[Statement], opcode: str) -> list[int]:
    """Statements reachable from the entry without an unconditional `opcode` in between."""
    edges, seen, todo = _edges(body), set(), [0]
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        if at < len(body) and not (body[at].opcode == opcode and not body[at].predicated):
            todo += edges[at]
    return sorted(seen)


def _why_not(statement: Statement, called: dict[str, list[Statement]]) -> str:
    """What is wrong with executing `statement` before the wait; `` if nothing is."""
    op = statement.opcode.split(".")[0]
    kind = memory(statement)
    if kind in ("load", "store"):
        return f"{kind} before the wait"
    if op in ("ret", "exit"):
        return "ends without the wait"
    if op == "call":
        named = [name for name in re.findall(r"[\w$]+", statement.operands) if name in called]
        if not named:
            return "calls something unknown before the wait"
        for s in called[named[0]]:
            why = _why_not(s, called) if s.opcode.split(".")[0] not in ("ret", "exit") else ""
            if why:
                return f"calls {named[0]}: {s.text}: {why}"
    return ""


def check(text: str, kernel: str) -> Verdict:
    """Judges one kernel of a PTX text; KeyError where it is not there."""
    called = functions(text)
    body = called[kernel]
    violations, early = [], []
    for at in _before(body, WAIT):
        if at == len(body):
            violations.append("falls off its end without the wait")
            continue
        why = _why_not(body[at], called)
        if why:
            violations.append(f"{body[at].text}: {why}")
        if memory(body[at]) == "early load":
            early.append(body[at].text)
    untold = {at for at in _before(body, TRIGGER) if at < len(body)}
    waits = {i for i, s in enumerate(body) if s.opcode == WAIT}
    return Verdict(tuple(violations), tuple(early), not untold & waits)


# compiling ----------------------------------------------------------------------------------------


def arch_of(file: str) -> str:
    """The virtual architecture whose PTX an engine's cubin of kernels/<file>.cu is made of: that of
    `sm_90`, or of what `nvrtc.SPECIFIC` has in its place."""
    return nvrtc.SPECIFIC.get((file, ARCH), ARCH).replace("sm_", "compute_")


def compile_ptx(name: str, source: bytes, defines: Sequence[str] = ()) -> str:
    """PTX of a CUDA source that may include the headers of kernels/, kept on disk by content.

    name: of a file of kernels/, or any other. With macro NOTING its kernels note when they ran.
    """
    headers, arch = nvrtc._headers(), arch_of(name)
    if NOTING in defines:
        source, headers = noting(source, headers)
    decides = repr((headers, nvrtc.OPTIONS, arch, nvrtc._nvrtc().nvrtcVersion(), defines, source))
    key = hashlib.sha256(decides.encode()).hexdigest()[:24]
    kept = nvrtc.cache_dir() / f"{name}-{arch}-{key}.ptx"
    if not kept.is_file():
        nvrtc._keep(kept, _compile(name, source, headers, arch, defines))
    return kept.read_text()


def _compile(
    name: str, source: bytes, headers: dict[str, bytes], arch: str, defines: Sequence[str]
) -> bytes:
    api = nvrtc._nvrtc()
    program = nvrtc._call(
        api, "nvrtcCreateProgram", source, name.encode(), len(headers), list(headers.values()),
        [h.encode() for h in headers],
    )  # fmt: skip
    try:
        wanted = (f"-arch={arch}", *nvrtc.OPTIONS, *(f"-D{d}" for d in defines))
        (error,) = api.nvrtcCompileProgram(program, len(wanted), [o.encode() for o in wanted])
        if error:
            log = bytes(nvrtc._call(api, "nvrtcGetProgramLogSize", program))
            nvrtc._call(api, "nvrtcGetProgramLog", program, log)
            raise ValueError(log.rstrip(b"\0").decode())
        text = bytes(nvrtc._call(api, "nvrtcGetPTXSize", program))
        nvrtc._call(api, "nvrtcGetPTX", program, text)
    finally:
        api.nvrtcDestroyProgram(program)
    return text.rstrip(b"\0")


def kernel_ptx(file: str, defines: Sequence[str] = ()) -> str:
    """PTX of `kernels/<file>.cu` compiled with `defines`."""
    return compile_ptx(file, (nvrtc.source_dir() / f"{file}.cu").read_bytes(), tuple(defines))
