"""The one writer: old content or new content, never half, and nothing left beside it."""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
from pathlib import Path

import pytest

import workbench
from workbench.errors import UsageError
from workbench.output import check_folder, check_writable, writing, writing_folder


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


def test_a_folder_appears_whole_and_its_files_are_replaced_one_by_one(tmp_path):
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


def test_nobody_else_writes_files():
    package = Path(workbench.__file__).parent
    writes = re.compile(
        r"os\.(replace|rename)\(|mkstemp|NamedTemporaryFile|\.write_(text|bytes)\("
        r"|\bopen\([^)]*[\"'][wxa]b?\+?[\"']|O_CREAT|savefig\((?!file|written|out)"
    )
    files = [p for p in package.rglob("*.py") if writes.search(p.read_text(encoding="utf-8"))]
    assert files == [package / "output.py"]
