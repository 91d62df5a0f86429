"""The tables and answers of notebooks 00, 02, 03 and 04; the committed answers are the runs'."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd
import pytest

import workbench as wb
from tests.answers.test_answer_tables import ARMS, KEPT, RUNS, ab, answer, said_of, tiny
from workbench.answers import annotated, conclusions, kept, planned, proofs, raced, waits
from workbench.benchmarks.runs.results import load_run
from workbench.benchmarks.times.gaps import Gaps
from workbench.benchmarks.times.token_parts import PARTS
from workbench.common import shipped
from workbench.engine.programs import WAYS
from workbench.trace.profile import Timeline
from workbench.trace.spans import HOST_LANE, Span


@pytest.fixture(scope="module")
def planning(tiny_model):
    with tiny(tiny_model, "embedded", n_kv_pad=16) as engine:
        yield engine


@pytest.fixture
def null(tiny_model):
    with tiny(tiny_model, "null", KEPT, n_kv_pad=16) as engine:
        yield engine


def test_ways_differ_in_their_stores_and_what_tells_them(null):
    table, n = kept.ways_table(null).set_index("graph_reuse"), 2 * null.model.n_layer
    keys = "attn_inp_k_idxs, attn_inp_v_idxs"
    assert {way: tuple(row) for way, row in table.iloc[:, :4].iterrows()} == {
        "rebuild": (f"{n} set_rows", keys, 0, 6),
        "patch_pointers": (f"{n} copy_to_view", "their address", n, 4),
        "pointer_table": (f"{n} copy_by_table", "inp_store_table", 0, 5),
        "set_rows": (f"{n} set_rows", keys, 0, 6),
    }
    assert list(table.index) == list(WAYS)


def test_each_input_answers_for_itself(null):
    table = kept.inputs_table(null.program()).set_index("input")
    assert set(table["the next token"]) == {"yes"}
    refusing = {
        "n_kv grows": {"attn_inp_kq_mask"}, "two outputs": {"inp_out_ids"},
        "two tokens": set(table.index) - {"inp_out_ids"},
    }  # fmt: skip
    for step, names in refusing.items():
        assert set(table.index[table[step] == "no"]) == names


def test_a_plan_of_a_step_is_one_call(planning):
    table = planned.calls_table(planning, ARMS).set_index("arm")
    assert list(table["pattern"]) == ["h ag", "h ap", "h p", "h p"]
    nodes = table.loc["off", "nodes"]
    assert list(table["nodes"]) == [nodes, nodes, nodes, nodes - 1], "direct results spare a copy"
    assert list(table["calls"]) == [nodes, 3, 1, 1]
    assert set(table["values written"]) == {6} and set(table["waits"]) == {1}
    proof = proofs.proof_table(proofs.of_arms(planning, ARMS))
    assert set(proof["races"]) == {"none"}, "as eager ones"


def test_what_forces_a_capture_and_what_an_update(planning):
    made = planned.made_table(planning, planned.forcing(ARMS["a split"]), 40).set_index("arm")
    for arm, n_made, updated in (
        ("ours with set_rows", 3, 0), ("ours with pointer_table", 3, 0),
        ("ours with patch_pointers", 3, 37), ("pr with set_rows", 1, 2),
    ):  # fmt: skip
        assert made.loc[arm, ["made", "updated"]].tolist() == [n_made, updated], arm
    assert made.loc["today with set_rows", "part by part"] == 3
    assert (made["replayed"] + made["part by part"] == 40).all()
    assert (made["us for these"] > 0).all() and len(made.columns) <= 6


def test_when_captures_are_repaid_follows_from_each_round():
    def of(token: list[float], ns: int | None) -> dict:
        plans = {"plans_captured": 1, "plans_capture_ns": ns, "plans_instantiate_ns": 0}
        return {"counters": plans if ns else {}, "calls": 1} | dict.fromkeys(PARTS, token)

    parts = {"off": of([100, 200, 300], None), "a split": of([90, 190, 290], 95_000),
             "a step": of([110, 210, 310], 9), "direct": of([90, 200, 310], 9)}  # fmt: skip
    gap = planned.gap_table(parts, ARMS).set_index("arm")
    assert gap["repaid after tokens"].tolist() == ["", "10", "never", "not known"]
    assert gap.loc["a split", "saved us"] == "10.0 (10.0..10.0)"
    assert kept.speedup(100, 50) == 1.5 and kept.build_us(100, 1.5) == 50


def test_phases_of_a_token():
    def host(category: str, start: int, end: int, **more: object) -> Span:
        args = {"step": 8, **more}
        return Span(category, category, HOST_LANE, start * 1000, end * 1000, args)

    device = {"step": 8, "kind": "launch", "split": 1}
    spans = [
        host("step", 0, 100), host("build", 0, 20), host("write", 20, 22, split=0),
        host("launch", 22, 24, split=0), host("copy", 25, 30, split=1),
        host("sync", 30, 34, split=1), host("launch", 40, 44, split=1),
        host("launch", 50, 54, split=1), host("build", 56, 58), host("sync", 60, 90, split=1),
        host("read", 90, 95, split=1),
        Span("a", "device", "cuda stream 0", 45_000, 80_000, device),
    ]  # fmt: skip
    frame = Timeline(spans).to_frame()
    assert [(p.what, p.start_us, p.end_us) for p in annotated.phases(frame)] == [
        ("the host makes batch, graph and program", 0, 20), ("inputs go to the device", 20, 34),
        ("the host launches", 40, 54), ("the device computes", 45, 80),
        ("the host waits for the logits", 60, 95),
    ]  # fmt: skip
    texts = {t.get_text() for t in annotated.token(frame).axes[0].texts}
    assert "5  the host waits for the logits: 35 us" in texts
    with pytest.raises(ValueError, match="no step"):
        annotated.token(frame.iloc[:0])


def test_the_token_that_is_drawn_is_no_disturbed_one():
    def step(number: int, start: int, us: int) -> list[Span]:
        args = {"step": number, "split": 0}
        return [
            Span(name, name, HOST_LANE, start * 1000, (start + us) * 1000, args)
            for name in ("step", "launch")
        ]

    spans = [*step(8, 0, 90), *step(9, 100, 103), *step(10, 300, 9000)]
    fig = annotated.token(Timeline(spans).to_frame(), title="one")
    assert "1  the host launches: 103 us" in {t.get_text() for t in fig.axes[0].texts}


def test_a_token():
    found, nan = ab("tour"), float("nan")
    steps = pd.DataFrame({
        "launches": [53], "copies": [7], "waits": [13], "step_us": [3100.0], "build_us": [1780.0],
        "host_us": [444.0], "wait_us": [52.7], "device_us": [746.0], "idle_us": [nan],
    }, index=pd.Index([8], name="step"))  # fmt: skip
    assert list(annotated.counts_table(steps).loc[0]) == [8, 53, 7, 13, 3100, 746]
    made = conclusions.token(steps, found).splitlines()
    assert made[0].startswith("One token is 53 launches, 7 copies and 13 waits of the host, and ")
    assert made[0].endswith("works 746 us of its 3.10 ms (every switch off, traced).")
    assert made[1].startswith('The thread of #7456: "The remaining 10-15% of the time')
    row = found.summary().iloc[0]
    each = (conclusions.time(1e6 / row[f"tps_{side}"]) for side in ("baseline", "toggled"))
    assert made[2] == "Untraced, a token takes {} with graph_reuse=rebuild and {} with " \
        "graph_reuse=set_rows (tg8).".format(*each)  # fmt: skip
    assert "takes 1.78 ms to build the program, 444 us to issue it" in made[3]
    assert "stands still unknown" in made[3] and made[4:] == said_of(found)
    assert made[4:] == answer("00_tour")[4:]


@pytest.fixture(scope="module")
def proved(tiny_model):
    with tiny(tiny_model, "null", n_ubatch=16, unsafe=True) as prover:
        decode = proofs.proof_table(proofs.cycles(prover))
        return {
            "decode": decode,
            "train": proofs.proof_table(proofs.cycles(prover, 48, "train")),
        }


@pytest.mark.long
def test_each_mode_has_one_count_of_waits(proved):
    """The host's, as the gaps count them; a wait of a stream for an event stands apart."""
    decode = proved["decode"].set_index("ordering")
    table = load_gaps().table().set_index("sync")
    for mode in table.index.unique():
        row, counted = decode.loc[f"{mode}, own"], table.loc[[mode]].iloc[0]
        assert (row["waits"], row["stream_waits"]) == (counted["waits"], counted["stream_waits"])
    shown = proofs.superfluous_table(**proved).set_index("sync")
    assert shown.shape == (7, 5)
    assert shown.loc["per_copy"].tolist()[1:3] == ["11 of 13", "12 of 13"]
    assert shown.loc["event_guarded", "decode, own"] == "1 of 2"
    assert shown.loc["event_guarded", "decode, compute"] == "", "it is about two streams"
    assert shown.loc["implicit"].tolist()[1:] == ["races", "0 of 1", "races", "races"]
    assert shown.loc["write_read_boundary", "train, own"] == "races"


def load_gaps() -> Gaps:
    run = load_run(RUNS / "notebook-gaps")
    return Gaps(run.run, run.samples)


@pytest.mark.long
def test_what_races_gives_wrong_tokens_and_what_is_proved_does_not():
    """How many prompts go wrong is the machine's; that some do, and none with a ring or a wait, is
    not."""
    table = raced.wrong_table(n_prompts=6).set_index("ordering")
    assert list(table.index) == list(raced.ORDERINGS) and (table["prompts"] == 6).all()
    racing = table["pairs that race"] > 0
    assert set(table.index[~racing]) == {"copy_boundary", "implicit, a ring of 2"}
    assert (table.loc[~racing, "wrong"] == 0).all()
    assert table.loc[racing, "wrong"].sum() > 0


WRONG = pd.DataFrame({
    "ordering": ["copy_boundary", "implicit", "implicit, a ring of 2"],
    "pairs that race": [0, 75, 0], "wrong": [0, 3, 0], "prompts": [20, 20, 20],
})  # fmt: skip


def worth_of(gaps: Gaps) -> pd.DataFrame:
    other = waits.RecordedWait("a GPU", 3.0, {"llama-3-8b Q4_0": 2000.0})
    return waits.worth_table(gaps, {"tiny-llama Q8_0": 500.0}, other)


@pytest.mark.long
def test_which_waits(proved):
    gaps, on = load_gaps(), ab("sync-on")
    worth, wait_us = worth_of(gaps), gaps.fits["own"].wait_us
    made = conclusions.waits(proved, WRONG, gaps, worth, on).splitlines()
    assert made[0].startswith("The thread of #17795 has 1 to 2 % (RTX Pro 6000 Blackwell); here co")
    gained, beside = (
        conclusions.gained(on, "copy_boundary"),
        "beside copy_stream=compute, graph_reu",
    )
    assert f"here copy_boundary has {gained} {beside}" in made[0]
    assert (
        "; beside copy_stream=own, graph_reuse=set_rows, all else off the gap between " in made[0]
    )
    assert made[1].startswith("10 fewer waits are worth, in a token with launches fused, without ")
    tiny_gain = f"{worth['10 fewer'][0]} of 500 us (tiny-llama Q8_0)"
    assert made[1].endswith(f"{tiny_gain} and 1.5 % of 2.00 ms (llama-3-8b Q4_0).")
    assert made[2].startswith("Of llama.cpp's 13 waits between tokens, 11 are superfluous")
    seen = "On the embedded device wrong tokens came from 3 of 20 prompts with implicit; from none "
    assert f"{seen}with copy_boundary and implicit, a ring of 2." in made
    assert f"A wait adds {wait_us:.2f} us to the gap between tokens" in made[3]
    assert made[-len(said_of(on)) :] == said_of(on)
    lucky = WRONG.assign(ordering=["copy_boundary", "implicit", "event_guarded"],
                         wrong=[0, 3, 0], **{"pairs that race": [0, 75, 15]})  # fmt: skip
    nor = (
        "from none with copy_boundary, nor here with event_guarded, though the checker finds races."
    )
    assert nor in conclusions.waits(proved, lucky, gaps, worth, on)
    small = waits.worth_table(gaps, {"a": 20.0}, None)
    said = conclusions.waits(proved, WRONG[WRONG["pairs that race"] == 0], gaps, small, on)
    assert "without plans: nothing that can be told." in said
    assert "No ordering that was run on the embedded device races." in said
    quiet = conclusions.waits(proved, WRONG.assign(wrong=0), gaps, worth, on)
    assert "no prompt went wrong with implicit: that proves nothing" in quiet
    other = dict(zip(turned := ("per_copy", "copy_boundary"), turned[::-1], strict=True))
    longer = Gaps(gaps.run, gaps.samples.assign(arm=gaps.samples["arm"].replace(other)))
    said = conclusions.waits(proved, WRONG, longer, worth, on).splitlines()[0]
    low, high = re.search(r"us longer \(95% CI (\S+)\.\.(\S+)\)", said).groups()
    assert 0 < float(low) < float(high)
    committed = answer("02_sync_modes")
    assert committed[1].startswith("10 fewer waits are worth, in a token with launches fused")
    assert committed[2:10] == made[2:10] and committed[-len(said_of(on)) :] == said_of(on)


def test_a_wait_is_worth_less_beside_a_longer_token():
    gaps = load_gaps()
    n, table = waits.n_fewer(gaps), worth_of(gaps)
    assert n == 10 and table["model"].tolist() == ["tiny-llama Q8_0", "llama-3-8b Q4_0"]
    saved = 10 * gaps.fits["own"].wait_us
    assert table["10 fewer"].tolist() == [f"{100 * (500 / (500 - saved) - 1):.1f} %", "1.5 %"]
    assert table["10 fewer, 14.4 us each"][1] == "7.8 %", "the thread's, on Windows"
    assert waits.worth_table(gaps, {"a": 20.0}, None)["10 fewer"][0] == "-", "not as long as ten"


def test_tokens_are_the_engine_s_and_a_tiny_model_s(tiny_model):
    with tiny(tiny_model, "embedded", KEPT) as engine:
        assert list(waits.tokens_us(engine, 2)) == ["tiny-llama Q8_0"]
        engine.model.__dict__["name"] = "large"
        found = waits.tokens_us(engine, 2)
    assert list(found) == ["tiny-llama Q8_0", "large Q8_0"] and min(found.values()) > 0


def test_the_results_page_has_a_wait_beside_tokens(tmp_path):
    found = waits.recorded()
    assert found is not None and "NVIDIA" in found.where
    assert [model.split()[0] for model in found.token_us] == ["llama-3.2-1b", "llama-3-8b"]
    page = tmp_path / "README.md"
    page.write_text(f"before\n\n{waits.said(found)}\n\nafter\n")
    assert waits.recorded(page) == found
    page.write_text("nothing")
    assert waits.recorded(page) is None


def test_without_the_results_a_lesson_goes_on(monkeypatch, tmp_path):
    """As a wheel without them, or a copied notebook: no cell dies on a missing file."""
    monkeypatch.setattr(shipped, "PACKAGE", tmp_path / "workbench")
    assert kept.recorded_verdict() == "" and waits.recorded() is None
    assert proofs.of_record_table().empty


def test_what_building_costs(null):
    on, steps = ab("reuse-on"), kept.reuse_table(null)
    assert steps["reused"].tolist() == [0, 15, 0, 15, 0, 0, 1] and len(steps) <= 7
    layers, worth = kept.layers_table(ab("redo")), kept.worth_table(on)
    assert [*layers["toggle"]] == [*wb.Toggles.members("redo"), kept.TOTAL]
    assert len(layers.columns) <= 6 and len(worth) <= 7
    tables = {"phases": kept.phases_table(on), "steps": steps, "layers": layers, "worth": worth}
    models = "; ".join(kept.own_token(*one) for one in (("1b", 435, 1.18), ("8b", 820, 1.3)))
    quoted = f"Verdict: all that a new graph entails, on some GPU: {models}."
    made = conclusions.reuse(tables, quoted, on).splitlines()
    shown = worth.set_index("whose")
    whole = shown["speedup of a kept graph"]
    assert made[0].startswith("The thread of #8366 has 2 to 7 % (H100-SXM, H100-PCIe, A100-PCIe, ")
    assert f"here {whole[kept.MEASURED]:.1f} times as fast is Python's price: llama.c" in made[0]
    own = "recorded with 2 models on some GPU, makes its token 1.18 to 1.30 times as fast."
    assert made[0].endswith(own) and made[6] == quoted
    unknown = conclusions.reuse(tables, "", on).splitlines()
    assert "with a build of 100 us it would be 1." in unknown[0] and len(unknown) == len(made) - 1
    phases = kept.phases_us(on.run["arms"][0]["counters"])
    wanted = ("graph", "fuse", "split", "layout", "lower", "prepare")
    own = shown.loc[kept.OWN, "a build costs, us"]
    assert own == pytest.approx(sum(phases[phase] for phase in wanted))
    committed = answer("03_graph_reuse")
    assert made[1:6] == committed[1:6] and made[7:] == committed[-len(said_of(on)) :]


def test_when_plans_repay_themselves():
    """Of tables made up, of two tokens of 100 us; and of the runs."""
    whole, arms = ab("plans-on"), ["off", "a split", "a step"]
    made = {"arm": "ours", "tokens": 24, "made": 2, "updated": 0, "us for these": 1500.0}
    gap = {"arm": arms, "gap us": [40.31, 35.0, 29.0],
           "saved us": ["", "1.0 (-1.0..2.0)", "10.0 (9.0..11.0)"],
           "captures us": [math.nan, 99.0, 200.0],
           "repaid after tokens": ["", "not known", "20"]}  # fmt: skip
    tables = {
        "calls": pd.DataFrame({"arm": arms[::2], "nodes": [54, 54], "calls": [54, 1]}),
        "gap": pd.DataFrame(gap),
        "forced": pd.DataFrame([made, made | {"arm": "patch_pointers", "updated": 23}]),
        "proof": pd.DataFrame({"ordering": arms, "races": ["none", "none", 3], "because": ""}),
    }
    gained = conclusions.gained(whole, "pr")
    lines = conclusions.plans(tables, whole, whole).splitlines()
    row = whole.summary().set_index("arm").loc["pr"]
    assert f"{100 * abs(row['speedup'] - 1):.1f} % " in gained
    assert lines[0] == (
        "The thread of #16548 has up to 30 %; here captures are repaid after an unknown number of "
        f"tokens (a split) and repaid after 20 tokens (a step), and plans=pr has {gained} "
        f"with half of the layers on the host; with none there: {gained}."
    )
    assert (
        "\n".join(lines[1 : -2 * len(said_of(whole))])
        == """\
The device is given 54 kernels and copies a token; calls of the host for them: 54 (off) and 1 \
(a step).
patch_pointers updates its plan for 23 of 24 tokens; its plans take 1.50 ms in all.
Plans where n_kv grows: 2 made and 0 updated (ours).
Between the kernels of two tokens are 40.3 us (off), 35.0 us (a split) and 29.0 us (a step).
A token is no shorter for sure with a split, which saves 1.0 (-1.0..2.0) us.
A token is 10.0 (9.0..11.0) us shorter with a step; its captures took 200 us, repaid after 20 \
tokens.
These race: a step."""
    )
    assert answer("04_plans")[-len(said_of(whole)) :] == said_of(whole)
    tables["gap"].attrs["constant"] = {"the host": "takes 1.80 times as long as at its best"}
    first = conclusions.plans(tables, whole, whole).splitlines()[0]
    assert "(a step), where the host takes 1.80 times as long as at its best, and plans=" in first
    none = tables | {"gap": tables["gap"].assign(**{"repaid after tokens": ""})}
    assert "here no plan was captured, " in conclusions.plans(none, whole, whole)


def test_a_gain_says_where_it_cannot_be_told():
    found = ab("plans-on")
    row = {"arm": "pr", "speedup": 0.99, "low": 0.97, "high": 1.02, "verdict": "no difference"}
    found.summary = lambda: pd.DataFrame([row])
    said = "no difference (1.0 % fewer tokens a second (95% CI -3.0..2.0 %))"
    assert conclusions.gained(found, "pr") == said
    found.summary = lambda: pd.DataFrame([row | {"low": np.nan, "high": np.nan}])
    assert conclusions.gained(found, "pr") == "too few repetitions to tell"
