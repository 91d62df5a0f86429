"""Graph reuse in its four ways: the same logits, and the work that each claims to remove gone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import workbench as wb
from tests.profiles import share
from tests.reuse import (
    N_CTX,
    N_UBATCH,
    PAD,
    WAYS,
    boundaries,
    long_run,
    mixed_run,
    view_addresses,
    views_of,
)
from workbench.backend.issue.issued import Plannable
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.graph import ops
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


@pytest.mark.parametrize("background", ["off", "on"])
@pytest.mark.parametrize("way", REUSED)
def test_several_sequences(engine, mixed_wanted, way, background):
    """Ragged steps, cells removed and shifted, to the bit; alone, and with everything else on that
    is exact."""
    on = {"step_wait": "outputs", "sync": "implicit", "host_source": "pinned_ring_4"}
    if engine.device == "host":
        on = {"step_wait": "outputs"}
    others = on if background == "on" else {}
    with engine.variant(Toggles(graph_reuse=way, **others)) as variant:
        for ours, theirs in zip(mixed_run(variant), mixed_wanted, strict=True):
            assert np.array_equal(ours, theirs)
        assert variant.counters["programs_reused"] > 0


@pytest.mark.parametrize("way", WAYS)
def test_fused_and_deferred(engine, way):
    """Everything fuses as it does by itself, but for RoPE and store."""
    toggles = {"fuse": "on", "fuse_rope_store": "off", "defer_norm": "on"}
    with engine.variant(Toggles(**toggles)) as variant:
        wanted = mixed_run(variant)
    with engine.variant(Toggles(graph_reuse=way, **(toggles | {"fuse_rope_store": "on"}))) as other:
        for ours, theirs in zip(mixed_run(other), wanted, strict=True):
            assert np.array_equal(ours, theirs)
        fused = {c.node.op for c in other.program().singly() if isinstance(c, Launch)}
    stores = {"copy_to_view", "copy_by_table"} & fused
    assert bool(stores) == (way in ("patch_pointers", "pointer_table"))
    assert {"qkv", "glu"} <= fused if stores else "qkv_rope_store" in fused


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


@pytest.mark.parametrize("way", WAYS)
def test_programs_reused_are_n_minus_1_minus_the_boundaries(engine, way):
    with engine.variant(Toggles(graph_reuse=way)) as variant:
        n = 2 * PAD + 10
        for token in range(n):
            variant.step([token])
        counters = variant.counters
    crossed = boundaries(n)
    assert crossed == 2
    reused = 0 if way == "rebuild" else n - 1 - crossed
    assert (counters["programs_reused"], counters["programs_built"]) == (reused, n - reused)


def test_what_tells_the_stores_where_to(engine):
    """The inputs of each way; a patched one has none, and a store of each layer's K and V."""
    inputs, stores, copies = {}, {}, {}
    for way in WAYS:
        with engine.variant(Toggles(graph_reuse=way)) as variant:
            program = variant.program(n_past=5)
        names = {c.value for c in program.commands if c.kind == "write"}
        inputs[way] = names & {"attn_inp_k_idxs", "attn_inp_v_idxs", "inp_store_table"}
        stores[way] = [c.node for c in program.singly()
                       if isinstance(c, Launch) and c.node.name.startswith("cache_")]  # fmt: skip
        assert len(stores[way]) == 2 * engine.model.n_layer
        copies[way] = program.counts()["copies"]
    fewer = {way: copies["set_rows"] - n for way, n in copies.items()}
    unused = {"rebuild": 0, "set_rows": 0, "pointer_table": 1, "patch_pointers": 2}
    assert fewer == (dict.fromkeys(WAYS, 0) if engine.device == "host" else unused)
    rows = {"attn_inp_k_idxs", "attn_inp_v_idxs"}
    assert inputs == {"rebuild": rows, "patch_pointers": set(), "set_rows": rows,
                      "pointer_table": {"inp_store_table"}}  # fmt: skip
    for node in stores["patch_pointers"]:  # exact
        row = node.output.nbytes // node.output.rows
        assert ops.writes(node) == [(node.output, 5 * row, row)] and ops.vague(node) == (
            set(), set()
        )  # fmt: skip


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


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("plans", ["pr", "today", "ours"])
@pytest.mark.parametrize("way", REUSED)
def test_under_plans(engine, mixed_wanted, way, plans, scope):
    """To the bit, also where a patched step is captured while the one before is under way."""
    if engine.device == "host":
        pytest.skip("the host captures nothing")
    toggles = Toggles(graph_reuse=way, plans=plans, **SCOPES[scope])
    with engine.variant(toggles) as variant:
        for ours, theirs in zip(mixed_run(variant), mixed_wanted, strict=True):
            assert np.array_equal(ours, theirs)


LONG = [("rebuild", "ours", "step"), *share([
    (way, *case)
    for way in REUSED
    for case in [("pr", "step"), ("today", "step"), *(("ours", scope) for scope in SCOPES)]
], every=3, slow=2)]  # fmt: skip


@pytest.mark.parametrize(("way", "plans", "scope"), LONG)
def test_more_than_512_tokens_under_plans(engine, long_wanted, way, plans, scope):
    """Across boundaries of n_kv and a reset, to the bit."""
    if engine.device == "host":
        pytest.skip("the host captures nothing")
    with engine.variant(Toggles(graph_reuse=way, plans=plans, **SCOPES[scope])) as variant:
        for ours, theirs in zip(long_run(variant), long_wanted, strict=True):
            assert np.array_equal(ours, theirs)
        counts = variant.counters
    never = plans == "today" and way == "patch_pointers"  # no two calls are equal
    assert (counts["plans_replayed"] > counts["plans_issued"]) != never


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
