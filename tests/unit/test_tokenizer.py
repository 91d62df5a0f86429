"""Tokenizers from GGUF metadata: against the packages' own, round trips, specials, bad metadata."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import models, trainers

from tests.profiles import examples
from workbench.common.errors import ModelFileError, UsageError
from workbench.model.gguf.file import open_gguf
from workbench.model.synth.vocab import corpus
from workbench.model.tokenizer import tokenizer as tokenizer_module
from workbench.model.tokenizer.pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from workbench.model.tokenizer.tokenizer import StreamDecoder, load_tokenizer

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  and   three ",
    "\n\n\tx\r\n ",
    "1234567 89,012.5",
    "don't DON'T we've",
    "灯台の明かり 等待",
    "Смотритель é e\u0301",
    "🌊⛵ 👩‍🔧",
    "\x00\x01",
    "<tag/> [x] {y}",
    "a" * 100,
    corpus(),
]


def describe(path, values: dict[str, Any]):
    """An open GGUF file that holds nothing but these `tokenizer.ggml.*` keys."""
    kinds = {str: "string", bool: "bool", int: "int32", float: "float32", list: "array"}
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        getattr(writer, f"add_{kinds[type(value)]}")(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return open_gguf(path)


def byte_tokens() -> list[str]:
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def bpe_keys(**changes: Any) -> dict[str, Any]:
    """A BPE vocabulary: bytes, two merged tokens, two control tokens, one user-defined."""
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": [*byte_tokens(), "he", "hey", "<s>", "<s><s>", "<tool>"],
        "token_type": [1] * 258 + [3, 3, 4],
        "merges": ["h e", "he y"],
        "bos_token_id": 258,
        "eos_token_id": 259,
    }
    return {k: v for k, v in (keys | changes).items() if v is not None}


SPM_BYTES = [f"<0x{b:02X}>" for b in range(256)]


def spm_keys(**changes: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *SPM_BYTES, "▁", "h", "i", "hi", "▁hi"],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * 5,
        "scores": [0.0] * 259 + [-3.0, -4.0, -5.0, -1.0, -2.0],
    }
    return {k: v for k, v in (keys | changes).items() if v is not None}


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "smollm", "default"])
def test_bpe_gives_the_ids_of_the_tokenizer_it_was_rebuilt_from(tmp_path, pre):
    trained, keys = trained_bpe(pre)
    rebuilt = load_tokenizer(describe(tmp_path / "v.gguf", keys))
    for text in TEXTS:
        assert rebuilt.encode(text) == trained.encode(text).ids
        assert rebuilt.decode(rebuilt.encode(text)) == text


def trained_bpe(pre: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """A tokenizer trained on the corpus, and a file's keys for it."""
    trained = tokenizers.Tokenizer(models.BPE(ignore_merges=PRE_TOKENIZERS[pre].ignore_merges))
    trained.pre_tokenizer = pre_tokenizer(pre)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([corpus()], trainer)
    tokens = [trained.id_to_token(i) for i in range(trained.get_vocab_size())]
    merges = [m if isinstance(m, str) else " ".join(m) for m in bpe_merges(trained)]
    # no vocabulary of so few tokens has a BOS
    return trained, {
        "model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges, "add_bos_token": False,
    }  # fmt: skip


def bpe_merges(trained) -> list:
    return json.loads(trained.to_str())["model"]["merges"]


def test_spm_gives_the_ids_of_the_model_it_was_rebuilt_from(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus().splitlines()), model_writer=model, model_type="bpe",
        vocab_size=600, byte_fallback=True, character_coverage=0.98, num_threads=1, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    n = trained.get_piece_size()
    kinds = [
        next((t for t, is_kind in (
            (2, trained.is_unknown), (3, trained.is_control), (6, trained.is_byte),
        ) if is_kind(i)), 1) for i in range(n)
    ]  # fmt: skip
    keys = {
        "model": "llama",
        "tokens": [trained.id_to_piece(i) for i in range(n)],
        "scores": [trained.get_score(i) for i in range(n)],
        "token_type": kinds,
    }
    rebuilt = load_tokenizer(describe(tmp_path / "v.gguf", keys))
    for text in TEXTS:
        assert rebuilt.encode(text, add_bos=False) == trained.encode(text)
        assert rebuilt.decode(rebuilt.encode(text)) == trained.decode(trained.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("llama-bpe", ["It", "'S", " late", ",", " ", "123", "4", "  ", " x", "\n\n", "y"]),
        ("qwen2", ["It", "'S", " late", ",", " ", "1", "2", "3", "4", "  ", " x", "\n\n", "y"]),
        ("gpt-2", ["It", "'", "S", " late", ",", " 1234", "  ", " x", "\n", "\n", "y"]),
        ("smollm", ["It", "'", "S", " late", ",", " ", *"1234", "  ", " x", "\n", "\n", "y"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(pre, words):
    split = pre_tokenizer(pre).pre_tokenize_str("It'S late, 1234   x\n\ny")
    shown = {"Ġ": " ", "Ċ": "\n"}
    assert ["".join(shown.get(c, c) for c in word) for word, _ in split] == words


@pytest.mark.parametrize("pre", {how: name for name, how in PRE_TOKENIZERS.items()}.values())
def test_a_long_text_in_pieces_has_the_ids_that_it_has_whole(tmp_path, monkeypatch, pre):
    tokenizer = load_tokenizer(describe(tmp_path / "v.gguf", trained_bpe(pre)[1]))

    @given(st.text("hey tS'.,12 \n\r\t\u0301é世ー<_$", max_size=60), st.integers(1, 9))
    @hypothesis_settings(max_examples=examples(60))
    def same(text: str, least: int) -> None:
        monkeypatch.setattr(tokenizer_module, "LONG_TEXT", len(text) + 1)
        whole = tokenizer.encode(text)
        monkeypatch.setattr(tokenizer_module, "LONG_TEXT", least)
        assert tokenizer.encode(text) == whole

    same()


def test_pieces_end_where_words_do():
    pieces = [*tokenizer_module._pieces("he hey  h he.\nh 1 h hé h", 1)]
    assert pieces == ["he", " hey  h", " he.\nh 1 h", " hé h"]


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3", "tiny-llama-spm"])
def test_text_survives_the_round_trip(tiny_model, preset):
    tokenizer = load_tokenizer(open_gguf(tiny_model(preset, "Q4_0")))

    @given(st.text(max_size=40))
    @hypothesis_settings(max_examples=examples(60))
    def survives(text: str) -> None:
        text = text.replace("▁", "_")  # SentencePiece's space; not told apart from one
        ids = tokenizer.encode(text, add_bos=False)
        assert all(0 <= i < tokenizer.n_vocab for i in ids)
        assert tokenizer.decode(ids, special=True) == text  # control tokens in the text included

    survives()


def test_special_tokens_in_text_are_one_token_each(tmp_path):
    tokenizer = load_tokenizer(describe(tmp_path / "v.gguf", bpe_keys()))
    h, e, y = (tokenizer.encode(c, add_bos=False)[0] for c in "hey")
    assert tokenizer.encode("<s>hey<tool>") == [258, 258, 257, 260]
    # The longest first over the whole text, so "<s><s>" wins although "<s>" stands before it.
    assert tokenizer.encode("<s><s><s>", add_bos=False) == [259, 258]
    ids = [258, h, e, 260, y]
    assert tokenizer.decode(ids) == "he<tool>y"  # user-defined prints, control does not
    assert tokenizer.decode(ids, special=True) == "<s>he<tool>y"


def test_names_of_control_tokens_can_be_text(tmp_path):
    """User-defined tokens are tokens either way, as in llama.cpp."""
    tokenizer = load_tokenizer(describe(tmp_path / "v.gguf", bpe_keys()))
    text = "<s><tool>"
    assert tokenizer.encode(text, add_bos=False) == [258, 260]
    said = tokenizer.encode(text, add_bos=False, parse_special=False)
    assert 258 not in said and said[-1] == 260
    assert tokenizer.decode(said, special=True) == text


def test_begin_and_end_follow_the_file_unless_told(tmp_path):
    def encode(add_bos=None, **changes):
        keys = bpe_keys(**changes)
        return load_tokenizer(describe(tmp_path / "v.gguf", keys)).encode("hey", add_bos)

    assert encode() == [258, 257]  # llama-bpe adds BOS where the file is silent
    assert encode(pre="qwen2") == [257]
    assert encode(add_bos_token=False) == [257]
    assert encode(add_bos=False) == [257]
    assert encode(add_bos=True, add_bos_token=False) == [258, 257]
    assert encode(add_eos_token=True) == [258, 257, 259]
    assert encode(bos_token_id=None) == [257]
    with pytest.raises(UsageError, match="no BOS"):
        encode(add_bos=True, bos_token_id=None)


def test_ends_of_generation(tmp_path):
    tokens = [*byte_tokens(), "he", "hey", "<s>", "<|im_end|>", "<tool>"]
    keys = bpe_keys(tokens=tokens, eos_token_id=258, eot_token_id=260)
    tokenizer = load_tokenizer(describe(tmp_path / "v.gguf", keys))
    assert tokenizer.eog_ids == {258, 259, 260}  # by key, by text, by key
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.n_vocab) == (258, 258, 261)


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-llama-spm"])
def test_stream_decoder_never_prints_half_a_character(tiny_model, preset):
    tokenizer = load_tokenizer(open_gguf(tiny_model(preset, "Q4_0")))
    text = "灯台 🌊👩‍🔧é "
    ids = tokenizer.encode(text, add_bos=False)
    assert len(ids) > len(text)  # characters do fall apart into byte tokens
    stream = StreamDecoder(tokenizer, at_start=True)
    printed = [stream.feed(i) for i in ids]
    assert "".join(printed) == text
    assert "" in printed
    assert stream.flush() == ""
    # A stream that ends within a character says so, and only at the end.
    stream = StreamDecoder(tokenizer)
    wave = tokenizer.encode("🌊", add_bos=False)
    assert "�" not in "".join([stream.feed(i) for i in wave[:-1]])
    assert stream.flush() == "�"


def test_stream_decoder_keeps_the_space_between_prompt_and_continuation(tmp_path):
    tokenizer = load_tokenizer(describe(tmp_path / "v.gguf", spm_keys()))
    assert tokenizer.encode("hi", add_bos=False) == [263]  # "▁hi"
    assert tokenizer.decode([263, 263]) == "hi hi"
    assert StreamDecoder(tokenizer).feed(263) == " hi"
    assert StreamDecoder(tokenizer, at_start=True).feed(263) == "hi"
    assert tokenizer.encode("<s>hi") == [1, 1, 263]  # afresh after a special token
    bare = load_tokenizer(describe(tmp_path / "w.gguf", spm_keys(add_space_prefix=False)))
    assert bare.encode("hi", add_bos=False) == [262]
    assert bare.decode([263]) == " hi"


def test_spm_without_byte_tokens_has_an_unknown_token(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", "▁", "h", "i"]
    types, scores = [2, 3, 3, 1, 1, 1], [0.0, 0.0, 0.0, -1.0, -2.0, -3.0]
    keys = spm_keys(tokens=tokens, token_type=types, scores=scores)
    tokenizer = load_tokenizer(describe(tmp_path / "v.gguf", keys))
    assert tokenizer.encode("hé", add_bos=False) == [3, 4, 0]


def test_lone_surrogates_and_ids_outside_the_vocabulary(tmp_path):
    tokenizer = load_tokenizer(describe(tmp_path / "v.gguf", bpe_keys()))
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
    for bad in (-1, 261):
        with pytest.raises(UsageError, match=f"token id {bad} is not in 0..260"):
            tokenizer.decode([bad])
    partial = tokenizer.encode("é", add_bos=False)[:1]
    assert tokenizer.decode(partial) == "�"


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (bpe_keys(model=None), "tokenizer.ggml.model"),
        (bpe_keys(model="t5"), "'t5'.*gpt2, llama"),
        (bpe_keys(model=3), "tokenizer.ggml.model"),
        (bpe_keys(pre="glm4"), "pre-tokenizer 'glm4'.*llama-bpe"),
        (bpe_keys(tokens=None), "tokenizer.ggml.tokens"),
        (bpe_keys(tokens="x"), "tokenizer.ggml.tokens"),
        (bpe_keys(tokens=[1, 2]), "tokenizer.ggml.tokens"),
        (
            bpe_keys(tokens=["a", "b", "a"], token_type=[1, 1, 1], bos_token_id=0, eos_token_id=1),
            "holds 'a' twice",
        ),
        (bpe_keys(token_type=[1, 3]), "token_type' has 2 entries for 261"),
        (bpe_keys(token_type=["x"] * 261), "token_type' holds more than int"),
        (bpe_keys(merges=None), "tokenizer.ggml.merges"),
        (bpe_keys(merges=["he"]), "merges' holds 'he' at 0"),
        (bpe_keys(merges=["h e", "e y"]), "merges' merges to or from 'ey'"),
        (bpe_keys(merges=[1, 2]), "merges' holds '1' at 0"),
        (bpe_keys(bos_token_id=261), "bos_token_id' is 261, outside"),
        (bpe_keys(bos_token_id=-1), "bos_token_id' is -1, outside"),
        (bpe_keys(eos_token_id="x"), "eos_token_id"),
        (bpe_keys(bos_token_id=None, add_bos_token=True), "add_bos_token' asks"),
        (bpe_keys(eos_token_id=None, add_eos_token=True), "add_eos_token' asks"),
        (spm_keys(scores=None), "tokenizer.ggml.scores"),
        (spm_keys(scores=[0.0]), "scores' has 1 entries for 264"),
        (spm_keys(scores=[float("nan")] * 264), "scores' holds nan at 0"),
        (spm_keys(token_type=None), "tokenizer.ggml.token_type"),
        (spm_keys(token_type=[9] * 264), "token_type' holds 9 at 0"),
        (spm_keys(token_type=[1] * 264), "names 0 unknown tokens"),
        (spm_keys(token_type=[2] * 264), "names 264 unknown tokens"),
        (spm_keys(token_type=[2, 3, 3] + [6] * 261), "holds '▁' at 259 as a byte token"),
    ],
)
def test_metadata_that_cannot_be_believed_is_refused_by_name(tmp_path, keys, named):
    file = describe(tmp_path / "v.gguf", keys)
    with pytest.raises(ModelFileError, match=named) as caught:
        load_tokenizer(file)
    assert "\n" not in str(caught.value)


VALUES = st.one_of(
    st.integers(-3, 300),
    st.booleans(),
    st.floats(width=32),
    st.text(max_size=6).filter(bool),
    st.lists(st.text(max_size=4), min_size=1, max_size=6),
    st.lists(st.integers(-2, 9), min_size=1, max_size=6),
    st.lists(st.integers(-2, 9), min_size=261, max_size=264),
)
KEYS = sorted({*bpe_keys(), *spm_keys(), "add_bos_token", "add_space_prefix", "eot_token_id"})


@given(st.sampled_from([bpe_keys(), spm_keys()]), st.dictionaries(st.sampled_from(KEYS), VALUES))
@hypothesis_settings(max_examples=examples(150))
def test_any_metadata_loads_or_is_refused(tmp_path_factory, keys, changes):
    file = describe(tmp_path_factory.mktemp("fuzz") / "v.gguf", keys | changes)
    try:
        tokenizer = load_tokenizer(file)
    except ModelFileError as error:
        assert "\n" not in str(error)
    else:
        ids = tokenizer.encode("hey <s>\u00e9")
        assert all(0 <= i < tokenizer.n_vocab for i in ids)
        assert isinstance(tokenizer.decode(ids), str)


def test_importing_the_module_loads_neither_package():
    code = (
        "import sys, workbench.model.tokenizer.tokenizer, workbench.model.synth.models;"
        "print(sorted({'tokenizers', 'sentencepiece', 'gguf', 'tqdm'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
