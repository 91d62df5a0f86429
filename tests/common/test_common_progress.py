"""What is left of a long piece of work: when it is said, how, and that no clock runs meanwhile."""

from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace

import pytest

from tests.benchmarks.fake_engine import Clock, FakeEngine
from workbench.benchmarks import workload
from workbench.benchmarks.compare.ab import ab
from workbench.benchmarks.llama.llama_bench import bench
from workbench.benchmarks.workload import Workload, draw_tokens, take_sample
from workbench.common import progress
from workbench.common.progress import BYTES, NEVER, SHARE, Bar, bar, duration, note, shown_on

S = 1_000_000_000


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("no file")


@pytest.fixture
def clock():
    return Clock()


def told(out, clock, total, unit="tokens", **more) -> Bar:
    return Bar("tg128", total, unit, out, clock=clock, **more)


def test_a_log_has_a_plain_line_now_and_then(clock):
    out = io.StringIO()
    left = told(out, clock, 1280)
    for _ in range(320):
        clock.now += S // 10
        left.update(4)
    left.close()
    assert out.getvalue().splitlines() == [
        "tg128: 80 of 1,280 tokens, about 30 s left",
        "tg128: 480 of 1,280 tokens, about 20 s left",
        "tg128: 880 of 1,280 tokens, about 10 s left",
        "tg128: 1,280 of 1,280 tokens",
    ]


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_short_work_and_a_lost_stream_leave_no_trace(clock, kind):
    out, lost = kind(), kind()
    lost.close()
    for stream, step in ((out, S // 10), (lost, 5 * S)):
        left = told(stream, clock, 10)
        for _ in range(10):
            clock.now += step
            left.update()
        left.close()
        assert left.done == 10
    assert out.getvalue() == ""


def test_a_terminal_has_one_bar_which_is_wiped_out(clock):
    out = Terminal()
    left = told(out, clock, 100)
    for _ in range(100):
        clock.now += S
        left.update()
    shown = out.getvalue()
    assert "\rtg128: 50 of 100 tokens, about 50 s left |" in shown and "\n" not in shown
    left.close()
    assert out.getvalue().rpartition("|")[2].strip("\r ") == ""


def test_what_is_expected_counts_until_some_is_done(clock):
    left = told(io.StringIO(), clock, 100, expected_s=60.0)
    clock.now = 3 * S
    assert str(left) == "tg128: 0 of 100 tokens, about 57 s left"
    left.update(50)
    assert str(left) == "tg128: 50 of 100 tokens, about 3 s left"
    clock.now = 70 * S
    assert told(None, clock, 100, expected_s=0.0).left_s() == 0.0


def test_units(clock):
    for unit, total, done, said in (
        (BYTES, 4_600_000_000, 1_200_000_000, "1.2 of 4.6 GB"),
        (BYTES, 900_000, 90_000, "0.1 of 0.9 MB"),
        (SHARE, 30.0, 12.0, "40 %"),
        ("models", 3, 1, "1 of 3 models"),
        ("rounds", None, 7, "7 rounds so far"),
    ):
        left = told(None, clock, total, unit)
        left.update(done)
        assert str(left).partition(", about")[0] == f"tg128: {said}"
    left.detail = "half-width 1.8 %"
    assert str(left) == "tg128: 7 rounds so far, half-width 1.8 %"
    assert [duration(s) for s in (0.2, 99, 300, 9000)] == ["1 s", "99 s", "5 min", "2.5 h"]


def test_nobody_is_told_without_a_terminal_unless_asked_to(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    with bar("x", 2, "steps") as left:
        assert left.due_ns == NEVER
        left.update()
        note("a line")
    assert capsys.readouterr().err == ""
    with shown_on(sys.stderr), bar("x", 2, "steps") as left:
        left.update()
        note("a line")
    said = capsys.readouterr().err
    assert re.fullmatch(r"x: 1 of 2 steps, about \d+ s left\na line\n", said)


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_cell_is_told_where_somebody_runs_it(monkeypatch, by_hand):
    """A program that runs notebooks keeps what they write."""
    shell = SimpleNamespace(get_parent=lambda: {"content": {"allow_stdin": by_hand}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    with bar("x", 2, "steps") as left:
        left.update()
    assert ("\rx: 1 of 2 steps" in sys.stderr.getvalue()) == by_hand


class Slow(Bar):
    """Takes a second to write, on the clock that a repetition is timed by."""

    def __init__(self, clock, due_every_s):
        super().__init__("tg8", 8, "tokens", None, clock=clock)
        self.clock, self.every, self.writes = clock, int(due_every_s * S), []
        self.due_ns = self.every

    def update(self, n=1):
        self.done += n
        if self.clock.now >= self.due_ns:
            self.clock.now += S
            self.writes.append(self.done)
            self.due_ns = self.clock.now + self.every


@pytest.mark.parametrize(("test", "every", "writes", "took"), [
    (Workload(0, 8), 2.0, [2, 4, 6, 8], [S] * 8),
    (Workload(16, 2, 4), 0.1, [4, 21, 22], [16 * S, S, S]),  # and none while a prompt is timed
])  # fmt: skip
def test_what_is_written_between_tokens_is_in_nobody_s_time(
    monkeypatch, clock, test, every, writes, took
):
    monkeypatch.setattr(workload, "now_ns", clock)
    engine = FakeEngine(clock, ns_of=lambda toggles, n, nth: S * n)
    left = Slow(clock, every)
    sample = take_sample(engine, test, draw_tokens(test, engine.model.n_vocab, 0), left)
    assert left.writes == writes and left.done == test.n_cells
    assert sample.token_ns.tolist() == took and sample.ns_total == sum(took)


def test_ab_and_bench_say_what_is_left_of_which_test(monkeypatch):
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with shown_on(io.StringIO()) as out:
        ab(FakeEngine(Clock()), "sync=per_copy,copy_boundary", None, "tg2", 5)
        bench(FakeEngine(Clock()), [8], [4], repetitions=2)
    said = [re.sub(r", about.*", "", line) for line in out.getvalue().splitlines()]
    assert said[0].startswith("comparing logits: ")
    assert {
        "tg2 warm-up: 5 of 12 tokens", "tg2: 15 of 30 tokens", "tg2: 30 of 30 tokens",
        "pp8 (test 1 of 2): 8 of 16 tokens", "tg4 (test 2 of 2): 5 of 8 tokens",
    } <= set(said)  # fmt: skip
