"""The launch gate of #14924, as a table: when masked cells are looked for."""

from __future__ import annotations

import pytest

from workbench.engine.kv_extent import is_open
from workbench.graph.ir import StepShape


@pytest.mark.parametrize(
    ("n_tokens", "n_kv", "n_seqs", "regions", "wanted"),
    [
        (1023, 2048, 1, False, False),  # too few tokens
        (1024, 2048, 1, False, True),
        (1024, 2000, 1, False, False),  # cells that are no multiple of 256
        (1024, 2048 + 255, 1, False, False),
        (1, 256, 1, True, False),  # one region is none apart
        (2, 256, 2, True, True),
        (2, 250, 2, True, False),
        (8, 256, 8, False, False),  # sequences that share a region
        (1024, 2048, 8, False, True),
    ],
)
@pytest.mark.parametrize("way", ["tail", "classes"])
def test_the_gate_is_the_proposals(way, n_tokens, n_kv, n_seqs, regions, wanted):
    shape = StepShape(n_tokens, 1, n_kv, n_seqs)
    assert is_open("reference", way, shape, regions) == wanted
    assert is_open("always", way, shape, regions) and not is_open("never", way, shape, regions)


def test_nothing_opens_for_off_and_in_loop_has_no_gate():
    few, many = StepShape(1, 1, 250), StepShape(2048, 1, 2048)
    for gate in ("reference", "always", "never"):
        assert not is_open(gate, "off", many, False)
        assert is_open(gate, "in_loop", few, False) == (gate != "never")
