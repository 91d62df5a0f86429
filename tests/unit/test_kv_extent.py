"""The launch gate of #14924, as a table: when masked cells are looked for."""

from __future__ import annotations

import pytest

from workbench.engine.cache.extent import way_of
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
    assert way_of("reference", way, shape, regions) == (way if wanted else "off")
    assert way_of("always", way, shape, regions) == way
    assert way_of("never", way, shape, regions) == "off"


def test_nothing_opens_for_off_and_in_loop_has_no_gate():
    few, many = StepShape(1, 1, 250), StepShape(2048, 1, 2048)
    for gate in ("reference", "always", "never"):
        assert way_of(gate, "off", many, False) == "off"
        assert way_of(gate, "in_loop", few, False) == ("off" if gate == "never" else "in_loop")


@pytest.mark.parametrize(
    ("n_tokens", "n_kv", "n_seqs", "regions", "wanted"),
    [
        (512, 8192, 1, False, "off"),
        (1024, 2048, 1, False, "classes"),
        (4096, 4096, 1, True, "classes"),
        (1024, 2000, 1, False, "off"),  # cells that are no multiple of 256
        (4096, 4096, 4, True, "classes"),  # 1024 tokens of each
        (4096, 4096, 8, True, "tail"),
        (4096, 1024, 8, True, "off"),  # what would be saved is less than a launch
        (8, 2048, 8, True, "tail"),
        (8, 8192, 8, False, "off"),  # all share one region
    ],
)
def test_auto_goes_by_size(n_tokens, n_kv, n_seqs, regions, wanted):
    shape = StepShape(n_tokens, 1, n_kv, n_seqs)
    assert way_of("reference", "auto", shape, regions) == wanted
    assert way_of("never", "auto", shape, regions) == "off"
    rows = n_tokens // (n_seqs if regions else 1)
    assert way_of("always", "auto", shape, regions) == ("classes" if rows >= 1024 else "tail")
