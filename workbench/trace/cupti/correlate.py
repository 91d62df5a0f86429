"""Matches records of CUPTI with the commands of programs, and checks that none is missing.

Pure: records are plain tuples, so tests replay a recording without a GPU.

External ids connect records and commands; launches are not counted. While a command is issued, its
number is CUPTI's external correlation id. CUPTI writes that number beside the correlation id of
every call made in that time. A kernel or a copy has the correlation id of its call. So a Launch of
several kernels needs no guess (conversions, kernels that cuBLAS chooses), and a lost record does
not shift later records.

Then the records of each command are compared with the work that the backend issues for it: numbers,
bytes, names. A different name is a mistake of CUPTI where grid and block fit the launch
(`activity.named`). In each stream the records must begin in the order of the commands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from workbench.backend.base import NO_PART, KernelName
from workbench.graph.ir import Node
from workbench.program.commands import (
    HOST,
    Command,
    Copy,
    Launch,
    Program,
    Record,
    Replay,
    Stream,
    Wait,
)
from workbench.trace.cupti.activity import (
    COPY,
    COUNTED,
    DRIVER,
    KERNEL,
    RUNTIME,
    SYNC,
    Activity,
    Want,
    differs,
    named,
)
from workbench.trace.cupti.parted import EndsBefore, parted
from workbench.trace.spans import HOST_LANE, Span

LAUNCH_CALLS = ("cuLaunchKernel", "cudaLaunchKernel", "cuLaunchCooperative", "cudaLaunchCoop")
UNTOLD = "the backend does not say which kernels a launch is made of"
CALL = "call"  # category of the spans of calls and synchronizations

# The step, the position in its program's commands, and for a part of a plan the part's number.
CommandKey = tuple[int, int] | tuple[int, int, int]
Replayed = Mapping[CommandKey, Sequence[int] | None]  # plan -> the part of each node
KernelsOf = Callable[[Node], Sequence[KernelName] | None]  # see `backend/base.py`


class Match(NamedTuple):
    """The result of `match`.

    spans: of device work and of calls, on the recorder's clock, with their step and command.
    faults: lines that say what is missing or too much; empty where the recording is complete.
    early_ns: the most by which a record begins before the call that started it. More than 0 is an
        error of CUPTI's device clock.
    n_named: kernels for which CUPTI had other names (`activity.named`).
    """

    spans: list[Span]
    faults: list[str]
    early_ns: int
    n_named: int


def match(
    rows: Iterable[Activity],
    external: Mapping[int, int],
    issued: Mapping[int, CommandKey],
    programs: Mapping[int, Program],
    kernels_of: KernelsOf,
    to_host: Callable[[int], int],
    replayed: Replayed = MappingProxyType({}),
) -> Match:
    """Matches the records of a window.

    external: correlation id -> external id.
    issued: external id -> command.
    programs: step -> program, for all programs issued in the window.
    to_host: converts CUPTI's clock to the recorder's clock.
    replayed: plan -> the part of each node; None for a plan whose parts were issued one by one.
    """
    rows, commands = list(rows), _Commands(programs)

    def owner(row: Activity) -> CommandKey | None:
        """The command during whose issue the row was made, or the call that started it."""
        return issued.get(external.get(row.correlation, -1))

    device: dict[CommandKey, list[Activity]] = defaultdict(list)
    calls: list[tuple[CommandKey, Activity]] = []
    strays: list[Activity] = []
    for row in rows:
        key = owner(row)
        if row.kind in (DRIVER, RUNTIME, SYNC):
            if key is not None:
                calls.append((key, row))
        elif key is not None:
            device[key].append(row)
        elif row.kind in COUNTED:
            strays.append(row)
    faults = _Faults()
    _check_calls(calls, device, commands, faults)
    device, untold = _by_part(device, commands, kernels_of, replayed, faults)
    for key, found in device.items():
        if len(key) == 2:  # the rows of a part are in order already
            device[key] = _as_one(found, commands.get(key))

    for row in rows:
        if not (row.start and row.end):
            faults.add("zero timestamp", commands.at(owner(row)) + f" {row.kind} {row.name}")
    for row in strays:
        faults.add(f"{row.kind} of no command", row.name)
    for key, wanted in commands.items():
        if key[:2] in untold:
            continue
        expected = _expected(wanted, kernels_of)
        if expected is None:
            faults.add(UNTOLD, commands.at(key))
        elif differs(device.get(key, ()), expected):
            device[key] = named(device.get(key, ()), expected)
            if reason := differs(device[key], expected):
                faults.add("command not as recorded", f"{commands.at(key)}: {reason}")
    _check_order(device, commands, faults)
    spans = _spans(device, calls, commands, to_host)
    recorded = set(rows)
    n_named = sum(r.kind == KERNEL and r not in recorded for of in device.values() for r in of)
    return Match(spans, faults.lines(), _early_ns(calls, device), n_named)


class _Commands(dict[CommandKey, Command]):
    """The commands that were issued, each plan followed by its parts. programs: step -> program."""

    def __init__(self, programs: Mapping[int, Program]):
        for step, program in programs.items():
            for index, command in enumerate(program.commands):
                self[step, index] = command
                if isinstance(command, Replay):
                    parts = enumerate(command.parts)
                    self.update({(step, index, number): part for number, part in parts})
        self._programs = programs

    def backend(self, key: CommandKey, stream: Stream) -> str:
        """The name of the backend to which a command's stream belongs."""
        return self._programs[key[0]].backends[stream.backend]

    def at(self, key: CommandKey | None) -> str:
        """For messages: `step 3, command 7, launch mul_mat q`."""
        if key is None:
            return "outside every command,"
        words = ["command"]
        if (command := self.get(key)) is not None:
            words = [command.kind, *(command.names().get(name, "") for name in ("op", "name"))]
        part = f" part {key[2]}" if len(key) == 3 else ""
        return f"step {key[0]}, command {key[1]}{part}, {' '.join(filter(None, words))}"


class _Faults:
    """Counts faults of each kind, and keeps the first fault of the kind."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, example: str) -> None:
        n, first = self._kinds.get(kind, (0, example))
        self._kinds[kind] = n + 1, first

    def lines(self) -> list[str]:
        return [f"{n} x {kind} (first: {first})" for kind, (n, first) in self._kinds.items()]


# the records of a command -------------------------------------------------------------------------


def _as_one(rows: list[Activity], command: Command | None) -> list[Activity]:
    """The rows of a command, by start. A copy between devices that are not connected goes through
    the host's memory, and has a record on each device. One row then stands for both."""
    rows = sorted(rows, key=lambda r: (r.start, r.correlation))
    if isinstance(command, Copy) and command.src.buffer.space == command.dst.buffer.space:
        match rows:
            case [Activity(kind="copy") as out, Activity(kind="copy") as back] if (
                out.device != back.device and out.nbytes == back.nbytes
            ):
                whole = out.start and out.end and back.start and back.end
                return [out._replace(end=max(out.end, back.end) if whole else 0)]
    return rows


def _by_part(
    device: Mapping[CommandKey, list[Activity]],
    commands: _Commands,
    kernels_of: KernelsOf,
    replayed: Replayed,
    faults: _Faults,
) -> tuple[dict[CommandKey, list[Activity]], set[CommandKey]]:
    """The records by command, those of plans by part; and the plans whose records do not fit. The
    records of such a plan are left out."""
    made: dict[CommandKey, list[Activity]] = {}
    untold: set[CommandKey] = set()
    for key, rows in device.items():
        plan = commands.get(key)
        if not isinstance(plan, Replay):
            made[key] = rows
            continue
        wanted = [_expected(part, kernels_of) for part in plan.parts]
        told = [wants for wants in wanted if wants is not None]
        if len(told) < len(wanted):
            continue  # `match` reports the parts whose kernels are not known
        mine, nodes = _without_end(rows, replayed.get(key))
        found, reason = parted(
            _with_inputs(mine, plan, nodes), told, nodes, _ends_before(plan, told)
        )
        if reason:
            untold.add(key)
            faults.add("plan not as recorded", f"{commands.at(key)}: {reason}")
        made |= {(key[0], key[1], part): of_part for part, of_part in found.items()}
    return made, untold


def _ends_before(plan: Replay, wanted: Sequence[Sequence[Want]]) -> EndsBefore | None:
    """For each part, the parts with records that must end before it begins, by its stream and by
    events. None where all kernels are on one stream."""
    if len({part.stream for part in plan.parts if isinstance(part, Launch)}) < 2:
        return None
    made: list[frozenset[int]] = []
    reached: dict[Stream, frozenset[int]] = defaultdict(frozenset)
    recorded: dict[str, frozenset[int]] = {}
    for number, part in enumerate(plan.parts):
        assert part.stream is not None
        here = reached[part.stream]
        made.append(here)
        if isinstance(part, Record):
            recorded[part.event] = here
        elif isinstance(part, Wait):
            reached[part.stream] = here | recorded[part.event]
        elif wanted[number]:
            reached[part.stream] = frozenset((number,))
    return made


def _without_end(
    rows: Sequence[Activity], nodes: Sequence[int] | None
) -> tuple[Sequence[Activity], Sequence[int] | None]:
    """The records of a plan and the part of each node. The last kernel is left out where it only
    tells the host of the end: it belongs to no command, and its time counts as a gap."""
    kernels = [row for row in rows if row.kind == KERNEL and row.node]
    if not nodes or nodes[-1] != NO_PART or not kernels:
        return rows, nodes
    last = max(kernels, key=lambda row: row.start)
    return [row for row in rows if row is not last], nodes[:-1]


def _with_inputs(
    rows: Sequence[Activity], plan: Replay, nodes: Sequence[int] | None
) -> list[Activity]:
    """The records of a plan. In a plan with a gate a kernel copies the inputs, and becomes the
    record of that copy. It is the first kernel, where one more node is a copy than there are
    records of copies."""
    first, kernels = plan.parts[0], [row for row in rows if row.kind == KERNEL and row.node]
    n_copies = sum(row.kind == COPY for row in rows)
    if not nodes or not kernels or not isinstance(first, Copy):
        return list(rows)
    if sum(isinstance(plan.parts[part], Copy) for part in nodes) != n_copies + 1:
        return list(rows)
    there = min(kernels, key=lambda row: row.start)
    inputs = there._replace(kind=COPY, nbytes=first.src.nbytes)
    return [inputs if row is there else row for row in rows]


def _expected(command: Command, kernels_of: KernelsOf) -> list[Want] | None:
    """The device's work for a command; None where the backend does not know it."""
    if isinstance(command, Copy):
        return [command.src.nbytes] if command.src.nbytes else []
    if isinstance(command, Launch) and command.stream.backend != HOST:
        kernels = kernels_of(command.node)
        return None if kernels is None else [k if k.function else None for k in kernels]
    return []


def _check_calls(
    calls: Sequence[tuple[CommandKey, Activity]],
    device: Mapping[CommandKey, Sequence[Activity]],
    commands: _Commands,
    faults: _Faults,
) -> None:
    """Checks that every launch call has a kernel. Only cuBLAS knows how many kernels a product has,
    but its calls are recorded too. A driver call inside a runtime call is the same launch."""
    launches: dict[CommandKey, list[Activity]] = defaultdict(list)
    for key, row in calls:
        if row.kind != SYNC and row.start and row.name.startswith(LAUNCH_CALLS):
            launches[key].append(row)
    for key, called in launches.items():
        n, end = 0, 0
        for row in sorted(called, key=lambda r: (r.start, -r.end)):
            if row.end > end:
                n, end = n + 1, row.end
        n_kernels = sum(r.kind == KERNEL for r in device.get(key, ()))
        if n_kernels < n:
            faults.add(
                "command with fewer kernels than launch calls",
                f"{commands.at(key)}: {n_kernels} for {n}",
            )


def _check_order(
    device: Mapping[CommandKey, Sequence[Activity]],
    commands: _Commands,
    faults: _Faults,
) -> None:
    """Checks each stream of a program: its records begin in the order of the commands, and all of
    them are on one stream of CUPTI, which no other stream of a program uses. Parts of a plan are
    not checked: they are on streams of the graph, and their order already identified them."""
    by_stream: dict[Stream, list[tuple[int, CommandKey, Activity]]] = defaultdict(list)
    for key, rows in device.items():
        command = commands.get(key)
        if len(key) == 3 or command is None:
            continue
        if (stream := command.stream) is not None:
            by_stream[stream] += [(r.start, key, r) for r in rows if r.kind in COUNTED and r.start]
    owners: dict[tuple[int, int], Stream] = {}
    for stream, began in by_stream.items():
        began.sort(key=lambda entry: (entry[0], entry[1]))
        for (_, before, _), (_, after, _) in pairwise(began):
            if after < before:
                faults.add(
                    "record out of order",
                    f"{commands.at(after)} begins after {commands.at(before)}",
                )
        numbers = {(r.device, r.stream) for _, _, r in began}
        shared = [n for n in numbers if owners.setdefault(n, stream) != stream]
        if len(numbers) > 1 or shared:
            name = commands.backend(began[0][1], stream)
            faults.add(
                "stream that is not one of CUPTI's",
                f"{name} stream {stream.id} has CUPTI's (device, stream) {sorted(numbers)}",
            )


def _early_ns(
    calls: Sequence[tuple[CommandKey, Activity]], device: Mapping[CommandKey, Sequence[Activity]]
) -> int:
    called = {row.correlation: row.start for _, row in calls if row.kind != SYNC and row.start}
    early = [
        called[r.correlation] - r.start
        for rows in device.values()
        for r in rows
        if r.start and r.correlation in called
    ]
    return max(0, *early) if early else 0


# spans --------------------------------------------------------------------------------------------


def _spans(
    device: Mapping[CommandKey, Sequence[Activity]],
    calls: Sequence[tuple[CommandKey, Activity]],
    commands: _Commands,
    to_host: Callable[[int], int],
) -> list[Span]:
    """A device span for each kernel, copy and memset, and a host span for each call and
    synchronization. Rows without both times have no span."""
    made = []
    for key, rows in device.items():
        command = commands.get(key)
        if command is None or (stream := command.stream) is None:
            continue
        lane = f"{commands.backend(key, stream)} stream {stream.id}"
        name, about = _about(key, command, stream)
        for row in rows:
            if row.start and row.end:
                what = {"bytes": row.nbytes} if row.kind == COPY else {"kernel": row.name}
                times = to_host(row.start), to_host(row.end)
                made.append(Span(name, "device", lane, *times, about | what))
    for key, row in calls:
        command = commands.get(key)
        if command is not None and row.start and row.end:
            # Only the command's own span has `index`: arrows to the device start there.
            args = {"step": key[0], "split": command.split, "command": key[1], "api": row.kind}
            made.append(Span(row.name, CALL, HOST_LANE, to_host(row.start), to_host(row.end), args))
    return sorted(made, key=lambda span: span.end_ns)


def _about(key: CommandKey, command: Command, stream: Stream) -> tuple[str, dict[str, Any]]:
    """The name and the args of a command's device spans, as of spans made of marks."""
    args: dict[str, Any] = {
        "kind": command.kind, "index": key[1], "step": key[0], "split": command.split,
        "stream": stream.id,
    }  # fmt: skip
    if len(key) == 3:
        args["part"] = key[2]
    if isinstance(command, Launch):
        args["op"] = command.node.op
    return command.label or command.kind, args
