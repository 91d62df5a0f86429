"""Text to token ids and back, rebuilt from a GGUF file's own metadata.

`tokenizer.ggml.model` names the kind: `gpt2` is byte-level BPE (run by the `tokenizers` package),
`llama` is SentencePiece BPE (run by `sentencepiece`). Both packages are imported when a tokenizer
is built, not with this module.

First, control and user-defined tokens are cut out of the text. Each becomes one token wherever its
text stands, the longest first, as in llama.cpp. `decode` gives back the encoded text.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from workbench.common.errors import ModelFileError, UsageError
from workbench.model.gguf.file import GGUFFile, open_gguf
from workbench.model.gguf.metadata import TOKENIZER_KEYS, refuse
from workbench.model.gguf.walk import shown
from workbench.model.tokenizer.pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from workbench.model.tokenizer.special_tokens import (
    BYTE,
    CONTROL,
    END_KEYS,
    NORMAL,
    ROLES,
    UNKNOWN,
    USER_DEFINED,
    special_tokens,
)
from workbench.model.tokenizer.vocabulary import check_vocabulary

_KEY = "tokenizer.ggml."
_REWRITE = "convert the model again with a current converter"
_NAMED = (*END_KEYS, *(key for role in ROLES for key in role.keys))  # keys of token ids
LONG_TEXT = 1 << 16  # characters; more are tokenised in pieces

# --- every tokenizer -----------------------------------------------------------------


class Tokenizer:
    """Text to ids and back. `None` stands for a special token that the file does not name.

    This class has everything except the merging itself: special tokens, ends, pieces.

    eog_ids: tokens that end generation.
    space_prefix: whether `encode` puts a space before each text.
    """

    def __init__(self, gguf: GGUFFile, kind: str):
        self._path, self._file = shown(gguf.path), gguf.path
        tokens = gguf.get(_KEY + "tokens", list)
        n = self.n_vocab = len(tokens)
        if n == 0 or not all(isinstance(t, str) for t in tokens):
            raise self._bad("tokens", "is no list of strings, or an empty one")
        tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(tokens)]
        self._ids = {token: i for i, token in enumerate(tokens)}
        if len(self._ids) < n:
            twice = next(t for i, t in enumerate(tokens) if self._ids[t] != i)
            raise self._bad("tokens", f"holds {shown(twice)!r} twice")
        self._tokens = tokens
        untyped = kind == "gpt2" and _KEY + "token_type" not in gguf.metadata
        self._types = [NORMAL] * n if untyped else self._numbers(gguf, "token_type", (int,))

        spm = kind == "llama"
        if spm and (wrong := [i for i, t in enumerate(self._types) if not NORMAL <= t <= BYTE]):
            what = f"holds {self._types[wrong[0]]} at {wrong[0]}, which is no type"
            raise self._bad("token_type", what)
        self.bos_id = gguf.get(_KEY + "bos_token_id", int, 1 if spm and n > 1 else None)
        self.eos_id = gguf.get(_KEY + "eos_token_id", int, 2 if spm and n > 2 else None)
        named = {key: gguf.get(_KEY + key, int, None) for key in _NAMED}
        named["eos_token_id"] = self.eos_id
        special = special_tokens(self._ids, {k: i for k, i in named.items() if i is not None})
        self.eog_ids = special.ends
        for i, known in special.types.items():
            if self._types[i] not in (UNKNOWN, BYTE):
                self._types[i] = known

        specials = [i for i, t in enumerate(self._types) if t in (UNKNOWN, CONTROL, USER_DEFINED)]
        specials.sort(key=lambda i: len(tokens[i].encode()), reverse=True)
        self._specials = [(tokens[i], i) for i in specials]
        self._literal = frozenset(specials)
        self._silent = frozenset(i for i in specials if self._types[i] != USER_DEFINED)

        pre = PRE_TOKENIZERS.get(gguf.get(_KEY + "pre", str, "default"))
        default = self.bos_id is not None and (spm or (pre is not None and pre.add_bos))
        self._add_bos = gguf.get(_KEY + "add_bos_token", bool, default)
        self._add_eos = gguf.get(_KEY + "add_eos_token", bool, False)
        for key, wanted, found in (
            ("add_bos_token", self._add_bos, self.bos_id),
            ("add_eos_token", self._add_eos, self.eos_id),
        ):
            if wanted and found is None:
                raise self._bad(key, "asks for a token that the file does not name")
        self.space_prefix = spm and gguf.get(_KEY + "add_space_prefix", bool, True)
        self._encode_text, self._normal_piece = _ENCODERS[kind](self, gguf)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the path of the file; unpickling reads the file again."""
        return _load_from, (self._file,)

    def encode(
        self, text: str, add_bos: bool | None = None, parse_special: bool = True
    ) -> list[int]:
        """Token ids of `text`. Lone surrogates become `?`.

        add_bos: True: BOS comes first. False: no token is added. None: as the file says, EOS at the
            end included.
        parse_special: False: the names of control tokens are text.
        Other threads can run meanwhile: the packages release Python's lock. Raises UsageError for
        add_bos=True with a model that has no BOS.
        """
        if add_bos and self.bos_id is None:
            raise UsageError(f"{self._path} names no BOS token; leave add_bos unset")
        text = text.encode("utf-8", "replace").decode("utf-8")
        before, after = self.n_added(add_bos)
        ids: list[int] = [self.bos_id] * before  # type: ignore[list-item]  # checked
        for part in self._parts(text, parse_special):
            if isinstance(part, int):
                ids.append(part)
            elif self.space_prefix and (not ids or self.starts_text(ids[-1])):
                ids += self._encode_text(" " + part)
            else:
                ids += self._encode_text(part)
        return ids + [self.eos_id] * after  # type: ignore[list-item]

    def n_added(self, add_bos: bool | None = None) -> tuple[int, int]:
        """How many ids `encode` adds before a text's own ids, and after them."""
        if add_bos is None:
            return int(self._add_bos), int(self._add_eos)
        return int(add_bos), 0

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. Control tokens print nothing
        unless `special`. Raises UsageError for an id outside the vocabulary."""
        stream = StreamDecoder(self, special=special, at_start=True)
        return "".join([stream.feed(i) for i in ids]) + stream.flush()

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of one token, leading space included; see `decode`."""
        if not 0 <= token < self.n_vocab:
            raise UsageError(f"token id {token} is not in 0..{self.n_vocab - 1}, the vocabulary")
        if token in self._literal:
            shown = special or token not in self._silent
            return self._tokens[token].encode() if shown else b""
        return self._normal_piece(token)

    def starts_text(self, token: int) -> bool:
        """Whether a new text begins after this token, so that a prefix space is not part of it."""
        return token in self._literal

    def _parts(self, text: str, parse_special: bool) -> Iterator[str | int]:
        """Texts and special token ids, in order. The longest special token is cut out first over
        the whole text, not the leftmost: llama.cpp's order, which decides where two tokens
        overlap."""
        parts: list[str | int] = [text] if text else []
        for token, i in self._specials:
            if token in text and (parse_special or i not in self._silent):
                parts = [p for part in parts for p in _cut(part, token, i)]
        yield from parts

    def _numbers(self, gguf: GGUFFile, name: str, types: tuple[type, ...]) -> list[Any]:
        """A metadata array with one number for each token."""
        values = gguf.get(_KEY + name, list)
        if not all(isinstance(v, types) for v in values):
            raise self._bad(name, f"holds more than {' and '.join(t.__name__ for t in types)}")
        return values

    def _bad(self, name: str, what: str) -> ModelFileError:
        return ModelFileError(f"{self._path}: metadata key '{_KEY}{name}' {what}; {_REWRITE}")


class StreamDecoder:
    """Text from ids that come one at a time; never half a UTF-8 character.

    `feed` returns the text that is certain. Bytes of an unfinished character are held back until
    the character is complete or is found not to be UTF-8. `flush` ends the stream.

    at_start: True: the first id begins a text, as in `decode`. False: the ids continue a prompt, as
        in generation.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False, at_start: bool = False):
        self._tokenizer = tokenizer
        self._special = special
        self._at_start = at_start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        piece = self._tokenizer.piece(token, self._special)
        if self._tokenizer.starts_text(token):
            self._at_start = True
        else:
            if self._at_start and self._tokenizer.space_prefix:
                piece = piece.removeprefix(b" ")
            self._at_start = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


def load_tokenizer(gguf: GGUFFile) -> Tokenizer:
    """The tokenizer that `gguf` describes.

    Raises ModelFileError where the description is missing or inconsistent, or names an unknown kind
    or pre-tokenizer; where the file has more or fewer tokens than rows of the embedding
    (`check_vocabulary`); and for keys that are refused (`gguf/metadata.py`).
    """
    kind = gguf.get(_KEY + "model", str)
    if kind not in _ENCODERS:
        raise ModelFileError(
            f"{shown(gguf.path)}: tokenizer {shown(kind)!r} (metadata key '{_KEY}model') is not "
            f"known; use --tokens with ids, or a model with one of {', '.join(_ENCODERS)}"
        )
    check_vocabulary(gguf)
    refuse(gguf, gguf.metadata.get("general.architecture", ""), TOKENIZER_KEYS)
    return Tokenizer(gguf, kind)


def _load_from(path: Path) -> Tokenizer:
    with open_gguf(path) as file:
        return load_tokenizer(file)


def _cut(part: str | int, token: str, i: int) -> Iterator[str | int]:
    """The pieces of a text between occurrences of `token`, with its id `i` between them."""
    if isinstance(part, int):
        yield part
        return
    for n, text in enumerate(part.split(token)):
        if n:
            yield i
        if text:
            yield text


# No word of any pattern of `PRE_TOKENIZERS` reaches over such a place.
_WORD_ENDS = re.compile("(?<=[A-Za-z])(?= [A-Za-z])")


def _pieces(text: str, least: int) -> Iterator[str]:
    """The text in pieces, cut where words end. least: characters of every piece except the last, 1
    or more."""
    at = 0
    while (found := _WORD_ENDS.search(text, at + least)) is not None:
        yield text[at : found.start()]
        at = found.start()
    yield text[at:]


# --- the two kinds ---------------------------------------------------------------------------

# The two functions of a kind: text without special tokens -> ids; a normal token -> its bytes.
_Codec = tuple[Callable[[str], list[int]], Callable[[int], bytes]]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for bytes: a visible byte's own, else characters from U+0100."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


def _bpe(base: Tokenizer, gguf: GGUFFile) -> _Codec:
    import tokenizers
    from tokenizers import models

    pre = gguf.get(_KEY + "pre", str, "default")
    split = pre_tokenizer(pre)
    merges = []
    for rank, merge in enumerate(gguf.get(_KEY + "merges", list)):
        # The first space may itself be a token's text, so it is looked for from index 1.
        cut = merge.find(" ", 1) if isinstance(merge, str) else -1
        if cut < 0:
            raise base._bad(
                "merges", f"holds {shown(merge)!r} at {rank}, which is no pair of tokens"
            )
        pair = merge[:cut], merge[cut + 1 :]
        for text in (*pair, "".join(pair)):
            if text not in base._ids:
                raise base._bad("merges", f"merges to or from {shown(text)!r}, which is no token")
        merges.append(pair)
    ignore = PRE_TOKENIZERS[pre].ignore_merges
    bpe = tokenizers.Tokenizer(models.BPE(base._ids, merges, ignore_merges=ignore))
    bpe.pre_tokenizer = split
    alphabet = _byte_alphabet()

    def piece(token: int) -> bytes:
        text = base._tokens[token]
        try:
            return bytes([alphabet[c] for c in text])
        except KeyError:  # the token is not written in the byte alphabet: its text itself
            return text.encode()

    def encode(text: str) -> list[int]:
        # a batch, as that releases Python's lock; in pieces, as each token takes 300 bytes there
        ids: list[int] = []
        for part in _pieces(text, LONG_TEXT):
            ids += bpe.encode_batch_fast([part], add_special_tokens=False)[0].ids
        return ids

    return encode, piece


def _spm(base: Tokenizer, gguf: GGUFFile) -> _Codec:
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    pb2: Any = sentencepiece_model_pb2
    scores = base._numbers(gguf, "scores", (float, int))
    proto = pb2.ModelProto()
    bytes_of: dict[int, bytes] = {}
    for i, (text, score, kind) in enumerate(zip(base._tokens, scores, base._types, strict=True)):
        if not math.isfinite(score):
            raise base._bad("scores", f"holds {score} at {i}")
        if kind == BYTE:
            byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", text)
            if byte is None:
                raise base._bad(
                    "tokens", f"holds {shown(text)!r} at {i} as a byte token, not <0x..>"
                )
            bytes_of[i] = bytes.fromhex(byte[1])
        proto.pieces.add(piece=text, score=score, type=kind)
    if base._types.count(UNKNOWN) != 1:
        raise base._bad("token_type", f"names {base._types.count(UNKNOWN)} unknown tokens, not 1")
    proto.trainer_spec.model_type = pb2.TrainerSpec.BPE
    proto.trainer_spec.byte_fallback = len(set(bytes_of.values())) == 256
    proto.trainer_spec.unk_id = base._types.index(UNKNOWN)
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = (
        False  # `encode` adds the prefix, after special tokens too
    )
    proto.normalizer_spec.remove_extra_whitespaces = False
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(proto.SerializeToString())
    except RuntimeError as error:
        raise base._bad("tokens", f"makes no SentencePiece model ({error})") from None

    def piece(token: int) -> bytes:
        return bytes_of.get(token) or base._tokens[token].replace("▁", " ").encode()

    return processor.EncodeAsIds, piece


_ENCODERS: dict[str, Callable[[Tokenizer, GGUFFile], _Codec]] = {"gpt2": _bpe, "llama": _spm}
