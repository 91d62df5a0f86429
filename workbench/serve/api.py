"""The interface: what requests may say (`SCHEMAS`), and what they want of the engine.

The schemas are JSON Schema and are served at /openapi.json. A field that is in none of them is
ignored, as OpenAI does. A field that asks for what is not built is refused, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from workbench.model.sampler import Sampling
from workbench.serve.faults import ApiError, bad
from workbench.serve.schema import Schema, check, whole

MAX_STOPS, MAX_STOP_LENGTH = 16, 500
MAX_CHOICES, MAX_PROMPTS = 128, 128
MAX_LOGPROBS = 20
INT32 = 2**31 - 1
NATIVE_TOKENS = -1  # llama.cpp's `n_predict` for as many as fit
COMPLETION_TOKENS = 16  # of /v1/completions, where the request names no number


class Defaults(NamedTuple):
    """What a request has that does not say. timeout_s: also the most it can ask for."""

    sampling: Sampling = Sampling(0.8, 40, 0.95)  # as llama.cpp's server, but for its min_p of 0.05
    timeout_s: float | None = None


class Wanted(NamedTuple):
    """What a request wants, whichever endpoint it came to.

    prompts: texts, or token ids; none of a chat, whose `messages` a template makes into one. n:
    continuations of each. max_tokens: None for as many as the context holds. seed: None for any.
    echo: an answer begins with its prompt, whose tokens have logprobs where the others have.
    """

    prompts: list[str | list[int]]
    n: int
    max_tokens: int | None
    sampling: Sampling
    seed: int | None
    stop: tuple[str, ...]
    n_logprobs: int | None
    ignore_eos: bool
    stream: bool
    include_usage: bool
    timeout_s: float | None
    model: str | None
    echo: bool = False


def _number(kind: str, least: float | None = None, most: float | None = None) -> Schema:
    made: Schema = {"type": [kind, "null"]}
    if least is not None:
        made["minimum"] = least
    if most is not None:
        made["maximum"] = most
    return made


def _refused(allowed: Schema, what: str) -> Schema:
    """A field that may only say nothing."""
    return allowed | {"x-refusal": f"asks for {what}, which is not supported; leave it out"}


_FLAG: Schema = {"type": ["boolean", "null"]}
_TEXT: Schema = {"type": "string"}
_IDS: Schema = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": INT32},
    "minItems": 1,
}
_MANY = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
_PROMPT: Schema = {
    "title": "a text, a list of token ids, or a list of up to "
    f"{MAX_PROMPTS} texts or lists of token ids",
    "anyOf": [_TEXT, _IDS, _MANY | {"items": _TEXT}, _MANY | {"items": _IDS}],
}
_STOP_TEXT: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_STOP: Schema = {
    "title": f"a text or a list of up to {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters",
    "anyOf": [
        _STOP_TEXT,
        {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOPS},
        {"type": "null"},
    ],
}
_NOTHING = {"type": ["array", "null"], "maxItems": 0}
_ZERO = {"enum": [0, None]}

_SAMPLING: dict[str, Schema] = {
    "temperature": _number("number", 0, 100),
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _number("integer", -1, INT32),
    "min_p": _number("number", 0, 1),
    "seed": _number("integer", -(2**63), 2**64 - 1),
    "stop": _STOP,
    "stream": _FLAG,
    "ignore_eos": _FLAG,
    "timeout": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 86400},
    "presence_penalty": _refused(_ZERO, "a penalty"),
    "frequency_penalty": _refused(_ZERO, "a penalty"),
    "repetition_penalty": _refused({"enum": [1, None]}, "a penalty"),
    "repeat_penalty": _refused({"enum": [1, None]}, "a penalty"),
    "logit_bias": _refused({"type": ["object", "null"], "maxProperties": 0}, "a bias of logits"),
    "grammar": _refused({"enum": ["", None]}, "a grammar"),
    "json_schema": _refused({"type": "null"}, "an answer of a given form"),
}
_OPENAI: dict[str, Schema] = _SAMPLING | {
    "model": {"type": ["string", "null"]},
    "n": _number("integer", 1, MAX_CHOICES),
    "max_tokens": _number("integer", 1, INT32),
    "max_completion_tokens": _number("integer", 1, INT32),
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": _FLAG},
    },
    "response_format": _refused(
        {"type": ["object", "null"], "properties": {"type": {"enum": ["text"]}}},
        "an answer of a given form",
    ),
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {
            "title": "a text or a list of parts of type text",
            "anyOf": [
                {"type": ["string", "null"]},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"enum": ["text"]}, "text": _TEXT},
                    },
                },
            ],
        },
        "name": {"type": ["string", "null"]},
        "tool_calls": _refused(_NOTHING, "tools"),
    },
}
_MESSAGES: dict[str, Schema] = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": 10_000},
    "add_generation_prompt": _FLAG,
    "chat_template_kwargs": {"type": ["object", "null"]},
    "tools": _refused(_NOTHING, "tools"),
    "functions": _refused(_NOTHING, "tools"),
}


def _object(fields: dict[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": fields, "required": list(required)}


SCHEMAS: dict[str, Schema] = {
    "/v1/completions": _object(
        _OPENAI
        | {
            "prompt": _PROMPT,
            "logprobs": _number("integer", 0, MAX_LOGPROBS),
            "max_tokens": _number("integer", 0, INT32),
            "max_completion_tokens": _number("integer", 0, INT32),
            "echo": _FLAG,
            "best_of": _refused({"enum": [1, None]}, "more than it answers"),
            "suffix": _refused({"enum": ["", None]}, "a text between two others"),
        },
        "prompt",
    ),
    "/v1/chat/completions": _object(
        _OPENAI
        | _MESSAGES
        | {
            "logprobs": _FLAG,
            "top_logprobs": _number("integer", 0, MAX_LOGPROBS),
            "tool_choice": _refused({"enum": ["none", "auto", None]}, "tools"),
            "modalities": _refused({"enum": [["text"], None]}, "more than text"),
            "audio": _refused({"type": "null"}, "audio"),
        },
        "messages",
    ),
    "/completion": _object(
        _SAMPLING
        | {
            "prompt": {"title": "a text or a list of token ids", "anyOf": [_TEXT, _IDS]},
            "n_predict": _number("integer", NATIVE_TOKENS, INT32),
            "max_tokens": _number("integer", NATIVE_TOKENS, INT32),
            "n_probs": _refused(_ZERO, "probabilities"),
        },
        "prompt",
    ),
    "/tokenize": _object(
        {"content": _TEXT} | dict.fromkeys(("add_special", "parse_special", "with_pieces"), _FLAG),
        "content",
    ),
    "/detokenize": _object({"tokens": _IDS | {"minItems": 0}}, "tokens"),
    "/apply-template": _object(_MESSAGES, "messages"),
}


# --- from a body to what it wants ------------------------------------------------------------


def completion(body: dict[str, Any], defaults: Defaults) -> Wanted:
    """Of /v1/completions. Raises ApiError for what its schema does not allow."""
    check(body, SCHEMAS["/v1/completions"])
    tokens = _most(body)
    return _wanted(body, defaults)._replace(
        prompts=_prompts(body["prompt"]),
        max_tokens=COMPLETION_TOKENS if tokens is None else tokens,
        n_logprobs=whole(body.get("logprobs")),
        echo=bool(body.get("echo")),
    )


def chat(body: dict[str, Any], defaults: Defaults) -> Wanted:
    """Of /v1/chat/completions; its prompt is made of its messages later."""
    check(body, SCHEMAS["/v1/chat/completions"])
    top = whole(body.get("top_logprobs"))
    if top and not body.get("logprobs"):
        raise bad("top_logprobs needs logprobs=true; set it too", "top_logprobs")
    return _wanted(body, defaults)._replace(
        max_tokens=_most(body),
        n_logprobs=(top or 0) if body.get("logprobs") else None,
    )


def _most(body: dict[str, Any]) -> int | None:
    """Tokens of an answer: max_completion_tokens, else max_tokens, its older name."""
    tokens = body.get("max_completion_tokens")
    return whole(body.get("max_tokens") if tokens is None else tokens)


def native(body: dict[str, Any], defaults: Defaults) -> Wanted:
    """Of llama.cpp's own /completion."""
    check(body, SCHEMAS["/completion"])
    name = "max_tokens" if body.get("n_predict") is None else "n_predict"
    tokens = whole(body.get(name))
    if tokens == 0:
        raise bad(f"{name} must be -1 (as many as fit) or at least 1", name)
    return _wanted(body, defaults)._replace(
        prompts=_prompts(body["prompt"]),
        max_tokens=None if tokens in (None, NATIVE_TOKENS) else tokens,
    )


def _wanted(body: dict[str, Any], defaults: Defaults) -> Wanted:
    """What the fields say that all endpoints have."""
    seed = whole(body.get("seed"))
    stop = body.get("stop")
    asked, most = body.get("timeout"), defaults.timeout_s
    return Wanted(
        prompts=[],
        n=whole(body.get("n")) or 1,
        max_tokens=None,
        sampling=_sampling(body, defaults.sampling),
        seed=None if seed in (None, -1) else int(seed or 0) % 2**63,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        n_logprobs=None,
        ignore_eos=bool(body.get("ignore_eos")),
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        timeout_s=min((t for t in (asked, most) if t is not None), default=None),
        model=body.get("model"),
    )


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
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], str | list):
        return [p if isinstance(p, str) else ids(p) for p in prompt]
    return [ids(prompt)]


def ids(values: list[Any]) -> list[int]:
    """Checked token ids, which JSON may write as 2.0."""
    return values if set(map(type, values)) == {int} else [int(v) for v in values]


def check_counts(wanted: Wanted) -> None:
    """Raises ApiError where a request wants too many answers at once."""
    n = wanted.n * max(1, len(wanted.prompts))
    if n > MAX_CHOICES:
        raise bad(f"n times the prompts is {n}; {MAX_CHOICES} answers are the most", "n")


def check_entries(prompt: Any, n_ctx: int) -> None:
    """Raises ApiError (400) for a list that is neither so many tokens nor so many prompts. Nothing
    is asked of its entries, which may be millions."""
    if isinstance(prompt, list) and len(prompt) > max(n_ctx, MAX_PROMPTS):
        raise _too_long(f"the prompt has {len(prompt)} entries", n_ctx, "tokens")


def check_text(n_characters: int, n_ctx: int, longest: int) -> None:
    """Raises ApiError (400) for a text that no n_ctx tokens say, each of `longest` bytes at most.
    It is not made into tokens first: of a whole body that takes many seconds."""
    if n_characters > n_ctx * longest:
        raise _too_long(f"the prompt has {n_characters} characters", n_ctx, "tokens")


def fitted(n_prompt: int, max_tokens: int | None, n_ctx: int, clip: bool = False) -> int:
    """How many tokens an answer may have, of a context of n_ctx tokens; 0 where none is wanted.
    clip: less than wanted will do. Raises ApiError (400), which says how many tokens there are."""
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
