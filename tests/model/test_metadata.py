"""The table of metadata keys: every key of it is set in a file, and the file does what it says."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

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


class Sample(NamedTuple):
    """What a file gets, and what the file has that it is compared with."""

    after: dict[str, Any]
    before: dict[str, Any]
    base: dict[str, Any] = BPE


def one(key: str, value: Any, base: dict[str, Any] = BPE) -> dict[str, Sample]:
    return {key: Sample({key: value}, {}, base)}


PARTS = {"split.no": 0, "split.count": 2, "split.tensors.count": 0}
A, R, S = "ARCH.attention.", "ARCH.rope.", "general.sampling."
SAMPLES: dict[str, Sample] = {
    **one("ARCH.context_length", 65), **one("ARCH.embedding_length", 64),
    **one("ARCH.block_count", 3), **one("ARCH.feed_forward_length", 64),
    **one(A + "head_count", 4), **one(A + "head_count_kv", 1), **one(A + "key_length", 8),
    **one(A + "layer_norm_rms_epsilon", 1e-6), **one(R + "dimension_count", 8),
    **one(R + "freq_base", 5e5), **one(R + "scaling.type", "yarn"),
    **one(R + "scaling.factor", 4.0), **one(R + "scale_linear", 4.0),
    **one(A + "sliding_window", 16),
    A + "sliding_window_pattern": Sample(
        {A + "sliding_window": 16, A + "sliding_window_pattern": [True, False]},
        {A + "sliding_window": 16},
    ),
    **one(A + "causal", False), **one("ARCH.nextn_predict_layers", 1),
    **one(R + "scaling.attn_factor", 1.5), **one("ARCH.expert_count", 8),
    **one("ARCH.expert_used_count", 2), **one("ARCH.expert_group_count", 2),
    A + "value_length": Sample({A + "value_length": 8}, {A + "value_length": 16}),
    "ARCH.embedding_length_out": Sample(
        {"ARCH.embedding_length_out": 64}, {"ARCH.embedding_length_out": 32}
    ),
    "ARCH.vocab_size": Sample({"ARCH.vocab_size": 266}, {"ARCH.vocab_size": 267}),
    **one("ARCH.expert_group_used_count", 1), **one("ARCH.pooling_type", 1),
    **one("ARCH.classifier.output_labels", ["yes", "no"]), **one(R + "scaling.finetuned", True),
    **one(R + "scaling.original_context_length", 16), **one(R + "scaling.alpha", 2.0),
    **one(A + "key_length_swa", 4), **one(A + "value_length_swa", 4),
    **one(R + "dimension_count_swa", 4),
    **one(T + "model", "t5"), **one(T + "pre", "qwen2"),
    **one(T + "tokens", [*BPE[T + "tokens"][:-1], "é"]), **one(T + "token_type", [1] * 267),
    **one(T + "scores", [0.0] * 263 + [-9.0, 0.0], SPM), **one(T + "merges", ["h e"]),
    **one(T + "bos_token_id", 257), **one(T + "eos_token_id", 257),
    **one(T + "eot_token_id", 257), **one(T + "eom_token_id", 257),
    **{key: sample for name in ("fim_pad", "fim_rep", "fim_sep", "fim_pre", "fim_suf", "fim_mid",
                                "prefix", "suffix", "middle")
       for key, sample in one(f"{T}{name}_token_id", 257).items()},
    **one(T + "add_bos_token", False), **one(T + "add_eos_token", True),
    **one(T + "add_space_prefix", False, SPM), **one("tokenizer.chat_template", "{{ 1 }}"),
    **one(T + "suppress_tokens", [5]), **one(T + "unknown_token_id", 5),
    **one(T + "padding_token_id", 5), **one(T + "mask_token_id", 5),
    **one(T + "seperator_token_id", 5), **one(T + "add_sep_token", True),
    **one(T + "remove_extra_whitespaces", True), **one(T + "precompiled_charsmap", [1, 2]),
    **one(T + "token_type_count", 2), **one(T + "normalizer.lowercase", True),
    **one(T + "normalizer.strip_accents", True),
    **one("tokenizer.chat_template.tool_use", "{{ 1 }}"),
    **one("tokenizer.chat_template.rerank", "{{ 1 }}"),
    **one("general.architecture", "mamba"), **one("general.alignment", 64),
    **one("general.name", "another"), **one("general.file_type", 7),
    "split.no": Sample(PARTS | {"split.no": 1}, PARTS),
    "split.count": Sample(PARTS | {"split.count": 3}, PARTS),
    "split.tensors.count": Sample(PARTS | {"split.tensors.count": 5}, PARTS),
    **one(S + "sequence", "top_k;temp"), **one(S + "top_k", 3), **one(S + "top_p", 0.5),
    **one(S + "min_p", 0.5), **one(S + "xtc_probability", 0.5), **one(S + "xtc_threshold", 0.1),
    **one(S + "temp", 0.1), **one(S + "penalty_last_n", 64), **one(S + "penalty_repeat", 1.5),
    **one(S + "mirostat", 2), **one(S + "mirostat_tau", 5.0), **one(S + "mirostat_eta", 0.1),
}  # fmt: skip


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


def test_every_key_has_a_sample():
    assert {key.name for key in KEYS} == set(SAMPLES) and len(KEYS) == len(SAMPLES)
    assert all(key.why for key in KEYS)


@pytest.mark.parametrize(
    ("architecture", "key"), share(itertools.product(ARCHITECTURES, KEYS), every=len(ARCHITECTURES))
)
def test_a_key_does_what_the_table_says(found, key: FileKey, architecture: str):
    after, before, base = SAMPLES[key.name]
    plain, changed = (found(architecture, base, keys) for keys in (before, after))
    assert isinstance(plain, list)
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
            keys[key.name_in(architecture)] = SAMPLES[key.name].after[key.name]
        elif key.neutral:
            keys[key.name_in(architecture)] = key.neutral[0]
    assert len(keys) > 30
    path = edited(source, tmp_path / "m.gguf", keys=keys)
    with open_gguf(path) as file:
        assert keys.keys() <= file.metadata.keys()
    assert np.array_equal(prefilled(path), plain)


@pytest.mark.parametrize(
    "command",
    [("run", "--tokens", "1,2,3", "-n", 2), ("bench", "-p", 8, "-n", 0), ("serve", "--port", 0)],
)
def test_every_command_refuses_by_one_line(tiny_model, tmp_path, call, command):
    keys = {"qwen3.attention.causal": False}
    path = edited(tiny_model("tiny-qwen3", "Q8_0"), tmp_path / "m.gguf", keys=keys)
    status, out, err = call(*command, "--device", "embedded", "-m", path)
    assert (status, out) == (1, "") and err == (
        f"error: {path}: qwen3.attention.causal = False is not supported: attention to later "
        "tokens is not built; use another model\n"
    )


def test_a_window_only_we_read_is_said_once(tiny_model, tmp_path, call):
    key = "qwen3.attention.sliding_window"
    path = edited(tiny_model("tiny-qwen3", "Q8_0"), tmp_path / "m.gguf", keys={key: 4})
    flags = ("--tokens", "1,2,3,4,5,6", "-n", 2, "--device", "embedded", "--n-ctx", 64)
    status, _, err = call("run", "-m", path, *flags)
    note = f"{key} = 4 is honoured here; llama.cpp does not read it for architecture qwen3"
    assert status == 0 and err.count(note) == 1 and err.count(key) == 1
