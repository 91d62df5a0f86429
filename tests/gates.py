"""Gates: what holds a stream of a device, for tests and timings of what happens in between.

What is queued behind a gate starts when the gate is opened. A gate opens at the end of a `with`.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np

from workbench.backend.cpu.device import loops, signals
from workbench.backend.cpu.device.embedded import EmbeddedDevice
from workbench.backend.cpu.device.ring import aligned_zeros
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.device.driver import CudaMemory
from workbench.backend.cuda.kernels.kernel import Kernel
from workbench.program.commands import COMPUTE_STREAM, Space

GATE_SECONDS, N_GATES = 5.0, 256
# Pinned, of all gates of a device: to allocate more would wait for a gate that is closed.
_FLAGS: weakref.WeakKeyDictionary[CudaBackend, CudaMemory] = weakref.WeakKeyDictionary()
_KEPT: list[np.ndarray] = []  # a stream that nobody ended reads its gate to the end of the process


class Gate(AbstractContextManager["Gate"]):
    """Holds a stream until it is opened."""

    def open(self) -> None:
        raise NotImplementedError

    def __exit__(self, *error: object) -> None:
        self.open()


class EmbeddedGate(Gate):
    """Of the embedded device; it ends with the device."""

    def __init__(self, device: EmbeddedDevice, stream: int):
        ring = device.streams[stream]
        self._memory = aligned_zeros(signals.SIGNAL_BYTES)
        self._signal = int(self._memory.ctypes.data)
        signals.init_signal(self._signal)
        ring.push(loops.AWAIT, 1, (self._signal, 1, ring.address))
        _KEPT.append(self._memory)

    def open(self) -> None:
        signals.publish(self._signal, 1)


class CudaGate(Gate):
    """Of a GPU. After GATE_SECONDS it opens by itself: a forgotten gate cannot hang
    the device."""

    _n_gates: ClassVar[int] = 0

    def __init__(self, backend: CudaBackend, stream: int):
        backend.attach()
        if backend not in _FLAGS:
            _FLAGS[backend] = backend._driver.allocate(4 * N_GATES, Space.PINNED)
        self._memory = _FLAGS[backend]  # the kernel watches int32 number `number` of it
        number = CudaGate._n_gates % N_GATES
        CudaGate._n_gates += 1
        assert self._memory.array is not None
        self._flag = self._memory.array.view(np.int32)[number : number + 1]
        self._flag[0] = 0
        args: list[int | float] = [self._memory.address + 4 * number, int(GATE_SECONDS * 1e9)]
        kernel = Kernel("device", "gate", (1, 1), 1, args)
        backend._prepare(kernel, backend._stream(stream), "gate")()

    def open(self) -> None:
        self._flag[0] = 1


_GATES: weakref.WeakKeyDictionary[Any, list[Gate]] = weakref.WeakKeyDictionary()


def hold(backend: Any, stream: int = COMPUTE_STREAM) -> Gate:
    """Holds `stream` from now until the gate is opened or the backend closed."""
    if backend not in _GATES:
        gates, close = _GATES.setdefault(backend, []), backend.close

        def opened() -> None:
            for gate in gates:
                gate.open()
            close()

        backend.close = opened
    kind: Any = EmbeddedGate if isinstance(backend, EmbeddedDevice) else CudaGate
    _GATES[backend].append(kind(backend, stream))
    return _GATES[backend][-1]
