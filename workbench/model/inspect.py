"""What is in a model file, and how many bytes of weights a token must read.

The second is the numerator of every bandwidth figure: decode of one token reads each weight once,
so tokens per second times `weight_bytes_per_token` is the bandwidth that was used.
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.model.gguf import GGUFFile, StringArray, TensorInfo, model_hash, open_gguf
from workbench.model.gguf_walk import shown

EMBEDDING, HEAD = "token_embd.weight", "output.weight"

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
}  # name shown -> metadata key behind the architecture's name


@dataclass(frozen=True)
class TypeRow:
    """All tensors of one type."""

    dtype: str
    n_tensors: int
    parameters: int
    bytes: int


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
    hyperparameters: dict[str, Any]  # those that the file states
    types: tuple[TypeRow, ...]  # by bytes, largest first
    tensors: tuple[TensorRow, ...]  # in file order
    tied_output: bool  # the head is the token embedding
    weight_bytes_per_token: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, fit for JSON."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """The text that `workbench model inspect` prints; GB is 1e9 bytes."""
        numbers = ", ".join(f"{k} {v}" for k, v in self.hyperparameters.items())
        what = f"{shown(self.name)} ({shown(self.architecture)}), GGUF v{self.version}"
        out = [
            f"{what}, {_size(self.file_bytes)}",
            f"sha256 of samples {self.hash}",
            f"parameters {self.parameters:,}" + (", tied output" * self.tied_output),
            numbers,
            "",
            f"{'type':6} {'tensors':>8} {'parameters':>15} {'size':>10}",
        ]
        out += [
            f"{t.dtype:6} {t.n_tensors:>8} {t.parameters:>15,} {_size(t.bytes):>10}"
            for t in self.types
        ]
        width = max((len(shown(t.name)) for t in self.tensors), default=6)
        out += ["", f"{'tensor':{width}} {'count':>5} {'type':6} {'size':>10}  shape of one"]
        out += [
            f"{shown(t.name):{width}} {t.n_tensors:>5} {t.dtype:6} {_size(t.bytes):>10}  "
            f"{' x '.join(map(str, t.shape))}"
            for t in self.tensors
        ]
        each = self.weight_bytes_per_token
        return [*out, "", f"weights read per token {_size(each)} ({each:,} bytes)"]


def summary(path: str | os.PathLike[str]) -> ModelSummary:
    """Reads the file at `path`; no tensor data beyond what `model_hash` samples.

    Raises ModelFileError for a file that cannot be believed or names no architecture.
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
            TypeRow(dtype, len(of), sum(i.n_elements for i in of), sum(i.nbytes for i in of))
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
            tied_output=EMBEDDING in file.tensors and HEAD not in file.tensors,
            weight_bytes_per_token=weight_bytes_per_token(file),
        )


def weight_bytes_per_token(file: GGUFFile) -> int:
    """Bytes of weights one decoded token reads: every tensor once, norms and biases included.

    Of the token embedding one row is read, unless it is the head too (no `output.weight`): then all
    of it. Of stacked experts (`ffn_*_exps`) as many are read as a token uses. The KV cache is not
    counted.
    """
    architecture = file.metadata.get("general.architecture")
    used = file.metadata.get(f"{architecture}.expert_used_count")
    total = 0
    for info in file.tensors.values():
        n = info.nbytes
        if info.name == EMBEDDING and HEAD in file.tensors:
            n = info.dtype.row_bytes(info.shape[-1])
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


def _size(n: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= scale:
            return f"{n / scale:.2f} {unit}"
    return f"{n} B"
