"""The table of metadata keys: every key of it is set in a file, and the file does what it says."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

import workbench as wb
from tests.edited import edited
from tests.model.gguf_files import write
from tests.profiles import share
from workbench.common.errors import ModelFileError
from workbench.model.architectures import ARCHITECTURES
from workbench.model.gguf.file import GGUFFile, open_gguf
from workbench.model.gguf.inspect import summary
from workbench.model.gguf.metadata import KEYS, FileKey, Use
from workbench.model.hparams import read_hparams
from workbench.model.tokenizer.tokenizer import load_tokenizer
from workbench.server import chat

T = "tokenizer.ggml."
BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
FIM = [f"<|fim_{part}|>" for part in ("prefix", "suffix", "middle", "pad", "repo")]
BPE = {
    T + "model": "gpt2", T + "pre": "llama-bpe",
    T + "tokens": [*BYTES, "he", "hey", "<s>", "<e>", *FIM, "<|file_sep|>", "1" * 4],
    T + "token_type": [1] * 258 + [3, 3] + [1] * 7, T + "merges": ["h e", "he y"],
    T + "bos_token_id": 258, T + "eos_token_id": 259,
}  # fmt: skip
BYTES_IN_SPM = [f"<0x{b:02X}>" for b in range(256)]
SPM = {
    T + "model": "llama",
    T + "tokens": ["<unk>", "<s>", "</s>", *BYTES_IN_SPM, "▁", *"hey", "he", "ey"],
    T + "token_type": [2, 3, 3] + [6] * 256 + [1] * 6,
    T + "scores": [0.0] * 259 + [-float(i) for i in range(6)],
}  # fmt: skip
SIZES = {
    "ARCH.context_length": 64, "ARCH.embedding_length": 32, "ARCH.block_count": 2,
    "ARCH.feed_forward_length": 48, "ARCH.attention.head_count": 2,
    "ARCH.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
TEXT = "xhey é 1111 " + "".join([*FIM, "<|file_sep|>"])


PARTS = {"split.no": 0, "split.count": 2, "split.tensors.count": 0}
A, R, S = "ARCH.attention.", "ARCH.rope.", "general.sampling."
# what a file gets for a key, and what the file that it is compared with has
VALUES: dict[str, Any] = {
    "ARCH.context_length": 65, "ARCH.embedding_length": 64, "ARCH.block_count": 3,
    "ARCH.feed_forward_length": 64, A + "head_count": 4, A + "head_count_kv": 1,
    A + "key_length": 8, A + "layer_norm_rms_epsilon": 1e-6, R + "dimension_count": 8,
    R + "freq_base": 5e5, R + "scaling.type": "yarn", R + "scaling.factor": 4.0,
    R + "scale_linear": 4.0, A + "sliding_window": 16, A + "sliding_window_pattern": [True, False],
    A + "causal": False, "ARCH.nextn_predict_layers": 1, R + "scaling.attn_factor": 1.5,
    "ARCH.expert_count": 8, "ARCH.expert_used_count": 2, "ARCH.expert_group_count": 2,
    A + "value_length": 8, "ARCH.embedding_length_out": 64, "ARCH.vocab_size": 266,
    "ARCH.expert_group_used_count": 1, "ARCH.pooling_type": 1,
    "ARCH.classifier.output_labels": ["yes", "no"], R + "scaling.finetuned": True,
    R + "scaling.original_context_length": 16, R + "scaling.alpha": 2.0, A + "key_length_swa": 4,
    A + "value_length_swa": 4, R + "dimension_count_swa": 4, T + "model": "t5", T + "pre": "qwen2",
    T + "tokens": [*BPE[T + "tokens"][:-1], "é"], T + "token_type": [1] * 267,
    T + "scores": [0.0] * 263 + [-9.0, 0.0], T + "merges": ["h e"], T + "bos_token_id": 257,
    T + "eos_token_id": 257, T + "eot_token_id": 257, T + "eom_token_id": 257,
    T + "add_bos_token": False, T + "add_eos_token": True, T + "add_space_prefix": False,
    "tokenizer.chat_template": "{{ 1 }}", T + "suppress_tokens": [5], T + "unknown_token_id": 5,
    T + "padding_token_id": 5, T + "mask_token_id": 5, T + "seperator_token_id": 5,
    T + "add_sep_token": True, T + "remove_extra_whitespaces": True,
    T + "precompiled_charsmap": [1, 2], T + "token_type_count": 2, T + "normalizer.lowercase": True,
    T + "normalizer.strip_accents": True, "tokenizer.chat_template.tool_use": "{{ 1 }}",
    "tokenizer.chat_template.rerank": "{{ 1 }}", "general.architecture": "mamba",
    "general.alignment": 64, "general.name": "another", "general.file_type": 7, "split.no": 1,
    "split.count": 3, "split.tensors.count": 5, S + "sequence": "top_k;temp", S + "top_k": 3,
    S + "top_p": 0.5, S + "min_p": 0.5, S + "xtc_probability": 0.5, S + "xtc_threshold": 0.1,
    S + "temp": 0.1, S + "penalty_last_n": 64, S + "penalty_repeat": 1.5, S + "mirostat": 2,
    S + "mirostat_tau": 5.0, S + "mirostat_eta": 0.1,
    **{f"{T}{name}_token_id": 257 for name in ("prefix", "suffix", "middle")},
    **{f"{T}fim_{name}_token_id": 257 for name in ("pad", "rep", "sep", "pre", "suf", "mid")},
}  # fmt: skip
BEFORE: dict[str, dict[str, Any]] = {
    A + "sliding_window_pattern": {A + "sliding_window": 16},
    A + "value_length": {A + "value_length": 16},
    "ARCH.embedding_length_out": {"ARCH.embedding_length_out": 32},
    "ARCH.vocab_size": {"ARCH.vocab_size": 267},
    **dict.fromkeys(PARTS, PARTS),
}


def made(path: Path, architecture: str, values: dict[str, Any]) -> Path:
    """A file of `architecture` without tensors, and its second part where it has parts."""
    keys = {k.replace("ARCH.", f"{architecture}."): v for k, v in values.items()}
    write(path, keys=keys, arch=keys.pop("general.architecture", architecture))
    if "split.count" in values and "00001" in path.name:
        of_second = values | {"split.no": 1, "split.count": 2}
        made(path.with_name(path.name.replace("00001", "00002")), architecture, of_second)
    return path


def facts(file: GGUFFile) -> list[Any]:
    """All that a file without tensors decides."""
    tokenizer = load_tokenizer(file)
    ids = tokenizer.encode(TEXT)
    return [
        read_hparams(file), file.alignment, file.get(chat.KEY, str, ""), ids,
        tokenizer.decode(ids), tokenizer.bos_id, tokenizer.eos_id, tokenizer.eog_ids,
    ]  # fmt: skip


@pytest.fixture
def found(tmp_path):
    """`found(architecture, base, keys)`: facts and the model's name, or the line of a refusal."""

    def look(architecture: str, base: dict[str, Any], keys: dict[str, Any]) -> list[Any] | str:
        path = tmp_path / "m-00001-of-00002.gguf"
        made(path, architecture, SIZES | base | keys)
        try:
            with open_gguf(path) as file:
                return [*facts(file), summary(path).name]
        except ModelFileError as error:
            return str(error)

    return look


@pytest.mark.parametrize(
    ("architecture", "key"), share(itertools.product(ARCHITECTURES, KEYS), every=len(ARCHITECTURES))
)
def test_a_key_does_what_the_table_says(found, key: FileKey, architecture: str):
    base = SPM if key.name in (T + "scores", T + "add_space_prefix") else BPE
    before = BEFORE.get(key.name, {})
    plain = found(architecture, base, before)
    changed = found(architecture, base, before | {key.name: VALUES[key.name]})
    assert isinstance(plain, list) and key.why
    if key.use == Use.HONOURED:
        assert changed != plain
    elif key.use == Use.WITHOUT_EFFECT:
        assert changed == plain
    else:
        assert isinstance(changed, str) and changed.isprintable()
        assert key.name_in(architecture) in changed
        for value in key.neutral or ():
            assert found(architecture, base, before | {key.name: value}) == plain


def test_whatever_is_read_stands_in_the_table(tmp_path):
    asked = set[str]()

    class Noting(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            asked.add(str(key))
            return super().__contains__(key)

        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

    for base in (BPE, SPM):
        with open_gguf(made(tmp_path / "m.gguf", "llama", SIZES | base)) as file:
            file.metadata = Noting(file.metadata)
            facts(file)
    assert len(asked) > 40 and asked <= {key.name_in("llama") for key in KEYS}


def test_sizes_may_be_said_once_for_each_layer(found):
    plain = found("llama", BPE, {})
    for key, size in (("feed_forward_length", 48), ("attention.head_count", 2)):
        assert found("llama", BPE, {f"ARCH.{key}": [size, size]}) == plain
        for sizes in ([size, 2 * size], [size] * 3, [size]):
            line = found("llama", BPE, {f"ARCH.{key}": sizes})
            assert f"llama.{key} has {len(sizes)} sizes, 2 equal ones are supported" in line


TOKENS = [5, 300, 7, 41, 5, 900, 12, 77]


def prefilled(path) -> np.ndarray:
    with wb.Engine.load(path, device="embedded", n_ctx=64, threads=2) as engine:
        return engine.prefill(TOKENS, outputs="all")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_without_effect_leave_every_bit(tiny_model, tmp_path, architecture):
    source = tiny_model(f"tiny-{architecture}", "Q8_0")
    plain, keys = prefilled(source), {}
    for key in KEYS:
        if key.use == Use.WITHOUT_EFFECT:
            keys[key.name_in(architecture)] = VALUES[key.name]
        elif key.neutral:
            keys[key.name_in(architecture)] = key.neutral[0]
    assert len(keys) > 30
    path = edited(source, tmp_path / "m.gguf", keys=keys)
    with open_gguf(path) as file:
        assert keys.keys() <= file.metadata.keys()
    assert np.array_equal(prefilled(path), plain)


def test_a_window_only_we_read_is_said_once(tiny_model, tmp_path, call):
    key = "qwen3.attention.sliding_window"
    path = edited(tiny_model("tiny-qwen3", "Q8_0"), tmp_path / "m.gguf", keys={key: 4})
    flags = ("--tokens", "1,2,3,4,5,6", "-n", 2, "--device", "embedded", "--n-ctx", 64)
    status, _, err = call("run", "-m", path, *flags)
    note = f"{key} = 4 is honoured here; llama.cpp does not read it for architecture qwen3"
    assert status == 0 and err.count(note) == 1 and err.count(key) == 1
