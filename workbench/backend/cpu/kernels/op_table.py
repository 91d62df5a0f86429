"""The table of CPU kernels: the kernel of each node, the body that writes its code, its scratch.

A kernel is `void kernel(int64 args, int64 part, int64 n_parts)`. `args` is the address of a block
of 64-bit words in the order of `backend/issue/args.py` (a real parameter is a float64). A call
computes part `part` of `n_parts`. Parts write disjoint bytes and need nothing from each other, and
the result is the same bits for any n_parts. Importing this module loads no compiler: a kernel is
compiled on first use, and cached on disk.

Layouts of weights: `file` (the blocks of the model file) and `rows16` (interleave.py; quantised
types only). Both give the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING

from workbench.backend import compiled
from workbench.backend.apart import compile_given, compiled_apart
from workbench.backend.cpu.kernels.kv_shares import SKIPS, TOKENS, Shares, shares_of
from workbench.backend.issue.args import AddressOf, Args, pack, variant
from workbench.common.sizes import round_up
from workbench.config import AttnKernel, KVParts, SkipMaskedKV
from workbench.graph.ir import DTYPES, Q8_ACT, QUANTISED, DType, Node

if TYPE_CHECKING:
    from workbench.backend.cpu.isa import Isa
    from workbench.backend.cpu.kernels.vector import Body

GROUP = 16
LAYOUTS = ("file", "rows16")
WEIGHT_OPS = ("get_rows", "mul_mat", "mul_mat_blocked", "mul_mat_float")  # variants with a type
BATCH = 8  # most tokens of an integer product whose weights are unpacked as they are multiplied


def kernel_of(node: Node) -> tuple[str, ...]:
    """The variant that runs `node` here: `backend.issue.args.variant`, with two exceptions.
    Quantised weights times more than BATCH tokens are multiplied by blocks, with the same bits.
    Float weights have one kernel, because it never rounds activations."""
    op, *types = variant(node)
    if op == "mul_mat_float" and DTYPES[types[0]] not in QUANTISED:
        op = "mul_mat"
    if op == "mul_mat" and node.inputs[1].dtype == Q8_ACT and node.inputs[1].shape[0] > BATCH:
        op = "mul_mat_blocked"
    return (op, *types)


@cache
def _bodies() -> dict[str, Callable[..., Body]]:
    """By op: the function that returns the body of a variant, called with (layout, isa, *types)."""
    from workbench.backend.cpu.kernels import (
        attention,
        blocked,
        elementwise,
        extents,
        feeding,
        get_rows,
        interleave,
        matvec,
        stores,
    )

    named = (
        elementwise.rms_norm, elementwise.quantize, elementwise.rope, elementwise.swiglu,
        elementwise.square_sums, elementwise.rms_scale,
        attention.attention_combine, extents.kv_extents, extents.kv_classes,
        feeding.feed, feeding.keep_tokens, stores.copy_cells,
    )  # fmt: skip
    one_body: dict[str, Body] = {
        **{body.__name__: body for body in named},
        "mul": elementwise.binary_body(lambda a, b: a * b),
        "add": elementwise.binary_body(lambda a, b: a + b),
    }
    return {
        **{op: lambda layout, isa, body=body: body for op, body in one_body.items()},
        "attention": lambda layout, isa, k, v: attention.attention_body(k, v),
        **{
            op: lambda layout, isa, dtype, body=body: body(dtype)
            for op, body in {**stores.BODIES, "rope_shift": elementwise.rope_shift}.items()
        },
        "mul_mat": lambda layout, isa, dtype: matvec.product_body(dtype, layout, isa),
        "mul_mat_blocked": lambda layout, isa, dtype: blocked.blocked_body(dtype, layout, isa),
        "mul_mat_float": lambda layout, isa, dtype: blocked.dequantised_body(dtype, layout, isa),
        "get_rows": lambda layout, isa, dtype: get_rows.get_rows_body(dtype, layout),
        "repack": lambda layout, isa, dtype: interleave.repack_body(interleave.FORMATS[dtype]),
    }


@cache
def kernel(variant: tuple[str, ...], layout: str = "file", isa: str | None = None):
    """The kernel of a variant (`kernel_of`), compiled or from the cache.

    isa: the name of an instruction set other than this CPU's best (tests). Raises KeyError for a
    variant or layout without a kernel.
    """
    from workbench.backend.cpu import compile as compiler
    from workbench.backend.cpu.isa import ISAS

    if variant[0] == "draw":  # as numba compiles it
        from workbench.backend.cpu.kernels.sampling import draw

        return draw
    quantised = variant[0] in WEIGHT_OPS and DTYPES[variant[1]] in QUANTISED
    if layout not in (LAYOUTS if quantised else LAYOUTS[:1]):
        raise KeyError((variant, layout))
    chosen = ISAS[isa] if isa else compiler.host_isas()[0]
    body = _bodies()[variant[0]](layout, chosen, *variant[1:])
    return compiler.compile_kernel(_named(variant, layout, chosen), body)


def is_kept(variant: tuple[str, ...], layout: str = "file") -> bool:
    """Whether the cache has a kernel's machine code; True for `draw`, which numba keeps."""
    from workbench.backend.cpu import compile as compiler

    named = _named(variant, layout, compiler.host_isas()[0])
    return variant[0] == "draw" or compiler.is_kept(named)


def compile_many(wanted: Iterable[tuple[tuple[str, ...], str]]) -> None:
    """Compiles the kernels that the cache lacks, several at a time where there are cores. wanted:
    variants, each with its layout."""
    missing = [one for one in dict.fromkeys(wanted) if not is_kept(*one)]
    begun_ns = time.perf_counter_ns()
    for _ in compiled_apart(__name__, missing):
        compiled.took(begun_ns, compiled.cache_dir())


def _named(variant: tuple[str, ...], layout: str, isa: Isa) -> str:
    return "_".join((*variant, layout, isa.name))


def kernel_address(variant: tuple[str, ...], layout: str = "file") -> int:
    """Address of the compiled kernel; compiles on first use (up to a few seconds), then cached."""
    return kernel(variant, layout).address


def scratch_bytes(node: Node, n_parts: int) -> int:
    """Bytes of scratch, of any alignment, for a launch of `node` in n_parts; 0 for most ops."""
    if node.op == "rope_shift":
        from workbench.backend.cpu.kernels.elementwise import rope_shift_scratch_bytes

        return rope_shift_scratch_bytes(node.inputs[0].cols, n_parts)
    if node.op != "attention":
        return 0
    from workbench.backend.cpu.kernels import attention

    n_tokens, n_head, head_dim = node.inputs[0].shape
    n_shares = shares(node).n
    n_head_kv = node.params["n_head_kv"]
    return attention.scratch_bytes(n_tokens, n_head, n_head_kv, head_dim, n_parts, n_shares)


def shares(node: Node) -> Shares:
    """How an attention node deals out its tiles of cells."""
    n_tokens, n_head_kv = node.inputs[0].shape[0], node.params["n_head_kv"]
    kv_parts = node.params.get("kv_parts", KVParts.OFF)
    return shares_of(kv_parts, n_tokens, n_head_kv, node.params["n_kv"])


def arguments(node: Node, address_of: AddressOf, scratch: int) -> Args:
    """Arguments of the kernels of a node: those of `backend.issue.args.pack`, and a CPU's own.

    Attention's own arguments stand before the scale: how it skips, its shares, their pieces, and
    how many tokens a tile serves. rope_shift's own argument is its scratch, after the factors.
    """
    args = pack(node, address_of, scratch)
    if node.op == "rope_shift":
        args[3:3] = [scratch]
    if node.op == "attention":
        skip = SKIPS[node.params.get("skip", SkipMaskedKV.OFF)]
        tokens = 1 if node.params.get("kernel") == AttnKernel.VEC else TOKENS
        args[-1:-1] = [skip, *shares(node), tokens]
    return args


def kernels_of(node: Node) -> list[tuple[str, ...]]:
    """The variants that run `node` one after the other, with the same arguments."""
    first = kernel_of(node)
    if node.op == "attention" and shares(node).n > 1:
        return [first, ("attention_combine",)]
    return [first]


def weight_layout(dtype: DType) -> str:
    """The fastest layout for a weight that may be repacked: rows16, or file.

    Every quantised type was measured, and rows16 won for each. The table has the time with rows16
    as a share of the time with file, by two threads from cold memory. Each cell has the least and
    the greatest median of 120 pairs over batches 1, 2, 4 and 8.

    | type | 8192 x 2048 | 2048 x 8192 |
    |---|---|---|
    | Q8_0 | 0.36 to 0.44 | 0.40 to 0.59 |
    | Q4_0 | 0.37 to 0.56 | 0.47 to 0.64 |
    | Q4_K | 0.48 to 0.59 | 0.56 to 0.67 |
    | Q5_K | 0.44 to 0.54 | 0.55 to 0.58 |
    | Q6_K | 0.41 to 0.47 | 0.52 to 0.64 |
    | MXFP4 | 0.40 to 0.55 | 0.48 to 0.65 |

    (AMD EPYC, 2 cores, avx512vnni; data/results/tuning/cpu-layouts-2.json has every median, with
    quartiles and trials. Earlier, a kernel prefetched a whole unit at once; then Q4_K and Q5_K took
    up to 1.26 of the time in 2048 x 8192, see cpu-layouts-1.json. cpu-prefetch-1.txt says why.)
    """
    return "rows16" if dtype in QUANTISED else "file"


def repacked_bytes(dtype: DType, rows: int, cols: int, layout: str) -> int:
    """Bytes of a weight in a layout; rows16 rounds rows up to 16."""
    if layout == "rows16":
        rows = round_up(rows, GROUP)
    return rows * dtype.row_bytes(cols)


if __name__ == "__main__":
    compile_given(lambda one: kernel(tuple(one[0]), one[1]))
