"""The forms of the endpoints' answers: OpenAI's two forms, and llama.cpp's own.

A stream has an event for each token. Its JSON is joined from bytes that are the same for the whole
request, and the token's text.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from workbench.server.api.echo import Echo
from workbench.server.api.fields import CHAT, COMPLETIONS, NATIVE
from workbench.server.reply import Continuation, Form, Reply
from workbench.server.text import TokenTexts
from workbench.server.wire.messages import Logprobs, Timings

DONE = b"data: [DONE]\n\n"
Json = dict[str, Any]
_STOP_TYPES = {"stop": "eos", "length": "limit"}  # llama.cpp's words, without a stop text


def quoted(text: str) -> bytes:
    """A text as JSON."""
    return encode_basestring_ascii(text).encode("ascii")


def event(value: Json) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class _OpenAI:
    """The common parts of completions and chats.

    The parts of a token's event: `_head`, the choice's index, `_text_head`, the text, `_tail`.
    """

    kind, kind_of_event, id_prefix = "", "", ""
    _text_head, _tail = b"", b""

    def __init__(self, model: str, texts: TokenTexts, with_usage: bool):
        self._texts = texts
        self._same = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }
        self._of_event = self._same | {"object": self.kind_of_event}
        self._usage_later = {"usage": None} if with_usage else {}
        if with_usage:
            self._tail = self._tail[:-3] + b',"usage":null}\n\n'
        head = json.dumps(self._of_event, separators=(",", ":")).encode()
        self._head = b"data: " + head[:-1] + b',"choices":[{"index":'

    def token(self, part: Continuation, text: str) -> bytes:
        begin = self._begin(part) if len(part.tokens) == 1 else b""
        if part.logprobs:
            return begin + self._event(self._choice(part.index, text, None) | self._log(part))
        return b"%b%b%d%b%b%b" % (
            begin, self._head, part.index, self._text_head, quoted(text), self._tail,
        )  # fmt: skip

    def end(self, part: Continuation, text: str, last: bool) -> bytes:
        begin = b"" if part.tokens else self._begin(part)
        choice = self._choice(part.index, text, part.reason) | self._log(part)
        value = self._of_event | {"choices": [choice]} | self._usage_later
        if last and not self._usage_later:
            value["timings"] = timings_of(part.reply.parts)
        return begin + event(value)

    def last(self, reply: Reply) -> bytes:
        if not self._usage_later:
            return DONE
        value = self._of_event | {"choices": [], "usage": usage(reply)}
        return event(value | {"timings": timings_of(reply.parts)}) + DONE

    def whole(self, reply: Reply) -> bytes:
        value = self._same | {
            "choices": [self._whole_choice(part) for part in reply.parts],
            "usage": usage(reply),
            "timings": timings_of(reply.parts),
        }
        return json.dumps(value).encode()

    def _event(self, choice: Json) -> bytes:
        return event(self._of_event | {"choices": [choice]} | self._usage_later)

    def _begin(self, part: Continuation) -> bytes:
        """The event of a choice before all others; empty where there is none."""
        raise NotImplementedError

    def _choice(self, index: int, text: str, reason: str | None) -> Json:
        raise NotImplementedError

    def _whole_choice(self, part: Continuation) -> Json:
        raise NotImplementedError

    def _log(self, part: Continuation) -> Json:
        """The logprobs of tokens whose text is certain now. Tokens that may belong to a stop text
        come later."""
        begin, end = part.to_log() if part.logprobs else (0, 0)
        return {"logprobs": self._logprobs(part, begin, end)} if end > begin else {}

    def _logprobs(self, part: Continuation, begin: int, end: int) -> Json:
        raise NotImplementedError


class Completions(_OpenAI):
    """/v1/completions."""

    kind, kind_of_event, id_prefix = "text_completion", "text_completion", "cmpl"
    _text_head, _tail = b',"text":', b',"logprobs":null,"finish_reason":null}]}\n\n'

    def _begin(self, part: Continuation) -> bytes:
        """The event of the prompt; empty without `echo`."""
        if part.echo is None:
            return b""
        choice = self._choice(part.index, part.echo.text, None)
        if part.reply.wanted.n_logprobs is not None:
            choice["logprobs"] = self._of_prompt(part.echo)
        return self._event(choice)

    def _choice(self, index: int, text: str, reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def _whole_choice(self, part: Continuation) -> Json:
        echo = part.echo
        text = part.text if echo is None else echo.text + part.text
        choice = self._choice(part.index, text, part.reason)
        if part.reply.wanted.n_logprobs is not None:
            made = self._logprobs(part, 0, part.n_kept)
            if echo is not None:
                made = {name: own + made[name] for name, own in self._of_prompt(echo).items()}
            choice["logprobs"] = made
        return choice

    def _of_prompt(self, echo: Echo) -> Json:
        """The four lists of a prompt. Its first token follows no token, so it has no logprob."""
        made = self._lists(echo.tokens[1:], echo.logprobs)
        return {
            "tokens": [self._shown(echo.tokens[0]), *made["tokens"]],
            "token_logprobs": [None, *made["token_logprobs"]],
            "top_logprobs": [None, *made["top_logprobs"]],
            "text_offset": echo.offsets,
        }

    def _logprobs(self, part: Continuation, begin: int, end: int) -> Json:
        """OpenAI's four lists. text_offset: characters of the answer before the token."""
        n_before = 0 if part.echo is None else len(part.echo.text)
        offsets = part.offsets[begin:end]
        made = self._lists(part.tokens[begin:end], part.logprobs[begin:end])
        return made | {"text_offset": [n_before + at for at in offsets]}

    def _lists(self, tokens: list[int], logprobs: list[Logprobs]) -> Json:
        """Three of the four: tokens, token_logprobs, top_logprobs."""
        texts, tops = [], []
        for token, of in zip(tokens, logprobs, strict=True):
            texts.append(self._shown(token))
            top = {self._shown(int(t)): float(v) for t, v in zip(of.tokens, of.values, strict=True)}
            tops.append(top | {texts[-1]: of.drawn})
        return {
            "tokens": texts,
            "token_logprobs": [of.drawn for of in logprobs],
            "top_logprobs": tops,
        }

    def _shown(self, token: int) -> str:
        """A token's text. A part of a character is written in bytes, as OpenAI does."""
        raw = self._texts.shown(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Chat(_OpenAI):
    """/v1/chat/completions. The first event of a choice names its role."""

    kind, kind_of_event, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    _text_head = b',"delta":{"content":'
    _tail = b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def _begin(self, part: Continuation) -> bytes:
        choice = self._choice(part.index, "", None)
        choice["delta"] = {"role": "assistant", "content": ""}
        return self._event(choice)

    def _choice(self, index: int, text: str, reason: str | None) -> Json:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _whole_choice(self, part: Continuation) -> Json:
        n_logprobs = part.reply.wanted.n_logprobs
        return {
            "index": part.index,
            "message": {"role": "assistant", "content": part.text, "refusal": None},
            "logprobs": None if n_logprobs is None else self._logprobs(part, 0, part.n_kept),
            "finish_reason": part.reason,
        }

    def _logprobs(self, part: Continuation, begin: int, end: int) -> Json:
        content = _logprobs(self._texts, part, begin, end, with_ids=False)
        return {"content": content, "refusal": None}


def _logprobs(
    texts: TokenTexts, part: Continuation, begin: int, end: int, with_ids: bool
) -> list[Json]:
    """Tokens with their log-probabilities, in the form of chats, and with ids in llama.cpp's."""

    def shown(token: int, value: float) -> Json:
        raw = texts.shown(token)
        found = {"token": raw.decode("utf-8", "replace"), "logprob": value, "bytes": list(raw)}
        return {"id": token} | found if with_ids else found

    return [
        shown(token, of.drawn)
        | {
            "top_logprobs": [
                shown(int(t), float(v)) for t, v in zip(of.tokens, of.values, strict=True)
            ]
        }
        for token, of in zip(part.tokens[begin:end], part.logprobs[begin:end], strict=True)
    ]


class Native:
    """llama.cpp's /completion: one answer, no `[DONE]`, and no usage."""

    def __init__(self, model: str, texts: TokenTexts, with_usage: bool = False):
        self._model, self._texts = model, texts

    def token(self, part: Continuation, text: str) -> bytes:
        if part.logprobs:
            made = {"index": 0, "content": text, "tokens": part.tokens[-1:], "stop": False}
            return event(made | self._known(part, *part.to_log()))
        return b'data: {"index":0,"content":%b,"tokens":[%d],"stop":false}\n\n' % (
            quoted(text), part.tokens[-1],
        )  # fmt: skip

    def end(self, part: Continuation, text: str, last: bool) -> bytes:
        known = self._known(part, *part.to_log()) if part.logprobs else {}
        return event(self._ended(part, text, []) | known)

    def last(self, reply: Reply) -> bytes:
        return b""

    def whole(self, reply: Reply) -> bytes:
        part = reply.parts[0]
        known = self._known(part, 0, part.n_kept) if part.logprobs else {}
        return json.dumps(self._ended(part, part.text, part.tokens) | known).encode()

    def _known(self, part: Continuation, begin: int, end: int) -> Json:
        """`completion_probabilities`, where the request asks for them."""
        values = _logprobs(self._texts, part, begin, end, with_ids=True)
        return {"completion_probabilities": values} if values else {}

    def _ended(self, part: Continuation, text: str, tokens: list[int]) -> Json:
        reason = part.reason or ""
        return {
            "index": 0,
            "content": text,
            "tokens": tokens,
            "stop": True,
            "stop_type": "word" if part.stop_text else _STOP_TYPES.get(reason, reason),
            "stopping_word": part.stop_text,
            "model": self._model,
            "tokens_predicted": len(part.tokens),
            "tokens_evaluated": part.n_prompt,
            "timings": timings_of([part]),
        }


FORMS: dict[str, Callable[[str, TokenTexts, bool], Form]] = {
    COMPLETIONS: Completions, CHAT: Chat, NATIVE: Native,
}  # fmt: skip


def usage(reply: Reply) -> Json:
    """The token counts of a request. A prompt with several answers counts once, as with OpenAI."""
    firsts = reply.parts[:: reply.wanted.n]
    n_prompt = sum(part.n_prompt for part in firsts)
    n_made = sum(len(part.tokens) for part in reply.parts)
    n_cached = sum(part.timings.n_cached for part in firsts if part.timings)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_made,
        "total_tokens": n_prompt + n_made,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }


def timings_of(parts: Sequence[Continuation]) -> Json:
    """llama.cpp's `timings`, plus the times of queue and sampling. Several answers are made side by
    side: their tokens and sampling times are added, and the longest of each other time counts."""
    every = [part.timings for part in parts if part.timings is not None]
    if not every:
        return {}
    # the first token of each answer comes from the last step of its prompt
    n_later = sum(max(0, t.n_made - 1) for t in every)
    added = ("n_prompt", "n_cached", "n_made", "sampling_s")
    columns: list[tuple[Any, ...]] = [*zip(*every, strict=True)]
    t = Timings(*[
        (sum if name in added else max)(values)
        for name, values in zip(Timings._fields, columns, strict=True)
    ])  # fmt: skip
    n_prompt = t.n_prompt - t.n_cached
    return {
        "cache_n": t.n_cached,
        "prompt_n": n_prompt,
        "prompt_ms": 1e3 * t.prompt_s,
        "prompt_per_token_ms": 1e3 * t.prompt_s / n_prompt if n_prompt else 0.0,
        "prompt_per_second": n_prompt / t.prompt_s if t.prompt_s else 0.0,
        "predicted_n": t.n_made,
        "predicted_ms": 1e3 * t.made_s,
        "predicted_per_token_ms": 1e3 * t.made_s / n_later if n_later else 0.0,
        "predicted_per_second": n_later / t.made_s if t.made_s else 0.0,
        "queued_ms": 1e3 * t.queued_s,
        "sampling_ms": 1e3 * t.sampling_s,
    }
