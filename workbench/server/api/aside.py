"""Reads request bodies: in the event loop, or in a process beside it while the event loop goes on.

`Readers` chooses by the size of the body. `Aside` is such a process. It is set up with a
`ReaderSpec` and limits. A question is a method, its arguments, and the body in parts. The answer is
a `BodyRead` without its parts, or an ApiError; then its parts. A body that takes too much memory
becomes an error in the process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import resource
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from workbench.server.api.faults import FAILED_HERE, ApiError, bad
from workbench.server.api.reading import BodyRead, Reader, ReaderSpec
from workbench.server.child import Answer, Child, serve

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


class Aside(Child):
    """The process. It reads bodies one at a time, in the order in which they came.

    max_body: bytes of the largest body.
    nice: the process' niceness, for when all cores are busy.
    """

    def __init__(self, spec: ReaderSpec, max_body: int, nice: int = 0):
        setup = pickle.dumps((spec, MOST_BYTES + BYTES_OF_ONE * max_body, nice))
        super().__init__(__name__, setup, ONE_THREAD)
        self.n_waiting = 0  # bodies, the one that is read included

    async def run(self, parts: Sequence[bytes], method: str, *args: Any) -> BodyRead:
        """Reads a body by a method of `Reader`. Where the caller goes away, the process serves the
        next caller once it has read this body. Raises ApiError."""
        self.n_waiting += 1
        return await asyncio.shield(asyncio.ensure_future(self._run(parts, method, args)))

    async def _run(self, parts: Sequence[bytes], method: str, args: tuple[Any, ...]) -> BodyRead:
        try:
            answer, *made = await self.ask((pickle.dumps((method, args)), *parts))
        except (OSError, EOFError):  # IncompleteReadError is an EOFError
            raise ApiError(
                500, "the process that reads the body died; send less, or come again"
            ) from None
        finally:
            self.n_waiting -= 1
        found = pickle.loads(answer)
        if isinstance(found, ApiError):
            raise found
        assert isinstance(found, BodyRead)
        return found._replace(parts=tuple(made))


# --- the process -----------------------------------------------------------------------------


def main() -> None:
    serve(_begin)


def _begin(setup: bytes) -> Answer:
    spec, most, nice = pickle.loads(setup)
    os.nice(nice)
    if sys.platform == "linux":  # macOS has no such bound
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    reader = Reader(spec)
    gc.disable()  # a body is a tree: looking for cycles in it takes longer than reading it

    def answer(question: Sequence[bytes]) -> Sequence[bytes]:
        method, args = pickle.loads(question[0])
        found = made(reader, method, b"".join(question[1:]), args)
        if isinstance(found, ApiError):
            return [pickle.dumps(found)]
        return [pickle.dumps(found._replace(parts=())), *found.parts]

    return answer


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
