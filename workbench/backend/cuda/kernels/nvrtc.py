"""The compilation of the CUDA kernels, and the cache of the results.

Pure Python apart from NVRTC, which needs no GPU: `cubin("rows", "sm_90")` works on any machine with
the compiler library. Nothing here uses a device.

A file is compiled when a launch first needs one of its kernels: as it is, or with macros of that
kernel (`kernel.py`). So tile sizes and weight types are constants, and only the kernels that a
model needs are compiled.
"""

import hashlib
import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from workbench.backend import compiled
from workbench.backend.apart import compile_given, compiled_apart
from workbench.backend.compiled import cache_dir
from workbench.backend.cuda.kernels.noting import NOTING, noting
from workbench.common.cores import usable_cores
from workbench.common.errors import DeviceError
from workbench.common.extras import install
from workbench.common.progress import HIDDEN, Bar
from workbench.common.shipped import shipped

_INCLUDED = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
OPTIONS = ("-std=c++17", "-default-device")
# Files that use instructions of a single architecture -> the architecture to compile them for. On
# other devices these files use other instructions.
SPECIFIC = {("tensor_product", "sm_90"): "sm_90a"}


def source_dir() -> Path:
    """kernels/ of the checkout, or its copy in a wheel. Raises WorkbenchError where both are
    missing."""
    return shipped("kernels", "common.cuh")


def _headers() -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(source_dir().glob("*.cuh"))}


def included(source: bytes, headers: dict[str, bytes]) -> dict[str, bytes]:
    """The headers that a source includes, directly or through other headers; sorted by name."""
    found, left = dict[str, bytes](), [source]
    while left:
        for name in map(bytes.decode, _INCLUDED.findall(left.pop())):
            if name in headers and name not in found:
                found[name] = headers[name]
                left.append(headers[name])
    return dict(sorted(found.items()))


def _nvrtc() -> Any:
    """cuda.bindings.nvrtc with its library loaded. Raises DeviceError where either is missing."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DeviceError(
            f"NVRTC, which compiles the kernels, is not usable ({reason}); {install('gpu')}"
        ) from None
    return nvrtc


def _call(nvrtc: Any, function: str, *args: Any) -> Any:
    error, *values = getattr(nvrtc, function)(*args)
    if error:
        raise DeviceError(f"{function} failed: {nvrtc.nvrtcGetErrorString(error)[1].decode()}")
    return values[0] if values else None


def compile_source(
    name: str, source: bytes, headers: dict[str, bytes], arch: str, defines: Sequence[str] = ()
) -> bytes:
    """The cubin of one source for `arch` (`sm_90`). Raises DeviceError with the compiler's first
    error."""
    nvrtc = _nvrtc()
    program = _call(
        nvrtc, "nvrtcCreateProgram", source, name.encode(), len(headers),
        list(headers.values()), [h.encode() for h in headers],
    )  # fmt: skip
    try:
        options = [o.encode() for o in (f"-arch={arch}", *OPTIONS, *(f"-D{d}" for d in defines))]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if error:
            log = bytes(_call(nvrtc, "nvrtcGetProgramLogSize", program))  # the next call fills it
            _call(nvrtc, "nvrtcGetProgramLog", program, log)
            lines = log.rstrip(b"\0\n").decode(errors="replace").splitlines()
            first = next((line for line in lines if "error" in line), f"{error!r}")
            raise DeviceError(f"kernels/{name} does not compile for {arch}: {first}")
        cubin = bytes(_call(nvrtc, "nvrtcGetCUBINSize", program))
        _call(nvrtc, "nvrtcGetCUBIN", program, cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin


def cubin(
    file: str,
    arch: str,
    defines: Sequence[str] = (),
    folder: Path | None = None,
    sources: Path | None = None,
) -> bytes:
    """The cubin of `kernels/<file>.cu`, from the cache or compiled now.

    arch: the architecture; SPECIFIC may replace it.
    defines: macros ("ROWS=2"). With macro NOTING the kernels note when they ran (`noting.py`).
    folder: of the cache; None for `cache_dir()`. The name of a cubin holds a hash of all that
        decides its bytes, with the headers that the source includes.
    sources: the folder of the .cu file; None for `kernels/`. Headers come from `kernels/`.

    Raises DeviceError.
    """
    asked = _asked(file, arch, defines, folder, sources)
    if asked.kept.is_file():
        found = asked.kept.read_bytes()
        if found.startswith(b"\x7fELF"):
            return found
    begun_ns = time.perf_counter_ns()
    made = compile_source(f"{file}.cu", asked.source, asked.headers, asked.arch, defines)
    compiled.took(begun_ns, asked.kept.parent)
    compiled.keep(asked.kept, made)
    return made


class _Asked(NamedTuple):
    """A compilation. kept: where the cache has its cubin."""

    source: bytes
    headers: dict[str, bytes]
    arch: str
    kept: Path


def _asked(
    file: str,
    arch: str,
    defines: Sequence[str],
    folder: Path | None = None,
    sources: Path | None = None,
) -> _Asked:
    """What `cubin` compiles."""
    arch = SPECIFIC.get((file, arch), arch)
    source, headers = ((sources or source_dir()) / f"{file}.cu").read_bytes(), _headers()
    if NOTING in defines:
        source, headers = noting(source, headers)
    headers = included(source, headers)
    version = _nvrtc().nvrtcVersion()[1:]
    decides = (headers, OPTIONS, arch, version, tuple(defines), source)
    key = hashlib.sha256(repr(decides).encode()).hexdigest()
    kept = (folder or cache_dir()) / f"{file}-{arch}-{key[:24]}.cubin"
    return _Asked(source, headers, arch, kept)


def compile_many(
    wanted: Iterable[tuple[str, tuple[str, ...]]], arch: str, left: Bar = HIDDEN
) -> None:
    """Compiles each (file, defines) that is not in the cache, several at a time. left: advances
    with each of `wanted`."""
    every = [*dict.fromkeys(wanted)]
    missing = [(file, d) for file, d in every if not _asked(file, arch, d).kept.is_file()]
    left.update(len(every) - len(missing))
    begun_ns, n = time.perf_counter_ns(), 0
    for _ in compiled_apart(__name__, [(file, arch, d) for file, d in missing]):
        compiled.took(begun_ns, cache_dir())
        left.update()
        n += 1
    with ThreadPoolExecutor(usable_cores()) as pool:  # what no process has compiled
        for _ in pool.map(lambda one: cubin(one[0], arch, one[1]), missing):
            pass
    left.update(len(missing) - n)


if __name__ == "__main__":
    compile_given(lambda one: cubin(*one))
