"""Vocabularies for models that nobody trained: learnt from bundled prose, large ones filled up.

Text survives a round trip through any of them, and generated ids print as words. They are built
anew for each file, the same each time.
"""

import io
import itertools
import json
from typing import Any, NamedTuple

from workbench.common.shipped import shipped
from workbench.model.synth.shapes import Preset
from workbench.model.tokenizer.pretokenizers import pre_tokenizer
from workbench.model.tokenizer.special_tokens import CONTROL, NORMAL, UNUSED, USER_DEFINED

_CORPUS = ("lighthouse.txt", "between_tokens.txt", "odds_and_ends.txt")
_TRAINED = 1000  # tokens learnt from the corpus at most; large vocabularies are filled up

_SYLLABLES = [c + v for c in "bcdfghjklmnpqrstvwxz" for v in "aeiou"]
_LLAMA_BPE_CONTROL = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
_QWEN_CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_QWEN_USER_DEFINED = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


class Vocab(NamedTuple):
    """What the `tokenizer.ggml.*` keys say; ids are positions in `tokens`."""

    model: str  # gpt2 or llama
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    bos: int
    eos: int
    add_bos: bool


def corpus() -> str:
    """The prose that vocabularies are trained on (`data/prompts`, or its copy in a wheel)."""
    folder = shipped("data/prompts", *_CORPUS)
    return "\n".join((folder / name).read_text("utf-8") for name in _CORPUS)


def build_vocab(preset: Preset) -> Vocab:
    """A working vocabulary of exactly preset.n_vocab tokens; the same one every time."""
    if preset.vocab == "spm":
        return _spm_vocab(preset.n_vocab)
    return _bpe_vocab(preset.vocab, preset.n_vocab)


def _bpe_vocab(pre: str, n_vocab: int) -> Vocab:
    llama, large = pre == "llama-bpe", n_vocab > 100_000
    control = _LLAMA_BPE_CONTROL if llama else _QWEN_CONTROL
    user_defined = [] if llama else _QWEN_USER_DEFINED
    if large and llama:  # 256 reserved tokens after 128000 tokens
        n_named = len(control)
        control = control + [f"<|reserved_special_token_{i}|>" for i in range(256 - n_named)]
    # Qwen3 has 151669 tokens; converters pad the list to the embedding's rows.
    n_pad = 267 if large and not llama else 0
    n_text = n_vocab - len(control) - len(user_defined) - n_pad
    tokens, merges = _train_bpe(pre, min(n_text, _TRAINED))
    _fill_bpe(tokens, merges, n_text, every_split=llama)
    types = [NORMAL] * n_text
    tokens += control + user_defined + [f"[PAD{i}]" for i in range(n_vocab - n_pad, n_vocab)]
    types += [CONTROL] * len(control) + [USER_DEFINED] * len(user_defined) + [UNUSED] * n_pad
    bos, eos = n_text, n_text + (1 if llama else 2)
    return Vocab("gpt2", pre, tokens, types, merges, [], bos, eos, llama)


def _train_bpe(pre: str, n_tokens: int) -> tuple[list[str], list[str]]:
    """Byte-level BPE learnt from the corpus: tokens (the 256 bytes first) and merges by rank."""
    import tokenizers
    from tokenizers import models, trainers

    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizer(pre)
    trainer = trainers.BpeTrainer(
        vocab_size=n_tokens,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    trained.train_from_iterator([corpus()], trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]


def _fill_bpe(tokens: list[str], merges: list[str], n_tokens: int, every_split: bool) -> None:
    """Extend both lists in place to `n_tokens` with words of one, two and three syllables.

    Each word is a merge of two earlier tokens, as BPE wants it; the long ones begin with a space
    ("Ġ" in the byte alphabet). every_split: list each way of splitting a word into two tokens, as
    converters from tiktoken do. It gives about two merges a token, as Llama 3 has.
    """
    known = set(tokens)
    for space, length in (("", 1), ("Ġ", 1), ("", 2), ("Ġ", 2), ("Ġ", 3)):
        for word in itertools.product(_SYLLABLES, repeat=length):
            if len(tokens) == n_tokens:
                return
            text = space + "".join(word)
            if text in known:
                continue
            parts = [space, *word] if space else list(word) if length > 1 else list(text)
            cuts = [("".join(parts[:k]), "".join(parts[k:])) for k in range(len(parts) - 1, 0, -1)]
            pairs = [f"{left} {right}" for left, right in cuts if left in known and right in known]
            merges += pairs if every_split else pairs[:1]
            known.add(text)
            tokens.append(text)


def _spm_vocab(n_vocab: int) -> Vocab:
    """A SentencePiece BPE vocabulary with byte fallback; fillers have scores below the trained."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus().splitlines()),
        model_writer=trained,
        model_type="bpe",
        vocab_size=min(n_vocab, _TRAINED),
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    pb2: Any = sentencepiece_model_pb2
    proto = pb2.ModelProto.FromString(trained.getvalue())
    tokens = [piece.piece for piece in proto.pieces]
    types = [piece.type for piece in proto.pieces]
    scores = [piece.score for piece in proto.pieces]
    known, lowest = set(tokens), min(scores)
    words = itertools.product(_SYLLABLES, repeat=3)
    while len(tokens) < n_vocab:
        word = "▁" + "".join(next(words))
        if word not in known:
            tokens.append(word)
            types.append(NORMAL)
            scores.append(lowest - (len(tokens) - len(known)))
    return Vocab("llama", "default", tokens, types, [], scores, 1, 2, True)
