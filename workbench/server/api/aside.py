"""Reads request bodies: in the event loop, or in a process beside it while the event loop goes on.

`Readers` chooses by the size of the body. `Aside` is such a process, seen from the front. The
process runs `main` of this file:

    front                             process
    a `ReaderSpec`, limits    ->
    a method, its arguments,
    the body in parts, and
    a part of no bytes        ->
                              <-      a `BodyRead` without its parts, or an ApiError
                              <-      its parts, and a part of no bytes

Each item is a length and so many bytes. A body that takes too much memory becomes an error in the
process. Where the process dies, the next body gets a new process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import IO, Any

from workbench.server.api.faults import FAILED_HERE, ApiError, bad
from workbench.server.api.reading import BodyRead, Reader, ReaderSpec

LENGTH_BYTES = 8
MOST_BYTES = 2 << 30  # of memory, and for each byte of a body:
BYTES_OF_ONE = 100
# a thread for each core would take most of that memory
ONE_THREAD = ("OPENBLAS_NUM_THREADS=1", "RAYON_NUM_THREADS=1")
LONG = 4000  # bytes; a shorter body is read in the event loop
HUGE = 1 << 18  # bytes; huge bodies are read one at a time, to bound time and memory
MOST_HUGE = 16
HUGE_NICE = 10  # streams come first where cores are few
RETRY_S = 10.0


class Readers:
    """Reads bodies. Long bodies have a process, and huge bodies another, so a prompt of usual
    length never waits for a huge one. max_body: bytes of the largest body."""

    def __init__(self, spec: ReaderSpec, max_body: int):
        self._reader = Reader(spec)
        self._long, self._huge = Aside(spec, max_body), Aside(spec, max_body, HUGE_NICE)
        self._beginning: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Starts the process that reads most long bodies."""
        self._beginning = asyncio.ensure_future(self._long.begin())

    async def run(self, parts: Sequence[bytes], method: str, *args: Any) -> BodyRead:
        """Reads a body, given in parts, by a method of `Reader`. Raises ApiError, with status 503
        where too many huge bodies wait."""
        size = sum(map(len, parts))
        if size < LONG:
            found: BodyRead = getattr(self._reader, method)(b"".join(parts), *args)
            return found
        if size < HUGE:
            return await self._long.run(parts, method, *args)
        if self._huge.n_waiting >= MOST_HUGE:
            raise ApiError(503, "too many huge texts wait; come again", retry_after_s=RETRY_S)
        return await self._huge.run(parts, method, *args)

    async def close(self) -> None:
        """Ends the processes."""
        if self._beginning is not None:
            self._beginning.cancel()
        await self._long.close()
        await self._huge.close()


class Aside:
    """The process, seen from the front. It reads bodies one at a time, in the order in which they
    came.

    max_body: bytes of the largest body.
    nice: the process' niceness, for when all cores are busy.
    """

    def __init__(self, spec: ReaderSpec, max_body: int, nice: int = 0):
        self._spec, self._nice = spec, nice
        self._most = MOST_BYTES + BYTES_OF_ONE * max_body
        self._process: asyncio.subprocess.Process | None = None
        self._alone = asyncio.Lock()
        self.n_waiting = 0  # bodies, the one that is read included

    async def run(self, parts: Sequence[bytes], method: str, *args: Any) -> BodyRead:
        """Reads a body by a method of `Reader`. Where the caller goes away, the process serves the
        next caller once it has read this body. Raises ApiError."""
        self.n_waiting += 1
        return await asyncio.shield(asyncio.ensure_future(self._run(parts, method, args)))

    async def begin(self) -> None:
        """Starts the process, so that the first body does not wait for its start."""
        async with self._alone:
            await self._started()

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
            self._process = await asyncio.create_subprocess_exec(
                "env", *ONE_THREAD, sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert self._process.stdin is not None
            begin = (self._spec, self._most, self._nice)
            self._process.stdin.write(framed(pickle.dumps(begin)))
        return self._process

    async def _run(self, parts: Sequence[bytes], method: str, args: tuple[Any, ...]) -> BodyRead:
        try:
            async with self._alone:
                try:
                    return await self._asked(parts, method, args)
                except (OSError, EOFError):  # IncompleteReadError is an EOFError
                    await self.close()
                    raise ApiError(
                        500, "the process that reads the body died; send less, or come again"
                    ) from None
                except asyncio.CancelledError:  # else the next caller would read this answer
                    await self.close()
                    raise
        finally:
            self.n_waiting -= 1

    async def _asked(self, parts: Sequence[bytes], method: str, args: tuple[Any, ...]) -> BodyRead:
        process = await self._started()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(framed(pickle.dumps((method, args))))
        for part in filter(None, parts):
            process.stdin.write(len(part).to_bytes(LENGTH_BYTES))
            process.stdin.write(part)
            await process.stdin.drain()
        process.stdin.write(framed(b""))
        found = pickle.loads(await _received(process.stdout))
        made = []
        while part := await _received(process.stdout):
            made.append(part)
        if isinstance(found, ApiError):
            raise found
        assert isinstance(found, BodyRead)
        return found._replace(parts=tuple(made))


def framed(data: bytes) -> bytes:
    """A length, and so many bytes."""
    return len(data).to_bytes(LENGTH_BYTES) + data


async def _received(stream: asyncio.StreamReader) -> bytes:
    n = int.from_bytes(await stream.readexactly(LENGTH_BYTES))
    return await stream.readexactly(n)


# --- the process -----------------------------------------------------------------------------


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to this process, too
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # a print must not become an answer
        spec, most, nice = pickle.loads(_frame(sys.stdin.buffer))
        os.nice(nice)
        if sys.platform == "linux":  # macOS has no such bound
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        reader = Reader(spec)
        gc.disable()  # a body is a tree: looking for cycles in it takes longer than reading it
        with contextlib.suppress(EOFError, BrokenPipeError):  # the server has ended
            while True:
                _answer(reader, sys.stdin.buffer, out)


def _answer(reader: Reader, given: IO[bytes], out: IO[bytes]) -> None:
    method, args = pickle.loads(_frame(given))
    body = b"".join(_parts(given))
    found = made(reader, method, body, args)
    parts: tuple[bytes, ...] = ()
    if isinstance(found, BodyRead):
        found, parts = found._replace(parts=()), found.parts
    out.write(framed(pickle.dumps(found)))
    for part in (*parts, b""):
        out.write(framed(part))
    out.flush()


def made(reader: Reader, method: str, body: bytes, args: Sequence[Any]) -> BodyRead | ApiError:
    """The result of a method for a body, or the error that it raises."""
    try:
        found: BodyRead = getattr(reader, method)(body, *args)
    except ApiError as error:
        return error
    except MemoryError:
        return bad("the body takes too much memory to be read; send less")
    except RecursionError:
        return bad("the body nests too deeply")
    except Exception:
        traceback.print_exc()
        return ApiError(500, FAILED_HERE)
    return found


def _frame(given: IO[bytes]) -> bytes:
    """Raises EOFError where the pipe is closed."""
    n = int.from_bytes(_exactly(given, LENGTH_BYTES))
    return _exactly(given, n)


def _exactly(given: IO[bytes], n: int) -> bytes:
    data = given.read(n)
    if len(data) < n:
        raise EOFError
    return data


def _parts(given: IO[bytes]) -> Iterator[bytes]:
    while part := _frame(given):
        yield part


if __name__ == "__main__":
    main()
