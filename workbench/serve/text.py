"""Tokens to text: whole answers at once, or as they come; and where a stop text begins.

`TokenTexts.text` is the fast twin of `model.tokenizer.StreamDecoder`: one join of byte strings in
place of a call for each token.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from workbench.model.tokenizer import Tokenizer


class TokenTexts:
    """The bytes of each token of a vocabulary, looked up once. longest: bytes of the longest one,
    also of those that a text names, as `<|end_of_text|>`."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.bytes = [tokenizer.piece(i) for i in range(tokenizer.n_vocab)]
        self.longest = max(len(self.shown(i)) for i in range(tokenizer.n_vocab))
        # after these, and after nothing else, a tokenizer with prefix spaces drops one
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


class TokenDecoder:
    """Text from tokens that come one at a time; never half a character."""

    __slots__ = ("_decode", "_pieces", "_restarted", "_restarts")

    def __init__(self, texts: TokenTexts):
        self._pieces, self._restarts = texts.bytes, texts.restarts
        self._restarted = False
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token: int) -> str:
        """What is certain now: bytes of an unfinished character are held."""
        piece = self._pieces[token]
        if self._restarts:
            if self._restarted and token not in self._restarts:
                piece = piece.removeprefix(b" ")
            self._restarted = token in self._restarts
        return self._decode(piece)

    def flush(self) -> str:
        return self._decode(b"", True)


class StopSearch:
    """Finds the first of several texts in a text that comes in parts.

    What may be the beginning of a stop text is held back until it is known. found: the stop text,
    once one was found, and found_at: characters before it; the text ends there.
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
    def holds(self) -> bool:
        """Whether text is held back, or a stop text was found."""
        return bool(self._held) or self.found_at is not None

    @property
    def n_given(self) -> int:
        """Characters given out."""
        return self._taken

    def feed(self, text: str) -> str:
        """The text that can be given out now. Nothing comes behind a stop text."""
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
        """What was held, where no more comes."""
        out, self._held = self._held, ""
        self._taken += len(out)
        return out

    def _possible(self, text: str) -> int:
        """Length of the longest end of `text` that a stop text begins with."""
        for n in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-n:]
            if any(stop.startswith(end) for stop in self._stops):
                return n
        return 0
