"""The letters in which the threads write a program's order (llama.cpp #17795)."""

import re
from collections.abc import Iterable
from itertools import groupby

LETTERS = {
    "h": "a split that the host computes",
    "s": "the host waits",
    "c": "a copy, and the host waits for it",
    "a": "an asynchronous copy",
    "r": "an event is recorded",
    "w": "the device waits for an event",
    "g": "a split that the device computes",
    "p": "a plan is replayed",
}
# what else a pattern may hold
_SIGNS = {
    r"[gp]\d": "a number: so many streams side by side",
    r"aaaa|cccc|scsc": "aaaa, cccc or scsc: two or more copies",
}


def legend(patterns: str) -> str:
    """What each letter of the patterns means: `s: the host waits; a: an asynchronous copy`."""
    said = [f"{letter}: {words}" for letter, words in LETTERS.items() if letter in patterns]
    signs = [words for sign, words in _SIGNS.items() if re.search(sign, patterns)]
    return "; ".join(said + signs)


def patterns_in(words: Iterable[str]) -> str:
    """The folded patterns that texts begin with: `sasg` of `sasg: all inputs are one copy`."""
    begun = [text.partition(":")[0] for text in words]
    return " ".join(text for text in begun if re.fullmatch("[sacrw]*g", text))


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
