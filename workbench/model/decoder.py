"""Model file -> graph: the weights of a decoder-only transformer, and the graph of one step.

A layer is made of blocks (`model/blocks.py`), and its architecture says which. Around the layers
stand the embedding, the output norm and the output. Architectures differ by their entry of a table
(`model/architectures.py`), files by the tensors they have (biases, `rope_freqs`, an untied output).
Weights and activations have llama.cpp's names, so a timeline reads the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from workbench.common.errors import ModelFileError
from workbench.config import EXPAND, Activations
from workbench.graph.ir import F32, DType, Graph, Kind, StepShape, Tensor
from workbench.model.blocks import BLOCKS, SET_ROWS, Caches, CacheStores, Step, WeightSpec
from workbench.model.gguf.expand import expanded, loaded_as
from workbench.model.gguf.file import GGUFFile, TensorInfo, model_hash, open_gguf
from workbench.model.gguf.metadata import notes
from workbench.model.gguf.walk import shown
from workbench.model.hparams import DEFAULT, CacheTypes, HParams, cache_dtypes, read_hparams
from workbench.model.inputs import DRAWS, OUT_SEQS, input_of
from workbench.model.tokenizer.vocabulary import EMBEDDING, OUTPUT, check_vocabulary


class Model:
    """An open model file: its hyper-parameters, and a graph tensor for every weight that is used.

    expand: as EngineConfig has it.
    cache_types: of K and of V.

    Raises ModelFileError where a tensor is missing, is not used by the architecture, or has a shape
    that the hyper-parameters rule out; where the file contradicts itself about its vocabulary
    (`check_vocabulary`); and for metadata that is refused (`gguf/metadata.py`). Raises
    UsageError for a cache type that heads of this size cannot have.
    """

    def __init__(
        self, path: str | Path, expand: str = EXPAND[0], cache_types: CacheTypes = DEFAULT
    ):
        self.expand = expand
        self.file: GGUFFile = open_gguf(path)
        self.path = Path(path)
        try:
            self.hparams: HParams = read_hparams(self.file)
            check_vocabulary(self.file)
            heads = (self.hparams.head_dim,) * 2
            self.cache_dtypes = cache_dtypes(path, cache_types, heads)
            self._weights: dict[str, Tensor] = {}
            self._bind()
        except BaseException:
            self.file.close()
            raise

    def __repr__(self) -> str:
        return (
            f"<Model: {self.name}: {self.architecture}, {self.quant}, {self.n_layer} layers, "
            f"{self.n_params / 1e6:,.1f} M parameters in {self.file_bytes / 1e6:,.1f} MB\n"
            f" {self.path}>"
        )

    def _bind(self) -> None:
        h = self.hparams
        self.architecture, self.n_layer, self.n_embd = h.architecture, h.n_layer, h.n_embd
        self.n_ctx_train, self.file_bytes = h.n_ctx_train, self.file.file_bytes
        self.n_vocab = int(self._info(EMBEDDING).shape[0])
        self.embedding = self._need(EMBEDDING, self.n_vocab, h.n_embd)
        self.output_norm = self._need("output_norm.weight", h.n_embd, dtype=F32)
        untied = OUTPUT in self.file.tensors
        self.output = self._need(OUTPUT, self.n_vocab, h.n_embd) if untied else self.embedding
        slowed = h.traits.rope_factors and "rope_freqs.weight" in self.file.tensors
        self.rope_freqs = (
            self._need("rope_freqs.weight", h.n_rot // 2, dtype=F32) if slowed else None
        )
        self.blocks = [BLOCKS[name] for name in h.traits.blocks]
        self.layers = [self._layer(i) for i in range(h.n_layer)]
        self._refuse_unused()

    def _refuse_unused(self) -> None:
        """Refuses a file with a tensor that nothing reads, because it would change the answer."""
        unused = [name for name in self.file.tensors if name not in self._weights]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            what = "are" if more else "is"
            raise ModelFileError(
                f"{self.path}: tensor {shown(unused[0])}{more} {what} not used by architecture "
                f"{self.architecture!r}, so the answer would be wrong; use another model"
            )

    def _layer(self, i: int) -> tuple[Any, ...]:
        """The weights of layer i, block by block."""
        h = self.hparams

        def take(spec: WeightSpec) -> Tensor | None:
            name, shape = f"blk.{i}.{spec.name}", spec.shape(h)
            if spec.optional and name not in self.file.tensors:
                return None
            return self._need(name, *shape, dtype=spec.dtype)

        return tuple([block.take(h, take) for block in self.blocks])

    def _info(self, name: str) -> TensorInfo:
        if name not in self.file.tensors:
            raise ModelFileError(f"{self.path}: tensor {name} is missing; the file is damaged")
        return self.file.tensors[name]

    def _need(self, name: str, *shape: int, dtype: DType | None = None) -> Tensor:
        info = self._info(name)
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

    # what others ask ---------------------------------------------------------------------------

    @property
    def weights(self) -> list[Tensor]:
        """Every weight that a step uses, the embedding included."""
        return list(self._weights.values())

    @property
    def expanded(self) -> list[TensorInfo]:
        """The tensors whose type has no kernels, as they are in the file."""
        return [self.stored(t) for t in self.weights if self.is_expanded(t)]

    def is_expanded(self, weight: Tensor) -> bool:
        """Whether a weight has another type than in the file."""
        return self.stored(weight).dtype != weight.dtype

    def stored(self, weight: Tensor) -> TensorInfo:
        """Where a weight lies in the file, and in which type."""
        return self.file.tensors[weight.name]

    def data(
        self, weight: Tensor, n_workers: int = 1, progress: Callable[[int], object] | None = None
    ) -> np.ndarray:
        """The bytes of a weight in its type, uint8 (nbytes,): those of the file, or, where its type
        is expanded, new ones that n_workers threads make.

        progress: told how many bytes of the file have been expanded.

        Raises ModelFileError for values that the new type cannot hold.
        """
        data = self.file.data(weight.name)
        if not self.is_expanded(weight):
            return data
        try:
            return expanded(data, self.stored(weight), weight.dtype, n_workers, progress)
        except ModelFileError as error:
            raise ModelFileError(f"{self.path}: {error}") from None

    @property
    def notes(self) -> list[str]:
        """A line for each metadata key that makes answers differ from llama.cpp's."""
        return notes(self.file, self.architecture)

    @cached_property
    def name(self) -> str:
        return self.file.get("general.name", str, self.path.stem)

    @cached_property
    def hash(self) -> str:
        return model_hash(self.path)

    @property
    def n_params(self) -> int:
        return sum(t.rows * t.cols for t in self.weights)

    @cached_property
    def main_weight(self) -> Tensor:
        """A weight of the type with most bytes in the file, without embedding and output."""
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
        """Bytes of weights that one decoded token must read: all weights, but only one row of an
        untied embedding."""
        row = self.embedding.nbytes // self.embedding.rows
        total = sum(t.nbytes for t in self.weights if t is not self.embedding)
        return total + row + (self.embedding.nbytes if self.output is self.embedding else 0)

    def caches(self, n_ctx: int) -> Caches:
        """K and V of each layer: (n_ctx, n_head_kv * head_dim), one row per cell."""
        shape, (k, v) = (n_ctx, self.hparams.n_embd_kv), self.cache_dtypes
        return [
            (
                Tensor(f"cache_k_l{i}", k, shape, Kind.CACHE),
                Tensor(f"cache_v_l{i}", v, shape, Kind.CACHE),
            )
            for i in range(self.n_layer)
        ]

    def close(self) -> None:
        self.file.close()


def build_graph(
    model: Model,
    shape: StepShape,
    caches: Caches,
    activations: str = Activations.Q8,
    stores: CacheStores = SET_ROWS,
    regions: bool = False,
    last_tokens: Tensor | None = None,
) -> Graph:
    """The graph of one step of `shape`: token ids in, rows of logits out.

    activations: with `q8`, products with quantised weights get quantised activations, and products
        with float weights may round theirs to the weights' type. With `float` nothing is quantised
        or rounded, and the nodes of products have `activations` as a parameter, for backends.
    stores: the op of the cache stores, and the first cell of this step where the op has it as a
        parameter.
    regions: whether each sequence has cells of its own. Then attn_inp_regions (n_seqs, 2) I32 is
        another input.
    last_tokens: (n_seqs,) I32, for steps whose tokens the device draws (`shape.draws`). They also
        have the inputs inp_draws (n_outputs, 5) F32 and inp_out_seqs (n_outputs,) I32, and their
        output is `drawn` (n_outputs, 2) I32. A token id below 0 stands for a sequence's last token
        (`feed`).

    Inputs, by name: inp_tokens (T,) I32, inp_pos (T,) I32, attn_inp_kq_mask (T, n_kv) F16, the
    inputs of stores, inp_out_ids (n_outputs,) I32. Stores have attn_inp_k_idxs and attn_inp_v_idxs
    (T,) I64 (set_rows), or inp_store_table (2 * n_layer,) I64, the first cell for K and V of each
    layer (copy_by_table), or no input (copy_to_view). The output is `result_output`
    (n_outputs, n_vocab) F32. With n_outputs 0 the graph ends at the cache stores of the last layer.
    """
    s = Step(
        model.hparams, shape, caches, model.rope_freqs, activations, stores, regions, last_tokens
    )
    stored = [s.ids, s.positions, *s.store_inputs]
    seen = [s.mask] if s.regions is None else [s.mask, s.regions]
    ids: Tensor = s.ids
    if s.last_tokens is not None:
        ids = s.add("feed", "inp_fed", s.ids, s.last_tokens)
    x: Tensor | None = s.add("get_rows", "inp_embd", model.embedding, ids)
    for i, layer in enumerate(model.layers):
        for block, weights in zip(model.blocks, layer, strict=True):
            assert x is not None
            x = block.build(s, i, weights, x)
            if x is None:  # the last layer attends to nothing: a model of one needs no mask
                return Graph(s.nodes, [*stored, *(seen if i else [])], [], shape)
    assert x is not None
    cur = s.norm("result_norm", x, model.output_norm, -1)
    logits = s.product("result_output", model.output, cur, None, -1)
    inputs = [s.ids, s.positions, *seen, *s.store_inputs, s.out_ids]
    if s.last_tokens is None:
        logits.kind = Kind.OUTPUT
        return Graph(s.nodes, inputs, [logits], shape)
    settings, sequences = input_of(DRAWS, shape), input_of(OUT_SEQS, shape)
    drawn = s.add("draw", "drawn", logits, settings)
    s.add("keep_tokens", "last_tokens", s.last_tokens, drawn, sequences)
    drawn.kind = Kind.OUTPUT
    return Graph(s.nodes, [*inputs, settings, sequences], [drawn], shape)
