"""A prompt as the beginning of its own answer (`echo` of /v1/completions)."""

from __future__ import annotations

from functools import cached_property

from workbench.server.text import TokenTexts
from workbench.server.wire.messages import Logprobs


class Echo:
    """A prompt that its answer begins with.

    tokens: the prompt's ids.
    asked: the request's text; None where the request has ids.
    add_bos: as given to the tokenizer with a text.
    logprobs: of each token except the first, if the request asks for them; they come with the
    steps.
    """

    def __init__(
        self,
        texts: TokenTexts,
        tokens: list[int],
        asked: str | None,
        add_bos: bool | None = None,
    ):
        self.tokens, self.logprobs = tokens, list[Logprobs]()
        self._texts, self._asked, self._add_bos = texts, asked, add_bos

    @property
    def text(self) -> str:
        """The request's text; of ids their text, with the names of control tokens."""
        return self._decoded[0] if self._asked is None else self._asked

    @property
    def offsets(self) -> list[int]:
        """For each token the characters of `text` before it."""
        return self._decoded[1]

    @cached_property
    def _decoded(self) -> tuple[str, list[int]]:
        """Text and offsets, without the tokens that the tokenizer added to the text."""
        before = after = 0
        if self._asked is not None:
            before, after = self._texts.tokenizer.n_added(self._add_bos)
        decoder = self._texts.measuring(prompt=True)
        own = self.tokens[before : len(self.tokens) - after]
        text = "".join(map(decoder.feed, own)) + decoder.flush()
        return text, [0] * before + decoder.offsets + [len(text)] * after
