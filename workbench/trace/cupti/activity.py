"""Records of CUPTI as plain tuples, and whether some of them are what a command issues. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.backend.base import KernelName

KERNEL, COPY, MEMSET = "kernel", "copy", "memset"  # the device's
DRIVER, RUNTIME, SYNC = "driver", "runtime", "sync"  # the host's
COUNTED = (KERNEL, COPY)  # a memset is cuBLAS's or the allocator's: no command asks for one

# What a device does for a command, in order: a kernel, a copy's bytes, or None for a product of
# cuBLAS, which is one kernel or more of any name.
Want = KernelName | int | None


class Activity(NamedTuple):
    """One activity record. Times are ns of CUPTI's clock, 0 where CUPTI could not tell.

    name: of the kernel, of the function called, or of the kind of synchronization. correlation:
    the call's number, the same in the call and in what it started. stream: CUPTI's number of the
    stream, -1 where there is none. device: its number. node: CUPTI's number of the node, of what
    runs in a graph; else 0. dims: of a kernel, its grid (x, y, z) and its block (x, y, z).
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
    dims: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.name}{_dims(self.dims)}"


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
            return f"{found[at] if at < len(found) else 'nothing'} instead of {describe(want)}"
        at, any_more = at + 1, 0
    rest = len(found) - at
    if rest < any_more:
        return f"{rest} records for {any_more} products"
    return f"{rest} records too many" if rest and not any_more else ""


def fits(row: Activity, want: KernelName | int) -> bool:
    if isinstance(want, KernelName):
        return row.kind == KERNEL and row.name == want.function
    return row.kind == COPY and row.nbytes == want


def describe(want: Want) -> str:
    """`tensor_product (grid 8x1x1, block 384x1x1)`"""
    if isinstance(want, KernelName):
        return f"{want.function}{_dims(want.dims)}"
    return "a product" if want is None else str(want)


def _dims(dims: Sequence[int]) -> str:
    grid, block = ("x".join(map(str, some)) for some in (dims[:3], dims[3:]))
    return f" (grid {grid}, block {block})" if dims else ""


def named(rows: Sequence[Activity], expected: Sequence[Want]) -> list[Activity]:
    """The records of a command, in order, with the names of the kernels that it launched.

    CUPTI can give a kernel the name that a kernel of an unloaded module had ("Fixed stale kernel
    names in activity records after module reloads", NVIDIA says of CUPTI in CUDA 13.4 Update 1). So
    a record is known by its command, its rank among the command's kernels, its grid and its block.
    Where these are a launch's, the record gets that launch's name. Behind products of cuBLAS ranks
    are counted from the end, because nobody knows how many kernels a product has.
    """
    made = list(rows)
    at = [i for i, row in enumerate(made) if row.kind == KERNEL]
    wants = [want for want in expected if not isinstance(want, int)]
    if len(at) == len(wants):
        ranked = [*zip(at, wants, strict=True)]
    elif len(at) > len(wants) and None in wants:
        back = wants[::-1]
        first, last = wants[: wants.index(None)], back[: back.index(None)]
        ranked = [*zip(at, first, strict=False), *zip(at[::-1], last, strict=False)]
    else:
        ranked = []
    for i, want in ranked:
        if want is not None and want.function and want.dims and want.dims == made[i].dims:
            made[i] = made[i]._replace(name=want.function)
    return made
