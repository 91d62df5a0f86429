"""The one writer: on what is no common file, where it cannot write, and of whole folders, whoever
is killed, whoever reads, and whoever else writes."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.benchmarks.made_runs import a_run
from tests.common.killed_saves import no_exchange, save
from workbench.benchmarks.runs.results import SampleTable, load_run, write_run
from workbench.common import output_swap
from workbench.common.errors import UsageError
from workbench.common.output import check_folder, check_writable, held, writing, writing_folder
from workbench.common.output_swap import read_files

ROOT = Path(__file__).resolve().parents[2]
LEFT = f".workbench-{'0' * 16}"


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def refused(says: str, call, *given, **named) -> None:
    with pytest.raises(UsageError, match=says) as found:
        call(*given, **named)
    assert "\n" not in str(found.value)


def test_a_file_has_its_mode_and_a_descriptor_stays_open(tmp_path):
    old, log = tmp_path / "old", tmp_path / "log"
    old.touch(0o604)
    before = os.umask(0o027)
    try:
        for path in (old, tmp_path / "new"):
            with writing(path, "t") as file:
                file.write("å\n")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new", "old")]
    assert modes == [0o640, 0o604] and old.read_bytes() == b"\xc3\xa5\n"
    with open(log, "ab") as opened:
        for text in (b"one ", b"two"):
            with writing(f"/proc/self/fd/{opened.fileno()}") as file:
                file.write(text)
    assert log.read_bytes() == b"one two" and names(tmp_path) == ["log", "new", "old"]


def test_what_cannot_be_written_is_one_line_before_and_then(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
    for path, says in {
        "socket": "it is a socket", "n" * 300: "too long", "a\0b": "no file name",
        "/proc/version": "cannot be written", "/dev/fd/99": "not open for writing",
    }.items():  # fmt: skip
        for attempt in (check_writable, lambda path: writing(path).__enter__()):
            refused(says, attempt, tmp_path / path)
            assert names(tmp_path) == ["socket"]
    refused(r"needs .* free; make room", check_writable, tmp_path / "x", n_bytes=1 << 60)
    save(tmp_path / "run", "1")
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "ismount", lambda path: str(path).endswith("run"))
        for attempt in (check_folder, lambda path: save(path, "2")):
            refused("something is mounted there", attempt, tmp_path / "run")
    assert (tmp_path / "run" / "a").read_text() == "1"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    refused("current folder was removed", check_writable, "x")


def test_folders_above_are_made_but_steps_from_nowhere(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    run = Path("..", "data", "runs", "first")  # as a notebook names it
    check_folder(run, new=True)
    assert names(tmp_path) == ["notebooks"]
    save(run, "1")
    assert (tmp_path / "data" / "runs" / "first" / "a").read_text() == "1"
    for nowhere in (Path("no", "..", "x"), Path("..", "no", "..", "data", "x")):
        refused(r"folder (../)?no does not exist; make it first", check_folder, nowhere)


def test_a_fifo_without_a_reader_is_waited_for_and_says_so(tmp_path, monkeypatch):
    os.mkfifo(pipe := tmp_path / "pipe")
    monkeypatch.setattr("sys.stderr", err := io.StringIO())
    end = time.monotonic() + 60

    def read() -> bytes:
        while "has no reader yet; waiting for one" not in err.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
        return pipe.read_bytes() if err.getvalue() else b"nothing was said"

    with ThreadPoolExecutor() as pool:
        got = pool.submit(read)
        with writing(pipe) as file:
            file.write(b"content")
        assert got.result() == b"content"


def test_a_reader_that_ends_early_is_said_of_a_fifo_alone(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(UsageError, match="its reader ended early"), writing(pipe) as file:
        os.close(end)
        file.write(b"x")
    end, other = os.pipe()
    with pytest.raises(BrokenPipeError), writing(f"/dev/fd/{other}") as file:
        os.close(end)
        file.write(b"x")
    os.close(other)


# folders ------------------------------------------------------------------------------------------


def no_call(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.fixture(params=["exchange", "two-renames"])
def swap(request, monkeypatch):
    if request.param != "exchange":
        monkeypatch.setattr(output_swap, "exchange", no_exchange)
    return request.param


def test_a_save_killed_at_any_call_leaves_one_save_s_files(tmp_path, swap):
    script = [sys.executable, "-m", "tests.common.killed_saves", str(tmp_path), swap]
    subprocess.run(script, cwd=ROOT, check=True)


def test_leftovers_are_removed_and_what_lives_is_left_alone(tmp_path, swap, monkeypatch):
    """By the next writing there. Without locks a leftover is known by its age."""
    young = LEFT.replace("0", "1")
    (tmp_path / ".workbench-mine").write_text("no name of ours")
    save(tmp_path / "two", 0)
    (tmp_path / "two" / LEFT).mkdir()  # as an older version left it
    with writing_folder(tmp_path / "one") as one, writing(tmp_path / "file", "t") as file:
        for write in (
            lambda: save(tmp_path / "two", 1),
            lambda: check_folder(tmp_path / "two"),
            lambda: writing(tmp_path / "other").__enter__(),
        ):
            (tmp_path / LEFT / "in").mkdir(parents=True)
            (tmp_path / LEFT / "in" / "x").write_text("x")
            (tmp_path / young).write_text("x")
            write()
            assert not (tmp_path / LEFT).exists() and not (tmp_path / young).exists()
        file.write("content")
        with one.writing("a", "t") as a:
            a.write("content")
    assert names(tmp_path) == [".workbench-mine", "file", "one", "two"]
    assert names(tmp_path / "two") == ["a", "b"]
    assert (tmp_path / "file").read_text() == (tmp_path / "one" / "a").read_text() == "content"
    monkeypatch.setattr(fcntl, "flock", no_call)
    for name in (LEFT, young):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / LEFT, (0, 0))
    save(tmp_path / "two", 3)
    assert names(tmp_path) == [young, ".workbench-mine", "file", "one", "two"]


def test_a_save_between_two_files_mixes_none(tmp_path, swap, monkeypatch):
    save(tmp_path / "run", "old")
    opened, saved = os.open, []

    def between(path, *how, **named):
        found = opened(path, *how, **named)
        if os.path.basename(path) == "a" and not saved:
            saved.append(path)
            save(tmp_path / "run", "new")
        return found

    monkeypatch.setattr(os, "open", between)
    assert len({bytes(content) for content in read_files(tmp_path / "run", "a", "b")}) == 1
    assert saved


def test_of_two_writers_one_has_the_folder_and_new_ones_are(tmp_path, swap):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda v: [save(tmp_path / "run", v) for _ in range(40)], ("one", "two")))
    found = {p.name: p.read_text() for p in (tmp_path / "run").iterdir()}
    assert found in ({"a": v, "b": v} for v in ("one", "two")) and names(tmp_path) == ["run"]
    x = tmp_path / "x"
    with pytest.raises(UsageError, match="exists already"), writing_folder(x, new=True):
        save(x, "meanwhile")
    assert (x / "a").read_text() == "meanwhile" and names(tmp_path) == ["run", "x"]


HOLD = """import sys; from workbench.common.output import held
with held(*sys.argv[1:]): print("held", flush=True); sys.stdin.read()"""


def test_of_two_that_fill_a_folder_the_second_is_refused(tmp_path):
    """Until the first ends, or is killed. Nothing is left of a refusal, nor of the lock."""
    mine, other = tmp_path / "new" / "mine", tmp_path / "other"
    command = [sys.executable, "-c", HOLD, mine, other, mine]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as one:
        assert one.stdout is not None and one.stdout.readline() == b"held\n"
        for given in ((mine,), (tmp_path / "third", other)):
            refused("is being filled by another process; wait", held(*given).__enter__)
        assert names(tmp_path) == ["new", "other"] and not names(mine)
        one.kill()
    with held(mine, other):
        refused("mine is being filled by another", held(mine).__enter__)
    assert not names(mine) and not names(other)
    with pytest.raises(KeyError), held(tmp_path / "never" / "filled"):
        raise KeyError
    assert names(tmp_path) == ["new", "other"]


def test_a_run_replaces_its_own_saves_alone(tmp_path):
    """And its tables; those of another run do not stay."""
    none, tokens = SampleTable("r1").frame(), {"tokens.parquet": SampleTable("r").frame()}
    first = a_run(kind="perplexity", started="2025-11-21T00:00:00Z")
    write_run(tmp_path / "r", first, none, tokens, new=True)
    write_run(tmp_path / "r", first, none, new=True)  # the same, with more in `result`
    other = a_run(kind="ab", started="2025-11-22T00:00:00Z")
    with pytest.raises(UsageError, match="exists already"):
        write_run(tmp_path / "r", other, none, new=True)
    assert load_run(tmp_path / "r").run["started"] == first["started"]
    assert "tokens.parquet" in names(tmp_path / "r")
    write_run(tmp_path / "r", other, none)
    assert names(tmp_path / "r") == ["run.json", "samples.parquet"]


@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
def test_other_files_folders_and_modes_stay(tmp_path, swap, monkeypatch, links):
    run = tmp_path / "run"
    save(run, "1")
    (run / "in").mkdir()
    (run / "in" / "x").write_text("x")
    (run / "link").symlink_to("nowhere")
    (run / "b.parquet").write_text("x")
    run.chmod(0o750)
    if not links:  # the file system has none
        monkeypatch.setattr(os, "link", no_call)
    with writing_folder(run, without=("b.parquet",)) as made:
        (run / "late").write_text("somebody else's")
        with made.writing("a", "t") as file:
            file.write("2")
    assert names(run) == ["a", "b", "in", "late", "link"] and (run / "a").read_text() == "2"
    assert (run / "in" / "x").read_text() == "x" and (run / "link").is_symlink()
    assert run.stat().st_mode & 0o777 == 0o750


def test_a_folder_that_a_link_leads_to_and_the_current_one(tmp_path, monkeypatch, swap):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save(tmp_path / "link", "1")
    assert (tmp_path / "link").is_symlink() and names(tmp_path / "real") == ["a", "b"]
    monkeypatch.chdir(tmp_path / "real")
    for value in ("2", "3"):  # this process goes on in the new folder
        save(Path("."), value)
        assert Path("a").read_text() == (tmp_path / "real" / "a").read_text() == value
