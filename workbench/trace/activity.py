"""Records of CUPTI as plain tuples, and whether some of them are what a command issues. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

KERNEL, COPY, MEMSET = "kernel", "copy", "memset"  # the device's
DRIVER, RUNTIME, SYNC = "driver", "runtime", "sync"  # the host's
COUNTED = (KERNEL, COPY)  # a memset is cuBLAS's or the allocator's: no command asks for one

# What a device does for a command, in order: a kernel's name, a copy's bytes, or None for a product
# of cuBLAS, which is one kernel or more of any name.
Want = str | int | None


class Activity(NamedTuple):
    """One activity record. Times are ns of CUPTI's clock, 0 where CUPTI could not tell.

    name: of the kernel, of the function called, or of the kind of synchronization. correlation:
    the call's number, the same in the call and in what it started. stream: CUPTI's number of the
    stream, -1 where there is none. device: its number. node: CUPTI's number of the node, of what
    runs in a graph; else 0.
    """

    kind: str
    name: str
    start: int
    end: int
    correlation: int
    stream: int = -1
    nbytes: int = 0
    device: int = 0
    node: int = 0


def differs(rows: Sequence[Activity], expected: Sequence[Want]) -> str:
    """How the kernels and copies recorded for a command differ from what it issues, or nothing."""
    found = [r for r in rows if r.kind in COUNTED]
    least = len(expected)
    if len(found) < least or (len(found) > least and None not in expected):
        more = " or more" if None in expected else ""
        return f"{len(found)} records for {least}{more}"
    at = any_more = 0  # products passed since the last kernel with a name of ours
    for want in expected:
        if want is None:
            any_more += 1
            continue
        at += any_more
        if any_more:  # a product may have more kernels than one
            while at < len(found) and not fits(found[at], want):
                at += 1
        if at >= len(found) or not fits(found[at], want):
            there = f"{found[at].kind} {found[at].name}" if at < len(found) else "nothing"
            return f"{there} instead of {want}"
        at, any_more = at + 1, 0
    rest = len(found) - at
    if rest < any_more:
        return f"{rest} records for {any_more} products"
    return f"{rest} records too many" if rest and not any_more else ""


def fits(row: Activity, want: str | int) -> bool:
    if isinstance(want, str):
        return row.kind == KERNEL and row.name == want
    return row.kind == COPY and row.nbytes == want
