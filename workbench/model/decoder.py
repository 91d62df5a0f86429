"""Model file -> graph: the weights of a decoder-only transformer, and the graph of one step.

One graph builder serves every architecture of `hparams.ARCHITECTURES`; what differs is a table
entry, or the presence of a tensor in the file (biases, `rope_freqs`, an untied output). Tensor
names of weights are llama.cpp's; so are those of activations, so that a timeline reads the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np

from workbench.config import EXPAND, Activations
from workbench.errors import ModelFileError
from workbench.graph.ir import (
    F16,
    F32,
    I32,
    I64,
    QUANTISED,
    DType,
    Graph,
    Kind,
    Node,
    StepShape,
    Tensor,
)
from workbench.graph.ops import make
from workbench.model.expand import expanded, loaded_as
from workbench.model.gguf import GGUFFile, TensorInfo, model_hash, open_gguf
from workbench.model.gguf_walk import shown
from workbench.model.hparams import HParams, read_hparams

EMBEDDING = "token_embd.weight"


class Layer:
    """The weights of one layer; a bias or norm that the file lacks is None."""

    __slots__ = (
        "attn_norm", "b_down", "b_gate", "b_up", "bk", "bo", "bq", "bv", "ffn_down", "ffn_gate",
        "ffn_norm", "ffn_up", "k_norm", "q_norm", "wk", "wo", "wq", "wv",
    )  # fmt: skip

    attn_norm: Tensor
    wq: Tensor
    wk: Tensor
    wv: Tensor
    wo: Tensor
    bq: Tensor | None
    bk: Tensor | None
    bv: Tensor | None
    bo: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    ffn_norm: Tensor
    ffn_gate: Tensor
    ffn_up: Tensor
    ffn_down: Tensor
    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None


class Model:
    """A model file opened: hyper-parameters, and a graph tensor for every weight used.

    expand: as EngineConfig has it. Raises ModelFileError where a tensor is missing, is one that the
    architecture does not use, or has a shape the hyper-parameters rule out.
    """

    def __init__(self, path: str | Path, expand: str = EXPAND[0]):
        self.expand = expand
        self.file: GGUFFile = open_gguf(path)
        self.path = Path(path)
        try:
            self.hparams: HParams = read_hparams(self.file)
            self._weights: dict[str, Tensor] = {}
            self._bind()
        except BaseException:
            self.file.close()
            raise

    def __repr__(self) -> str:
        n = sum(t.rows * t.cols for t in self.weights)
        return (
            f"<Model: {self.name}: {self.architecture}, {self.quant}, {self.n_layer} layers, "
            f"{n / 1e6:,.1f} M parameters in {self.file_bytes / 1e6:,.1f} MB\n {self.path}>"
        )

    def _bind(self) -> None:
        h = self.hparams
        info = self.file.tensors.get(EMBEDDING)
        if info is None:
            raise ModelFileError(f"{self.path}: tensor {EMBEDDING} is missing; the file is damaged")
        self.n_vocab = int(info.shape[0])
        self.embedding = self._need(EMBEDDING, self.n_vocab, h.n_embd)
        self.output_norm = self._need("output_norm.weight", h.n_embd, dtype=F32)
        untied = "output.weight" in self.file.tensors
        self.output = (
            self._need("output.weight", self.n_vocab, h.n_embd) if untied else (self.embedding)
        )
        factors = h.traits.rope_factors
        self.rope_freqs = self._want("rope_freqs.weight", h.n_rot // 2) if factors else None
        self.layers = [self._layer(i) for i in range(h.n_layer)]
        self._refuse_unused()

    def _refuse_unused(self) -> None:
        """A tensor that nothing reads would have changed the answer."""
        unused = [name for name in self.file.tensors if name not in self._weights]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            what = "are" if more else "is"
            raise ModelFileError(
                f"{self.path}: tensor {shown(unused[0])}{more} {what} not used by architecture "
                f"{self.architecture!r}, so the answer would be wrong; use another model"
            )

    def _layer(self, i: int) -> Layer:
        h, layer = self.hparams, Layer()
        q, kv, d = h.n_embd_q, h.n_embd_kv, h.n_embd

        def need(name: str, *shape: int, dtype: DType | None = None) -> Tensor:
            return self._need(f"blk.{i}.{name}", *shape, dtype=dtype)

        def want(name: str, *shape: int) -> Tensor | None:
            return self._want(f"blk.{i}.{name}", *shape)

        layer.attn_norm = need("attn_norm.weight", d, dtype=F32)
        layer.wq, layer.bq = need("attn_q.weight", q, d), want("attn_q.bias", q)
        layer.wk, layer.bk = need("attn_k.weight", kv, d), want("attn_k.bias", kv)
        layer.wv, layer.bv = need("attn_v.weight", kv, d), want("attn_v.bias", kv)
        layer.wo, layer.bo = need("attn_output.weight", d, q), want("attn_output.bias", d)
        layer.q_norm = layer.k_norm = None
        if h.traits.qk_norm:
            layer.q_norm = need("attn_q_norm.weight", h.head_dim, dtype=F32)
            layer.k_norm = need("attn_k_norm.weight", h.head_dim, dtype=F32)
        layer.ffn_norm = need("ffn_norm.weight", d, dtype=F32)
        layer.ffn_gate = need("ffn_gate.weight", h.n_ff, d)
        layer.ffn_up = need("ffn_up.weight", h.n_ff, d)
        layer.ffn_down = need("ffn_down.weight", d, h.n_ff)
        layer.b_gate, layer.b_up = want("ffn_gate.bias", h.n_ff), want("ffn_up.bias", h.n_ff)
        layer.b_down = want("ffn_down.bias", d)
        return layer

    def _need(self, name: str, *shape: int, dtype: DType | None = None) -> Tensor:
        info = self.file.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{self.path}: tensor {name} is missing; the file is damaged")
        if tuple(info.shape) != shape:
            raise ModelFileError(
                f"{self.path}: tensor {name} has shape {list(info.shape)} where the metadata "
                f"asks for {list(shape)}; the file is damaged"
            )
        if dtype is not None and info.dtype != dtype:
            raise ModelFileError(
                f"{self.path}: tensor {name} is {info.dtype.name} where {dtype.name} is expected"
            )
        tensor = Tensor(name, loaded_as(info.dtype, self.expand), shape, Kind.WEIGHT)
        self._weights[name] = tensor
        return tensor

    def _want(self, name: str, *shape: int) -> Tensor | None:
        return self._need(name, *shape, dtype=F32) if name in self.file.tensors else None

    # what others ask ---------------------------------------------------------------------------

    @property
    def weights(self) -> list[Tensor]:
        """Every weight a step uses, the embedding included."""
        return list(self._weights.values())

    @property
    def expanded(self) -> list[TensorInfo]:
        """The tensors that have no kernels for their type, as they are in the file."""
        return [self.stored(t) for t in self.weights if self.is_expanded(t)]

    def is_expanded(self, weight: Tensor) -> bool:
        """Whether a weight has another type than in the file."""
        return self.stored(weight).dtype != weight.dtype

    def position(self, weight: Tensor) -> tuple[int, int]:
        """Where the file has a weight: part and offset."""
        stored = self.stored(weight)
        return stored.part, stored.offset

    def stored(self, weight: Tensor) -> TensorInfo:
        """Where and how the file has a weight."""
        return self.file.tensors[weight.name]

    def data(
        self, weight: Tensor, n_workers: int = 1, progress: Callable[[int], object] | None = None
    ) -> np.ndarray:
        """The bytes of a weight in its type, uint8 (nbytes,): the file's own, or where its type is
        expanded new ones, made by n_workers threads.

        progress is told how many bytes of the file have been expanded. Raises ModelFileError for
        values that the new type cannot hold.
        """
        data = self.file.data(weight.name)
        if not self.is_expanded(weight):
            return data
        try:
            return expanded(data, self.stored(weight), weight.dtype, n_workers, progress)
        except ModelFileError as error:
            raise ModelFileError(f"{self.path}: {error}") from None

    @property
    def architecture(self) -> str:
        return self.hparams.architecture

    @cached_property
    def name(self) -> str:
        return self.file.get("general.name", str, self.path.stem)

    @cached_property
    def hash(self) -> str:
        return model_hash(self.path)

    @property
    def file_bytes(self) -> int:
        return self.file.file_bytes

    @property
    def n_layer(self) -> int:
        return self.hparams.n_layer

    @property
    def n_embd(self) -> int:
        return self.hparams.n_embd

    @property
    def n_head(self) -> int:
        return self.hparams.n_head

    @property
    def n_head_kv(self) -> int:
        return self.hparams.n_head_kv

    @property
    def head_dim(self) -> int:
        return self.hparams.head_dim

    @property
    def n_ctx_train(self) -> int:
        return self.hparams.n_ctx_train

    @property
    def n_params(self) -> int:
        return sum(t.rows * t.cols for t in self.weights)

    @cached_property
    def main_weight(self) -> Tensor:
        """A weight of the type that has most bytes in the file, embedding and output apart."""
        by_type: dict[DType, list[Tensor]] = {}
        for t in self.weights:
            if t is not self.embedding and t is not self.output:
                by_type.setdefault(self.stored(t).dtype, []).append(t)
        return max(by_type.values(), key=lambda of: sum(self.stored(t).nbytes for t in of))[0]

    @property
    def quant(self) -> str:
        """The type of `main_weight`; `Q2_K as F16` where it is expanded."""
        stored, loaded = self.stored(self.main_weight).dtype.name, self.main_weight.dtype.name
        return stored if stored == loaded else f"{stored} as {loaded}"

    @property
    def weight_bytes_per_token(self) -> int:
        """Bytes of weights one decoded token must read: all, but of an untied embedding one row."""
        row = self.embedding.nbytes // self.embedding.rows
        total = sum(t.nbytes for t in self.weights if t is not self.embedding)
        return total + row + (self.embedding.nbytes if self.output is self.embedding else 0)

    def caches(self, n_ctx: int) -> list[tuple[Tensor, Tensor]]:
        """K and V of each layer: (n_ctx, n_head_kv * head_dim) F16, one row per cell."""
        shape = (n_ctx, self.hparams.n_embd_kv)
        return [
            (
                Tensor(f"cache_k_l{i}", F16, shape, Kind.CACHE),
                Tensor(f"cache_v_l{i}", F16, shape, Kind.CACHE),
            )
            for i in range(self.n_layer)
        ]

    def close(self) -> None:
        self.file.close()


class _Builder:
    """Appends nodes; quantises an activation once for all the products that share it.

    activations=float: nothing is quantised, and every product says that nothing may be rounded.
    """

    def __init__(self, activations: str) -> None:
        self.nodes: list[Node] = []
        self.quantise = activations == Activations.Q8
        self._said = {} if self.quantise else {"activations": str(activations)}
        self._quantised: dict[Tensor, Tensor] = {}

    def add(self, op: str, name: str, *inputs: Tensor | None, layer: int = -1, **params) -> Tensor:
        node = make(op, name, *inputs, layer=layer, **params)
        self.nodes.append(node)
        return node.output

    def product(self, name: str, w: Tensor, x: Tensor, bias: Tensor | None, layer: int) -> Tensor:
        if w.dtype in QUANTISED and self.quantise:
            quantised = self._quantised.get(x)
            if quantised is None:
                quantised = self.add("quantize", f"{x.name} (q8)", x, layer=layer)
                self._quantised[x] = quantised
            x = quantised
        y = self.add("mul_mat", name, w, x, layer=layer, **self._said)
        return y if bias is None else self.add("add", f"{name} (bias)", y, bias, layer=layer)

    def norm(self, name: str, x: Tensor, weight: Tensor, eps: float, layer: int) -> Tensor:
        y = self.add("rms_norm", name, x, layer=layer, eps=eps)
        return self.add("mul", f"{name} (w)", y, weight, layer=layer)


def build_graph(
    model: Model,
    shape: StepShape,
    caches: list[tuple[Tensor, Tensor]],
    activations: str = Activations.Q8,
) -> Graph:
    """The graph of one step of `shape`: token ids in, rows of logits out.

    activations: `q8`: products with quantised weights are given quantised activations, and those
    with float weights may round theirs to the weights' type. `float`: neither; the products' nodes
    have it as a parameter, which says so to the backends.

    Inputs, by name: inp_tokens (T,) I32, inp_pos (T,) I32, attn_inp_kq_mask (T, n_kv) F16,
    attn_inp_k_idxs and attn_inp_v_idxs (T,) I64, inp_out_ids (n_outputs,) I32. The output is
    `result_output` (n_outputs, n_vocab) F32. With n_outputs 0 the graph ends at the last layer's
    cache stores.
    """
    h, b = model.hparams, _Builder(activations)
    t, n_kv = shape.n_tokens, shape.n_kv
    ids = Tensor("inp_tokens", I32, (t,), Kind.INPUT)
    pos = Tensor("inp_pos", I32, (t,), Kind.INPUT)
    mask = Tensor("attn_inp_kq_mask", F16, (t, n_kv), Kind.INPUT)
    k_idxs = Tensor("attn_inp_k_idxs", I64, (t,), Kind.INPUT)
    v_idxs = Tensor("attn_inp_v_idxs", I64, (t,), Kind.INPUT)
    out_ids = Tensor("inp_out_ids", I32, (shape.n_outputs,), Kind.INPUT)
    inputs = [ids, pos, mask, k_idxs, v_idxs, out_ids]
    rope, scale = h.rope, h.head_dim**-0.5

    x = b.add("get_rows", "inp_embd", model.embedding, ids)
    for i, (layer, (k_cache, v_cache)) in enumerate(zip(model.layers, caches, strict=True)):
        cur = b.norm(f"attn_norm-{i}", x, layer.attn_norm, h.eps, i)
        q = b.product(f"Qcur-{i}", layer.wq, cur, layer.bq, i).view(t, h.n_head, h.head_dim)
        k = b.product(f"Kcur-{i}", layer.wk, cur, layer.bk, i).view(t, h.n_head_kv, h.head_dim)
        v = b.product(f"Vcur-{i}", layer.wv, cur, layer.bv, i)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = b.norm(f"Qcur_normed-{i}", q, layer.q_norm, h.eps, i)
            k = b.norm(f"Kcur_normed-{i}", k, layer.k_norm, h.eps, i)
        q = b.add("rope", f"Qcur_rope-{i}", q, pos, model.rope_freqs, layer=i, **rope)
        k = b.add("rope", f"Kcur_rope-{i}", k, pos, model.rope_freqs, layer=i, **rope)
        flat = k.view(t, h.n_embd_kv)
        b.add("set_rows", f"cache_k-{i}", k_cache, flat, k_idxs, layer=i, n_kv=n_kv)
        b.add("set_rows", f"cache_v-{i}", v_cache, v, v_idxs, layer=i, n_kv=n_kv)
        last = i == h.n_layer - 1
        if last and shape.n_outputs == 0:
            return Graph(b.nodes, [ids, pos, k_idxs, v_idxs, *_mask_if_used(i, mask)], [], shape)
        attended = b.add(
            "attention", f"kqv_out-{i}", q, k_cache, v_cache, mask,
            layer=i, n_kv=n_kv, n_head_kv=h.n_head_kv, scale=scale,
        )  # fmt: skip
        cur = b.product(f"attn_out-{i}", layer.wo, attended, layer.bo, i)
        if last:  # only the rows asked for go on
            cur = b.add("get_rows", "attn_out (rows)", cur, out_ids, layer=i)
            x = b.add("get_rows", "residual (rows)", x, out_ids, layer=i)
        x = b.add("add", f"ffn_inp-{i}", cur, x, layer=i)
        cur = b.norm(f"ffn_norm-{i}", x, layer.ffn_norm, h.eps, i)
        gate = b.product(f"ffn_gate-{i}", layer.ffn_gate, cur, layer.b_gate, i)
        up = b.product(f"ffn_up-{i}", layer.ffn_up, cur, layer.b_up, i)
        cur = b.add("swiglu", f"ffn_swiglu-{i}", gate, up, layer=i)
        cur = b.product(f"ffn_out-{i}", layer.ffn_down, cur, layer.b_down, i)
        x = b.add("add", f"l_out-{i}", cur, x, layer=i)

    cur = b.norm("result_norm", x, model.output_norm, h.eps, -1)
    logits = b.product("result_output", model.output, cur, None, -1)
    logits.kind = Kind.OUTPUT
    return Graph(b.nodes, inputs, [logits], shape)


def _mask_if_used(last_layer: int, mask: Tensor) -> list[Tensor]:
    """Without outputs the last layer attends to nothing; a model of one layer needs no mask."""
    return [mask] if last_layer else []
