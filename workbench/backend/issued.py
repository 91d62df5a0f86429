"""A prepared command: an object that can be called, compared with another, and patched."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from workbench.backend.identity import Identity, Looks


class Address(int):
    """An address among arguments that are otherwise values. Plus an offset it is one, too."""

    __slots__ = ()

    def __add__(self, offset: int) -> Address:
        return Address(int(self) + offset)

    __radd__ = __add__


class Block(Protocol):
    """The argument block of a prepared command: fields of 8 bytes, patchable between two calls.

    pointers: numbers of the fields that are addresses. Other fields are values, a float as its
    bits. A patched field holds for every later call.
    """

    pointers: tuple[int, ...]

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def __getitem__(self, field: int) -> int: ...

    def __setitem__(self, field: int, value: int) -> None: ...

    def held(self, field: int) -> tuple[Any, int]:
        """What holds a field, and its number there: to patch it for every token."""

    def taken(self) -> bytes:
        """All fields as they are now, 8 bytes each."""


def as_bytes(fields: Iterable[int]) -> bytes:
    """Fields of a block, 8 bytes each."""
    return array("q", fields).tobytes()


class Words:
    """A Block in memory that the command reads: `words`, a mutable sequence of int64."""

    __slots__ = ("_words", "pointers")

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

    def taken(self) -> bytes:
        return as_bytes(self)


EMPTY: Block = Words([], ())


@dataclass(slots=True, eq=False)
class Issued:
    """One command, ready to be issued as often as wanted.

    call: issues it, in an executor's loop. same: what makes two commands the same work, apart from
    arguments (function, grid, shapes, strides, parameters of the op). block: the arguments, which
    `call` reads when it runs. parts: each kernel of a launch of several.
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


def _at_once(issue: Callable[[], Any]) -> None:
    """Calls what queues commands, which nobody counts."""
    issue()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Plannable(Issued):
    """The commands of a plan, as parts. Called, it issues them one by one. (`bind.plannable`)

    backend: captures it.
    stream: the plan is launched on it; streams: of each part.
    landings: where results land, in one of several blocks. Each block has a plan of its own.
    gate: what is recorded in place of the first part (`backend/gate.py`).
    end: what is recorded after the last part, if anything.
    queue: calls what launches the plan or issues its parts, and counts that where somebody does.
    moves: the parts that patches give other addresses, where they change nothing else.
    uid: of the commands with these arguments, another after every patch; 0 where nobody can tell.
    """

    backend: Any = None
    stream: int = 0
    streams: tuple[int, ...] = ()
    landings: tuple[Any, ...] = ()
    gate: Issued | None = None
    end: Issued | None = None
    queue: Callable[[Callable[[], Any]], Any] = _at_once
    moves: tuple[int, ...] = ()
    uid: int = 0
    looks: Looks = field(default_factory=Looks, init=False, repr=False)

    @property
    def landing(self) -> tuple[int, ...]:
        """The numbers of the blocks where results land next."""
        return tuple([landing.now for landing in self.landings])

    @property
    def identity(self) -> Identity:
        """What it asks of the device where its results land next; quick where its uid is known."""
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
