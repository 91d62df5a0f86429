"""The one writer on what is no common file, and where it cannot write: each in one line."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import threading
from pathlib import Path

import pytest

import workbench
from workbench.common.errors import UsageError
from workbench.common.output import check_folder, check_writable, writing, writing_folder


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_new_file_has_the_umask_s_mode_an_old_one_its_own(tmp_path):
    before = os.umask(0o027)
    try:
        for name in ("new", "old"):
            (tmp_path / "old").write_bytes(b"x")
            (tmp_path / "old").chmod(0o604)
            with writing(tmp_path / name, "t") as file:
                file.write("å\n")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new", "old")]
    assert modes == [0o640, 0o604]
    assert (tmp_path / "old").read_bytes() == b"\xc3\xa5\n" and names(tmp_path) == ["new", "old"]


@pytest.mark.parametrize("device", ["/dev/null", "/dev/full"])
def test_a_device_stays_a_device(device, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(device)
    for path in (device, link):
        check_writable(path)
        try:
            with writing(path) as file:
                file.write(b"x")
        except UsageError as error:
            assert device == "/dev/full" and "no space is left" in str(error)
        else:
            assert device == "/dev/null"
    assert stat.S_ISCHR(os.stat(device).st_mode) and link.is_symlink()


def refused(folder: Path) -> dict[Path, str]:
    (folder / "folder").mkdir()
    (folder / "file").write_text("x")
    (folder / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(folder / "socket"))
    return {
        folder / "folder": "it is a folder", folder / "file" / "x": "file is no folder",
        folder / "no" / "x": "make it first", folder / "loop": "in a circle",
        folder / "socket": "it is a socket", folder / ("n" * 300): "too long",
        folder / "a\0b": "no file name", Path("/proc/x"): "takes no new file",
        Path("/proc/version"): "cannot be written", Path("/dev/fd/99"): "not open for writing",
    }  # fmt: skip


def test_a_refusal_is_one_line_before_and_at_the_writing(tmp_path, monkeypatch):
    for path, says in refused(tmp_path).items():
        before = names(tmp_path)
        for attempt in (check_writable, lambda path: writing(path).__enter__()):
            with pytest.raises(UsageError) as found:
                attempt(path)
            assert says in str(found.value) and "\n" not in str(found.value)
        assert names(tmp_path) == before
    with pytest.raises(UsageError, match=r"needs .* free; make room"):
        check_writable(tmp_path / "x", n_bytes=1 << 60)
    monkeypatch.chdir(tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    with pytest.raises(UsageError, match="current folder was removed"):
        check_writable("x")


def test_folders_above_are_made_but_steps_from_nowhere(tmp_path, monkeypatch):
    for folder in ("notebooks", "data"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    run = Path("..", "data", "runs", "first")  # as a notebook names it
    check_folder(run, new=True)
    assert not Path("..", "data", "runs").exists()
    with writing_folder(run) as folder, folder.writing("a") as file:
        file.write(b"1")
    assert (tmp_path / "data" / "runs" / "first" / "a").read_bytes() == b"1"
    for nowhere in (Path("no", "..", "x"), Path("..", "no", "..", "data", "x")):
        with pytest.raises(UsageError, match=r"folder (../)?no does not exist; make it first"):
            check_folder(nowhere)


def test_nobody_else_writes_files():
    package = Path(workbench.__file__).parent
    writes = re.compile(
        r"os\.(replace|rename|link)\(|shutil\.(copy|move)|mkstemp|NamedTemporaryFile|\.write_(text|bytes)\("
        r"|\bopen\([^)]*[\"'][wxa]b?\+?[\"']|O_CREAT|savefig\((?!file|written|out)"
    )
    files = [p for p in package.rglob("*.py") if writes.search(p.read_text(encoding="utf-8"))]
    assert sorted(p.name for p in files) == ["output.py", "output_swap.py"]


def test_a_fifo_without_a_reader_is_waited_for_and_says_so(tmp_path, monkeypatch):
    pipe, got, said = tmp_path / "pipe", [], threading.Event()
    os.mkfifo(pipe)

    def read() -> None:
        said.wait(60)
        got.append(pipe.read_bytes())

    class Heard:
        def write(self, text: str) -> None:
            got.append(text)
            if "waiting" in text:
                said.set()

        def flush(self) -> None:
            """Nothing is kept back."""

    monkeypatch.setattr("sys.stderr", Heard())
    reader = threading.Thread(target=read)
    reader.start()
    with writing(pipe) as file:
        file.write(b"content")
    reader.join()
    assert "".join(got[:-1]).strip() == f"{pipe} has no reader yet; waiting for one"
    assert got[-1] == b"content"


def test_a_reader_that_ends_early_is_said_of_a_fifo_alone(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(UsageError, match="its reader ended early"), writing(pipe) as file:
        os.close(end)
        file.write(b"x")
    end, other = os.pipe()
    try:
        with pytest.raises(BrokenPipeError), writing(f"/dev/fd/{other}") as file:
            os.close(end)
            file.write(b"x")
    finally:
        os.close(other)


def test_a_descriptor_is_written_on_and_stays_open(tmp_path):
    with open(tmp_path / "log", "ab") as log:
        for text in (b"one ", b"two"):
            with writing(f"/proc/self/fd/{log.fileno()}") as file:
                file.write(text)
    assert (tmp_path / "log").read_bytes() == b"one two" and names(tmp_path) == ["log"]


@pytest.mark.parametrize(
    "number", [errno.EDQUOT, errno.EROFS, errno.EPERM, errno.EBUSY, errno.EFBIG, 121]
)
def test_every_error_has_its_words_in_one_line(tmp_path, monkeypatch, number):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "rename", fail)
    path = tmp_path / "two\nlines"
    with pytest.raises(UsageError, match=r"cannot be written: .*; ") as said, writing(path):
        pass
    assert "\n" not in str(said.value) and names(tmp_path) == []
