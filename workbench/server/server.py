"""The server: a front, its socket, the engine process, and how they end.

A first SIGINT or SIGTERM ends the server gracefully: new requests get 503, running requests are
finished within `drain_s` seconds, and the engine process is told to end. A second signal ends
everything at once.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import NamedTuple, Protocol

import uvicorn

from workbench.common.errors import DeviceError, UsageError
from workbench.common.sizes import counted
from workbench.server.app import build
from workbench.server.chat import NO_TEMPLATE, ChatTemplate
from workbench.server.text import TokenTexts
from workbench.server.wire.front import DEAD, FINISHING, PREPARING, SERVING, Front, FrontSettings
from workbench.server.wire.link import Link
from workbench.server.wire.protocol import FrontProtocol

BACKLOG = 2048
KEEP_ALIVE_S = 75
ENGINE_END_S = 10.0  # an engine process that has not ended so long after Finish is killed
CLOSE_S = 5  # how long finished answers have to be sent


class EngineHandle(Protocol):
    """The methods of an engine process that the server calls: those of
    `multiprocessing.Process`."""

    def join(self, timeout: float | None = None) -> None: ...
    def kill(self) -> None: ...
    def is_alive(self) -> bool: ...


# starts the engine process with pipes for so many fronts (`worker.start`)
Start = Callable[[int], tuple[list[Connection], EngineHandle]]


class Listening(NamedTuple):
    """The address, and how long running requests have when the server is told to end."""

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 60.0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError where the address cannot be taken."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"cannot listen at {host} port {port}: {why}; choose another") from None


class FrontServer(uvicorn.Server):
    """uvicorn's server, which still answers while running requests are finished.

    stopped_by: the signal that told it to end.
    n_given_up: answers that were not finished in time.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        front: Front,
        engine: EngineHandle,
        drain_s: float,
        say: Callable[[str], None] = print,
    ):
        super().__init__(config)
        self._front, self._engine, self._drain_s, self._say = front, engine, drain_s, say
        self._until: float | None = None
        self._told = False
        self.stopped_by: signal.Signals | None = None
        self.n_given_up = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._until is not None:
            self._engine.kill()
            os._exit(128 + sig)
        self.stopped_by = signal.Signals(sig)  # uvicorn would raise it again, as an interrupt
        self.finish()

    def finish(self) -> None:
        """Ends the server gracefully."""
        self._until = time.monotonic() + self._drain_s
        self._front.refuse_new()

    async def on_tick(self, counter: int) -> bool:
        if self._until is None:
            return await super().on_tick(counter)
        if self.stopped_by is not None and not self._told and (n := self._front.n_pending):
            self._say(
                f"{self.stopped_by.name}: {counted(n, 'answer')} under way, at most "
                f"{self._drain_s:g} s more; a second signal ends all at once"
            )
        self._told = True
        late = time.monotonic() > self._until
        self.n_given_up = self._front.n_pending if late else 0
        if late:
            self._front.give_up()
        return late or self._front.n_pending == 0

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self._front.finish()


def serve(
    start: Start,
    texts: TokenTexts,
    template: str | None,
    settings: FrontSettings,
    listening: Listening,
    say: Callable[[str], None] = print,
    on_server: Callable[[FrontServer], None] | None = None,
) -> signal.Signals | None:
    """Serves until a signal comes, and returns it; None where `FrontServer.finish` ended it.

    start: starts the engine process.
    template: the chat template; None: ChatML.
    say: takes lines to print.
    on_server: called with the server before it runs.
    Raises UsageError for an address that cannot be taken. Raises DeviceError where the engine
    process ends by itself: pending requests have their answers then, and a supervisor may start the
    server again.
    """
    with listen(listening.host, listening.port) as sock:
        (connection,), engine = start(1)
        front = Front(Link(connection), texts, settings)
        chat = ChatTemplate(template, texts.tokenizer, settings.template_s)
        config = uvicorn.Config(
            build(front, chat), http=FrontProtocol, ws="none", lifespan="on", log_config=None,
            log_level="critical", access_log=False, server_header=False, proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=CLOSE_S,
        )  # fmt: skip
        server = FrontServer(config, front, engine, listening.drain_s, say)
        loaded = False

        def on_state() -> None:
            nonlocal loaded
            if front.state == DEAD:
                server.should_exit = True
            elif front.state == PREPARING:
                say(f"loaded: {settings.model}; compiling kernels and taking first steps")
            elif front.state == SERVING:
                loaded = True
                assert front.ready is not None
                each = f"{front.ready.n_slots} slots, {front.ready.n_ctx} tokens each"
                say(f"ready: {settings.model} at {address_of(sock)} ({each})")

        front.on_state = on_state
        if not (settings.keys or is_loopback(sock)):
            say(f"warning: {address_of(sock)} takes requests of other machines, and asks no key")
        if on_server is not None:
            on_server(server)
        say(f"listening at {address_of(sock)}; loading {settings.model}")
        if template is None:
            say(f"note: {NO_TEMPLATE}")
        try:
            server.run(sockets=[sock])
        finally:
            _end(engine, graceful=front.state == FINISHING)
            connection.close()
        if server.stopped_by is not None:
            say(f"ended by {server.stopped_by.name}; {_left(front, server, listening.drain_s)}")
            return server.stopped_by
        if front.state == DEAD and not loaded:
            raise DeviceError("the engine process ended before it had loaded the model; see above")
        if front.state == DEAD:
            raise DeviceError("the engine process has died; start the server again")
        return None


def _left(front: Front, server: FrontServer, drain_s: float) -> str:
    """What became of the answers under way when a signal came, in words."""
    if front.state == DEAD:  # a supervisor sends the signal to the whole group
        return "the engine process ended before it was told to, and its answers with it"
    if server.n_given_up:
        return f"{counted(server.n_given_up, 'answer')} not finished within {drain_s:g} s"
    return "every answer was finished"


def is_loopback(sock: socket.socket) -> bool:
    """Whether only this machine reaches the socket."""
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


def address_of(sock: socket.socket) -> str:
    """The socket's address as a URL."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _end(engine: EngineHandle, graceful: bool) -> None:
    engine.join(ENGINE_END_S if graceful else 0)
    if engine.is_alive():
        engine.kill()
        engine.join(ENGINE_END_S)
