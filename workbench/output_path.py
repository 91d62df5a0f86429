"""What stands at a path that is to be written, and in words why it cannot be."""

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from workbench.errors import UsageError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MOST_LINKS = 40  # in a row, as Linux has it

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


class Found(NamedTuple):
    """shown: the path as given; target: behind every link; status: None where nothing is there;
    descriptor: of this process, where the path names one."""

    shown: Path
    target: str
    status: os.stat_result | None
    descriptor: int | None

    @property
    def is_direct(self) -> bool:
        """Whether it is written directly, because a new file cannot replace it."""
        regular = self.status is None or stat.S_ISREG(self.status.st_mode)
        return self.descriptor is not None or not regular


def look(path: str | PathLike[str], folder: bool = False) -> Found:
    """What stands at `path`; raises UsageError where that can be seen not to take a file (or, of a
    folder, not to take files)."""
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


@contextmanager
def refusing(shown: Path) -> Iterator[None]:
    """Errors of the operating system about `shown` are said in one line."""
    try:
        yield
    except OSError as error:
        raise refusal(shown, error) from error
    except UsageError:
        raise
    except ValueError as error:  # a null byte, or letters that no file name here may have
        raise UsageError(f"{named(shown)} cannot be written: it is no file name") from error


def named(path: Path) -> str:
    """A path as a message shows it: in one line, whatever letters it has."""
    return str(path) if str(path).isprintable() else repr(str(path))


def refusal(shown: Path, error: OSError) -> UsageError:
    """The line about `shown`, that it cannot be written and why."""
    why = WHY.get(error.errno or 0, f"{error.strerror}; choose another path")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        why = _missing(shown)
    return UsageError(f"{named(shown)} cannot be written: {why}")


def _steps_back_from_nowhere(shown: Path) -> Path | None:
    """A missing folder that a path leaves again, as `no` in `no/../x`; realpath would skip it. None
    for a path as `../new/x`, whose missing folders can be made."""
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
