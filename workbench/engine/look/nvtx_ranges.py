"""NVTX ranges of an engine: what Nsight Systems, Nsight Compute and other tools draw and filter by.

A tool announces itself to NVTX before a process makes its first NVTX call, and NVTX loads it then.
So whether one listens is asked once, of NVTX itself: no variable is read here. Setting
`EngineConfig.nvtx` decides: `auto` (ranges where a tool listens), `on`, `off`.

All ranges are in one domain, DOMAIN. Their names are registered strings. Each kind of range is a
category (the span categories of `trace/spans.py`, and `prompt`, `request`, `server`, `case`), and
has a payload: an int64, but for a step, which has the fields of STEP.

Source: NVTX 3, nvToolsExt.h, nvToolsExtPayload.h, and the `nvtx` package of NVIDIA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from workbench.common.errors import UsageError
from workbench.engine.look.phases import PHASES, PhaseClock, Spent

DOMAIN = "workbench"
# payload of a step: its number, its tokens, and the cells that were in use before it
STEP = np.dtype([("step", np.int64), ("tokens", np.int64), ("cells", np.int64)])
_NOTHING = nullcontext()


class NoRanges:
    """Nobody listens. `NvtxRanges` says what each call is for."""

    on = False
    words = "off"

    def scope(self, name: str, category: str, payload: int) -> AbstractContextManager[None]:
        return _NOTHING

    def start(self, name: str, category: str, payload: int) -> int:
        return 0

    def stop(self, started: int) -> None:
        """Nothing was started."""

    def clock(self, spent: Spent, step: Callable[[], int]) -> PhaseClock:
        return PhaseClock(spent)


OFF = NoRanges()


class NvtxRanges(NoRanges):
    """The ranges of one engine, for the thread that uses it.

    depth: how many ranges of this thread are open. kept: what is made once for a program.
    listens: whether a tool does; without one, each call takes time, and nobody sees it.
    """

    on = True

    def __init__(self, domain: Any, listens: bool):
        self._domain, self.listens = domain, listens
        self.words = f"on, {'a tool listens' if listens else 'no tool listens'}"
        self.depth = 0
        self.kept = WeakKeyDictionary[Any, Any]()
        self._begin, self._finish = domain.push_range, domain.pop_range
        self._of_step = np.zeros(1, STEP)
        self._step = self.attributes("step", "step", self._of_step[0:1].reshape(()))
        self._fields = memoryview(self._of_step.view(np.int64).data)

    def attributes(self, name: str, category: str, payload: Any) -> Any:
        """What `push` and `start` take. name: a registered string, made once for a name."""
        return self._domain.get_event_attributes(message=name, category=category, payload=payload)

    def push(self, attributes: Any) -> None:
        """A range of this thread begins, inside those that are open."""
        self.depth += 1
        self._begin(attributes)

    def pop(self) -> None:
        """The innermost open range of this thread ends."""
        self.depth -= 1
        self._finish()

    def unwind(self, depth: int) -> None:
        """Ends ranges of this thread until no more than `depth` are open. An error has left them
        open."""
        while self.depth > depth:
            self.pop()

    @contextmanager
    def scope(self, name: str, category: str, payload: int) -> Iterator[None]:
        """A range of this thread around the body."""
        depth = self.depth
        self.push(self.attributes(name, category, payload))
        try:
            yield
        finally:
            self.unwind(depth)

    def start(self, name: str, category: str, payload: int) -> int:
        """A range of the process begins; others may begin and end meanwhile. What `stop` wants."""
        started: int = self._domain.start_range(self.attributes(name, category, payload))
        return started

    def start_step(self, step: int, n_tokens: int, n_cells: int) -> int:
        """The range of a step begins, a range of the process: steps may overlap."""
        fields = self._fields
        fields[0], fields[1], fields[2] = step, n_tokens, n_cells
        started: int = self._domain.start_range(self._step)
        return started

    def stop(self, started: int) -> None:
        """A range of the process ends."""
        self._domain.end_range(started)

    def clock(self, spent: Spent, step: Callable[[], int]) -> PhaseClock:
        """A clock whose phases are ranges. step: number of the step that they are for."""
        return _RangedClock(spent, self, step)


class _RangedClock(PhaseClock):
    """Phases are ranges of category `build`; the payload is the step's number."""

    def __init__(self, spent: Spent, ranges: NvtxRanges, step: Callable[[], int]):
        super().__init__(spent)
        self._ranges, self._step = ranges, step
        self._of = {phase: ranges.attributes(phase, "build", 0) for phase in PHASES}

    def begin(self, phase: str) -> int:
        attributes = self._of[phase]
        if attributes is not None:  # of a domain that nobody listens to
            attributes.payload = self._step()
        self._ranges.push(attributes)
        return super().begin(phase)

    def end(self, phase: str, start_ns: int) -> int:
        end_ns = super().end(phase, start_ns)
        self._ranges.pop()
        return end_ns

    def leave(self) -> None:
        self._ranges.pop()


def ranges_of(nvtx: str) -> NoRanges:
    """New ranges, as the setting `nvtx` of EngineConfig has them. Raises UsageError for `on` where
    the package `nvtx` is not installed."""
    if nvtx == "off":
        return OFF
    domain = _domain()
    if domain is None and nvtx == "on":
        raise UsageError("nvtx=on: the package nvtx is not installed here; use nvtx=off")
    listens = domain is not None and _listens(domain)
    return NvtxRanges(domain, listens) if listens or nvtx == "on" else OFF


@lru_cache(maxsize=1)
def _domain() -> Any:
    """The domain; of a dummy's type where no tool listens. None: the package has no build here."""
    try:
        import nvtx
    except ImportError:
        return None
    return nvtx.get_domain(DOMAIN)


def _listens(domain: Any) -> bool:
    """Whether a tool has announced itself to NVTX: else the domain is a dummy, which makes no
    attributes."""
    return domain.get_event_attributes(message="step") is not None
