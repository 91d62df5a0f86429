"""Extents by each way to grow, when masked cells are looked for (the launch gate of #14924), and
the blocks of cells that attention visits: the host's count, a slow one, the kernel's own."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.attention import Case, attention_case, causal, parted, skipping
from tests.backend.cpu.kernel_runs import words
from tests.backend.cpu.test_cpu_attention import CASES, PARTS, WAYS, drawn_mask
from tests.profiles import examples
from workbench.backend.cpu import compile as compiler
from workbench.backend.cpu.kernels import op_table
from workbench.backend.cpu.kernels.attention import attention_body
from workbench.backend.cpu.kernels.kv_shares import CELLS, TOKENS
from workbench.backend.cpu.kernels.vector import Emit
from workbench.config import EngineConfig
from workbench.engine.cache import visits as kv_visits
from workbench.engine.cache.extent import way_of
from workbench.engine.cache.growth import Growth, geometric, growth_of
from workbench.graph.ir import Node, StepShape, Tensor

FEW = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
GROWTHS = [("step", 1, range(1, 65)), ("full", 4, [16]), ("geometric", 1, FEW),
           ("geometric", 4, FEW[:8])]  # fmt: skip


@pytest.mark.parametrize(("growth", "regions", "wanted"), GROWTHS)
def test_extents_of_a_cache_that_fills(growth, regions, wanted):
    config = EngineConfig(n_ctx=16384, n_seqs=4, n_kv_pad=256)
    found = growth_of(wb.Toggles(graph_reuse="set_rows", kv_growth=growth), config, regions)
    extents = dict.fromkeys(found.extent(n) for n in range(1, 16384 // regions + 1))
    assert [*extents] == [256 * i for i in wanted]


@given(st.integers(1, 5000), st.integers(1, 300), st.booleans())
def test_an_extent_is_whole_pads_and_not_beyond_the_end(n: int, pad: int, is_geometric: bool):
    most = -(-n // pad) * pad
    found = Growth(pad, most, is_geometric).extent(n)
    assert n <= found <= most and found % pad == 0
    few = geometric(n)
    assert n <= few < max(n + 1, 1.5 * n) and geometric(few) == few


GATES = [  # tokens, n_kv, sequences, regions; whether a gate opens; what auto does
    (1023, 2048, 1, False, False, "off"),  # too few tokens
    (1024, 2048, 1, False, True, "classes"),
    (1024, 2000, 1, False, False, "off"),  # cells that are no multiple of 256
    (1, 256, 1, True, False, "off"),  # one region is none apart
    (2, 256, 2, True, True, "off"),  # what would be saved is less than a launch
    (8, 8192, 8, False, False, "off"),  # sequences that share a region
    (1024, 2048, 8, False, True, "classes"),
    (4096, 4096, 4, True, True, "classes"),  # 1024 tokens of each
    (4096, 4096, 8, True, True, "tail"),
    (4096, 1024, 8, True, True, "off"),
]


@pytest.mark.parametrize(("n_tokens", "n_kv", "n_seqs", "regions", "opens", "auto"), GATES)
def test_a_gate_opens_by_size(n_tokens, n_kv, n_seqs, regions, opens, auto):
    shape = StepShape(n_tokens, 1, n_kv, n_seqs)
    for way in ("off", "tail", "classes"):
        assert way_of("reference", way, shape, regions) == (way if opens else "off")
        assert way_of("always", way, shape, regions) == way
        assert way_of("never", way, shape, regions) == "off"
    assert way_of("always", "in_loop", shape, regions) == "in_loop"  # it has no gate
    assert way_of("reference", "auto", shape, regions) == auto
    rows = n_tokens // (n_seqs if regions else 1)
    assert way_of("always", "auto", shape, regions) == ("classes" if rows >= 1024 else "tail")


# blocks that are visited -------------------------------------------------------------------------

REGIONED = {"graph_reuse": "set_rows", "kv_cache": "per_sequence", "skip_gate": "always"}


def firsts_of(case: Case) -> np.ndarray | None:
    return np.cumsum([0, *case.tokens[:-1]]) if case.regions else None


def halves(seen: np.ndarray) -> np.ndarray:
    return np.where(seen, 0, -np.inf).astype(np.float16)


COUNTER = np.zeros(1, np.int64)


@cache
def counting(*types: str):
    """The kernel for these types, that adds 1 to COUNTER at each tile."""

    def count(e: Emit) -> None:
        at = e.const("i64", int(COUNTER.ctypes.data))
        e.store(e.load("i64", at) + 1, at)

    return compiler.compile_kernel("counting", attention_body(*types, on_tile=count), keep=False)


def counted(node: Node, arrays: dict[Tensor, np.ndarray], n_parts: int) -> int:
    """How many tiles the kernel itself visits, of all kv heads."""
    COUNTER[0] = 0
    made = counting(*op_table.kernel_of(node)[1:])
    memory = {t: np.ascontiguousarray(a) for t, a in arrays.items()}
    memory[node.output] = np.empty(node.output.nbytes, np.uint8)
    scratch = np.zeros(max(1, op_table.scratch_bytes(node, n_parts)), np.uint8)
    block = words(
        op_table.arguments(node, lambda t: int(memory[t].ctypes.data), int(scratch.ctypes.data))
    )
    for part in range(n_parts):
        made.ctypes(int(block.ctypes.data), part, n_parts)
    return int(COUNTER[0])


@pytest.mark.parametrize("name", ["one token", "ragged", "many"])
def test_a_kernel_visits_the_blocks_that_are_counted(name):
    """With one part each kv head of a group is one walk, whatever the shares of the cells are."""
    case = CASES[name]
    for past in (0, case.n_kv // 3):
        mask = causal(case, past)
        mask[:, 40:110] = False  # an interior hole
        node, arrays, _ = attention_case(case, mask)
        for kv_parts, kernel in itertools.product(PARTS, ("tile", "vec")):
            own = parted(node, kv_parts, kernel)
            for way in WAYS:
                found = kv_visits.visited(halves(mask), way, firsts_of(case), kernel)
                n = counted(*skipping(own, arrays, way), 1)
                assert n == found.sum() * case.kv_heads, (way, kv_parts)


def slow(mask: np.ndarray, way: str, firsts: list[int]) -> list[list[bool]]:
    """A token and a cell at a time."""
    t, n_kv = mask.shape
    region = [max((f for f in firsts if f <= i), default=0) for i in range(t)]
    each: dict[tuple[int, int], list[int]] = {}
    for token in range(t):
        each.setdefault((token // TOKENS, region[token]), []).append(token)
    found = []
    for tokens in each.values():
        last = max((c for i in tokens for c in range(n_kv) if mask[i, c]), default=-1)
        row = []
        for begin in range(0, n_kv, CELLS):
            wide = begin // 64 * 64
            looked = {
                "off": True,
                "in_loop": mask[tokens, begin : begin + CELLS].any(),
                "tail": last >= 0 and begin < (last // 256 + 1) * 256,
                "classes": mask[tokens, wide : wide + 64].any(),
            }
            row.append(bool(looked[way]))
        found.append(row)
    return found


@given(st.data())
@settings(max_examples=examples(60))
def test_blocks_of_any_mask_are_those_of_a_slow_count(data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    regions, n_kv = data.draw(st.booleans()), data.draw(st.integers(1, 400))
    mask = drawn_mask(data, sum(tokens), n_kv)
    firsts = np.cumsum([0, *tokens[:-1]]) if regions else None
    for way in WAYS:
        wanted = slow(mask, way, [] if firsts is None else firsts.tolist())
        assert np.array_equal(kv_visits.visited(halves(mask), way, firsts), wanted), way


def of_steps(engine: wb.Engine, way: str, **more: str) -> kv_visits.VisitTable:
    """A prompt of 40 and one of 300 tokens, then a token of each."""
    a, b = ([3 + i % 500 for i in range(n)] for n in (40, 300))
    with engine.variant(wb.Toggles(**REGIONED | {"skip_masked_kv": way} | more)) as own:
        with wb.kv_visits(own) as found:
            own.submit([(0, a, "last"), (1, b, "last")]).wait()
            own.submit([(0, [5], "last"), (1, [6], "last")]).wait()
        own.submit([(0, [7], "last"), (1, [8], "last")]).wait()
    return found


def test_a_step_says_how_many_blocks_it_visited(tiny_model):
    """Every way visits fewer than all; nothing is counted after the body, or skipped where the gate
    is closed."""
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="null", n_ctx=1024, n_seqs=2,
        toggles=wb.Toggles(**REGIONED),
    ) as engine:  # fmt: skip
        n_layer, made = engine.model.n_layer, {way: of_steps(engine, way) for way in WAYS}
        closed = of_steps(engine, "tail", kv_cache="unified", skip_gate="reference")
    off = made["off"]
    assert len(off) == 2 * n_layer and off.skipped == 0
    assert [row.layer for row in off[:n_layer]] == list(range(n_layer))
    assert all({row.way for row in found} == {way} for way, found in made.items())
    assert {found.visited + found.skipped for found in made.values()} == {off.visited}
    n = [made[way].visited for way in ("in_loop", "classes", "tail")]
    assert n == sorted(n) and n[-1] < off.visited
    (_, decode) = made["tail"].steps().to_dict("records")
    assert decode["tokens"] == 2 and decode["regions"] == 2 and decode["n_kv"] == 512
    # 41 and 301 cells: one and two steps of 256 cells, of 16 each
    assert decode["visited"] == n_layer * (16 + 32) and decode["skipped"] == n_layer * 16
    assert {row[2] for row in closed} == {"off"} and closed.skipped == 0
    assert {row.n_regions for row in closed} == {0}
