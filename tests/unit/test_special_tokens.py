"""Tokens that are special by their text, whatever type a file gives them."""

from __future__ import annotations

import pytest

from tests.unit.test_tokenizer import bpe_keys, describe, spm_keys
from workbench.model.tokenizer.tokenizer import Tokenizer, load_tokenizer

# llama.cpp's names (`llama_vocab::impl::load`): of ends, and of what fills gaps in code
ENDS = [
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
]  # fmt: skip
NO_ENDS = [
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
    "<|code_prefix|>", "<|prefix|>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>",
    "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>", "<|fim_middle|>",
    "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
    "<|middle|>",
]  # fmt: skip
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


@pytest.fixture
def with_tokens(tmp_path):
    """`with_tokens(kind, {text: type}, **keys)`: a tokenizer that has these tokens, too, the last
    ones; `**keys` may name one of them by its text."""

    def make(kind: str, added: dict[str, int], **named: str) -> Tokenizer:
        base = {"gpt2": bpe_keys, "llama": spm_keys}[kind]()
        texts = [*base["tokens"], *(t for t in added if t not in base["tokens"])]
        types = base["token_type"] + [NORMAL] * (len(texts) - len(base["tokens"]))
        for text, kind_of in added.items():
            types[texts.index(text)] = kind_of
        keys = base | {"tokens": texts, "token_type": types}
        if "scores" in base:
            keys["scores"] = base["scores"] + [-9.0] * (len(texts) - len(base["tokens"]))
        keys |= {f"{key}_token_id": texts.index(text) for key, text in named.items()}
        tokenizer = load_tokenizer(describe(tmp_path / "v.gguf", keys))
        assert tokenizer._tokens == texts
        return tokenizer

    return make


def id_of(tokenizer: Tokenizer, text: str) -> int:
    return tokenizer._ids[text]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("text", [*ENDS, *NO_ENDS])
def test_a_known_text_is_special_though_it_is_typed_normal(with_tokens, kind, text):
    is_special(with_tokens(kind, {text: NORMAL}), text)


@pytest.mark.parametrize("type_", [0, CONTROL, USER_DEFINED, UNUSED])
@pytest.mark.parametrize("text", ["<|im_end|>", "<｜end▁of▁sentence｜>", "[PAD]", "<SUF>"])
def test_a_known_text_is_special_whatever_its_type(with_tokens, text, type_):
    is_special(with_tokens("gpt2", {text: type_}), text)


def is_special(tokenizer: Tokenizer, text: str) -> None:
    i = id_of(tokenizer, text)
    chat = tokenizer.encode(f"hi{text}hey", add_bos=False)
    assert chat.count(i) == 1, "one token wherever it stands"
    assert tokenizer.decode(chat) == tokenizer.decode(chat, special=True).replace(text, "")
    assert tokenizer.piece(i) == b"" and tokenizer.piece(i, special=True) == text.encode()
    assert i not in tokenizer.encode(f"hi{text}hey", add_bos=False, parse_special=False)
    assert (i in tokenizer.eog_ids) == (text in ENDS)


def test_every_known_text_at_once(with_tokens):
    texts = dict.fromkeys([*ENDS, *NO_ENDS], NORMAL)
    del texts["<|tool_response>"], texts["<|call|>"], texts["<|calls|>"]  # see below
    tokenizer = with_tokens("gpt2", texts)
    wanted = {id_of(tokenizer, t) for t in texts if t in ENDS} | {tokenizer.eos_id}
    assert tokenizer.eog_ids == wanted


@pytest.mark.parametrize("text", ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"])
@pytest.mark.parametrize("type_", [NORMAL, CONTROL])
def test_texts_that_are_always_shown(with_tokens, text, type_):
    tokenizer = with_tokens("gpt2", {text: type_})
    i = id_of(tokenizer, text)
    assert i in tokenizer.encode(f"h{text}", parse_special=False)
    assert tokenizer.piece(i) == text.encode() and i not in tokenizer.eog_ids


@pytest.mark.parametrize(
    ("text", "others", "ends"),
    [
        ("<|end|>", ["<|return|>", "<|call|>"], False),
        ("<|end|>", ["<|return|>", "<|calls|>"], False),
        ("<|end|>", ["<|flush|>", "<|calls|>"], False),
        ("<|end|>", ["<|flush|>", "<|call|>"], False),
        ("<|end|>", ["<|return|>", "<|flush|>"], True),
        ("<|end|>", ["<|call|>", "<|calls|>"], True),
        ("</s>", ["<|tool_response>"], False),
        ("</s>", ["<turn|>"], True),
    ],
)
def test_what_is_no_end_beside_others(with_tokens, text, others, ends):
    tokenizer = with_tokens("gpt2", dict.fromkeys([text, *others], CONTROL))
    i = id_of(tokenizer, text)
    assert (i in tokenizer.eog_ids) == ends
    assert tokenizer.eog_ids >= {id_of(tokenizer, other) for other in others}
    assert tokenizer.piece(i) == (b"" if ends else text.encode())  # else printed as it is


@pytest.mark.parametrize(
    ("key", "text"),
    [("fim_pad", "<|fim_pad|>"), ("fim_rep", "<reponame>"), ("fim_sep", "<|file_sep|>")],
)
def test_a_key_that_names_the_token_comes_before_its_text(with_tokens, key, text):
    tokenizer = with_tokens("gpt2", {text: NORMAL, "<other>": CONTROL}, **{key: "<other>"})
    assert id_of(tokenizer, "<other>") in tokenizer.eog_ids
    assert id_of(tokenizer, text) not in tokenizer.eog_ids
    assert tokenizer.piece(id_of(tokenizer, text)) == text.encode()
