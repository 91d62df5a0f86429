"""What a work asks of its device: looked at quickly, to be compared with what a plan has recorded.

Equal is strict: every function, grid, shape, stride, parameter and address. A look takes a
command's arguments as bytes. They are told apart into addresses and values where two works differ,
and nowhere else.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from workbench.backend.issued import Issued


class Identity(NamedTuple):
    """A work as it was when it was looked at.

    same: `Issued.same` of the work and of every command in it. Of each part: pointers, which of its
    fields are addresses; fields, its arguments, 8 bytes each.
    """

    same: tuple[Hashable, ...]
    pointers: tuple[tuple[int, ...], ...]
    fields: tuple[bytes, ...]


def changed(before: Identity | None, now: Identity | None) -> list[int] | None:
    """The parts with other addresses, where nothing else differs; None where anything may."""
    if before is None or now is None:
        return None
    if before.same != now.same or before.pointers != now.pointers:
        return None
    fields = enumerate(zip(before.fields, now.fields, strict=True))
    found = [i for i, (old, new) in fields if old != new]
    for i in found:
        if _values(before, i) != _values(now, i):
            return None
    return found


def _values(of: Identity, part: int) -> list[int]:
    """The arguments of a part, with 0 in the stead of each address."""
    fields = array("q", of.fields[part]).tolist()
    for i in of.pointers[part]:
        fields[i] = 0
    return fields


class Looks:
    """The looks at one work: one for a uid and a landing, and each time anew for uid 0.

    A patch of a work that says which parts it moves is looked for there alone.
    """

    __slots__ = ("_found", "_uid")

    def __init__(self) -> None:
        self._uid = 0
        self._found: dict[Hashable, tuple[int, Identity]] = {}  # by landing, each with its uid

    def of(
        self, work: Issued, uid: int, moves: Sequence[int] = (), landing: Hashable = 0
    ) -> Identity:
        """The work as it is now. uid, moves, landing: as `Plannable` has them."""
        if not uid or (uid != self._uid and not (self._uid and moves)):
            self._found.clear()
        self._uid = uid
        known, found = self._found.get(landing, (0, None))
        if found is not None and known == uid:
            return found
        if found is not None:
            fields = list(found.fields)
            for part in moves:
                fields[part] = _fields(work.parts[part])
            found = found._replace(fields=tuple(fields))
        else:
            fields = [_fields(part) for part in work.parts]
            other = next(iter(self._found.values()), None)  # of another landing
            found = Identity(
                *(_same(work), tuple([_pointers(part) for part in work.parts]))
                if other is None else other[1][:2], tuple(fields),
            )  # fmt: skip
        self._found[landing] = uid, found
        return found


def _same(issued: Issued) -> tuple[Hashable, ...]:
    """What makes `issued` the same work but for arguments, in one flat tuple."""
    found: list[Hashable] = [issued.same]
    for part in issued.parts:
        if part.parts:
            found += [len(part.parts), *_same(part)]
        else:
            found.append(part.same)
    return tuple(found)


def _fields(issued: Issued) -> bytes:
    if not issued.parts:
        return issued.block.taken()
    return b"".join([_fields(part) for part in issued.parts])


def _pointers(issued: Issued) -> tuple[int, ...]:
    """Which fields of all its commands, one behind the other, are addresses."""
    if not issued.parts:
        return issued.block.pointers
    each = [_pointers(part) for part in issued.parts]
    firsts = accumulate([len(_fields(part)) // 8 for part in issued.parts], initial=0)
    return tuple([first + i for first, numbers in zip(firsts, each, strict=False) for i in numbers])
