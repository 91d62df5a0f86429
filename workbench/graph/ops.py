"""The op table: one entry for each op, with all that is known of it without a backend.

An entry (`Op`) says what shape comes out, what a node reads and writes, and which of these accesses
depend on values. It also counts the bytes that a node touches and its arithmetic. Backends
implement exactly these ops (`backend/issue/args.py` gives the argument order of their kernels).
Activations are float32, row-major and contiguous; Q8_ACT is the one exception (see `DType`).

    op         inputs -> output; params
    get_rows   table (n, cols) any weight type, ids (T,) I32 -> (T, cols) F32
    rms_norm   x (..., cols) F32 -> like x; eps
    mul, add   a (..., cols) F32, b (cols,) or like a, F32 -> like a
    quantize   x (T, cols) F32 -> (T, cols) Q8_ACT
    mul_mat    w (rows, cols), x (T, cols) F32, or Q8_ACT if w is quantised -> (T, rows) F32;
               activations="float" where a backend may not round x, else without
    rope       x (T, heads, head_dim) F32, positions (T,) I32, freq_factors (n_rot/2,) F32 or none
               -> like x; n_rot, neox, theta_base, freq_scale
    rope_shift cache (cells, heads * head_dim), deltas (n,) I32, freq_factors (n_rot/2,) F32 or
               none -> the cache; n_head_kv, n_rot, neox, theta_base, freq_scale
    set_rows   cache (cells, cols), x (T, cols) F32, indices (T,) I64 -> the cache; n_kv
    copy_to_view   cache (cells, cols), x (T, cols) F32 -> the cache; cell
    copy_by_table  cache (cells, cols), x (T, cols) F32, table (n,) I64 -> the cache; store, n_kv
    attention  q (T, heads, head_dim) F32, k and v (cells, kv_heads * head_dim),
               mask (T, n_kv) F16, and by `more`: regions (n_seqs, 2) I32, extents (T,) I32 or
               classes (T, blocks) U8, sinks (heads,) F32 -> (T, heads * head_dim) F32;
               n_kv, n_head_kv, scale, more, skip, kernel, kv_parts
    kv_extents mask (T, n_kv) F16 -> (T,) I32
    kv_classes mask (T, n_kv) F16 -> (T, blocks) U8
    feed       ids (T,) I32, last (n_seqs,) I32 -> (T,) I32
    draw       logits (n, n_vocab) F32, settings (n, 5) F32 -> (n, 2) I32
    keep_tokens  last (n_seqs,) I32, ids (n, 2) I32, rows (n,) I32 -> last
    copy_cells cache (cells, cols), pairs (n, 2) I64 -> the cache
    swiglu     gate, up (T, cols) F32 -> like gate
    square_sums  x (T, cols) F32 -> (T, cols / 32) F32
    rms_scale  x (T, cols) F32, squares (T, n) F32 -> like x; eps

A cache, K or V of attention, is of any of CACHE_DTYPES. K and V may be of different types.

A fused node (`graph/fuse.py`) computes its parts in order. What its parts write and no other node
reads lies in the node's scratch, or nowhere.

* rms_norm: x / sqrt(mean(x^2 over the last axis) + eps). No weight: `mul` follows.
* rope: pair i of the first n_rot elements of each head turns by
  position * freq_scale * theta_base^(-2i/n_rot) / freq_factors[i]; neox pairs element i with
  i + n_rot/2, otherwise 2i with 2i + 1. Elements past n_rot are copied.
* rope_shift: the heads in each of the first n cells turn as `rope` turns them, by the cell's delta
  as position, in place. The arithmetic is float32, rounded to the cache's type once. A cell with
  delta 0 and blocks past n_rot keep their bytes. (llama.cpp's build_rope_shift.)
* attention: softmax(scale * q.k + mask) v over cells 0..n_kv-1, query head h reading kv head
  h // (heads / kv_heads). mask is 0 or -inf; a row of -inf gives zeros. With regions, the cells are
  n_kv from the first cell of the token's region on. A head's sink is one more score, without a
  value.
* kv_extents: for each token, the end of the last EXTENT_CELLS cells among which it sees a cell; 0
  where it sees none. kv_classes: for each token and each CLASS_CELLS cells, whether it sees none
  (0), some (1) or all (2) of them. Cells after n_kv do not count (`graph/attend.py`).
* swiglu: silu(gate) * up.
* quantize: per block of 32, scale = max|x| / 127, quants = round-half-even(x / scale) clamped to
  +-127 (which only a subnormal scale can exceed); scale 0 gives quants 0.
* feed: token ids that are known; in place of id -1 - s, the token that sequence s has drawn last.
  draw: a token from each row of logits, by temperature, top_k, top_p, min_p and a uniform number
  (`model/sampler.py`), and the nanoseconds that the draw took. The token is -1 where the row has a
  NaN, or an infinite largest logit.
  keep_tokens: ids[i, 0] becomes the last token of sequence rows[i]; a row outside is not stored.
* copy_cells: cell pairs[i, 0] becomes what cell pairs[i, 1] is. No cell is both read and written.
  A pair with a cell outside is not copied.
* square_sums: the sum of squares of each 32 columns. rms_scale: x / sqrt(sum(squares of the row) /
  (32 n) + eps). Together with a mul they are a norm in two halves (`graph/defer.py`).
* set_rows: row t of x becomes cell indices[t]. copy_to_view: it becomes cell `cell` + t. That cell
  is a parameter, so the node is another for the next token. copy_by_table: it becomes cell
  table[store] + t. Cells outside 0..n_kv-1 are not stored. All three round alike: to the
  nearest, ties to even, and blocks of Q8_0 as ggml does (`backend/cpu/kernels/stores.py`).
* get_rows: an id outside the table reads nothing; the engine refuses such ids before that.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from workbench.common.sizes import round_up
from workbench.graph import shapes
from workbench.graph.ir import ALIGN, Node, Tensor
from workbench.graph.shapes import Rule

REGIONS = "regions"  # of the inputs that `more` may name, the first

Access = tuple[Tensor, int, int]  # storage, byte offset, bytes
Accesses = Callable[[Node], list[Access]]


def _whole(*tensors: Tensor) -> list[Access]:
    return [(t.storage, 0, t.nbytes) for t in tensors]


def _rows(tensor: Tensor, n: int) -> Access:
    """The first n rows of a tensor that is no view."""
    return tensor, 0, n * tensor.dtype.row_bytes(tensor.cols)


def _inputs(node: Node) -> list[Access]:
    return [(t.storage, 0, t.nbytes) for t in node.inputs]


def _output(node: Node) -> list[Access]:
    return [(node.output, 0, node.output.nbytes)]


class Op(NamedTuple):
    """One op. Scratch is not part of it, because it follows from a backend's kernels.

    infer: (name, inputs, params) -> type and shape of the output; raises UsageError where they do
        not fit.
    flops: the arithmetic operations of a node.
    stores: the op stores into input 0, which is its output.
    reads, writes: the byte ranges that a node may touch.
    vague_reads, vague_writes: numbers of those ranges that depend on values. The node touches a
        part of each.
    fewer: the bytes that a step moves of a tensor, where they are fewer than the declared range.
    """

    name: str
    infer: Rule
    flops: Callable[[Node], int] = lambda node: 0
    stores: bool = False
    reads: Accesses = _inputs
    writes: Accesses = _output
    vague_reads: tuple[int, ...] = ()
    vague_writes: tuple[int, ...] = ()
    fewer: Callable[[Node], dict[Tensor, int]] = lambda node: {}


def _per_element(n: int) -> Callable[[Node], int]:
    return lambda node: n * node.output.rows * node.output.cols


def _per_logit(node: Node) -> int:
    return 3 * node.inputs[0].rows * node.inputs[0].cols


def _shifted(node: Node) -> Access:
    """The cells that a rope_shift has a delta for."""
    cache, deltas, *_ = node.inputs
    return _rows(cache, deltas.shape[0])


def _view(node: Node) -> Access:
    """The cells that a copy_to_view stores."""
    cache, x = node.inputs
    row = cache.dtype.row_bytes(cache.cols)
    return cache, node.params["cell"] * row, x.rows * row


def _entry(node: Node) -> Access:
    """The table entry that a copy_by_table reads."""
    nbytes = node.inputs[2].dtype.block_bytes
    return node.inputs[2], node.params["store"] * nbytes, nbytes


def _attended(node: Node) -> list[Access]:
    q, k, v, *others = node.inputs
    n = k.rows if REGIONS in node.params.get("more", ()) else node.params["n_kv"]
    return [(q.storage, 0, q.nbytes), _rows(k, n), _rows(v, n), *_whole(*others)]


def _attended_bytes(node: Node) -> dict[Tensor, int]:
    """With regions, the bytes of K and V are those of the step's sequences."""
    if REGIONS not in node.params.get("more", ()):
        return {}
    k, v = node.inputs[1:3]
    n = node.params["n_kv"] * node.inputs[4].shape[0]
    return {t: _rows(t, min(n, t.rows))[2] for t in (k, v)}


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            "get_rows",
            shapes.get_rows,
            vague_reads=(0,),  # rows of the table
            fewer=lambda n: {
                n.inputs[0].storage: _rows(n.inputs[0], n.inputs[1].shape[0])[2],
            },
        ),
        Op("rms_norm", shapes.like_first, flops=_per_element(3)),
        Op("mul", shapes.broadcast, flops=_per_element(1)),
        Op("add", shapes.broadcast, flops=_per_element(1)),
        Op("quantize", shapes.quantize, flops=_per_element(3)),
        Op(
            "mul_mat",
            shapes.mul_mat,
            flops=lambda n: 2 * n.inputs[0].shape[0] * n.inputs[0].cols * n.output.rows,
        ),
        Op("rope", shapes.rope, flops=_per_element(6)),
        Op(
            "rope_shift",
            shapes.rope_shift,
            flops=lambda n: 6 * n.inputs[1].shape[0] * n.output.cols,
            stores=True,
            reads=lambda n: [_shifted(n), *_whole(*n.inputs[1:])],
            writes=lambda n: [_shifted(n)],
            vague_reads=(0,),  # cells whose delta is not 0
            vague_writes=(0,),
        ),
        Op(
            "set_rows",
            shapes.set_rows,
            stores=True,
            reads=lambda n: _whole(*n.inputs[1:]),
            writes=lambda n: [_rows(n.output, n.params["n_kv"])],
            vague_writes=(0,),  # cells of the cache
            fewer=lambda n: {n.output: _rows(n.output, n.inputs[1].rows)[2]},
        ),
        Op(
            "copy_to_view",
            shapes.copy_to_view,
            stores=True,
            reads=lambda n: _whole(n.inputs[1]),
            writes=lambda n: [_view(n)],
        ),
        Op(
            "copy_by_table",
            shapes.copy_by_table,
            stores=True,
            reads=lambda n: [*_whole(n.inputs[1]), _entry(n)],
            writes=lambda n: [_rows(n.output, n.params["n_kv"])],
            vague_writes=(0,),  # cells of the cache
            fewer=lambda n: {n.output: _rows(n.output, n.inputs[1].rows)[2]},
        ),
        Op(
            "attention",
            shapes.attention,
            flops=lambda n: 4 * n.output.rows * n.output.cols * n.params["n_kv"],
            reads=_attended,
            vague_reads=(1, 2),  # cells of K and V that the mask shows
            fewer=_attended_bytes,
        ),
        Op("kv_extents", shapes.kv_extents),
        Op("kv_classes", shapes.kv_classes),
        Op(
            "feed",
            shapes.feed,
            vague_reads=(1,),  # sequences whose tokens are not known
        ),
        Op("draw", shapes.draw, flops=_per_logit),
        Op(
            "keep_tokens",
            shapes.keep_tokens,
            stores=True,
            reads=lambda n: _whole(*n.inputs[1:]),
            vague_writes=(0,),  # sequences of the step
        ),
        Op(
            "copy_cells",
            shapes.copy_cells,
            stores=True,
            reads=lambda n: _whole(*n.inputs),
            vague_reads=(0,),  # cells that are copied
            vague_writes=(0,),
            fewer=lambda n: {n.output: 2 * n.inputs[1].shape[0] * _rows(n.output, 1)[2]},
        ),
        Op("swiglu", shapes.like_first, flops=_per_element(5)),
        Op(
            "square_sums",
            shapes.square_sums,
            flops=lambda n: 2 * n.inputs[0].rows * n.inputs[0].cols,
        ),
        Op("rms_scale", shapes.rms_scale, flops=_per_element(1)),
    )
}


def make(op: str, name: str, *sources: Tensor | None, layer: int = -1, **params) -> Node:
    """A node of `op`, its output inferred and named `name`; an absent source may be None.

    Raises UsageError on a wrong shape or type.
    """
    return make_of(op, name, sources, layer, params)


def make_of(
    op: str,
    name: str,
    sources: Iterable[Tensor | None],
    layer: int,
    params: Mapping[str, Any],
) -> Node:
    """As `make`, with plain arguments: for callers that make a step's nodes for every token."""
    entry, inputs = OPS[op], tuple([t for t in sources if t is not None])
    dtype, shape = entry.infer(op, inputs, params)
    output = inputs[0] if entry.stores else Tensor(name, dtype, shape)
    return Node(op, name, output, inputs, params, layer)


# what the table says of a node, and of a fused node by its parts ----------------------------------


def interior(node: Node) -> list[Tensor]:
    """The results of a fused node's parts that only other parts read, in order."""
    shared = {t.storage for t in node.outputs}
    made = [part.output.storage for part in node.parts]
    return [t for t in made if t not in shared]


def interior_bytes(node: Node) -> int:
    """The bytes of scratch for results that a fused node's parts hand to each other."""
    return sum(round_up(t.nbytes, ALIGN) for t in interior(node))


def _of_parts(node: Node, accesses: Accesses, hidden) -> list[Access]:
    own = set(hidden)
    found = [a for part in node.parts for a in accesses(part) if a[0] not in own]
    return list(dict.fromkeys(found))


def reads(node: Node) -> list[Access]:
    """Byte ranges the node may read, per tensor. A superset where the op is value-dependent."""
    if node.parts:  # results of its own parts are not read from outside
        return _of_parts(node, reads, [part.output.storage for part in node.parts])
    return OPS[node.op].reads(node)


def writes(node: Node) -> list[Access]:
    """Byte ranges the node may write. set_rows and copy_by_table store below row n_kv only,
    rope_shift into the cells that it has a delta for."""
    if node.parts:
        return _of_parts(node, writes, interior(node))
    return OPS[node.op].writes(node)


def vague(node: Node) -> tuple[set[Access], set[Access]]:
    """The accesses among `reads`, and among `writes`, of which the node may touch only a part.

    An access of a fused node is vague where it is vague for every part that has it.
    """
    found: tuple[set[Access], set[Access]] = set(), set()
    sure: tuple[set[Access], set[Access]] = set(), set()
    parts = [(part, OPS[part.op]) for part in node.parts or (node,)]
    if not any(op.vague_reads or op.vague_writes for _, op in parts):
        return found
    for part, op in parts:
        for which, (accesses, numbers) in enumerate(
            ((op.reads(part), op.vague_reads), (op.writes(part), op.vague_writes))
        ):
            for i, access in enumerate(accesses):
                (found if i in numbers else sure)[which].add(access)
    return found[0] - sure[0], found[1] - sure[1]


def flops(node: Node) -> int:
    """Arithmetic operations of the node. A fused node does all that its parts do."""
    return sum(OPS[part.op].flops(part) for part in node.parts or (node,))


def touched_bytes(node: Node) -> int:
    """Bytes that a step must move for this node: sources and result once, of a gather only the
    rows."""
    fewer: dict[Tensor, int] = {}
    for part in node.parts or (node,):
        fewer |= OPS[part.op].fewer(part)
    declared = (a for a in (*reads(node), *writes(node)) if a[0] not in fewer)
    return sum(fewer.values()) + sum(nbytes for _, _, nbytes in declared)
