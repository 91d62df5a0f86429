"""The errors a user can cause, and the one line each of them prints.

Every message says what is wrong, where, and what to do. `cli.main` prints it after `error: ` and
exits with `exit_status`; nothing else in the package prints an error.
"""

from __future__ import annotations


class WorkbenchError(Exception):
    """Anything a user can mend. `str(error)` is one line."""

    exit_status = 1


class UsageError(WorkbenchError, ValueError):
    """A wrong request: an unknown toggle value, a token id out of range, two toggles that clash."""

    exit_status = 2


class ModelFileError(WorkbenchError):
    """A model file that cannot be believed: what is wrong, and at which byte offset."""


class DeviceError(WorkbenchError):
    """A device that is not there, or that cannot do what a toggle asks of it."""
