"""Every op on both CPU backends against its declaration (see tests/ranges.py)."""

from __future__ import annotations

import pytest

from tests import ranges
from workbench.backend.base import open_backend

CASES = {name: (node, values) for name, node, values in ranges.cases()}


@pytest.fixture(scope="module", params=["host", "embedded"])
def backend(request):
    b = open_backend(request.param)
    yield b
    b.close()


@pytest.mark.parametrize("name", CASES)
def test_declared_ranges_hold(backend, name):
    ranges.check(backend, *CASES[name])


def test_every_op_is_covered():
    from workbench.graph.ops import OPS

    assert {node.op for node, _ in CASES.values()} == set(OPS)


def test_a_stray_write_is_found(backend):
    """The check itself: an op that declares less than it writes is caught."""
    node, values = CASES["add"]
    declared = ranges.ops.writes

    def too_little(n):
        ((tensor, offset, nbytes),) = declared(n)
        return [(tensor, offset, nbytes - 4)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges.ops, "writes", too_little)
        with pytest.raises(AssertionError, match="outside the declaration"):
            ranges.check(backend, node, values)
