"""The cuda kernel that draws tokens, run on this machine's CPU (`on_host.py`): the host draws the
same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import draws
from tests.backend.cuda import on_host
from tests.draws import LEVELS, Draw
from tests.profiles import examples
from workbench.backend.cuda.kernels import op_table
from workbench.backend.cuda.kernels.kernel import Kernel, Operands
from workbench.model.sampler import Sampling

pytestmark = pytest.mark.skipif(on_host.COMPILER is None, reason="no g++")


def drawn_by_kernel(asked: list[Draw], seed: int = 0) -> list[int]:
    node, arrays = draws.as_node(asked)
    out = node.output
    rooms = {t: on_host.aligned(a) for t, a in arrays.items()}
    rooms[out] = on_host.aligned(np.full(out.nbytes, 0xFF, np.uint8))
    at = Operands(lambda tensor: int(rooms[tensor][1].ctypes.data), 0, 0)
    for work in op_table.launches(node, at):
        assert isinstance(work, Kernel)
        on_host.run(work, seed)
    return rooms[out][1].view(np.int32).reshape(-1, 2)[:, 0].tolist()


@pytest.mark.slow  # a block of 1,024 threads takes half a second
@settings(max_examples=examples(20))
@given(draws.several(st.sampled_from([1, 2, 5, 60, 64]), 2), st.integers(0, 3))
def test_a_draw_is_the_hosts(asked, seed):
    assert drawn_by_kernel(asked, seed) == [each.token for each in asked]


@pytest.mark.parametrize("s", [Sampling(0.8, 40, 0.95, 0.05), Sampling(100.0, 0, 1.0)], ids=str)
def test_a_draw_at_an_edge_is_the_hosts(s):
    row = np.array([0.0, -37.0, -1.0, 0.0, -2.9, -3.0], np.float32)
    asked = [Draw(row, s, 0.999)]
    assert drawn_by_kernel(asked) == [each.token for each in asked]


HOW = [
    Sampling(1.0, 0, 1.0), Sampling(0.7, 5000, 0.999), Sampling(3.0, 0, 0.9, 0.02),
    Sampling(1e-30, 4000, 1.0), Sampling(100.0, 3, 1.0), Sampling(1.0, 2100, 0.5, 1e-12),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*LEVELS, "normal"])
def test_many_survivors_are_drawn_as_the_host_draws_them(kind):
    """More than fit the sorted list, so the kernel looks for places in the whole row."""
    rng, n, asked = np.random.default_rng(7), 8192, []
    for s in HOW:
        row = rng.normal(0, 3, n) if kind == "normal" else rng.choice(LEVELS[kind], n)
        asked.append(Draw(row.astype(np.float32), s, float(np.float32(rng.random()))))
    assert drawn_by_kernel(asked) == [each.token for each in asked]
