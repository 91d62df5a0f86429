"""A token is a program, and a program is data: the commands.

A `Program` is the ordered list of everything the host issues for one step. Each command names the
byte ranges it reads and writes, so that one program has many readers (issue, capture, check, draw)
that know nothing of each other.

Contracts (host order is list order):

* A Copy runs after everything already queued on its stream. Until something recorded after it has
  been waited for, its source is neither written nor freed, and its destination is neither read nor
  written except by later work on the same stream. The source counts as read late, whatever memory
  it is in.
* A Wait or a Sync refers to the event's latest Record in host order, and to nothing if there is
  none (as in CUDA).
* A Launch on the host backend's stream runs to its end before the next command is issued.
* Staging memory is written by the host alone, by Write and by launches on the host backend; a
  caller's array is the caller's again at once.
"""

from __future__ import annotations

import itertools
from enum import StrEnum
from typing import ClassVar, NamedTuple

from workbench.graph.ir import Node, StepShape, Tensor
from workbench.program.letters import folded

HOST = 0  # index of the host backend in every program
DEVICE = 1


class Space(StrEnum):
    HOST = "host"  # pageable host memory
    PINNED = "pinned"  # page-locked host memory
    DEVICE = "device"


class Buffer:
    """A block of memory the program refers to. `backend` is the index of the one that owns it."""

    __slots__ = ("backend", "name", "nbytes", "space")

    def __init__(self, name: str, space: Space, nbytes: int, backend: int):
        self.name = name
        self.space = space
        self.nbytes = nbytes
        self.backend = backend

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
    """Stream `id` of backend number `backend`; id 0 is the compute stream, 1 the copy stream."""

    backend: int
    id: int


COMPUTE_STREAM, COPY_STREAM = 0, 1
RESULT = -1  # the split number of commands outside every split: input writes, the logits wait


class Command:
    """What all commands share: the number of the split they serve, and the ranges they touch."""

    __slots__ = ("split",)
    kind: ClassVar[str]
    split: int

    @property
    def reads(self) -> tuple[Range, ...]:
        return ()

    @property
    def writes(self) -> tuple[Range, ...]:
        return ()


class Write(Command):
    """The host puts the step's value named `value` into staging memory."""

    __slots__ = ("staging", "value")
    kind = "write"

    def __init__(self, staging: Range, value: str, split: int = RESULT):
        self.staging = staging
        self.value = value
        self.split = split

    @property
    def writes(self) -> tuple[Range, ...]:
        return (self.staging,)


class Copy(Command):
    """Asynchronous copy in stream order; `name` is the tensor's."""

    __slots__ = ("dst", "name", "src", "stream")
    kind = "copy"

    def __init__(self, dst: Range, src: Range, stream: Stream, name: str, split: int):
        self.dst = dst
        self.src = src
        self.stream = stream
        self.name = name
        self.split = split

    @property
    def reads(self) -> tuple[Range, ...]:
        return (self.src,)

    @property
    def writes(self) -> tuple[Range, ...]:
        return (self.dst,)


class Launch(Command):
    """One kernel: `node` computed on `stream`. `scratch` is written and read by it alone.

    programmatic: it may begin before the launch in front of it on the stream has ended; the backend
    then launches only kernels so that declare where they wait for it.
    """

    __slots__ = ("_reads", "_writes", "node", "programmatic", "scratch", "stream")
    kind = "launch"

    def __init__(
        self,
        node: Node,
        stream: Stream,
        reads: tuple[Range, ...],
        writes: tuple[Range, ...],
        scratch: Range | None,
        split: int,
        programmatic: bool = False,
    ):
        self.node = node
        self.programmatic = programmatic
        self.stream = stream
        self._reads = reads
        self._writes = writes
        self.scratch = scratch
        self.split = split

    @property
    def reads(self) -> tuple[Range, ...]:
        return self._reads

    @property
    def writes(self) -> tuple[Range, ...]:
        return self._writes


class Record(Command):
    """The event called `event` becomes the point reached by `stream`."""

    __slots__ = ("event", "stream")
    kind = "record"

    def __init__(self, event: str, stream: Stream, split: int):
        self.event = event
        self.stream = stream
        self.split = split


class Wait(Command):
    """Later work on `stream` waits for `event`; the host does not."""

    __slots__ = ("event", "stream")
    kind = "wait"

    def __init__(self, event: str, stream: Stream, split: int):
        self.event = event
        self.stream = stream
        self.split = split


class Sync(Command):
    """The host waits, for a stream (everything queued on it) or for an event: one is not None.

    `blocks` names the Copy of which this wait is the second half: copy and wait together are one
    blocking copy, the letter `c`.
    """

    __slots__ = ("blocks", "event", "stream")
    kind = "sync"

    def __init__(
        self,
        split: int,
        *,
        stream: Stream | None = None,
        event: str | None = None,
        blocks: Copy | None = None,
    ):
        self.stream = stream
        self.event = event
        self.blocks = blocks
        self.split = split


class Read(Command):
    """The host takes the result named `value` out of staging memory."""

    __slots__ = ("staging", "value")
    kind = "read"

    def __init__(self, staging: Range, value: str, split: int = RESULT):
        self.staging = staging
        self.value = value
        self.split = split

    @property
    def reads(self) -> tuple[Range, ...]:
        return (self.staging,)


class CommandAt(NamedTuple):
    """A command of a run of programs: at `index` of step number `step`."""

    step: int
    index: int  # type: ignore[assignment]  # a number, and no method of a tuple
    command: Command

    def __str__(self) -> str:
        c = self.command
        match c:
            case Launch():
                name = c.node.name
            case Copy():
                name = c.name
            case Write() | Read():
                name = c.value
            case _:
                name = ""
        return " ".join(filter(None, (f"step {self.step} #{self.index}", c.kind, name)))


class Program:
    """The commands of one step, with the names needed to read them.

    placement[b][tensor] is where backend b finds a tensor. sync is the mode the program was
    lowered with (never `auto`). splits are the backends' indices in split order.
    """

    __slots__ = (
        "backends", "buffers", "commands", "copy_stream", "placement", "shape",
        "splits", "sync",
    )  # fmt: skip

    def __init__(
        self,
        commands: list[Command],
        buffers: list[Buffer],
        placement: list[dict[Tensor, Range]],
        splits: list[int],
        backends: tuple[str, ...],
        shape: StepShape,
        sync: str,
        copy_stream: str,
    ):
        self.commands = commands
        self.buffers = buffers
        self.placement = placement
        self.splits = splits
        self.backends = backends
        self.shape = shape
        self.sync = sync
        self.copy_stream = copy_stream

    def pattern(self, fold: bool = False, result: bool = False) -> str:
        """The program's order in the letters of the threads, one group per split.

        `c` a Copy followed at once by a Sync on it (a blocking copy), `a` a Copy without, `s` any
        other Sync, `r` Record, `w` Wait, `g` the device work of a split, `h` a host split.
        Writes, Reads and the logits wait are not printed. With fold, every run of two copies or
        more is written as four, and every run of sync-and-copy pairs as `scsc`, as the threads do.
        With result, the last group ends with the way of the results to the host, `as`, where there
        are any: `aaaag aaaag aaaagas` is a train of three ubatches.
        """
        groups = ["" for _ in self.splits]
        blocked = {c.blocks for c in self.commands if isinstance(c, Sync)}
        for command in self.commands:
            if command.split == RESULT:
                continue
            letter = _letter(command, blocked)
            # the launches of a split are one letter; a blocking copy's wait is part of its `c`
            if letter and not (letter in "gh" and groups[command.split].endswith(letter)):
                groups[command.split] += letter
        if fold:
            groups = [folded(g) for g in groups]
        if result:
            groups[-1] += self._way_of_results()
        return " ".join(groups)

    def _way_of_results(self) -> str:
        behind = itertools.takewhile(lambda c: c.split == RESULT, reversed(self.commands))
        kinds = {type(c) for c in behind}  # as many copies as results; one wait
        return "".join(letter for kind, letter in ((Copy, "a"), (Sync, "s")) if kind in kinds)

    def counts(self) -> dict[str, int]:
        """Per step: waits of the host, copies, launches, records, stream waits, bytes copied.

        waits counts every Sync, the logits wait included; copies likewise.
        """
        n = dict.fromkeys(("waits", "copies", "launches", "records", "stream_waits"), 0)
        names = {
            "sync": "waits", "copy": "copies", "launch": "launches",
            "record": "records", "wait": "stream_waits",
        }  # fmt: skip
        copied = 0
        for command in self.commands:
            name = names.get(command.kind)
            if name:
                n[name] += 1
            if isinstance(command, Copy):
                copied += command.src.nbytes
        return n | {"copied_bytes": copied}

    def _about(self) -> str:
        s = self.shape
        counts = ", ".join(f"{v} {k.replace('_', ' ')}" for k, v in self.counts().items())
        return f"{s.n_tokens} tokens, {s.n_outputs} outputs, n_kv {s.n_kv}; {self.sync}; {counts}"

    def __repr__(self) -> str:
        return f"<Program: {self.pattern(fold=True)}\n {self._about()}>"

    def _repr_html_(self) -> str:
        return f"<p><code>{self.pattern(fold=True)}</code><br>{self._about()}</p>"


def _letter(command: Command, blocked: set[Copy | None]) -> str:
    match command:
        case Launch():
            return "h" if command.stream.backend == HOST else "g"
        case Copy():
            return "c" if command in blocked else "a"
        case Sync():
            return "" if command.blocks is not None else "s"
        case Record():
            return "r"
        case Wait():
            return "w"
    return ""
