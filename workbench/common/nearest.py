"""A name that does not exist, and the known name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALIKE = 0.6  # the least share of equal letters of two names that may be meant for each other
MANY = 20  # names; more are not listed beside the one that was meant


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name most like `name`, whatever its case, `-` or `_`; None where none is alike."""
    plain = {_plain(one): one for one in known}
    found = difflib.get_close_matches(_plain(str(name)), plain, n=1, cutoff=ALIKE)
    return plain[found[0]] if found else None


def choices(name: object, known: Iterable[str]) -> str:
    """The end of a refusal of `name`: `choose one of a, b, c`. The name that was probably meant
    stands first: `did you mean a? choose one of a, b, c`; where many are known, alone."""
    known = list(known)
    meant, every = nearest(name, known), f"choose one of {', '.join(known)}"
    if meant is None:
        return every
    return f"did you mean {meant}?" + (f" {every}" if len(known) <= MANY else "")


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
