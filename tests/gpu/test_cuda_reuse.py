"""Graph reuse on the GPU: every way gives the logits of a graph that is built anew, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import workbench as wb
from tests.reuse import N_CTX, N_UBATCH, PAD, WAYS, boundaries, long_run, mixed_run, view_addresses
from workbench.benchmarks.compare.answers import compare_logits
from workbench.benchmarks.compare.arms import answer_between
from workbench.config import EXACT, ROUNDING, Toggles
from workbench.engine.look.phases import Phases
from workbench.program.commands import Launch

pytestmark = pytest.mark.gpu

REUSED = WAYS[1:]
# The launch that joins RoPE and store is not for every way, and may round: a test of its own.
ALL = {"fuse": "on", "fuse_rope_store": "off", "defer_norm": "on"}
PLANNED = {"sync": "implicit", "plans": "ours", "plan_scope": "step"}


@pytest.fixture(scope="module", params=[("tiny-llama", "Q4_0"), ("tiny-qwen3", "BF16")],
                ids="-".join)  # fmt: skip
def engine(request, tiny_model) -> Iterator[wb.Engine]:
    path = tiny_model(*request.param)
    with wb.Engine.load(
        path, device="cuda", n_ctx=N_CTX, n_seqs=8, n_ubatch=N_UBATCH, toggles=Toggles()
    ) as made:
        yield made


@pytest.fixture(scope="module", params=[{}, ALL], ids=["plain", "all"])
def wanted(request, engine):
    """Toggles that all ways have, and the logits of both runs with them."""
    with engine.variant(Toggles(**request.param)) as variant:
        return request.param, long_run(variant), mixed_run(variant)


@pytest.mark.parametrize("plans", ["off", "ours"])
@pytest.mark.parametrize("way", REUSED)
def test_more_than_512_tokens_a_reset_and_several_sequences(engine, wanted, way, plans):
    on, long_wanted, mixed_wanted = wanted
    toggles = Toggles(graph_reuse=way, **on, **(PLANNED if plans == "ours" else {}))
    with engine.variant(toggles) as variant:
        for ours, theirs in zip(long_run(variant), long_wanted, strict=True):
            assert np.array_equal(ours, theirs)
        for ours, theirs in zip(mixed_run(variant), mixed_wanted, strict=True):
            assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("way", REUSED)
def test_one_side_alone_joins_rope_and_store(engine, way):
    """Rows do, copies never. The joined launch is equal to the bit but where it norms the heads of
    few tokens. More tokens (a ubatch here) are equal to the bit in any case."""
    on = {"fuse": "on", "defer_norm": "on"}
    prompt = list(range(3, 3 + N_UBATCH))
    found, classes = [], []
    for toggles in (Toggles(**on), Toggles(graph_reuse=way, **on)):
        with engine.variant(toggles) as variant:
            ubatch = variant.prefill(prompt, "all").copy()
            ops = {c.node.op for c in variant.program().singly() if isinstance(c, Launch)}
            assert ("qkv_rope_store" in ops) == (toggles.graph_reuse in ("rebuild", "set_rows"))
            found.append((ubatch, np.concatenate(mixed_run(variant))))
        classes.append(toggles)
    (rows_ubatch, rows), (ubatch, ours) = found
    assert np.array_equal(ubatch, rows_ubatch)
    kind = answer_between(*classes)
    assert kind == (EXACT if way == "set_rows" else ROUNDING)
    if kind == EXACT or engine.model.architecture == "llama":
        assert np.array_equal(ours, rows)
    answer = compare_logits(rows, ours, kind)
    assert answer.holds, str(answer)


@pytest.mark.parametrize("way", REUSED)
def test_programmatic_launches(engine, way):
    """The copies wait by themselves for the launch in front of them."""
    if not engine.backend.capabilities.programmatic:
        pytest.skip("this device has no programmatic launches")
    found = {}
    for pdl in ("off", "on"):
        with engine.variant(Toggles(graph_reuse=way, pdl=pdl, **ALL)) as variant:
            found[pdl] = mixed_run(variant)
    for ours, theirs in zip(found["on"], found["off"], strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("way", REUSED)
def test_programs_reused_are_n_minus_1_minus_the_boundaries(engine, way):
    n = PAD + 20
    with engine.variant(Toggles(graph_reuse=way)) as variant:
        for token in range(n):
            variant.step([token])
        assert variant.counters["programs_reused"] == n - 1 - boundaries(n)


def test_a_patched_store_goes_where_the_program_says(engine):
    with engine.variant(Toggles(graph_reuse="patch_pointers")) as variant:
        for n_past in range(5):
            variant.step([7])
            ((prepared, *_),) = variant.steps.programs._kept.values()
            built = variant.bound.build(
                next(iter(variant.steps.programs._kept)), phases(variant), n_past
            )
            assert view_addresses(prepared) == view_addresses(built)


def phases(engine: wb.Engine) -> Phases:
    return Phases(engine._spent)
