"""What is left of a long piece of work: when it is said, how, and that no clock runs meanwhile."""

from __future__ import annotations

import io
import re
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

from tests.unit.fake_engine import FakeEngine
from workbench.benchmarks import workload
from workbench.benchmarks.compare.ab import ab
from workbench.benchmarks.llama.llama_bench import bench
from workbench.benchmarks.workload import Workload, draw_tokens, take_sample
from workbench.common import progress
from workbench.common.progress import BYTES, NEVER, SHARE, Bar, bar, duration, note, shown_on

S = 1_000_000_000


class Clock:
    """Nanoseconds that pass when told to."""

    def __init__(self):
        self.now = 0

    def __call__(self) -> int:
        return self.now


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


def test_a_log_has_a_plain_line_now_and_then_and_not_one_for_each_repetition(clock):
    out = io.StringIO()
    left = told(out, clock, 1280)
    for _ in range(320):
        clock.now += S // 10
        left.update(4)
    left.close()
    lines = out.getvalue().splitlines()
    assert lines == [
        "tg128: 80 of 1,280 tokens, about 30 s left",
        "tg128: 480 of 1,280 tokens, about 20 s left",
        "tg128: 880 of 1,280 tokens, about 10 s left",
        "tg128: 1,280 of 1,280 tokens",
    ]


def test_what_takes_less_than_two_seconds_leaves_no_trace(clock):
    for out in (io.StringIO(), Terminal()):
        left = told(out, clock, 10)
        for _ in range(10):
            clock.now += S // 10
            left.update()
        left.close()
        assert out.getvalue() == ""


def test_a_log_gets_no_control_codes(clock):
    out = io.StringIO()
    left = told(out, clock, 10)
    for _ in range(10):
        clock.now += 20 * S
        left.update()
    left.close()
    assert len(out.getvalue().splitlines()) == 10
    assert not re.search(r"[^\x20-\x7e\n]", out.getvalue())


def test_a_terminal_has_one_bar_which_is_wiped_out(clock):
    out = Terminal()
    left = told(out, clock, 100)
    for _ in range(100):
        clock.now += S
        left.update()
    shown = out.getvalue()
    assert "\rtg128: 50 of 100 tokens, about 50 s left |" in shown and "\n" not in shown
    left.close()
    assert not out.getvalue().splitlines()[-1].rpartition("\r")[2].strip()
    assert out.getvalue().rpartition("|")[2].strip("\r ") == ""


def test_no_thread_draws_when_it_likes(clock):
    import threading

    before = threading.active_count()
    left = told(Terminal(), clock, 10)
    clock.now = 10 * S
    left.update()
    assert threading.active_count() == before
    left.close()


def test_what_is_expected_counts_until_some_is_done(clock):
    left = told(io.StringIO(), clock, 100, expected_s=60.0)
    clock.now = 3 * S
    assert str(left) == "tg128: 0 of 100 tokens, about 57 s left"
    left.update(50)
    assert str(left) == "tg128: 50 of 100 tokens, about 3 s left"
    assert str(told(None, clock, 100)) == "tg128: 0 of 100 tokens"
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
    assert [duration(s) for s in (0.2, 34.4, 99, 300, 5999, 9000)] == [
        "1 s", "34 s", "99 s", "5 min", "100 min", "2.5 h",
    ]  # fmt: skip


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
def test_a_notebook_s_cell_is_told_where_somebody_runs_it(monkeypatch, by_hand):
    """A program that runs notebooks keeps what they write."""
    shell = SimpleNamespace(get_parent=lambda: {"content": {"allow_stdin": by_hand}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    with bar("x", 2, "steps") as left:
        left.update()
    assert ("\rx: 1 of 2 steps" in sys.stderr.getvalue()) == by_hand


def test_a_stream_that_nobody_reads_ends_no_work(clock):
    for out in (io.StringIO(), Terminal()):
        out.close()
        left = told(out, clock, 2)
        clock.now += 5 * S
        left.update()
        left.close()
    assert left.done == 1


# while something is timed -------------------------------------------------------------------------


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


def test_what_is_written_between_two_tokens_is_in_nobody_s_time(monkeypatch, clock):
    monkeypatch.setattr(workload, "now_ns", clock)
    engine = FakeEngine(clock, ns_of=lambda toggles, n, nth: S * n)
    test = Workload(0, 8)
    tokens = draw_tokens(test, engine.model.n_vocab, 0)
    left = Slow(clock, 2.0)
    sample = take_sample(engine, test, tokens, left)
    assert left.writes == [2, 4, 6, 8] and left.done == 8
    assert sample.token_ns.tolist() == [S] * 8 and sample.ns_total == 8 * S
    assert take_sample(engine, test, tokens).token_ns.tolist() == [S] * 8


def test_nothing_is_written_while_a_prompt_is_timed(monkeypatch, clock):
    monkeypatch.setattr(workload, "now_ns", clock)
    engine = FakeEngine(clock, ns_of=lambda toggles, n, nth: S * n)
    test = Workload(16, 2, 4)
    left = Slow(clock, 0.1)
    sample = take_sample(engine, test, draw_tokens(test, engine.model.n_vocab, 0), left)
    assert left.writes == [4, 21, 22] and left.done == test.n_cells
    assert sample.token_ns.tolist() == [16 * S, S, S]


def lines_of(monkeypatch, measure) -> list[str]:
    """What `measure(engine)` says where every update is written."""
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with shown_on(io.StringIO()) as out:
        measure(FakeEngine(Clock()))
    return [re.sub(r", about.*", "", line) for line in out.getvalue().splitlines()]


def test_ab_says_what_is_left_also_while_it_warms_up(monkeypatch):
    said = lines_of(monkeypatch, lambda e: ab(e, "sync=per_copy,copy_boundary", None, "tg2", 5))
    assert said[0].startswith("comparing logits: ")
    assert "tg2 warm-up: 5 of 12 tokens" in said and "tg2: 15 of 30 tokens" in said
    assert said[-1] == "tg2: 30 of 30 tokens"


def test_bench_says_what_is_left_of_which_test(monkeypatch):
    said = lines_of(monkeypatch, lambda e: bench(e, [8], [4], repetitions=2))
    assert "pp8 (test 1 of 2): 8 of 16 tokens" in said
    assert "tg4 (test 2 of 2): 5 of 8 tokens" in said, "within a repetition"


@pytest.mark.parametrize("size", [(0, 0), (30, 100)])
def test_a_terminal_of_any_size_shows_the_bar(size):
    """One that a program opened for another has none."""
    import fcntl
    import os
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    with open(theirs, "w") as out:
        clock = Clock()
        left = told(out, clock, 4)
        clock.now = 10 * S
        left.update()
        left.close()
    shown = ""
    with suppress(OSError):  # no more to read: the other end is closed
        while part := os.read(ours, 1 << 16):
            shown += part.decode()
    os.close(ours)
    assert "tg128: 1 of 4 tokens, about 30 s left" in shown and shown.endswith("\r")
