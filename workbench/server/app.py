"""The endpoints, as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from workbench.server import metrics
from workbench.server.api.aside import Readers
from workbench.server.api.faults import FAILED_HERE, ApiError, bad
from workbench.server.api.fields import CHAT, COMPLETIONS, NATIVE
from workbench.server.api.forms import FORMS
from workbench.server.api.openapi import described
from workbench.server.api.reading import BodyRead, ReaderSpec, check_model
from workbench.server.chat import ChatTemplate
from workbench.server.streams import OpenStreams, answered
from workbench.server.wire.front import Front

AT_ONCE = 3  # parts of an answer; more are sent one by one
PREFLIGHT_S = 600  # how long a browser remembers that its pages may ask
UNREAD = (408, 413)  # the rest of the body is not read
OPEN_PATHS = ("/health",)  # need no key


class Endpoints:
    """The handlers of all paths. All paths except /health and /metrics need a loaded model."""

    def __init__(self, front: Front, template: ChatTemplate):
        self.front, self.template = front, template
        self.settings, self.streams, texts = front.settings, OpenStreams(), front.texts
        self.readers = Readers(
            ReaderSpec(
                texts.tokenizer, texts.longest, self.settings.model, self.settings.defaults,
                template.source,
            ),
            self.settings.max_body,
        )  # fmt: skip
        self._began = int(time.time())

    async def answer(self, route: str, request: Request) -> Response:
        """Answers a request for tokens: parse, prompt, open, reply. route: the path whose form the
        answer has."""
        n_ctx, settings = self.front.check_serving().n_ctx, self.settings
        read = await self._read(request, "request", route, n_ctx)
        if route == CHAT:
            line = await self.template.rendered(read.parts)
            read = await self.readers.run(line, "rendered", read.wanted, n_ctx)
        assert read.wanted is not None
        form = FORMS[route](settings.model, self.front.texts, read.wanted.include_usage)
        reply = self.front.open(read.wanted, read.prompts, form)
        return await answered(request, reply, self.streams)

    # --- text --------------------------------------------------------------------------------

    async def text(self, method: str, request: Request) -> Response:
        """The answer that a method of `Reader` writes."""
        self.front.check_serving()
        return _in_parts(await self._read(request, method))

    async def apply_template(self, request: Request) -> Response:
        self.front.check_serving()
        read = await self._read(request, "template_values")
        line = await self.template.rendered(read.parts)
        return _in_parts(await self.readers.run(line, "prompt_answer"))

    # --- what it is and how it does ------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["name"], self.settings.model)
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
        front = self.front
        found = metrics.text_of(front.counted, front.totals, front.n_pending)
        return Response(found, headers={"content-type": metrics.CONTENT_TYPE})

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
        return JSONResponse(described(self.front.texts.tokenizer.n_vocab))

    # --- bodies ------------------------------------------------------------------------------

    async def _read(self, request: Request, method: str, *args: Any) -> BodyRead:
        """The body, read by a method of `Reader`. Raises ApiError."""
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
        if kind.lower() != "application/json":
            raise ApiError(415, f"content-type {kind!r} is not known; send application/json")
        if "content-encoding" in request.headers:
            raise ApiError(415, "a content-encoding is not known; send the JSON itself")
        return await self.readers.run(await self._parts(request), method, *args)

    async def _parts(self, request: Request) -> list[bytes]:
        """The bytes of the body. A body whose length is given as too long is not read."""
        most, body_s = self.settings.max_body, self.settings.body_s
        said = request.headers.get("content-length", "0")
        n = int(said) if said.isdecimal() else 0
        parts: list[bytes] = []
        if n <= most:
            n = 0
            try:
                async with asyncio.timeout(body_s):
                    async for part in request.stream():
                        n += len(part)
                        parts.append(part)
                        if n > most:
                            break
            except TimeoutError:
                raise ApiError(
                    408, f"the body did not come within {body_s:g} s; send it faster"
                ) from None
        if n > most:
            raise ApiError(413, f"the body has more than {most} bytes; send less")
        return parts


def _in_parts(read: BodyRead) -> Response:
    """The parts as an answer. Other requests get the event loop between two parts."""
    parts = read.parts
    if len(parts) <= AT_ONCE:
        return Response(b"".join(parts), media_type="application/json")
    return StreamingResponse(_one_by_one(parts), media_type="application/json")


async def _one_by_one(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
        await asyncio.sleep(0)


_HANDLED = (ApiError, HTTPException, ClientDisconnect, RecursionError, Exception)


# --- the application -------------------------------------------------------------------------


def build(front: Front, template: ChatTemplate) -> ASGIApp:
    """The application of a front. The start of its lifespan starts the front."""
    ends = Endpoints(front, template)
    posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/v1/completions": partial(ends.answer, COMPLETIONS),
        "/v1/chat/completions": partial(ends.answer, CHAT),
        "/chat/completions": partial(ends.answer, CHAT),
        "/completion": partial(ends.answer, NATIVE),
        "/completions": partial(ends.answer, NATIVE),
        "/tokenize": partial(ends.text, "tokenize"),
        "/detokenize": partial(ends.text, "detokenize"),
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
        if front.settings.reads_at_once:
            ends.readers.begin()
        sweeping = asyncio.ensure_future(ends.streams.sweep())
        yield
        sweeping.cancel()
        await ends.readers.close()
        await template.close()

    def refused(request: Request, error: Exception) -> Response:
        answer = _error(front, error)
        refuse = request.scope.get("state", {}).get("refuse")
        if refuse is not None and answer.status_code in UNREAD and isinstance(error, ApiError):
            refuse(error)  # the body of the answer is not sent twice
        return answer

    app = Starlette(
        routes=[
            *(Route(path, end, methods=["POST"]) for path, end in posts.items()),
            *(Route(path, end, methods=["GET"]) for path, end in gets.items()),
        ],
        exception_handlers=dict.fromkeys(_HANDLED, refused),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    guarded = _with_key(app, front) if front.settings.keys else app
    return _with_origins(guarded, front.settings.origins) if front.settings.origins else guarded


def _error(front: Front, error: Exception) -> Response:
    """The answer that reports an error. stderr gets the traceback of an error of the server."""
    headers = dict[str, str]()
    if isinstance(error, HTTPException):
        headers |= error.headers or {}  # the methods that the path takes
        words = {404: "there is no such path", 405: "this path does not take this method"}
        error = ApiError(error.status_code, words.get(error.status_code, error.detail))
    elif isinstance(error, RecursionError):
        error = bad("the body nests too deeply")
    elif isinstance(error, ClientDisconnect):  # the client does not read it
        return Response(status_code=400)
    elif not isinstance(error, ApiError):
        traceback.print_exception(error, file=sys.stderr)
        error = ApiError(500, FAILED_HERE)
    if 400 <= error.status < 500:
        front.counted.outcomes["invalid"] += 1
    headers |= error.headers
    if error.status in UNREAD:
        headers["connection"] = "close"
    return Response(error.body, error.status, headers, "application/json")


def _with_key(app: ASGIApp, front: Front) -> ASGIApp:
    """`app` for requests with a key."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = dict(scope["headers"])
            kind, _, key = headers.get(b"authorization", b"").partition(b" ")
            given = key.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")
            # every key is compared, each in constant time
            if not sum(hmac.compare_digest(given, one) for one in front.settings.keys):
                error = ApiError(
                    401, "no valid API key; send it as `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                )  # fmt: skip
                await _error(front, error)(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded


def _with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app`, open to pages of some origins. Browsers ask first whether a page may send a request;
    that question has no key."""
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",),
        expose_headers=("retry-after", "www-authenticate"), max_age=PREFLIGHT_S,
    )  # fmt: skip
