"""Small kernels, and plans of them, for the tests of streams: only order and time matter."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc

from workbench.backend.cpu.device.atomics import fetch_add, load, put
from workbench.backend.cpu.device.embedded import open_backend as open_backend
from workbench.backend.cpu.device.loops import KERNEL
from workbench.backend.cpu.device.signals import now_ns
from workbench.backend.issue.bind import plannable
from workbench.backend.issue.issued import Issued
from workbench.program.commands import COMPUTE_STREAM

Part = tuple[Issued, int]  # a command, and its stream


@cfunc(KERNEL, cache=True)
def append(args, part, n_parts):
    """args: log, value. log[0] counts the values after it. Streams may append side by side."""
    log = load(args)
    put(log + 8 + 8 * fetch_add(log, 1), load(args + 8))


@cfunc(KERNEL, cache=True)
def spin(args, part, n_parts):
    """args: nanoseconds. Occupies its worker that long."""
    end = now_ns() + load(args)
    while now_ns() < end:
        pass


@cfunc(KERNEL, cache=True)
def meet(args, part, n_parts):
    """args: words, n. Waits for n of these to have begun, 5 s at most. words[1] counts who met."""
    words, n, end = load(args), load(args + 8), now_ns() + 5_000_000_000
    fetch_add(words, 1)
    while load(words) < n and now_ns() < end:
        pass
    fetch_add(words + 8, load(words) // n)


@cfunc(KERNEL, cache=True)
def count_parts(args, part, n_parts):
    """args: words. words[part] += 1, and not atomically."""
    word = load(args) + 8 * part
    put(word, load(word) + 1)


@cfunc(KERNEL, cache=True)
def mix(args, part, n_parts):
    """args: dst, src, words, value, nanoseconds. After the time has passed, dst = 3 * dst + src +
    value, in int64 words shared by the parts."""
    dst, src, n, value = load(args), load(args + 8), load(args + 16), load(args + 24)
    end = now_ns() + load(args + 32)
    while now_ns() < end:
        pass
    for i in range(part * n // n_parts, (part + 1) * n // n_parts):
        put(dst + 8 * i, 3 * load(dst + 8 * i) + load(src + 8 * i) + value)


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def planned(device: Any, parts: list[Part], stream: int = COMPUTE_STREAM) -> Any:
    """The Plannable of `parts`, launched on `stream`."""
    return plannable(device, [part for part, _ in parts], stream, [own for _, own in parts])


class Log:
    """What kernels append to, one after the other."""

    def __init__(self, device: Any, room: int = 1000):
        self.device, self.words = device, np.zeros(room + 1, np.int64)

    def part(self, value: int, stream: int = 0) -> Part:
        ring = self.device.streams[stream]
        return ring.prepare(append.address, 1, (address(self.words), value), (0,)), stream

    def __call__(self, value: int, stream: int = 0) -> None:
        """Queues an append outside of any plan."""
        self.part(value, stream)[0]()

    @property
    def values(self) -> list[int]:
        return self.words[1 : self.words[0] + 1].tolist()


def spins(device: Any, us: int, stream: int = 0, parts: int = 1) -> Part:
    return device.streams[stream].prepare(spin.address, parts, (1000 * us,)), stream


def records(device: Any, event: Any, stream: int) -> Part:
    return device.record(event, stream), stream


def waits(device: Any, event: Any, stream: int) -> Part:
    return device.wait(event, stream), stream
