"""CUPTI records as plain tuples, and their comparison with the work that a command issues. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.backend.base import KernelName

KERNEL, COPY, MEMSET = "kernel", "copy", "memset"  # records of the device
DRIVER, RUNTIME, SYNC = "driver", "runtime", "sync"  # records of the host
COUNTED = (KERNEL, COPY)  # not memsets: cuBLAS and the allocator issue them, no command does

# A piece of a command's work on a device: a kernel, the bytes of a copy, or None for a product of
# cuBLAS, which is one or more kernels of any name.
Want = KernelName | int | None


class Activity(NamedTuple):
    """One activity record. Times are ns of CUPTI's clock, 0 where CUPTI does not know them.

    name: of the kernel, of the called function, or of the kind of synchronization.
    correlation: the number of the call. The call and the work that it started have the same number.
    stream: CUPTI's number of the stream; -1 without a stream.
    device: number of the device.
    node: for work in a graph CUPTI's number of the node, else 0.
    dims: for a kernel its grid (x, y, z) and its block (x, y, z).
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
    """How the kernels and copies recorded for a command differ from its work; empty where equal."""
    found = [r for r in rows if r.kind in COUNTED]
    least = len(expected)
    if len(found) < least or (len(found) > least and None not in expected):
        more = " or more" if None in expected else ""
        return f"{len(found)} records for {least}{more}"
    at = any_more = 0  # any_more: products since the last named kernel
    for want in expected:
        if want is None:
            any_more += 1
            continue
        at += any_more
        if any_more:  # a product may have several kernels
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
    """For messages: `tensor_product (grid 8x1x1, block 384x1x1)`."""
    if isinstance(want, KernelName):
        return f"{want.function}{_dims(want.dims)}"
    return "a product" if want is None else str(want)


def _dims(dims: Sequence[int]) -> str:
    grid, block = ("x".join(map(str, some)) for some in (dims[:3], dims[3:]))
    return f" (grid {grid}, block {block})" if dims else ""


def named(rows: Sequence[Activity], expected: Sequence[Want]) -> list[Activity]:
    """The records of a command, in order, with the names of the kernels that it launched.

    CUPTI can give a kernel the name of a kernel of an unloaded module ("Fixed stale kernel names in
    activity records after module reloads", NVIDIA says of CUPTI in CUDA 13.4 Update 1). So a record
    is matched by its command, its rank among the command's kernels, its grid and its block. Where
    these fit a launch, the record gets the name of that launch. After products of cuBLAS, ranks are
    counted from the end, because the number of a product's kernels is not known.
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
