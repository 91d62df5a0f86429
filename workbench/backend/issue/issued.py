"""A prepared command: an object that can be called, compared with another, and patched.

The identity of a work tells whether its plan still fits: every function, grid, shape, stride,
parameter and address. A look takes the arguments of a command as bytes. Only where two works differ
are the bytes sorted into addresses and values.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple


class Address(int):
    """An address among arguments that are otherwise values. Adding an offset gives an Address."""

    __slots__ = ()

    def __add__(self, offset: int) -> Address:
        return Address(int(self) + offset)

    __radd__ = __add__


class Block:
    """The argument block of a prepared command: fields of 8 bytes, patchable between two calls. A
    patched field holds for every later call.

    pointers: the numbers of the fields that are addresses. Other fields are values, a float as its
        bits.
    """

    __slots__ = ("pointers",)
    pointers: tuple[int, ...]

    # no ABC: to ask for its class would be slow
    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, field: int) -> int:
        raise NotImplementedError

    def __setitem__(self, field: int, value: int) -> None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(len(self)))

    def held(self, field: int) -> tuple[Any, int]:
        """The object that holds a field, and the field's number there: for patches of every
        token."""
        return self, field

    def taken(self) -> bytes:
        """All fields as they are now, 8 bytes each."""
        return array("q", self).tobytes()


class Words(Block):
    """A Block in memory that the command reads: `words`, a mutable sequence of int64."""

    __slots__ = ("_words",)

    def __init__(self, words: Any, pointers: tuple[int, ...]):
        self._words = words
        self.pointers = pointers

    def __len__(self) -> int:
        return len(self._words)

    def __iter__(self) -> Iterator[int]:
        return map(int, self._words)

    def __getitem__(self, field: int) -> int:
        return int(self._words[field])

    def __setitem__(self, field: int, value: int) -> None:
        self._words[field] = value

    def held(self, field: int) -> tuple[Any, int]:
        return self._words, field


EMPTY: Block = Words([], ())


@dataclass(slots=True, eq=False)
class Issued:
    """One command, ready to be issued as often as wanted.

    call: issues it.
    same: equal for two commands that do the same work, apart from arguments (function, grid,
        shapes, strides, parameters of the op).
    block: the arguments, which `call` reads when it runs.
    parts: of a launch of several kernels, each kernel.
    """

    call: Callable[[], Any]
    same: tuple[Hashable, ...]
    block: Block = EMPTY
    parts: tuple[Issued, ...] = ()

    def __call__(self) -> None:
        self.call()

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Equal for two commands that do the same work, at whatever addresses: `same` and every
        argument that is no address."""
        if self.parts:
            return (*self.same, *(part.key for part in self.parts))
        fields: list[int | None] = [*self.block]
        for i in self.block.pointers:
            fields[i] = None
        return (*self.same, *fields)

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses among the arguments, in the block's order."""
        if self.parts:
            return tuple([a for part in self.parts for a in part.addresses])
        return tuple([self.block[i] for i in self.block.pointers])


# identity -------------------------------------------------------------------------------------


class Identity(NamedTuple):
    """A work as it was when it was looked at. Two are equal only if every function, grid, shape,
    stride, parameter and address is.

    same: `Issued.same` of the work and of every command in it.
    pointers: for each part, which of its fields are addresses.
    fields: for each part, its arguments, 8 bytes each.
    """

    same: tuple[Hashable, ...]
    pointers: tuple[tuple[int, ...], ...]
    fields: tuple[bytes, ...]


def changed(before: Identity | None, now: Identity | None) -> list[int] | None:
    """The parts with other addresses, where nothing else differs; None where more may differ."""
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
    """The arguments of a part, with 0 in place of each address."""
    fields = array("q", of.fields[part]).tolist()
    for i in of.pointers[part]:
        fields[i] = 0
    return fields


class Looks:
    """The looks at one work. A look is kept for each landing as long as the uid is the same. Uid 0
    is looked at anew every time.

    After a patch of a work that says which parts a patch moves, only these parts are looked at.
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
    """`Issued.same` of a command and of all commands in it, in one flat tuple."""
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
    """Which fields are addresses, counted through all commands of `issued` in a row."""
    if not issued.parts:
        return issued.block.pointers
    each = [_pointers(part) for part in issued.parts]
    firsts = accumulate([len(_fields(part)) // 8 for part in issued.parts], initial=0)
    return tuple([first + i for first, numbers in zip(firsts, each, strict=False) for i in numbers])


# plans ----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, weakref_slot=True)
class Plannable(Issued):
    """The commands of a plan, as parts. Called, it issues them one by one. (`bind.plannable`)

    backend: captures the plan.
    stream: the stream that the plan is launched on.
    streams: the stream of each part.
    landings: where results land, in one of several blocks. Each block has a plan of its own.
    gate: recorded in place of the first part (`backend/plan/gate.py`).
    end: recorded after the last part, if anything is.
    queue: calls whatever launches the plan or issues its parts, and counts that. None where nobody
        counts.
    moves: the parts that a patch gives other addresses, where it changes nothing else.
    uid: a number for the commands with these arguments; every patch gives a new one. 0 where
        nobody can tell whether they changed.
    """

    backend: Any = None
    stream: int = 0
    streams: tuple[int, ...] = ()
    landings: tuple[Any, ...] = ()
    gate: Issued | None = None
    end: Issued | None = None
    queue: Callable[[Callable[[], Any]], Any] | None = None
    moves: tuple[int, ...] = ()
    uid: int = 0
    looks: Looks = field(default_factory=Looks, init=False, repr=False)

    @property
    def landing(self) -> tuple[int, ...]:
        """The numbers of the blocks where results land next."""
        return tuple([landing.now for landing in self.landings])

    @property
    def identity(self) -> Identity:
        """The identity of the work with its results where they land next. Quick where its uid is
        known."""
        return self.looks.of(self, self.uid, self.moves, self.landing)

    @property
    def recorded(self) -> tuple[Issued, ...]:
        """The parts as a device records them."""
        return self.parts if self.gate is None else (self.gate, *self.parts[1:])


def in_order(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """One callable that calls `calls`, first to last."""
    if len(calls) == 1:
        return calls[0]
    every = tuple(calls)

    def one_by_one() -> None:
        for call in every:
            call()

    return one_by_one


def together(parts: Sequence[Issued], same: tuple[Hashable, ...] = ()) -> Issued:
    """One command that issues `parts`, first to last."""
    if len(parts) == 1 and not same:
        return parts[0]
    return Issued(in_order([part.call for part in parts]), same, EMPTY, tuple(parts))


def pointers_of(args: Sequence[int | float]) -> tuple[int, ...]:
    """The numbers of the arguments that are an `Address`."""
    return tuple([i for i, arg in enumerate(args) if type(arg) is Address])
