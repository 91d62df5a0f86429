"""The letters in which the threads write a program's order (llama.cpp #17795).

c  a blocking copy: a Copy and a Sync on it      r  an event is recorded
a  a copy that does not block                    w  the device waits for an event
s  any other Sync: the host waits                g  the device work of a split
                                                 h  a host split
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.program.commands import Command


def of_splits(commands: Iterable[Command], n_splits: int) -> list[str]:
    """The letters of each split, in host order; the work of a split is one letter."""
    commands = list(commands)
    groups = [""] * n_splits
    blocked = {c.blocks for c in commands}
    for c in commands:
        letter = _letter(c, c in blocked)
        if c.split >= 0 and not (letter in ("g", "h") and groups[c.split].endswith(letter)):
            groups[c.split] += letter
    return groups


def of_results(commands: Sequence[Command]) -> str:
    """The letters of what follows the last split: copies of results and a wait for them, if any."""
    last = {c.letter for c in takewhile(lambda c: c.split < 0, reversed(commands))}
    return "".join(letter for letter in "as" if letter in last)


def _letter(c: Command, blocked: bool) -> str:
    if c.kind == "sync":  # of a blocking copy it is part of the copy's letter
        return "" if c.blocks else c.letter
    if c.by_host:
        return "h" if c.kind == "launch" else ""
    return "c" if blocked else c.letter


def once(texts: Iterable[str]) -> list[str]:
    """Equal neighbours once, with their number: `2 x (h sasg)`."""
    runs = [(text, len(list(same))) for text, same in groupby(texts)]
    return [text if n == 1 else f"{n} x ({text})" for text, n in runs]


def folded(group: str) -> str:
    """`scscscg` -> `scscg`, `saag` -> `saaaag`, `sag` as it is: as the threads write repeats."""
    out, i = "", 0
    while i < len(group):
        pairs = 0
        while group.startswith("sc", i + 2 * pairs):
            pairs += 1
        if pairs and group[i + 2 * pairs : i + 2 * pairs + 1] != "c":
            out += "scsc"
            i += 2 * pairs
        elif group[i] in "ac":
            run = len(group) - i - len(group[i:].lstrip(group[i]))
            out += group[i] * (4 if run > 1 else 1)
            i += run
        else:
            out += group[i]
            i += 1
    return out
