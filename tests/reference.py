"""The slow twin: what a model file computes, in plain float64 NumPy.

It shares nothing with the engine: files are opened and dequantised by the `gguf` package, formulas
are those of the papers named beside them, checked against llama.cpp (`make peer`). All positions
are computed at once. `rounded=True` makes the two roundings that the engine is meant to make, and
no others: K and V to F16, and activations that meet a quantised weight to 8 bits in blocks of 32.
T is the number of tokens throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# Which elements of a head rotate together: neighbours (2i, 2i+1), or i with i + n_rot/2. A file's
# Q and K rows are permuted by the converter to suit, so this follows from the architecture.
ROPE_PAIRS = {"llama": "adjacent", "qwen2": "halves", "qwen3": "halves"}
UNQUANTISED = ("F32", "F16", "BF16")


class ModelFile:
    """Metadata, and weights as float64 arrays (rows, cols), each dequantised once when first used.
    Raises ValueError for an architecture or a RoPE scaling this reference does not know."""

    def __init__(self, path: str | Path):
        reader = gguf.GGUFReader(path)
        self._metadata = {name: field.contents() for name, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._weights: dict[str, np.ndarray] = {}
        self.architecture: str = self._metadata["general.architecture"]
        self.rope_scaling: str = self.key("rope.scaling.type", "linear")
        if self.architecture not in ROPE_PAIRS or self.rope_scaling not in ("none", "linear"):
            raise ValueError(f"{path}: no reference for {self.architecture}, {self.rope_scaling}")
        self.n_layer, self.n_head = (
            int(self.key(name)) for name in ("block_count", "attention.head_count")
        )
        self.n_head_kv = int(self.key("attention.head_count_kv", self.n_head))
        whole = self.key("embedding_length") // self.n_head
        self.head_dim = int(self.key("attention.key_length", whole))
        self.n_rot = int(self.key("rope.dimension_count", self.head_dim))
        self.eps = float(self.key("attention.layer_norm_rms_epsilon"))

    def key(self, name: str, default: Any = None) -> Any:
        """The architecture's metadata value `name`; ValueError where it is missing without one."""
        value = self._metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise ValueError(f"metadata {self.architecture}.{name} is missing")
        return value

    def weight(self, name: str) -> np.ndarray | None:
        """Tensor `name` as float64, or None where the file has none of that name."""
        if name not in self._weights and name in self._tensors:
            tensor = self._tensors[name]
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            self._weights[name] = values.astype(np.float64)
        return self._weights.get(name)

    def linear(self, name: str, x: np.ndarray, rounded: bool) -> np.ndarray:
        """x (T, cols) times `name`.weight (rows, cols) transposed, plus `name`.bias if any."""
        weight, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        if weight is None:
            raise ValueError(f"tensor {name}.weight is missing")
        if rounded and self._tensors[f"{name}.weight"].tensor_type.name not in UNQUANTISED:
            x = round_to_8_bits(x)
        product = x @ weight.T  # (T, rows)
        return product if bias is None else product + bias

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019)."""
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.eps) * self.weight(f"{name}.weight")


@cache
def _open(path: Path, mtime_ns: int) -> ModelFile:
    return ModelFile(path)


def round_to_8_bits(x: np.ndarray) -> np.ndarray:
    """x (T, cols), each block of 32 rounded to whole multiples of max|x| / 127 (ties to even)."""
    blocks = x.reshape(len(x), -1, 32)
    step = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    return (np.rint(blocks / np.where(step == 0, 1, step)) * step).reshape(x.shape)


def rope(model: ModelFile, x: np.ndarray) -> np.ndarray:
    """Turns the pairs of each head by their position (Su et al. 2021). x (T, heads, head_dim).
    Where scaling is linear, or has no type, scale is 1 over rope.scaling.factor, or else over
    rope.scale_linear; 0 stands for 1."""
    scale = 1.0
    if model.rope_scaling == "linear":
        older = model.key("rope.scale_linear", 1.0)
        scale = 1 / (float(model.key("rope.scaling.factor", older)) or 1.0)
    return rotated(
        x, np.arange(len(x)), ROPE_PAIRS[model.architecture], model.n_rot,
        float(model.key("rope.freq_base", 10000.0)), scale, model.weight("rope_freqs.weight"),
    )  # fmt: skip


def rotated(
    x: np.ndarray, positions: np.ndarray, pairs: str, n_rot: int, base: float, scale: float = 1.0,
    factors: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Pair i of every head of x (T, heads, head_dim) turned by position * scale * base^(-2i/n_rot)
    / factors[i]; float64. positions (T,), factors (n_rot/2,), pairs as `ROPE_PAIRS` has them.
    Where x is the K of a cache and positions are deltas, it is the shift of cells."""
    x, half = np.asarray(x, np.float64), n_rot // 2
    frequency = scale * base ** (-2.0 * np.arange(half) / n_rot)
    if factors is not None:
        frequency = frequency / factors
    angle = np.asarray(positions)[:, None, None] * frequency  # (T, 1, half)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = slice(0, half), slice(half, n_rot)
    if pairs == "adjacent":
        first, second = slice(0, n_rot, 2), slice(1, n_rot, 2)
    turned = x.copy()  # elements past n_rot stay
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., first] * sin + x[..., second] * cos
    return turned


def attention(model: ModelFile, block: str, x: np.ndarray, rounded: bool) -> np.ndarray:
    """Causal grouped-query attention of one layer (Ainslie et al. 2023). x (T, n_embd)."""
    n_tokens = len(x)
    q, k, v = (
        model.linear(f"{block}.attn_{name}", x, rounded).reshape(n_tokens, heads, -1)
        for name, heads in (("q", model.n_head), ("k", model.n_head_kv), ("v", model.n_head_kv))
    )
    if model.architecture == "qwen3":  # per-head norms, before RoPE
        q, k = model.norm(f"{block}.attn_q_norm", q), model.norm(f"{block}.attn_k_norm", k)
    q, k = rope(model, q), rope(model, k)
    if rounded:
        k, v = k.astype(np.float16).astype(float), v.astype(np.float16).astype(float)
    # query head h reads KV head h // (n_head / n_head_kv)
    k, v = (np.repeat(t, model.n_head // model.n_head_kv, axis=1) for t in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k, optimize=True) / np.sqrt(model.head_dim)
    hidden = np.triu(np.ones((n_tokens, n_tokens), bool), 1)  # the future
    if window := int(model.key("attention.sliding_window", 0)):  # Beltagy et al. 2020
        hidden |= np.tril(np.ones((n_tokens, n_tokens), bool), -window)
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hij,jhd->ihd", weights, v, optimize=True)
    return model.linear(f"{block}.attn_output", mixed.reshape(n_tokens, -1), rounded)


def feed_forward(model: ModelFile, block: str, x: np.ndarray, rounded: bool) -> np.ndarray:
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)). x (T, n_embd)."""
    gate, up = (model.linear(f"{block}.ffn_{name}", x, rounded) for name in ("gate", "up"))
    return model.linear(f"{block}.ffn_down", gate / (1 + np.exp(-gate)) * up, rounded)


def forward(path: str | Path, tokens: Sequence[int], rounded: bool = False) -> np.ndarray:
    """Logits after each of `tokens`, which start at position 0: float64 (T, n_vocab). Raises
    ValueError where the file is of no kind known here, IndexError for a token outside the
    vocabulary."""
    resolved = Path(path).resolve()  # opened once a session, and again when it was rewritten
    model = _open(resolved, resolved.stat().st_mtime_ns)
    embedding = model.weight("token_embd.weight")
    assert embedding is not None
    x = embedding[np.asarray(tokens)]  # (T, n_embd)
    for block in (f"blk.{layer}" for layer in range(model.n_layer)):
        x = x + attention(model, block, model.norm(f"{block}.attn_norm", x), rounded)
        x = x + feed_forward(model, block, model.norm(f"{block}.ffn_norm", x), rounded)
    tied = model.weight("output.weight") is None  # then the embedding is the head
    return model.linear("token_embd" if tied else "output", model.norm("output_norm", x), rounded)


def nmse(logits: np.ndarray, reference: np.ndarray) -> float:
    """Normalised mean square error: sum((logits - reference)^2) / sum(reference^2)."""
    reference = np.asarray(reference, np.float64)
    return float(np.sum((logits - reference) ** 2) / np.sum(reference**2))


def decided_argmax_mismatches(logits: np.ndarray, reference: np.ndarray) -> list[int]:
    """Rows whose argmax differs although the reference's margin (between its two largest logits)
    exceeds 4 times the row's rms difference. With a smaller margin either token is right."""
    rms = np.sqrt(np.mean((logits - reference) ** 2, axis=-1))
    top = np.sort(reference, axis=-1)
    differs = logits.argmax(axis=-1) != reference.argmax(axis=-1)
    return np.flatnonzero(differs & (top[:, -1] - top[:, -2] > 4 * rms)).tolist()
