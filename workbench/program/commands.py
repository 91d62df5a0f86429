"""A token is a program, and a program is data: the commands.

A `Program` is the ordered list of everything the host issues for one step. Each command names the
byte ranges it reads and writes. So one program has many readers (issue, capture, check, draw), and
none knows another.

Contracts (host order is list order):

* A Copy runs after everything already queued on its stream. Others know that it is over once they
  have waited for an event recorded after it. Until then nobody writes or frees its source, and only
  later work on the same stream reads or writes its destination. The source counts as read late,
  whatever memory it is in.
* A Wait or a Sync refers to the event's latest Record in host order. Without a Record it refers to
  nothing, as in CUDA.
* A Launch on the host backend's stream runs to its end before the next command is issued.
* Staging memory is written by the host alone, by Write and by launches on the host backend; a
  caller's array is the caller's again at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import ClassVar, NamedTuple

from workbench.common.errors import UsageError
from workbench.graph.ir import Input, Node, StepShape, Tensor
from workbench.program.letters import folded

RESULT = -1  # the split number of commands outside of every split: input writes, the logits wait
HOST = 0  # index of the host backend in every program
DEVICE = 1
COMPUTE_STREAM, COPY_STREAM = 0, 1  # stream ids; from 2 on come the other compute streams


# memory and streams -------------------------------------------------------------------------------


class Space(StrEnum):
    HOST = "host"  # pageable host memory
    PINNED = "pinned"  # page-locked host memory
    DEVICE = "device"


class Buffer:
    """A block of memory that a program refers to.

    backend: the index of its owner.
    lands: a copy brings one result to the host in it, and it holds nothing else.
    """

    __slots__ = ("backend", "lands", "name", "nbytes", "space")

    def __init__(self, name: str, space: Space, nbytes: int, backend: int):
        self.name = name
        self.space = space
        self.nbytes = nbytes
        self.backend = backend
        self.lands = False

    def __repr__(self) -> str:
        return f"{self.name}[{self.nbytes}]"


class Range(NamedTuple):
    """Bytes offset..offset+nbytes-1 of a buffer."""

    buffer: Buffer
    offset: int
    nbytes: int

    def __repr__(self) -> str:
        return f"{self.buffer.name}+{self.offset}:{self.nbytes}"


class Stream(NamedTuple):
    """Stream `id` of backend number `backend`. Id 0 is the first compute stream, 1 the copy stream;
    from 2 on come the other compute streams."""

    backend: int
    id: int

    def describe(self, backends: Sequence[str]) -> str:
        """`cuda:1`. backends: the program's, by index. Raises UsageError for a backend that is not
        among them."""
        if not 0 <= self.backend < len(backends):
            raise UsageError(
                f"a command is on stream {self.id} of backend {self.backend}, and the program's "
                f"backends are numbered 0 to {len(backends) - 1} ({', '.join(backends)}); name it"
            )
        return f"{backends[self.backend]}:{self.id}"


def compute_stream(number: int) -> int:
    """The stream id of a compute stream. number: 0 for the first, then 1, 2, ..."""
    return COMPUTE_STREAM if number == 0 else COPY_STREAM + number


# commands -----------------------------------------------------------------------------------------


class Command:
    """What all commands share: the number of the split they serve, and the ranges they touch.

    stream: where the command is queued, or what it waits for, if any.
    blocks: the Copy that a Sync belongs to.
    """

    __slots__ = ("split",)
    kind: ClassVar[str]
    split: int
    stream: Stream | None = None
    blocks: Copy | None = None

    @property
    def by_host(self) -> bool:
        """Whether the host itself does the command, before it issues the next."""
        return False

    @property
    def letter(self) -> str:
        """The command's letter in a pattern; empty where a pattern has none for it."""
        return ""

    @property
    def label(self) -> str:
        """The name of the command's node, tensor or value; empty where it has none."""
        names = self.names()
        return names.get("name") or names.get("value", "")

    @property
    def reads(self) -> tuple[Range, ...]:
        return ()

    @property
    def writes(self) -> tuple[Range, ...]:
        return ()

    def names(self) -> dict[str, str]:
        """Those of op, name, value, event and blocks that the command has."""
        return {}

    def describe(self, backends: Sequence[str]) -> str:
        """The command in a few words, as `copy inp_pos on cuda:1`. backends: the program's, by
        index."""
        raise NotImplementedError


@dataclass(slots=True, eq=False, repr=False)
class _Staged(Command):
    """The host and a value in staging memory."""

    staging: Range
    value: str
    split: int = RESULT

    @property
    def by_host(self) -> bool:
        return True

    def names(self) -> dict[str, str]:
        return {"value": self.value}

    def describe(self, backends: Sequence[str]) -> str:
        return f"{self.kind} {self.value}"


class Write(_Staged):
    """The host puts the step's value named `value` into staging memory."""

    __slots__ = ()
    kind = "write"

    @property
    def writes(self) -> tuple[Range, ...]:
        return (self.staging,)


class Read(_Staged):
    """The host takes the result named `value` out of staging memory."""

    __slots__ = ()
    kind = "read"

    @property
    def reads(self) -> tuple[Range, ...]:
        return (self.staging,)


@dataclass(slots=True, eq=False, repr=False)
class Copy(Command):
    """An asynchronous copy in stream order. name: of the tensor."""

    kind = "copy"
    letter = "a"
    dst: Range
    src: Range
    stream: Stream = field()  # required: without this, the None of `Command` would be its default
    name: str
    split: int

    @property
    def reads(self) -> tuple[Range, ...]:
        return (self.src,)

    @property
    def writes(self) -> tuple[Range, ...]:
        return (self.dst,)

    def names(self) -> dict[str, str]:
        return {"name": self.name}

    def describe(self, backends: Sequence[str]) -> str:
        return f"copy {self.name} on {self.stream.describe(backends)}"


@dataclass(slots=True, eq=False, repr=False)
class Launch(Command):
    """One kernel: `node` computed on `stream`. Nothing else reads or writes `scratch`.

    programmatic: the launch may begin before the launch before it on the stream has ended. Its
        kernels then wait by themselves, and declare that they do.
    """

    kind = "launch"
    node: Node
    stream: Stream = field()
    reads: tuple[Range, ...] = field()
    writes: tuple[Range, ...] = field()
    scratch: Range | None
    split: int
    programmatic: bool = False

    @property
    def by_host(self) -> bool:
        return self.stream.backend == HOST

    @property
    def letter(self) -> str:
        return "h" if self.by_host else "g"

    def names(self) -> dict[str, str]:
        return {"op": self.node.op, "name": self.node.name}

    def describe(self, backends: Sequence[str]) -> str:
        where = "the host" if self.by_host else self.stream.describe(backends)
        return f"launch {self.node.op} {self.node.name} on {where}"


@dataclass(slots=True, eq=False, repr=False)
class _AtEvent(Command):
    """A stream and an event. forks: the command orders branches of a split, and has no letter."""

    _letter: ClassVar[str]
    event: str
    stream: Stream = field()
    split: int
    forks: bool = False

    @property
    def letter(self) -> str:
        return "" if self.forks else self._letter

    def names(self) -> dict[str, str]:
        return {"event": self.event}


class Record(_AtEvent):
    """The event called `event` becomes the point reached by `stream`."""

    __slots__ = ()
    kind, _letter = "record", "r"

    def describe(self, backends: Sequence[str]) -> str:
        return f'record of "{self.event}" on {self.stream.describe(backends)}'


class Wait(_AtEvent):
    """Later work on `stream` waits for `event`; the host does not."""

    __slots__ = ()
    kind, _letter = "wait", "w"

    def describe(self, backends: Sequence[str]) -> str:
        return f'wait of {self.stream.describe(backends)} for "{self.event}"'


@dataclass(slots=True, eq=False, repr=False)
class Sync(Command):
    """The host waits for a stream (everything queued on it) or for an event: one of them is given.

    blocks: the Copy that this wait ends. The two are one blocking copy, the letter `c`.
    """

    kind = "sync"
    split: int
    _: KW_ONLY
    stream: Stream | None = None
    event: str | None = None
    blocks: Copy | None = None

    @property
    def letter(self) -> str:
        return "s" if self.blocks is None else ""

    def names(self) -> dict[str, str]:
        event = {} if self.event is None else {"event": self.event}
        return event if self.blocks is None else {**event, "blocks": self.blocks.name}

    def describe(self, backends: Sequence[str]) -> str:
        of = f'"{self.event}"' if self.stream is None else self.stream.describe(backends)
        return f"sync of {of}{'' if self.blocks is None else f' after copy {self.blocks.name}'}"


@dataclass(slots=True, eq=False, repr=False)
class Replay(Command):
    """A plan: commands of one device, recorded once and then issued by one call on `stream`.

    * The parts begin when everything queued before on `stream` is over. What is queued after on
      `stream` begins when every part is over.
    * Among themselves the parts are ordered as outside of a plan: by their streams, and by the
      Records and Waits among them. The Record of a Wait among the parts is an earlier part. Nobody
      outside knows of that Record.
    * A part on another stream has no other order with what that stream does outside of the plan.
    * No launch overlaps what comes before its plan, or a plan that comes before the launch.
    * Where copies keep no order with their stream, they keep none in a plan. A Sync on the plan's
      stream waits for them.
    """

    kind = "replay"
    letter = "p"
    parts: tuple[Command, ...]
    stream: Stream = field()
    split: int

    @property
    def reads(self) -> tuple[Range, ...]:
        return tuple([r for part in self.parts for r in part.reads])

    @property
    def writes(self) -> tuple[Range, ...]:
        return tuple([r for part in self.parts for r in part.writes])

    def describe(self, backends: Sequence[str]) -> str:
        return f"replay of {len(self.parts)} commands on {self.stream.describe(backends)}"


class CommandAt(NamedTuple):
    """A command of a series of programs: at `index` of step number `step`. part: its number among
    the parts of the plan there, where it is in a plan."""

    step: int
    index: int  # type: ignore[assignment]  # a number, and no method of a tuple
    command: Command
    part: int | None = None

    @property
    def key(self) -> tuple[int, int, int | None]:
        return self.step, self.index, self.part

    @property
    def where(self) -> str:
        """`step 1 #12`, or `step 1 #12 part 3`."""
        return f"step {self.step} #{self.index}{'' if self.part is None else f' part {self.part}'}"

    def describe(self, backends: Sequence[str]) -> str:
        """The command in a few words, and whether it is in a plan."""
        return f"{self.command.describe(backends)}{'' if self.part is None else ' in a plan'}"

    def __str__(self) -> str:
        return " ".join(filter(None, (self.where, self.command.kind, self.command.label)))


@dataclass(slots=True, eq=False, repr=False)
class Program:
    """The commands of one step, with the names needed to read them.

    commands: in the order in which the host issues them.
    buffers: all memory that they touch.
    layout[b][tensor]: where backend b finds a tensor.
    splits: the backend of each split, by index.
    backends: their names, by index; the host's is the first.
    shape: of the step.
    sync: the mode that the program was lowered with, never `auto`.
    copy_stream: the stream that input copies ride, never `auto`.
    inputs: what the host writes.

    `Engine.program` makes it, and raises UsageError where no step has the shape.
    """

    commands: list[Command]
    buffers: list[Buffer]
    layout: list[dict[Tensor, Range]]
    splits: list[int]
    backends: tuple[str, ...]
    shape: StepShape
    sync: str
    copy_stream: str
    inputs: Sequence[Input] = ()

    @property
    def first_of_tail(self) -> int:
        """Where the waits and reads that end the step begin: an index of `commands`. Their length,
        where the step ends with neither."""
        end = len(self.commands)
        while end and isinstance(last := self.commands[end - 1], Read | Sync):
            if last.split != RESULT:
                break
            end -= 1
        return end

    @property
    def waited(self) -> bool:
        """Whether the host goes on after the program only when all of its work is over."""
        return self.commands[-1].split == RESULT

    def pattern(self, fold: bool = False, result: bool = False) -> str:
        """The program's order in the letters of the threads (`letters.py`), one group per split.

        The work of a split is one letter, with a number where it is on several streams (`g3`).
        Writes, Reads, the logits wait and the commands that order a split's streams have no letter.

        fold: two copies or more are written as four, and sync-and-copy pairs as `scsc`, as the
            threads do.
        result: the last group ends with `as`, the copy of the results to the host and the wait for
            it, where the step has them. `aaaag aaaag aaaagas` is a train of three ubatches.
        """
        groups = [""] * len(self.splits)
        blocked = {c.blocks for c in self.commands}
        for c in self.commands:
            letter = "c" if c in blocked else c.letter
            if c.split >= 0 and not (letter in ("g", "h") and groups[c.split].endswith(letter)):
                groups[c.split] += letter
        streams: list[set[Stream | None]] = [set() for _ in groups]
        for c in self.singly():
            if c.letter == "g":
                streams[c.split].add(c.stream)
        for i, used in enumerate(streams):
            if len(used) > 1:
                groups[i] = re.sub("[gp]", rf"\g<0>{len(used)}", groups[i])
        if fold:
            groups = [folded(group) for group in groups]
        if result:
            last = {c.letter for c in takewhile(lambda c: c.split < 0, reversed(self.commands))}
            groups[-1] += "".join(letter for letter in "as" if letter in last)
        return " ".join(groups)

    def counts(self, lettered: bool = False) -> dict[str, int]:
        """Of one step: waits of the host, copies, launches, records, stream waits, bytes copied.

        waits: every Sync, the logits wait included. copies: likewise with that of the results.
        replays: only where there are plans. The host issues each plan, not the commands in it.

        lettered: count only commands that the letters of the pattern stand for.
        """
        names = {
            "sync": "waits", "copy": "copies", "launch": "launches",
            "record": "records", "wait": "stream_waits",
        }  # fmt: skip
        n = Counter(
            c.kind
            for c in self.commands
            if not lettered or (c.split != RESULT and (c.letter or c.blocks))
        )
        counts = {name: n[kind] for kind, name in names.items()}
        copied = sum(c.src.nbytes for c in self.singly() if isinstance(c, Copy))
        replays = {"replays": n["replay"]} if n["replay"] else {}
        return counts | {"copied_bytes": copied} | replays

    def singly(self) -> Iterator[Command]:
        """Every command, with the parts of each plan in the plan's place."""
        for c in self.commands:
            yield from c.parts if isinstance(c, Replay) else (c,)

    def located(self, step: int = 0) -> Iterator[CommandAt]:
        """As `singly`, each command with its place. step: the step's number in every place."""
        for i, c in enumerate(self.commands):
            parts = enumerate(c.parts) if isinstance(c, Replay) else [(None, c)]
            yield from [CommandAt(step, i, part, n) for n, part in parts]

    def _about(self) -> str:
        s = self.shape
        counts = ", ".join(f"{v} {k.replace('_', ' ')}" for k, v in self.counts().items())
        return f"{s.n_tokens} tokens, {s.n_outputs} outputs, n_kv {s.n_kv}; {self.sync}; {counts}"

    def __repr__(self) -> str:
        return f"<Program: {self.pattern(fold=True)}\n {self._about()}>"

    def _repr_html_(self) -> str:
        return f"<p><code>{self.pattern(fold=True)}</code><br>{self._about()}</p>"
