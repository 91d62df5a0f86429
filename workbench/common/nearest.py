"""The refusal of a name that does not exist: the nearest name that does, and all names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALIKE = 0.6  # of two names, by difflib's ratio, from which the one is proposed for the other


def nearest(name: object, known: Iterable[str]) -> str:
    """The known name that is most like `name`, in any case of letters; empty where none is
    alike."""
    by_lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(str(name).lower(), by_lower, 1, ALIKE)
    return by_lower[found[0]] if found else ""


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """The line on a name that does not exist: `toggle 'snyc' does not exist; did you mean sync?
    Choose one of ...`.

    what: the name as the line has it, as `toggle 'snyc'`.
    """
    names = list(known)
    meant, every = nearest(name, names), f"one of {', '.join(names)}"
    if not meant:
        return f"{what} does not exist; choose {every}"
    return f"{what} does not exist; did you mean {meant}? Choose {every}"
