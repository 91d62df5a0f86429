"""The letters in which the threads write a program's order (llama.cpp #17795).

c  a blocking copy: a Copy and a Sync on it      r  an event is recorded
a  a copy that does not block                    w  the device waits for an event
s  any other Sync: the host waits                g  the device work of a split
p  a plan is replayed, with all that is in it    h  a host split

`g3` and `p3`: the work is on three streams side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.program.commands import Command, Stream


def pattern(commands: Sequence[Command], n_splits: int, fold: bool, result: bool) -> str:
    """A group of letters for each split. fold, result: as `Program.pattern` has them."""
    groups = [""] * n_splits
    blocked = {c.blocks for c in commands}
    streams: list[set[Stream | None]] = [set() for _ in range(n_splits)]
    for c in commands:
        letter = "c" if c in blocked else c.letter
        if c.split >= 0 and not (letter in ("g", "h") and groups[c.split].endswith(letter)):
            groups[c.split] += letter
        for part in getattr(c, "parts", (c,)):
            if part.letter == "g":
                streams[part.split].add(part.stream)
    for i, used in enumerate(streams):
        if len(used) > 1:
            groups[i] = re.sub("[gp]", rf"\g<0>{len(used)}", groups[i])
    if fold:
        groups = [folded(g) for g in groups]
    if result:
        last = {c.letter for c in takewhile(lambda c: c.split < 0, reversed(commands))}
        groups[-1] += "".join(letter for letter in "as" if letter in last)
    return " ".join(groups)


def once(texts: Iterable[str]) -> list[str]:
    """Equal neighbours once, with their number: `2 x (h sasg)`."""
    runs = [(text, len(list(same))) for text, same in groupby(texts)]
    return [text if n == 1 else f"{n} x ({text})" for text, n in runs]


def folded(group: str) -> str:
    """`scscscg` -> `scscg`, `saag` -> `saaaag`, `sag` as it is: as the threads write repeats."""
    return re.sub(
        r"((?:sc)++)(?!c)|(a|c)\2*+",
        lambda run: "scsc" if run[1] else run[2] * (4 if len(run[0]) > 1 else 1),
        group,
    )
