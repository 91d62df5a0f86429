"""CPU kernels for the host backend and the embedded device.

A kernel is `void kernel(int64 args, int64 lane, int64 n_lanes)`: `args` is the address of a block
of 64-bit slots in the order of `backend/args.py` (a real parameter is a float64), and the call does
lane's share of the work. Lanes write disjoint bytes, need nothing from each other, and the result
is the same bit for bit whatever n_lanes is. Importing this package loads no compiler; kernels are
compiled when first asked for, and cached on disk.

Layouts of weights: `file` (the blocks of the model file) and `rows16` (interleave.py; quantised
types only). Both give the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from workbench.backend.args import variant
from workbench.graph.ir import DTYPES, Q8_ACT, QUANTISED, DType, Node

if TYPE_CHECKING:
    from workbench.backend.cpu.isa import Isa
    from workbench.backend.cpu.vector import Body

GROUP = 16
LAYOUTS = ("file", "rows16")
WEIGHT_OPS = ("get_rows", "mul_mat", "mul_mat_blocked", "mul_mat_float")  # variants with a type
BATCH = 8  # tokens up to which an integer product is worked on as its weights are unpacked


def kernel_of(node: Node) -> tuple[str, ...]:
    """The variant that runs `node` here: `backend.args.variant`, but that quantised weights and
    more than BATCH tokens are multiplied by blocks (both give the same bits), and that float
    weights have one kernel, for it rounds no activation either way."""
    op, *types = variant(node)
    if op == "mul_mat_float" and DTYPES[types[0]] not in QUANTISED:
        op = "mul_mat"
    if op == "mul_mat" and node.inputs[1].dtype == Q8_ACT and node.inputs[1].shape[0] > BATCH:
        op = "mul_mat_blocked"
    return (op, *types)


def _body(variant: tuple[str, ...], layout: str, isa: Isa) -> Body:
    """What writes the code of a kernel; raises KeyError for a variant that is not in the table."""
    from workbench.backend.cpu import attention, blocked, elementwise, get_rows, interleave, matvec

    op = variant[0]
    if op == "mul_mat" and variant[1] in matvec.FLOAT_LOADS:
        return matvec.float_body(variant[1], isa)
    products = {
        "mul_mat": matvec.quantised_body,
        "mul_mat_blocked": blocked.blocked_body,
        "mul_mat_float": blocked.dequantised_body,
    }
    if op in products:
        return products[op](variant[1], layout, isa)
    if op == "get_rows":
        return get_rows.get_rows_body(variant[1], layout)
    if op == "repack":
        return interleave.repack_body(interleave.FORMATS[variant[1]])
    return {
        "rms_norm": elementwise.rms_norm,
        "mul": elementwise.binary_body(lambda a, b: a * b),
        "add": elementwise.binary_body(lambda a, b: a + b),
        "quantize": elementwise.quantize,
        "rope": elementwise.rope,
        "rope_shift": elementwise.rope_shift,
        "set_rows": elementwise.set_rows,
        "attention": attention.attention,
        "swiglu": elementwise.swiglu,
        "square_sums": elementwise.square_sums,
        "rms_scale": elementwise.rms_scale,
    }[op]


@cache
def kernel(variant: tuple[str, ...], layout: str = "file", isa: str | None = None):
    """The numba CFunc of a variant (`kernel_of`), compiled or from the cache.

    isa names another instruction set than this CPU's best (tests). Raises KeyError for a variant
    or layout there is no kernel for.
    """
    from workbench.backend.cpu import compile as compiler
    from workbench.backend.cpu.isa import ISAS

    quantised = variant[0] in WEIGHT_OPS and DTYPES[variant[1]] in QUANTISED
    if layout not in (LAYOUTS if quantised else LAYOUTS[:1]):
        raise KeyError((variant, layout))
    chosen = ISAS[isa] if isa else compiler.host_isas()[0]
    name = "_".join((*variant, layout, chosen.name))
    return compiler.compile_kernel(name, _body(variant, layout, chosen))


def kernel_address(variant: tuple[str, ...], layout: str = "file") -> int:
    """Address of the compiled kernel; compiles on first use (up to a few seconds), then cached."""
    return kernel(variant, layout).address


def warm(variants: Iterable[tuple[tuple[str, ...], str]]) -> None:
    """Compile (or load) the kernels of (variant, layout) pairs."""
    for which, layout in variants:
        kernel_address(which, layout)


def scratch_bytes(node: Node, n_lanes: int) -> int:
    """Bytes of scratch that a launch of `node` on n_lanes needs; 0 for most ops. Any alignment."""
    if node.op != "attention":
        return 0
    from workbench.backend.cpu.attention import scratch_bytes as of_attention

    q = node.inputs[0]
    assert q is not None
    n_tokens, n_head, head_dim = q.shape
    return of_attention(n_tokens, n_head, node.params["n_head_kv"], head_dim, n_lanes)


def weight_layout(dtype: DType, rows: int, cols: int) -> str:
    """The fastest layout for a (rows, cols) weight that may be repacked: rows16, or file.

    One answer for all quantised types, for it was measured to be theirs. Time with rows16 as a
    share of that with file, by two threads from cold memory: the least and the greatest median of
    120 pairs over batches 1, 2, 4 and 8, once for 8192 x 2048 and once for 2048 x 8192.

    | type | 8192 x 2048 | 2048 x 8192 |
    |---|---|---|
    | Q8_0 | 0.36 to 0.44 | 0.40 to 0.59 |
    | Q4_0 | 0.37 to 0.56 | 0.47 to 0.64 |
    | Q4_K | 0.48 to 0.59 | 0.56 to 0.67 |
    | Q5_K | 0.44 to 0.54 | 0.55 to 0.58 |
    | Q6_K | 0.41 to 0.47 | 0.52 to 0.64 |
    | MXFP4 | 0.40 to 0.55 | 0.48 to 0.65 |

    (AMD EPYC, 2 cores, avx512vnni; data/results/tuning/cpu-layouts-2.json has each, with quartiles
    and trials. It was not so while a whole unit was asked for at once, cpu-layouts-1.json: Q4_K and
    Q5_K lost up to 1.26 in 2048 x 8192. Why that was: cpu-prefetch-1.txt.)
    """
    return "rows16" if dtype in QUANTISED else "file"


def repacked_bytes(dtype: DType, rows: int, cols: int, layout: str) -> int:
    """Size of a weight in a layout; rows16 rounds rows up to 16."""
    if layout == "rows16":
        rows = -(-rows // GROUP) * GROUP
    return rows * dtype.row_bytes(cols)


def repack(dst: int, src: int, dtype: DType, rows: int, cols: int, layout: str) -> None:
    """Bring a weight from the file's layout at address src into `layout` at dst (about 10 GB/s).

    The ranges must not overlap; dst has `repacked_bytes`. Runs without the GIL.
    """
    if layout == "file":
        ctypes.memmove(dst, src, rows * dtype.row_bytes(cols))
        return
    args = (ctypes.c_int64 * 4)(dst, src, rows, cols)
    kernel(("repack", dtype.name)).ctypes(ctypes.addressof(args), 0, 1)
