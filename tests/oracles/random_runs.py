"""Random small runs, for the oracles: commands alone, which mostly race, and groups that order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from workbench.graph.ir import F32, Kind, Node, StepShape, Tensor
from workbench.graph.ops import make
from workbench.program.commands import (
    HOST,
    Buffer,
    Command,
    Copy,
    Launch,
    Program,
    Range,
    Read,
    Record,
    Replay,
    Space,
    Stream,
    Sync,
    Wait,
    Write,
)

STREAMS = (Stream(1, 0), Stream(1, 1), Stream(2, 0))
N_EVENTS = 2
N_BYTES = 4  # of each buffer
MOST_COMMANDS = 16  # of a run
PRODUCT = make("mul_mat", "p", Tensor("w", F32, (4, 8), Kind.WEIGHT), Tensor("x", F32, (1, 8)))


def program(commands: Sequence[Command]) -> Program:
    """A program of nothing but commands."""
    buffers = [*dict.fromkeys(r.buffer for c in commands for r in (*c.reads, *c.writes))]
    backends = ("host", "dev", "dev2")
    return Program([*commands], buffers, [], [], backends, StepShape(1, 1, 1), "", "")


def node(name: str) -> Node:
    """A node to launch; what it touches is what its Launch says."""
    return make("add", name, Tensor("a", F32, (1,)), Tensor("b", F32, (1,)))


def random_run(rng: Random) -> list[Program]:
    """A run of about MOST_COMMANDS commands at most: one program again and again, or several.

    Commands come alone, and then mostly race. They also come in the few groups that order work, and
    any group may lack a command. In half of the runs neighbours become plans.
    """
    buffers = [Buffer(name, Space.PINNED, N_BYTES, 1) for name in "xyz"[: rng.randint(2, 3)]]
    n_steps = rng.randint(1, 3)
    most = MOST_COMMANDS // n_steps
    alike, planned = rng.random() < 0.5, rng.random() < 0.5
    made = []
    for _ in range(1 if alike else n_steps):
        commands = random_commands(rng, buffers, rng.randint(1, most))
        made.append(program(_with_replays(rng, commands) if planned else commands))
    return made * (n_steps // len(made))


def _with_replays(rng: Random, commands: list[Command]) -> list[Command]:
    """Neighbours on streams of one device as plans, on one of these streams. A Wait for what is
    recorded before its plan stays before the plan, where it is the stream's."""
    found: list[Command] = []
    while commands:
        n, device, parts = rng.randint(1, 6), rng.choice(STREAMS).backend, list[Command]()
        while len(parts) < n and commands and _on(commands[0], device):
            parts.append(commands.pop(0))
        if not parts:
            found.append(commands.pop(0))
            continue
        stream = rng.choice([part.stream for part in parts])
        recorded, inside = set[str](), []
        for part in parts:
            if isinstance(part, Wait) and part.event not in recorded:
                found.append(Wait(part.event, stream, 0))
                continue
            inside.append(part)
            if isinstance(part, Record):
                recorded.add(part.event)
        if inside:
            found.append(Replay(tuple(inside), stream, 0))
    return found


def _on(command: Command, device: int) -> bool:
    """Whether it can be part of a plan of this device."""
    of_device = isinstance(command, Copy | Launch | Record | Wait)
    return of_device and not command.by_host and command.stream.backend == device


def _range(rng: Random, buffer: Buffer, nbytes: int = 0) -> Range:
    nbytes = nbytes or rng.choice((N_BYTES, rng.randint(1, N_BYTES)))
    return Range(buffer, rng.randint(0, N_BYTES - nbytes), nbytes)


Buffers = list[Buffer]


def _ranges(rng: Random, buffers: Buffers, least: int, most: int) -> tuple[Range, ...]:
    return tuple(_range(rng, rng.choice(buffers)) for _ in range(rng.randint(least, most)))


def _copy(rng: Random, buffers: Buffers, where: Stream, event: str) -> Command:
    dst, src = rng.sample(buffers, 2)
    to = _range(rng, dst)
    return Copy(to, _range(rng, src, to.nbytes), where, "c", 0)


def _launch(rng: Random, buffers: Buffers, where: Stream, event: str = "") -> Command:
    touched = _ranges(rng, buffers, 0, 2), _ranges(rng, buffers, 0, 1)
    return Launch(node("n"), where, *touched, None, 0)


def _early(rng: Random, buffers: Buffers, where: Stream, event: str) -> Command:
    """A programmatic launch: it reads its first range, which is weights, early."""
    touched = _ranges(rng, buffers, 2, 2), _ranges(rng, buffers, 0, 1)
    return Launch(PRODUCT, where, *touched, None, 0, programmatic=True)


KINDS: dict[str, Callable[[Random, Buffers, Stream, str], Command]] = {
    "write": lambda rng, buffers, where, event: Write(*_ranges(rng, buffers, 1, 1), "v"),
    "read": lambda rng, buffers, where, event: Read(*_ranges(rng, buffers, 1, 1), "v"),
    "host": lambda rng, buffers, where, event: _launch(rng, buffers, Stream(HOST, 0)),
    "copy": _copy,
    "launch": _launch,
    "early": _early,
    "record": lambda rng, buffers, where, event: Record(event, where, 0),
    "wait": lambda rng, buffers, where, event: Wait(event, where, 0),
    "never": lambda rng, buffers, where, event: Wait("never", where, 0),
    "sync": lambda rng, buffers, where, event: Sync(0, event=event),
    "drain": lambda rng, buffers, where, event: Sync(0, stream=where),
}
ANY = {
    "work": ("copy", "launch", "launch", "early"),
    "touch": ("write", "read", "host"),
    "order": ("record", "wait", "sync", "drain"),
}
# commands that belong together; those with a ' are on another stream, all of one event
GROUPS = (
    "work", "touch", "order",
    # a wait before a launch that begins early: for nothing, or for another stream
    "launch never early", "work' record' launch wait early",
    # one stream behind another, and the host behind a stream
    "work record wait' work'", "work record sync touch", "work drain touch",
    # work that comes after the record is not waited for
    "record work wait' work'", "record work sync touch",
)  # fmt: skip


def random_commands(rng: Random, buffers: Buffers, n: int) -> list[Command]:
    found: list[Command] = []
    while len(found) < n:
        streams, event = [rng.choice(STREAMS) for _ in "ab"], str(rng.randrange(N_EVENTS))
        for word in rng.choice(GROUPS).split():
            if rng.random() < 0.95:
                name = word.rstrip("'")
                kind = KINDS[rng.choice(ANY.get(name, (name,)))]
                found.append(kind(rng, buffers, streams[word != name], event))
    return found[:n]
