"""Standard output and standard error, whatever they are: a terminal without our letters, a full
disk, a pipe whose reader has gone, or closed.

Standard output takes the result: where it is lost, the command ends and says so. Standard error
takes remarks for the eye: where they are lost, the command goes on.
"""

import errno
import io
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.common.errors import UsageError
from workbench.common.output import refusal

UNKNOWN_LETTERS = "backslashreplace"  # as \\xe5, so that nothing is lost


class Lost(OSError):
    """Standard output takes no more."""

    @property
    def end(self) -> tuple[int, str]:
        """The exit status and the error line of the command. No line where standard output is a
        pipe whose reader has seen enough."""
        if self.errno == errno.EPIPE:
            return 128 + signal.SIGPIPE, ""
        found = refusal(Path("standard output"), self)
        return found.exit_status, str(found)


class Result(io.FileIO):
    """Standard output. Raises Lost where it takes no more, and drops everything after that."""

    _lost = False

    def write(self, data: Any) -> int:
        if self._lost:
            return len(data)
        try:
            return super().write(data) or 0
        except OSError as error:
            self._lost = True
            raise Lost(error.errno, error.strerror) from error


class Remarks(io.FileIO):
    """Standard error. Accepts everything, also where it is lost."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            return super().write(data) or 0
        return len(data)


def text(raw: io.FileIO, encoding: str | None, by_line: bool) -> io.TextIOWrapper:
    """`raw` as a stream of text that accepts every letter."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, UNKNOWN_LETTERS, line_buffering=by_line
    )


def prepare() -> None:
    """Replaces Python's two streams, unless somebody else has.

    Raises UsageError where standard output is closed, because the result would be lost.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # otherwise the next opened file would get its number, and the output
            os.open(os.devnull, os.O_RDWR)
    out, err = sys.stdout, sys.stderr
    if err is None or err is sys.__stderr__:
        encoding = "utf-8" if err is None else err.encoding
        sys.stderr = text(Remarks(2, "w", closefd=False), encoding, True)
    if out is None:
        raise UsageError("standard output is closed; send it to a file, or to /dev/null")
    if out is sys.__stdout__ and isinstance(out, io.TextIOWrapper):
        sys.stdout = text(Result(1, "w", closefd=False), out.encoding, out.isatty())


def hand_over() -> None:
    """Flushes what was printed. Raises Lost where standard output does not take it."""
    if sys.stdout is not None:
        sys.stdout.flush()
