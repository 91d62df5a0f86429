"""What a work is: looks at it are equal exactly where its commands are, and are taken anew exactly
where something may have changed."""

from __future__ import annotations

import ctypes
from array import array
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from workbench.backend.cpu.device.ring import MemoryBlock
from workbench.backend.cuda.device.graph_nodes import GraphArguments
from workbench.backend.issue.issued import Issued, Looks, Plannable, Words, changed, together

POINTERS = (0, 2)
MOST = (1 << 63) - 1
numbers = st.one_of(st.integers(0, 2), st.sampled_from([-1, 1 << 40, MOST, -MOST - 1]))
commands = st.tuples(st.sampled_from("ab"), st.lists(numbers, min_size=3, max_size=4))
described = st.lists(st.lists(commands, min_size=1, max_size=3), min_size=1, max_size=4)
KINDS = st.sampled_from(["words", "memory", "graph"])


def block(kind: str, fields: list[int]) -> Any:
    if kind == "words":
        return Words(list(fields), POINTERS)
    if kind == "memory":
        return MemoryBlock(array("q", [9, 1, len(fields), *fields]), POINTERS, 3, len(fields))
    both = (ctypes.c_int64 * (2 * len(fields)))(*fields)
    return GraphArguments(both, len(fields), POINTERS, 77, (1, 1))


def work_of(parts: list[list[tuple[str, list[int]]]], kind: str, uid: int = 0) -> Plannable:
    made = [together([Issued(list, (n,), block(kind, fields)) for n, fields in p]) for p in parts]
    return Plannable(list, ("replay",), parts=tuple(made), uid=uid)


@given(described, described, st.tuples(KINDS, KINDS), st.data())
def test_looks_are_equal_exactly_where_keys_and_addresses_are(one, other, kinds, data):
    """Of works that have nothing to do with each other, and of some that nearly are the same."""
    if data.draw(st.booleans()):
        other = [[(name, list(fields)) for name, fields in part] for part in one]
        _, fields = data.draw(st.sampled_from(data.draw(st.sampled_from(other))))
        fields[data.draw(st.integers(0, len(fields) - 1))] = data.draw(numbers)
    here, there = work_of(one, kinds[0]), work_of(other, kinds[1])
    a, b = here.identity, there.identity
    if [*map(len, one)] != [*map(len, other)]:  # the same commands in other parts are other work
        assert a != b and changed(a, b) is None
        return
    assert (a == b) == (here.key == there.key and here.addresses == there.addresses)
    moved = changed(a, b)
    assert (moved is not None) == (here.key == there.key)
    if moved is not None:
        pairs = enumerate(zip(here.parts, there.parts, strict=True))
        assert moved == [i for i, (x, y) in pairs if x.addresses != y.addresses]


@given(described, KINDS, st.data())
def test_a_look_is_what_the_work_is_now(parts, kind, data):
    """Whatever is patched between looks, if the uid says so: one of its own, or 0. A uid that stays
    is not looked at again; another landing is, and shares what cannot differ."""
    work, n = work_of(parts, kind, uid=1), len(parts)
    landing, uid = SimpleNamespace(now=0), 1
    work.landings = (landing,)
    if data.draw(st.booleans()):
        work.moves = tuple(data.draw(st.sets(st.integers(0, n - 1))))
    for _ in range(data.draw(st.integers(1, 12))):
        landing.now = data.draw(st.integers(0, 2))
        if data.draw(st.booleans()):
            part = work.parts[data.draw(st.sampled_from(work.moves or range(n)))]
            leaf = data.draw(st.sampled_from(part.parts or (part,)))
            leaf.block[data.draw(st.sampled_from(POINTERS if work.moves else (0, 1, 2)))] = (
                data.draw(numbers)
            )
            uid += 1
            work.uid = uid if work.moves else data.draw(st.sampled_from([0, uid]))
        found = work.identity
        assert found == Looks().of(work, 0)
        assert (work.identity is found) == (work.uid != 0)
        if work.uid:
            landing.now += 3
            assert work.identity.same is found.same and changed(found, work.identity) == []
