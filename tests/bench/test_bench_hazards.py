"""What it takes to prove a run free of races, and to find its superfluous waits.

Requirements, on one core: a million commands in at most 10 s, all waits of 1,000 decoded tokens in
at most 20 s; time grows with the commands, for a fixed number of streams, and not with the pieces
that ranges are cut into. Of a program that is issued over and over most is proved irrelevant once;
of programs that are all different nothing is. Where benchmarks are off, a tenth of each.
"""

from __future__ import annotations

import pytest

from tests.bench.steps import Steps
from workbench.graph.ir import F32, StepShape, Tensor
from workbench.graph.ops import make
from workbench.program import commands as c
from workbench.program.check.hazards import apart, check_cycle, races

MILLION, SHAPE = 1_000_000, StepShape(1, 1, 1)
COMPUTE, COPIES = c.Stream(c.DEVICE, 0), c.Stream(c.DEVICE, 1)
NODE = make("add", "sum", Tensor("a", F32, (4,)), Tensor("b", F32, (4,)))


@pytest.fixture(scope="module")
def decoded() -> list[c.Program]:
    """Decode steps whose cache has 256, 512, ... cells."""
    steps = Steps(n_cells=1280)
    return [steps.program(n_kv) for n_kv in range(256, 1281, 256)]


def program(commands: list[c.Command]) -> c.Program:
    return c.Program(commands, [], [], [c.DEVICE], ("host", "dev"), SHAPE, "by hand", "own")


def all_different(n_commands: int) -> list[c.Program]:
    """Steps of ten commands, every one a program of its own, all of which touch what others do: a
    pipeline of two streams over a ring of eight entries, with no wait that could go."""
    memory = c.Buffer("memory", c.Space.DEVICE, 8 * 1024, c.DEVICE)
    host = c.Buffer("staging", c.Space.PINNED, 8 * 1024, c.DEVICE)
    steps = []
    for n in range(n_commands // 10):
        at, ran, landed = n % 8 * 1024, str(n % 8), str(8 + n % 8)
        staging, there = c.Range(host, at, 512), c.Range(memory, at, 512)
        half, out = c.Range(memory, at + 256, 256), c.Range(memory, at + 512, 512)
        launches = (((there,), out), ((half, out), half), ((half,), out), ((out,), half))
        commands = [
            c.Sync(0, event=ran), c.Write(staging, "inp"), c.Copy(there, staging, COPIES, "inp", 0),
            c.Record(landed, COPIES, 0), c.Wait(landed, COMPUTE, 0),
            *(c.Launch(NODE, COMPUTE, read, (to,), None, 0) for read, to in launches),
            c.Record(ran, COMPUTE, 0),
        ]  # fmt: skip
        steps.append(program(commands))
    return steps


def test_a_million_commands_of_one_program(benchmark, decoded):
    n = MILLION if benchmark.enabled else MILLION // 10
    steps = [decoded[0]] * -(-n // len(decoded[0].commands))
    assert benchmark.pedantic(races, (steps,), rounds=3) == []


@pytest.mark.long
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_commands_all_different(benchmark, share):
    """A test of what is recorded sees that time grows as they do."""
    n = int(MILLION * share) if benchmark.enabled else int(MILLION * share) // 10
    steps = all_different(n)
    assert sum(len(step.commands) for step in steps) == n
    assert benchmark.pedantic(races, (steps,), rounds=2 if benchmark.enabled else 1) == []


def test_all_of_a_decode(benchmark, decoded):
    """Races, and of every wait whether it can go."""
    found = benchmark(check_cycle, decoded[:1])
    assert found.safe and len(found.superfluous) == 11


@pytest.mark.long
@pytest.mark.parametrize("apart_from_another", [False, True])
def test_all_of_a_thousand_decoded_tokens(benchmark, decoded, apart_from_another):
    """Of one after the other, with a wait for every copy: steps of one shape share a program, or
    each has its own, with 13,000 waits to try."""
    n = 1000 if benchmark.enabled else 100
    cycle = [decoded[i * len(decoded) // n] for i in range(n)]
    if apart_from_another:
        cycle = apart(cycle)
    found = benchmark.pedantic(check_cycle, (cycle,), rounds=1)
    assert found.safe and len(found.waits) == 13 * (n if apart_from_another else len(decoded))


def test_nested_ranges(benchmark):
    """12,000 ranges of an arena, each inside of the one before."""
    n = 12_000 if benchmark.enabled else 1200
    arena, commands = c.Buffer("arena", c.Space.DEVICE, 2 * n, c.DEVICE), list[c.Command]()
    for i in range(n):
        stream, written = (COMPUTE, COPIES)[i % 2], c.Range(arena, i, 2 * n - 2 * i)
        commands += [c.Launch(NODE, stream, (), (written,), None, 0), c.Sync(0, stream=stream)]
    assert benchmark.pedantic(races, ([program(commands)],), rounds=1) == []
