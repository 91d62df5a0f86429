"""Every file and folder that the package writes is written here.

A file is never seen half written: the content goes to a temporary file in the same folder, which
then takes the name. A folder is replaced as a whole (`output_swap.py`). A symbolic link stays, and
what it points to is written. A device, a FIFO or a descriptor (`/dev/stdout`) cannot be replaced:
it is written directly. Whatever ends the writing early (an error, Ctrl-C, SIGTERM) leaves the old
content, and nothing beside it. What SIGKILL leaves beside it, the next writing there removes.

Files are written from front to back, so that a pipe takes what a disk takes: `tell` counts, `seek`
is refused. What cannot be written is a UsageError of one line: what, why, what to do. Only a
descriptor of this process whose reader has gone raises BrokenPipeError: nobody listens any more.
"""

import errno
import io
import os
import shutil
import stat
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from workbench.errors import UsageError
from workbench.output_parts import made_parents, move, temporary, temporary_folder
from workbench.output_path import Found, look, named, refusal, refusing
from workbench.output_swap import carry, refuse_mounted, replace_folder, settle
from workbench.sizes import sizes

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
    with made_parents(found, parents), temporary(found) as (descriptor, beside):
        with _sink(descriptor, mode, found) as file:
            yield file
        move(found.shown, beside, found.target)


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
    with made_parents(found, parents, keep=False), temporary(found) as (descriptor, _):
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
        with temporary(target) as (descriptor, beside):
            with _sink(descriptor, mode, target) as file:
                yield file
            move(target.shown, beside, target.target)
        self.names.append(name)


@contextmanager
def writing_folder(
    path: str | PathLike[str], *, new: bool = False, without: Collection[str] = ()
) -> Iterator[NewFolder]:
    """A folder whose files appear together once the body has ended; missing parents are made.

    A folder that is there already is replaced in one step: whoever opens it has all files of this
    writing, or none. Its other files stay, but for those named in `without`. new: it must not be
    there. Raises UsageError where that cannot be.
    """
    with _found_folder(path, new) as found, temporary_folder(found) as beside:
        folder = NewFolder(found.shown, beside, [])
        yield folder
        if found.status is not None:
            carry(found, str(beside), {*folder.names, *without})
        replace_folder(found, str(beside), without, new)


def check_folder(path: str | PathLike[str], *, new: bool = False) -> None:
    """Raises UsageError where `writing_folder(path, new=new)` would now; leaves nothing behind."""
    with _found_folder(path, new, keep=False) as found, temporary_folder(found):
        pass


@contextmanager
def _found_folder(path: str | PathLike[str], new: bool, keep: bool = True) -> Iterator[Found]:
    """What stands at the path, and its parents, made where they are missing; at the end they are
    taken back unless they are to keep."""
    found = look(path, folder=True)
    if settle(found.target):
        found = look(path, folder=True)
    if found.status is not None:
        if new:
            raise UsageError(f"{named(found.shown)} exists already; choose another folder")
        refuse_mounted(found)
    with made_parents(found, True, keep=keep):
        yield found


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
