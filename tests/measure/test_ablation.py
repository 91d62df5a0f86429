"""Steps taken apart on a CPU: what launches are called, and what leaving them out leaves; and
what becomes of what ncu counts of launches."""

from __future__ import annotations

import numpy as np
import pytest

import workbench as wb
from data.measure import ablation, counters, session
from data.measure.counters import COUNTERS, STALL
from workbench.backend.cuda.kernels.kernel import Kernel
from workbench.engine.programs import Key
from workbench.graph.ir import Kind
from workbench.program.commands import Launch

# names of nodes that a fused program has -> what they are called here
PRODUCTS = {"qkv-0": "qkv", "attn_out-0": "attn_out", "ffn_glu-1": "glu", "ffn_out-1": "ffn_down",
            "result_output": "result_output"}  # fmt: skip


@pytest.fixture
def engine(tiny_model):
    path = tiny_model("tiny-llama", "Q4_0")
    with (
        wb.Engine.load(path, device="embedded", n_ctx=512, toggles=wb.Toggles()) as made,
        made.variant(session.everything(made)) as side,
    ):
        yield side


def test_every_launch_has_a_kind_and_its_weights(engine):
    nodes = [c.node for c in engine.program(1).commands if isinstance(c, Launch)]
    kinds = {node.name: ablation.kind_of(node) for node in nodes}
    assert kinds.items() >= PRODUCTS.items() and kinds["attn_norm-0"] == "norm"
    assert kinds["kqv_out-0"] == kinds["kqv_out-1"] == "attention"
    (qkv,) = [node for node in nodes if node.name == "qkv-0"]
    for function, kind in (("dequantise_Q4_0", "weights to halves"), ("tensor_product", "qkv"),
                           ("half_tiles_Q8", "activations to halves")):  # fmt: skip
        file = "tensor_product" if kind == "qkv" else "dequantise"
        assert ablation.kind_of(qkv, Kernel(file, function, (1, 1), 32, [])) == kind
    engine.step([1])
    prepared = engine.steps.programs.get(Key(engine.program(1).shape, 0))
    inputs = {t for node in nodes for t in node.inputs if t.kind == Kind.WEIGHT and t.rows > 1}
    read = sum(t.nbytes for t in inputs if t.name != "token_embd.weight")
    found = ablation.weight_bytes(prepared)
    assert set(found) == set(PRODUCTS.values()) and sum(found.values()) == read


@pytest.mark.parametrize("n_tokens", [1, 64])
def test_without_a_kind_the_others_compute_what_they_did(engine, n_tokens):
    """Where no two tensors share memory; where they do, a gap changes what others read."""

    def left(prepared, kind: str) -> list[np.ndarray]:
        for piece in ablation.pieces(prepared, engine.backend):
            if piece.kind != kind:
                piece.issue()
        engine.backend.synchronize()
        return ablation.content(prepared)

    with ablation.apart():
        engine.step(list(range(n_tokens)))
        prepared = ablation.prepared_of(engine, n_tokens)
    whole = ablation.content(prepared)
    assert whole[0].any()
    for kind in {piece.kind for piece in ablation.pieces(prepared, engine.backend)}:
        assert all(map(np.array_equal, whole, left(prepared, kind))), kind
    engine.step(list(range(n_tokens)))
    shared = ablation.prepared_of(engine, n_tokens)
    if n_tokens == 1 and shared is not prepared:
        assert not all(map(np.array_equal, ablation.content(shared), left(shared, "glu")))


US, MEMORY = COUNTERS["us"][0], COUNTERS["memory_pct"][0]
WAIT, LONG, BARRIER, DRAIN = (
    STALL.format(r) for r in ("wait", "long_scoreboard", "barrier", "drain")
)
LOG = f"""==PROF== Profiling "product_plain": 0%....50%....100% - 9 passes
"ID","Kernel Name","{US}","{MEMORY}","{WAIT}","{LONG}","{BARRIER}","{DRAIN}"
"","","ns","%","inst","inst","inst","inst"
"0","product_plain","13,000","76.5","1.5","4.25","n/a","0.1"
"1","product_plain(const void *, int)","14,000","77.5","1.5","4.75","0.5","0.1"
==PROF== Disconnected from process 17
"""


def test_medians_and_the_longest_stalls_are_kept():
    each = [counters.figures(launch) for launch in counters.launches_counted(LOG)]
    assert counters.summary(each) == {
        "launches": 2, "us": 13.5, "memory_pct": 77.0,
        "stalls": {"long_scoreboard": 4.5, "wait": 1.5, "barrier": 0.25},
    }  # fmt: skip
    for log in ("", "==ERROR== no\n", '"ID","a"\n"","%"\n'):
        assert counters.launches_counted(log) == []
