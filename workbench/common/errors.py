"""The errors that a user can cause. Each prints one line.

Every message says what is wrong, where, and what to do. `cli.main` prints it after `error: ` and
exits with `exit_status`; nothing else in the package prints an error.
"""

import linecache
import os
import traceback


class WorkbenchError(Exception):
    """Anything that a user can mend. `str(error)` is one line."""

    exit_status = 1

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback: the error's line, and, for a cell of several
        lines, the line of the cell that failed."""
        lines = [f"{type(self).__name__}: {self}"]
        frames = traceback.extract_tb(self.__traceback__)
        cells = [frame for frame in frames if not os.path.exists(frame.filename)]  # are in no file
        if cells and len(linecache.getlines(cells[-1].filename)) > 1:
            lines.append(f"  in line {cells[-1].lineno}: {cells[-1].line}")
        return lines


class Kept(KeyboardInterrupt):
    """An interrupt after which the command keeps what was finished: it is saved or printed."""


class UsageError(WorkbenchError, ValueError):
    """A wrong request: an unknown toggle value, a token id out of range, two toggles that clash."""

    exit_status = 2


class ModelFileError(WorkbenchError):
    """A model file that cannot be believed: what is wrong, and at which byte offset."""


class DeviceError(WorkbenchError):
    """A device that is not there, or that cannot do what a toggle asks of it."""


class BelowLimit(WorkbenchError):
    """A comparison that found a result slower than the limit at which it was told to fail."""

    exit_status = 3
