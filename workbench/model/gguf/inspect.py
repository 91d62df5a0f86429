"""The contents of a model file, and how many bytes of weights a token must read.

These bytes are the numerator of every bandwidth figure. Decoding a token reads each weight once. So
tokens per second times `weight_bytes_per_token` is the bandwidth that was used.
"""

import dataclasses
import os
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.common.sizes import size
from workbench.config import EXPAND
from workbench.model.gguf.expand import loaded_as, loaded_bytes
from workbench.model.gguf.file import GGUFFile, StringArray, TensorInfo, model_hash, open_gguf
from workbench.model.gguf.walk import shown
from workbench.model.hparams import DEFAULT, CacheTypes, cache_dtypes
from workbench.model.tokenizer.vocabulary import EMBEDDING, OUTPUT

LINE = 79  # columns of a line of text
LONGEST = 28  # name of a tensor beside its figures

_HYPERPARAMETERS = {
    "layers": "block_count",
    "embedding": "embedding_length",
    "feed_forward": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "context": "context_length",
    "vocabulary": "vocab_size",
    "experts": "expert_count",
    "experts_used": "expert_used_count",
}  # name shown -> metadata key after the architecture's name


@dataclass(frozen=True)
class TypeRow:
    """All tensors of one type. loaded_as: the type they have in memory, if another."""

    dtype: str
    n_tensors: int
    parameters: int
    bytes: int  # in the file
    loaded_as: str
    loaded_bytes: int


@dataclass(frozen=True)
class TensorRow:
    """Tensors alike in all but their layer; `*` stands for the layer's number."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of one, numpy order
    n_tensors: int
    bytes: int  # of all


@dataclass(frozen=True)
class ModelSummary:
    path: str
    architecture: str
    name: str
    version: int  # of GGUF
    file_bytes: int
    hash: str  # see model_hash
    parameters: int
    hyperparameters: dict[str, Any]  # as far as the file states them
    types: tuple[TypeRow, ...]  # by bytes, largest first
    tensors: tuple[TensorRow, ...]  # in file order
    tied_output: bool  # the head is the token embedding
    files: tuple[str, ...]  # one, or the parts of a model that was split
    weight_bytes_per_token: int  # in the types they are loaded as
    stored_bytes_per_token: int  # in the types of the file
    cache_types: tuple[str, str]  # of K and V
    cache_bytes_per_token: int | None  # of K and V; None where the file leaves sizes unsaid

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, fit for JSON."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """The text that `workbench model inspect` prints; GB is 1e9 bytes."""
        kind = max(6, *(len(t.dtype) for t in self.types), 0)  # width of the column
        numbers = ", ".join(f"{k} {v}" for k, v in self.hyperparameters.items())
        what = f"{shown(self.name)} ({shown(self.architecture)}), GGUF v{self.version}"
        n_files = f" in {len(self.files)} files" if len(self.files) > 1 else ""
        out = [
            *textwrap.wrap(f"{what}, {size(self.file_bytes)}{n_files}", LINE),
            f"sampled sha256 {self.hash}",
            f"parameters {self.parameters:,}" + (", tied output" * self.tied_output),
            *textwrap.wrap(numbers, LINE),
            "",
            f"{'type':{kind}} {'tensors':>8} {'parameters':>15} {'size':>10}",
        ]
        out += [
            f"{t.dtype:{kind}} {t.n_tensors:>8} {t.parameters:>15,} {size(t.bytes):>10}"
            + (t.loaded_as != t.dtype) * f"  expanded to {t.loaded_as}, {size(t.loaded_bytes)}"
            for t in self.types
        ]
        names = [shown(t.name) for t in self.tensors]
        width = min(max(map(len, names), default=6), LONGEST)
        out += ["", f"{'tensor':{width}} {'count':>5} {'type':{kind}} {'size':>10}  shape of one"]
        for name, t in zip(names, self.tensors, strict=True):
            out += [name] if len(name) > width else []  # on a line of its own
            out.append(
                f"{name if len(name) <= width else '':{width}} {t.n_tensors:>5} {t.dtype:{kind}} "
                f"{size(t.bytes):>10}  {' x '.join(map(str, t.shape))}"
            )
        each, stored = self.weight_bytes_per_token, self.stored_bytes_per_token
        out += ["", f"weights read per token {size(each)} ({each:,} bytes)"]
        if stored != each:
            out[-1] += " after expansion"
            out.append(f"as stored {size(stored)}")
        if (cell := self.cache_bytes_per_token) is not None:
            k, v = self.cache_types
            types = k if k == v else f"K {k}, V {v}"
            out.append(f"KV cache per token {size(cell)} ({cell:,} bytes, {types})")
        return out


def summary(
    path: str | os.PathLike[str],
    expand: str = EXPAND[0],
    cache_types: CacheTypes = DEFAULT,
) -> ModelSummary:
    """Reads the file at `path`; no tensor data beyond what `model_hash` samples.

    expand: what tensors become that have no kernels for their type, as in EngineConfig, and
    cache_types: of K and of V. Raises ModelFileError for a file that cannot be believed or names no
    architecture. UsageError for a cache type that heads of this size cannot have.
    """
    with open_gguf(path) as file:
        architecture = file.get("general.architecture", str)
        infos = list(file.tensors.values())
        by_type: dict[str, list[TensorInfo]] = {}
        alike: dict[tuple[str, str, tuple[int, ...]], list[TensorInfo]] = {}
        for info in infos:
            name = re.sub(r"^blk\.\d+\.", "blk.*.", info.name)
            by_type.setdefault(info.dtype.name, []).append(info)
            alike.setdefault((name, info.dtype.name, info.shape), []).append(info)
        types = [
            TypeRow(
                dtype,
                len(of),
                sum(i.n_elements for i in of),
                sum(i.nbytes for i in of),
                loaded_as(of[0].dtype, expand).name,
                sum(loaded_bytes(i, expand) for i in of),
            )
            for dtype, of in by_type.items()
        ]
        tensors = [TensorRow(*key, len(of), sum(i.nbytes for i in of)) for key, of in alike.items()]
        return ModelSummary(
            path=os.fspath(path),
            architecture=architecture,
            name=file.get("general.name", str, os.path.basename(file.path)),
            version=file.version,
            file_bytes=file.file_bytes,
            hash=model_hash(file),
            parameters=sum(i.n_elements for i in infos),
            hyperparameters=_hyperparameters(file, architecture),
            types=tuple(sorted(types, key=lambda t: -t.bytes)),
            tensors=tuple(tensors),
            tied_output=EMBEDDING in file.tensors and OUTPUT not in file.tensors,
            files=tuple(part.path for part in file.files),
            weight_bytes_per_token=_bytes_per_token(file, lambda i: loaded_bytes(i, expand)),
            stored_bytes_per_token=_bytes_per_token(file, lambda i: i.nbytes),
            cache_types=cache_types,
            cache_bytes_per_token=_cache_bytes(file, architecture, cache_types),
        )


def _cache_bytes(file: GGUFFile, architecture: str, types: CacheTypes) -> int | None:
    """Bytes of K and V of one token in all layers; None where sizes are missing, or differ from
    layer to layer."""

    def stated(key: str, default: int | None = None) -> int:
        value = file.metadata.get(f"{architecture}.{key}", default)
        return value if type(value) is int and 0 < value < 1 << 31 else 0

    layers, heads = stated("block_count"), stated("attention.head_count")
    kv_heads, width = stated("attention.head_count_kv", heads), stated("embedding_length")
    own = width // heads if heads else 0
    dims = stated("attention.key_length", own), stated("attention.value_length", own)
    if not (layers and kv_heads and all(dims)):
        return None
    kinds = cache_dtypes(file.path, types, dims)
    return sum(layers * kv_heads * t.row_bytes(d) for t, d in zip(kinds, dims, strict=True))


def _bytes_per_token(file: GGUFFile, nbytes_of: Callable[[TensorInfo], int]) -> int:
    """Bytes of weights one decoded token reads: every tensor once, norms and biases included.

    Of the token embedding one row is read, unless it is the head too (no `output.weight`): then all
    of it. Of stacked experts (`ffn_*_exps`) as many are read as a token uses. The KV cache is not
    counted. nbytes_of: bytes of a tensor, in the type it has in the file or in memory.
    """
    architecture = file.metadata.get("general.architecture")
    used = file.metadata.get(f"{architecture}.expert_used_count")
    total = 0
    for info in file.tensors.values():
        n = nbytes_of(info)
        if info.name == EMBEDDING and OUTPUT in file.tensors:
            n //= info.n_elements // info.shape[-1]  # one row
        elif "_exps." in info.name and type(used) is int and used > 0:
            n = n // info.shape[0] * min(used, info.shape[0])
        total += n
    return total


def _hyperparameters(file: GGUFFile, architecture: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, key in _HYPERPARAMETERS.items():
        value = file.metadata.get(f"{architecture}.{key}")
        if isinstance(value, np.ndarray) and len(value):  # one number per layer
            low, high = value.min().item(), value.max().item()
            found[name] = low if low == high else f"{low}..{high}"
        elif type(value) is int:
            found[name] = value
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if "vocabulary" not in found and isinstance(tokens, StringArray):
        found["vocabulary"] = len(tokens)
    return found
