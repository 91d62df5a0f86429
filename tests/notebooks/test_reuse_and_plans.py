"""The tables of the notebooks on graph reuse and on plans: what a program says of itself."""

from __future__ import annotations

import math

import pytest

import workbench as wb
from workbench.answers import kept, planned, proofs
from workbench.benchmarks.times.token_parts import PARTS, token_parts
from workbench.engine.programs import WAYS

KEPT = wb.Toggles(graph_reuse="set_rows", sync="packed_implicit")
STEP = wb.Toggles(**KEPT.changed(), plans="ours", plan_scope="step")
ARMS = {
    "off": KEPT,
    "a split": STEP.switched("plan_scope", "split"),
    "a step": STEP,
    "direct": STEP.switched("results", "direct"),
}


@pytest.fixture(scope="module")
def engine(tiny_model):
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(path, device="embedded", n_kv_pad=16, toggles="baseline") as loaded:
        yield loaded


@pytest.fixture
def null(tiny_model):
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="null", n_seqs=2, n_kv_pad=16, toggles=KEPT
    ) as loaded:
        yield loaded


def test_ways_differ_in_their_stores_and_in_what_tells_them(null):
    table = kept.ways_table(null).set_index("graph_reuse")
    assert list(table.index) == list(WAYS)
    layers = null.model.n_layer
    assert list(table["stores"]) == [
        f"{2 * layers} {op}" for op in ("set_rows", "copy_to_view", "copy_by_table", "set_rows")
    ]
    assert dict(table["patched"]) == {
        "rebuild": 0, "patch_pointers": 2 * layers, "pointer_table": 0, "set_rows": 0,
    }  # fmt: skip
    assert table.loc["patch_pointers", "told by"] == "their address"
    assert table.loc["pointer_table", "told by"] == "inp_store_table"
    assert table.loc["set_rows", "told by"] == "attn_inp_k_idxs, attn_inp_v_idxs"
    assert list(table["inputs"]) == [6, 4, 5, 6]


def test_each_input_answers_for_itself(null):
    table = kept.inputs_table(null.program()).set_index("input")
    assert set(table["the next token"]) == {"yes"}
    for step, refuse in {
        "n_kv grows": {"attn_inp_kq_mask"},
        "two outputs": {"inp_out_ids"},
        "two tokens": set(table.index) - {"inp_out_ids"},
    }.items():
        assert set(table.index[table[step] == "no"]) == refuse


def test_all_tokens_reuse_but_the_first_and_those_at_a_boundary(null):
    table = kept.reuse_table(null)
    alike = table.iloc[:5]
    n, boundaries = alike["steps"].sum(), 2
    assert alike["reused"].sum() == n - 1 - boundaries
    rest = table.iloc[5:].set_index("step")
    assert dict(rest["built"]) == {
        "two tokens in a step": 1, "a token without outputs": 1,
        "a token of each of two sequences": 1, "one token again": 0,
        "the first token after a reset": 0,
    }  # fmt: skip
    assert (table["built"] + table["reused"] == table["steps"]).all()


def test_a_plan_of_a_step_is_one_call_and_direct_results_spare_a_copy(engine):
    table = planned.calls_table(engine, ARMS).set_index("arm")
    assert list(table["pattern"]) == ["h ag", "h ap", "h p", "h p"]
    nodes = table.loc["off", "nodes"]
    assert list(table["nodes"]) == [nodes, nodes, nodes, nodes - 1]
    assert list(table["calls"]) == [nodes, 3, 1, 1]
    assert set(table["values written"]) == {6} and set(table["waits"]) == {1}


def test_what_forces_a_capture_and_what_an_update(engine):
    made = planned.made_table(engine, planned.forcing(ARMS["a split"]), 40).set_index("arm")
    assert made.loc["ours with set_rows", ["captured", "updated"]].tolist() == [3, 0]
    assert made.loc["ours with pointer_table", ["captured", "updated"]].tolist() == [3, 0]
    assert made.loc["ours with patch_pointers", ["captured", "updated"]].tolist() == [3, 37]
    assert made.loc["pr with set_rows", ["captured", "updated"]].tolist() == [1, 2]
    assert made.loc["today with set_rows", "part by part"] == 3
    assert (made["replayed"] + made["part by part"] == 40).all()
    assert math.isnan(made.loc["ours with set_rows", "update us"])
    assert (made["capture us"] > 0).all() and (made["instantiate us"] > 0).all()


def test_the_parts_of_a_token_are_those_of_its_kernels(engine):
    parts = token_parts(engine, ARMS, 2, n_tokens=3)
    gap = planned.gap_table(parts, ARMS).set_index("arm")
    assert (gap[["token us", "device us", "gap us", "plain us"]] > 0).all(axis=None)
    assert all(found["counters"].get("plans_replayed", 6) == 6 for found in parts.values())
    assert gap.loc["off", "repaid after tokens"] == ""
    assert (gap.loc[["a split", "a step", "direct"], "captures us"] > 0).all()


def test_when_captures_are_repaid_follows_from_each_round():
    def of(token: list[float], ns: int | None) -> dict:
        plans = {"plans_captured": 1, "plans_capture_ns": ns, "plans_instantiate_ns": 0}
        return {"counters": plans if ns else {}, "calls": 1} | dict.fromkeys(PARTS, token)

    parts = {"off": of([100, 200, 300], None), "a split": of([90, 190, 290], 95_000),
             "a step": of([110, 210, 310], 9), "direct": of([90, 200, 310], 9)}  # fmt: skip
    gap = planned.gap_table(parts, ARMS).set_index("arm")
    assert gap["repaid after tokens"].tolist() == ["", "10", "never", "not known"]
    assert gap.loc["a split", "saved us"] == 10


def test_captured_programs_are_proved_as_eager_ones(engine):
    proof = proofs.proof_table(proofs.of_arms(engine, ARMS))
    assert set(proof["races"]) == {"none"}
    assert set(proof["because"]) == {"enough: the wait for the logits"}


def test_what_a_build_is_worth():
    assert kept.speedup(100, 50) == 1.5
    for claim in kept.CLAIMED:
        assert kept.speedup(200, kept.build_us(200, claim)) == pytest.approx(claim)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("What #8366 is worth by what a build costs: not measured.", ""),
        ("| a |\n\nVerdict on #8366, at llama.cpp's build time: 1.01.\nMore.",
         "Verdict on #8366, at llama.cpp's build time: 1.01."),
    ],
)  # fmt: skip
def test_the_recorded_verdict_is_quoted_where_there_is_one(tmp_path, block, said):
    page = tmp_path / "README.md"
    page.write_text(f"a\n<!-- begin reuse-verdict -->\n{block}\n<!-- end reuse-verdict -->\n")
    assert kept.recorded_verdict(page) == said
