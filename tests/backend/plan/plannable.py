"""Plans of small kernels, for the tests of capture and replay on the embedded device."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.backend.cpu.device_kernels import address, append, spin
from workbench.backend.issue.bind import plannable
from workbench.backend.issue.issued import Issued
from workbench.program.commands import COMPUTE_STREAM

Part = tuple[Issued, int]  # a command, and its stream


def planned(device: Any, parts: list[Part], stream: int = COMPUTE_STREAM, uid: int = 0) -> Any:
    """The Plannable of `parts`, launched on `stream`."""
    work = plannable(device, [part for part, _ in parts], stream, [own for _, own in parts])
    work.uid = uid
    return work


class Log:
    """What kernels append to, one after the other; `spins` pass their time."""

    def __init__(self, device: Any, room: int = 1000):
        self._device = device
        self.words = np.zeros(room + 1, np.int64)

    def part(self, value: int, stream: int = 0) -> Part:
        ring = self._device.streams[stream]
        return ring.prepare(append.address, 1, (address(self.words), value), (0,)), stream

    def __call__(self, value: int, stream: int = 0) -> None:
        """Queues an append outside of any plan."""
        self.part(value, stream)[0]()

    @property
    def values(self) -> list[int]:
        return [int(v) for v in self.words[1 : self.words[0] + 1]]


def spins(device: Any, us: int, stream: int = 0, parts: int = 1) -> Part:
    return device.streams[stream].prepare(spin.address, parts, (1000 * us,)), stream


def records(device: Any, event: Any, stream: int) -> Part:
    return device.record(event, stream), stream


def waits(device: Any, event: Any, stream: int) -> Part:
    return device.wait(event, stream), stream
