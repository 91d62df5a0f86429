"""What is made on the way to a file or a folder, and taken back.

A temporary file or folder is locked (`flock`) as long as somebody writes it, and the kernel unlocks
what a killed process held. So whoever writes next in that folder knows what is left over, removes
it, and leaves alone what another process is writing. A file system without locks (NFS has none for
folders) shows an age instead: what is older than an hour is left over.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from workbench.output_path import Found, refusal, refusing

TEMPORARY = ".workbench-"  # what is being written is called so, and 16 hexadecimal digits behind
LEFT_OVER_S = 3600.0  # where the file system has no locks

_NAME = re.compile(re.escape(TEMPORARY) + "[0-9a-f]{16}")


@contextmanager
def temporary(found: Found) -> Iterator[tuple[int, str]]:
    """(descriptor, name) of a new file beside the target; removed unless it was renamed."""
    folder, held = os.path.dirname(found.target), -1
    sweep(folder)
    name = _new_name(folder)
    try:
        with refusing(found.shown):
            while held < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                descriptor = os.open(name, flags, 0o666)
                held = os.dup(descriptor)  # it is locked until it has its own name
                if not _is_ours(held, name):
                    _close(descriptor)
                    held, name = _close(held), _new_name(folder)
            if found.status is not None:
                with suppress(PermissionError):  # a file system without modes
                    os.fchmod(descriptor, stat.S_IMODE(found.status.st_mode))
        yield descriptor, name
    finally:
        try:
            remove(name)
        finally:
            _close(held)


@contextmanager
def temporary_folder(found: Found) -> Iterator[Path]:
    """A new folder beside the target; removed at the end, with what then has its name."""
    folder, held = os.path.dirname(found.target), -1
    sweep(folder)
    name = _new_name(folder)
    try:
        with refusing(found.shown):
            while held < 0:
                os.mkdir(name)
                held = _opened(name)
                if held < 0 and os.path.lexists(name):
                    break
                if held < 0 or not _is_ours(held, name):
                    held, name = _close(held), _new_name(folder)
        yield Path(name)
    finally:
        try:
            with suppress(OSError):  # the next sweep tries again
                remove(name)
        finally:
            _close(held)


def is_temporary(name: str) -> bool:
    """Whether a file or folder of that name is one that was being written."""
    return _NAME.fullmatch(name) is not None


def sweep(folder: str) -> None:
    """Removes from `folder` what killed processes left while they wrote."""
    with suppress(OSError):  # the folder is not there, or not to be read: the writing says it
        for name in filter(is_temporary, os.listdir(folder)):
            with suppress(OSError):  # somebody else's
                _remove_left_over(os.path.join(folder, name))


def _remove_left_over(path: str) -> None:
    """Removes it unless somebody writes it. It is locked until it is gone: whoever has just made
    it finds that out."""
    held = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if _is_left_over(held):
            remove(path)
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


def _new_name(folder: str) -> str:
    return os.path.join(folder, TEMPORARY + secrets.token_hex(8))


def _opened(folder: str) -> int:
    """A descriptor to lock a new folder with; -1 where it cannot be had, and goes without."""
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1


def _is_ours(held: int, name: str) -> bool:
    """Locks what was just made; False where a sweep was quicker, and takes it for left over."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # there are no locks
        return True
    return os.path.lexists(name)


def _close(descriptor: int) -> int:
    """-1; closes what is open, and what cannot be written any more was said before."""
    if descriptor >= 0:
        with suppress(OSError):
            os.close(descriptor)
    return -1


@contextmanager
def made_parents(found: Found, wanted: bool, keep: bool = True) -> Iterator[None]:
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
                remove(str(folder), only_empty=True)


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


def move(shown: Path, source: str, target: str) -> None:
    """Renames, and says in one line where that cannot be; a Ctrl-C meanwhile is heeded after."""
    try:
        rename(source, target)
    except OSError as error:
        raise refusal(shown, error) from error


def rename(source: str, target: str) -> None:
    """`os.rename`; a Ctrl-C meanwhile is heeded after."""
    try:
        os.rename(source, target)
    except KeyboardInterrupt:
        if os.path.lexists(source):
            os.rename(source, target)
        raise


def remove(path: str, only_empty: bool = False) -> None:
    """Removes the file, or the folder and what is in it; a Ctrl-C meanwhile is heeded after."""
    try:
        _remove_once(path, only_empty)
    except KeyboardInterrupt:
        _remove_once(path, only_empty)
        raise


def _remove_once(path: str, only_empty: bool) -> None:
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        if not only_empty:
            for name in os.listdir(path):
                _remove_once(os.path.join(path, name), only_empty=False)
        with suppress(OSError):  # somebody else put a file there
            os.rmdir(path)
