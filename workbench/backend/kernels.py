"""The CUDA kernels: where their sources are, how they are compiled and kept, how they are launched.

Pure Python apart from NVRTC, which needs no GPU: `compile_all("sm_90")` works on any machine with
the compiler library. Nothing here talks to a device.

`launches(node, args)` says which kernels compute a node, with which grid and block. A kernel's
argument order is that of `backend/args.py`; the constants below repeat those of the sources.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from workbench.backend.args import Args, variant
from workbench.errors import DeviceError
from workbench.graph.ir import Node

OPTIONS = ("-std=c++17", "-default-device")
OLDEST = (8, 0)  # compute capability
MAX_HEAD_DIM = 256

# sources and compiling --------------------------------------------------------------------------


def source_dir() -> Path:
    """kernels/ of the checkout, or its copy in an installed wheel; DeviceError if neither is."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "kernels", package / "_kernels"):
        if (folder / "common.cuh").is_file():
            return folder
    raise DeviceError(f"the CUDA kernels are missing beside {package}; install workbench again")


def source_files() -> list[Path]:
    """Every .cu file, one op family each."""
    return sorted(source_dir().glob("*.cu"))


def _headers() -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(source_dir().glob("*.cuh"))}


def _nvrtc() -> Any:
    """cuda.bindings.nvrtc with its library loaded; DeviceError where one is missing."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DeviceError(
            f"NVRTC, which compiles the kernels, is not usable ({reason}); "
            "pip install -e '.[gpu]' in the checkout"
        ) from None
    return nvrtc


def _call(nvrtc: Any, function: str, *args: Any) -> Any:
    error, *values = getattr(nvrtc, function)(*args)
    if error:
        raise DeviceError(f"{function} failed: {nvrtc.nvrtcGetErrorString(error)[1].decode()}")
    return values[0] if values else None


def compile_source(name: str, source: bytes, headers: dict[str, bytes], arch: str) -> bytes:
    """One source as a cubin for `arch` (`sm_90`). DeviceError with the compiler's first error."""
    nvrtc = _nvrtc()
    program = _call(
        nvrtc, "nvrtcCreateProgram", source, name.encode(), len(headers),
        list(headers.values()), [h.encode() for h in headers],
    )  # fmt: skip
    try:
        options = [o.encode() for o in (f"-arch={arch}", *OPTIONS)]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if error:
            log = bytes(_call(nvrtc, "nvrtcGetProgramLogSize", program))  # filled in place
            _call(nvrtc, "nvrtcGetProgramLog", program, log)
            lines = log.rstrip(b"\0\n").decode(errors="replace").splitlines()
            first = next((line for line in lines if "error" in line), f"{error!r}")
            raise DeviceError(f"kernels/{name} does not compile for {arch}: {first}")
        cubin = bytes(_call(nvrtc, "nvrtcGetCUBINSize", program))
        _call(nvrtc, "nvrtcGetCUBIN", program, cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin


def compile_all(arch: str, cache: Path | None = None) -> dict[str, bytes]:
    """Every .cu file as a cubin, by file name without suffix; from the cache where it is there.

    cache: the folder to keep cubins in (default `cache_dir()`), keyed by everything that decides
    their bytes. Two files are compiled at a time.
    """
    folder, headers = cache or cache_dir(), _headers()
    version = _nvrtc().nvrtcVersion()[1:]
    common = hashlib.sha256(repr((headers, OPTIONS, arch, version)).encode())

    def one(path: Path) -> bytes:
        source = path.read_bytes()
        key = common.copy()
        key.update(source)
        kept = folder / f"{path.stem}-{arch}-{key.hexdigest()[:24]}.cubin"
        if kept.is_file():
            cubin = kept.read_bytes()
            if cubin.startswith(b"\x7fELF"):
                return cubin
        cubin = compile_source(path.name, source, headers, arch)
        _keep(kept, cubin)
        return cubin

    paths = source_files()
    with ThreadPoolExecutor(2) as pool:
        return dict(zip([p.stem for p in paths], pool.map(one, paths), strict=True))


def _keep(path: Path, content: bytes) -> None:
    """Writes whole or not at all, whoever else is writing the same file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def cache_dir() -> Path:
    """~/.cache/workbench/kernels; where that cannot be written, a folder of this user's own in the
    temporary directory, and where that is not safe to trust, a new one for this process."""
    for folder in (
        Path.home() / ".cache" / "workbench" / "kernels",
        Path(tempfile.gettempdir()) / f"workbench-kernels-{_user()}",
    ):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = folder.lstat()
        except OSError:
            continue
        mine = not hasattr(os, "getuid") or info.st_uid == os.getuid()
        if mine and stat.S_ISDIR(info.st_mode) and os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="workbench-kernels-"))


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else "user"


# launching --------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """One kernel launch: file and function, grid (x, y), threads of a block, arguments."""

    file: str
    function: str
    grid: tuple[int, int]
    block: int
    args: Args


# mul_mat: rows of a block (4 warps) by tokens together; more tokens are tiles of 8
MUL_MAT_ROWS = {1: 8, 4: 8, 8: 16}
MUL_MAT_ROWS_K = {1: 8, 4: 8, 8: 8}  # types with blocks of 256: their units need more registers
ROPE_HEADS, ROPE_THREADS = 4, 64  # rope: heads and threads of a block
FEW_TOKENS, SPLIT_THREADS = 8, 512  # attention: up to so many tokens attention_split
SHARE_CELLS, MOST_SHARES = 256, 32  # attention_split: least cells of a share, most shares
# attention_tile: widest head_dim -> kernel, query tokens of a block
TILES = {
    32: ("attention_tile_d1", 16),
    64: ("attention_tile_d2", 16),
    128: ("attention_tile_d4", 16),
    256: ("attention_tile_d8", 8),
}


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


def n_shares(n_kv: int) -> int:
    """Shares the cells of one head are split into: from the padded n_kv alone."""
    share = max(SHARE_CELLS, _blocks(_blocks(n_kv, MOST_SHARES), 32) * 32)
    return _blocks(n_kv, share)


def scratch_bytes(node: Node) -> int:
    """What attention's shares need: per token, head and share, head_dim + 2 floats."""
    if node.op != "attention":
        return 0
    tokens, heads, head_dim = node.inputs[0].shape
    shares = n_shares(node.params["n_kv"])
    if tokens > FEW_TOKENS or shares == 1:
        return 0
    return tokens * heads * shares * (head_dim + 2) * 4


def _get_rows(node: Node, a: Args) -> list[Kernel]:
    ids, cols = int(a[3]), int(a[4])
    return [Kernel("rows", "_".join(variant(node)), (ids, _blocks(cols, 256)), 256, a)]


def _rms_norm(node: Node, a: Args) -> list[Kernel]:
    rows, cols = int(a[2]), int(a[3])
    threads = min(1024, _blocks(_blocks(cols, 4), 32) * 32)
    return [Kernel("elementwise", "rms_norm", (rows, 1), threads, a)]


def _elementwise(node: Node, a: Args) -> list[Kernel]:
    rows, cols = int(a[3]), int(a[4])
    return [Kernel("elementwise", node.op, (rows, _blocks(cols, 256)), 256, a)]


def _quantize(node: Node, a: Args) -> list[Kernel]:
    rows, cols = int(a[2]), int(a[3])
    return [Kernel("elementwise", "quantize", (rows, _blocks(cols, 1024)), 256, a)]


def _mul_mat(node: Node, a: Args) -> list[Kernel]:
    rows, tokens = int(a[3]), int(a[5])
    together = 1 if tokens == 1 else 4 if tokens <= 4 else 8
    per_block = MUL_MAT_ROWS_K if node.inputs[0].dtype.block == 256 else MUL_MAT_ROWS
    blocks = _blocks(rows, per_block[together]) * _blocks(tokens, together)
    return [Kernel("mul_mat", f"{'_'.join(variant(node))}_n{together}", (blocks, 1), 128, a)]


def _rope(node: Node, a: Args) -> list[Kernel]:
    tokens, heads = int(a[4]), int(a[5])
    return [Kernel("rope", "rope", (tokens, _blocks(heads, ROPE_HEADS)), ROPE_THREADS, a)]


def _set_rows(node: Node, a: Args) -> list[Kernel]:
    tokens, cols = int(a[3]), int(a[4])
    return [Kernel("rows", "set_rows", (tokens, _blocks(cols, 256)), 256, a)]


def _attention(node: Node, a: Args) -> list[Kernel]:
    dst, scratch = a[0], a[5]
    tokens, heads, head_dim, n_kv = int(a[6]), int(a[7]), int(a[9]), int(a[10])
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise DeviceError(
            f"{node.name}: head_dim {head_dim} is not supported on cuda (multiples of 8 up to "
            f"{MAX_HEAD_DIM}); use device=host or embedded"
        )
    if tokens > FEW_TOKENS:
        function, tile = next(TILES[d] for d in TILES if head_dim <= d)
        return [Kernel("attention", function, (_blocks(tokens, tile), heads), 128, a)]
    shares = n_shares(n_kv)
    split = Kernel("attention", "attention_split", (tokens * heads, shares), SPLIT_THREADS, a)
    if shares == 1:
        return [split]
    combine: Args = [dst, scratch, shares, head_dim]
    return [split, Kernel("attention", "attention_combine", (tokens * heads, 1), 256, combine)]


_LAUNCHES: dict[str, Callable[[Node, Args], list[Kernel]]] = {
    "get_rows": _get_rows,
    "rms_norm": _rms_norm,
    "mul": _elementwise,
    "add": _elementwise,
    "swiglu": _elementwise,
    "quantize": _quantize,
    "mul_mat": _mul_mat,
    "rope": _rope,
    "set_rows": _set_rows,
    "attention": _attention,
}


def launches(node: Node, args: Args) -> list[Kernel]:
    """The kernels that compute `node`, in order; none where it has nothing to compute.

    args: as `backend.args.pack` gives them. Raises DeviceError for a head_dim no kernel has.
    """
    return [k for k in _LAUNCHES[node.op](node, args) if k.grid[0] and k.grid[1]]


# weights in planes ------------------------------------------------------------------------------

# Block types whose fields are split into planes at load (kernels/weights.cuh), in plane order:
# (offset in the file's block, bytes).
PLANES: dict[str, tuple[tuple[int, int], ...]] = {
    "Q8_0": ((2, 32), (0, 2)),
    "Q4_0": ((2, 16), (0, 2)),
    "MXFP4": ((1, 16), (0, 1)),
    "Q6_K": ((0, 128), (128, 64), (192, 16), (208, 2)),
}


def repack(
    dtype: str, dst: int, src: int, first: int, n: int, total: int, block_bytes: int
) -> Kernel:
    """Splits blocks first .. first + n - 1 of a weight of `total` blocks from src into dst."""
    args: Args = [dst, src, first, n, block_bytes]
    plane = 0
    for at, size in PLANES[dtype]:
        args += [at, size, plane]
        plane += total * size
    args += [0] * (3 * (4 - len(PLANES[dtype])))
    return Kernel("device", "repack", (_blocks(n * block_bytes, 256), 1), 256, args)
