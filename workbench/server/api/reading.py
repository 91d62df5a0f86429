"""Reads a body: checks its JSON, and finds the request's parameters and the ids of its prompts.

This work takes a time that grows with the body, and holds Python's lock. So it belongs to an object
without an event loop: `Readers` runs a `Reader` in this process for a small body, and in another
process for a larger one. An error of the request itself is found here. `Front.open` refuses
requests that cannot be served now.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from workbench.model.sampler import Sampling
from workbench.model.tokenizer.tokenizer import Tokenizer
from workbench.server.api.faults import ApiError, bad
from workbench.server.api.fields import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    NATIVE,
    READ,
    SCHEMAS,
    TEMPLATE,
    TOKENIZE,
)
from workbench.server.api.schema import check, parse
from workbench.server.api.shapes import AS_MANY, MAX_CHOICES, MAX_PROMPTS
from workbench.server.chat import ChatTemplate, text_of
from workbench.server.child import cut

AT_ONCE = 10_000  # entries of a list in one part of an answer
COMPLETION_TOKENS = 16  # of /v1/completions, where the request names no number


class Defaults(NamedTuple):
    """The defaults of a request. timeout_s: also the most that a request can ask for."""

    sampling: Sampling = Sampling(0.8, 40, 0.95)  # as llama.cpp's server, except its min_p of 0.05
    timeout_s: float | None = None


class Wanted(NamedTuple):
    """The parameters of a request, the same for all endpoints.

    n: continuations of each prompt.
    max_tokens: None for as many as the context holds.
    seed: None for any.
    ends: tokens that end an answer: the request's, and the model's own unless the request ignores
        them.
    add_bos: of texts, as `Tokenizer.encode` takes it.
    echo: an answer begins with its prompt, whose tokens then have logprobs if the answer's have.
    """

    n: int
    max_tokens: int | None
    sampling: Sampling
    seed: int | None
    stop: tuple[str, ...]
    n_logprobs: int | None
    ends: frozenset[int]
    cache_prompt: bool
    add_bos: bool | None
    stream: bool
    include_usage: bool
    timeout_s: float | None
    echo: bool = False


class Prompt(NamedTuple):
    """A prompt that fits the context.

    ids: int32 (n,), at least one.
    most: tokens that its answer may have.
    text: the request's text, where the answer begins with a prompt that is a text.
    """

    ids: np.ndarray
    most: int
    text: str | None = None


class ReaderSpec(NamedTuple):
    """The settings of a `Reader`, which can be pickled.

    longest: bytes of the longest token.
    model: the name that requests may ask for.
    template: the chat template.
    """

    tokenizer: Tokenizer
    longest: int
    model: str
    defaults: Defaults
    template: str


class BodyRead(NamedTuple):
    """A body that was read.

    wanted: the parameters of a request for answers.
    prompts: of a request for answers; empty for a chat whose template is not yet rendered.
    parts: long bytes, cut by `cut`: the values for a template, or an answer.
    """

    wanted: Wanted | None = None
    prompts: tuple[Prompt, ...] = ()
    parts: tuple[bytes, ...] = ()


class Reader:
    """Every method takes the bytes of a body, or a line of a renderer, and raises ApiError for a
    request that cannot be answered. n_ctx: most tokens of a request."""

    def __init__(self, spec: ReaderSpec):
        self._spec, self._tokenizer = spec, spec.tokenizer
        self._template = ChatTemplate(spec.template, spec.tokenizer)

    def request(self, raw: bytes, route: str, n_ctx: int) -> BodyRead:
        """`wanted` and `prompts` of a request for answers; for a chat `wanted`, and in `parts` the
        values for its template."""
        body = parse(raw)
        if route != CHAT:
            _check_entries(body.get("prompt"), n_ctx)
        body = _honoured(body, route)
        if model := body.get("model"):
            check_model(model, self._spec.model)
        wanted = wanted_of(body, route, self._spec.defaults, self._tokenizer.eog_ids)
        if route == CHAT:
            return BodyRead(wanted, parts=cut(self._template.values(body)))
        prompts = _prompts(body["prompt"])
        if (n := wanted.n * len(prompts)) > MAX_CHOICES:
            raise bad(f"n times the prompts is {n}; {MAX_CHOICES} answers are the most", "n")
        return BodyRead(wanted, self._fitted(prompts, wanted, n_ctx, clips=route == NATIVE))

    def rendered(self, line: bytes, wanted: Wanted, n_ctx: int) -> BodyRead:
        """`wanted` and `prompts` of a chat, from the renderer's line."""
        return BodyRead(wanted, self._fitted([text_of(line)], wanted, n_ctx))

    def template_values(self, raw: bytes) -> BodyRead:
        """`parts`: the values for the template, from a body of /apply-template."""
        return BodyRead(parts=cut(self._template.values(_honoured(parse(raw), TEMPLATE))))

    def prompt_answer(self, line: bytes) -> BodyRead:
        """`parts`: the answer of /apply-template, from the renderer's line."""
        # a lone surrogate has no UTF-8; the tokenizer replaces it in the same way
        prompt = text_of(line).encode("utf-8", "replace").decode("utf-8")
        return BodyRead(parts=cut(json.dumps({"prompt": prompt}, ensure_ascii=False).encode()))

    def tokenize(self, raw: bytes) -> BodyRead:
        """`parts`: the answer of /tokenize."""
        body = _honoured(parse(raw), TOKENIZE)
        special = body.get("parse_special")
        tokens = self._tokenizer.encode(
            body["content"],
            None if body.get("add_special") else False,
            True if special is None else special,
        )
        return BodyRead(parts=tuple(self._listed(tokens, bool(body.get("with_pieces")))))

    def detokenize(self, raw: bytes) -> BodyRead:
        """`parts`: the answer of /detokenize."""
        tokens = _ids(_honoured(parse(raw), DETOKENIZE)["tokens"])
        self._check_known(tokens, "tokens")
        text = self._tokenizer.decode(tokens, special=True)
        return BodyRead(parts=cut(json.dumps({"content": text}, ensure_ascii=False).encode()))

    # inside ------------------------------------------------------------------------------------

    def _fitted(
        self, prompts: list[str | list[int]], wanted: Wanted, n_ctx: int, clips: bool = False
    ) -> tuple[Prompt, ...]:
        """Each prompt, with how many tokens its answer may have."""
        for prompt in prompts:
            if isinstance(prompt, str):
                _check_text(len(prompt), n_ctx, self._spec.longest)
        found = []
        for prompt in prompts:
            text, ids = None, prompt
            if isinstance(ids, str):
                text, ids = ids, self._tokenizer.encode(ids, wanted.add_bos)
            # refused before the next prompt is encoded
            most = fitted(len(ids), wanted.max_tokens, n_ctx, clips)
            self._check_known(ids, "prompt")
            found.append(Prompt(np.asarray(ids, np.int32), most, text if wanted.echo else None))
        return tuple(found)

    def _check_known(self, ids: list[int], field: str) -> None:
        """Raises ApiError for a token id outside the vocabulary."""
        n_vocab = self._tokenizer.n_vocab
        if ids and (largest := max(ids)) >= n_vocab:
            raise bad(f"token id {largest} is not in 0..{n_vocab - 1}, the vocabulary", field)

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


def _honoured(body: dict[str, Any], route: str) -> dict[str, Any]:
    """The fields of a body that are honoured at `route`. Raises ApiError (400) for those that are
    refused, and for values that the schema does not allow."""
    check(body, SCHEMAS[route])
    return {name: value for name, value in body.items() if name in READ[route]}


def check_model(model: str, served: str) -> None:
    """Raises ApiError (404) for a model that is not served."""
    if model != served:
        raise ApiError(
            404,
            f"model {model!r} is not served here; ask for {served!r}",
            "model",
            "model_not_found",
        )


# --- the meaning of fields ---------------------------------------------------------------------


def wanted_of(
    body: dict[str, Any],
    route: str,
    defaults: Defaults,
    eog_ids: frozenset[int] = frozenset(),
) -> Wanted:
    """The parameters in the honoured fields of a body. eog_ids: tokens that end the model's
    answers."""
    seed, stop = _whole(body.get("seed")), body.get("stop")
    asked, most = body.get("timeout"), defaults.timeout_s
    own_ends = frozenset(map(int, body.get("stop_token_ids") or ()))
    return Wanted(
        n=_whole(body.get("n")) or 1,
        max_tokens=_most(body, COMPLETION_TOKENS if route == COMPLETIONS else None),
        sampling=_sampling(body, defaults.sampling),
        seed=None if seed in (None, -1) else int(seed or 0) % 2**63,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        n_logprobs=_n_logprobs(body, route),
        ends=own_ends if body.get("ignore_eos") else own_ends | eog_ids,
        cache_prompt=body.get("cache_prompt") is not False,
        add_bos=False if body.get("add_special_tokens") is False else None,
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        timeout_s=min((t for t in (asked, most) if t is not None), default=None),
        echo=bool(body.get("echo")),
    )


def _most(body: dict[str, Any], default: int | None) -> int | None:
    """The most tokens of an answer: the first of the fields for it that is set."""
    for name in ("n_predict", "max_completion_tokens", "max_tokens"):
        if (tokens := _whole(body.get(name))) is not None:
            return None if tokens == AS_MANY else tokens
    return default


def _n_logprobs(body: dict[str, Any], route: str) -> int | None:
    """How many of the likeliest tokens an answer lists; None for no logprobs at all."""
    asked = _whole(body.get("n_probs")) or None
    if route == COMPLETIONS and (own := _whole(body.get("logprobs"))) is not None:
        return own
    if route == CHAT and body.get("logprobs"):
        top = _whole(body.get("top_logprobs"))
        return (asked or 0) if top is None else top
    return asked


def _sampling(body: dict[str, Any], default: Sampling) -> Sampling:
    said: dict[str, Callable[[Any], Any]] = {
        "temperature": float, "top_k": int, "top_p": float, "min_p": float,
    }  # fmt: skip
    values = {
        name: getattr(default, name) if body.get(name) is None else kind(body[name])
        for name, kind in said.items()
    }
    values["top_k"] = max(0, values["top_k"])  # -1 is vLLM's word for all
    return Sampling(**values)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a body: texts, or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], str | list):
        return [p if isinstance(p, str) else _ids(p) for p in prompt]
    return [_ids(prompt)]


def _ids(values: list[Any]) -> list[int]:
    """Checked token ids, which JSON may write as 2.0."""
    return values if set(map(type, values)) == {int} else [int(v) for v in values]


def _whole(value: Any) -> int | None:
    """A checked whole number, which JSON may write as 2.0."""
    return None if value is None else int(value)


# --- the context -------------------------------------------------------------------


def _check_entries(prompt: Any, n_ctx: int) -> None:
    """Raises ApiError (400) for a list that is too long to be tokens or prompts. Its entries, which
    may be millions, are not checked."""
    if isinstance(prompt, list) and len(prompt) > max(n_ctx, MAX_PROMPTS):
        raise _too_long(f"the prompt has {len(prompt)} entries", n_ctx, "tokens")


def _check_text(n_characters: int, n_ctx: int, longest: int) -> None:
    """Raises ApiError (400) for a text that is longer than n_ctx tokens of `longest` bytes. The
    text is not tokenized before: for a whole body that takes many seconds."""
    if n_characters > n_ctx * longest:
        raise _too_long(f"the prompt has {n_characters} characters", n_ctx, "tokens")


def fitted(n_prompt: int, max_tokens: int | None, n_ctx: int, clip: bool = False) -> int:
    """How many tokens an answer may have in a context of n_ctx tokens; 0 where none is asked for.

    clip: fewer tokens than asked for are fine.
    Raises ApiError (400), which names the number of tokens that there are.
    """
    if n_prompt == 0:
        raise bad("the prompt has no tokens; give at least one", "prompt")
    room = n_ctx - n_prompt
    if room < (max_tokens != 0):
        raise _too_long(f"the prompt has {n_prompt} tokens", n_ctx)
    if max_tokens is None or (clip and max_tokens > room):
        return room
    if max_tokens > room:
        raise _too_long(
            f"{n_prompt} tokens of the prompt and {max_tokens} to make are "
            f"{n_prompt + max_tokens} tokens",
            n_ctx,
        )
    return max_tokens


def _too_long(what: str, n_ctx: int, of: str = "") -> ApiError:
    return bad(
        f"{what}, and the context has {n_ctx}{of and ' '}{of}; send less, or ask for fewer",
        "prompt",
        "context_length_exceeded",
    )
