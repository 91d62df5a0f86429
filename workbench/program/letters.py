"""The letters in which the threads write a program's order, and their runs.

`c` a blocking copy, `a` a copy, `s` any other wait of the host, `r` an event recorded, `w` waited
for on the device, `g` the device work of a split, `h` a host split (llama.cpp #17795).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby


def once(texts: Iterable[str]) -> list[str]:
    """Equal neighbours once, with their number: `2 x (h sasg)`."""
    runs = [(text, len(list(same))) for text, same in groupby(texts)]
    return [text if n == 1 else f"{n} x ({text})" for text, n in runs]


def folded(group: str) -> str:
    """`scscscg` -> `scscg`, `saag` -> `saaaag`, `sag` as it is: runs as the threads write them."""
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
