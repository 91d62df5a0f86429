"""Long work beside the event loop, which goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from workbench.serve.faults import ApiError

LONG = 4000  # characters or token ids; less is done at once
HUGE = 1 << 18  # of these, one at a time: neither time nor memory is taken for many together
MOST_HUGE = 16
RETRY_S = 10.0

P = ParamSpec("P")
T = TypeVar("T")


class Beside:
    """Threads for texts. A huge one waits for huge ones only, and no prompt of usual length for
    it."""

    def __init__(self) -> None:
        self._huge = ThreadPoolExecutor(1, "huge-texts")
        self._n_huge = 0

    async def run(self, size: int, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns. size: characters or token ids. Raises ApiError (503) where too many
        huge ones wait."""
        if size < LONG:
            return work(*args, **kwargs)
        if size < HUGE:
            return await asyncio.to_thread(work, *args, **kwargs)
        if self._n_huge >= MOST_HUGE:
            raise ApiError(503, "too many huge texts wait; come again", retry_after_s=RETRY_S)
        self._n_huge += 1
        try:
            return await asyncio.wrap_future(self._huge.submit(work, *args, **kwargs))
        finally:
            self._n_huge -= 1

    def close(self) -> None:
        """What has not begun never begins."""
        self._huge.shutdown(wait=False, cancel_futures=True)
