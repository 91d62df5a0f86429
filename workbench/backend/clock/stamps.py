"""When a step began and ended, by the device's own clock (`Engine.stamped`).

A plan of a whole step also has the copies of inputs and results in it. With launch_ahead it is
queued long before it runs. So marks around the launch of the plan would say nothing of its kernels.
A step that is timed therefore has two more small kernels, in a plan or not. They write the device's
clock into a ring in pinned memory, just before the first launch and just after the last:

    step    copy or gate . stamp . launch . launch . ... . launch . stamp . copy of results
    ring    | begin end | begin end | begin end | ...       a pair for each timed step

The device counts the pairs, and the host counts them too: steps on one stream run in the order of
their launches. The host reads the pairs at the end. A step that found its gate closed is launched
again; then its latest pair counts. A pair is counted when its end is written. So a pair that an
error cut off is overwritten by the next pair. Where a step begins on one stream and ends on another
(of another device), each of the two launches has a pair of its own around it.

A program with stamps is bound separately from the plain one, and has plans of its own. So switching
stamps on or off captures nothing again, and a step without stamps pays nothing.

The price of stamps: a token with stamps is longer by two small kernels
(`benchmarks/times/token_parts.py` measures tokens with and without). A stamp stands between two
nodes that were neighbours. The time between two nodes on the device then occurs twice: once in the
device's part of a token, and once in the gap. So stamps do not shorten the gap. They lengthen it by
their own work. Programmatic edges (`pdl`) stay, except those at the stamps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from workbench.backend.base import Backend, Issue
from workbench.backend.issue.bind import Launching
from workbench.backend.issue.issued import Issued, together
from workbench.common.errors import UsageError
from workbench.program import commands as c
from workbench.program.commands import Space

# where things lie in a ring's memory, in bytes: the number of written pairs, which the device
# writes; then the pairs, each with begin and end in ns of the device's clock
WRITTEN, PAIRS, PAIR_BYTES = 0, 64, 16
N_PAIRS = 4096  # of a ring, a power of two; the older half is set aside before it is overwritten


class StampRing:
    """The stamps of one engine on a stream of a device. Pairs are numbered from 0.

    launched: the number of the next pair. Where a launch was interrupted, nobody knows whether it
        was queued. The next launch then waits for the device, and takes the device's count.
    """

    def __init__(self, backend: Backend, stream: int, n_pairs: int = N_PAIRS):
        self.backend, self.stream, self.n_pairs = backend, stream, n_pairs
        self._counter = backend.allocate(8, Space.DEVICE)
        self._memory = backend.allocate(PAIRS + PAIR_BYTES * n_pairs, Space.PINNED)
        assert self._memory.array is not None, "pinned memory is the host's too"
        words = self._memory.array.view(np.int64)
        self._written: np.ndarray = words[:1]
        self._pairs: np.ndarray = words[PAIRS // 8 :].reshape(n_pairs, 2)
        self.launched = 0
        self._unsure = False
        self._aside: list[np.ndarray] = []  # halves, (n_pairs / 2, 2) each
        self._here = 0  # the first pair in the ring; earlier pairs are set aside

    def stamp(self, is_end: bool) -> Issued:
        """The command that writes the begin of the next pair, or its end."""
        addresses = self._counter.address, self._memory.address
        return self.backend.stamp(*addresses, self.n_pairs, is_end, self.stream)

    def make_room(self) -> None:
        """Sets aside what the next pair would overwrite. Call it before the next pair begins."""
        if self._unsure:
            self.backend.synchronize()
            self.launched, self._unsure = int(self._written[0]), False
        if self.launched - self._here >= self.n_pairs:
            self._set_aside()

    def begins(self, queue: Issue) -> None:
        """Calls `queue`, which queues the begin of a pair."""
        self.make_room()
        queue()

    def ends(self, queue: Issue) -> None:
        """Calls `queue`, which queues the end of a pair, and perhaps its begin. Counts the pair."""
        self.make_room()
        self._unsure = True
        queue()
        self.launched, self._unsure = self.launched + 1, False

    def _set_aside(self) -> None:
        """Copies the older half of the ring, which the next launches overwrite."""
        half = self.n_pairs // 2
        if self._written[0] < self._here + half:
            self.backend.synchronize()
        first = self._here % self.n_pairs
        self._aside.append(self._pairs[first : first + half].copy())
        self._here += half

    def pair(self, number: int) -> tuple[int, int]:
        """The begin and end of a written pair, in ns of the device's clock."""
        if number >= self._here:
            begin, end = self._pairs[number % self.n_pairs]
        else:
            half = self.n_pairs // 2
            before, at = divmod(self._here - 1 - number, half)
            begin, end = self._aside[-1 - before][half - 1 - at]
        return int(begin), int(end)

    def forget(self) -> None:
        """Drops what was set aside. Nobody may ask for a written pair any more."""
        self._aside.clear()

    def free(self) -> None:
        """Gives the memory back. Call it when nothing is queued any more."""
        self._written = self._pairs = np.empty(0, np.int64)  # views keep pinned memory
        self._counter.free()
        self._memory.free()


class StepPairs(NamedTuple):
    """The pairs of one step. The step begins with pair `first` and ends with pair `last`. Each is a
    ring, and the number of a pair in the ring."""

    first: tuple[StampRing, int]
    last: tuple[StampRing, int]

    def times(self, ahead_ns: Callable[[StampRing], int]) -> tuple[int, int]:
        """The begin and end of the step, in ns of the host's clock. ahead_ns: how far the host's
        clock is ahead of the clock of a ring's device."""
        (one, i), (other, j) = self.first, self.last
        return one.pair(i)[0] + ahead_ns(one), other.pair(j)[1] + ahead_ns(other)


class StepStamps(Launching):
    """Stamps for a program: at its first launch on a device, and at its last.

    Of a plan, only launches on the plan's own stream are considered: other streams begin later and
    end earlier. Raises UsageError for a program without such launches.
    """

    def __init__(self, program: c.Program, backends: Sequence[Backend], rings: StampRings):
        found = list(_launches(program, backends))
        if not found:
            raise UsageError("a step without launches on a device has no stamps; stamp another")
        self._plans = {launch: plan for plan, launch in (found[0], found[-1])}
        first, last = found[0][1], found[-1][1]
        self._first = rings.of(backends[first.stream.backend], first.stream.id)
        self._last = rings.of(backends[last.stream.backend], last.stream.id)
        self._begins, self._ends = {first: self._first}, {last: self._last}
        if self._first is not self._last:
            self._begins[last], self._ends[first] = self._last, self._first

    def around(self, command: c.Launch, issued: Issued) -> Issued:
        """See `Launching`. Stamps in a plan are counted when the plan is queued."""
        begin, end = self._begins.get(command), self._ends.get(command)
        before = [] if begin is None else [begin.stamp(is_end=False)]
        after = [] if end is None else [end.stamp(is_end=True)]
        if not before and not after:
            return issued
        made = together([*before, issued, *after])
        if self._plans[command] is None:
            queue = self._queue((command,))
            made = replace(made, call=partial(queue, made.call))
        return made

    def queue_of(self, plan: c.Replay) -> Callable[[Issue], None] | None:
        """See `Launching`."""
        stamped = [launch for launch, of in self._plans.items() if of is plan]
        return self._queue(stamped) if stamped else None

    def _queue(self, launches: Sequence[c.Launch]) -> Callable[[Issue], None]:
        """What calls the call that queues these launches of one stream, with their stamps."""
        ends = [self._ends[launch].ends for launch in launches if launch in self._ends]
        return ends[0] if ends else self._begins[launches[0]].begins

    def latest(self) -> StepPairs:
        """The pairs of the step that was issued last."""
        first, last = self._first, self._last
        return StepPairs((first, first.launched - 1), (last, last.launched - 1))


def _launches(
    program: c.Program, backends: Sequence[Backend]
) -> Iterator[tuple[c.Replay | None, c.Launch]]:
    """The launches that can have stamps, each with its plan, if it is in one."""
    for command in program.commands:
        if not isinstance(command, c.Launch | c.Replay):
            continue
        if backends[command.stream.backend].capabilities.synchronous:
            continue
        if isinstance(command, c.Launch):
            yield None, command
        else:
            for part in command.parts:
                if isinstance(part, c.Launch) and part.stream == command.stream:
                    yield command, part


class StampRings:
    """The rings of one engine, each made when it is first asked for. n_pairs: the pairs of a
    ring."""

    n_pairs = N_PAIRS

    def __init__(self) -> None:
        self._rings: dict[tuple[Backend, int], StampRing] = {}

    def of(self, backend: Backend, stream: int) -> StampRing:
        """The ring of a stream."""
        if (backend, stream) not in self._rings:
            self._rings[backend, stream] = StampRing(backend, stream, self.n_pairs)
        return self._rings[backend, stream]

    def free(self) -> None:
        """Gives every ring back. Call it when nothing is queued any more."""
        for ring in self._rings.values():
            ring.free()
        self._rings.clear()
