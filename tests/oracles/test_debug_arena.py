"""The debug arena of tests/gpu, on the host backend, finds what it is there to find; and the tests
that its tools run are there."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.gpu import sanitize
from tests.gpu.debug_arena import ZONE, DebugArena, Mode
from workbench.backend.cpu.device.host import HostBackend
from workbench.graph.ir import F32, Tensor
from workbench.graph.ops import make


class Straying(HostBackend):
    """Before launch number `at` it writes one byte `offset` bytes from where the output of the
    first node begins."""

    def __init__(self, at: int, offset: int):
        super().__init__(1)
        self._at, self._offset, self._outputs = at, offset, list[int]()

    def launch(self, node, address_of, *rest):
        self._outputs.append(address_of(node.output))
        if len(self._outputs) == self._at + 1:
            ctypes.memset(self._outputs[0] + self._offset, 1, 1)
        return super().launch(node, address_of, *rest)


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
def test_a_stray_write_is_found(at, offset, found):
    """b = a + a; c = b + a; d = c + c"""
    a = Tensor("a", F32, (3, 7))
    first = make("add", "b", a, a)
    second = make("add", "c", first.output, a)
    last = make("add", "d", second.output, second.output)
    straying = Straying(at, offset)
    with pytest.raises(AssertionError, match=found), DebugArena(straying, Mode.GUARDED) as arena:
        arena.hold(a, np.ones(21, np.float32))
        arena.run([first, second, last], {last.output})
    straying.close()


@pytest.mark.parametrize("tool", sanitize.SUBSETS)
def test_what_a_tool_is_to_run_exists(tool):
    assert sanitize.SUBSETS[tool]
    for entry in sanitize.SUBSETS[tool]:
        path, _, name = entry.node.partition("::")
        assert f"def {name.partition('[')[0]}(" in (sanitize.ROOT / path).read_text()
