"""Shapes of real models, and which type each of their tensors is stored in.

A preset is a model's hyper-parameters without its weights. `tensors(preset)` lists the tensors a
GGUF file of that architecture holds; `tensor_type` chooses their types as `llama-quantize` does.

Hyper-parameters: the models' published `config.json`. Tensor names and metadata keys: the GGUF
specification and llama.cpp's architecture tables. Type rules: the behaviour of `llama-quantize`
without an importance matrix.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from workbench.common.errors import UsageError
from workbench.common.nearest import choices
from workbench.graph.ir import BF16, F16, F32, MXFP4, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, DType
from workbench.model.architectures import ARCHITECTURES


class RopeScaling(NamedTuple):
    """Llama 3.1's stretching of slow rotations; see `rope_factors`."""

    factor: float
    low: float
    high: float
    n_ctx_orig: int


@dataclass(frozen=True)
class Preset:
    """Hyper-parameters of one model.

    vocab: which vocabulary `synth` builds: `llama-bpe`, `qwen2` (both byte-level BPE, named by
    their pre-tokenizer) or `spm` (SentencePiece). tied: the head is the token embedding, and the
    file holds no `output.weight`. biases: the matrices that have one. window: as of HParams.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    rope_base: float
    eps: float
    tied: bool
    vocab: str
    rope_scaling: RopeScaling | None = None
    biases: tuple[str, ...] = ()
    window: int = 0


def _read() -> dict[str, Preset]:
    found = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
    for shape in found.values():
        shape["biases"] = tuple(shape.get("biases", ()))
        if "rope_scaling" in shape:
            shape["rope_scaling"] = RopeScaling(**shape["rope_scaling"])
    return {name: Preset(**shape) for name, shape in found.items()}


# The tiny shapes hold every feature a decoder can forget: grouped heads, a head_dim that is not
# n_embd / n_head (qwen3), rows of one and of two K-quant blocks, tied and untied heads. The small
# n_ctx_orig makes rope factors matter from the first positions on.
PRESETS = _read()


class Quant(NamedTuple):
    """A file type: the type most matrices take, and its number in `general.file_type`."""

    base: DType
    file_type: int
    mixed: bool = False  # some attn_v and ffn_down take Q6_K instead ("_M")


QUANTS = {
    dtype.name: Quant(dtype, file_type, mixed=dtype in (Q4_K, Q5_K))
    for dtype, file_type in (
        (F32, 0), (F16, 1), (BF16, 32), (Q8_0, 7), (Q4_0, 2), (Q4_K, 15), (Q5_K, 17), (Q6_K, 18),
        (MXFP4, 38),
    )
}  # fmt: skip
ALIASES = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}


def find_preset(name: str) -> Preset:
    """The preset called `name`; raises UsageError listing all of them."""
    if name not in PRESETS:
        raise UsageError(f"preset {name!r} does not exist; {choices(name, PRESETS)}")
    return PRESETS[name]


def quant_name(name: str) -> str:
    """The canonical name of a quant, any case, aliases resolved; raises UsageError listing all."""
    key = ALIASES.get(name.upper(), name.upper())
    if key not in QUANTS:
        raise UsageError(f"quant {name!r} does not exist; {choices(name, [*QUANTS, *ALIASES])}")
    return key


class TensorSpec(NamedTuple):
    """One tensor of a file: shape in numpy order, and what it is for."""

    name: str
    shape: tuple[int, ...]  # (rows, cols), or (n,)
    kind: str  # embed, head, matrix, norm, bias or rope
    layer: int = -1


def tensors(preset: Preset) -> list[TensorSpec]:
    """Every tensor of a file of this preset, in file order."""
    p = preset
    q_rows, kv_rows = p.n_head * p.head_dim, p.n_head_kv * p.head_dim
    matrices = {
        "attn_q": (q_rows, p.n_embd),
        "attn_k": (kv_rows, p.n_embd),
        "attn_v": (kv_rows, p.n_embd),
        "attn_output": (p.n_embd, q_rows),
        "ffn_gate": (p.n_ff, p.n_embd),
        "ffn_up": (p.n_ff, p.n_embd),
        "ffn_down": (p.n_embd, p.n_ff),
    }
    norms = {"attn_norm": p.n_embd, "ffn_norm": p.n_embd}
    if ARCHITECTURES[p.arch].qk_norm:
        norms |= {"attn_q_norm": p.head_dim, "attn_k_norm": p.head_dim}
    specs = [TensorSpec("token_embd.weight", (p.n_vocab, p.n_embd), "embed")]
    if not p.tied:
        specs.append(TensorSpec("output.weight", (p.n_vocab, p.n_embd), "head"))
    specs.append(TensorSpec("output_norm.weight", (p.n_embd,), "norm"))
    if p.rope_scaling:
        specs.append(TensorSpec("rope_freqs.weight", (p.head_dim // 2,), "rope"))
    for i in range(p.n_layer):
        for name, shape in matrices.items():
            specs.append(TensorSpec(f"blk.{i}.{name}.weight", shape, "matrix", i))
            if name in p.biases:
                specs.append(TensorSpec(f"blk.{i}.{name}.bias", shape[:1], "bias", i))
        for name, n in norms.items():
            specs.append(TensorSpec(f"blk.{i}.{name}.weight", (n,), "norm", i))
    return specs


def _more_bits(layer: int, n_layer: int) -> bool:
    """Layers whose attn_v and ffn_down get more bits in an _M mix: outer eighths, every third."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def tensor_type(spec: TensorSpec, preset: Preset, quant: str, head: str | None = None) -> DType:
    """The type `llama-quantize` gives a tensor in a file of this quant (a key of QUANTS).

    * norms, biases and rope factors: F32.
    * the head (`output.weight`, or `token_embd.weight` where tied): Q8_0 in Q8_0 and MXFP4 files,
      otherwise Q6_K; the base type where that is not quantised; `head` overrides.
    * in Q4_K and Q5_K files (the `_M` mixes), attn_v and ffn_down of some layers: Q6_K.
    * MXFP4: `llama-quantize` stores only expert matrices in MXFP4 and everything else in Q8_0,
      which would leave none in a dense model. Here the matrices of the layers are MXFP4. Head and
      embedding are Q8_0, as `llama-quantize` makes them.
    * where a row is no multiple of the block: Q8_0 for K-quants and an unsuited head, else F16.
      (llama-quantize falls back from Q4_K to Q5_0 and from Q5_K to Q5_1; neither is a type here.)

    Raises UsageError where `head` is no type, or its blocks do not divide the row.
    """
    if spec.kind in ("norm", "bias", "rope"):
        return F32
    base, _, mixed = QUANTS[quant]
    cols = spec.shape[-1]
    is_head = spec.kind == ("embed" if preset.tied else "head")
    if is_head and head is not None:
        chosen = QUANTS[quant_name(head)].base
        if cols % chosen.block:
            raise UsageError(
                f"head type {head} stores blocks of {chosen.block} and cannot hold rows of {cols}; "
                "choose Q8_0 or F16"
            )
        return chosen
    chosen = base
    if base not in (F32, F16, BF16):
        if base == MXFP4 and spec.kind != "matrix":
            chosen = Q8_0
        elif is_head:
            chosen = Q8_0 if base == Q8_0 or cols % base.block else Q6_K
        elif mixed and spec.name.endswith(("attn_v.weight", "ffn_down.weight")):
            chosen = Q6_K if _more_bits(spec.layer, preset.n_layer) else base
    return next(t for t in (chosen, Q8_0, F16) if cols % t.block == 0)


def rope_factors(preset: Preset) -> np.ndarray:
    """What `rope_freqs.weight` holds: float32 (head_dim/2,) divisors of the rotation speeds.

    Llama 3.1: rotations with a wavelength under n_ctx_orig/high keep their speed (1). Rotations
    with a wavelength over n_ctx_orig/low are slowed by `factor`. Between the two the speed goes
    linearly in n_ctx_orig/wavelength.
    """
    scaling = preset.rope_scaling
    if scaling is None:
        raise UsageError("this preset has no rope factors")
    pairs = np.arange(preset.head_dim // 2, dtype=np.float64)
    wavelength = 2 * math.pi * preset.rope_base ** (2 * pairs / preset.head_dim)
    rotations = scaling.n_ctx_orig / wavelength
    smooth = np.clip((rotations - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
    return (1 / ((1 - smooth) / scaling.factor + smooth)).astype(np.float32)
