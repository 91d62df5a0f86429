"""A folder takes the place of another in one step: a reader finds all of the old or of the new.

    beside    run.json' samples'      written first, in a folder of its own (`output.py`)
    target    run.json  samples       one call exchanges both names; then the old folder is removed

The call is renameat2 with RENAME_EXCHANGE on Linux, renamex_np with RENAME_SWAP on macOS. A file
system with neither (NFS) needs two renames: the old folder gets the name of `aside`, then the new
folder gets the target's. Between the two nothing is at the target. A process that is killed there
leaves the old folder aside. Readers look there next, and the next save puts it back (`settle`).

A reader that opens files of a folder one after the other by their paths may meet a save between two
of them. So `read_files` opens the folder once, and its files in there: all are of one save.

Errors here are the operating system's; `output.py` has the words.
"""

import ctypes
import errno
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = ".workbench-"  # the name of a folder being written, before 16 hexadecimal digits

_NAME = re.compile(re.escape(TEMPORARY) + "[0-9a-f]{16}")
_AT_FDCWD, _RENAME_EXCHANGE, _RENAME_SWAP = -100, 2, 2
# what a kernel or a file system answers that cannot exchange
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)
_THERE = (errno.EEXIST, errno.ENOTEMPTY)


def is_temporary(name: str) -> bool:
    """Whether a folder of that name is, or was, being written."""
    return _NAME.fullmatch(name) is not None


def surely(call: Callable[..., None], *paths: str) -> None:
    """Renames or removes. A Ctrl-C meanwhile is raised afterwards."""
    try:
        call(*paths)
    except KeyboardInterrupt:
        with suppress(FileNotFoundError):  # it had been done
            call(*paths)
        raise


def remove(path: str) -> None:
    """Removes the file, or the folder and what is in it, where there is one."""
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        for name in os.listdir(path):
            remove(os.path.join(path, name))
        remove_empty(path)


def remove_empty(folder: str) -> None:
    """Removes the folder, unless somebody else put a file there."""
    with suppress(OSError):
        os.rmdir(folder)


def exchange(one: str, other: str) -> None:
    """Exchanges the names of two folders of one file system, in one step. Raises OSError; with
    ENOSYS where this system has no such call."""
    libc, paths = ctypes.CDLL(None, use_errno=True), (os.fsencode(one), os.fsencode(other))
    try:
        if sys.platform == "darwin":
            failed = libc.renamex_np(*paths, ctypes.c_uint(_RENAME_SWAP))
        else:
            at = ctypes.c_int(_AT_FDCWD)
            how = ctypes.c_uint(_RENAME_EXCHANGE)
            failed = libc.renameat2(at, paths[0], at, paths[1], how)
    except AttributeError:  # an older C library
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), one, None, other)


def replace_folder(
    beside: str, target: str, absent: bool, without: Collection[str] = (), new: bool = False
) -> None:
    """Gives the new folder `beside` the name of the target. The old folder, where there is one,
    then has the name `beside`. Raises OSError where that is not possible; the target is then as it
    was.

    absent: whether there was no old folder so far.
    without: names in the old folder that do not stay.
    new: there must be no old folder.
    """
    old = beside
    with _standing_where_we_stood():
        while True:
            try:
                if absent:
                    surely(os.rename, beside, target)
                    return
                exchange(beside, target)
                break
            except OSError as error:
                if absent and error.errno in _THERE and not new:  # somebody else was quicker
                    absent = False
                elif not absent and error.errno == errno.ENOENT:
                    absent = True
                elif not absent and error.errno in _CANNOT:
                    old = _replace_in_two(beside, target)
                    break
                else:
                    raise
        _bring_latecomers(old, target, without)
        if old != beside:
            with suppress(OSError):
                surely(remove, old)


def _replace_in_two(beside: str, target: str) -> str:
    """As `exchange`, on a file system that cannot exchange. Returns the name that the old folder
    then has: `beside`, or `aside` where the last rename failed."""
    old = aside(target)
    stopped: KeyboardInterrupt | None = None
    while True:
        surely(remove, old)  # the target is there, so nobody needs it
        try:
            surely(os.rename, target, old)
        except FileNotFoundError:
            pass
        except KeyboardInterrupt as error:
            stopped = error
        try:
            surely(os.rename, beside, target)
        except KeyboardInterrupt as error:
            stopped = error
        except OSError as error:
            if error.errno in _THERE:
                continue
            with suppress(OSError):
                os.rename(old, target)
            raise
        break
    name = beside
    try:
        surely(os.rename, old, beside)  # to be removed
    except OSError:
        name = old
    if stopped is not None:
        raise stopped
    return name


def aside(target: str) -> str:
    """The name of the old folder while a new one takes its place in two steps."""
    return os.path.join(os.path.dirname(target), f"{TEMPORARY}aside-{os.path.basename(target)}")


def settle(target: str) -> bool:
    """Puts back a folder that a killed process left aside, or removes it where the target exists.
    Returns whether there was such a folder."""
    old = aside(target)
    if not os.path.isdir(old):
        return False
    with suppress(OSError):  # somebody else was quicker, or it stays where readers find it
        if os.path.lexists(target):
            surely(remove, old)
        else:
            surely(os.rename, old, target)
    return True


def carry(target: str, beside: str, without: Collection[str]) -> None:
    """Gives the other contents of the old folder a name in the new folder too: by a link, or by a
    copy where the file system has no links. without: names that are left out."""
    with suppress(FileNotFoundError):  # it has just been removed
        for name in os.listdir(target):
            if name not in without and not is_temporary(name):
                _carry(os.path.join(target, name), os.path.join(beside, name))
        with suppress(PermissionError):  # a file system without modes
            os.chmod(beside, stat.S_IMODE(os.stat(target).st_mode))


def _carry(source: str, target: str) -> None:
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(source).st_mode):
            os.mkdir(target)
            for name in os.listdir(source):
                _carry(os.path.join(source, name), os.path.join(target, name))
            shutil.copystat(source, target)
            return
        try:
            os.link(source, target, follow_symlinks=False)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copy2(source, target, follow_symlinks=False)


def _bring_latecomers(old: str, target: str, without: Collection[str]) -> None:
    """Moves what somebody else put into the old folder while the new folder was made."""
    with suppress(OSError):
        for name in set(os.listdir(old)).difference(os.listdir(target), without):
            if not is_temporary(name):
                surely(os.rename, os.path.join(old, name), os.path.join(target, name))


@contextmanager
def _standing_where_we_stood() -> Iterator[None]:
    """If the current folder is the one that is replaced, this process changes to the new folder."""
    try:
        here = os.getcwd()
    except OSError:
        here = ""
    try:
        yield
    finally:
        with suppress(OSError):
            if here and not os.path.samefile(here, "."):
                os.chdir(here)


# what readers do ---------------------------------------------------------------------------------


def read_files(folder: Path, *names: str) -> list[bytes]:
    """The contents of these files, all of one save, also while the folder is being replaced. If it
    is replaced meanwhile, the files of the new save are read. Raises FileNotFoundError, with the
    path, for a missing file.
    """
    while True:
        at = _opened(folder, names[0])
        try:
            return [_content(at, folder / name) for name in names]
        except FileNotFoundError:
            if os.path.samestat(os.fstat(at), os.stat(folder)):
                raise
        finally:
            os.close(at)


def _opened(folder: Path, first: str) -> int:
    """A descriptor of the folder, or of the old folder that was set aside."""
    for path in (folder, aside(os.path.realpath(folder)), folder):
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder / first)


def _content(at: int, path: Path) -> bytes:
    """The content of the file of that name in the folder opened as `at`."""
    try:
        descriptor = os.open(path.name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=at)
    except OSError as error:
        error.filename = path
        raise
    with os.fdopen(descriptor, "rb") as file:
        return file.read()
