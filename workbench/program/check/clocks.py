"""Vector clocks over the host and every stream: what is over when something begins.

Happens-before is a partial order. The host's commands have their order. The work of a stream has
the stream's. Work comes behind its issue, a stream behind what it waits for, the host behind what
it syncs on. A vector clock names a point of this order: of each timeline it holds the number up to
which the work is known to be over (Lamport 1978; Fidge and Mattern 1988). The host needs no number:
everything issued later comes behind what the host did.

    host      ----issue x1---------issue y1---- sync A ----> knows A:2, B:1
    A         --------x1--x2--record--------.     ^
    B                                 wait---y1   |          y1 begins at A:2, B:0
"""

from collections.abc import Hashable, Iterable, Sequence

Clock = list[int]  # of each timeline, the number of its latest work that is over
HOST_CLOCK, EARLY_CLOCK = -1, -2  # at which work begins that belongs to no timeline


class Clocks:
    """The order of one walk through some steps: its methods are called in host order.

    n: timelines. A stream is one. Where copies keep no order, the copies of a stream are another,
    whose clock holds its own number alone. Work that touches memory is numbered, timeline by
    timeline; what a walk looks for there, it says in `_look` and `_enter`. An accessor is a number
    that stands for the same command of the same program in every step. Its looks are the memory it
    must find free, its marks the memory that others must find free of it (`intervals.py`).
    """

    def __init__(self, n: int):
        self.n = n
        self.host: Clock = [0] * n
        self.streams: list[Clock] = [[0] * n for _ in range(n)]
        self.gates: list[Clock] = [[0] * n for _ in range(n)]
        self.events: dict[Hashable, Clock] = {}
        self._host_version, self._seen_version = 0, [0] * n

    # what touches memory ------------------------------------------------------------------------

    def on_host(self, accessor: int, looks: Sequence[int], marks: Sequence[int]) -> None:
        """The host reads and writes, before it goes on."""
        self._look(self.host, HOST_CLOCK, accessor, looks)

    def in_order(self, t: int, accessor: int, looks: Sequence[int], marks: Sequence[int]) -> None:
        """Work is queued on timeline t that begins when everything queued there before is over."""
        self._look(self._issued(t), t, accessor, looks)
        self._enter(t, accessor, marks)

    def early(self, t: int, accessor: int, looks: Sequence[int], marks: Sequence[int]) -> None:
        """As `in_order`, but the accesses may come before the work in front of it is over: at any
        time from the gate of t and the issue on."""
        self._look(_later(self.gates[t], self.host), EARLY_CLOCK, accessor, looks)
        self._enter(t, accessor, marks)

    def loose(self, t: int, accessor: int, looks: Sequence[int], marks: Sequence[int]) -> None:
        """Work that keeps no order with other work of t: it comes at any time after its issue."""
        self._look(self.host, HOST_CLOCK, accessor, looks)
        self._enter(t, accessor, marks)

    def _look(self, clock: Clock, own: int, accessor: int, looks: Sequence[int]) -> None:
        """An accessor's work begins at `clock`. own: the timeline that has this clock, with whose
        work it cannot race; or HOST_CLOCK, or EARLY_CLOCK."""
        raise NotImplementedError

    def _enter(self, t: int, accessor: int, marks: Sequence[int]) -> None:
        """Gives work on t the next number."""
        self.streams[t][t] += 1

    # what orders --------------------------------------------------------------------------------

    def gate(self, t: int) -> None:
        """Early work queued on t from here on follows everything queued so far."""
        self.gates[t] = self._issued(t).copy()

    def record(self, event: Hashable, t: int) -> None:
        self.events[event] = self._issued(t).copy()

    def wait(self, event: Hashable, t: int) -> None:
        """Later work of t, early or not, begins after the event's latest record; without one,
        nothing changes."""
        reached = self.events.get(event)
        if reached is not None:
            self._follow(t, reached)

    def behind(self, t: int, others: Iterable[int]) -> None:
        """Later work of t, early or not, begins after everything queued so far on the others."""
        for other in others:
            self._follow(t, self._issued(other))

    def sync(self, event: Hashable) -> None:
        """The host goes on after the event's latest record; without one, nothing changes."""
        reached = self.events.get(event)
        if reached is not None:
            self._know(reached)

    def drain(self, timelines: Iterable[int]) -> None:
        """The host goes on when everything queued on these is over."""
        for t in timelines:
            self._know(self.streams[t])

    # inside -------------------------------------------------------------------------------------

    def _follow(self, t: int, reached: Clock) -> None:
        self.streams[t] = _later(self._issued(t), reached)
        self.gates[t] = _later(self.gates[t], reached)

    def _know(self, clock: Clock) -> None:
        self.host = _later(self.host, clock)
        self._host_version += 1

    def _issued(self, t: int) -> Clock:
        """The clock of t's next work: after all before it on t, and after what the host knows."""
        if self._seen_version[t] != self._host_version:
            self._seen_version[t] = self._host_version
            self.streams[t] = _later(self.streams[t], self.host)
        return self.streams[t]


def _later(a: Clock, b: Clock) -> Clock:
    return [x if x > y else y for x, y in zip(a, b, strict=True)]
