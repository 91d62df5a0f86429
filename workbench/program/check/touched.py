"""Who touched which bytes last, and which accessors race.

An access races with an earlier access that its clock does not hold. The latest access of an
accessor stands for all of its accesses: if the latest is over, all are. So a log keeps each
timeline's accessors with the number of their latest access, in the order of these numbers.
(FastTrack, Flanagan and Freund, PLDI 2009, keeps the latest access alone. Here every racing pair is
wanted.)
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import gt
from typing import NamedTuple

from workbench.program.check.clocks import Clock, Clocks


class RacingPair(NamedTuple):
    """Two accessors that race, in host order, and the first steps in which they do."""

    first: int
    second: int
    first_step: int
    second_step: int


class RacingPairs:
    """Pairs of accessors that race. Each pair is kept once, and takes twelve bytes."""

    def __init__(self) -> None:
        self._of: dict[int, array[int]] = {}  # of a second accessor: first ones, with both steps

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[RacingPair]:
        for second, flat in self._of.items():
            for first, one, other in zip(*[iter(flat)] * 3, strict=True):
                yield RacingPair(first, second, one, other)

    def add(self, second: int, step: int, firsts: Mapping[int, int]) -> None:
        """`second`, issued in `step`, races with `firsts`: accessors, each with its step."""
        flat = self._of.setdefault(second, array("I"))
        known = set(flat[::3])
        for first, its_step in firsts.items():
            if first not in known:
                flat.extend((first, its_step, step))

    def with_second(self, second: int) -> frozenset[int]:
        """The accessors that race with `second`, which is the later one."""
        flat = self._of.get(second)
        return _NOBODY if flat is None else frozenset(flat[::3])


_NOBODY: frozenset[int] = frozenset()


class _Log:
    """Who reads, or who writes, some bytes.

    last: the number of each timeline's latest access.
    accesses: each accessor's latest access, unless the host knows that access to be over.
    """

    __slots__ = ("accesses", "last")

    def __init__(self, n: int):
        self.last: Clock = [0] * n
        self.accesses: dict[int, dict[int, tuple[int, int]]] = {}  # accessor -> number, step


class RaceSearch(Clocks):
    """Walks through steps. `found` fills with the accessors that race.

    n_logs: how many logs of memory there are, as `intervals.tags` numbers them.
    step: the step whose acts come next; set by the caller.
    """

    def __init__(self, n: int, n_logs: int):
        super().__init__(n)
        self.step = 0
        self.found = RacingPairs()
        self._logs: list[_Log | None] = [None] * n_logs  # None: no stream has touched it yet

    def _look(self, clock: Clock, own: int, accessor: int, looks: Sequence[int]) -> None:
        logs, racing = self._logs, None
        for p in looks:
            log = logs[p]
            if log is not None and any(map(gt, log.last, clock)):
                if racing is None:
                    racing = dict[int, int]()
                _collect(log, clock, racing)
        if racing:
            self.found.add(accessor, self.step, racing)

    def _enter(self, t: int, accessor: int, marks: Iterable[int]) -> None:
        clock, over, logs = self.streams[t], self.host[t], self._logs
        clock[t] = number = clock[t] + 1
        access = number, self.step
        for p in marks:
            log = logs[p]
            if log is None:
                log = logs[p] = _Log(self.n)
            accesses = log.accesses.get(t)
            if accesses is None or log.last[t] <= over:  # later work knows the others to be over
                log.accesses[t] = {accessor: access}
            else:
                accesses.pop(accessor, None)
                accesses[accessor] = access
            log.last[t] = number


def _collect(log: _Log, clock: Clock, racing: dict[int, int]) -> None:
    """The accessors in a log that `clock` does not hold, each with its step."""
    for t, accesses in log.accesses.items():
        for accessor in reversed(accesses):  # the latest first
            number, step = accesses[accessor]
            if number <= clock[t]:
                break
            racing.setdefault(accessor, step)
