"""Which part of a plan a record belongs to: of random plans, however their copies lie in time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from workbench.trace.activity import COPY, COUNTED, KERNEL, MEMSET, Activity, Want
from workbench.trace.parted import parted

NAMES = ["norm", "product", "rope"]
launches = st.lists(st.sampled_from([*NAMES, None]), max_size=3)
copies = st.sampled_from([[64], [4096]])
plans = st.lists(st.one_of(launches, launches, copies, st.just([])), min_size=1, max_size=12)


def recorded(
    wanted: Sequence[Sequence[Want]], chance: random.Random
) -> tuple[list[Activity], list[int], dict[Activity, int]]:
    """Records of a replay, the part of each node, and the part of each record. A product has
    kernels of cuBLAS's own, and maybe a memset in front. Copies are on a stream of their own."""
    rows: list[Activity] = []
    nodes: list[int] = []
    clocks = {COPY: chance.randrange(500), KERNEL: 0}
    owner: dict[Activity, int] = {}

    def ran(part: int, kind: str, name: str, nbytes: int = 0) -> None:
        clock = COPY if kind == COPY else KERNEL
        start = clocks[clock] = clocks[clock] + chance.randrange(1, 50)
        nodes.append(part)
        row = Activity(kind, name, start, start + 40, 7, 13, nbytes, node=100 + len(nodes))
        rows.append(row)
        owner[row] = part

    for part, wants in enumerate(wanted):
        for want in wants:
            if isinstance(want, int):
                ran(part, COPY, COPY, want)
            elif want is not None:
                ran(part, KERNEL, want)
            else:
                if chance.random() < 0.3:
                    ran(part, MEMSET, MEMSET, 4)
                for i in range(chance.randrange(1, 4)):
                    ran(part, KERNEL, f"gemm_{i}")
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
def test_parts_issued_one_by_one_are_told_by_names_where_products_stand_alone(wanted, chance):
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
