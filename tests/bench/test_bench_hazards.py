"""What it takes to prove a run free of races, and to find its superfluous waits.

Requirements, on one core: a million commands in at most 10 s, all waits of 1,000 decoded tokens in
at most 20 s; time grows with the commands, for a fixed number of streams, and not with the pieces
that ranges are cut into. Of a program that is issued over and over most is proved irrelevant once;
of programs that are all different nothing is.
"""

from __future__ import annotations

import pytest

from tests.graphs import Decoder
from workbench.graph.ir import F32, Q4_0, Kind, StepShape, Tensor
from workbench.graph.ops import make
from workbench.program.check.hazards import apart, check_cycle, races
from workbench.program.commands import (
    DEVICE,
    HOST,
    Buffer,
    Command,
    Copy,
    Launch,
    Program,
    Range,
    Record,
    Space,
    Stream,
    Sync,
    Wait,
    Write,
)
from workbench.program.layout import Target, lay_out
from workbench.program.lower import lower
from workbench.program.split import split
from workbench.program.sync_modes import Ordering

MILLION = 1_000_000


@pytest.fixture(scope="module")
def decoded() -> list[Program]:
    """Decode steps of llama-3-8b, copies on their own stream, a wait for every copy: of a cache of
    256, 512, ... cells each."""
    decoder, buffers = Decoder("llama-3-8b", Q4_0), dict[str, Buffer]()
    graphs = [decoder.graph(1, 1, n_kv, n_cells=1280) for n_kv in range(256, 1281, 256)]
    used = {
        t.storage for graph in graphs for node in graph.nodes for t in (*node.inputs, *node.outputs)
    }
    residents = {
        t: Range(Buffer(t.name, Space.DEVICE, t.nbytes, DEVICE), 0, t.nbytes)
        for t in used
        if t.kind in (Kind.WEIGHT, Kind.CACHE)
    }

    def backend_of(node):
        return HOST if node.inputs[0] is decoder.embedding and node.op == "get_rows" else DEVICE

    ordering = Ordering("per_copy")
    targets = [Target(name, lambda node: 0) for name in ("host", "dev")]
    made = []
    for graph in graphs:
        splits = split(graph, backend_of)
        layout = lay_out(graph, splits, [residents] * 2, targets, ordering, 0, buffers)
        made.append(lower(graph, splits, layout, targets, ordering))
    return made


@pytest.fixture(scope="module")
def decode(decoded) -> Program:
    return decoded[0]


def steps_of(program: Program, n_commands: int) -> list[Program]:
    return [program] * -(-n_commands // len(program.commands))


def all_different(n_commands: int) -> list[Program]:
    """Steps of ten commands, every one a program of its own, all of which touch what others do: a
    pipeline of two streams over a ring of eight entries, with no wait that could go."""
    memory = Buffer("memory", Space.DEVICE, 8 * 1024, DEVICE)
    host = Buffer("staging", Space.PINNED, 8 * 1024, DEVICE)
    compute, copies = Stream(DEVICE, 0), Stream(DEVICE, 1)
    node = make("add", "sum", Tensor("a", F32, (4,)), Tensor("b", F32, (4,)))
    steps = []
    for n in range(n_commands // 10):
        entry = n % 8
        staging, there = Range(host, entry * 1024, 512), Range(memory, entry * 1024, 512)
        half, out = Range(memory, entry * 1024 + 256, 256), Range(memory, entry * 1024 + 512, 512)
        ran, landed = str(entry), str(8 + entry)
        commands = [
            Sync(0, event=ran),
            Write(staging, "inp"),
            Copy(there, staging, copies, "inp", 0),
            Record(landed, copies, 0),
            Wait(landed, compute, 0),
            Launch(node, compute, (there,), (out,), None, 0),
            Launch(node, compute, (half, out), (half,), None, 0),
            Launch(node, compute, (half,), (out,), None, 0),
            Launch(node, compute, (out,), (half,), None, 0),
            Record(ran, compute, 0),
        ]
        backends = ("host", "dev")
        steps.append(
            Program(commands, [], [], [DEVICE], backends, StepShape(1, 1, 1), "ring", "own")
        )
    return steps


def test_a_million_commands_of_one_program(benchmark, decode):
    steps = steps_of(decode, MILLION)
    assert benchmark.pedantic(races, (steps,), rounds=3) == []


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_commands_all_different(benchmark, share):
    """A quarter of a million and a million: a test of what is recorded sees that time grows as
    they do. Where benchmarks are off, a tenth of them."""
    n = int(MILLION * share) if benchmark.enabled else int(MILLION * share) // 10
    steps = all_different(n)
    assert sum(len(step.commands) for step in steps) == n
    assert benchmark.pedantic(races, (steps,), rounds=2 if benchmark.enabled else 1) == []


def test_all_of_a_decode(benchmark, decode):
    """Races, and of every wait whether it can go."""
    found = benchmark(check_cycle, [decode])
    assert found.safe and len(found.superfluous) == 11


@pytest.mark.parametrize("apart_from_another", [False, True])
def test_all_of_a_thousand_decoded_tokens(benchmark, decoded, apart_from_another):
    """Of one after the other, with a wait for every copy: steps of one shape share a program, or
    each has its own, with 13,000 waits to try. Where benchmarks are off, a tenth of them."""
    n = 1000 if benchmark.enabled else 100
    cycle = [decoded[i * len(decoded) // n] for i in range(n)]
    if apart_from_another:
        cycle = apart(cycle)
    found = benchmark.pedantic(check_cycle, (cycle,), rounds=1)
    assert found.safe and len(found.waits) == 13 * (n if apart_from_another else len(decoded))


def test_nested_ranges(benchmark):
    """12,000 ranges of an arena, each inside of the one before. Where benchmarks are off, a tenth
    of them."""
    n = 12_000 if benchmark.enabled else 1200
    arena = Buffer("arena", Space.DEVICE, 2 * n, DEVICE)
    streams = Stream(DEVICE, 0), Stream(DEVICE, 1)
    node = make("add", "sum", Tensor("a", F32, (4,)), Tensor("b", F32, (4,)))
    commands: list[Command] = []
    for i in range(n):
        stream = streams[i % 2]
        written = Range(arena, i, 2 * n - 2 * i)
        commands += [Launch(node, stream, (), (written,), None, 0), Sync(0, stream=stream)]
    step = Program(commands, [], [], [DEVICE], ("host", "dev"), StepShape(1, 1, 1), "nest", "own")
    assert benchmark.pedantic(races, ([step],), rounds=1) == []
