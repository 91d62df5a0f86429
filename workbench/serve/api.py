"""The interface: what a request wants of the engine, by the fields of its body (`fields.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from workbench.model.sampler import Sampling
from workbench.serve.faults import ApiError, bad
from workbench.serve.fields import CHAT, COMPLETIONS, NATIVE, honoured
from workbench.serve.schema import whole
from workbench.serve.shapes import AS_MANY, MAX_CHOICES, MAX_PROMPTS

COMPLETION_TOKENS = 16  # of /v1/completions, where the request names no number


class Defaults(NamedTuple):
    """What a request has that does not say. timeout_s: also the most it can ask for."""

    sampling: Sampling = Sampling(0.8, 40, 0.95)  # as llama.cpp's server, but for its min_p of 0.05
    timeout_s: float | None = None


class Wanted(NamedTuple):
    """What a request wants, whichever endpoint it came to.

    prompts: texts, or token ids; none of a chat, whose `messages` a template makes into one. n:
    continuations of each. max_tokens: None for as many as the context holds. seed: None for any.
    stop_ids: tokens that end an answer, beside the model's own. add_bos: of texts, as
    `Tokenizer.encode` takes it. echo: an answer begins with its prompt, whose tokens have logprobs
    where the others have.
    """

    prompts: list[str | list[int]]
    n: int
    max_tokens: int | None
    sampling: Sampling
    seed: int | None
    stop: tuple[str, ...]
    n_logprobs: int | None
    ignore_eos: bool
    stop_ids: frozenset[int]
    cache_prompt: bool
    add_bos: bool | None
    stream: bool
    include_usage: bool
    timeout_s: float | None
    model: str | None
    echo: bool = False

    def ends(self, eog_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end an answer. eog_ids: the model's own."""
        return self.stop_ids if self.ignore_eos else self.stop_ids | eog_ids


def completion(body: dict[str, Any], defaults: Defaults) -> Wanted:
    """Of /v1/completions. Raises ApiError for what its schema does not allow."""
    body = honoured(body, COMPLETIONS)
    wanted, logprobs = _wanted(body, defaults), whole(body.get("logprobs"))
    return wanted._replace(
        prompts=_prompts(body["prompt"]),
        max_tokens=_most(body, COMPLETION_TOKENS),
        n_logprobs=wanted.n_logprobs if logprobs is None else logprobs,
        echo=bool(body.get("echo")),
    )


def chat(body: dict[str, Any], defaults: Defaults) -> Wanted:
    """Of /v1/chat/completions; its prompt is made of its messages later."""
    body = honoured(body, CHAT)
    wanted = _wanted(body, defaults)
    if body.get("logprobs"):
        top = whole(body.get("top_logprobs"))
        wanted = wanted._replace(n_logprobs=wanted.n_logprobs or 0 if top is None else top)
    return wanted._replace(max_tokens=_most(body))


def native(body: dict[str, Any], defaults: Defaults) -> Wanted:
    """Of llama.cpp's own /completion."""
    body = honoured(body, NATIVE)
    return _wanted(body, defaults)._replace(
        prompts=_prompts(body["prompt"]), max_tokens=_most(body)
    )


def _most(body: dict[str, Any], default: int | None = None) -> int | None:
    """Tokens of an answer, by the first of its names that says something."""
    for name in ("n_predict", "max_completion_tokens", "max_tokens"):
        if (tokens := whole(body.get(name))) is not None:
            return None if tokens == AS_MANY else tokens
    return default


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
        n_logprobs=whole(body.get("n_probs")) or None,
        ignore_eos=bool(body.get("ignore_eos")),
        stop_ids=frozenset(map(int, body.get("stop_token_ids") or ())),
        cache_prompt=body.get("cache_prompt") is not False,
        add_bos=False if body.get("add_special_tokens") is False else None,
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
