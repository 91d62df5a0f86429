"""Matrix products by cuBLAS, prepared once and issued with one call.

Calls go through ctypes. CuPy's wrapper would set the stream of its handle at every call, and it has
no cublasSetWorkspace. The library is the same that CuPy uses: CuPy and cuda-bindings both rely on
cuda.pathfinder, which finds the library that the process has loaded or would load.

Importing this module loads nothing; `Blas()` loads cuBLAS.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Hashable
from typing import Any, cast

from workbench.backend.cuda.kernels.kernel import Gemm
from workbench.backend.issue.issued import Issued, Words
from workbench.common.errors import DeviceError
from workbench.common.extras import install

# Each stream has a workspace of this size. With a fixed workspace cuBLAS gives the same results
# every time. NVIDIA recommends 32 MiB for compute capability 9.0.
WORKSPACE_BYTES = 32 << 20

# cublas_api.h, library_types.h
TRANSPOSED, AS_IT_IS = 1, 0
TYPES = {"F32": 0, "F16": 2, "BF16": 14}
PRODUCT = "cublasGemmEx"
COMPUTE_F32, DEFAULT_ALGORITHM = 68, -1
MATH_FULL_SUMS = 16  # default math: no sums in 16 bits, no TF32


class Blas:
    """cuBLAS on the calling thread's current device. Each stream has its own handle and workspace,
    so products may run side by side. Raises DeviceError where the library cannot be used."""

    def __init__(self) -> None:
        self._library, self.path = _load()
        self._handles: dict[int, ctypes.c_void_p] = {}  # stream -> handle
        self._workspaces: list[Any] = []
        self._loaded: set[tuple[Hashable, ...]] = set()  # products whose code is loaded
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def prepare(self, gemm: Gemm, stream: int) -> Issued:
        """The command that issues `gemm` on `stream` (a CUstream's address), with every argument
        bound. The command raises DeviceError where cuBLAS refuses."""
        library, check = self._library, self._check
        call = library.cublasGemmEx
        kind, wide = TYPES[gemm.dtype], TYPES["F32"]
        # cuBLAS is column-major: it sees w as (cols, rows) and x as (cols, n_tokens), and makes
        # (rows, n_tokens), which is dst.
        i32 = ctypes.c_int
        block = (ctypes.c_int64 * 3)(gemm.w, gemm.x, gemm.dst)
        w, x, dst = (ctypes.c_void_p.from_buffer(block, 8 * i) for i in range(3))
        args = (
            self._handle(stream), i32(TRANSPOSED), i32(AS_IT_IS),
            i32(gemm.rows), i32(gemm.n_tokens), i32(gemm.cols), ctypes.byref(self._one),
            w, i32(kind), i32(gemm.cols), x, i32(kind), i32(gemm.cols),
            ctypes.byref(self._zero), dst, i32(wide), i32(gemm.dst_stride),
            i32(COMPUTE_F32), i32(DEFAULT_ALGORITHM),
        )  # fmt: skip

        def issue() -> None:
            status = call(*args)
            if status:
                check(f"cublasGemmEx of {gemm}", status)

        sizes = (gemm.dtype, gemm.rows, gemm.cols, gemm.n_tokens, gemm.dst_stride)
        return Issued(issue, (PRODUCT, *sizes), Words(block, (0, 1, 2)))

    def load(self, product: Issued) -> None:
        """Loads the code of `product`, a command of `prepare`, so that it can be captured.

        The first product of a shape loads code, and a capture forbids that. The product runs once,
        into memory that is then freed. Without such memory nothing happens.
        """
        if product.same in self._loaded:
            return
        import cupy

        n_tokens, dst_stride = product.same[-2:]
        nbytes = 4 * cast("int", n_tokens) * cast("int", dst_stride)
        block, runtime = product.block, cupy.cuda.runtime
        with contextlib.suppress(runtime.CUDARuntimeError):
            there = runtime.malloc(nbytes)
            dst = block[2]
            try:
                block[2] = there
                product.call()
            finally:
                block[2] = dst
                runtime.free(there)  # waits for the product
            self._loaded.add(product.same)

    def close(self) -> None:
        """Destroys the handles. The commands of `prepare` must not be called afterwards."""
        for handle in self._handles.values():
            self._library.cublasDestroy_v2(handle)
        self._handles.clear()
        self._workspaces.clear()

    def _handle(self, stream: int) -> ctypes.c_void_p:
        if stream not in self._handles:
            import cupy

            library, check = self._library, self._check
            handle = ctypes.c_void_p()
            check("cublasCreate", library.cublasCreate_v2(ctypes.byref(handle)))
            self._handles[stream] = handle
            check("cublasSetStream", library.cublasSetStream_v2(handle, ctypes.c_void_p(stream)))
            try:
                workspace = cupy.cuda.Memory(WORKSPACE_BYTES)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise DeviceError(
                    f"cannot allocate {WORKSPACE_BYTES >> 20} MiB for cuBLAS ({error}); use a "
                    "smaller model or n_ctx"
                ) from None
            self._workspaces.append(workspace)
            # after the stream: setting a stream resets the workspace
            address, size = ctypes.c_void_p(workspace.ptr), ctypes.c_size_t(WORKSPACE_BYTES)
            check("cublasSetWorkspace", library.cublasSetWorkspace_v2(handle, address, size))
            mode = ctypes.c_int(MATH_FULL_SUMS)
            check("cublasSetMathMode", library.cublasSetMathMode(handle, mode))
        return self._handles[stream]

    def _check(self, what: str, status: int) -> None:
        if status:
            name = self._library.cublasGetStatusName(status).decode()
            raise DeviceError(f"{what} failed: {name} (in {self.path})")


def _load() -> tuple[ctypes.CDLL, str]:
    """cuBLAS, and the path at which it was found."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("cublas").abs_path or "libcublas.so.13"
        library = ctypes.CDLL(path)
        library.cublasGetStatusName.restype = ctypes.c_char_p
        return library, path
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DeviceError(
            f"products of many tokens need cuBLAS ({reason}); {install('gpu')}, "
            "or use --device embedded"
        ) from None
