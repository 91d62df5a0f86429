"""The blocks of a decoder: the weights of each block, and the nodes that it adds to a step.

A layer is the blocks that its architecture names (`model/architectures.py`), one after the other. A
block is an entry of `BLOCKS`: its specs say which tensors of the file it takes, and its function
adds its nodes. Whatever else an architecture has (experts, sinks) is another block, or another
spec.

Names of nodes and of weights are llama.cpp's. T is the number of tokens of the step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from workbench.config import Activations
from workbench.graph.ir import F32, QUANTISED, DType, Input, Node, StepShape, Tensor
from workbench.graph.ops import REGIONS, make_of
from workbench.model import inputs as n
from workbench.model.hparams import HParams
from workbench.model.inputs import StoreTable, input_of

Caches = list[tuple[Tensor, Tensor]]


class CacheStores(NamedTuple):
    """How a step stores K and V.

    op: the op of every store, an entry of `STORES`.
    cell: the cell of the first token, for copy_to_view. Other ops find cells among their inputs.
    """

    op: str = "set_rows"
    cell: int = 0


SET_ROWS = CacheStores()


class Step:
    """The graph of one step while blocks add to it.

    An activation is quantised once for all products that share it.

    activations: with `float` nothing is quantised, and every product says that nothing may be
        rounded.
    store_inputs: the inputs that tell the cache stores their rows.
    regions: whether each sequence has cells of its own.
    last_tokens: the token that a device has drawn last for each sequence, (n_seqs,) I32, where
        devices draw.
    """

    def __init__(
        self,
        hparams: HParams,
        shape: StepShape,
        caches: Caches,
        rope_freqs: Tensor | None,
        activations: str,
        stores: CacheStores = SET_ROWS,
        regions: bool = False,
        last_tokens: Tensor | None = None,
    ) -> None:
        self.hparams, self.shape, self.caches = hparams, shape, caches
        self.rope_freqs, self.rope = rope_freqs, hparams.rope
        self.eps, self.last_layer = hparams.eps, hparams.n_layer - 1
        self.ids = input_of(n.TOKENS, shape)
        self.positions = input_of(n.POSITIONS, shape)
        self.mask = input_of(n.MASK, shape)
        self.regions = input_of(n.REGIONS, shape) if regions else None
        self.more = {"more": (REGIONS,)} if regions else {}
        self.stores = stores
        self.store_inputs = STORES[stores.op].inputs(shape, hparams.n_layer)
        self.out_ids = input_of(n.OUT_IDS, shape)
        self.nodes: list[Node] = []
        self.last_tokens = last_tokens if shape.draws else None
        self._quantise = activations == Activations.Q8
        self._said = {} if self._quantise else {"activations": str(activations)}
        self._quantised: dict[Tensor, Tensor] = {}

    def add(self, op: str, name: str, *inputs: Tensor | None, layer: int = -1, **params) -> Tensor:
        """Adds a node, and returns its output."""
        node = make_of(op, name, inputs, layer, params)
        self.nodes.append(node)
        return node.output

    def product(self, name: str, w: Tensor, x: Tensor, bias: Tensor | None, layer: int) -> Tensor:
        """x (T, cols) times w (rows, cols) transposed, plus a bias (rows,) if there is one."""
        if w.dtype in QUANTISED and self._quantise:
            quantised = self._quantised.get(x)
            if quantised is None:
                quantised = self.add("quantize", f"{x.name} (q8)", x, layer=layer)
                self._quantised[x] = quantised
            x = quantised
        y = self.add("mul_mat", name, w, x, layer=layer, **self._said)
        return y if bias is None else self.add("add", f"{name} (bias)", y, bias, layer=layer)

    def norm(self, name: str, x: Tensor, weight: Tensor, layer: int) -> Tensor:
        """x normalised over its last axis, times a weight (cols,)."""
        y = self.add("rms_norm", name, x, layer=layer, eps=self.eps)
        return self.add("mul", f"{name} (w)", y, weight, layer=layer)


# cache stores -------------------------------------------------------------------------------------


class StoreOp(NamedTuple):
    """An op that stores into the cache.

    inputs: (shape, n_layer) -> the inputs that tell where to store.
    add: adds the stores of K and V of layer i, both (T, cols): (step, i, k, v).
    """

    inputs: Callable[[StepShape, int], list[Input]]
    add: Callable[[Step, int, Tensor, Tensor], None]


def _set_rows(s: Step, i: int, k: Tensor, v: Tensor) -> None:
    for name, cache, x, rows in zip("kv", s.caches[i], (k, v), s.store_inputs, strict=True):
        n_kv = s.shape.n_kv if s.regions is None else cache.rows
        s.add("set_rows", f"cache_{name}-{i}", cache, x, rows, layer=i, n_kv=n_kv)


def _copy_to_view(s: Step, i: int, k: Tensor, v: Tensor) -> None:
    for name, cache, x in zip("kv", s.caches[i], (k, v), strict=True):
        s.add("copy_to_view", f"cache_{name}-{i}", cache, x, layer=i, cell=s.stores.cell)


def _copy_by_table(s: Step, i: int, k: Tensor, v: Tensor) -> None:
    (table,), n_kv = s.store_inputs, s.shape.n_kv
    for at, (name, cache, x) in enumerate(zip("kv", s.caches[i], (k, v), strict=True)):
        s.add("copy_by_table", f"cache_{name}-{i}", cache, x, table, layer=i,
              store=2 * i + at, n_kv=n_kv)  # fmt: skip


def _rows(shape: StepShape, n_layer: int) -> list[Input]:
    return [input_of(n.K_CELLS, shape), input_of(n.V_CELLS, shape)]


STORES: dict[str, StoreOp] = {
    "set_rows": StoreOp(_rows, _set_rows),
    "copy_to_view": StoreOp(lambda shape, n_layer: [], _copy_to_view),
    "copy_by_table": StoreOp(lambda shape, n_layer: [StoreTable(n_layer)], _copy_by_table),
}


# attention ----------------------------------------------------------------------------------------


class AttentionWeights(NamedTuple):
    """The weights of attention in one layer; a bias or norm that the file lacks is None."""

    attn_norm: Tensor
    wq: Tensor
    bq: Tensor | None
    wk: Tensor
    bk: Tensor | None
    wv: Tensor
    bv: Tensor | None
    wo: Tensor
    bo: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None


def attention(s: Step, i: int, w: AttentionWeights, x: Tensor) -> Tensor | None:
    """Attention of layer i with the residual: x (T, n_embd) in and out.

    In the last layer only the rows with outputs go on: (n_outputs, n_embd). Without such rows
    attention ends at the cache stores, and returns None.
    """
    h, t, n_kv, last = s.hparams, s.shape.n_tokens, s.shape.n_kv, i == s.last_layer
    k_cache, v_cache = s.caches[i]
    cur = s.norm(f"attn_norm-{i}", x, w.attn_norm, i)
    q = s.product(f"Qcur-{i}", w.wq, cur, w.bq, i).view(t, h.n_head, h.head_dim)
    k = s.product(f"Kcur-{i}", w.wk, cur, w.bk, i).view(t, h.n_head_kv, h.head_dim)
    v = s.product(f"Vcur-{i}", w.wv, cur, w.bv, i)
    if w.q_norm is not None and w.k_norm is not None:
        q = s.norm(f"Qcur_normed-{i}", q, w.q_norm, i)
        k = s.norm(f"Kcur_normed-{i}", k, w.k_norm, i)
    q = s.add("rope", f"Qcur_rope-{i}", q, s.positions, s.rope_freqs, layer=i, **s.rope)
    k = s.add("rope", f"Kcur_rope-{i}", k, s.positions, s.rope_freqs, layer=i, **s.rope)
    STORES[s.stores.op].add(s, i, k.view(t, h.n_embd_kv), v)
    if last and not s.shape.n_outputs:
        return None
    attended = s.add(
        "attention", f"kqv_out-{i}", q, k_cache, v_cache, s.mask, s.regions,
        layer=i, n_kv=n_kv, n_head_kv=h.n_head_kv, scale=h.head_dim**-0.5, **s.more,
    )  # fmt: skip
    cur = s.product(f"attn_out-{i}", w.wo, attended, w.bo, i)
    if last:
        cur = s.add("get_rows", "attn_out (rows)", cur, s.out_ids, layer=i)
        x = s.add("get_rows", "residual (rows)", x, s.out_ids, layer=i)
    return s.add("add", f"ffn_inp-{i}", cur, x, layer=i)


# feed-forward -------------------------------------------------------------------------------------


class DenseWeights(NamedTuple):
    """The weights of a dense feed-forward block; a bias that the file lacks is None."""

    ffn_norm: Tensor
    ffn_gate: Tensor
    ffn_up: Tensor
    ffn_down: Tensor
    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None


def dense_ffn(s: Step, i: int, w: DenseWeights, x: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)) of layer i with the residual: x (rows, n_embd) in and out."""
    cur = s.norm(f"ffn_norm-{i}", x, w.ffn_norm, i)
    gate = s.product(f"ffn_gate-{i}", w.ffn_gate, cur, w.b_gate, i)
    up = s.product(f"ffn_up-{i}", w.ffn_up, cur, w.b_up, i)
    cur = s.add("swiglu", f"ffn_swiglu-{i}", gate, up, layer=i)
    cur = s.product(f"ffn_out-{i}", w.ffn_down, cur, w.b_down, i)
    return s.add("add", f"l_out-{i}", cur, x, layer=i)


# the table ----------------------------------------------------------------------------------------


class WeightSpec(NamedTuple):
    """A tensor that a block takes from each layer of a file: `blk.N.` + name.

    field: the field of the block's weights.
    shape: in numpy order.
    dtype: the only type that it may have; None: any type.
    optional: a file may lack it.
    used: whether the architecture has it at all.
    """

    field: str
    name: str
    shape: Callable[[HParams], tuple[int, ...]]
    dtype: DType | None = None
    optional: bool = False
    used: Callable[[HParams], bool] = lambda h: True


def _norm(field: str, name: str, *, heads: bool = False) -> WeightSpec:
    """The weight of a norm: of a row, or of each head where the architecture norms heads."""
    if not heads:
        return WeightSpec(field, name, lambda h: (h.n_embd,), F32)
    return WeightSpec(field, name, lambda h: (h.head_dim,), F32, used=lambda h: h.traits.qk_norm)


def _bias(field: str, name: str, rows: Callable[[HParams], int]) -> WeightSpec:
    return WeightSpec(field, name, lambda h: (rows(h),), F32, optional=True)


class DecoderBlock(NamedTuple):
    """A block of a layer.

    specs: the tensors that it takes from a file, in order.
    weights: the type that holds them, a field each.
    build: adds the nodes of layer i to a step: (step, i, weights, x) -> x. None ends the step.
    """

    specs: tuple[WeightSpec, ...]
    weights: Callable[..., Any]
    build: Callable[[Step, int, Any, Tensor], Tensor | None]

    def take(self, h: HParams, tensor: Callable[[WeightSpec], Tensor | None]) -> Any:
        """The block's weights in one layer: each spec that is used is asked of `tensor`."""
        return self.weights(**{s.field: tensor(s) if s.used(h) else None for s in self.specs})


BLOCKS: dict[str, DecoderBlock] = {
    "attention": DecoderBlock(
        (
            _norm("attn_norm", "attn_norm.weight"),
            WeightSpec("wq", "attn_q.weight", lambda h: (h.n_embd_q, h.n_embd)),
            _bias("bq", "attn_q.bias", lambda h: h.n_embd_q),
            WeightSpec("wk", "attn_k.weight", lambda h: (h.n_embd_kv, h.n_embd)),
            _bias("bk", "attn_k.bias", lambda h: h.n_embd_kv),
            WeightSpec("wv", "attn_v.weight", lambda h: (h.n_embd_kv, h.n_embd)),
            _bias("bv", "attn_v.bias", lambda h: h.n_embd_kv),
            WeightSpec("wo", "attn_output.weight", lambda h: (h.n_embd, h.n_embd_q)),
            _bias("bo", "attn_output.bias", lambda h: h.n_embd),
            _norm("q_norm", "attn_q_norm.weight", heads=True),
            _norm("k_norm", "attn_k_norm.weight", heads=True),
        ),
        AttentionWeights,
        attention,
    ),
    "dense_ffn": DecoderBlock(
        (
            _norm("ffn_norm", "ffn_norm.weight"),
            WeightSpec("ffn_gate", "ffn_gate.weight", lambda h: (h.n_ff, h.n_embd)),
            WeightSpec("ffn_up", "ffn_up.weight", lambda h: (h.n_ff, h.n_embd)),
            WeightSpec("ffn_down", "ffn_down.weight", lambda h: (h.n_embd, h.n_ff)),
            _bias("b_gate", "ffn_gate.bias", lambda h: h.n_ff),
            _bias("b_up", "ffn_up.bias", lambda h: h.n_ff),
            _bias("b_down", "ffn_down.bias", lambda h: h.n_embd),
        ),
        DenseWeights,
        dense_ffn,
    ),
}
