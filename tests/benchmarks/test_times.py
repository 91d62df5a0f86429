"""What is timed on the device: gaps between tokens, overlap of branches, and `profile`."""

from __future__ import annotations

import gc
import re
import weakref
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.reading import read
from tests.trace import decoded
from workbench.benchmarks.compare import pace
from workbench.benchmarks.compare.pace import Pace
from workbench.benchmarks.times import profiling, token_parts
from workbench.benchmarks.times.gaps import fit_line, host_gaps, load
from workbench.benchmarks.times.overlap import in_flight, in_stream_order
from workbench.benchmarks.times.profiling import Bandwidth, profile_test
from workbench.benchmarks.workload import draw_tokens, parse
from workbench.common.errors import UsageError
from workbench.common.progress import Bar
from workbench.config import Toggles
from workbench.graph.ir import StepShape
from workbench.program.commands import DEVICE, Launch, Program, Record, Stream, Wait, compute_stream
from workbench.program.plans import with_plans
from workbench.program.side_by_side import regions
from workbench.trace.lanes import ABOUT
from workbench.trace.spans import Span

ARMS = {
    sync: Toggles(sync=sync, graph_reuse="set_rows", copy_stream="compute")
    for sync in ("per_copy", "copy_boundary", "packed")
}


def test_stamps_lie_in_their_step_in_order_and_are_let_go(engine):
    """The collector would destroy the events of the marks that it finds in a cycle."""
    engine.step([1])
    gc.disable()
    try:
        with engine.stamped() as stamps:
            kept = weakref.ref(engine.untraced)
            for token in (5, 7, 9):
                engine.step([token])
        assert kept() is None
    finally:
        gc.enable()
    assert len(stamps) == 3 and (np.diff(np.array(stamps).ravel()) > 0).all()


def test_gaps_have_a_row_for_each_arm_and_a_line(loaded, tmp_path):
    """Lines and steps are of arms that copy alike."""
    found = host_gaps(loaded, ARMS, n_tokens=10, rounds=3, out=tmp_path / "run", name="run")
    assert load(tmp_path / "run").table().equals(found.table())
    table = found.table().set_index("arm")
    assert table.index.tolist() == ["per_copy", "copy_boundary", "packed", "per_copy (A/A)"]
    assert table["waits"].tolist() == [13, 3, 3, 13] and table["copies"].tolist() == [7, 7, 2, 7]
    assert (table["gap_us"] > 0).all() and (table["low_us"] <= table["high_us"]).all()
    arms, waits = ["per_copy", "copy_boundary", "per_copy (A/A)"], np.array([13.0, 3.0, 13.0])
    rounds = found.samples.pivot_table(
        index="repetition", columns="arm", values="ns", aggfunc="median"
    ) / 1e3  # fmt: skip
    assert found.fits == {"compute": fit_line(waits, rounds[arms].to_numpy())} and len(rounds) == 3
    (step,) = found.differences  # of the pairs that are known, this run has one
    assert (step.copy_stream, step.before, step.after) == ("compute", "copy_boundary", "packed")
    wanted = (rounds["copy_boundary"] - rounds["packed"]).median()
    assert step.us == pytest.approx(wanted) and step.low_us <= step.us <= step.high_us


def test_a_line_is_found_again():
    waits, true = np.array([1.0, 3.0, 13.0]), np.array([12.0, 16.0, 36.0])
    assert fit_line(waits, np.stack([true] * 3)) == pytest.approx((2.0, 2.0, 2.0, 10.0))
    slow = true * [1.0, 2.0, 1.0]  # the host slowed down for one turn
    assert fit_line(waits, np.stack([true, slow, true, true])).wait_us == pytest.approx(2.0)
    with pytest.raises(UsageError, match="every arm waits as often"):
        fit_line(np.ones(3), np.arange(3.0)[None])


def test_what_leaves_nothing_to_time_is_refused(loaded, call):
    for asked, says in (
        ({"arms": {}}, "there are no arms"), ({"n_tokens": 1}, "leave no gap"),
        ({"n_tokens": 130}, "132 tokens do not fit the context of 128"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            host_gaps(loaded, **({"arms": ARMS, "rounds": 1} | asked))
    status, out, err = call("--test", "tg4", "--window", "2,3")
    assert status == 2 and out == "" and "2,3 does not lie in" in err.splitlines()[-1]


def test_a_launch_counts_as_its_kernels(engine, monkeypatch):
    """Of a token's parts; a library's launch, whose kernels nobody knows, is one."""
    launches = [c for c in engine.program().singly() if isinstance(c, Launch) and not c.by_host]
    whole = token_parts.issued(engine)
    several = {launches[0].node.name: ["a", "b", "c"]}
    monkeypatch.setattr(engine.backend, "kernels_of", lambda node: several.get(node.name))
    assert token_parts.issued(engine) == {part: n + 2 for part, n in whole.items()}


def test_the_pace_of_a_host_is_told_beside_its_fastest_moment():
    host = Pace()
    found = [host.loop_us() for _ in range(200)]
    assert 0 < host.least_us == min(found) < max(found)


@pytest.mark.parametrize(
    ("paces", "kept", "said"),
    [
        ((200, 100, 110), [1.0, 1.1], None), ((200, 150, 130, 140), [1.3, 1.4], "1.35"),
        ((200, 200, 100, 100), [1.0, 1.0], None),
    ],
)  # fmt: skip
def test_rounds_on_a_slow_host_are_replaced(loaded, monkeypatch, paces, kept, said):
    """Where a GPU computes everything. No host is slow on demand, so its pace is made up, by
    round; the fastest moment may come late, or before."""
    now = 0

    def loop_us() -> float:
        return paces[now]

    def begun(*asked: Any) -> Any:
        nonlocal now
        now = asked[-1]
        return draw_tokens(*asked)

    arms = {"off": ARMS["packed"]}
    assert token_parts.token_parts(loaded, arms, 2, n_tokens=2)["off"]["slowdown"] == []
    monkeypatch.setattr(pace, "tells", lambda engine: True)
    monkeypatch.setattr(pace.HOST, "loop_us", loop_us)
    monkeypatch.setattr(pace.HOST, "least_us", 100.0)
    monkeypatch.setattr(token_parts, "draw_tokens", begun)
    parts = token_parts.token_parts(loaded, arms, 2, n_tokens=2)["off"]
    assert sorted(parts["slowdown"]) == kept and len(parts["plain"]) == 2
    words = {"the host": f"takes {said} times as long as at its best"} if said else {}
    assert token_parts.slow_host(parts) == words


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12))
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
        own, last = [s for s in found if s.lane == lane], 0
        given_ = sorted((s.start_ns, s.end_ns) for s in spans if s.lane == lane)
        for s, (begin, end) in zip(own, given_, strict=True):
            assert (s.start_ns, s.end_ns) == (max(begin, last), max(end, begin, last))
            last = s.end_ns


def program(commands: list[Any]) -> Program:
    shape = StepShape(1, 1, 32)
    return Program(commands, [], [], [0], ("host", "device"), shape, "implicit", "own")


def launch(name: str, stream: Stream) -> Launch:
    node: Any = SimpleNamespace(name=name)
    return Launch(node, stream, (), (), None, 0)


def forked(does: list[tuple[str, int]]) -> Program:
    """Launches, Records and Waits on streams. A wait is for the latest record of another."""
    commands: list[Any] = []
    latest: list[tuple[str, int]] = []
    for i, (what, k) in enumerate(does):
        stream = Stream(DEVICE, compute_stream(k))
        if what == "launch":
            commands.append(launch(f"n{i}", stream))
        elif what == "record":
            commands.append(Record(f"e{i}", stream, 0, forks=True))
            latest.append((f"e{i}", k))
        elif others := [name for name, by in latest if by != k]:
            commands.append(Wait(others[-1], stream, 0, forks=True))
    return program(commands)


def slow_regions(made: Program) -> list[list[list[int]]]:
    """By the oracle's order of all commands, launch against launch."""
    over, commands = [moment.before for moment in read([made])], made.commands
    pieces: dict[int, list[int]] = {}
    piece_of: dict[Stream, int] = {}
    for i, command in enumerate(commands):
        if isinstance(command, Launch):
            pieces.setdefault(piece_of.setdefault(command.stream, i), []).append(i)
        else:
            piece_of.pop(command.stream, None)
    apart = {
        (a, b)
        for a, b in product(pieces, pieces)
        if commands[a].stream != commands[b].stream
        and not any(over[j] >> i & 1 | over[i] >> j & 1 for i in pieces[a] for j in pieces[b])
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
    made = forked(does)
    found = [[[at for at, _ in b.numbers] for b in branches] for branches in regions(made)]
    assert found == slow_regions(made)


def test_a_plan_s_event_is_recorded_for_the_next_step_too():
    """Which waits for it before the plan, as a branch of the plan itself does."""
    one, two = (Stream(DEVICE, compute_stream(k)) for k in (0, 1))
    planned = [launch("a", one), Record("e", one, 0), Wait("e", two, 0), launch("b", two)]
    made = with_plans(program([Wait("e", two, split=1), *planned]), "split").commands
    after = made[[c.kind for c in made].index("replay") :]
    assert [c.event for c in after if isinstance(c, Record)][-1] == "e"


@pytest.fixture
def call(call, tiny_model, monkeypatch):
    """`workbench profile` on a tiny model: (exit status, stdout, stderr)."""
    monkeypatch.setattr(profiling, "read_bandwidth", lambda engine: Bandwidth(10.0, "read 10 GB/s"))
    monkeypatch.setenv("COLUMNS", "300")  # titles on one line
    ask = ("profile", "-m", tiny_model("tiny-llama", "Q8_0"), "-r", 1, "--device", "embedded")
    return lambda *arguments: call(*ask, *arguments)


def columns(out: str, title: str) -> set[str]:
    """The columns of the table under the line that begins with `title`."""
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(title))
    header = next(line for line in lines[at + 1 :] if line.startswith("|"))
    return {c.strip() for c in header.strip("|").split("|")}


@pytest.mark.long
def test_a_profile_is_untraced_times_tables_and_a_trace(call, tmp_path):
    out = tmp_path / "t.json"
    status, text, err = call("--test", "tg6", "--window", "2,3", "--out", out)
    assert status == 0, err
    wanted = {"untraced us", "untraced gap us", "untraced kernels us"}
    assert wanted <= columns(text, "tg6: untraced")
    titles = [line for line in text.splitlines() if "(traced" in line]
    assert [t.split(" (")[0] for t in titles] == [
        "Kernels",
        "The host",
        "Time in which no kernel runs",
    ]
    assert re.search(r"traced, \d+\.\d\d times as slow as untraced; steps 2 to 4", titles[0])
    assert {"op", "calls", "traced us", "traced GB/s", "traced % read"} <= columns(text, "Kernels")
    made = decoded.chrome(out.read_bytes())
    steps = [s for s in made.slices if s.category == "step"]
    assert len(steps) == 3 and {s.args["n_tokens"] for s in steps} == {1}
    assert made.instants[ABOUT]["test"] == "tg6"
    out = tmp_path / "t.pftrace.gz"
    status, text, _ = call("--test", "pp24+tg2", "--n-ubatch", 16, "--by", "node", "--out", out)
    found = set(re.findall(r"^\| (token|ubatch of \d+) ", text, re.MULTILINE))
    assert status == 0 and found == {"token", "ubatch of 8", "ubatch of 16"}
    assert out.read_bytes()[:2] == b"\x1f\x8b"


def test_untraced_steps_are_stamped_by_the_device(engine, monkeypatch):
    monkeypatch.setattr(profiling, "read_bandwidth", lambda engine: Bandwidth(None, "not measured"))
    found = profile_test(engine, parse("pp20+tg3@d4"), (1, 2), repetitions=2)
    assert engine.recorder is None and found.stamped
    steps = found.steps
    assert list(steps["n_tokens"]) == [20, 1, 1, 1] * 2
    assert steps["gap_us"].isna().sum() == 2, "the first step of a repetition has none before it"
    assert (found.phases[profiling.PHASES] >= 0).all(axis=None)
    later = steps.dropna()
    assert (later["gap_us"] > 0).all() and (later["kernels_us"] > 0).all()
    assert (later["gap_us"] + later["kernels_us"] - later["step_us"]).abs().max() < 1e-3
    assert (steps["kernels_us"] < steps["host_us"]).all(), "every step ends with a wait"
    assert list(found.trace.to_frame().query("category == 'step'")["n_tokens"]) == [1, 1]


def test_a_step_that_waited_for_a_written_line_has_no_gap(engine, monkeypatch):
    class Told(Bar):
        due_ns = property(lambda self: 0, lambda self, ns: None)  # always due

    told: list[float] = []
    monkeypatch.setattr(Told, "update", lambda self, n=1: told.append(n))
    monkeypatch.setattr(profiling, "bar", lambda *_: nullcontext(Told("x", 1, "tokens", None)))
    drawn = draw_tokens(parse("tg10"), engine.model.n_vocab, 0)
    steps = profiling.step_times(engine, [drawn])
    assert told == [4, 4, 2] and steps["kernels_us"].notna().all()
    assert steps.index[steps["gap_us"].isna()].tolist() == [0, 4, 8]
