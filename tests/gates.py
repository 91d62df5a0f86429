"""Gates: what holds a stream of a device, for tests and timings of what happens in between.

What is queued behind a gate starts when the gate is opened. A gate opens at the end of a `with`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from workbench.backend.cpu.device import loops, signals
from workbench.backend.cpu.device.embedded import EmbeddedDevice
from workbench.backend.cpu.device.ring import aligned_zeros
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.device.driver import CudaMemory
from workbench.backend.cuda.kernels.kernel import Kernel
from workbench.program.commands import COMPUTE_STREAM, Space

GATE_SECONDS, N_GATES, NUMBERS = 5.0, 256, count()
# Pinned, of all gates of a device: to allocate more would wait for a gate that is closed.
_FLAGS: weakref.WeakKeyDictionary[CudaBackend, CudaMemory] = weakref.WeakKeyDictionary()
_KEPT: list[np.ndarray] = []  # a stream that nobody ended reads its gate to the end of the process
_GATES: weakref.WeakKeyDictionary[Any, list[Gate]] = weakref.WeakKeyDictionary()


class Gate(AbstractContextManager["Gate"]):
    """Holds a stream until it is opened."""

    def __init__(self, opened: Callable[[], Any]):
        self.open = opened

    def __exit__(self, *error: object) -> None:
        self.open()


def _embedded(device: EmbeddedDevice, stream: int) -> Callable[[], Any]:
    """It ends with the device."""
    ring, memory = device.streams[stream], aligned_zeros(signals.SIGNAL_BYTES)
    signal = int(memory.ctypes.data)
    signals.init_signal(signal)
    ring.push(loops.AWAIT, 1, (signal, 1, ring.address))
    _KEPT.append(memory)
    return partial(signals.publish, signal, 1)


def _cuda(backend: CudaBackend, stream: int) -> Callable[[], Any]:
    """After GATE_SECONDS it opens by itself: a forgotten gate cannot hang the device."""
    backend.attach()
    if backend not in _FLAGS:
        _FLAGS[backend] = backend._driver.allocate(4 * N_GATES, Space.PINNED)
    memory, number = _FLAGS[backend], next(NUMBERS) % N_GATES  # the kernel watches that int32
    assert memory.array is not None
    flag = memory.array.view(np.int32)[number : number + 1]
    flag[0] = 0
    args: list[int | float] = [memory.address + 4 * number, int(GATE_SECONDS * 1e9)]
    kernel = Kernel("device", "gate", (1, 1), 1, args)
    backend._prepare(kernel, backend._stream(stream), "gate")()
    return partial(flag.fill, 1)


def hold(backend: Any, stream: int = COMPUTE_STREAM) -> Gate:
    """Holds `stream` from now until the gate is opened or the backend closed."""
    if backend not in _GATES:
        gates, close = _GATES.setdefault(backend, []), backend.close

        def opened() -> None:
            for gate in gates:
                gate.open()
            close()

        backend.close = opened
    held = _embedded if isinstance(backend, EmbeddedDevice) else _cuda
    _GATES[backend].append(Gate(held(backend, stream)))
    return _GATES[backend][-1]
