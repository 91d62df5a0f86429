"""A class that refuses a keyword that it does not have as other wrong names are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from workbench.common.errors import UsageError

C = TypeVar("C", bound=type)


def refusing_unknown(line: Callable[[str], str]) -> Callable[[C], C]:
    """Makes a dataclass raise UsageError for a keyword that is none of its fields; Python would
    raise a TypeError, with a traceback. The signature stays. line: says what is wrong with a
    keyword."""

    def enter(made: C) -> C:
        init, fields = made.__init__, made.__dataclass_fields__  # type: ignore[misc,attr-defined]

        @functools.wraps(init)
        def checked(self: Any, *values: Any, **given: Any) -> None:
            for name in given:
                if name not in fields:
                    raise UsageError(line(name))
            init(self, *values, **given)

        made.__init__ = checked  # type: ignore[misc]
        return made

    return enter
