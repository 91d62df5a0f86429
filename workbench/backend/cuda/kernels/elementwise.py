"""Launches of all ops but products and attention: element-wise ops, rows, norms, heads.

Pure. `backend/issue/args.py` gives the argument order of an op's kernel. For the other kernels the
source file gives it. The constants below repeat constants of the sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.backend.cuda.kernels.kernel import Kernel, Operands, Work, blocks
from workbench.backend.cuda.kernels.matvec import Rotate
from workbench.backend.issue.args import Args, pack, variant
from workbench.graph.ir import Node, Tensor

ROPE_HEADS, ROPE_THREADS = 4, 64  # rope, rope_shift: heads and threads of a block
SEEN_WARPS = 8  # kv_extents, kv_classes: warps of a block
DRAW_THREADS, DRAW_BYTES = 1024, 2048 * (8 + 4 + 8) + 1024  # draw: threads, shared bytes of a block
HEADS_PER_BLOCK = 4  # rope_store: heads of a block, a warp each


def second(node: Node | None) -> Tensor | None:
    """The second operand of an add or a mul; None without such a part."""
    return None if node is None else node.inputs[1]


# elements and rows --------------------------------------------------------------------------------


class _Grid(NamedTuple):
    """The grid of an op.

    source: the source file.
    rows: the number of the argument that counts rows or tokens. The next argument counts columns or
        heads.
    cols: columns or heads of a block.
    threads: of a block.
    """

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
    """The kernel of an op of GRIDS: a block for each row and each `cols` columns."""
    source, rows, cols, threads = GRIDS[node.op]
    args = pack(node, p.at)
    grid = int(args[rows]), blocks(int(args[rows + 1]), cols)
    return [Kernel(source, "_".join(variant(node)), grid, threads, args, waits=True)]


def swiglu_quantize(parts: Sequence[Node], p: Operands) -> list[Work]:
    """swiglu and quantize in one launch. The product stays in registers."""
    swiglu, quantize = parts
    gate, up = swiglu.inputs
    args: Args = [p.at(quantize.output), p.at(gate), p.at(up), gate.rows, gate.cols]
    grid = (gate.rows, blocks(gate.cols, 1024))
    return [Kernel("elementwise", "swiglu_quantize", grid, 256, args, waits=True)]


def seen(node: Node, p: Operands) -> list[Work]:
    """kv_extents: a block for each token. kv_classes: a warp for each class."""
    args = pack(node, p.at)
    n_tokens, n = node.inputs[0].shape[0], node.output.cols
    grid = (n_tokens, blocks(n, SEEN_WARPS) if node.op == "kv_classes" else 1)
    return [Kernel("extents", node.op, grid, 32 * SEEN_WARPS, args, waits=True)]


def tokens(node: Node, p: Operands) -> list[Work]:
    """feed, keep_tokens: a thread for each token. draw: a block for each row."""
    args = pack(node, p.at)
    n = int(args[3])
    if node.op == "draw":
        return [Kernel("sampling", "draw", (n, 1), DRAW_THREADS, args, (), DRAW_BYTES, waits=True)]
    return [Kernel("sampling", node.op, (blocks(n, 256), 1), 256, args, waits=True)]


def copy_cells(node: Node, p: Operands) -> list[Work]:
    """A block for each pair of cells, and each 512 bytes."""
    args = pack(node, p.at)
    grid = (int(args[2]), blocks(int(args[3]), 512))
    return [Kernel("rows", "copy_cells", grid, 256, args, waits=True)]


# norms --------------------------------------------------------------------------------------------


def norm(node: Node, p: Operands, parts: Sequence[Node] = ()) -> list[Work]:
    """The launch of an rms_norm, of a fused norm, or of these `parts` of `node`: [add] [rms_norm]
    [mul] [quantize]."""
    by_op = {part.op: part for part in parts or node.parts or (node,)}
    add, rms, mul, quantize = (by_op.get(op) for op in ("add", "rms_norm", "mul", "quantize"))
    first = add or rms or mul
    assert first is not None
    a = first.inputs[0]
    outputs = set(node.outputs)

    def wanted(part: Node | None, last: bool) -> int:
        """The address for the result of `part`; 0 where no node reads the result. last: whether
        `part` is the last part."""
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
        threads = max(threads, 64)  # zero_padding needs 64
    return [Kernel("norm", "norm_row", (a.rows, 1), threads, args, waits=True)]


# heads --------------------------------------------------------------------------------------------


def rotation(rope: Node, k_store: Node | None, v_store: Node | None, p: Operands) -> Rotate:
    """The arguments of kernels that rotate Q and K and store K and V."""
    _, positions, *factors = rope.inputs
    r, store = rope.params, k_store or v_store
    k_rows, v_rows = (0 if one is None else p.at(one.inputs[2]) for one in (k_store, v_store))
    return Rotate(
        p.at(positions), p.at_if(factors[0] if factors else None), rope.output.cols, r["n_rot"],
        int(r["neox"]), float(r["theta_base"]), float(r["freq_scale"]),
        k_rows, v_rows, store.params["n_kv"] if store else 0,
    )  # fmt: skip


class _Heads(NamedTuple):
    """The parts that the heads of Q or K pass between their product and attention.

    norm, weight: of the heads; None without a norm.
    store: of K, where the launch stores K.
    """

    norm: Node | None
    weight: Tensor | None
    rope: Node
    store: Node | None = None

    @classmethod
    def of(cls, parts: Sequence[Node]) -> _Heads:
        """The heads of the parts [rms_norm mul] rope [set_rows]."""
        by_op = {part.op: part for part in parts}
        weight = second(by_op.get("mul"))
        return cls(by_op.get("rms_norm"), weight, by_op["rope"], by_op.get("set_rows"))

    @property
    def x(self) -> Tensor:
        return (self.norm or self.rope).inputs[0]

    @property
    def many(self) -> int:
        return self.rope.output.shape[1]


def rope_store(parts: Sequence[Node], p: Operands) -> list[Work]:
    """The launch of [rms_norm mul rms_norm mul] rope rope set_rows set_rows: a warp for each head
    of Q, K and V."""
    *norms, q_rope, k_rope, k_store, v_store = parts
    q, k = _Heads.of([*norms[:2], q_rope]), _Heads.of([*norms[2:], k_rope, k_store])
    return _heads(q, k, v_store, p)


def q_heads(parts: Sequence[Node], p: Operands) -> list[Work]:
    """The launch of rms_norm mul rope: the heads of Q."""
    return _heads(_Heads.of(parts), None, None, p)


def k_heads(parts: Sequence[Node], p: Operands) -> list[Work]:
    """The launch of [rms_norm mul] rope set_rows: the heads of K."""
    return _heads(None, _Heads.of(parts), None, p)


def _heads(q: _Heads | None, k: _Heads | None, v_store: Node | None, p: Operands) -> list[Work]:
    some = q or k
    assert some is not None
    store = k.store if k else None
    tokens, _, head_dim = some.rope.output.shape
    n_q, n_k, n_v = q.many if q else 0, k.many if k else 0, k.many if k and v_store else 0
    r = rotation(some.rope, store, v_store, p)
    args = [
        p.at(q.rope.output) if q else 0,
        *(0 if one is None else p.at(one.output) for one in (store, v_store)),
        p.at(q.x) if q else 0, p.at(k.x) if k else 0, p.at_if(second(v_store)),
        p.at_if(q.weight) if q else 0, p.at_if(k.weight) if k else 0,
        r.positions, r.freq_factors, r.k_indices, r.v_indices,
        n_q, n_k, n_q + n_k + n_v, head_dim, r.n_rot, r.neox, r.n_kv,
        r.theta_base, r.freq_scale, float(some.norm.params["eps"]) if some.norm else 0.0,
    ]  # fmt: skip
    grid = (tokens, blocks(n_q + n_k + n_v, HEADS_PER_BLOCK))
    return [Kernel("rope_store", "rope_store", grid, 32 * HEADS_PER_BLOCK, args, waits=True)]


def unread(node: Node) -> bool:
    """Whether no node reads the rotated Q, as in a last layer without outputs. The kernel then
    writes Q to scratch."""
    if node.op not in ("rope_store", "qkv_rope_store"):
        return False
    q_rope = next(part for part in node.parts if part.op == "rope")
    return q_rope.output not in node.outputs
