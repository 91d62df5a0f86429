"""Turns tokens into text, at once or as they come, and finds stop texts.

`TokenTexts.text` is the fast twin of `StreamDecoder` of the tokenizer: one join of byte strings in
place of a call for each token.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Sequence

from workbench.model.tokenizer.tokenizer import Tokenizer


class TokenTexts:
    """The bytes of each token of a vocabulary, looked up once. longest: bytes of the longest token,
    names of control tokens as `<|end_of_text|>` included."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.bytes = [tokenizer.piece(i) for i in range(tokenizer.n_vocab)]
        self.longest = max(len(self.shown(i)) for i in range(tokenizer.n_vocab))
        # after these tokens alone, a tokenizer with prefix spaces drops a space
        every = range(tokenizer.n_vocab) if tokenizer.space_prefix else range(0)
        self.restarts = frozenset(filter(tokenizer.starts_text, every))

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens that continue a prompt. Bytes that are no UTF-8 become U+FFFD."""
        if self.restarts and not self.restarts.isdisjoint(tokens):
            decoder = self.decoder()
            return "".join(map(decoder.feed, tokens)) + decoder.flush()
        pieces = self.bytes
        return b"".join([pieces[token] for token in tokens]).decode("utf-8", "replace")

    def shown(self, token: int) -> bytes:
        """The bytes of one token, control tokens with their names."""
        return self.tokenizer.piece(token, special=True)

    def decoder(self) -> TokenDecoder:
        return TokenDecoder(self)

    def measuring(self, prompt: bool = False) -> MeasuringDecoder:
        return MeasuringDecoder(self, prompt)


class TokenDecoder:
    """Text from tokens that come one at a time; never half a character.

    prompt: the tokens begin a text, and control tokens show their names; else they continue a text.
    """

    __slots__ = ("_bytes_of", "_restarted", "_restarts", "_utf8")

    def __init__(self, texts: TokenTexts, prompt: bool = False):
        self._bytes_of = texts.shown if prompt else texts.bytes.__getitem__
        self._restarts = texts.restarts
        self._restarted = prompt and texts.tokenizer.space_prefix
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that is certain now. Bytes of an unfinished character are held back."""
        return self._utf8.decode(self._piece(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)

    def _piece(self, token: int) -> bytes:
        """The bytes that a token adds at this place."""
        piece = self._bytes_of(token)
        restarts = token in self._restarts
        if self._restarted and not restarts:
            piece = piece.removeprefix(b" ")
        self._restarted = restarts
        return piece


class MeasuringDecoder(TokenDecoder):
    """A decoder that knows where each token begins.

    offsets: for each token fed, characters before the character that its first byte belongs to.
    Half a character that the next token does not continue is a character, too: U+FFFD.
    """

    __slots__ = ("_half", "_n", "_said", "offsets")

    def __init__(self, texts: TokenTexts, prompt: bool = False):
        super().__init__(texts, prompt)
        self.offsets: list[int] = []
        self._said: list[bool] = []  # whether the token has bytes at all
        self._n = 0  # characters that are certain
        self._half = b""  # bytes of an unfinished character

    def feed(self, token: int) -> str:
        piece = self._piece(token)
        broken = _broken(self._half + piece[:1]) if piece else 0
        self.offsets.append(self._n + broken)
        self._said.append(bool(piece))
        text = self._utf8.decode(piece)
        self._n += len(text)
        self._half = self._utf8.getstate()[0]
        return text

    def n_before(self, at: int) -> int:
        """How many tokens begin before character `at`, tokens without bytes included."""
        n = bisect_left(self.offsets, at)
        while n < len(self.offsets) and not self._said[n]:
            n += 1
        return n


def _broken(raw: bytes) -> int:
    """How many characters the bytes before the last byte become, if the last byte does not continue
    their character."""
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(raw)
    except UnicodeDecodeError:
        return len(raw[:-1].decode("utf-8", "replace"))
    return 0


class StopSearch:
    """Finds the first of several texts in a text that comes in parts.

    Text that may begin a stop text is held back until that is known.

    found: the stop text, once found.
    found_at: the characters before it; the text ends there.
    """

    __slots__ = ("_firsts", "_held", "_longest", "_stops", "_taken", "found", "found_at")

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops))
        self._firsts = {stop[0] for stop in self._stops}
        self._held = ""
        self._taken = 0  # characters given out
        self.found = ""
        self.found_at: int | None = None

    @property
    def n_given(self) -> int:
        """Characters given out."""
        return self._taken

    def feed(self, text: str) -> str:
        """The text that can be given out now. No text is given out after a stop text."""
        if self.found_at is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(text):  # most texts
            self._taken += len(text)
            return text
        text = self._held + text
        starts = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if starts:
            first, self.found = min(starts)
            out, self._held = text[:first], ""
            self.found_at = self._taken + len(out)
        else:
            held = self._possible(text)
            out, self._held = text[: len(text) - held], text[len(text) - held :]
        self._taken += len(out)
        return out

    def flush(self) -> str:
        """The held text, when no more text comes."""
        out, self._held = self._held, ""
        self._taken += len(out)
        return out

    def _possible(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop text."""
        for n in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-n:]
            if any(stop.startswith(end) for stop in self._stops):
                return n
        return 0
