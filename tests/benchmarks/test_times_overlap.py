"""Overlap as arithmetic: time with two or more in flight, branches and their regions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.benchmarks.times.overlap import (
    BRANCHES,
    Overlap,
    Traced,
    in_flight,
    in_stream_order,
    measure_overlap,
)
from workbench.common.errors import UsageError
from workbench.program.commands import DEVICE, Launch, Record, Stream, Wait, compute_stream
from workbench.program.side_by_side import regions
from workbench.trace.spans import Span

TIMES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


@given(TIMES)
def test_time_in_flight_is_counted_ns_by_ns(spans):
    running = [sum(begin <= ns < end for begin, end in spans) for ns in range(40)]
    found = in_flight(spans)
    assert found.total_ns == sum(n >= 1 for n in running)
    assert found.beside_ns == sum(n >= 2 for n in running)
    assert found.overlap == (found.beside_ns / found.total_ns if found.total_ns else 0.0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40), st.integers(0, 9)),
                max_size=10))  # fmt: skip
def test_on_a_lane_a_kernel_begins_when_the_last_has_ended(made):
    spans = [Span("k", "device", lane, begin, begin + ns, {}) for lane, begin, ns in made]
    found = in_stream_order(spans)
    for lane in "ab":
        own = [s for s in found if s.lane == lane]
        given_ = sorted((s.start_ns, s.end_ns) for s in spans if s.lane == lane)
        last = 0
        for s, (begin, end) in zip(own, given_, strict=True):
            assert s.start_ns == max(begin, last)
            assert s.end_ns == max(end, s.start_ns)
            last = s.end_ns
        assert in_flight((s.start_ns, s.end_ns) for s in own).beside_ns == 0


def program(does: list[tuple[str, int]]) -> Any:
    """Launches, Records and Waits on streams. A wait is for the latest record of another."""
    commands: list[Any] = []
    latest: list[tuple[str, int]] = []
    for i, (what, k) in enumerate(does):
        stream = Stream(DEVICE, compute_stream(k))
        if what == "launch":
            node: Any = SimpleNamespace(name=f"n{i}")
            commands.append(Launch(node, stream, (), (), None, 0))
        elif what == "record":
            commands.append(Record(f"e{i}", stream, 0, forks=True))
            latest.append((f"e{i}", k))
        elif others := [name for name, by in latest if by != k]:
            commands.append(Wait(others[-1], stream, 0, forks=True))
    return SimpleNamespace(commands=commands)


def slow_regions(made: Any) -> list[list[list[int]]]:
    """By the transitive closure of all orders, launch against launch."""
    commands, over = made.commands, list[set[int]]()
    pieces: dict[int, list[int]] = {}
    piece_of: dict[Stream, int] = {}
    tail: dict[Stream, int] = {}
    recorded: dict[str, int] = {}
    for i, command in enumerate(commands):
        direct = [tail[command.stream]] if command.stream in tail else []
        if isinstance(command, Wait):
            direct.append(recorded[command.event])
        over.append(set(direct).union(*(over[j] for j in direct)))
        tail[command.stream] = i
        if isinstance(command, Record):
            recorded[command.event] = i
        if isinstance(command, Launch):
            pieces.setdefault(piece_of.setdefault(command.stream, i), []).append(i)
        else:
            piece_of.pop(command.stream, None)
    apart = {
        (a, b)
        for a in pieces
        for b in pieces
        if all(i not in over[j] and j not in over[i] for i in pieces[a] for j in pieces[b])
        and commands[a].stream != commands[b].stream
    }
    found, left = list[list[list[int]]](), sorted(pieces)
    while left:
        group = [left.pop(0)]
        for a in group:
            more = [b for b in left if (a, b) in apart]
            group += more
            left = [b for b in left if b not in more]
        if len(group) > 1:
            found.append([pieces[a] for a in sorted(group)])
    return found


@given(st.lists(st.tuples(st.sampled_from(["launch", "launch", "record", "wait"]),
                          st.integers(0, 2)), max_size=24))  # fmt: skip
def test_regions_are_those_of_the_transitive_closure(does):
    made = program(does)
    found = [[[at for at, _ in b.numbers] for b in branches] for branches in regions(made)]
    assert found == slow_regions(made)


def test_a_fork_and_a_join_are_one_region_of_their_branches():
    does = [("launch", 0), ("record", 0), ("launch", 0), ("launch", 0), ("wait", 1),
            ("launch", 1), ("record", 1), ("wait", 0), ("launch", 0)]  # fmt: skip
    (branches,) = regions(program(does))
    assert [(b.stream.id, [n for n, _ in b.numbers]) for b in branches] == [(0, [2, 3]), (2, [5])]


def found(us: list[float], tick_ns: int, traced: Traced | None = None) -> Overlap:
    """Three tokens of a region with a branch for each length."""
    tokens = pd.DataFrame(
        {"us": 20.0, "total_us": 16.0, "beside_us": [4.0, 8.0, 6.0], "overlap": [0.25, 0.5, 0.375],
         "n_kernels": 9, "n_short": 1, "n_silent": 2}
    )  # fmt: skip
    rows = [
        (t, 0, stream, f"n{stream}", 2, length + t / 100, (length + t / 100) * 1e3 >= 10 * tick_ns)
        for t in range(3)
        for stream, length in enumerate(us)
    ]
    return Overlap(tick_ns, tokens, pd.DataFrame(rows, columns=list(BRANCHES)), 19.0, traced)


def test_what_is_said_and_recorded():
    traced = Traced("cupti", 0.5, 38.0, 2.0, 1.5, "")
    one = found([10.0, 2.0], 32, traced)
    assert one.overlap == 0.375
    assert str(one).split("\n") == [
        "overlap 37.5%: 6.0 of 16.0 us with two or more of 9 kernels in flight",
        "1 kernels and 0 of 2 branches under 10 ticks of 32 ns: unresolved",
        "device time 20.0 us with noting, 19.0 without",
        "2 kernels of libraries note nothing",
        "by cupti: overlap 50.0%, 2.00 times as long",
    ]
    record = one.record()
    assert record["overlaps"] == [0.25, 0.5, 0.375] and record["overlap"] == 0.375
    assert (record["tick_ns"], record["resolved_ticks"], record["n_tokens"]) == (32, 10, 3)
    assert (record["us"], record["plain_us"], record["n_silent"]) == (20.0, 19.0, 2)
    assert record["branches"] == {
        "region": [0, 0], "stream": [0, 1], "first": ["n0", "n1"], "n": [2, 2],
        "us": [10.01, 2.01], "resolved": [True, True],
    }  # fmt: skip
    assert found([10.0, 2.0], 1000).by_branch["resolved"].tolist() == [True, False]
    for n in (0, -3):
        with pytest.raises(UsageError, match=f"n_tokens={n}: .* give 1 or more"):
            measure_overlap(None, n)  # type: ignore[arg-type]
