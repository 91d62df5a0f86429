"""Arguments that must be whole numbers."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from workbench.common.errors import UsageError


def check_whole(**given: Any) -> None:
    """Raises UsageError for the first argument that is no whole number, with its name and value.
    NumPy's integers are whole numbers; text of digits is none."""
    for name, value in given.items():
        if not isinstance(value, Integral):
            raise UsageError(f"{name}={value!r} is no whole number; give one, as {name}=4")
