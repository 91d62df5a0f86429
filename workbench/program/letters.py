"""The letters in which the threads write a program's order (llama.cpp #17795).

c  a blocking copy: a Copy and a Sync on it      r  an event is recorded
a  a copy that does not block                    w  the device waits for an event
s  any other Sync: the host waits                g  the device work of a split
p  a plan is replayed, with all that is in it    h  a host split

`g3` and `p3`: the work is on three streams side by side.
"""

import re
from collections.abc import Iterable
from itertools import groupby


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
