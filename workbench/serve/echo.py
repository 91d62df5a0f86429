"""A prompt as the beginning of its own answer (`echo` of /v1/completions)."""

from __future__ import annotations

from functools import cached_property

from workbench.model.tokenizer import StreamDecoder, Tokenizer
from workbench.serve.messages import Logprobs


class Echo:
    """tokens: the prompt's ids. asked: as the request has it, a text or ids.

    logprobs: of each token but the first, where the request wants them; they come with the steps.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: list[int], asked: str | list[int]):
        self.tokens, self.logprobs = tokens, list[Logprobs]()
        self._tokenizer, self._asked = tokenizer, asked

    @property
    def text(self) -> str:
        """What the request says. Of ids the text, with the names of control tokens."""
        return self._asked if isinstance(self._asked, str) else self._decoded[0]

    @property
    def offsets(self) -> list[int]:
        """For each token the characters of `text` before it."""
        return self._decoded[1]

    @cached_property
    def _decoded(self) -> tuple[str, list[int]]:
        """Text and offsets. What the tokenizer has added to a text is none of it."""
        begin, end = 0, len(self.tokens)
        if isinstance(self._asked, str):
            before, after = self._tokenizer.n_added
            begin, end = before, end - after
        decoder = StreamDecoder(self._tokenizer, special=True, at_start=True)
        parts, offsets, at = list[str](), list[int](), 0
        for i, token in enumerate(self.tokens):
            offsets.append(at)
            if begin <= i < end:
                parts.append(decoder.feed(token))
                at += len(parts[-1])
        return "".join(parts) + decoder.flush(), offsets
