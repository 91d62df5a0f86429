"""The debug arena of tests/gpu, on the host backend: it computes what the engine does, and what it
is there to find is found."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from tests.gpu import sanitize
from tests.gpu.debug_arena import ZONE, DebugArena, Mode
from workbench.backend.base import AddressOf, Backend, open_backend
from workbench.graph.ir import F32, Node, Tensor
from workbench.graph.ops import make


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    made = open_backend("host", 1)
    yield made
    made.close()


def chain() -> tuple[list[Node], Tensor, Tensor]:
    """b = a + a; c = b + a; d = c + c: nodes, the first tensor, the last."""
    a = Tensor("a", F32, (3, 7))
    first = make("add", "b", a, a)
    second = make("add", "c", first.output, a)
    third = make("add", "d", second.output, second.output)
    return [first, second, third], a, third.output


class Straying:
    """The host backend, but that before launch number `at` it writes one byte `offset` bytes from
    where the output of the chain's first node begins."""

    def __init__(self, backend: Backend, at: int, offset: int):
        self._backend = backend
        self._at, self._offset = at, offset
        self._n, self._first = 0, 0

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def launch(self, node: Node, address_of: AddressOf, *rest):
        self._first = self._first or address_of(node.output)
        if self._n == self._at:
            ctypes.memset(self._first + self._offset, 1, 1)
        self._n += 1
        return self._backend.launch(node, address_of, *rest)


@pytest.mark.parametrize(
    ("at", "offset", "found"),
    [
        (0, -1, "1 bytes written before b:F32.* by add b"),
        (0, -ZONE, "1 bytes written before b:F32"),
        (1, 84, "1 bytes written behind b:F32.* by add c"),
        (2, 0, r"written after the last use: b:F32\[3, 7\]$"),
        (2, 83, "written after the last use: b:F32"),
    ],
)
def test_a_stray_write_is_found(backend: Backend, at: int, offset: int, found: str):
    nodes, a, last = chain()
    straying = Straying(backend, at, offset)
    with pytest.raises(AssertionError, match=found), DebugArena(straying, Mode.GUARDED) as arena:
        arena.hold(a, np.ones(21, np.float32))
        arena.run(nodes, {last})


# the report of tests/gpu/sanitize.py --------------------------------------------------------------


def test_every_tool_s_subset_exists_and_says_why():
    """Files and functions that the table names are there."""
    for tool, subset in sanitize.SUBSETS.items():
        assert subset, tool
        for entry in subset:
            assert len(entry.why) > 10
            path, _, rest = entry.node.partition("::")
            source = (sanitize.ROOT / path).read_text()
            assert f"def {rest.partition('[')[0]}(" in source, entry.node
