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


def program(commands: Sequence[Command]) -> Program:
    """A program of nothing but commands."""
    buffers = dict.fromkeys(r.buffer for c in commands for r in (*c.reads, *c.writes))
    return Program(
        commands=list(commands),
        buffers=list(buffers),
        layout=[],
        splits=[],
        backends=("host", "dev", "dev2"),
        shape=StepShape(1, 1, 1),
        sync="",
        copy_stream="",
    )


def node(name: str) -> Node:
    """A node to launch; what it touches is what its Launch says."""
    return make("add", name, Tensor("a", F32, (1,)), Tensor("b", F32, (1,)))


STREAMS = (Stream(1, 0), Stream(1, 1), Stream(2, 0))
N_EVENTS = 2
N_BYTES = 4  # of each buffer
MOST_COMMANDS = 16  # of a run


def random_run(rng: Random) -> list[Program]:
    """A run of about MOST_COMMANDS commands at most: one program again and again, or several.

    Commands come alone, and then mostly race. They also come in the few groups that order work (see
    `_group`), and any group may lack a command. In half of the runs neighbours become plans.
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


def random_commands(rng: Random, buffers: list[Buffer], n: int) -> list[Command]:
    found: list[Command] = []
    while len(found) < n:
        for kind, where, event in _group(rng):
            if rng.random() < 0.95:
                found.append(kind(rng, buffers, where, event))
    return found[:n]


def _with_replays(rng: Random, commands: list[Command]) -> list[Command]:
    """Neighbours on streams of one device as plans, on one of these streams. A Wait for what is
    recorded in front of its plan stays in front, where it is the stream's."""
    found: list[Command] = []
    while commands:
        n = rng.randint(1, 6)
        device = rng.choice(STREAMS).backend
        parts: list[Command] = []
        while len(parts) < n and commands and _on(commands[0], device):
            parts.append(commands.pop(0))
        if not parts:
            found.append(commands.pop(0))
            continue
        stream = rng.choice([part.stream for part in parts])
        recorded: set[str] = set()
        inside = []
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
    of_device = isinstance(command, (Copy, Launch, Record, Wait))
    return of_device and not command.by_host and command.stream.backend == device


_Kind = Callable[[Random, list[Buffer], Stream, str], Command]


def _range(rng: Random, buffer: Buffer, nbytes: int = 0) -> Range:
    nbytes = nbytes or rng.choice((N_BYTES, rng.randint(1, N_BYTES)))
    return Range(buffer, rng.randint(0, N_BYTES - nbytes), nbytes)


def _write(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    return Write(_range(rng, rng.choice(buffers)), "v")


def _read(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    return Read(_range(rng, rng.choice(buffers)), "v")


def _copy(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    dst, src = rng.sample(buffers, 2)
    to = _range(rng, dst)
    return Copy(to, _range(rng, src, to.nbytes), where, "c", 0)


def _launch(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    reads, writes = (
        tuple(_range(rng, rng.choice(buffers)) for _ in range(n))
        for n in (rng.randint(0, 2), rng.randint(0, 1))
    )
    return Launch(node("n"), where, reads, writes, None, 0)


PRODUCT = make("mul_mat", "p", Tensor("w", F32, (4, 8), Kind.WEIGHT), Tensor("x", F32, (1, 8)))


def _programmatic(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    """It reads its first range, which is weights, early."""
    reads = tuple(_range(rng, rng.choice(buffers)) for _ in range(2))
    writes = tuple(_range(rng, rng.choice(buffers)) for _ in range(rng.randint(0, 1)))
    return Launch(PRODUCT, where, reads, writes, None, 0, programmatic=True)


def _host_launch(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    return _launch(rng, buffers, Stream(HOST, 0), event)


def _record(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    return Record(event, where, 0)


def _wait(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    return Wait(event, where, 0)


def _sync_event(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    return Sync(0, event=event)


def _sync_stream(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    return Sync(0, stream=where)


_WORK: tuple[_Kind, ...] = (_copy, _launch, _launch, _programmatic)
_BY_HOST: tuple[_Kind, ...] = (_write, _read, _host_launch)
_ORDER: tuple[_Kind, ...] = (_record, _wait, _sync_event, _sync_stream)


def _group(rng: Random) -> list[tuple[_Kind, Stream, str]]:
    """Commands that belong together, as kind, stream and event."""
    here, there, event = rng.choice(STREAMS), rng.choice(STREAMS), str(rng.randrange(N_EVENTS))
    work, more, by_host = rng.choice(_WORK), rng.choice(_WORK), rng.choice(_BY_HOST)
    groups: tuple[list[tuple[_Kind, Stream, str]], ...] = (
        [(work, here, event)],
        [(by_host, here, event)],
        [(rng.choice(_ORDER), here, event)],
        # a wait in front of a launch that begins early: for nothing, or for another stream
        [(_launch, here, event), (_wait, here, "never"), (_programmatic, here, event)],
        [
            (work, there, event),
            (_record, there, event),
            (_launch, here, event),
            (_wait, here, event),
            (_programmatic, here, event),
        ],
        # one stream behind another, and the host behind a stream
        [(work, here, event), (_record, here, event), (_wait, there, event), (more, there, event)],
        [
            (work, here, event),
            (_record, here, event),
            (_sync_event, here, event),
            (by_host, here, 0),
        ],
        [(work, here, event), (_sync_stream, here, event), (by_host, here, event)],
        # work that comes behind the record is not waited for
        [(_record, here, event), (work, here, event), (_wait, there, event), (more, there, event)],
        [
            (_record, here, event),
            (work, here, event),
            (_sync_event, here, event),
            (by_host, here, 0),
        ],
    )
    return rng.choice(groups)
