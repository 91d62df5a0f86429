"""The one writer: old content or new content, never half, and nothing left beside it."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

import workbench
from workbench.backend.cuda.kernels import nvrtc
from workbench.common.errors import UsageError
from workbench.common.output import check_folder, check_writable, writing, writing_folder


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_new_file_has_the_mode_of_the_umask_and_an_old_one_keeps_its_own(tmp_path):
    before = os.umask(0o027)
    try:
        for name in ("new", "old"):
            (tmp_path / "old").write_bytes(b"x")
            (tmp_path / "old").chmod(0o604)
            with writing(tmp_path / name) as file:
                file.write(b"content")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new", "old")]
    assert modes == [0o640, 0o604]
    assert (tmp_path / "old").read_bytes() == b"content" and names(tmp_path) == ["new", "old"]


def test_text_is_utf_8(tmp_path):
    with writing(tmp_path / "t", "t") as file:
        file.write("å\n")
    assert (tmp_path / "t").read_bytes() == b"\xc3\xa5\n"


def test_links_stay_and_their_targets_are_written(tmp_path):
    (tmp_path / "target").write_bytes(b"old")
    for link, target in (("a", "target"), ("b", "a"), ("dangling", "fresh")):
        (tmp_path / link).symlink_to(target)
        check_writable(tmp_path / link)
        with writing(tmp_path / link) as file:
            file.write(link.encode())
        assert (tmp_path / link).is_symlink() and (tmp_path / link).read_text() == link
    assert (tmp_path / "target").read_bytes() == b"b"
    assert names(tmp_path) == ["a", "b", "dangling", "fresh", "target"]


def test_a_fifo_is_written_and_stays_one(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    check_writable(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    with writing(pipe) as file:
        file.write(b"x" * 200_000)
        assert file.tell() == 200_000
    reader.join()
    assert got == [b"x" * 200_000] and stat.S_ISFIFO(pipe.stat().st_mode)


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


def refused(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
    return {
        "folder": (tmp_path / "folder", "it is a folder"),
        "below a file": (tmp_path / "file" / "x", "file is no folder"),
        "nowhere": (tmp_path / "no" / "x", "make it first"),
        "loop": (tmp_path / "loop", "in a circle"),
        "socket": (tmp_path / "socket", "it is a socket"),
        "long": (tmp_path / ("n" * 300), "too long"),
        "null byte": (tmp_path / "a\0b", "no file name"),
        "new, but /proc": (Path("/proc/x"), "takes no new file"),
        "old, but /proc": (Path("/proc/version"), "cannot be written"),
        "closed descriptor": (Path("/dev/fd/99"), "not open for writing"),
    }


def test_what_cannot_be_written_is_refused_in_one_line_before_and_at_the_writing(tmp_path):
    for path, says in refused(tmp_path).values():
        before = names(tmp_path)
        for attempt in (check_writable, lambda path: writing(path).__enter__()):
            with pytest.raises(UsageError) as found:
                attempt(path)
            line = str(found.value)
            assert says in line and "\n" not in line and ";" in line + ";", line
        assert names(tmp_path) == before


def test_a_folder_appears_whole_and_is_replaced_whole(tmp_path):
    path = tmp_path / "no" / "run"
    check_folder(path)
    assert names(tmp_path) == []
    for text in ("first", "second"):
        with writing_folder(path) as folder:
            for name in ("a", "b"):
                with folder.writing(name, "t") as file:
                    file.write(text)
                assert text == "second" or not path.exists()
        assert {p.name: p.read_text() for p in path.iterdir()} == {"a": text, "b": text}
    with pytest.raises(KeyboardInterrupt), writing_folder(path) as folder:
        with folder.writing("a", "t") as file:
            file.write("third")
        raise KeyboardInterrupt
    assert (path / "a").read_text() == "second" and names(path.parent) == ["run"]


def test_missing_folders_above_the_current_one_are_made_and_steps_out_of_nowhere_refused(
    tmp_path, monkeypatch
):
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
    assert sorted(files) == [
        package / "common" / "output.py",
        package / "common" / "output_swap.py",
    ]


def test_a_fifo_without_a_reader_is_waited_for_and_says_so(tmp_path, capsys):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)

    def read() -> None:
        while "waiting" not in (said := said_so_far(capsys, heard)):
            time.sleep(0.005)
        got.extend([said, pipe.read_bytes()])

    heard: list[str] = []
    reader = threading.Thread(target=read)
    reader.start()
    with writing(pipe) as file:
        file.write(b"content")
    reader.join()
    assert got == [f"{pipe} has no reader yet; waiting for one\n", b"content"]


def said_so_far(capsys, heard: list[str]) -> str:
    heard.append(capsys.readouterr().err)
    return "".join(heard)


def test_a_reader_that_ends_early_is_said_of_a_fifo_and_is_quiet_on_a_descriptor(tmp_path):
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


def test_a_descriptor_is_written_where_it_stands_and_stays_open(tmp_path):
    with open(tmp_path / "log", "ab") as log:
        for text in (b"one ", b"two"):
            with writing(f"/proc/self/fd/{log.fileno()}") as file:
                file.write(text)
    assert (tmp_path / "log").read_bytes() == b"one two" and names(tmp_path) == ["log"]


def test_a_file_that_grows_too_large_leaves_the_old_one(tmp_path):
    path, limits = tmp_path / "x", resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_bytes(b"old")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(UsageError, match="largest file allowed"), writing(path) as file:
            file.write(bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old" and names(tmp_path) == ["x"]


def test_a_folder_that_was_removed_below_us_is_said(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match="current folder was removed"):
        check_writable("x")


def test_too_little_room_is_known_before(tmp_path):
    with pytest.raises(UsageError, match=r"needs .* free; make room"):
        check_writable(tmp_path / "x", n_bytes=1 << 60)
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS, errno.EPERM, errno.EBUSY, 121])
def test_every_error_has_its_words_in_one_line(tmp_path, monkeypatch, number):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "rename", fail)
    path = tmp_path / "two\nlines"
    with pytest.raises(UsageError, match=r"cannot be written: .*; ") as said, writing(path):
        pass
    assert "\n" not in str(said.value) and names(tmp_path) == []


def test_a_cubin_for_which_there_is_no_room_is_not_kept(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    nvrtc._keep(tmp_path / "x.cubin", b"\x7fELF")
    assert names(tmp_path) == []
