"""The endpoints, as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import sys
import time
import traceback
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from workbench.serve import api, metrics
from workbench.serve.api import Wanted
from workbench.serve.beside import HUGE, Beside
from workbench.serve.chat import ChatTemplate
from workbench.serve.faults import ApiError, bad
from workbench.serve.fields import honoured
from workbench.serve.forms import Chat, Completions, Native
from workbench.serve.front import Front, not_known
from workbench.serve.openapi import described
from workbench.serve.reply import Form
from workbench.serve.schema import parse
from workbench.serve.streams import EventStream, OpenStreams, watched

AT_ONCE = 10_000  # entries of a list in an answer; a longer one is sent in parts of so many
LINGER_S = 2.0  # a client that sends too much is heard so long, so that it sees the answer
OPEN_PATHS = ("/health",)  # need no key


class Endpoints:
    """What each path does. All but /health and /metrics need a loaded model."""

    def __init__(self, front: Front, template: ChatTemplate):
        self.front, self.template = front, template
        self.settings, self.streams, self.beside = front.settings, OpenStreams(), Beside()
        self._tokenizer = front.texts.tokenizer
        self._began = int(time.time())

    # --- answers of the model ----------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        body = await self._body(request)
        api.check_entries(body.get("prompt"), self.front.check_serving().n_ctx)
        wanted = api.completion(body, self.settings.defaults)
        self._check_model(wanted.model)
        api.check_counts(wanted)
        form = Completions(self.settings.model, self.front.texts, wanted.include_usage)
        return await self._answer(request, wanted, await self._all_ids(wanted), form)

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        wanted = api.chat(body, self.settings.defaults)
        self._check_model(wanted.model)
        wanted = wanted._replace(prompts=[await self.template.prompt(body)])
        form = Chat(self.settings.model, self.front.texts, wanted.include_usage)
        return await self._answer(request, wanted, await self._all_ids(wanted), form)

    async def native(self, request: Request) -> Response:
        body = await self._body(request)
        api.check_entries(body.get("prompt"), self.front.check_serving().n_ctx)
        wanted = api.native(body, self.settings.defaults)
        self._check_model(wanted.model)
        form = Native(self.settings.model, self.front.texts)
        return await self._answer(request, wanted, await self._all_ids(wanted), form)

    async def _answer(
        self, request: Request, wanted: Wanted, prompts: list[list[int]], form: Form
    ) -> Response:
        reply = self.front.open(wanted, prompts, form)
        reply.abort = request.scope.get("state", {}).get("abort")
        watch = asyncio.ensure_future(watched(request.receive, reply))
        streams = False
        try:
            await reply.news()
            while not (wanted.stream or reply.over):
                await reply.news()
            if reply.error is not None:
                raise reply.error
            if wanted.stream:
                streams = True
                return EventStream(reply, watch, self.streams)
            if reply.dropped:
                raise ClientDisconnect
            return Response(form.whole(reply), media_type="application/json")
        finally:
            if not streams:
                watch.cancel()
                if not reply.over:
                    reply.drop()

    async def _all_ids(self, wanted: Wanted) -> list[list[int]]:
        n_ctx = self.front.check_serving().n_ctx
        for text in wanted.prompts:
            if isinstance(text, str):
                api.check_text(len(text), n_ctx, self.front.texts.longest)
        found = []
        for prompt in wanted.prompts:
            found.append(
                await self._ids(prompt, wanted.add_bos) if isinstance(prompt, str) else prompt
            )
            if found[-1]:  # of none, `Front.open` says so
                api.fitted(len(found[-1]), 0, n_ctx)  # before the next one takes its time
        return found

    async def _ids(
        self, text: str, add_bos: bool | None = None, parse_special: bool = True
    ) -> list[int]:
        encode = self._tokenizer.encode
        return await self.beside.run(len(text), encode, text, add_bos, parse_special)

    def _check_model(self, model: str | None) -> None:
        if model not in (None, ""):
            self._check_name(model)

    def _check_name(self, model: str) -> None:
        if model != self.settings.model:
            raise ApiError(
                404,
                f"model {model!r} is not served here; ask for {self.settings.model!r}",
                "model",
                "model_not_found",
            )

    # --- text --------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, "/tokenize")
        special = body.get("parse_special")
        tokens = await self._ids(
            body["content"],
            None if body.get("add_special") else False,
            True if special is None else special,
        )
        pieces = bool(body.get("with_pieces"))
        if len(tokens) <= AT_ONCE:
            return Response(b"".join(self._listed(tokens, pieces)), media_type="application/json")
        return StreamingResponse(
            _in_turns(self._listed(tokens, pieces)), media_type="application/json"
        )

    def _listed(self, tokens: list[int], pieces: bool) -> Iterator[bytes]:
        """The answer of /tokenize, in parts."""
        yield b'{"tokens":['
        for at in range(0, len(tokens), AT_ONCE):
            part: list[Any] = tokens[at : at + AT_ONCE]
            if pieces:
                part = [{"id": t, "piece": self._piece(t)} for t in part]
            yield b"," * bool(at) + json.dumps(part, separators=(",", ":"))[1:-1].encode()
        yield b"]}"

    def _piece(self, token: int) -> str | list[int]:
        raw = self.front.texts.shown(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return list(raw)

    async def detokenize(self, request: Request) -> Response:
        tokens = api.ids((await self._body(request, "/detokenize"))["tokens"])
        n_vocab = self._tokenizer.n_vocab
        if tokens and max(tokens) >= n_vocab:
            raise bad(not_known(max(tokens), n_vocab), "tokens")
        text = await self.beside.run(len(tokens), self._tokenizer.decode, tokens, special=True)
        return JSONResponse({"content": text})

    async def apply_template(self, request: Request) -> Response:
        body = await self._body(request, "/apply-template")
        prompt = await self.template.prompt(body)
        # of a lone surrogate no UTF-8 is made; the tokenizer writes it like this, too
        return JSONResponse({"prompt": prompt.encode("utf-8", "replace").decode("utf-8")})

    # --- what it is and how it does ------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        ready = self.front.check_serving()
        return {
            "id": self.settings.model,
            "object": "model",
            "created": self._began,
            "owned_by": "workbench",
            "meta": {"n_vocab": ready.n_vocab, "n_ctx": ready.n_ctx},
        }

    async def health(self, request: Request) -> Response:
        self.front.check_serving()
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(metrics.text_of(self.front), headers={"content-type": metrics.CONTENT_TYPE})

    async def props(self, request: Request) -> Response:
        ready = self.front.check_serving()
        return JSONResponse(
            {
                "default_generation_settings": {"n_ctx": ready.n_ctx},
                "total_slots": ready.n_slots,
                "model_alias": self.settings.model,
                "model_path": ready.model,
                "chat_template": self.template.source or "",
                "build_info": f"workbench on {ready.device}",
            }
        )

    async def slots(self, request: Request) -> Response:
        ready, totals = self.front.check_serving(), self.front.totals
        n_busy = totals.n_running if totals is not None else 0
        return JSONResponse(
            [
                {"id": i, "n_ctx": ready.n_ctx, "is_processing": i < n_busy}
                for i in range(ready.n_slots)
            ]
        )

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(described(self._tokenizer.n_vocab))

    # --- bodies ------------------------------------------------------------------------------

    async def _body(self, request: Request, path: str | None = None) -> dict[str, Any]:
        """The body as JSON, checked against the schema of `path`, if there is one. Raises ApiError,
        as for a server that takes no requests now."""
        self.front.check_serving()
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
        if kind.lower() != "application/json":
            raise ApiError(415, f"content-type {kind!r} is not known; send application/json")
        if "content-encoding" in request.headers:
            raise ApiError(415, "a content-encoding is not known; send the JSON itself")
        raw = await self._read(request)
        if len(raw) < HUGE:
            return _checked(raw, path)
        return await asyncio.to_thread(_checked, raw, path)

    async def _read(self, request: Request) -> bytes:
        most, parts, n = self.settings.max_body, [], 0
        said = request.headers.get("content-length", "0")
        too_long = said.isdecimal() and int(said) > most
        try:
            async with asyncio.timeout(LINGER_S if too_long else self.settings.body_s):
                async for part in request.stream():
                    n += len(part)
                    too_long = too_long or n > most
                    if too_long and n > 2 * most:
                        break
                    if not too_long:
                        parts.append(part)
        except TimeoutError:
            if not too_long:
                raise ApiError(
                    408, f"the body did not come within {self.settings.body_s:g} s; send it faster"
                ) from None
        if too_long:
            raise ApiError(413, f"the body has more than {most} bytes; send less")
        return b"".join(parts)


def _checked(raw: bytes, path: str | None) -> dict[str, Any]:
    body = parse(raw)
    if not isinstance(body, dict):
        raise bad("the body must be a JSON object")
    return body if path is None else honoured(body, path)


async def _in_turns(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    """The parts; others have their turn between two."""
    for part in parts:
        yield part
        await asyncio.sleep(0)


_HANDLED = (ApiError, HTTPException, ClientDisconnect, RecursionError, Exception)


# --- the application -------------------------------------------------------------------------


def build(front: Front, template: ChatTemplate) -> ASGIApp:
    """The application of a front. Its lifespan begins the front."""
    ends = Endpoints(front, template)
    posts = {
        "/v1/completions": ends.completions,
        "/v1/chat/completions": ends.chat,
        "/chat/completions": ends.chat,
        "/completion": ends.native,
        "/completions": ends.native,
        "/tokenize": ends.tokenize,
        "/detokenize": ends.detokenize,
        "/apply-template": ends.apply_template,
    }
    gets = {
        "/v1/models": ends.models,
        "/models": ends.models,
        "/v1/models/{name:path}": ends.model,
        "/health": ends.health,
        "/metrics": ends.metrics,
        "/props": ends.props,
        "/slots": ends.slots,
        "/openapi.json": ends.openapi,
    }

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await front.begin()
        await template.begin()
        sweeping = asyncio.ensure_future(ends.streams.sweep())
        yield
        sweeping.cancel()
        ends.beside.close()
        await template.close()

    def refused(request: Request, error: Exception) -> Response:
        return _error(front, error)

    app = Starlette(
        routes=[
            *(Route(path, end, methods=["POST"]) for path, end in posts.items()),
            *(Route(path, end, methods=["GET"]) for path, end in gets.items()),
        ],
        exception_handlers=dict.fromkeys(_HANDLED, refused),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return _with_key(app, front) if front.settings.keys else app


def _error(front: Front, error: Exception) -> Response:
    """What a client is told; of an error that is ours, stderr is told more."""
    headers = dict[str, str]()
    if isinstance(error, HTTPException):
        headers |= error.headers or {}  # what a path takes instead
        words = {404: "there is no such path", 405: "this path does not take this method"}
        error = ApiError(error.status_code, words.get(error.status_code, error.detail))
    elif isinstance(error, RecursionError):
        error = bad("the body nests too deeply")
    elif isinstance(error, ClientDisconnect):  # nobody reads it
        return Response(status_code=400)
    elif not isinstance(error, ApiError):
        traceback.print_exception(error, file=sys.stderr)
        error = ApiError(500, "the server failed; its log says how")
    if 400 <= error.status < 500:
        front.counted.outcomes["invalid"] += 1
    headers |= error.headers
    if error.status in (408, 413):  # what is left of the body is not waited for
        headers["connection"] = "close"
    return Response(error.body, error.status, headers, "application/json")


def _with_key(app: ASGIApp, front: Front) -> ASGIApp:
    """`app` for those who have a key."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = dict(scope["headers"])
            kind, _, key = headers.get(b"authorization", b"").partition(b" ")
            given = key.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")
            # all are compared, each in constant time
            if not sum(hmac.compare_digest(given, one) for one in front.settings.keys):
                error = ApiError(
                    401, "no valid API key; send it as `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                )  # fmt: skip
                await _error(front, error)(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded
