"""The argument order of every kernel, for the CPU and for CUDA alike.

`pack(node, address_of, scratch)` gives the argument list of the kernel that runs `node`. Addresses
and counts are int (64 bits). Real parameters are float: float32 on CUDA, float64 on the CPU, where
every argument has 64 bits. `address_of(tensor)` is the byte address of the tensor on this node's
backend. An absent optional tensor has address 0. `scratch` is the address of the node's scratch
range (0 where the backend asked for none).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from workbench.common.sizes import round_up
from workbench.config import Activations
from workbench.graph import ops
from workbench.graph.attend import attended
from workbench.graph.ir import ALIGN, Q8_ACT, QUANTISED, Node, Tensor
from workbench.graph.shapes import SQUARES

AddressOf = Callable[[Tensor], int]
Args = list[int | float]


def _get_rows(n: Node, at, scratch) -> Args:
    """dst, table, ids, n_ids, cols, table_rows"""
    table, ids = n.inputs
    return [at(n.output), at(table), at(ids), ids.shape[0], table.cols, table.shape[0]]


def _rows(n: Node, at, scratch) -> Args:
    """dst, x, rows, cols; for swiglu dst, gate, up, rows, cols"""
    x = n.inputs[0]
    return [at(n.output), *map(at, n.inputs), x.rows, x.cols]


def _rms_norm(n: Node, at, scratch) -> Args:
    """dst, x, rows, cols, eps"""
    return [*_rows(n, at, scratch), float(n.params["eps"])]


def _binary(n: Node, at, scratch) -> Args:
    """dst, a, b, rows, cols, b_rows (1: one row for all; else rows)"""
    a, b = n.inputs
    return [at(n.output), at(a), at(b), a.rows, a.cols, 1 if len(b.shape) == 1 else b.rows]


def _mul_mat(n: Node, at, scratch) -> Args:
    """dst, w, x, w_rows, cols, n_tokens"""
    w, x = n.inputs
    return [at(n.output), at(w), at(x), w.shape[0], w.cols, x.shape[0]]


def _rope(n: Node, at, scratch) -> Args:
    """dst, x, positions, freq_factors, n_tokens, n_heads, head_dim, n_rot, neox,
    theta_base, freq_scale"""
    x, positions, *factors = n.inputs
    p = n.params
    return [
        at(n.output), at(x), at(positions), at(factors[0]) if factors else 0,
        *x.shape, p["n_rot"], int(p["neox"]), float(p["theta_base"]), float(p["freq_scale"]),
    ]  # fmt: skip


def _rope_shift(n: Node, at, scratch) -> Args:
    """cache, deltas, freq_factors, n_cells, n_head_kv, head_dim, n_rot, neox,
    theta_base, freq_scale"""
    cache, deltas, *factors = n.inputs
    p = n.params
    return [
        at(cache), at(deltas), at(factors[0]) if factors else 0,
        deltas.shape[0], p["n_head_kv"], cache.cols // p["n_head_kv"], p["n_rot"], int(p["neox"]),
        float(p["theta_base"]), float(p["freq_scale"]),
    ]  # fmt: skip


def _set_rows(n: Node, at, scratch) -> Args:
    """cache, x, indices, n_tokens, cols, n_kv (an index outside 0..n_kv-1 is not stored)"""
    cache, x, indices = n.inputs
    return [at(cache), at(x), at(indices), x.rows, x.cols, n.params["n_kv"]]


VIEW = 0  # the argument of copy_to_view that changes with the first cell


def view_address(cache: Tensor, first: int, cell: int) -> int:
    """The address of a cell in a cache that begins at address `first`."""
    return first + cell * cache.dtype.row_bytes(cache.cols)


def _copy_to_view(n: Node, at, scratch) -> Args:
    """dst (where the first row goes), x, n_tokens, cols"""
    cache, x = n.inputs
    return [view_address(cache, at(cache), n.params["cell"]), at(x), x.rows, x.cols]


def _copy_by_table(n: Node, at, scratch) -> Args:
    """cache, x, table, store (number of the table's entry), n_tokens, cols, n_kv (a row outside
    0..n_kv-1 is not stored)"""
    p, x = n.params, n.inputs[1]
    return [*map(at, n.inputs), p["store"], x.rows, x.cols, p["n_kv"]]


def _attention(n: Node, at, scratch) -> Args:
    """dst, q, k, v, mask, scratch, regions, extents, classes, sinks, n_tokens, n_head, n_head_kv,
    head_dim, n_kv, n_regions, scale"""
    a, p = attended(n), n.params
    more = [0 if t is None else at(t) for t in (a.regions, a.extents, a.classes, a.sinks)]
    n_regions = 0 if a.regions is None else a.regions.shape[0]
    return [
        at(n.output), at(a.q), at(a.k), at(a.v), at(a.mask), scratch, *more,
        a.q.shape[0], a.q.shape[1], p["n_head_kv"], a.q.shape[2], p["n_kv"], n_regions,
        float(p["scale"]),
    ]  # fmt: skip


def _of_mask(n: Node, at, scratch) -> Args:
    """dst, mask, n_tokens, n_kv"""
    (mask,) = n.inputs
    return [at(n.output), at(mask), *mask.shape]


def _feed(n: Node, at, scratch) -> Args:
    """dst, ids, last, n_tokens, n_seqs"""
    ids, last = n.inputs
    return [at(n.output), at(ids), at(last), ids.shape[0], last.shape[0]]


def _draw(n: Node, at, scratch) -> Args:
    """dst, logits, settings, n_rows, n_vocab"""
    logits, settings = n.inputs
    return [at(n.output), at(logits), at(settings), *logits.shape]


def _keep_tokens(n: Node, at, scratch) -> Args:
    """last, ids, rows, n_ids, n_seqs (a row outside 0..n_seqs-1 is not stored)"""
    last, ids, rows = n.inputs
    return [at(last), at(ids), at(rows), ids.shape[0], last.shape[0]]


def _copy_cells(n: Node, at, scratch) -> Args:
    """cache, pairs, n_pairs, row_bytes, n_cells"""
    cache, pairs = n.inputs
    row_bytes = cache.dtype.row_bytes(cache.cols)
    return [at(cache), at(pairs), pairs.shape[0], row_bytes, cache.rows]


def _rms_scale(n: Node, at, scratch) -> Args:
    """dst, x, squares, rows, cols, n_squares, normed (columns the squares are of), eps"""
    x, squares = n.inputs
    normed = squares.cols * SQUARES
    return [
        at(n.output), at(x), at(squares), x.rows, x.cols, squares.cols, normed,
        float(n.params["eps"]),
    ]  # fmt: skip


def _one(n: Node) -> tuple[str, ...]:
    """An op with one kernel."""
    return (n.op,)


def _by_first(n: Node) -> tuple[str, ...]:
    """An op with a kernel for each type of its first input."""
    return (n.op, n.inputs[0].dtype.name)


def _by_cache(n: Node) -> tuple[str, ...]:
    """Attention has a kernel for each pair of types of K and V."""
    return (n.op, n.inputs[1].dtype.name, n.inputs[2].dtype.name)


def _by_weight(n: Node) -> tuple[str, ...]:
    """A product has a kernel for each weight type, and another for the float path."""
    w, x = n.inputs
    as_floats = w.dtype in QUANTISED and x.dtype != Q8_ACT
    if as_floats or n.params.get("activations") == Activations.FLOAT:
        return ("mul_mat_float", w.dtype.name)
    return _by_first(n)


class OpKernels(NamedTuple):
    """The kernels of one op: their arguments, and which kernel computes a node."""

    args: Callable[[Node, AddressOf, int], Args]
    variant: Callable[[Node], tuple[str, ...]] = _one


ARGS: dict[str, OpKernels] = {
    "get_rows": OpKernels(_get_rows, _by_first),
    "rms_norm": OpKernels(_rms_norm),
    "mul": OpKernels(_binary),
    "add": OpKernels(_binary),
    "quantize": OpKernels(_rows),
    "mul_mat": OpKernels(_mul_mat, _by_weight),
    "rope": OpKernels(_rope),
    "rope_shift": OpKernels(_rope_shift, _by_first),
    "set_rows": OpKernels(_set_rows, _by_first),
    "copy_to_view": OpKernels(_copy_to_view, _by_first),
    "copy_by_table": OpKernels(_copy_by_table, _by_first),
    "attention": OpKernels(_attention, _by_cache),
    "kv_extents": OpKernels(_of_mask),
    "kv_classes": OpKernels(_of_mask),
    "feed": OpKernels(_feed),
    "draw": OpKernels(_draw),
    "keep_tokens": OpKernels(_keep_tokens),
    "copy_cells": OpKernels(_copy_cells),
    "swiglu": OpKernels(_rows),
    "square_sums": OpKernels(_rows),
    "rms_scale": OpKernels(_rms_scale),
}


def pack(node: Node, address_of: AddressOf, scratch: int = 0) -> Args:
    """The arguments of the kernel that runs `node`, in the order of the docstrings above."""
    return ARGS[node.op].args(node, address_of, scratch)


def variant(node: Node) -> tuple[str, ...]:
    """Which kernel of an op: the op's name and the types that select among its variants.

    `mul_mat_float` is the float path: float32 activations that are not rounded, decoded weights,
    sums in float32. A product with a quantised weight takes this path where x is F32. With a float
    weight x is always F32, so there the node says it (`activations="float"`, see `build_graph`). A
    fused node has a backend's own kernels, under the op's name.
    """
    return ARGS[node.op].variant(node) if node.op in ARGS else (node.op,)


# the parts of a fused node, one after the other --------------------------------------------------


def parts_scratch_bytes(node: Node, own: Callable[[Node], int]) -> int:
    """Bytes of scratch for a fused node whose parts run one after the other. own: the bytes that a
    part needs."""
    return ops.interior_bytes(node) + max(own(part) for part in node.parts)


def parts_addresses(node: Node, address_of: AddressOf, scratch: int) -> tuple[AddressOf, int]:
    """Where the parts of a fused node find tensors, and the address of their scratch.

    Interior tensors lie at the start of the node's scratch. After them lies the scratch that the
    parts share.
    """
    addresses: dict[Tensor, int] = {}
    for t in ops.interior(node):
        addresses[t] = scratch
        scratch += round_up(t.nbytes, ALIGN)

    def address(tensor: Tensor) -> int:
        inside = addresses.get(tensor.storage)
        return address_of(tensor) if inside is None else inside

    return address, scratch
