"""Several files of a folder, all of one save, also while the folder is replaced.

A save replaces a run folder as a whole. Who opens its files one after the other by their paths may
meet a save between two of them. So the folder is opened once, and its files are opened in there.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path

from workbench.output_swap import aside


def read_files(folder: Path, *names: str) -> list[bytes]:
    """The content of these files. Raises FileNotFoundError, with the path, for one that is missing.

    A save that takes the folder's place removes it; then the files of that save are read.
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
    """A descriptor of the folder, or of the one that stepped aside for it (`output_swap.py`)."""
    for path in (folder, aside(os.path.realpath(folder)), folder):
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder / first)


def _content(at: int, path: Path) -> bytes:
    """Of the file of that name in the folder opened as `at`."""
    try:
        descriptor = os.open(path.name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=at)
    except OSError as error:
        error.filename = path
        raise
    with os.fdopen(descriptor, "rb") as file:
        return file.read()
