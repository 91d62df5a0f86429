"""Vector clocks over the host and every stream: what is over when something begins.

Happens-before is a partial order. The host's commands are in host order, the work of a stream in
stream order. Work comes after its issue, a stream's work after what the stream waits for, the
host's next command after what the host syncs on. A vector clock names a point of this order: for
each timeline it holds the number up to which the work is known to be over (Lamport 1978; Fidge and
Mattern 1988). The host needs no number: everything issued later comes after what the host did.

    host      ----issue x1---------issue y1---- sync A ----> knows A:2, B:1
    A         --------x1--x2--record--------.     ^
    B                                 wait---y1   |          y1 begins at A:2, B:0
"""

from collections.abc import Hashable, Iterable, Sequence

from workbench.graph.forks import later

Clock = list[int]  # of each timeline, the number of its latest work that is over
HOST_CLOCK, EARLY_CLOCK = -1, -2  # in place of a timeline: work that begins at the host's, or early


class Clocks:
    """The order of one walk through some steps: its methods are called in host order.

    n: how many timelines there are. A stream is a timeline. Where copies keep no order, the copies
        of a stream are another timeline, whose clock holds its own number alone.

    Work that touches memory is numbered, timeline by timeline. A child says in `_look` and `_enter`
    what it does with memory. An *accessor* is a number that stands for the same command of the same
    program in every step. Its *looks* are the memory that it must find free. Its *marks* are the
    memory that others must find free of it (`intervals.py`).
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
        """As `in_order`, but the accesses may come before earlier work of t is over: at any time
        after the gate of t and the issue."""
        self._look(later(self.gates[t], self.host), EARLY_CLOCK, accessor, looks)
        self._enter(t, accessor, marks)

    def loose(self, t: int, accessor: int, looks: Sequence[int], marks: Sequence[int]) -> None:
        """Work that keeps no order with other work of t: it runs at any time after its issue."""
        self._look(self.host, HOST_CLOCK, accessor, looks)
        self._enter(t, accessor, marks)

    def _look(self, clock: Clock, own: int, accessor: int, looks: Sequence[int]) -> None:
        """An accessor's work begins at `clock`.

        own: the timeline of this clock, with whose work the accessor cannot race; or HOST_CLOCK, or
            EARLY_CLOCK.
        """
        raise NotImplementedError

    def _enter(self, t: int, accessor: int, marks: Sequence[int]) -> None:
        """Gives work on t the next number."""
        self.streams[t][t] += 1

    # what orders --------------------------------------------------------------------------------

    def gate(self, t: int) -> None:
        """Early work queued on t from now on comes after everything queued on t so far."""
        self.gates[t] = self._issued(t).copy()

    def record(self, event: Hashable, t: int) -> None:
        self.events[event] = self._issued(t).copy()

    def wait(self, event: Hashable, t: int) -> None:
        """Later work of t, early or not, begins after the event's latest record; without one,
        nothing changes."""
        reached = self.events.get(event)
        if reached is not None:
            self._follow(t, reached)

    def after(self, t: int, others: Iterable[int]) -> None:
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
        self.streams[t] = later(self._issued(t), reached)
        self.gates[t] = later(self.gates[t], reached)

    def _know(self, clock: Clock) -> None:
        self.host = later(self.host, clock)
        self._host_version += 1

    def _issued(self, t: int) -> Clock:
        """The clock of t's next work: after t's earlier work, and after what the host knows."""
        if self._seen_version[t] != self._host_version:
            self._seen_version[t] = self._host_version
            self.streams[t] = later(self.streams[t], self.host)
        return self.streams[t]
