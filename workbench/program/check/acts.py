"""From commands to acts: the programs of some steps as calls of `clocks.Clocks`.

What cannot race is left out once for all: bytes that nobody writes, and bytes that only one stream
touches, in its order. Of a decode of some hundred launches some dozen acts are left. They can be
walked again and again.

A plan is its parts. All parts begin after what the plan's stream did before, and what the stream
does next begins when all parts are over. Parts on another stream have a timeline that belongs to
the plan alone:

    compute   ---g g---.-- g --- w g --- g ---.--- r      the plan is between the two dots
    copies              '- a a - r'      a ---'           what it copies has no order with the
                         a  a                             copies of the same stream outside
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

from workbench.common.collector import nothing_collected
from workbench.graph import ops
from workbench.graph.ir import Kind, Node
from workbench.program import commands as cmd
from workbench.program.check.clocks import Clocks
from workbench.program.check.intervals import Tags, cut, tags
from workbench.program.check.wording import Missing

Declared = Callable[[Node], bool]
Ranges = tuple[cmd.Range, ...]
Act = tuple[int, Callable[..., None], tuple[Any, ...]]  # a command, a method, its arguments


class Accessor(NamedTuple):
    """The accesses of a command, or only its early accesses. A walk knows them by one number.

    program: its number, in the order of first issue.
    command: its number in the program (`Singly`).
    method: the method of `Clocks` that issues it.
    timeline: _NO_TIMELINE on the host.
    missing: the order that these accesses lack where they race.
    """

    program: int
    command: int
    method: Callable[..., None]
    timeline: int
    reads: Ranges
    writes: Ranges
    missing: Missing


class Singly:
    """A program's commands one by one, in host order, with plans resolved into their parts."""

    __slots__ = ("_located", "commands")

    def __init__(self, program: cmd.Program):
        self.commands: Sequence[cmd.Command] = program.commands
        self._located: list[cmd.CommandAt] | None = None  # None: no plans, numbers are indices
        if cmd.Replay in set(map(type, program.commands)):
            self._located = list(program.located())
            self.commands = [at.command for at in self._located]

    def at(self, step: int, number: int) -> cmd.CommandAt:
        """Where command `number` is when step number `step` issues the program."""
        if self._located is None:
            return cmd.CommandAt(step, number, self.commands[number])
        return self._located[number]._replace(step=step)


_NO_TIMELINE = -1
_NO_WAIT = -1  # in place of a command's number: an act that no trial leaves out
_HOST_USER, _LOOSE_USER, _FIRST_USER = 0, 1, 2  # who touches a range: two bits, read and write


class StepActs:
    """The programs of some steps as lists of acts, and the accessors by number.

    steps: issued one after the other, by one host.
    order: the number of each step's program.
    acts: the acts of each program.
    n_logs: how many logs of memory there are (`touched.py`).
    early: the timelines with launches that begin early.
    one_order, declared: as `hazards.races` has them.

    Raises UsageError for a command on a backend that its program does not have.
    """

    def __init__(self, steps: Sequence[cmd.Program], one_order: bool, declared: Declared | None):
        programs = list({id(program): program for program in steps}.values())
        numbers = {id(program): i for i, program in enumerate(programs)}
        self.steps = steps
        self.programs = programs
        self.singly = [Singly(program) for program in programs]
        self.order = [numbers[id(program)] for program in steps]
        self.accessors: list[Accessor] = []
        self._one_order = one_order
        self._declared = declared
        # of a stream, of its loose copies (True), or of its parts in plans on the last stream
        self._timelines: dict[tuple[cmd.Stream, bool, cmd.Stream | None], int] = {}
        # by the ranges that are read and written: bits that say by whom
        self._touched: dict[tuple[Ranges, Ranges], int] = {}
        self._program = 0
        self._plan: cmd.Stream | None = None  # on which the plan under way is launched
        self._recorded: set[str] = set()  # events, in the plan under way
        self._drafts: list[Act | None] = []  # none: the next accessor's
        drafted = []
        # The collector looks at every object again whenever enough new ones stay. It would take
        # half the time of a million commands.
        with nothing_collected():
            for self._program, program in enumerate(programs):
                self._drafts = []
                number = 0
                for command in program.commands:
                    _ACTS[type(command)](self, number, command)
                    number += len(command.parts) if type(command) is cmd.Replay else 1
                drafted.append(self._drafts)
            self.acts = self._with_logs(drafted)

    def at(self, step: int, number: int) -> cmd.CommandAt:
        """Command `number` of the program of a step."""
        return self.singly[self.order[step]].at(step, number)

    @property
    def n_timelines(self) -> int:
        return len(self._timelines)

    def merged(self) -> list[list[Act]]:
        """The acts, where neighbours of one timeline at the same clock are one act. It races where
        any of them does, and does not tell which."""
        return [list(_merged(acts)) for acts in self.acts]

    # commands as acts, by type --------------------------------------------------------------------

    def _at_once(self, i: int, c: cmd.Command) -> None:
        self._touch(Clocks.on_host, _NO_TIMELINE, i, c.reads, c.writes)

    def _copy(self, i: int, c: cmd.Copy) -> None:
        if self._one_order:
            t = self._timeline(c.stream)
            self._touch(Clocks.in_order, t, i, c.reads, c.writes)
            self._drafts.append((i, Clocks.gate, (t,)))
        else:
            t = self._timeline(c.stream, loose=True)
            self._touch(Clocks.loose, t, i, c.reads, c.writes, Missing.ORDER_OF_COPIES)

    def _launch(self, i: int, c: cmd.Launch) -> None:
        if c.stream.backend == cmd.HOST:
            self._at_once(i, c)
            return
        t = self._timeline(c.stream)
        if not c.programmatic:
            self._drafts.append((i, Clocks.gate, (t,)))
            self._touch(Clocks.in_order, t, i, c.reads, c.writes)
            return
        if self._declared is not None and not self._declared(c.node):
            self._touch(Clocks.early, t, i, c.reads, c.writes, Missing.DECLARED_WAIT)
            return
        weights = [tensor.kind == Kind.WEIGHT for tensor, *_ in ops.reads(c.node)]
        ahead = tuple([r for r, is_one in zip(c.reads, weights, strict=False) if is_one])
        self._touch(Clocks.early, t, i, ahead, (), Missing.STREAM_ORDER_OF_WEIGHTS)
        self._touch(Clocks.in_order, t, i, _apart(c.reads, ahead), c.writes)

    def _record(self, i: int, c: cmd.Record) -> None:
        self._recorded.add(c.event)
        self._drafts.append((i, Clocks.record, (self._event(c), self._timeline(c.stream))))

    def _wait(self, i: int, c: cmd.Wait) -> None:
        if self._plan is None or c.event in self._recorded:
            self._drafts.append((i, Clocks.wait, (self._event(c), self._timeline(c.stream))))

    def _event(self, c: cmd.Record | cmd.Wait) -> Hashable:
        return c.event if self._plan is None else (_IN_A_PLAN, c.event)

    def _replay(self, first: int, c: cmd.Replay) -> None:
        """The acts of the parts, whose numbers begin at `first`."""
        here = self._timeline(c.stream)
        self._plan, self._recorded = c.stream, set()
        streams = dict.fromkeys([p.stream for p in c.parts if p.stream not in (None, c.stream)])
        forked = tuple([self._timeline(s) for s in streams if s is not None])
        self._drafts.append((_NO_WAIT, Clocks.gate, (here,)))
        self._drafts += [(_NO_WAIT, Clocks.after, (t, (here,))) for t in forked]
        for number, part in enumerate(c.parts, first):
            _ACTS[type(part)](self, number, part)
        self._plan = None
        if forked:
            self._drafts.append((_NO_WAIT, Clocks.after, (here, forked)))
        self._drafts.append((_NO_WAIT, Clocks.gate, (here,)))

    def _sync(self, i: int, c: cmd.Sync) -> None:
        if c.event is not None:
            self._drafts.append((i, Clocks.sync, (c.event,)))
        if c.stream is not None:
            loose = (False,) if self._one_order else (False, True)
            drained = tuple([self._timeline(c.stream, which) for which in loose])
            self._drafts.append((i, Clocks.drain, (drained,)))

    def _timeline(self, stream: cmd.Stream, loose: bool = False) -> int:
        plan = self._plan if self._plan != stream else None
        if plan is not None and loose:  # a sync on the plan's stream is what waits for it
            stream, plan = plan, None
        found = self._timelines.get((stream, loose, plan))
        if found is None:
            stream.describe(self.programs[self._program].backends)  # refuses one that is not there
            found = self._timelines[stream, loose, plan] = len(self._timelines)
        return found

    def _touch(
        self,
        method: Callable[..., None],
        t: int,
        i: int,
        reads: Ranges,
        writes: Ranges,
        missing: Missing = Missing.WAIT,
    ) -> None:
        bits = 1 << 2 * (_HOST_USER if t == _NO_TIMELINE else _FIRST_USER + t)
        if method is Clocks.early or method is Clocks.loose:  # not in the order of a stream
            bits |= 1 << 2 * _LOOSE_USER
        both = reads, writes
        known = self._touched.get(both, 0)
        if known | bits != known:
            self._touched[both] = known | bits
        self._drafts.append(None)
        self.accessors.append(Accessor(self._program, i, method, t, reads, writes, missing))

    # memory ---------------------------------------------------------------------------------------

    def _with_logs(self, drafted: list[list[Act | None]]) -> list[list[Act]]:
        """Gives accessors the logs that they look into and enter. Acts that cannot race are left
        out."""
        users: dict[cmd.Range, int] = {}
        for (reads, writes), bits in self._touched.items():
            for r in reads:
                users[r] = users.get(r, 0) | bits
            for r in writes:
                users[r] = users.get(r, 0) | bits << 1
        readings = sum(1 << 2 * user for user in range(_FIRST_USER + self.n_timelines))

        def can_race(bits: int) -> bool:
            """Whether somebody writes the bytes, and two or more touch them."""
            by = (bits | bits >> 1) & readings
            return bool(bits >> 1 & readings) and by & (by - 1) != 0

        found = tags(cut(users, can_race))
        self.n_logs = 2 * found.n
        logs = {both: _logs(*both, found) for both in self._touched}
        self.early = sorted(
            {
                a.timeline
                for a in self.accessors
                if a.method is Clocks.early and logs[a.reads, a.writes][0]
            }
        )
        numbered = enumerate(self.accessors)
        made = []
        for drafts in drafted:
            acts: list[Act] = []
            for act in drafts:
                if act is None:
                    number, (_, i, method, t, reads, writes, _) = next(numbered)
                    looks, marks = logs[reads, writes]
                    if looks:
                        where = () if t == _NO_TIMELINE else (t,)
                        acts.append((i, method, (*where, number, looks, marks)))
                elif act[1] is not Clocks.gate or act[2][0] in self.early:
                    acts.append(act)
            made.append(acts)
        return made


_ACTS: dict[type[cmd.Command], Callable[[StepActs, int, Any], None]] = {
    cmd.Write: StepActs._at_once,
    cmd.Read: StepActs._at_once,
    cmd.Copy: StepActs._copy,
    cmd.Launch: StepActs._launch,
    cmd.Record: StepActs._record,
    cmd.Wait: StepActs._wait,
    cmd.Sync: StepActs._sync,
    cmd.Replay: StepActs._replay,
}
_IN_A_PLAN = "in a plan"  # an event of this name outside is another


def _merged(acts: Iterable[Act]) -> Iterator[Act]:
    def timeline(act: Act) -> int | None:
        return act[2][0] if act[1] is Clocks.in_order else None

    for t, group in groupby(acts, timeline):
        some = list(group)
        if t is None or len(some) == 1:
            yield from some
            continue
        looks = dict.fromkeys(chain.from_iterable([act[2][2] for act in some]))
        marks = dict.fromkeys(chain.from_iterable([act[2][3] for act in some]))
        i, method, (_, number, *_) = some[0]
        yield i, method, (t, number, tuple(looks), tuple(marks))


def _logs(reads: Ranges, writes: Ranges, found: Tags) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The logs that an access looks into, and those that it enters. Each tag has a log of reads and
    a log of writes."""
    looked = set(chain.from_iterable([found.looks[r] for r in writes]))
    also = looked.union(*[found.looks[r] for r in reads])
    read = set(chain.from_iterable([found.marks[r] for r in reads]))
    written = set(chain.from_iterable([found.marks[r] for r in writes]))
    looks = [2 * s + 1 for s in also] + [2 * s for s in looked]
    marks = [2 * s for s in read] + [2 * s + 1 for s in written]
    return tuple(looks), tuple(marks)


def _apart(ranges: Iterable[cmd.Range], without: Ranges) -> Ranges:
    """The bytes of `ranges` that are in none of `without`."""
    left = list(ranges)
    for buffer, offset, nbytes in without:
        parts = []
        for r in left:
            end, other = r.offset + r.nbytes, offset + nbytes
            if r.buffer is not buffer or end <= offset or other <= r.offset:
                parts.append(r)
                continue
            if r.offset < offset:
                parts.append(r._replace(nbytes=offset - r.offset))
            if other < end:
                parts.append(cmd.Range(buffer, other, end - other))
        left = parts
    return tuple(left)
