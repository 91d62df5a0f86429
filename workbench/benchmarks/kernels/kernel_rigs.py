"""How kernels are timed, and how the read bandwidth is measured, on each kind of device.

A rig knows how many bytes of weights must rotate so that no cache can hold them. It repeats
launches and times them: on a GPU by replays of a captured graph, on the CPU backends by calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from workbench.backend.base import Backend, Issue
from workbench.common.devices import is_gpu
from workbench.program.commands import COMPUTE_STREAM

if TYPE_CHECKING:
    from workbench.backend.cuda.device.backend import CudaBackend

PLAIN, PDL = "plain", "pdl"
MIN_ROTATING, MIN_CACHES = 256 << 20, 4  # rotating weights: bytes, and times the cache
QUICK_ROTATING = 64 << 20
H100_FLOOR = 3000.0  # GB/s; a sound SXM card reads at 3.1 to 3.2 TB/s


class Repeats(Protocol):
    """Launches that can be repeated, such as `backend.cuda.device.replay.TimedReplay`."""

    def time_us(self, n: int) -> list[float]:
        """The times of n repetitions, in us, after one untimed repetition."""

    def close(self) -> None: ...


class Rig(Protocol):
    """One device for `bench-kernels`."""

    kinds: tuple[str, ...]  # ways to launch: PLAIN, and PDL where the device has it
    how: str  # one line that describes a repetition
    cache_bytes: int  # size of the last cache before memory
    least_launches: int  # at least so many in one repetition
    pass_bytes: int  # about so many bytes of weights in one repetition

    def repeats(self, issues: Sequence[Issue]) -> Repeats: ...

    def read_rates(self) -> dict[str, float]:
        """The read bandwidth in GB/s, by way of reading: the fastest of several replays."""

    def void(self, read_gbps: float) -> str:
        """Why a run with this read bandwidth is not valid, in one line; empty where it is valid."""


def rotating_bytes(cache_bytes: int, quick: bool) -> int:
    """The least bytes of weights that rotate: more than four times the cache. quick: fewer bytes,
    so that a large cache is not cold."""
    if quick:
        return QUICK_ROTATING
    return max(MIN_ROTATING, MIN_CACHES * cache_bytes + 1)


class CudaRig:
    """A GPU: captured graphs of launches are replayed, and timed by the device's events."""

    how = "a captured graph of launches, replayed"
    least_launches = 20

    def __init__(self, backend: CudaBackend, quick: bool):
        from workbench.backend.cuda.device import replay

        self._backend, self._quick, self._replay = backend, quick, replay
        self.kinds: tuple[str, ...] = (
            (PLAIN, PDL) if backend.capabilities.programmatic else (PLAIN,)
        )
        self.cache_bytes = replay.l2_bytes(backend)
        self.pass_bytes = (1 << 29) if quick else (3 << 30)  # 1 ms at 3 TB/s

    def repeats(self, issues: Sequence[Issue]) -> Repeats:
        return self._replay.TimedReplay(self._backend, issues)

    def read_rates(self) -> dict[str, float]:
        nbytes = self._replay.READ_BYTES // (8 if self._quick else 1)
        return self._replay.read_rates(self._backend, nbytes, 2 if self._quick else 5)

    def void(self, read_gbps: float) -> str:
        name = self._backend.description
        if "H100" not in name or "PCIe" in name or read_gbps >= H100_FLOOR:
            return ""
        return (
            f"void: this H100 reads {read_gbps:.0f} GB/s, a sound one at least {H100_FLOOR:.0f}; "
            "see that no other process uses it, and measure again"
        )


class Calls:
    """Launches on a CPU backend, called in order with a wait at the end, timed by the host's
    clock."""

    def __init__(self, issues: Sequence[Issue], wait: Issue):
        self._issues, self._wait = tuple(issues), wait

    def time_us(self, n: int) -> list[float]:
        found = []
        for _ in range(n + 1):
            begin = time.perf_counter_ns()
            for issue in self._issues:
                issue()
            self._wait()
            found.append((time.perf_counter_ns() - begin) / 1e3)
        return found[1:]

    def close(self) -> None:
        self._issues = ()


# Ways of reading memory for which NumPy has vector code; the fastest depends on the processor. The
# argument is one thread's part, int64.
READERS: dict[str, Callable[[np.ndarray], Any]] = {
    "max int32": lambda part: np.maximum.reduce(part.view(np.int32)),
    "max int64": np.maximum.reduce,
    "sum int64": np.add.reduce,
}
PARTS_PER_THREAD = 8


class CpuRig:
    """The CPU backends: launches are called one after the other, without a graph."""

    kinds: tuple[str, ...] = (PLAIN,)
    how = "launches called and waited for"
    least_launches = 1

    def __init__(self, backend: Backend, quick: bool):
        self._backend, self._quick = backend, quick
        self.n_threads = backend.workers
        self.cache_bytes = last_cache_bytes()
        self.pass_bytes = QUICK_ROTATING if quick else MIN_ROTATING

    def repeats(self, issues: Sequence[Issue]) -> Repeats:
        return Calls(issues, self._backend.sync_stream(COMPUTE_STREAM))

    def read_rates(self) -> dict[str, float]:
        """Reads with NumPy, on as many threads as the backend has."""
        # filled, because a page gets memory at its first write
        data = np.full(rotating_bytes(self.cache_bytes, self._quick) // 8, 1, np.int64)
        parts = np.array_split(data, self.n_threads * PARTS_PER_THREAD)
        rates = {}
        with ThreadPoolExecutor(self.n_threads) as pool:
            for name, reader in READERS.items():
                taken = []
                for _ in range(3 if self._quick else 10):
                    begin = time.perf_counter_ns()
                    for _ in pool.map(reader, parts):
                        pass
                    taken.append(time.perf_counter_ns() - begin)
                rates[name] = data.nbytes / min(taken)
        return rates

    def void(self, read_gbps: float) -> str:
        return ""


def rig_of(backend: Backend, quick: bool) -> Rig:
    """The rig for an open backend."""
    if is_gpu(backend.name.split()[0]):
        return CudaRig(cast("CudaBackend", backend), quick)
    return CpuRig(backend, quick)


def last_cache_bytes() -> int:
    """Bytes of the first core's largest cache; 32 MB where the system does not report it."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes, default=32 << 20)
