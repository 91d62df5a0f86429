"""Where a body is read: here, or in a process beside the event loop, which goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from workbench.serve.aside import Aside
from workbench.serve.faults import ApiError
from workbench.serve.reading import BodyRead, Reader, ReaderSpec

LONG = 4000  # bytes; less is read at once
HUGE = 1 << 18  # of these, one at a time: neither time nor memory is taken for many together
MOST_HUGE = 16
HUGE_NICE = 10  # streams come first where cores are few
RETRY_S = 10.0


class Beside:
    """Reads bodies. Long ones have a process, huge ones another: so a prompt of usual length never
    waits for a huge one. max_body: bytes of the largest body."""

    def __init__(self, spec: ReaderSpec, max_body: int):
        self._reader = Reader(spec)
        self._long, self._huge = Aside(spec, max_body), Aside(spec, max_body, HUGE_NICE)
        self._beginning: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Starts the process that most long bodies want."""
        self._beginning = asyncio.ensure_future(self._long.begin())

    async def run(self, parts: Sequence[bytes], method: str, *args: int) -> BodyRead:
        """What a method of `Reader` makes of a body, given in parts. Raises ApiError, with status
        503 where too many huge bodies wait."""
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
