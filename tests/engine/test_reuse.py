"""Graph reuse in its four ways: the same logits, and the work that each claims to remove gone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import workbench as wb
from tests.reuse import (
    N_CTX,
    N_UBATCH,
    WAYS,
    long_run,
    mixed_run,
    view_addresses,
    views_of,
)
from workbench.backend.issue.issued import Plannable
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.program.check.hazards import races
from workbench.program.commands import Launch
from workbench.program.first_cell import at_cell, first_cell

REUSED = WAYS[1:]
MODELS = [("tiny-llama", "Q8_0"), ("tiny-qwen3", "BF16")]
DEVICES = ["embedded", "host"]


@pytest.fixture(scope="module", params=DEVICES)
def engine(request, tiny_model) -> Iterator[Engine]:
    path = tiny_model("tiny-llama", "Q4_0")
    with wb.Engine.load(
        path,
        device=request.param,
        n_ctx=N_CTX,
        n_seqs=8,
        n_ubatch=N_UBATCH,
        threads=2,
        toggles=Toggles(),
    ) as made:
        yield made


@pytest.fixture(scope="module")
def long_wanted(engine):
    engine.reset()
    return long_run(engine)


@pytest.fixture(scope="module")
def mixed_wanted(engine):
    return mixed_run(engine)


# the same logits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", REUSED)
def test_more_than_512_tokens_across_a_reset(engine, long_wanted, way):
    """A prompt, 520 tokens one by one, a reset and a shorter text, to the bit; and as many programs
    built as boundaries of n_kv were crossed."""
    with engine.variant(Toggles(graph_reuse=way)) as variant:
        for ours, theirs in zip(long_run(variant), long_wanted, strict=True):
            assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("preset", "quant"), MODELS)
def test_rope_and_store_are_joined_to_the_bit(tiny_model, preset, quant, device):
    """Also where heads are normed. What a CUDA device joins may round
    (`benchmarks/compare/arms.py`); here every fused node is its parts, and so the ways are equal to
    the bit whatever is fused."""
    on = {"fuse": "on", "defer_norm": "on"}
    with wb.Engine.load(
        tiny_model(preset, quant), device=device, n_ctx=N_CTX, n_seqs=8, n_ubatch=N_UBATCH,
        threads=2, toggles=Toggles(**on),
    ) as joined:  # fmt: skip
        wanted = mixed_run(joined)
        parts = [c.node.parts for c in joined.program().singly()
                 if isinstance(c, Launch) and c.node.op == "qkv_rope_store"]  # fmt: skip
        assert len(parts) == joined.model.n_layer
        normed = any(part.op == "rms_norm" for part in parts[0])
        assert normed == (preset == "tiny-qwen3")
        for way in REUSED:
            for plans in ("off", "ours") if device == "embedded" else ("off",):
                with joined.variant(Toggles(graph_reuse=way, plans=plans, **on)) as variant:
                    for ours, theirs in zip(mixed_run(variant), wanted, strict=True):
                        assert np.array_equal(ours, theirs), (way, plans)


@pytest.mark.parametrize("way", ["patch_pointers", "pointer_table"])
def test_host_and_device_share_the_layers(tiny_model, way):
    """Stores on the host are patched, too, and those of two devices."""
    path = tiny_model("tiny-llama", "Q8_0")
    for placed in ({"n_gpu_layers": 2}, {"n_devices": 2}):
        with wb.Engine.load(
            path, device="embedded", n_ctx=N_CTX, n_seqs=8, n_ubatch=N_UBATCH, threads=1,
            toggles=Toggles(), **placed,
        ) as engine:  # fmt: skip
            wanted = mixed_run(engine)
            with engine.variant(Toggles(graph_reuse=way)) as variant:
                for ours, theirs in zip(mixed_run(variant), wanted, strict=True):
                    assert np.array_equal(ours, theirs)


# the work is gone ---------------------------------------------------------------------------------


# a program that is patched ------------------------------------------------------------------------


def test_a_patched_program_is_the_one_that_would_be_built(engine):
    """Ranges, parameters and addresses: of the kept program as of one built for the cell."""
    with engine.variant(Toggles(graph_reuse="patch_pointers")) as variant:
        kept = None
        for n_past in range(6):
            variant.step([7])
            ((prepared, *_),) = variant.steps.programs._kept.values()
            assert kept in (None, prepared)
            kept = prepared
            built = variant.program(n_past=n_past)
            assert first_cell(prepared.program) == n_past == prepared.binding.cell
            assert views_of(prepared.program) == views_of(built) == views_of(at_cell(built, n_past))
            at = {b.name: m.address for b, m in prepared.binding.memory.items()}
            wanted = [at[name] + offset for _, (name, offset, _), _ in views_of(prepared.program)]
            assert view_addresses(prepared) == ([] if engine.device == "host" else wanted)
        program = prepared.program
        assert prepared.program is program  # made once
        prepared.store_at(40)
        assert first_cell(prepared.program) == 40 and first_cell(program) == 5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sync", ["per_copy", "write_read_boundary"])
def test_the_checker_sees_each_step_with_its_cells(engine, way, sync):
    if engine.device == "host":
        sync = "per_copy"
    toggles = Toggles(graph_reuse=way, sync=sync, step_wait="outputs")
    with engine.variant(toggles) as variant:
        programs = variant.cycle(2 * N_UBATCH + 3, 4)
        assert not races(programs * 2)
        cells = [first_cell(p) for p in variant.programs(2 * N_UBATCH + 3, 2, laps=2)]
    n = N_UBATCH
    wanted = [0, n, 2 * n, 2 * n + 3, 2 * n + 4] * 2
    assert cells == (wanted if way == "patch_pointers" else [None] * len(wanted))


# cells in a row -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["patch_pointers", "pointer_table"])
def test_no_cells_in_a_row_is_refused_and_the_engine_goes_on(engine, way):
    with engine.variant(Toggles(graph_reuse=way)) as variant:
        tokens = list(range(N_UBATCH))
        while variant.n_past + N_UBATCH <= N_CTX:
            variant.prefill(tokens)
        variant.cache.remove(0, 5, 8)
        variant.cache.remove(0, 20, 22)
        with pytest.raises(UsageError, match=r"no 4 free cells in a row.* 5 free.* are 3;"):
            variant.step([1, 2, 3, 4])
        before = variant.n_past
        with pytest.raises(UsageError, match="in a row"):
            variant.prefill([1, 2, 3, 4])
        assert variant.n_past == before
        variant.step([1, 2, 3])
        variant.step([4])  # the inputs made ahead are for cells that are there
        variant.submit([(1, [5], "last")]).wait()
        with pytest.raises(UsageError, match="do not fit the context"):
            variant.step([1])
        variant.reset()
        assert variant.step([1, 2, 3, 4]).shape == (1, variant.model.n_vocab)


@pytest.mark.parametrize("way", WAYS)
def test_ubatches_may_be_larger_than_the_context(tiny_model, way):
    with wb.Engine.load(
        tiny_model("tiny-llama", "F32"), device="embedded", n_ctx=32, n_ubatch=512, n_kv_pad=32,
        toggles=Toggles(graph_reuse=way),
    ) as small:  # fmt: skip
        assert small.prefill(list(range(32)), "all").shape[0] == 32


# under plans --------------------------------------------------------------------------------------

SCOPES = {
    "split": {"plan_scope": "split"},
    "step": {"plan_scope": "step", "sync": "implicit"},
    "train": {
        "plan_scope": "step", "sync": "implicit", "step_wait": "outputs",
        "host_source": "pinned_ring_4",
    },
}  # fmt: skip


@pytest.mark.parametrize("plans", ["pr", "ours"])
@pytest.mark.parametrize(("way", "updates"), [("patch_pointers", True), ("pointer_table", False),
                                              ("set_rows", False)])  # fmt: skip
def test_a_plan_is_updated_where_stores_move_and_nowhere_else(engine, way, updates, plans):
    """A program that is patched is other work than before: its uid says so."""
    if engine.device == "host":
        pytest.skip("the host captures nothing")
    n = 12
    with engine.variant(Toggles(graph_reuse=way, plans=plans)) as variant:
        uids = set()
        for _ in range(n):
            variant.step([7])
            ((prepared, *_),) = variant.steps.programs._kept.values()
            uids |= {i.uid for i in prepared.issued.values() if isinstance(i, Plannable)}
        counters = variant.counters
    moved = n - 1 if updates else 0
    assert len(uids) == 1 + moved and 0 not in uids
    assert (counters["plans_captured"], counters["plans_updated"]) == (1, moved)
    assert counters["plans_replayed"] == n and not counters["plans_reinstantiated"]
