"""Two devices that copy as no GPU does, made of the embedded device (llama.cpp #17795).

In that thread the waits between copies and graphs went because stream order made them superfluous.
The backend interface promises no such order: nothing there says that what sets a tensor is ordered
against what computes. These are the two counter-examples of the discussion, as devices one can run:

* `OutOfOrderCopies` has a queue of copies beside each stream. A copy is done at some time before a
  Sync of its stream ends, in any order, and no launch, event or other stream waits for it. What
  waits for the queue at the boundary, `saaaasg`, is safe on it; what relies on order, `aaaag`, is
  not.
* `DetachedCopies` copies in a thread that belongs to the buffer: no stream knows of it, and no wait
  waits for it. All that can be relied on is a copy that blocks. No asynchronous pattern is safe.

Each has the capabilities it really has unless it is told to lie: with the embedded device's own
(`LIES`) it claims what it does not keep. Choices are drawn from `seed`.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from functools import partial

import numpy as np

from workbench.backend.base import Issue
from workbench.backend.cpu.device.embedded import EmbeddedDevice
from workbench.backend.issue.issued import Issued
from workbench.program.capabilities import Capabilities

# about copies; a copy that is made by a thread of its own is in no plan, and none claims that
LIES = replace(EmbeddedDevice.capabilities, capture=False)
QUICKEST_S, SLOWEST_S = 0.001, 0.003  # of a detached copy


class Hostile(EmbeddedDevice):
    """Memory that is freed is kept until the device is closed, for a careless program's copies may
    still be under way: they are to give wrong numbers and never a crash."""

    HONEST = LIES

    def __init__(self, threads: int = 0, seed: int = 0, capabilities: Capabilities | None = None):
        super().__init__(threads)
        self.capabilities = capabilities or self.HONEST  # type: ignore[misc]
        self._rng = np.random.default_rng(seed)
        self._freed: list[object] = []

    def _keep(self, thing: object) -> None:
        self._freed.append(thing)

    def close(self) -> None:
        self.synchronize()
        super().close()
        self._freed.clear()


class OutOfOrderCopies(Hostile):
    """Copies wait in a queue of their stream until it is synchronized, then run in any order, each
    before or after the launches that the Sync waits for."""

    name = "out_of_order"
    HONEST = replace(LIES, one_order=False)

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._queues: list[list[Issue]] = [[] for _ in self.streams]

    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issued:
        move = partial(ctypes.memmove, dst, src, nbytes)
        return Issued(partial(self._queues[stream].append, move), ("copy",))

    def sync_stream(self, stream: int) -> Issue:
        queue, launches_end = self._queues[stream], super().sync_stream(stream)

        def issue() -> None:
            calls, queue[:] = list(queue), []
            self._rng.shuffle(calls)  # type: ignore[arg-type]
            calls.insert(self._rng.integers(len(calls) + 1), launches_end)
            for call in calls:
                call()

        return issue

    def synchronize(self) -> None:
        for stream in range(len(self.streams)):
            self.sync_stream(stream)()


class DetachedCopies(Hostile):
    """A copy is a thread that starts at the call and takes its time. Where the device says that its
    copies block, the call returns when the thread has ended; nothing else ever waits for it."""

    name = "detached"
    HONEST = replace(LIES, asynchronous_copies=False, one_order=False)
    _copies: tuple[threading.Thread, ...] = ()

    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issued:
        def issue() -> None:
            takes = self._rng.uniform(QUICKEST_S, SLOWEST_S)
            copy = threading.Timer(takes, ctypes.memmove, (dst, src, nbytes))
            copy.start()
            if self.capabilities.asynchronous_copies:
                self._copies = (*(c for c in self._copies if c.is_alive()), copy)
            else:
                copy.join()

        return Issued(issue, ("copy",))

    def close(self) -> None:
        for copy in self._copies:
            copy.join()
        super().close()
