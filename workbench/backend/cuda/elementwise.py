"""Launches of what is neither a product nor attention: element-wise ops, rows, norms, heads.

Pure. `backend/args.py` gives the argument order of an op's kernel, the source file the order of any
other kernel. The constants below repeat the sources'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.backend.args import Args, pack, variant
from workbench.backend.cuda.kernel import Kernel, Operands, Work, blocks
from workbench.backend.cuda.matvec import Rotate
from workbench.graph.ir import Node, Tensor

ROPE_HEADS, ROPE_THREADS = 4, 64  # rope, rope_shift: heads and threads of a block
HEADS_PER_BLOCK = 4  # rope_store: heads of a block, a warp each


def second(node: Node | None) -> Tensor | None:
    """What is added, or multiplied by; none where there is no such part."""
    return None if node is None else node.inputs[1]


# elements and rows --------------------------------------------------------------------------------


class _Grid(NamedTuple):
    """rows: which argument counts the rows, or tokens; the columns, or heads, are the next one.
    cols: of them that a block takes."""

    source: str
    rows: int
    cols: int = 256
    threads: int = 256


GRIDS = {
    "mul": _Grid("elementwise", 3),
    "add": _Grid("elementwise", 3),
    "swiglu": _Grid("elementwise", 3),
    "quantize": _Grid("elementwise", 2, 1024),
    "square_sums": _Grid("elementwise", 2),
    "rms_scale": _Grid("elementwise", 3),
    "get_rows": _Grid("rows", 3),
    "set_rows": _Grid("rows", 3),
    "copy_to_view": _Grid("rows", 2),
    "copy_by_table": _Grid("rows", 4),
    "rope": _Grid("rope", 4, ROPE_HEADS, ROPE_THREADS),
    "rope_shift": _Grid("rope", 3, ROPE_HEADS, ROPE_THREADS),
}


def elementwise(node: Node, p: Operands) -> list[Work]:
    """The one kernel of an op of GRIDS: a block for each row and each stretch of columns."""
    source, rows, cols, threads = GRIDS[node.op]
    args = pack(node, p.at)
    grid = int(args[rows]), blocks(int(args[rows + 1]), cols)
    return [Kernel(source, "_".join(variant(node)), grid, threads, args, waits=True)]


def swiglu_quantize(parts: Sequence[Node], p: Operands) -> list[Work]:
    """swiglu quantize, the product in registers."""
    swiglu, quantize = parts
    gate, up = swiglu.inputs
    args: Args = [p.at(quantize.output), p.at(gate), p.at(up), gate.rows, gate.cols]
    grid = (gate.rows, blocks(gate.cols, 1024))
    return [Kernel("elementwise", "swiglu_quantize", grid, 256, args, waits=True)]


# norms --------------------------------------------------------------------------------------------


def norm(node: Node, p: Operands, parts: Sequence[Node] = ()) -> list[Work]:
    """rms_norm, or a fused norm, or of `node` the parts [add] [rms_norm] [mul] [quantize]."""
    by_op = {part.op: part for part in parts or node.parts or (node,)}
    add, rms, mul, quantize = (by_op.get(op) for op in ("add", "rms_norm", "mul", "quantize"))
    first = add or rms or mul
    assert first is not None
    a = first.inputs[0]
    outputs = set(node.outputs)

    def wanted(part: Node | None, last: bool) -> int:
        """Address for the result of `part`: 0 if no other node reads it."""
        return p.at(part.output) if part is not None and (last or part.output in outputs) else 0

    dst_sum = wanted(add, False)
    scaled = mul or rms
    args = [
        dst_sum, wanted(scaled, quantize is None), wanted(quantize, True),
        p.at(a), p.at_if(second(add)), p.at_if(second(mul)),
        a.rows, a.cols, float(rms.params["eps"]) if rms else 0.0, int(rms is not None),
    ]  # fmt: skip
    threads = min(1024, blocks(blocks(a.cols, 4), 32) * 32)
    if quantize:
        threads = max(threads, 64)  # zero_padding wants as many
    return [Kernel("norm", "norm_row", (a.rows, 1), threads, args, waits=True)]


# heads --------------------------------------------------------------------------------------------


def rotation(q_rope: Node, k_store: Node, v_store: Node, p: Operands) -> Rotate:
    """What kernels that rotate Q and K and store K and V are told."""
    _, positions, *factors = q_rope.inputs
    r = q_rope.params
    return Rotate(
        p.at(positions), p.at_if(factors[0] if factors else None), q_rope.output.cols, r["n_rot"],
        int(r["neox"]), float(r["theta_base"]), float(r["freq_scale"]),
        p.at(k_store.inputs[2]), p.at(v_store.inputs[2]), k_store.params["n_kv"],
    )  # fmt: skip


def rope_store(parts: Sequence[Node], p: Operands) -> list[Work]:
    """[rms_norm mul rms_norm mul] rope rope set_rows set_rows: a warp for each head of Q, K, V."""
    *norms, q_rope, k_rope, k_store, v_store = parts
    q_norm, q_mul, k_norm, k_mul = norms or (None,) * 4
    q = (q_norm or q_rope).inputs[0]
    k = (k_norm or k_rope).inputs[0]
    v = v_store.inputs[1]
    tokens, heads, head_dim = q_rope.output.shape
    heads_kv = k_rope.output.shape[1]
    r = rotation(q_rope, k_store, v_store, p)
    args = [
        p.at(q_rope.output), p.at(k_store.output), p.at(v_store.output),
        p.at(q), p.at(k), p.at(v),
        p.at_if(second(q_mul)), p.at_if(second(k_mul)),
        r.positions, r.freq_factors, r.k_indices, r.v_indices,
        heads, heads_kv, head_dim, r.n_rot, r.neox, r.n_kv,
        r.theta_base, r.freq_scale, float(q_norm.params["eps"]) if q_norm else 0.0,
    ]  # fmt: skip
    grid = (tokens, blocks(heads + 2 * heads_kv, HEADS_PER_BLOCK))
    return [Kernel("rope_store", "rope_store", grid, 32 * HEADS_PER_BLOCK, args, waits=True)]


def unread(node: Node) -> bool:
    """Whether no node reads the rotated Q, as in a last layer without outputs. It is written all
    the same, to scratch."""
    if node.op not in ("rope_store", "qkv_rope_store"):
        return False
    q_rope = next(part for part in node.parts if part.op == "rope")
    return q_rope.output not in node.outputs
