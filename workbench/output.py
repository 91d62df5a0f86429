"""Every file and folder that the package writes is written here.

A file is never seen half written: the content goes to a temporary file in the same folder, which
then takes the name. A symbolic link stays, and what it points to is written. A device, a FIFO or a
descriptor (`/dev/stdout`) cannot be replaced: it is written directly. Whatever ends the writing
early (an error, Ctrl-C, SIGTERM) leaves the old content, and nothing beside it.

Files are written from front to back, so that a pipe takes what a disk takes: `tell` counts, `seek`
is refused. What cannot be written is a UsageError of one line: what, why, what to do. Only a
descriptor of this process whose reader has gone raises BrokenPipeError: nobody listens any more.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from workbench.errors import UsageError

TEMPORARY = ".workbench-"  # what is being written is called so; a killed process may leave one
MOST_LINKS = 40  # in a row, as Linux has it
BUFFER_BYTES = 1 << 18

WHY = {
    errno.ENOSPC: "no space is left on the device; make room, or choose another disk",
    errno.EDQUOT: "the disk quota is used up; make room, or choose another disk",
    errno.EFBIG: "it grows beyond the largest file allowed here; raise `ulimit -f`",
    errno.EACCES: "there is no permission; choose another path, or change its permissions",
    errno.EPERM: "there is no permission; choose another path, or change its permissions",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EISDIR: "it is a folder; name a file in it",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.ELOOP: "its symbolic links lead in a circle; choose another path",
    errno.ENXIO: "it is a socket, or a device that is not there; name a file",
    errno.EBADF: "that descriptor is not open for writing; redirect it, or name a file",
    errno.EPIPE: "its reader ended early; start the reader again",
    errno.EEXIST: "it exists already; choose another name",
    errno.ENOTEMPTY: "it exists already; choose another name",
    errno.EBUSY: "something is mounted there; choose another name",
}  # fmt: skip


@contextmanager
def writing(path: str | PathLike[str], mode: str = "b", *, parents: bool = False) -> Iterator[Any]:
    """A file open for writing; `path` has the content once the body has ended, or is as it was.

    mode: `b` for bytes, `t` for text (UTF-8, newlines as written). parents: missing folders are
    made. A file that is replaced keeps its mode; a new one has the mode that the umask gives. A
    FIFO without a reader is waited for, as `cat` does, and a line on stderr says so.

    Raises UsageError where `path` cannot be written.
    """
    found = _look(path)
    if found.is_direct:
        with _sink(_open_direct(found), mode, found) as file:
            yield file
        return
    with _parents(found, parents), _temporary(found, parents) as (descriptor, temporary):
        with _sink(descriptor, mode, found) as file:
            yield file
        _move(found.shown, [(temporary, found.target)])


def check_writable(path: str | PathLike[str], *, parents: bool = False) -> None:
    """Raises UsageError where `writing(path)` would now; leaves nothing behind.

    A FIFO or a device is not opened: its reader would see an end, and a device may move.
    """
    found = _look(path)
    if found.descriptor is not None:
        return
    if found.is_direct:
        if not os.access(found.target, os.W_OK):
            raise _refusal(found.shown, OSError(errno.EACCES, ""))
        return
    with _parents(found, parents, keep=False), _temporary(found, parents) as (descriptor, _):
        try:
            with _refusing(found.shown):
                os.write(descriptor, b"\0")  # a full disk takes names, but no byte
        finally:
            os.close(descriptor)


class NewFolder(NamedTuple):
    """A folder while it is written: `path` is what it will be called, `beside` where it is now."""

    path: Path
    beside: Path
    names: list[str]

    @contextmanager
    def writing(self, name: str, mode: str = "b") -> Iterator[Any]:
        """As `output.writing`, of the file `name` of this folder."""
        target = _Found(self.path / name, str(self.beside / name), None, None)
        with _temporary(target, False) as (descriptor, temporary):
            with _sink(descriptor, mode, target) as file:
                yield file
            _move(target.shown, [(temporary, target.target)])
        self.names.append(name)


@contextmanager
def writing_folder(path: str | PathLike[str]) -> Iterator[NewFolder]:
    """A folder whose files appear together once the body has ended; missing parents are made.

    A new folder appears whole. In one that is there already each file is replaced whole, in the
    order in which they were written; its other files stay. Raises UsageError where that cannot be.
    """
    found = _look(path, folder=True)
    exists = found.status is not None
    with _parents(found, True), _temporary_folder(found) as beside:
        folder = NewFolder(found.shown, beside, [])
        yield folder
        if exists:
            files = [(str(beside / n), os.path.join(found.target, n)) for n in folder.names]
            _move(found.shown, files)
        else:
            _move(found.shown, [(str(beside), found.target)])


def check_folder(path: str | PathLike[str]) -> None:
    """Raises UsageError where `writing_folder(path)` would now; leaves nothing behind."""
    found = _look(path, folder=True)
    with _parents(found, True, keep=False), _temporary_folder(found):
        pass


# what stands at a path ---------------------------------------------------------------------------


class _Found(NamedTuple):
    """shown: the path as given; target: behind every link; status: None where nothing is there;
    descriptor: of this process, where the path names one."""

    shown: Path
    target: str
    status: os.stat_result | None
    descriptor: int | None

    @property
    def is_direct(self) -> bool:
        """Whether it is written where it is, since nothing can take its place."""
        regular = self.status is None or stat.S_ISREG(self.status.st_mode)
        return self.descriptor is not None or not regular


def _look(path: str | PathLike[str], folder: bool = False) -> _Found:
    """What stands at `path`; raises UsageError where that can be seen not to take a file (or, of a
    folder, not to take files)."""
    shown = Path(path)
    with _refusing(shown):
        number = None if folder else _descriptor(str(shown))
        if number is not None:
            if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise OSError(errno.EBADF, "")
            return _Found(shown, str(shown), os.fstat(number), number)
        try:
            status = os.stat(shown)
        except FileNotFoundError:
            return _Found(shown, os.path.realpath(shown), None, None)
        target = os.path.realpath(shown)
        if folder and not stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EEXIST, "")
        if not folder and stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, "")
        if stat.S_ISSOCK(status.st_mode):
            raise OSError(errno.ENXIO, "")
        if stat.S_ISREG(status.st_mode) and not os.access(target, os.W_OK):
            raise OSError(errno.EACCES, "")
        return _Found(shown, target, status, None)


def _descriptor(path: str) -> int | None:
    """The descriptor of this process that `path` names, as /dev/stdout does; None for any other."""
    own = re.compile(rf"/dev/fd|/proc/{os.getpid()}(/task/\d+)?/fd")
    for _ in range(MOST_LINKS):
        folder = os.path.realpath(os.path.dirname(path))
        name = os.path.basename(path)
        if own.fullmatch(folder) and name.isdecimal():
            return int(name)
        path = os.path.join(folder, name)
        if not os.path.islink(path):
            return None
        path = os.path.join(folder, os.readlink(path))
    return None


# what is open ------------------------------------------------------------------------------------


def _open_direct(found: _Found) -> int:
    with _refusing(found.shown):
        if found.descriptor is not None:
            if found.descriptor == 1 and sys.stdout is not None:
                sys.stdout.flush()  # what was printed comes first
            return os.dup(found.descriptor)
        assert found.status is not None
        if not stat.S_ISFIFO(found.status.st_mode):
            return os.open(found.target, os.O_WRONLY | os.O_NOCTTY)
        try:
            descriptor = os.open(found.target, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(descriptor, True)
            return descriptor
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
        if sys.stderr is not None:
            print(f"{found.shown} has no reader yet; waiting for one", file=sys.stderr)
        return os.open(found.target, os.O_WRONLY)


class _Descriptor(io.RawIOBase):
    """The bytes of one output on their way to `descriptor`; once dropped, to nowhere."""

    def __init__(self, descriptor: int, found: _Found):
        self._descriptor, self._found, self._n = descriptor, found, 0
        self.dropped = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._n

    def write(self, data: Any) -> int:
        n = len(data) if self.dropped else self._write(data)
        self._n += n
        return n

    def _write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if error.errno == errno.EPIPE and self._found.descriptor is not None:
                raise
            raise _refusal(self._found.shown, error) from error

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        with _refusing(self._found.shown):
            os.close(self._descriptor)


@contextmanager
def _sink(descriptor: int, mode: str, found: _Found) -> Iterator[Any]:
    """`descriptor` as a buffered file; all of it is handed over, and it is closed, at the end."""
    raw = _Descriptor(descriptor, found)
    file: Any = io.BufferedWriter(raw, BUFFER_BYTES)
    if mode == "t":
        file = io.TextIOWrapper(file, encoding="utf-8", newline="\n")
    try:
        yield file
        file.close()
    except BaseException:
        raw.dropped = True  # what the buffers hold is of no use
        file.close()
        raw.close()
        raise


# what is made and taken back ---------------------------------------------------------------------


@contextmanager
def _temporary(found: _Found, parents: bool) -> Iterator[tuple[int, str]]:
    """(descriptor, name) of a new file beside the target; removed unless it was renamed."""
    folder = os.path.dirname(found.target)
    name = os.path.join(folder, TEMPORARY + secrets.token_hex(8))
    try:
        with _refusing(found.shown):
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            if found.status is not None:
                with suppress(PermissionError):  # a file system without modes
                    os.fchmod(descriptor, stat.S_IMODE(found.status.st_mode))
        yield descriptor, name
    finally:
        _remove(name)


@contextmanager
def _temporary_folder(found: _Found) -> Iterator[Path]:
    """A new folder, in the target where that exists, else beside it; removed unless renamed."""
    parent = found.target if found.status is not None else os.path.dirname(found.target)
    beside = Path(parent, TEMPORARY + secrets.token_hex(8))
    try:
        with _refusing(found.shown):
            beside.mkdir()
        yield beside
    finally:
        _remove(str(beside))


@contextmanager
def _parents(found: _Found, wanted: bool, keep: bool = True) -> Iterator[None]:
    """Makes the folders that the target lacks, if `wanted`; takes them back where the body fails,
    and at its end unless `keep`."""
    made: list[Path] = []
    try:
        if wanted:
            with _refusing(found.shown):
                _make(Path(found.target).parent, made)
        yield
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            for folder in reversed(made):
                with suppress(OSError):  # somebody else put a file there
                    folder.rmdir()


def _make(folder: Path, made: list[Path]) -> None:
    if folder.is_dir():
        return
    _make(folder.parent, made)
    with suppress(FileExistsError):
        folder.mkdir()
        made.append(folder)


def _move(shown: Path, moves: list[tuple[str, str]]) -> None:
    """Renames each source to its target, all of them: a Ctrl-C meanwhile is heeded after."""
    stopped: KeyboardInterrupt | None = None
    for source, target in moves:
        while True:
            try:
                with _refusing(shown):
                    os.rename(source, target)
            except KeyboardInterrupt as error:
                stopped = error
                if os.path.lexists(source):
                    continue
            break
    if stopped is not None:
        raise stopped


def _remove(path: str) -> None:
    """Removes the file or folder if it is there; a Ctrl-C meanwhile is heeded after."""
    try:
        _remove_once(path)
    except KeyboardInterrupt:
        _remove_once(path)
        raise


def _remove_once(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        Path(path).unlink(missing_ok=True)


# what is said ------------------------------------------------------------------------------------


@contextmanager
def _refusing(shown: Path) -> Iterator[None]:
    """Errors of the operating system about `shown` are said in one line."""
    try:
        yield
    except OSError as error:
        raise _refusal(shown, error) from error
    except UsageError:
        raise
    except ValueError as error:  # a null byte, or letters that no file name here may have
        raise UsageError(f"{str(shown)!r} cannot be written: it is no file name") from error


def _refusal(shown: Path, error: OSError) -> UsageError:
    why = WHY.get(error.errno or 0, f"{error.strerror}; choose another path")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        parent = Path(os.path.realpath(shown)).parent
        above = [folder for folder in (parent, *parent.parents) if os.path.exists(folder)]
        if not above[0].is_dir():
            why = f"{above[0]} is no folder; choose another path"
        elif above[0] == parent:
            why = f"{parent} takes no new file; choose another folder"
        else:
            why = f"the folder {parent} does not exist; make it first"
    return UsageError(f"{shown} cannot be written: {why}")
