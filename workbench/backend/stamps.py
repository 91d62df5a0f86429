"""When the kernels of a plan began and ended, by the device's own clock (`Engine.stamped`).

A plan of a whole step has the copies of inputs and results in it, and with launch_ahead it is
queued long before it runs. Marks around its launch say nothing of its kernels then. So the plan of
a stamped step has two small kernels more, which write the clock into a ring in pinned memory:

    plan    copy or gate . stamp . launch . launch . ... . launch . stamp . copy of results
    ring    | begin end | begin end | begin end | ...       a pair for each launch of such a plan

The device counts the pairs, and the host counts alike: plans on one stream run in the order of
their launches. The host reads the pairs at the end. A step that found its gate closed is launched
again: what counts is its latest pair. The end of a pair counts it. So a pair that an error cut off
is written over by the next.

A stamped plan is another plan than the plain one of the same work. A program has both side by side:
who begins or ends to stamp captures nothing twice, and a step that is not stamped pays nothing.

What a stamp takes: a token with stamps is longer than one without by two small kernels
(`bench/token_parts.py` measures both). A stamp stands between two nodes that were neighbours. The
way from one node to the next, on the device, is then once in the device's part of a token and once
in the gap. So the gap is not shorter by the stamps; it is longer by what the stamps themselves
compute. Programmatic edges (`pdl`) stay, but for those at the stamps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.backend.base import Backend, Captured, Issue
from workbench.backend.bind import plannable
from workbench.backend.issue import Executor, Prepared
from workbench.backend.issued import Issued, Plannable, together
from workbench.program import commands as c
from workbench.program.commands import Space

# bytes of a ring's memory: how many pairs are written, which the device says; then the pairs, each
# begin and end in ns of the device's clock
WRITTEN, PAIRS, PAIR_BYTES = 0, 64, 16
N_PAIRS = 4096  # of a ring, a power of two; the older half is set aside before it is written over


class StampRing:
    """The stamps of one engine's plans on a stream of a device. Pairs are numbered from 0.

    launched: the number of the next pair. Where a launch was interrupted, nobody knows whether it
    was queued; the next one waits for the device and goes on with its number.
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
        self._here = 0  # the first pair that is in the ring, behind those that are set aside

    def stamp(self, is_end: bool) -> Issued:
        """What writes the begin of the next pair, or its end."""
        addresses = self._counter.address, self._memory.address
        return self.backend.stamp(*addresses, self.n_pairs, is_end, self.stream)

    def capture(self, work: Plannable) -> StampedPlan:
        """As a backend's `capture`, of stamped work."""
        return StampedPlan(self, self.backend.capture(work))

    def launch(self, queue: Issue) -> int:
        """Calls what queues a pair of stamps; the pair's number."""
        if self._unsure:
            self.backend.synchronize()
            self.launched, self._unsure = int(self._written[0]), False
        number = self.launched
        if number - self._here >= self.n_pairs:
            self._set_aside()
        self._unsure = True
        queue()
        self.launched, self._unsure = number + 1, False
        return number

    def _set_aside(self) -> None:
        """Copies the older half of the ring, which launches to come write over."""
        half = self.n_pairs // 2
        if self._written[0] < self._here + half:
            self.backend.synchronize()
        first = self._here % self.n_pairs
        self._aside.append(self._pairs[first : first + half].copy())
        self._here += half

    def pair(self, number: int) -> tuple[int, int]:
        """Begin and end of a pair that is written, in ns of the device's clock."""
        if number >= self._here:
            begin, end = self._pairs[number % self.n_pairs]
        else:
            half = self.n_pairs // 2
            before, at = divmod(self._here - 1 - number, half)
            begin, end = self._aside[-1 - before][half - 1 - at]
        return int(begin), int(end)

    def forget(self) -> None:
        """Drops what was set aside: nobody asks for a pair that is written."""
        self._aside.clear()

    def free(self) -> None:
        """Gives memory back, once nothing is queued any more."""
        self._written = self._pairs = np.empty(0, np.int64)  # views keep pinned memory
        self._counter.free()
        self._memory.free()


class StampedPlan(Captured):
    """What a device recorded of stamped work. number: of the pair of its latest launch."""

    def __init__(self, ring: StampRing, captured: Captured):
        self._ring, self._captured = ring, captured
        self.number = -1
        self._take_over()

    def _take_over(self) -> None:
        of = self._captured
        self.nodes = of.nodes
        self.capture_ns, self.instantiate_ns = of.capture_ns, of.instantiate_ns

    @property
    def launches(self) -> int:  # type: ignore[override]
        return self._captured.launches

    def launch(self) -> None:
        self.number = self._ring.launch(self._captured.launch)

    def update(self, work: Plannable, changed: Any) -> bool:
        done = self._captured.update(work, changed)
        self._take_over()
        return done

    def twin(self, work: Plannable, changed: Any) -> StampedPlan | None:
        made = self._captured.twin(work, changed)
        return None if made is None else StampedPlan(self._ring, made)

    def spans(self, launch: int | None = None) -> Any:
        return self._captured.spans(launch)

    def destroy(self) -> None:
        self._captured.destroy()


@dataclass(slots=True, eq=False)
class StampedWork(Plannable):
    """A plan with stamps around its launches. ring: where they write. singly: the pair that the
    parts wrote when they were last issued one by one."""

    ring: Any = None
    singly: list[int] | None = None

    @property
    def number(self) -> int:
        """Of the pair of its latest call."""
        if self.replayed is not None:
            return self.replayed.number
        assert self.singly, "parts are issued before their stamps are asked for"
        return self.singly[-1]


def stamped_work(plan: c.Replay, work: Plannable, ring: StampRing) -> Plannable:
    """Other work: the same, with a stamp in front of the first launch on the plan's own stream, and
    one behind the last. Every part keeps its number. Work without such launches is what it was."""
    launches = [
        i for i, part in enumerate(plan.parts)
        if isinstance(part, c.Launch) and part.stream == plan.stream
    ]  # fmt: skip
    if not launches:
        return work
    attach = work.backend.attach
    attach()
    parts, (first, last) = list(work.parts), (launches[0], launches[-1])
    parts[first] = together((ring.stamp(is_end=False), parts[first]))
    parts[last] = together((parts[last], ring.stamp(is_end=True)))
    issue = plannable(work.backend, parts, work.stream, work.streams).call
    singly = [-1]  # no cycle: a plan goes when its work does

    def call() -> None:
        attach()
        singly[0] = ring.launch(issue)

    return StampedWork(
        call, work.same, parts=tuple(parts), backend=ring, stream=work.stream,
        streams=work.streams, landing=work.landing, landings=work.landings, moves=work.moves,
        ring=ring, singly=singly,
    )  # fmt: skip


class StampRings:
    """The rings of one engine, made when they are first asked for. n_pairs: of each."""

    def __init__(self, n_pairs: int = N_PAIRS):
        self._n_pairs = n_pairs
        self._rings: dict[tuple[Backend, int], StampRing] = {}

    def _of(self, backend: Backend, stream: int) -> StampRing:
        if (backend, stream) not in self._rings:
            self._rings[backend, stream] = StampRing(backend, stream, self._n_pairs)
        return self._rings[backend, stream]

    def twin(self, prepared: Prepared, executor: Callable[[c.Program], Executor]) -> Prepared:
        """The program with stamped work in place of each of its plans. executor: of a program."""

        def stamped(plan: c.Replay, work: Plannable) -> Plannable:
            made = stamped_work(plan, work, self._of(work.backend, work.stream))
            if made is not work:
                prepared.binding.note(made)
            return made

        return prepared.twin(stamped, executor(prepared.program))

    def free(self) -> None:
        """Gives every ring back, once nothing is queued any more."""
        for ring in self._rings.values():
            ring.free()
        self._rings.clear()
