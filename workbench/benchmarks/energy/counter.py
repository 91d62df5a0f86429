"""The energy counter of a GPU: mJ since the driver was loaded.

The driver adds to the counter at a cadence of its own, and the counter stands still in between. On
an H100 an update comes every 100 ms, and a read takes about 3 ms. So `Meter` waits for updates.
Then the time of a change is known to one read, and not only to the time between two updates.

The counter is NVML's `nvmlDeviceGetTotalEnergyConsumption`. It counts the whole board: memory, what
the board draws while it is idle, and work of other processes. It does not count the host.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from workbench.common.devices import is_gpu
from workbench.common.errors import DeviceError
from workbench.common.extras import install

if TYPE_CHECKING:
    from workbench.backend.base import Backend

STILL_S = 3.0  # a counter that stands still for so long does not count
WATCHED = 10  # updates


class EnergyCounter(Protocol):
    """A counter of energy with the clock of its reads."""

    @property
    def name(self) -> str:
        """The counter in one phrase, for results and errors."""

    def now_ns(self) -> int:
        """The time now, in ns."""

    def read_mj(self) -> int:
        """The energy since some time in the past, in mJ."""


class NvmlCounter:
    """NVML's counter of the GPU of a backend."""

    def __init__(self, backend: Backend):
        """Raises DeviceError where the backend is no GPU, NVML is not installed, or the GPU has no
        such counter."""
        if not is_gpu(backend.name):
            raise DeviceError(
                f"energy is counted by an NVIDIA GPU, and this engine computes on {backend.name}; "
                "leave energy out, or take device=cuda"
            )
        try:
            import pynvml
        except ImportError:
            raise DeviceError(
                f"energy needs pynvml, which is not installed; {install('gpu')}"
            ) from None
        self._nvml: Any = pynvml
        self.name = "nvmlDeviceGetTotalEnergyConsumption"
        try:
            pynvml.nvmlInit()  # stays initialised: a handle lives as long as the process
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid_of(backend))
            self.read_mj()
        except pynvml.NVMLError as error:
            raise DeviceError(
                f"{backend.description} has no energy counter (NVML: {error}); leave energy out"
            ) from None

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def read_mj(self) -> int:
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))


def uuid_of(backend: Backend) -> str:
    """The UUID of a backend's GPU as NVML writes it. NVML numbers the GPUs of a machine, and
    CUDA_VISIBLE_DEVICES those of a process, so a number would name another GPU."""
    from cuda.bindings import driver

    number = int(backend.name.partition(" ")[2] or 0)
    error, device = driver.cuDeviceGet(number)
    if error == driver.CUresult.CUDA_SUCCESS:
        error, found = driver.cuDeviceGetUuid(device)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"GPU {number} tells no UUID ({error.name}); leave energy out")
    return f"GPU-{uuid.UUID(bytes=bytes(found.bytes))}"


class Update(NamedTuple):
    """An update of a counter.

    ns: when the read that found it had returned.
    late_ns: since the read before had returned; the update came within this time.
    mj: the new value.
    """

    ns: int
    late_ns: int
    mj: int


class Steps(NamedTuple):
    """A counter's updates as they were watched: medians of the time between two of them, in s, and
    of the energy of a step, in J; and the mean power over all, in W."""

    cadence_s: float
    step_j: float
    mean_w: float


class Meter:
    """Finds updates of a counter."""

    def __init__(self, counter: EnergyCounter):
        self.counter = counter

    def update(self) -> Update:
        """Reads until the counter changes. Raises DeviceError where it stands still for STILL_S."""
        counter = self.counter
        old, before = counter.read_mj(), counter.now_ns()
        begun = before
        while True:
            mj, now = counter.read_mj(), counter.now_ns()
            if mj != old:
                return Update(now, now - before, mj)
            before = now
            if now - begun > STILL_S * 1e9:
                raise DeviceError(
                    f"{counter.name} stood still for {STILL_S:.0f} s, so it counts no energy here; "
                    "leave energy out"
                )

    def watch(self, n: int = WATCHED) -> Steps:
        """Watches n updates after a first one."""
        found = [self.update() for _ in range(n + 1)]
        ns, mj = (np.diff([getattr(one, of) for one in found]) for of in ("ns", "mj"))
        return Steps(
            float(np.median(ns)) / 1e9, float(np.median(mj)) / 1e3, mj.sum() * 1e6 / ns.sum()
        )
