"""Every file and folder that the package writes is written here.

Nobody sees a file half written. The content goes to a file in a temporary folder beside the target,
and that file then takes the target's name. A folder is replaced as a whole (`output_swap.py`). A
symbolic link stays, and the file that it points to is written. A device, a FIFO or a descriptor
(`/dev/stdout`) cannot be replaced, so it is written directly. If the writing ends early (an error,
Ctrl-C, SIGTERM), the old content stays, and nothing is left beside it. After SIGKILL, the next
writing in that folder removes what was left.

Files are written from the first byte to the last, so that a pipe takes them as a disk does: `tell`
counts, `seek` is refused. A file that cannot be written raises UsageError with one line: what, why,
what to do. Only a descriptor of this process whose reader has gone raises BrokenPipeError.
"""

import errno
import fcntl
import io
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from workbench.common.errors import UsageError
from workbench.common.output_swap import (
    TEMPORARY,
    carry,
    is_temporary,
    remove,
    remove_empty,
    replace_folder,
    settle,
    surely,
)
from workbench.common.sizes import sizes

BUFFER_BYTES = 1 << 18
LEFT_OVER_S = 3600.0  # the age of what is left over, where the file system has no locks
MOST_LINKS = 40  # symbolic links in a row, as in Linux
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

WHY = {
    errno.ENOSPC: "no space is left on the device; make room, or choose another disk",
    errno.EDQUOT: "the disk quota is used up; make room, or choose another disk",
    errno.EFBIG: "it grows beyond the largest file allowed here; raise `ulimit -f`",
    errno.EACCES: "there is no permission; choose another path, or change its permissions",
    errno.EPERM: "there is no permission; choose another path, or change its permissions",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EOPNOTSUPP: "the file system takes no new folder there; choose another folder",
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
    """A file open for writing. `path` has the content once the body has ended; if the body fails,
    `path` is as it was.

    mode: `b` for bytes, `t` for text (UTF-8, newlines as written).
    parents: missing folders are made.

    A file that is replaced keeps its mode; a new file has the mode that the umask gives. A FIFO
    without a reader is waited for, as `cat` does, with a line on stderr. Raises UsageError where
    `path` cannot be written.
    """
    found = look(path)
    if found.is_direct:
        with _sink(_open_direct(found), mode, found) as file:
            yield file
        return
    with _made_parents(found, parents), _beside(found) as folder:
        content = os.path.join(folder, "content")
        with _sink(_created(content, found), mode, found) as file:
            yield file
        with refusing(found.shown):
            surely(os.rename, content, found.target)


def write_text(path: str | PathLike[str], text: str, *, parents: bool = False) -> None:
    """As `writing`, for a text that is complete."""
    with writing(path, "t", parents=parents) as file:
        file.write(text)


def is_replaced(path: str | PathLike[str]) -> bool:
    """Whether `writing(path)` replaces a file. A device or a FIFO is never replaced.

    Raises UsageError where it can be seen without a try that `path` cannot be written.
    """
    found = look(path)
    return not found.is_direct and found.status is not None


def check_writable(path: str | PathLike[str], *, parents: bool = False, n_bytes: int = 0) -> None:
    """Raises UsageError where `writing(path)` would raise it now, and where the disk has no n_bytes
    free. Leaves no file.

    A FIFO or a device is not opened: the FIFO's reader would see an end, and a device may move.
    """
    found = look(path)
    if found.descriptor is not None:
        return
    if found.is_direct:
        if not os.access(found.target, os.W_OK):
            raise refusal(found.shown, OSError(errno.EACCES, ""))
        return
    with _made_parents(found, parents, keep=False), _beside(found) as folder:
        descriptor = _created(os.path.join(folder, "content"), found)
        try:
            with refusing(found.shown):
                os.write(descriptor, b"\0")  # a full disk takes names, but no byte
                free = shutil.disk_usage(folder).free
        finally:
            os.close(descriptor)
    if n_bytes > free:
        needs, has = sizes(n_bytes, free)
        raise UsageError(
            f"{named(found.shown)} needs {needs} and its disk has {has} free; "
            "make room, or choose another disk"
        )


class NewFolder(NamedTuple):
    """A folder while it is written. path: its final name. beside: where it is now. names: its files
    so far."""

    path: Path
    beside: Path
    names: list[str]

    @contextmanager
    def writing(self, name: str, mode: str = "b") -> Iterator[Any]:
        """As `output.writing`, for the file `name` of this folder."""
        found = Found(self.path / name, str(self.beside / name), None, None)
        try:
            with _sink(_created(found.target, found), mode, found) as file:
                yield file
        except BaseException:
            surely(remove, found.target)
            raise
        self.names.append(name)


@contextmanager
def writing_folder(
    path: str | PathLike[str], *, new: bool = False, without: Collection[str] = ()
) -> Iterator[NewFolder]:
    """A folder whose files appear together once the body has ended. Missing parents are made.

    A folder that exists is replaced in one step: whoever opens it has all files of this writing, or
    none. Its other files stay, except those named in `without`. new: the folder must not exist yet.
    Raises UsageError where the folder cannot be written.
    """
    with _found_folder(path, new) as found, _beside(found) as beside:
        folder = NewFolder(found.shown, Path(beside), [])
        yield folder
        with refusing(found.shown):
            if found.status is not None:
                carry(found.target, beside, {*folder.names, *without})
            replace_folder(beside, found.target, found.status is None, without, new)


def check_folder(path: str | PathLike[str], *, new: bool = False) -> None:
    """Raises UsageError where `writing_folder(path, new=new)` would raise it now. Leaves
    nothing."""
    with _found_folder(path, new, keep=False) as found, _beside(found):
        pass


@contextmanager
def held(*paths: str | PathLike[str]) -> Iterator[None]:
    """Folders that this body alone fills. Missing folders are made; those that are empty are
    removed where the body fails.

    Each folder is locked (`flock`) without a file in it. The kernel releases the locks of a killed
    process. Raises UsageError where another body holds a folder, in this process or another. On a
    file system without locks nobody is refused.
    """
    with ExitStack() as all_of_them:
        for target, path in {os.path.realpath(path): Path(path) for path in paths}.items():
            all_of_them.enter_context(_made_parents(look(Path(target, "x")), True))
            with suppress(OSError):
                descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                all_of_them.callback(_close, descriptor)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UsageError(
                        f"{named(path)} is being filled by another process; wait until that has "
                        "ended, or choose another folder"
                    ) from None
        yield


@contextmanager
def _found_folder(path: str | PathLike[str], new: bool, keep: bool = True) -> Iterator["Found"]:
    """What is at `path`, with missing parents made for the body. At its end the new parents are
    removed unless `keep`."""
    found = look(path, folder=True)
    if settle(found.target):
        found = look(path, folder=True)
    if found.status is not None:
        if new:
            raise UsageError(f"{named(found.shown)} exists already; choose another folder")
        if os.path.ismount(found.target):  # it cannot be replaced
            raise refusal(found.shown, OSError(errno.EBUSY, ""))
    with _made_parents(found, True, keep=keep):
        yield found


# what is at a path -------------------------------------------------------------------------------


class Found(NamedTuple):
    """What is at a path.

    shown: the path as given.
    target: the path with every symbolic link followed.
    status: None where nothing is there.
    descriptor: a descriptor of this process, where the path names one.
    """

    shown: Path
    target: str
    status: os.stat_result | None
    descriptor: int | None

    @property
    def is_direct(self) -> bool:
        """Whether the target is written directly, because a new file cannot replace it."""
        regular = self.status is None or stat.S_ISREG(self.status.st_mode)
        return self.descriptor is not None or not regular


def look(path: str | PathLike[str], folder: bool = False) -> Found:
    """What is at `path`. Raises UsageError where it can be seen that no file can be written there.
    folder: the same for a folder of files."""
    shown = Path(path)
    with refusing(shown):
        if not folder and os.path.basename(os.fspath(path)) in ("", "."):  # Path would drop those
            raise OSError(errno.EISDIR, "")
        number = None if folder else _descriptor(str(shown))
        if number is not None:
            if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise OSError(errno.EBADF, "")
            return Found(shown, str(shown), os.fstat(number), number)
        try:
            status = os.stat(shown)
        except FileNotFoundError:
            if _steps_back_from_nowhere(shown) is not None:
                raise
            return Found(shown, os.path.realpath(shown), None, None)
        target = os.path.realpath(shown)
        if folder and not stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EEXIST, "")
        if not folder and stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, "")
        if stat.S_ISSOCK(status.st_mode):
            raise OSError(errno.ENXIO, "")
        if stat.S_ISREG(status.st_mode) and not os.access(target, os.W_OK):
            raise OSError(errno.EACCES, "")
        return Found(shown, target, status, None)


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


# why a file cannot be written, in words ----------------------------------------------------------


@contextmanager
def refusing(shown: Path) -> Iterator[None]:
    """Within, errors of the operating system about `shown` become a UsageError of one line."""
    try:
        yield
    except OSError as error:
        raise refusal(shown, error) from error
    except UsageError:
        raise
    except ValueError as error:  # a null byte, or letters that no file name here may have
        raise UsageError(f"{named(shown)} cannot be written: it is no file name") from error


def check_extension(path: Path, *known: str, bare: bool = True) -> None:
    """Raises UsageError for a file name whose extension is not `known`. A device, a FIFO or a
    descriptor is fine. bare: so is a name without an extension."""
    name = path.name.lower()
    has_none = "." not in name.lstrip(".")
    if (has_none and bare) or name.endswith(known) or look(path).is_direct:
        return
    has = "no extension" if has_none else "an unknown extension"
    raise UsageError(f"{named(path)} has {has}; the file can be {' or '.join(known)}")


def named(path: Path) -> str:
    """A path for a message: in one line, whatever letters it has."""
    return str(path) if str(path).isprintable() else repr(str(path))


def refusal(shown: Path, error: OSError) -> UsageError:
    """The error which says that `shown` cannot be written, and why."""
    why = WHY.get(error.errno or 0, f"{error.strerror}; choose another path")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        why = _missing(shown)
    return UsageError(f"{named(shown)} cannot be written: {why}")


def _steps_back_from_nowhere(shown: Path) -> Path | None:
    """A missing folder from which a path steps back, as `no` in `no/../x`. (realpath would skip
    it.) None for a path as `../new/x`, whose missing folders can be made."""
    before = (Path(*shown.parts[:i]) for i, part in enumerate(shown.parts) if part == "..")
    return next((folder for folder in before if not os.path.exists(folder)), None)


def _missing(shown: Path) -> str:
    """Why there is no folder for `shown`."""
    if (nowhere := _steps_back_from_nowhere(shown)) is not None:
        return f"the folder {named(nowhere)} does not exist; make it first"
    try:
        parent = Path(os.path.realpath(shown)).parent
    except FileNotFoundError:
        return "the current folder was removed; change to another"
    above = next(folder for folder in (parent, *parent.parents) if os.path.exists(folder))
    if not above.is_dir():
        return f"{named(above)} is no folder; choose another path"
    if above == parent:
        return f"{named(parent)} takes no new file; choose another folder"
    return f"the folder {named(parent)} does not exist; make it first"


# what is made on the way -------------------------------------------------------------------------


@contextmanager
def _made_parents(found: Found, wanted: bool, keep: bool = True) -> Iterator[None]:
    """Makes the missing folders of the target, if `wanted`. Removes them where the body fails, and
    at its end unless `keep`."""
    made: list[Path] = []
    try:
        if wanted:
            with refusing(found.shown):
                missing = [folder for folder in Path(found.target).parents if not folder.is_dir()]
                for folder in reversed(missing):
                    made.append(folder)
                    try:
                        folder.mkdir()
                    except FileExistsError:  # somebody else was quicker
                        made.remove(folder)
                    except FileNotFoundError as error:  # in a folder that is there, as /proc
                        raise OSError(errno.EOPNOTSUPP, "") from error
        yield
    except BaseException:
        keep = False
        raise
    finally:
        for folder in [] if keep else reversed(made):
            surely(remove_empty, str(folder))


@contextmanager
def _beside(found: Found) -> Iterator[str]:
    """A new folder beside the target. Whatever has its name at the end is removed.

    The folder is locked (`flock`) as long as somebody writes in it, and the kernel releases the
    locks of a killed process. So the next writing beside it can tell a folder that is left over,
    which it removes, from a folder in which another process writes. On a file system without locks
    (NFS has none for folders) the folder's age tells.
    """
    parent, held = os.path.dirname(found.target), -1
    _sweep(parent)
    name = ""
    try:
        with refusing(found.shown):
            while not os.path.lexists(name):  # a sweep may remove it before it is locked
                name = os.path.join(parent, TEMPORARY + secrets.token_hex(8))
                os.mkdir(name)
                held = _locked(name, held)
        yield name
    finally:
        try:
            with suppress(OSError):  # the next sweep tries again
                surely(remove, name)
        finally:
            _close(held)


def _locked(folder: str, held: int) -> int:
    """A descriptor of a new folder that locks it, where that is possible. held: another descriptor,
    to be closed."""
    _close(held)
    held = -1
    with suppress(OSError):
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_EX)  # at once, or when the sweep that has it is over
    return held


def _sweep(folder: str) -> None:
    """Removes from `folder` what killed processes have left. Each is locked until it is removed, so
    that a process which has just made it notices."""
    with suppress(OSError):  # the folder is not there, or not to be read: the writing says it
        for name in filter(is_temporary, os.listdir(folder)):
            path = os.path.join(folder, name)
            with suppress(OSError):  # somebody else's
                held = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    if _is_left_over(held):
                        surely(remove, path)
                finally:
                    _close(held)


def _is_left_over(held: int) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:  # there are no locks
        return time.time() - os.fstat(held).st_mtime > LEFT_OVER_S


def _close(descriptor: int) -> None:
    """Closes; errors at this point were reported before."""
    if descriptor >= 0:
        with suppress(OSError):
            os.close(descriptor)


# what is open ------------------------------------------------------------------------------------


def _created(path: str, found: Found) -> int:
    """A descriptor of a new file, with the mode of the file that it will replace."""
    with refusing(found.shown):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        if found.status is not None:
            with suppress(PermissionError):  # a file system without modes
                os.fchmod(descriptor, stat.S_IMODE(found.status.st_mode))
        return descriptor


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
    """The bytes of one output on their way to `descriptor`. Once `dropped`, they are discarded."""

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
    """`descriptor` as a buffered file. At the end all bytes are written, and it is closed."""
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
