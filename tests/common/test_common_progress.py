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
from workbench.benchmarks.llama.llama_bench import measured, workloads
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


@pytest.fixture
def at_once(monkeypatch):
    """Every update is said."""
    for name in ("SHOWN_AFTER_S", "LINE_EVERY_S"):
        monkeypatch.setattr(progress, name, 0.0)


def worked(out, clock, seconds: float, n: int = 100) -> Bar:
    """n tokens that take so many seconds each."""
    left = Bar("tg128", n, "tokens", out, clock=clock)
    for _ in range(n):
        clock.now += int(seconds * S)
        left.update()
    return left


def test_a_log_has_lines_and_a_terminal_one_bar(clock):
    """A line now and then; a bar is wiped out at the end."""
    out, lost, shown = io.StringIO(), io.StringIO(), Terminal()
    worked(out, clock, 0.1, 10).close()
    assert out.getvalue() == "", "short work leaves no trace"
    worked(out, clock, 0.3).close()
    assert out.getvalue().splitlines() == [
        "tg128: 7 of 100 tokens, about 28 s left", "tg128: 41 of 100 tokens, about 18 s left",
        "tg128: 75 of 100 tokens, about 8 s left",
    ]  # fmt: skip
    lost.close()
    assert worked(lost, clock, 5.0).done == 100, "the work goes on"
    left = worked(shown, clock, 1.0)
    assert "\rtg128: 50 of 100 tokens, about 50 s left |" in shown.getvalue()
    left.close()
    assert "\n" not in shown.getvalue()
    assert shown.getvalue().rpartition("|")[2].strip("\r ") == ""


def test_what_is_left_in_words(clock):
    """What is expected counts until some is done."""
    left = Bar("tg128", 100, "tokens", None, clock=clock, expected_s=60.0)
    clock.now = 3 * S
    assert str(left) == "tg128: 0 of 100 tokens, about 57 s left"
    left.total = 1000  # as where more rounds turn out to be needed
    assert left.left_s() == pytest.approx(597)
    left.total = 100
    left.update(75)
    clock.now = 9 * S
    assert str(left) == "tg128: 75 of 100 tokens, about 3 s left"
    for unit, total, done, said in (
        (BYTES, 4_600_000_000, 1_200_000_000, "1.2 of 4.6 GB"), (SHARE, 30.0, 12.0, "40 %"),
        (BYTES, 900_000, 90_000, "0.1 of 0.9 MB"), ("rounds", None, 7, "7 rounds so far"),
    ):  # fmt: skip
        left = Bar("tg128", total, unit, None, clock=clock)
        left.update(done)
        assert str(left).partition(", about")[0] == f"tg128: {said}"
    left = Bar("report", 100, "%", None, clock=clock)
    clock.now += int(60e9)
    left.update(0.4)
    assert str(left) == "report: 0 %", "its pace so far tells nothing"
    left.update(0.6)
    assert str(left) == "report: 1 %, about 99 min left"
    left = Bar("compiling kernels", 100, "launches", None, clock=clock, alike=False)
    clock.now += 3 * S
    left.update(50)
    assert str(left) == "compiling kernels: 50 of 100 launches", "the first took all of the time"
    left = Bar("tg128", None, "rounds", None, clock=clock)
    left.update(7)
    left.detail = "half-width 1.8 %"
    assert str(left) == "tg128: 7 rounds so far, half-width 1.8 %"
    assert [duration(s) for s in (0.2, 99, 300, 9000)] == ["1 s", "99 s", "5 min", "2.5 h"]


@pytest.mark.parametrize("told", ["nobody", "asked", "cell by hand", "cell of a program"])
def test_who_is_told_without_a_terminal(at_once, monkeypatch, told):
    """A program that runs notebooks keeps what they write."""
    shell = SimpleNamespace(get_parent=lambda: {"content": {"allow_stdin": told == "cell by hand"}})
    if "cell" in told:
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(sys, "stderr", err := io.StringIO())
    asked, shown = io.StringIO(), list[dict[str, str]]()

    def display(data: dict[str, str], raw: bool, display_id: bool = False) -> SimpleNamespace:
        shown.append(data)
        return SimpleNamespace(update=display)

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    with shown_on(asked if told == "asked" else None), bar("x", 2, "steps") as left:
        assert (left.due_ns != NEVER) == (told in ("asked", "cell by hand"))
        left.update()
        note("a line")
    lines = r"x: 1 of 2 steps, about \d+ s left\na line\n"
    assert bool(re.fullmatch(lines, asked.getvalue())) == (told == "asked")
    assert err.tell() == 0, "a cell's stderr leaves a red strip"
    said = [re.sub(r", about.*", "", one.get("text/plain", "")) for one in shown]
    assert said == (["x: 1 of 2 steps", "a line", ""] if told == "cell by hand" else [])
    assert shown[-1:] in ([], [{}]), "the line is emptied at the end"


class Slow(io.StringIO):
    """A log that takes a second to write to, on the clock that a repetition is timed by."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock = clock

    def write(self, text: str) -> int:
        self.clock.now += S
        return super().write(text)


@pytest.mark.parametrize(("test", "lines", "took"), [
    (Workload(0, 8), 8, [S] * 8),
    (Workload(16, 2, 4), 3, [16 * S, S, S]),  # none while a prompt is timed
])  # fmt: skip
def test_what_is_written_between_tokens_is_in_nobody_s_time(
    monkeypatch, at_once, clock, test, lines, took
):
    monkeypatch.setattr(workload, "now_ns", clock)
    engine = FakeEngine(clock, ns_of=lambda toggles, n, nth: S * n)
    left = Bar("x", test.n_cells, "tokens", out := Slow(clock), clock=clock)
    sample = take_sample(engine, test, draw_tokens(test, engine.model.n_vocab, 0), left)
    assert out.getvalue().count("\n") == lines and left.done == test.n_cells
    assert sample.token_ns.tolist() == took and sample.ns_total == sum(took)


def test_ab_and_bench_say_what_is_left_of_which_test(at_once):
    with shown_on(io.StringIO()) as out:
        ab(FakeEngine(Clock()), "sync=per_copy,copy_boundary", None, "tg2", 5)
        measured(FakeEngine(Clock()), workloads([8], [4]), 2)
    said = {re.sub(r", about.*", "", line) for line in out.getvalue().splitlines()}
    assert said >= {
        "tg2 warm-up: 5 of 12 tokens", "tg2: 15 of 30 tokens", "tg2: 30 of 30 tokens",
        "pp8 (test 1 of 2): 8 of 16 tokens", "tg4 (test 2 of 2): 5 of 8 tokens",
    }  # fmt: skip
