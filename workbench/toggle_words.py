"""Toggles in words: those that are on, and what two sets of them differ in."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.toggles import FAMILIES, Toggles, folded


def differing(before: Toggles, after: Toggles) -> tuple[str, str]:
    """What each has where the two differ: `sync=per_copy` and `sync=packed`. A family is named once
    where all of it differs and each side has it at one value. Twice `the same toggles` for two that
    are equal."""
    names = [n for n in before.names() if before.value_of(n) != after.value_of(n)]
    for family in FAMILIES:
        members = before.members(family)
        whole = all(len({side.value_of(n) for n in members}) == 1 for side in (before, after))
        if whole and set(members) <= set(names):
            names = [family if n == members[0] else n for n in names if n not in members[1:]]
    sides = (", ".join(f"{n}={side.value_of(n)}" for n in names) for side in (before, after))
    first, second = (side or "the same toggles" for side in sides)
    return first, second


def said_toggles(toggles: Mapping[str, str]) -> str:
    """The toggles that are not off, in words: `copy_stream=own, fuse=on, all else off`."""
    off = Toggles().to_dict()
    off |= folded(off)
    on = [f"{name}={value}" for name, value in folded(toggles).items() if off.get(name) != value]
    return ", ".join([*on, "all else off"]) if on else "everything off"
