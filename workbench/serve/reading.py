"""What is made of a body: JSON that is checked, what it wants, and token ids of its texts.

All of this takes a time that grows with the body, and holds Python's lock. So it is in one object
that knows no event loop: `Beside` lets it work here for a small body, and in another process for a
larger one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from workbench.model.tokenizer import Tokenizer
from workbench.serve import api
from workbench.serve.api import Defaults, Wanted
from workbench.serve.chat import PART_BYTES, ChatTemplate, text_of
from workbench.serve.faults import ApiError, bad
from workbench.serve.fields import DETOKENIZE, TEMPLATE, TOKENIZE, honoured
from workbench.serve.schema import parse

AT_ONCE = 10_000  # entries of a list in a part of an answer


class ReaderSpec(NamedTuple):
    """What a `Reader` is made of. longest: bytes of the longest token. model: the name that
    requests may ask for. template: the chat template. It can be pickled."""

    tokenizer: Tokenizer
    longest: int
    model: str
    defaults: Defaults
    template: str


class BodyRead(NamedTuple):
    """What was made of a body.

    wanted: of its own `prompts` only texts are kept, where an answer begins with them.
    prompts: token ids of each prompt, int32 (n,).
    parts: long bytes, cut by `cut`.
    """

    wanted: Wanted | None = None
    prompts: tuple[np.ndarray, ...] = ()
    parts: tuple[bytes, ...] = ()


class Reader:
    """Every method takes the bytes of a body, or of the line of a renderer, and raises ApiError for
    what cannot be answered. n_ctx: most tokens of a request."""

    def __init__(self, spec: ReaderSpec):
        self._spec, self._tokenizer = spec, spec.tokenizer
        self._template = ChatTemplate(spec.template, spec.tokenizer)

    def completions(self, raw: bytes, n_ctx: int) -> BodyRead:
        """`wanted` and `prompts` of /v1/completions."""
        body = checked(raw)
        api.check_entries(body.get("prompt"), n_ctx)
        wanted = api.completion(body, self._spec.defaults)
        if wanted.model:
            check_model(wanted.model, self._spec.model)
        api.check_counts(wanted)
        return self._prompted(wanted, n_ctx)

    def native(self, raw: bytes, n_ctx: int) -> BodyRead:
        """`wanted` and `prompts` of /completion."""
        body = checked(raw)
        api.check_entries(body.get("prompt"), n_ctx)
        wanted = api.native(body, self._spec.defaults)
        if wanted.model:
            check_model(wanted.model, self._spec.model)
        return self._prompted(wanted, n_ctx)

    def chat(self, raw: bytes) -> BodyRead:
        """`wanted` of /v1/chat/completions; `parts` is what its template is given."""
        body = checked(raw)
        wanted = api.chat(body, self._spec.defaults)
        if wanted.model:
            check_model(wanted.model, self._spec.model)
        return BodyRead(wanted, parts=cut(self._template.values(body)))

    def rendered(self, line: bytes, n_ctx: int, adds: bool) -> BodyRead:
        """The `prompts` of a chat, of what the renderer has said. adds: with what the tokenizer
        puts around a text."""
        return BodyRead(prompts=self._all_ids([text_of(line)], n_ctx, None if adds else False))

    def template_values(self, raw: bytes) -> BodyRead:
        """`parts` is what the template is given for a body of /apply-template."""
        return BodyRead(parts=cut(self._template.values(checked(raw, TEMPLATE))))

    def prompt_answer(self, line: bytes) -> BodyRead:
        """`parts` is the answer of /apply-template, of what the renderer has said."""
        # of a lone surrogate no UTF-8 is made; the tokenizer writes it like this, too
        prompt = text_of(line).encode("utf-8", "replace").decode("utf-8")
        return BodyRead(parts=cut(json.dumps({"prompt": prompt}, ensure_ascii=False).encode()))

    def tokenize(self, raw: bytes) -> BodyRead:
        """`parts` is the answer of /tokenize."""
        body = checked(raw, TOKENIZE)
        special = body.get("parse_special")
        tokens = self._tokenizer.encode(
            body["content"],
            None if body.get("add_special") else False,
            True if special is None else special,
        )
        return BodyRead(parts=tuple(self._listed(tokens, bool(body.get("with_pieces")))))

    def detokenize(self, raw: bytes) -> BodyRead:
        """`parts` is the answer of /detokenize."""
        tokens = api.ids(checked(raw, DETOKENIZE)["tokens"])
        n_vocab = self._tokenizer.n_vocab
        if tokens and max(tokens) >= n_vocab:
            raise bad(not_known(max(tokens), n_vocab), "tokens")
        text = self._tokenizer.decode(tokens, special=True)
        return BodyRead(parts=cut(json.dumps({"content": text}, ensure_ascii=False).encode()))

    # inside ------------------------------------------------------------------------------------

    def _prompted(self, wanted: Wanted, n_ctx: int) -> BodyRead:
        prompts = self._all_ids(wanted.prompts, n_ctx, wanted.add_bos)
        kept = wanted.prompts if wanted.echo else []
        texts = [prompt if isinstance(prompt, str) else list[int]() for prompt in kept]
        return BodyRead(wanted._replace(prompts=texts), prompts)

    def _all_ids(
        self, prompts: list[str | list[int]], n_ctx: int, add_bos: bool | None
    ) -> tuple[np.ndarray, ...]:
        for text in prompts:
            if isinstance(text, str):
                api.check_text(len(text), n_ctx, self._spec.longest)
        found = []
        for prompt in prompts:
            ids = self._tokenizer.encode(prompt, add_bos) if isinstance(prompt, str) else prompt
            found.append(np.asarray(ids, np.int32))
            if ids:  # of none, `Front.open` says so
                api.fitted(len(ids), 0, n_ctx)  # before the next one takes its time
        return tuple(found)

    def _listed(self, tokens: list[int], pieces: bool) -> Iterator[bytes]:
        yield b'{"tokens":['
        for at in range(0, len(tokens), AT_ONCE):
            part: list[Any] = tokens[at : at + AT_ONCE]
            if pieces:
                part = [{"id": t, "piece": self._piece(t)} for t in part]
            yield b"," * bool(at) + json.dumps(part, separators=(",", ":"))[1:-1].encode()
        yield b"]}"

    def _piece(self, token: int) -> str | list[int]:
        raw = self._tokenizer.piece(token, special=True)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return list(raw)


def checked(raw: bytes, path: str | None = None) -> dict[str, Any]:
    """A body as JSON; of a `path` only what is honoured there."""
    body = parse(raw)
    if not isinstance(body, dict):
        raise bad("the body must be a JSON object")
    return body if path is None else honoured(body, path)


def check_model(model: str, served: str) -> None:
    """Raises ApiError (404) for a model that is not served."""
    if model != served:
        raise ApiError(
            404,
            f"model {model!r} is not served here; ask for {served!r}",
            "model",
            "model_not_found",
        )


def not_known(token: int, n_vocab: int) -> str:
    """What is said of a token id outside the vocabulary."""
    return f"token id {token} is not in 0..{n_vocab - 1}, the vocabulary"


def cut(data: bytes) -> tuple[bytes, ...]:
    """Bytes in parts. To copy a part takes no time that a stream would notice."""
    return tuple(data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES))
