"""The metadata keys that llama.cpp's loaders read, and how each is treated here.

llama.cpp reads the keys of llama, qwen2 and qwen3 in the same functions (`load_hparams` of
llama-model.cpp, `llama_vocab::impl::load`, and `load_arch_hparams` of each), so one table serves
all three. A key is *honoured*, *refused* or *without effect*. A refused key with a value that is
not neutral makes the whole file refused, by one line. A key without effect has none in llama.cpp
either, or the reason beside it says why it needs none.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from workbench.common.errors import ModelFileError
from workbench.model.gguf.file import GGUFFile
from workbench.model.gguf.walk import shown


class Use(StrEnum):
    """How a key is treated."""

    HONOURED = "honoured"
    REFUSED = "refused"
    WITHOUT_EFFECT = "without effect"


class FileKey(NamedTuple):
    """A metadata key.

    name: in a file; `ARCH.` stands for the name of the architecture and a dot.
    why: honoured: what it says; refused: why; without effect: the reason.
    neutral: values of a refused key that change nothing; None: who reads the key compares it.
    only_here: llama.cpp does not read it for these architectures.
    """

    name: str
    use: Use
    why: str
    neutral: tuple[Any, ...] | None = None
    only_here: bool = False

    def name_in(self, architecture: str) -> str:
        """The key's name in a file of `architecture`."""
        return self.name.replace("ARCH.", f"{architecture}.", 1)


_NO_EXPERTS = "mixtures of experts are not built"
_NO_WINDOWED_LAYERS = "in llama.cpp no layer of these architectures has a window"
_NO_UNIGRAM = "tokenizers of kind t5 alone use it, and these are refused"
_NO_WORDPIECE = "tokenizers of kind bert alone use it, and these are refused"
_FLAGS = "flags and requests say how tokens are drawn"
_BETWEEN = "stands between the texts of a reranker, and there is none"


def _all(use: Use, why: str, *names: str, neutral: tuple[Any, ...] | None = None) -> list[FileKey]:
    return [FileKey(name, use, why, neutral) for name in names]


ARCHITECTURE_KEYS: tuple[FileKey, ...] = (
    FileKey("ARCH.context_length", Use.HONOURED, "tokens that the model was trained on"),
    FileKey("ARCH.embedding_length", Use.HONOURED, "columns of the embedding"),
    FileKey("ARCH.block_count", Use.HONOURED, "layers"),
    FileKey("ARCH.feed_forward_length", Use.HONOURED, "rows of ffn_up"),
    FileKey("ARCH.attention.head_count", Use.HONOURED, "heads of Q"),
    FileKey("ARCH.attention.head_count_kv", Use.HONOURED, "heads of K and V"),
    FileKey("ARCH.attention.key_length", Use.HONOURED, "elements of a head"),
    FileKey("ARCH.attention.layer_norm_rms_epsilon", Use.HONOURED, "eps of every norm"),
    FileKey("ARCH.rope.dimension_count", Use.HONOURED, "elements of a head that rotate"),
    FileKey("ARCH.rope.freq_base", Use.HONOURED, "base of the rotation speeds"),
    FileKey("ARCH.rope.scaling.type", Use.HONOURED, "none or linear; yarn, longrope: refused"),
    FileKey("ARCH.rope.scaling.factor", Use.HONOURED, "what positions are divided by"),
    FileKey("ARCH.rope.scale_linear", Use.HONOURED, "the older name of the factor"),
    FileKey(
        "ARCH.attention.sliding_window", Use.HONOURED, "positions that a token sees", only_here=True
    ),
    FileKey(
        "ARCH.attention.sliding_window_pattern", Use.REFUSED,
        "beside a window: windows of some layers are not built", only_here=True,
    ),
    FileKey(
        "ARCH.attention.causal", Use.REFUSED,
        "attention to later tokens is not built", neutral=(True,),
    ),
    FileKey(
        "ARCH.nextn_predict_layers", Use.REFUSED,
        "layers that predict further tokens are not built", neutral=(0,),
    ),
    FileKey(
        "ARCH.rope.scaling.attn_factor", Use.REFUSED,
        "scores scaled beside RoPE are not built", neutral=(1.0,),
    ),
    *_all(
        Use.REFUSED, _NO_EXPERTS,
        "ARCH.expert_count", "ARCH.expert_used_count", "ARCH.expert_group_count", neutral=(0,),
    ),
    FileKey("ARCH.attention.value_length", Use.REFUSED, "must be the heads' key_length"),
    FileKey("ARCH.embedding_length_out", Use.REFUSED, "must be 0 or embedding_length"),
    FileKey("ARCH.vocab_size", Use.REFUSED, "must be the number of tokens"),
    FileKey("ARCH.expert_group_used_count", Use.WITHOUT_EFFECT, "there are no experts"),
    FileKey("ARCH.pooling_type", Use.WITHOUT_EFFECT, "pools embeddings; only logits are computed"),
    FileKey(
        "ARCH.classifier.output_labels", Use.WITHOUT_EFFECT,
        "names outputs of a classifier, whose tensors are refused",
    ),
    FileKey("ARCH.rope.scaling.finetuned", Use.WITHOUT_EFFECT, "llama.cpp only prints it"),
    FileKey(
        "ARCH.rope.scaling.original_context_length", Use.WITHOUT_EFFECT,
        "yarn and longrope alone use it, and these are refused",
    ),
    FileKey("ARCH.rope.scaling.alpha", Use.WITHOUT_EFFECT, "hunyuan's architectures alone use it"),
    *_all(
        Use.WITHOUT_EFFECT, _NO_WINDOWED_LAYERS,
        "ARCH.attention.key_length_swa", "ARCH.attention.value_length_swa",
        "ARCH.rope.dimension_count_swa",
    ),
)  # fmt: skip

_T = "tokenizer.ggml."
TOKENIZER_KEYS: tuple[FileKey, ...] = (
    FileKey(_T + "model", Use.HONOURED, "gpt2 or llama; other kinds are refused"),
    FileKey(_T + "pre", Use.HONOURED, "how text is split into words; unknown ones are refused"),
    FileKey(_T + "tokens", Use.HONOURED, "the text of each token"),
    FileKey(_T + "token_type", Use.HONOURED, "which tokens are special"),
    FileKey(_T + "scores", Use.HONOURED, "which merge comes first, in kind llama"),
    FileKey(_T + "merges", Use.HONOURED, "which merge comes first, in kind gpt2"),
    FileKey(_T + "bos_token_id", Use.HONOURED, "begins a text"),
    *_all(
        Use.HONOURED, "ends generation",
        *(f"{_T}{name}_token_id"
          for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")),
    ),
    *_all(
        Use.HONOURED, "names the token, so that it is not looked for by its text",
        *(f"{_T}{name}_token_id"
          for name in ("fim_pre", "fim_suf", "fim_mid", "prefix", "suffix", "middle")),
    ),
    FileKey(_T + "add_bos_token", Use.HONOURED, "whether BOS is put before a text"),
    FileKey(_T + "add_eos_token", Use.HONOURED, "whether EOS is put after a text"),
    FileKey(_T + "add_space_prefix", Use.HONOURED, "whether a space is put before a text"),
    FileKey("tokenizer.chat_template", Use.HONOURED, "messages to a prompt, in the server"),
    FileKey(
        _T + "suppress_tokens", Use.REFUSED,
        "tokens that are never drawn are not built", neutral=(),
    ),
    FileKey(
        _T + "unknown_token_id", Use.WITHOUT_EFFECT, "the token of type unknown is taken; in range"
    ),
    *_all(
        Use.WITHOUT_EFFECT, "fills up batches of other programs; in range",
        _T + "padding_token_id",
    ),
    FileKey(
        _T + "mask_token_id", Use.WITHOUT_EFFECT, "for models that fill gaps in a text; in range"
    ),
    *_all(Use.WITHOUT_EFFECT, _BETWEEN, _T + "seperator_token_id", _T + "add_sep_token"),
    *_all(
        Use.WITHOUT_EFFECT, _NO_UNIGRAM,
        _T + "remove_extra_whitespaces", _T + "precompiled_charsmap",
    ),
    *_all(
        Use.WITHOUT_EFFECT, _NO_WORDPIECE,
        _T + "token_type_count", _T + "normalizer.lowercase", _T + "normalizer.strip_accents",
    ),
    *_all(
        Use.WITHOUT_EFFECT, "the server renders tokenizer.chat_template alone",
        "tokenizer.chat_template.tool_use", "tokenizer.chat_template.rerank",
    ),
)  # fmt: skip

FILE_KEYS: tuple[FileKey, ...] = (
    FileKey("general.architecture", Use.HONOURED, "an entry of architectures.py"),
    FileKey("general.alignment", Use.HONOURED, "what every tensor's offset is a multiple of"),
    FileKey(
        "general.name", Use.HONOURED, "what tables and run folders call the model; llama.cpp drops "
        "spaces after special tokens where it has phi-3 in it",
    ),
    FileKey("general.file_type", Use.WITHOUT_EFFECT, "each tensor says its type"),
    FileKey("split.no", Use.HONOURED, "which part of a model in several files"),
    FileKey("split.count", Use.HONOURED, "how many parts there are"),
    FileKey("split.tensors.count", Use.HONOURED, "how many tensors all parts have"),
    *_all(
        Use.WITHOUT_EFFECT, _FLAGS,
        *(f"general.sampling.{name}" for name in (
            "sequence", "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold", "temp",
            "penalty_last_n", "penalty_repeat", "mirostat", "mirostat_tau", "mirostat_eta",
        )),
    ),
)  # fmt: skip

KEYS = (*FILE_KEYS, *ARCHITECTURE_KEYS, *TOKENIZER_KEYS)


def refuse(file: GGUFFile, architecture: str, keys: Iterable[FileKey]) -> None:
    """Raises ModelFileError for a refused key with a value that is not neutral."""
    for key in keys:
        name = key.name_in(architecture)
        if key.use == Use.REFUSED and name in file.metadata and _acts(key, file.metadata[name]):
            raise ModelFileError(
                f"{shown(file.path)}: {name} = {shown(file.metadata[name])} is not supported: "
                f"{key.why}; use another model"
            )


def _acts(key: FileKey, value: Any) -> bool:
    """Whether a value of a refused key changes answers, as far as the table knows."""
    if key.neutral is None:
        return False
    if isinstance(value, np.ndarray | list):
        return len(value) > 0
    return value not in key.neutral


def notes(file: GGUFFile, architecture: str) -> list[str]:
    """A line for each key that changes answers here and that llama.cpp does not read."""
    return [
        f"{key.name_in(architecture)} = {value} is honoured here; llama.cpp does not read it for "
        f"architecture {architecture}, so its answers differ"
        for key in ARCHITECTURE_KEYS
        if key.only_here
        and key.use == Use.HONOURED
        and (value := file.metadata.get(key.name_in(architecture)))
    ]
