"""Gates: what holds a stream of a GPU, for tests of what happens in between."""

from __future__ import annotations

from types import TracebackType

import numpy as np

from workbench.backend.cuda.driver import CudaMemory

GATE_SECONDS, N_GATES = 5.0, 256


class CudaGate:
    """Holds a stream: what is queued behind the gate starts when the gate is opened. After
    GATE_SECONDS it opens by itself: a forgotten gate cannot hang the device. It opens at the end of
    a `with`."""

    def __init__(self, flags: CudaMemory, number: int):
        assert flags.array is not None
        self._memory = flags  # pinned; the kernel watches int32 number `number` of it
        self._flag = flags.array.view(np.int32)[number : number + 1]
        self._flag[0] = 0

    @property
    def opened(self) -> bool:
        return bool(self._flag[0])

    def open(self) -> None:
        self._flag[0] = 1

    def __enter__(self) -> CudaGate:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.open()
