"""Tokenizers from GGUF metadata: against the packages' own, round trips, specials, bad metadata."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, trainers

from tests.edited import edited
from tests.model.gguf_files import write
from tests.profiles import examples
from workbench.common.errors import ModelFileError, UsageError
from workbench.model.decoder import Model
from workbench.model.gguf.file import open_gguf
from workbench.model.synth.vocab import corpus
from workbench.model.tokenizer import tokenizer as tokenizer_module
from workbench.model.tokenizer.pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from workbench.model.tokenizer.tokenizer import StreamDecoder, load_tokenizer

TEXTS = [
    "", " ", "Hello world", "  two  and   three ", "\n\n\tx\r\n ", "1234567 89,012.5",
    "don't DON'T we've", "灯台の明かり 等待", "Смотритель é e\u0301", "🌊⛵ 👩‍🔧", "\x00\x01",
    "<tag/> [x] {y}", "a" * 100, corpus(),
]  # fmt: skip


def describe(path, values: dict[str, Any]):
    """An open GGUF file that holds nothing but these `tokenizer.ggml.*` keys."""
    return open_gguf(write(path, keys={f"tokenizer.ggml.{k}": v for k, v in values.items()}))


BYTE_TOKENS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
SPM_BYTES = [f"<0x{b:02X}>" for b in range(256)]


def bpe_keys(**changes: Any) -> dict[str, Any]:
    """A BPE vocabulary: bytes, two merged tokens, two control tokens, one user-defined."""
    keys: dict[str, Any] = {
        "model": "gpt2", "pre": "llama-bpe", "merges": ["h e", "he y"],
        "tokens": [*BYTE_TOKENS, "he", "hey", "<s>", "<s><s>", "<tool>"],
        "token_type": [1] * 258 + [3, 3, 4], "bos_token_id": 258, "eos_token_id": 259,
    }  # fmt: skip
    return {k: v for k, v in (keys | changes).items() if v is not None}


def spm_keys(**changes: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *SPM_BYTES, "▁", "h", "i", "hi", "▁hi"],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * 5,
        "scores": [0.0] * 259 + [-3.0, -4.0, -5.0, -1.0, -2.0],
    }
    return {k: v for k, v in (keys | changes).items() if v is not None}


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "smollm", "default"])
def test_bpe_gives_the_ids_of_its_trained_tokenizer(tmp_path, pre):
    trained, keys = trained_bpe(pre)
    rebuilt = load_tokenizer(describe(tmp_path / "v.gguf", keys))
    for text in TEXTS:
        assert rebuilt.encode(text) == trained.encode(text).ids
        assert rebuilt.decode(rebuilt.encode(text)) == text


def trained_bpe(pre: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """A tokenizer trained on the corpus, and a file's keys for it."""
    trained = tokenizers.Tokenizer(models.BPE(ignore_merges=PRE_TOKENIZERS[pre].ignore_merges))
    trained.pre_tokenizer = pre_tokenizer(pre)
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=BYTE_TOKENS, show_progress=False)
    trained.train_from_iterator([corpus()], trainer)
    merges = json.loads(trained.to_str())["model"]["merges"]
    # no vocabulary of so few tokens has a BOS
    return trained, {
        "model": "gpt2", "pre": pre, "merges": [" ".join(pair) for pair in merges],
        "tokens": [trained.id_to_token(i) for i in range(trained.get_vocab_size())],
        "add_bos_token": False,
    }  # fmt: skip


def test_spm_gives_the_ids_of_its_trained_model(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus().splitlines()), model_writer=model, model_type="bpe",
        vocab_size=600, byte_fallback=True, character_coverage=0.98, num_threads=1, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    n = trained.get_piece_size()
    kinds = [2 * trained.is_unknown(i) or 3 * trained.is_control(i) or 6 * trained.is_byte(i) or 1
             for i in range(n)]  # fmt: skip
    keys = {
        "model": "llama", "token_type": kinds, "tokens": [trained.id_to_piece(i) for i in range(n)],
        "scores": [trained.get_score(i) for i in range(n)],
    }  # fmt: skip
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
def test_a_text_in_pieces_has_the_ids_of_the_whole(tmp_path, monkeypatch, pre):
    tokenizer = load_tokenizer(describe(tmp_path / "v.gguf", trained_bpe(pre)[1]))

    @given(st.text("hey tS'.,12 \n\r\t\u0301é世ー<_$", max_size=60), st.integers(1, 9))
    @settings(max_examples=examples(60))
    def same(text: str, least: int) -> None:
        monkeypatch.setattr(tokenizer_module, "LONG_TEXT", len(text) + 1)
        whole = tokenizer.encode(text)
        monkeypatch.setattr(tokenizer_module, "LONG_TEXT", least)
        assert tokenizer.encode(text) == whole

    same()


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3", "tiny-llama-spm"])
def test_text_survives_the_round_trip(tiny_model, preset):
    tokenizer = load_tokenizer(open_gguf(tiny_model(preset, "Q4_0")))

    @given(st.text(max_size=40))
    @settings(max_examples=examples(60))
    def survives(text: str) -> None:
        text = text.replace("▁", "_")  # SentencePiece's space; not told apart from one
        ids = tokenizer.encode(text, add_bos=False)
        assert all(0 <= i < tokenizer.n_vocab for i in ids)
        assert tokenizer.decode(ids, special=True) == text  # control tokens in the text included

    survives()


def test_special_tokens_in_text_are_one_token_each(tmp_path):
    tokenizer = load_tokenizer(describe(tmp_path / "v.gguf", bpe_keys()))
    assert tokenizer.encode("<s>hey<tool>") == [258, 258, 257, 260]
    # The longest first over the whole text, so "<s><s>" wins although "<s>" stands before it.
    assert tokenizer.encode("<s><s><s>", add_bos=False) == [259, 258]
    assert tokenizer.decode([258, 256, 260]) == "he<tool>"  # user-defined prints, control does not
    assert tokenizer.decode([258, 256, 260], special=True) == "<s>he<tool>"
    # names of control tokens can be text; user-defined tokens are tokens either way
    said = tokenizer.encode("<s><tool>", add_bos=False, parse_special=False)
    assert 258 not in said and said[-1] == 260
    assert tokenizer.decode(said, special=True) == "<s><tool>"


@pytest.mark.parametrize(
    ("add_bos", "changes", "ids"),
    [
        (None, {}, [258, 257]),  # llama-bpe adds BOS where the file is silent
        (None, {"pre": "qwen2"}, [257]), (None, {"add_bos_token": False}, [257]),
        (False, {}, [257]), (True, {"add_bos_token": False}, [258, 257]),
        (None, {"add_eos_token": True}, [258, 257, 259]), (None, {"bos_token_id": None}, [257]),
    ],
)  # fmt: skip
def test_begin_and_end_follow_the_file_unless_told(tmp_path, add_bos, changes, ids):
    tokenizer = load_tokenizer(describe(tmp_path / "v.gguf", bpe_keys(**changes)))
    assert tokenizer.encode("hey", add_bos) == ids
    if tokenizer.bos_id is None:
        with pytest.raises(UsageError, match="no BOS"):
            tokenizer.encode("hey", True)


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-llama-spm"])
def test_stream_decoder_never_prints_half_a_character(tiny_model, preset):
    tokenizer = load_tokenizer(open_gguf(tiny_model(preset, "Q4_0")))
    text = "灯台 🌊👩‍🔧é "
    ids = tokenizer.encode(text, add_bos=False)
    assert len(ids) > len(text)  # characters do fall apart into byte tokens
    stream = StreamDecoder(tokenizer, at_start=True)
    printed = [stream.feed(i) for i in ids]
    assert "".join(printed) == text and "" in printed and stream.flush() == ""
    # A stream that ends within a character says so, and only at the end.
    wave = tokenizer.encode("🌊", add_bos=False)
    assert "�" not in "".join([stream.feed(i) for i in wave[:-1]])
    assert stream.flush() == "�"


def test_a_stream_keeps_the_space_behind_its_prompt(tmp_path):
    tokenizer = load_tokenizer(describe(tmp_path / "v.gguf", spm_keys()))
    assert tokenizer.encode("hi", add_bos=False) == [263]  # "▁hi"
    assert tokenizer.decode([263, 263]) == "hi hi"
    assert StreamDecoder(tokenizer).feed(263) == " hi"
    assert StreamDecoder(tokenizer, at_start=True).feed(263) == "hi"
    assert tokenizer.encode("<s>hi") == [1, 1, 263]  # afresh after a special token
    bare = load_tokenizer(describe(tmp_path / "w.gguf", spm_keys(add_space_prefix=False)))
    assert bare.encode("hi", add_bos=False) == [262]
    assert bare.decode([263]) == " hi"


def test_lone_surrogates_and_ids_outside(tmp_path):
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
        (bpe_keys(pre="glm4"), "pre-tokenizer 'glm4'.*llama-bpe"),
        (bpe_keys(tokens=None), "tokenizer.ggml.tokens"),
        (bpe_keys(tokens=[*BYTE_TOKENS, *"aaaaa"]), "holds 'a' twice"),
        (bpe_keys(token_type=[1, 3]), "token_type' has 2 entries for 261"),
        (bpe_keys(merges=None), "tokenizer.ggml.merges"),
        (bpe_keys(merges=["he"]), "merges' holds 'he' at 0"),
        (bpe_keys(merges=["h e", "e y"]), "merges' merges to or from 'ey'"),
        (bpe_keys(bos_token_id=261), "bos_token_id' is 261, outside"),
        (bpe_keys(bos_token_id=-1), "bos_token_id' is -1, outside"),
        (bpe_keys(eos_token_id="x"), "eos_token_id"),
        (bpe_keys(bos_token_id=None, add_bos_token=True), "add_bos_token' asks"),
        (spm_keys(scores=[0.0]), "scores' has 1 entries for 264"),
        (spm_keys(scores=[float("nan")] * 264), "scores' holds nan at 0"),
        (spm_keys(token_type=[9] * 264), "token_type' holds 9 at 0"),
        (spm_keys(token_type=[1] * 264), "names 0 unknown tokens"),
        (spm_keys(token_type=[2, 3, 3] + [6] * 261), "holds '▁' at 259 as a byte token"),
    ],
)
def test_bad_metadata_is_refused_by_name(tmp_path, keys, named):
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
@settings(max_examples=examples(150))
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
NORMAL, CONTROL = 1, 3


@pytest.fixture
def with_tokens(tmp_path):
    """`with_tokens(kind, {text: type}, **keys)`: a tokenizer that has these tokens, too, the last
    ones, and what gives a text's id; `**keys` may name one of them by its text."""

    def make(kind: str, added: dict[str, int], **named: str):
        keys = {"gpt2": bpe_keys, "llama": spm_keys}[kind]()
        known = dict(zip(keys["tokens"], keys["token_type"], strict=True)) | added
        texts = [*known]
        keys |= {"tokens": texts, "token_type": [*known.values()]}
        if "scores" in keys:
            keys["scores"] += [-9.0] * (len(texts) - len(keys["scores"]))
        keys |= {f"{key}_token_id": texts.index(text) for key, text in named.items()}
        return load_tokenizer(describe(tmp_path / "v.gguf", keys)), texts.index

    return make


SHOWN = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"]  # whatever their type


@pytest.mark.parametrize("type_", [NORMAL, CONTROL])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_known_text_is_special_whatever_its_type(with_tokens, kind, type_):
    texts = dict.fromkeys([*ENDS, *NO_ENDS, *SHOWN], type_)
    del texts["<|tool_response>"], texts["<|call|>"], texts["<|calls|>"]  # see below
    tokenizer, id_of = with_tokens(kind, texts)
    assert tokenizer.eog_ids == {id_of(t) for t in texts if t in ENDS} | {tokenizer.eos_id}
    for text in texts:
        i = id_of(text)
        said = [tokenizer.encode(f"hi{text}hey", add_bos=False, parse_special=p) for p in (1, 0)]
        assert said[0].count(i) == 1, "one token wherever it stands"
        assert (i in said[1]) == (text in SHOWN)
        assert tokenizer.piece(i, special=True) == text.encode()
        assert tokenizer.piece(i) == (text.encode() if text in SHOWN else b"")


@pytest.mark.parametrize(
    ("text", "others", "ends"),
    [
        *(("<|end|>", [one, other], False) for one in ("<|return|>", "<|flush|>")
          for other in ("<|call|>", "<|calls|>")),
        ("<|end|>", ["<|return|>", "<|flush|>"], True),
        ("<|end|>", ["<|call|>", "<|calls|>"], True),
        ("</s>", ["<|tool_response>"], False),
        ("</s>", ["<turn|>"], True),
    ],
)  # fmt: skip
def test_what_is_no_end_beside_others(with_tokens, text, others, ends):
    tokenizer, id_of = with_tokens("gpt2", dict.fromkeys([text, *others], CONTROL))
    assert (id_of(text) in tokenizer.eog_ids) == ends
    assert tokenizer.eog_ids >= set(map(id_of, others))
    assert tokenizer.piece(id_of(text)) == (b"" if ends else text.encode())  # else printed as it is


@pytest.mark.parametrize(
    ("key", "text"),
    [("fim_pad", "<|fim_pad|>"), ("fim_rep", "<reponame>"), ("fim_sep", "<|file_sep|>")],
)
def test_a_key_that_names_a_token_beats_its_text(with_tokens, key, text):
    tokenizer, id_of = with_tokens("gpt2", {text: NORMAL, "<other>": CONTROL}, **{key: "<other>"})
    assert id_of("<other>") in tokenizer.eog_ids and id_of(text) not in tokenizer.eog_ids
    assert tokenizer.piece(id_of(text)) == text.encode()


T, N = "tokenizer.ggml.", 640  # tokens of tiny-llama-spm
SPECIAL = {"bos": N, "eos": N, "eot": N + 1, "eom": (1 << 32) - 1, "unknown": N, "padding": N,
           "seperator": N, "mask": N, "fim_pad": N, "prefix": N}  # fmt: skip
CASES = [
    *((n, {}, f"tensor token_embd.weight has {N} rows for {n} tokens in {T}tokens")
      for n in (N - 124, N - 1, N + 1)),
    (N, {"llama.vocab_size": 32000}, f"'llama.vocab_size' is 32000 for {N} tokens"),
    *((N, {f"{T}{name}_token_id": i}, f"'{T}{name}_token_id' is {i}, outside the vocabulary of {N}")
      for name, i in SPECIAL.items()),
]  # fmt: skip


@pytest.mark.parametrize(("n", "keys", "said"), CASES)
def test_what_does_not_fit_the_tokens_is_refused(tiny_model, tmp_path, n, keys, said):
    """With n tokens, scores and types: the first of a model's own, or made up ones. In one line,
    with which both the engine and the front of a server end."""
    source = tiny_model("tiny-llama-spm", "Q4_0")
    with open_gguf(source) as file:
        for name, more in (("tokens", "more"), ("scores", -1e4), ("token_type", 1)):
            keys = keys | {T + name: (file.get(T + name, list) + [more] * (n - N))[:n]}
    path = edited(source, tmp_path / "m.gguf", keys=keys)
    with pytest.raises(ModelFileError) as by_model:
        Model(path)
    with open_gguf(path) as file, pytest.raises(ModelFileError) as by_tokenizer:
        load_tokenizer(file)
    line = str(by_model.value)
    assert line == str(by_tokenizer.value) and line.isprintable() and line.startswith(str(path))
    assert said in line


def test_a_file_without_tokens_still_opens(tiny_model, tmp_path):
    keys = dict.fromkeys((f"{T}tokens", f"{T}token_type", f"{T}merges"))
    source = tiny_model("tiny-llama", "Q4_0")
    assert Model(edited(source, tmp_path / "m.gguf", keys=keys)).n_vocab == 1024
    path = edited(source, tmp_path / "n.gguf", keys=keys | {"llama.vocab_size": 900})
    with pytest.raises(ModelFileError, match=r"is 900 for 1024 rows of token_embd\.weight"):
        Model(path)
