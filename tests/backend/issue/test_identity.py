"""What a work is: looks at it are equal exactly where its commands are, and are taken anew exactly
where something may have changed."""

from __future__ import annotations

import ctypes
from array import array
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from workbench.backend.cpu.device.ring import KernelBlock
from workbench.backend.cuda.device.graph_nodes import GraphArguments
from workbench.backend.issue.issued import Issued, Looks, Plannable, Words, changed, together

POINTERS = (0, 2)
MOST = (1 << 63) - 1
numbers = st.one_of(st.integers(0, 2), st.sampled_from([-1, 1 << 40, MOST, -MOST - 1]))
blocks = st.lists(numbers, min_size=3, max_size=4)
KINDS = ("words", "memory", "graph")


def block(kind: str, fields: list[int]) -> Any:
    if kind == "words":
        return Words(list(fields), POINTERS)
    if kind == "memory":
        return KernelBlock(array("q", [9, 1, len(fields), *fields]), POINTERS, 3, len(fields))
    both = (ctypes.c_int64 * (2 * len(fields)))(*fields)
    return GraphArguments(both, len(fields), POINTERS, 77, (1, 1))


@st.composite
def parts(draw) -> list[list[tuple[str, list[int]]]]:
    one = st.tuples(st.sampled_from(["a", "b"]), blocks)
    return draw(st.lists(st.lists(one, min_size=1, max_size=3), min_size=1, max_size=4))


def work_of(described: list[list[tuple[str, list[int]]]], kind: str, uid: int = 0) -> Plannable:
    def nothing() -> None: ...

    made = [
        together([Issued(nothing, (name,), block(kind, fields)) for name, fields in part])
        for part in described
    ]
    return Plannable(nothing, ("replay",), parts=tuple(made), uid=uid)


def test_a_uid_that_stays_is_not_looked_at_again():
    """Another landing is, and shares what cannot differ."""
    work = work_of([[("a", [1, 2, 3])]], "words", uid=5)
    landing = SimpleNamespace(now=0)
    work.landings = (landing,)
    before = work.identity
    work.parts[0].block[0] = 9
    assert work.identity is before
    landing.now = 1
    assert changed(before, work.identity) == [0] and work.identity.same is before.same
    landing.now, work.uid = 0, 6
    assert work.identity != before and changed(before, work.identity) == [0]
    work.uid = 0
    assert work.identity is not work.identity


@given(parts(), parts(), st.data())
def test_looks_are_equal_exactly_where_keys_and_addresses_are(one, other, data):
    """Of works that have nothing to do with each other, and of some that nearly are the same."""
    kind = data.draw(st.sampled_from(KINDS))
    if data.draw(st.booleans()):
        other = [[(name, list(fields)) for name, fields in part] for part in one]
        part = data.draw(st.integers(0, len(one) - 1))
        fields = other[part][data.draw(st.integers(0, len(one[part]) - 1))][1]
        fields[data.draw(st.integers(0, len(fields) - 1))] = data.draw(numbers)
    here, there = work_of(one, kind), work_of(other, data.draw(st.sampled_from(KINDS)))
    a, b = here.identity, there.identity
    same_split = [len(part) for part in one] == [len(part) for part in other]
    if not same_split:  # the same commands in other parts are other work
        assert a != b and changed(a, b) is None
        return
    assert (a == b) == (here.key == there.key and here.addresses == there.addresses)
    moved = changed(a, b)
    assert (moved is not None) == (here.key == there.key)
    if moved is not None:
        pairs = enumerate(zip(here.parts, there.parts, strict=True))
        assert moved == [i for i, (x, y) in pairs if x.addresses != y.addresses]


@given(st.data())
def test_a_look_is_what_the_work_is_now(data):
    """Whatever is patched between looks, if the uid says so: one of its own, or 0."""
    described = data.draw(parts())
    work = work_of(described, data.draw(st.sampled_from(KINDS)), uid=1)
    landing, uid = SimpleNamespace(now=0), 1
    work.landings = (landing,)
    n = len(described)
    work.moves = (
        tuple(data.draw(st.sets(st.integers(0, n - 1)))) if data.draw(st.booleans()) else ()
    )
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            landing.now = data.draw(st.integers(0, 2))
        if data.draw(st.booleans()):
            part = data.draw(st.sampled_from(work.moves or range(n)))
            leaves = work.parts[part].parts or (work.parts[part],)
            leaf = data.draw(st.sampled_from(leaves))
            field = data.draw(st.sampled_from(POINTERS if work.moves else (0, 1, 2)))
            leaf.block[field] = data.draw(numbers)
            uid += 1
            work.uid = uid if work.moves else data.draw(st.sampled_from([0, uid]))
        assert work.identity == Looks().of(work, 0)
