"""Hyper-parameters of a model, read from GGUF metadata and checked against one another. Also the
types that K and V may have in its cache.

Key names follow the GGUF specification (`docs/gguf.md` of ggml): `<architecture>.<key>`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.common.errors import ModelFileError, UsageError
from workbench.config import CACHE_TYPES
from workbench.graph.ir import CACHE_DTYPES, DType
from workbench.model.architectures import ARCHITECTURES, Architecture
from workbench.model.gguf.file import GGUFFile
from workbench.model.gguf.metadata import ARCHITECTURE_KEYS, refuse

CacheTypes = tuple[str, str]  # names in settings and flags, of K and of V
DEFAULT: CacheTypes = (CACHE_TYPES[0], CACHE_TYPES[0])
_BY_NAME = dict(zip(CACHE_TYPES, CACHE_DTYPES, strict=True))


@dataclass(frozen=True)
class HParams:
    """Sizes in elements; eps, theta_base and freq_scale as in `graph.ops`. window: how many
    positions a token sees, its own included; 0: all."""

    architecture: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    n_ctx_train: int
    eps: float
    theta_base: float
    freq_scale: float
    window: int = 0

    @property
    def traits(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    @property
    def rope(self) -> dict[str, Any]:
        """The parameters that the ops `rope` and `rope_shift` share."""
        return {
            "n_rot": self.n_rot, "neox": self.traits.neox,
            "theta_base": self.theta_base, "freq_scale": self.freq_scale,
        }  # fmt: skip

    @property
    def n_embd_q(self) -> int:
        return self.n_head * self.head_dim

    @property
    def n_embd_kv(self) -> int:
        return self.n_head_kv * self.head_dim


def read_hparams(file: GGUFFile) -> HParams:
    """The hyper-parameters of a file. Raises ModelFileError for an unknown architecture, a missing
    key, an impossible size, and for keys that `metadata.ARCHITECTURE_KEYS` refuses."""
    arch = file.get("general.architecture", str)
    if arch not in ARCHITECTURES:
        raise ModelFileError(
            f"{file.path}: architecture {arch!r} is not supported; use a model of "
            f"{', '.join(ARCHITECTURES)}"
        )
    refuse(file, arch, ARCHITECTURE_KEYS)

    def size(key: str, value: int) -> int:
        if not 0 < value < 1 << 31:
            raise ModelFileError(f"{file.path}: {arch}.{key} = {value} is not a possible size")
        return value

    def number(key: str, default: int | None = None) -> int:
        name = f"{arch}.{key}"
        return size(key, file.get(name, int) if default is None else file.get(name, int, default))

    def each(key: str, default: int | None = None) -> int:
        """A size that all layers have. The file may state it once, or once for each layer."""
        values = file.metadata.get(f"{arch}.{key}")
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu":
            return number(key, default)
        if len(values) != n_layer or (values != values[0]).any():
            raise ModelFileError(
                f"{file.path}: {arch}.{key} has {len(values)} sizes, {n_layer} equal ones are "
                "supported; use a model whose layers are alike"
            )
        return size(key, int(values[0]))

    n_layer = number("block_count")
    n_embd, n_head = number("embedding_length"), each("attention.head_count")
    head_dim = number("attention.key_length", max(1, n_embd // n_head))
    h = HParams(
        architecture=arch,
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=each("feed_forward_length"),
        n_head=n_head,
        n_head_kv=each("attention.head_count_kv", n_head),
        head_dim=head_dim,
        n_rot=number("rope.dimension_count", head_dim),
        n_ctx_train=number("context_length"),
        eps=float(file.get(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        theta_base=float(file.get(f"{arch}.rope.freq_base", float, 10000.0)),
        freq_scale=_freq_scale(file, arch),
        window=_window(file, arch),
    )
    value_length = number("attention.value_length", head_dim)
    n_embd_out = file.get(f"{arch}.embedding_length_out", int, 0)
    problems = {
        "attention.head_count is no multiple of head_count_kv": h.n_head % h.n_head_kv != 0,
        "rope.dimension_count is odd or above the head size": h.n_rot % 2 or h.n_rot > h.head_dim,
        "attention.value_length differs from key_length": value_length != head_dim,
        "block_count is above 4096": h.n_layer > 4096,
        "embedding_length_out differs from embedding_length": n_embd_out not in (0, n_embd),
        "layer_norm_rms_epsilon is not a small positive number": not 0 < h.eps < 1,
        "rope.freq_base is not positive": not h.theta_base > 0,
    }
    for what, wrong in problems.items():
        if wrong:
            raise ModelFileError(f"{file.path}: {arch}.{what}; the file is damaged or unsupported")
    return h


def _window(file: GGUFFile, arch: str) -> int:
    """The window of every layer. Files with windows in only some layers are refused."""
    window, pattern = (f"{arch}.attention.sliding_window{end}" for end in ("", "_pattern"))
    size = file.get(window, int, 0)
    if not 0 <= size < 1 << 31:
        raise ModelFileError(f"{file.path}: {window} = {size} is not a possible size")
    if size and pattern in file.metadata:
        raise ModelFileError(
            f"{file.path}: {pattern} is not supported; use a model whose layers all have the window"
        )
    return size


def _freq_scale(file: GGUFFile, arch: str) -> float:
    """The factor of positions before RoPE: 1 over the file's factor, as in llama.cpp.

    No type means linear. The factor is `rope.scaling.factor`, or else the older
    `rope.scale_linear`; 0 stands for 1. Type `none` ignores both.
    """
    kind = file.get(f"{arch}.rope.scaling.type", str, "linear")
    if kind not in ("none", "linear"):
        raise ModelFileError(
            f"{file.path}: {arch}.rope.scaling.type {kind!r} is not supported; "
            "use a model with none or linear scaling"
        )
    keys = (f"{arch}.rope.scaling.factor", f"{arch}.rope.scale_linear")
    key = next((k for k in keys if k in file.metadata), None)
    factor = 0.0 if key is None or kind == "none" else file.get(key, float)
    if not 0 <= factor < math.inf:
        raise ModelFileError(f"{file.path}: {key} = {factor} must be 0 (none) or above")
    return 1 / factor if factor else 1.0


def cache_dtypes(
    path: str | os.PathLike[str], types: CacheTypes, head_dims: tuple[int, int]
) -> tuple[DType, DType]:
    """The types of K and V for a model at `path`, whose heads have so many elements. Raises
    UsageError where whole blocks of a type do not fill a head."""
    found = _BY_NAME[types[0]], _BY_NAME[types[1]]
    for which, name, dtype, head_dim in zip("kv", types, found, head_dims, strict=True):
        if head_dim % dtype.block:
            raise UsageError(
                f"cache_type_{which}={name}: heads of {os.fspath(path)} have {head_dim} elements, "
                f"no multiple of {dtype.block}; use f16, bf16 or f32"
            )
    return found
