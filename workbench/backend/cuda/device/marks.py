"""Times at which the device passed a point of a stream, on the host's clock, from timing events."""

import time
from dataclasses import dataclass
from typing import Any

from workbench.backend.cuda.device.driver import CudaEvent, Driver

CLOCK_TRIES, CLOCK_MAX_AGE_NS = 5, 2_000_000_000


@dataclass(slots=True, eq=False)
class Mark:
    """A recorded timing event. It returns to the pool when nobody holds the mark any more."""

    event: CudaEvent
    pool: list[CudaEvent]

    def __del__(self) -> None:
        self.pool.append(self.event)


class Marks:
    """The marks of a device.

    n_made: events that exist, in the pool and in marks that somebody holds.
    """

    def __init__(self, driver: Driver):
        self._driver = driver
        self._pool: list[CudaEvent] = []
        self._clock: tuple[CudaEvent, int] | None = None
        self.n_made = 0

    def make(self, stream: Any, idle: Any) -> Mark:
        """Records a mark on the CUstream `stream`. Where nobody holds a mark, the clocks are
        compared anew first, on the CUstream `idle`."""
        if self.n_made == len(self._pool):
            self._set_clock(idle)
        if not self._pool:
            self._driver.attach()
            self._pool.append(self._driver.event(timing=True))
            self.n_made += 1
        mark = Mark(self._pool.pop(), self._pool)
        self._driver.call("cuEventRecord", "a mark", mark.event.handle, stream)
        return mark

    def resolve(self, begin: Mark, end: Mark) -> tuple[int, int]:
        """When the device passed two marks, in ns of the host's clock.

        The device measures the time between marks (resolution 0.5 us). The clocks were compared
        when the trace began: the host recorded an event on an idle stream and waited for it. The
        quickest of five tries counts. The error is half its round trip, some 5 us, plus the drift
        of the clocks since, about 1 us a second.
        """
        assert self._clock is not None, "a mark is made before it is resolved"
        base, base_ns = self._clock
        start = base_ns + round(self._elapsed_ms(base, begin.event) * 1e6)
        return start, start + round(self._elapsed_ms(begin.event, end.event) * 1e6)

    def clear(self) -> None:
        """Gives the events back. A mark that somebody still holds keeps its event to its own
        end."""
        self._pool.clear()
        self._clock = None

    def _elapsed_ms(self, begin: CudaEvent, end: CudaEvent) -> float:
        return self._driver.call("cuEventElapsedTime", "reading marks", begin.handle, end.handle)

    def _set_clock(self, stream: Any) -> None:
        if self._clock and time.perf_counter_ns() - self._clock[1] < CLOCK_MAX_AGE_NS:
            return
        self._driver.attach()
        call, best = self._driver.call, None
        for _ in range(CLOCK_TRIES):
            event = self._driver.event(timing=True)
            before = time.perf_counter_ns()
            call("cuEventRecord", "setting the clock", event.handle, stream)
            call("cuEventSynchronize", "setting the clock", event.handle)
            after = time.perf_counter_ns()
            if best is None or after - before < best[0]:
                best = after - before, event, (before + after) // 2
        assert best is not None
        self._clock = best[1], best[2]
