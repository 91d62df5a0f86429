"""The command where its streams are full, closed, a pipe nobody reads, or ASCII, and where it is
told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.cli import main, streams
from workbench.cli.interrupts import Stop, heeded

COMMAND = [sys.executable, "-m", "workbench"]
FULL = "standard output cannot be written: no space is left"
CLOSED = "standard output is closed"


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("tiny-llama", "Q8_0")


def shell(tail: str, *arguments: object, **variables: str) -> tuple[int, str, str]:
    """`workbench ARGUMENTS TAIL` in a shell: (exit status of the command, stdout, stderr)."""
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "$@" {tail}', "-", *COMMAND, *map(str, arguments)],
        capture_output=True, text=True, timeout=60, env=os.environ | variables,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("tail", "status", "says", "words"), [
    (">/dev/full", 2, FULL, "model inspect MODEL"), (">/dev/full", 2, FULL, "run -h"),
    (">&-", 2, CLOSED, "model inspect MODEL"), ("2>&-", 0, "", "model inspect MODEL"),
    (">/dev/full 2>/dev/full", 2, "", "--help"), ("| true", 141, "", "model inspect MODEL"),
])  # fmt: skip
def test_a_lost_stream_ends_a_command_in_one_line_or_none(model, tail, status, says, words):
    got, out, err = shell(tail, *(model if word == "MODEL" else word for word in words.split()))
    assert got == status and bool(out) == (status == 0)
    assert err.count("\n") == bool(says) and says in err
    assert err.startswith("error: " if says else "")


@pytest.mark.long
def test_an_ascii_terminal_takes_every_token_and_message(model, capsys):
    """Where both streams go to one file, the text ends before the figures after it."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ask = ("run", "-m", model, "-p", "naïve 中文", "-n", 40, "--temp", 1.5, "--device", "host")
    status, out, _ = shell("2>&1", *ask, **ascii_only)
    main([str(word) for word in ask])
    text = capsys.readouterr().out
    assert status == 0 and out.isascii() and not text.isascii()
    assert text.encode("ascii", streams.UNKNOWN_LETTERS).decode() in out  # the same prompt was read
    assert [line for line in out.splitlines() if line.startswith("prompt ")]
    status, _, err = shell("", "model", "inspect", "süß.gguf", PYTHONIOENCODING="ascii")
    assert status == 1 and "s\\xfc\\xdf.gguf: no such file" in err


def test_sigterm_leaves_nothing_of_a_model_half_written(tmp_path):
    out = tmp_path / "m.gguf"
    out.write_bytes(b"old")
    ask = ["model", "synth", "llama-3-8b", "Q8_0", str(out), "--force"]
    running = subprocess.Popen([*COMMAND, *ask], stderr=subprocess.PIPE, text=True)
    while len(list(tmp_path.iterdir())) < 2:
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 143
    assert err.splitlines()[-1] == "error: terminated"
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"] and out.read_bytes() == b"old"


@pytest.mark.long
def test_ctrl_c_keeps_the_tokens_made_so_far(model):
    ask = ["run", "-m", str(model), "--device", "embedded", "--tokens", "1,2,3", "-n", "100000",
           "--n-ctx", "120000"]  # fmt: skip
    warm = ["1" if word == "100000" else word for word in ask]
    subprocess.run([*COMMAND, *warm], capture_output=True, check=True)  # kernels are compiled
    running = subprocess.Popen([*COMMAND, *ask], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stderr is not None
    running.stderr.readline()  # the device is named: loaded, and about to generate
    time.sleep(2.0)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130 and b"," in out
    assert err.splitlines()[-1] == b"error: interrupted; what was finished is kept"


PRESSED = """
import signal, sys
class Finder:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
from workbench.cli import main
main(["toggles"])
"""


@pytest.mark.parametrize("module", ["cyclopts", "workbench.cli.toggles", "pandas"])
def test_ctrl_c_while_modules_come_is_one_line(module):
    """Before the command begins, and in the command."""
    done = subprocess.run(
        [sys.executable, "-c", PRESSED, module], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_unwinds_as_ctrl_c_and_has_its_status(stop):
    before, seen = signal.getsignal(signal.SIGTERM), Stop()
    with pytest.raises(KeyboardInterrupt), heeded(seen):
        signal.raise_signal(stop)
        time.sleep(10)
    assert seen.status == 128 + stop and signal.getsignal(signal.SIGTERM) is before
    own = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with heeded():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, own)


class Finalized:
    """Does something when it goes."""

    def __init__(self, last: Callable[[], object]):
        self.last = last

    def __del__(self) -> None:
        self.last()


@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_in_a_finalizer_is_raised_again(monkeypatch, times: int):
    """Other errors there are reported as before."""
    left = [signal.SIGINT] * times
    with heeded(), pytest.raises(KeyboardInterrupt):
        for _ in range(times):
            Finalized(lambda: left and signal.raise_signal(left.pop()))
        for _ in range(1000):
            time.sleep(0.01)  # one sleep would be slept to its end
    assert not left
    reported: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: reported.append(u.exc_type))
    before = sys.unraisablehook
    with heeded():
        Finalized(lambda: 1 / 0)
    assert reported == [ZeroDivisionError] and sys.unraisablehook is before
