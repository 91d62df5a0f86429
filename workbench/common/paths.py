"""A path that a caller gives."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from workbench.common.errors import UsageError


def path_of(given: object, wanted: str) -> Path:
    """`given` as a path. Raises UsageError where it is none; wanted: what to give instead."""
    if isinstance(given, str | PathLike) and given != "":
        return Path(given)
    raise UsageError(f"{given!r} is no path; give {wanted}")
