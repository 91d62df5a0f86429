"""Vector clocks over the host and every stream, and who touched which bytes last.

Happens-before is a partial order: the host's commands in order, the work of each stream in order,
work after its issue, a stream's work behind what it waits for, the host behind what it syncs on. A
vector clock says where a place stands in it: of each timeline, up to which number its work is known
to be over (Lamport 1978, Fidge and Mattern 1988; that the latest access of each timeline is all
that must be compared with, Flanagan and Freund's FastTrack, PLDI 2009). The host needs no number:
everything issued later happens after what it did.

    host      ----issue x1---------issue y1---- sync A ----> knows A:2, B:1
    A         --------x1--x2--record--------.     ^
    B                                 wait---y1   |          y1 starts at A:2, B:0
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import gt

Clock = list[int]  # of each timeline, the number of its latest work that is over
Log = dict[int, dict[int, tuple[int, int]]]  # of a timeline, of an accessor: its number, its step


class _Piece:
    """Who reads and who writes a piece: the latest number of each timeline, and the accessors of
    each timeline that the host does not know to be over, in the order of their latest accesses."""

    __slots__ = ("last_read", "last_write", "readers", "writers")

    def __init__(self, n: int):
        self.last_read: Clock = [0] * n
        self.last_write: Clock = [0] * n
        self.readers: Log = {}
        self.writers: Log = {}


class Walk:
    """One walk through a run: the methods are called in host order, and `found` fills with races.

    n: timelines; a stream is one, and where copies keep no order, the copies of a stream are
    another whose clock holds its own number alone. pieces: of memory, as `intervals.cut` numbers
    them. An accessor is a number that stands for the same command of the same program in every
    step; of its accesses the latest stands for all, for if it is over, they are too.

    found[a, b] is (step of a, step of b) where accessor a's access of a piece and b's, later in
    host order, are unordered and one of them writes: the first such pair of steps.
    """

    def __init__(self, n: int, pieces: int):
        self.step = 0
        self.found: dict[tuple[int, int], tuple[int, int]] = {}
        self._host: Clock = [0] * n
        self._streams: list[Clock] = [[0] * n for _ in range(n)]
        self._turns: list[Clock] = [[0] * n for _ in range(n)]
        self._events: dict[str, Clock] = {}
        self._host_version, self._seen_version = 0, [0] * n
        self._n = n
        self._pieces: list[_Piece | None] = [None] * pieces  # None: no stream has touched it yet

    # what touches memory ------------------------------------------------------------------------

    def on_host(self, accessor: int, reads: Iterable[int], writes: Iterable[int]) -> None:
        """The host reads and writes pieces at its place."""
        self._compare(self._host, accessor, reads, writes)

    def in_turn(self, t: int, accessor: int, reads: Iterable[int], writes: Iterable[int]) -> None:
        """Work is queued on timeline t that begins when everything queued there before is over."""
        clock = self._issued(t)
        self._compare(clock, accessor, reads, writes)
        self._enter(t, accessor, reads, writes)

    def early(self, t: int, accessor: int, reads: Iterable[int], writes: Iterable[int]) -> None:
        """As `in_turn`, but the accesses may come before the work in front of it is over: at any
        time from the latest `turn` of t and the issue on."""
        clock = _later(self._turns[t], self._host)
        self._compare(clock, accessor, reads, writes)
        self._enter(t, accessor, reads, writes)

    def at_will(self, t: int, accessor: int, reads: Iterable[int], writes: Iterable[int]) -> None:
        """Work that keeps no order with other work of t: it comes at any time after the issue."""
        self._compare(self._host, accessor, reads, writes)
        self._enter(t, accessor, reads, writes)

    # what orders --------------------------------------------------------------------------------

    def turn(self, t: int) -> None:
        """Early work on t that is queued from here on follows everything queued so far."""
        self._turns[t] = self._issued(t).copy()

    def record(self, event: str, t: int) -> None:
        self._events[event] = self._issued(t).copy()

    def wait(self, event: str, t: int) -> None:
        """Later work of t begins after the event's latest record; without one, nothing changes."""
        reached = self._events.get(event)
        if reached is not None:
            self._streams[t] = _later(self._issued(t), reached)

    def sync(self, event: str) -> None:
        """The host goes on after the event's latest record; without one, nothing changes."""
        reached = self._events.get(event)
        if reached is not None:
            self._know(reached)

    def drain(self, timelines: Iterable[int]) -> None:
        """The host goes on when everything queued on these is over."""
        for t in timelines:
            self._know(self._streams[t])

    # inside -------------------------------------------------------------------------------------

    def _know(self, clock: Clock) -> None:
        self._host = _later(self._host, clock)
        self._host_version += 1

    def _issued(self, t: int) -> Clock:
        """The clock of t's next work: after all before it on t, and after what the host knows."""
        if self._seen_version[t] != self._host_version:
            self._seen_version[t] = self._host_version
            self._streams[t] = _later(self._streams[t], self._host)
        return self._streams[t]

    def _compare(
        self, clock: Clock, accessor: int, reads: Iterable[int], writes: Iterable[int]
    ) -> None:
        """Notes the accesses so far that conflict with these and that `clock` does not hold."""
        pieces = self._pieces
        for p in writes:
            piece = pieces[p]
            if piece is None:
                continue
            if any(map(gt, piece.last_write, clock)):
                self._collect(piece.writers, clock, accessor)
            if any(map(gt, piece.last_read, clock)):
                self._collect(piece.readers, clock, accessor)
        for p in reads:
            piece = pieces[p]
            if piece is not None and any(map(gt, piece.last_write, clock)):
                self._collect(piece.writers, clock, accessor)

    def _collect(self, log: Log, clock: Clock, accessor: int) -> None:
        for t, entries in log.items():
            for other in reversed(entries):  # the latest first
                number, step = entries[other]
                if number <= clock[t]:
                    break
                self.found.setdefault((other, accessor), (step, self.step))

    def _enter(self, t: int, accessor: int, reads: Iterable[int], writes: Iterable[int]) -> None:
        """Gives work on t the next number, and its pieces an entry."""
        clock, over, pieces = self._streams[t], self._host[t], self._pieces
        clock[t] = number = clock[t] + 1
        entry = number, self.step
        for p in reads:
            piece = pieces[p]
            if piece is None:
                piece = pieces[p] = _Piece(self._n)
            _log(piece.readers, t, accessor, entry, piece.last_read[t] <= over)
            piece.last_read[t] = number
        for p in writes:
            piece = pieces[p]
            if piece is None:
                piece = pieces[p] = _Piece(self._n)
            _log(piece.writers, t, accessor, entry, piece.last_write[t] <= over)
            piece.last_write[t] = number


def _log(log: Log, t: int, accessor: int, entry: tuple[int, int], afresh: bool) -> None:
    """Enters an access of t as the latest; afresh: the host, so everything to come, knows that
    those before are over."""
    entries = log.get(t)
    if entries is None or afresh:
        log[t] = {accessor: entry}
    else:
        entries.pop(accessor, None)
        entries[accessor] = entry


def _later(a: Clock, b: Clock) -> Clock:
    return [x if x > y else y for x, y in zip(a, b, strict=True)]
