"""Every file and folder that the package writes is written here.

A file is never seen half written: the content goes to a temporary file in the same folder, which
then takes the name. A symbolic link stays, and what it points to is written. A device, a FIFO or a
descriptor (`/dev/stdout`) cannot be replaced: it is written directly. Whatever ends the writing
early (an error, Ctrl-C, SIGTERM) leaves the old content, and nothing beside it.

Files are written from front to back, so that a pipe takes what a disk takes: `tell` counts, `seek`
is refused. What cannot be written is a UsageError of one line: what, why, what to do. Only a
descriptor of this process whose reader has gone raises BrokenPipeError: nobody listens any more.
"""

import errno
import io
import os
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
from workbench.output_path import Found, look, named, refusal, refusing
from workbench.sizes import sizes

TEMPORARY = ".workbench-"  # what is being written is called so; a killed process may leave one
BUFFER_BYTES = 1 << 18


@contextmanager
def writing(path: str | PathLike[str], mode: str = "b", *, parents: bool = False) -> Iterator[Any]:
    """A file open for writing; `path` has the content once the body has ended, or is as it was.

    mode: `b` for bytes, `t` for text (UTF-8, newlines as written). parents: missing folders are
    made. A file that is replaced keeps its mode; a new one has the mode that the umask gives. A
    FIFO without a reader is waited for, as `cat` does, and a line on stderr says so.

    Raises UsageError where `path` cannot be written.
    """
    found = look(path)
    if found.is_direct:
        with _sink(_open_direct(found), mode, found) as file:
            yield file
        return
    with _parents(found, parents), _temporary(found, parents) as (descriptor, temporary):
        with _sink(descriptor, mode, found) as file:
            yield file
        _move(found.shown, [(temporary, found.target)])


def write_text(path: str | PathLike[str], text: str, *, parents: bool = False) -> None:
    """As `writing`, of a text that is there already."""
    with writing(path, "t", parents=parents) as file:
        file.write(text)


def is_replaced(path: str | PathLike[str]) -> bool:
    """Whether `writing(path)` replaces a file that is there; no device and no FIFO is.

    Raises UsageError as `check_writable` does, where that can be seen without trying.
    """
    found = look(path)
    return not found.is_direct and found.status is not None


def check_writable(path: str | PathLike[str], *, parents: bool = False, n_bytes: int = 0) -> None:
    """Raises UsageError where `writing(path)` would now, and where the disk has no n_bytes free;
    leaves nothing behind.

    A FIFO or a device is not opened: its reader would see an end, and a device may move.
    """
    found = look(path)
    if found.descriptor is not None:
        return
    if found.is_direct:
        if not os.access(found.target, os.W_OK):
            raise refusal(found.shown, OSError(errno.EACCES, ""))
        return
    with _parents(found, parents, keep=False), _temporary(found, parents) as (descriptor, _):
        try:
            with refusing(found.shown):
                os.write(descriptor, b"\0")  # a full disk takes names, but no byte
                free = shutil.disk_usage(os.path.dirname(found.target)).free
        finally:
            os.close(descriptor)
    if n_bytes > free:
        needs, has = sizes(n_bytes, free)
        raise UsageError(
            f"{named(found.shown)} needs {needs} and its disk has {has} free; "
            "make room, or choose another disk"
        )


class NewFolder(NamedTuple):
    """A folder while it is written: `path` is what it will be called, `beside` where it is now."""

    path: Path
    beside: Path
    names: list[str]

    @contextmanager
    def writing(self, name: str, mode: str = "b") -> Iterator[Any]:
        """As `output.writing`, of the file `name` of this folder."""
        target = Found(self.path / name, str(self.beside / name), None, None)
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
    found = look(path, folder=True)
    exists = found.status is not None
    with _parents(found, True), _temporary_folder(found) as beside:
        folder = NewFolder(found.shown, beside, [])
        yield folder
        if exists:
            files = [(str(beside / n), os.path.join(found.target, n)) for n in folder.names]
            _move(found.shown, files)
        else:
            _move(found.shown, [(str(beside), found.target)])


def check_folder(path: str | PathLike[str], *, new: bool = False) -> None:
    """Raises UsageError where `writing_folder(path)` would now, and, if it shall be `new`, where
    the folder exists; leaves nothing behind."""
    found = look(path, folder=True)
    if new and found.status is not None:
        raise UsageError(f"{named(found.shown)} exists already; choose another folder")
    with _parents(found, True, keep=False), _temporary_folder(found):
        pass


# what is open ------------------------------------------------------------------------------------


def _open_direct(found: Found) -> int:
    with refusing(found.shown):
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
            print(f"{named(found.shown)} has no reader yet; waiting for one", file=sys.stderr)
        return os.open(found.target, os.O_WRONLY)


class _Descriptor(io.RawIOBase):
    """The bytes of one output on their way to `descriptor`; once dropped, to nowhere."""

    def __init__(self, descriptor: int, found: Found):
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
            raise refusal(self._found.shown, error) from error

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        with refusing(self._found.shown):
            os.close(self._descriptor)


@contextmanager
def _sink(descriptor: int, mode: str, found: Found) -> Iterator[Any]:
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
def _temporary(found: Found, parents: bool) -> Iterator[tuple[int, str]]:
    """(descriptor, name) of a new file beside the target; removed unless it was renamed."""
    folder = os.path.dirname(found.target)
    name = os.path.join(folder, TEMPORARY + secrets.token_hex(8))
    try:
        with refusing(found.shown):
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            if found.status is not None:
                with suppress(PermissionError):  # a file system without modes
                    os.fchmod(descriptor, stat.S_IMODE(found.status.st_mode))
        yield descriptor, name
    finally:
        _remove(name)


@contextmanager
def _temporary_folder(found: Found) -> Iterator[Path]:
    """A new folder, in the target where that exists, else beside it; removed unless renamed."""
    parent = found.target if found.status is not None else os.path.dirname(found.target)
    beside = Path(parent, TEMPORARY + secrets.token_hex(8))
    try:
        with refusing(found.shown):
            beside.mkdir()
        yield beside
    finally:
        _remove(str(beside))


@contextmanager
def _parents(found: Found, wanted: bool, keep: bool = True) -> Iterator[None]:
    """Makes the folders that the target lacks, if `wanted`; takes them back where the body fails,
    and at its end unless `keep`."""
    made: list[Path] = []
    try:
        if wanted:
            with refusing(found.shown):
                _make(Path(found.target).parent, made)
        yield
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            for folder in reversed(made):
                _remove(str(folder), only_empty=True)


def _make(folder: Path, made: list[Path]) -> None:
    if folder.is_dir():
        return
    _make(folder.parent, made)
    made.append(folder)
    try:
        folder.mkdir()
    except FileExistsError:  # somebody else was quicker
        made.remove(folder)
    except FileNotFoundError as error:  # in a folder that is there, as /proc
        raise OSError(errno.EOPNOTSUPP, "") from error


def _move(shown: Path, moves: list[tuple[str, str]]) -> None:
    """Renames each source to its target, all of them: a Ctrl-C meanwhile is heeded after."""
    stopped: KeyboardInterrupt | None = None
    for source, target in moves:
        while True:
            try:
                with refusing(shown):
                    os.rename(source, target)
            except KeyboardInterrupt as error:
                stopped = error
                if os.path.lexists(source):
                    continue
            break
    if stopped is not None:
        raise stopped


def _remove(path: str, only_empty: bool = False) -> None:
    """Removes the file or folder if it is there; a Ctrl-C meanwhile is heeded after."""
    try:
        _remove_once(path, only_empty)
    except KeyboardInterrupt:
        _remove_once(path, only_empty)
        raise


def _remove_once(path: str, only_empty: bool) -> None:
    with suppress(FileNotFoundError):
        if not os.path.isdir(path):
            os.unlink(path)
            return
        if not only_empty:
            for name in os.listdir(path):  # of files only
                os.unlink(os.path.join(path, name))
        with suppress(OSError):  # somebody else put a file there
            os.rmdir(path)
