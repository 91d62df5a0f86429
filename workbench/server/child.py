"""A process beside the event loop that answers one question after another.

`Child` is the process, seen from the front. The process calls `serve`:

    front                             process
    a question in parts       ->
    a part of no bytes        ->
                              <-      the answer in parts, and a part of no bytes

The first question sets the process up, and has no answer. Each part is a length and so many bytes.
Where the process dies, the next question gets a new process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO

LENGTH_BYTES = 8
PART_BYTES = 1 << 17  # long data is copied in parts: copying it whole would delay a stream
Answer = Callable[[Sequence[bytes]], Iterable[bytes]]  # from a question to its answer, in parts


class Child:
    """The process, seen from the front. It answers questions in the order in which they came.

    module: its `main` calls `serve`.
    setup: the first question.
    environment: variables of the process beside the front's own, as `NAME=value`.
    most: bytes of an answer; None where the process is trusted.
    """

    def __init__(
        self,
        module: str,
        setup: bytes,
        environment: Sequence[str] = (),
        most: int | None = None,
    ):
        self._module, self._setup, self._most = module, setup, most
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._alone = asyncio.Lock()

    async def begin(self) -> None:
        """Starts the process, so that the first question does not wait for its start."""
        async with self._alone:
            await self._started()

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def ask(self, parts: Iterable[bytes], limit_s: float | None = None) -> list[bytes]:
        """The answer to a question, both in parts.

        Raises TimeoutError for an answer that takes longer than limit_s. Raises OSError or EOFError
        where the process dies, or its answer exceeds `most`.
        """
        async with self._alone:
            try:
                async with asyncio.timeout(limit_s):
                    return await self._asked(parts)
            except BaseException:  # else the next caller would read this answer
                await self.close()
                raise

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            code = f"import sys; sys.path[:] = {sys.path!r}; from {self._module} import main"
            self._process = await asyncio.create_subprocess_exec(
                "env", *self._environment, sys.executable, "-c", f"{code}; main()",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert self._process.stdin is not None
            self._process.stdin.write(framed(self._setup) + framed(b""))
        return self._process

    async def _asked(self, parts: Iterable[bytes]) -> list[bytes]:
        process = await self._started()
        assert process.stdin is not None and process.stdout is not None
        for part in filter(None, parts):
            process.stdin.write(len(part).to_bytes(LENGTH_BYTES))
            process.stdin.write(part)
            await process.stdin.drain()
        process.stdin.write(framed(b""))
        answer, left = list[bytes](), self._most
        while n := int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES)):
            if left is not None and (left := left - n) < 0:
                raise EOFError("the answer is too long")
            answer.append(await process.stdout.readexactly(n))
        return answer


def framed(data: bytes) -> bytes:
    """A length, and so many bytes."""
    return len(data).to_bytes(LENGTH_BYTES) + data


def cut(data: bytes) -> tuple[bytes, ...]:
    """Bytes in parts. Copying a part delays no stream."""
    return tuple(data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES))


# --- the process -----------------------------------------------------------------------------


def serve(begin: Callable[[bytes], Answer]) -> None:
    """Answers questions until the front closes the pipe. begin: takes the first question, and
    returns the function that answers the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to this process, too
    given = sys.stdin.buffer
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # a print must not become an answer
        with contextlib.suppress(EOFError, BrokenPipeError):  # the server has ended
            answer = begin(b"".join(_parts(given)))
            while True:
                for part in (*answer([*_parts(given)]), b""):
                    out.write(framed(part))
                out.flush()


def _parts(given: IO[bytes]) -> Iterator[bytes]:
    """The parts of a question. Raises EOFError where the pipe is closed."""
    while n := int.from_bytes(_exactly(given, LENGTH_BYTES)):
        yield _exactly(given, n)


def _exactly(given: IO[bytes], n: int) -> bytes:
    data = given.read(n)
    if len(data) < n:
        raise EOFError
    return data
