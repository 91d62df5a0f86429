"""Which part of a plan a record belongs to: of random plans, however their copies lie in time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from workbench.backend.base import KernelName
from workbench.trace.cupti.activity import COPY, COUNTED, KERNEL, MEMSET, Activity, Want, named
from workbench.trace.cupti.parted import parted

KERNELS = [
    KernelName(name, False, (8 + i, 1, 1, 32, 1, 1))
    for i, name in enumerate(("norm", "product", "rope"))
]
GEMM_DIMS = (7, 7, 1, 128, 1, 1)
launches = st.lists(st.sampled_from([*KERNELS, None]), max_size=3)
copies = st.sampled_from([[64], [4096]])
plans = st.lists(st.one_of(launches, launches, copies, st.just([])), min_size=1, max_size=12)


def recorded(
    wanted: Sequence[Sequence[Want]], chance: random.Random
) -> tuple[list[Activity], list[int], dict[Activity, int]]:
    """Records of a replay, the part of each node, and the part of each record. A product has some
    kernels of cuBLAS's own, and maybe a memset before. Copies are on a stream of their own."""
    rows: list[Activity] = []
    nodes: list[int] = []
    clocks = {COPY: chance.randrange(500), KERNEL: 0}
    owner: dict[Activity, int] = {}

    def ran(part: int, kind: str, name: str, nbytes: int = 0, dims: tuple[int, ...] = ()) -> None:
        clock = COPY if kind == COPY else KERNEL
        start = clocks[clock] = clocks[clock] + chance.randrange(1, 50)
        nodes.append(part)
        row = Activity(kind, name, start, start + 40, 7, 13, nbytes, 0, 100 + len(nodes), dims)
        rows.append(row)
        owner[row] = part

    for part, wants in enumerate(wanted):
        for want in wants:
            if isinstance(want, int):
                ran(part, COPY, COPY, want)
            elif want is not None:
                assert want.function is not None
                ran(part, KERNEL, want.function, dims=want.dims)
            else:
                if chance.random() < 0.3:
                    ran(part, MEMSET, MEMSET, 4)
                for i in range(chance.randrange(1, 4)):
                    ran(part, KERNEL, f"gemm_{i}", dims=GEMM_DIMS)
    return rows, nodes, owner


@given(plans, st.randoms(use_true_random=False), st.booleans())
def test_every_record_of_a_replay_finds_its_part(wanted, chance, late):
    """In whatever order CUPTI delivers; late: it knows no order in time, but that of the nodes."""
    rows, nodes, owner = recorded(wanted, chance)
    if late:
        owner = {row._replace(start=1000 - row.start): part for row, part in owner.items()}
        rows = list(owner)
    chance.shuffle(rows)
    found, reason = parted(rows, wanted, nodes)
    if late and reason == "" and {r: p for p, of in found.items() for r in of} != owner:
        return  # the names fit in the order of time, too
    assert reason == ""
    assert {row: part for part, of_part in found.items() for row in of_part} == owner


@given(plans, st.randoms(use_true_random=False))
def test_parts_issued_one_by_one_are_told_by_names(wanted, chance):
    rows, _, owner = recorded(wanted, chance)
    found, reason = parted([row._replace(node=0) for row in rows], wanted, None)
    assert reason == ""
    told = {row: part for part, of_part in found.items() for row in of_part}
    flat = [(part, want) for part, wants in enumerate(wanted) for want in wants
            if not isinstance(want, int)]  # fmt: skip
    near = {
        part
        for (one, a), (two, b) in pairwise(flat)
        if a is None and b is None
        for part in (one, two)
    }  # products in a row: nobody knows how many kernels each has
    for row, part in owner.items():
        if row.kind in COUNTED and part not in near:
            assert told[row._replace(node=0)] == part


@given(plans, st.randoms(use_true_random=False), st.data())
def test_a_record_too_few_is_never_taken_for_another(wanted, chance, data):
    rows, nodes, _ = recorded(wanted, chance)
    if rows:
        rows.remove(data.draw(st.sampled_from(rows)))
        found, reason = parted(rows, wanted, nodes)
        assert not found and reason == f"{len(rows)} records for {len(nodes)} nodes"


@given(plans, st.randoms(use_true_random=False))
def test_kernels_with_names_of_others_are_told(wanted, chance):
    """Some have a name of another kernel. Only between products of cuBLAS does it stay."""
    rows, nodes, owner = recorded(wanted, chance)
    names = [kernel.function for kernel in KERNELS if kernel.function]
    stale = {
        row: row._replace(name=chance.choice(names))
        if row.name in names and chance.random() < 0.5 else row
        for row in rows
    }  # fmt: skip
    between = {
        part
        for part, wants in enumerate(wanted)
        for i, want in enumerate(wants)
        if want is not None and None in wants[:i] and None in wants[i:]
    }
    found, reason = parted(chance.sample(list(stale.values()), len(rows)), wanted, nodes)
    if reason:
        assert between
        return
    told = {row: part for part, of_part in found.items() for row in of_part}
    assert all(told[row] == part for row, part in owner.items() if part not in between)


def test_what_ran_for_a_capture_is_no_node_of_the_graph():
    """And a part begins behind the last kernel of the part that it waits for."""
    norm, product, rope = ([kernel] for kernel in KERNELS)
    rows = [
        Activity(KERNEL, k.function or "", at, at + 5, 7, 40, node=501 + n, dims=k.dims)
        for n, (k, at) in enumerate(zip((KERNELS[0], *KERNELS), (10, 20, 30, 40), strict=True))
    ]
    wants, nodes = [norm * 2, product, rope], [0, 0, 1, 2]
    outside = rows[0]._replace(node=0)
    assert parted([outside, *rows], wants, nodes)[0] == {0: rows[:2], 1: [rows[2]], 2: [rows[3]]}
    behind = [(), (0,), (1,)]
    assert parted(rows, wants, nodes, behind)[1] == ""
    early = [rows[0], rows[1]._replace(start=35), *rows[2:]]
    assert "it began before part 0" in parted(early, wants, nodes, behind)[1]


def test_a_name_is_given_only_to_what_was_launched_so():
    one, other = KERNELS[:2]
    row = Activity(KERNEL, "stale", 10, 20, 7, 13, dims=one.dims)
    assert [r.name for r in named([row], [one])] == ["norm"]
    for wants in ([other], [one, other], [None], [KernelName("norm", False)]):
        assert named([row], wants) == [row], wants
    assert named([row, row], [one]) == [row, row], "one too many"
