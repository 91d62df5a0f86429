"""Every op on both CPU backends against its declaration (see tests/ranges.py)."""

from __future__ import annotations

import pytest

from tests import ranges
from tests.profiles import share
from workbench.backend.base import open_backend
from workbench.graph.ops import OPS

CASES = {n: (node, values) for n, node, values in (*ranges.cases(), *ranges.attention_cases())}
FUSED = {name: (node, values) for name, node, values in ranges.fused_cases()}


@pytest.fixture(scope="module", params=["host", "embedded"])
def backend(request):
    b = open_backend(request.param)
    yield b
    b.close()


@pytest.mark.parametrize("name", share(CASES, every=3, slow=2))
def test_declared_ranges_hold(backend, name):
    ranges.check(backend, *CASES[name])


@pytest.mark.parametrize("name", FUSED)
def test_declared_ranges_of_fused_nodes_hold(backend, name):
    ranges.check(backend, *FUSED[name])


def test_every_op_is_covered():
    assert {node.op for node, _ in CASES.values()} == set(OPS)
    assert {node.op for node, _ in FUSED.values()} == {
        "norm", "product", "product_norm", "qkv", "qkv_rope_store", "rope_store", "glu",
        "swiglu_quantize", "attention_quantize", "rope_set_rows", "norm_rope",
    }  # fmt: skip
    assert any(len(node.outputs) == n for node, _ in FUSED.values() for n in (2, 3))


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
