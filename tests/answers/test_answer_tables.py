"""The notebooks' tables: what a program says of itself, and what is counted and measured beside."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

import workbench as wb
from workbench.answers import conclusions, kept, loaded, masked, planned, proofs, skipped
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.stats import speedup
from workbench.benchmarks.runs import results
from workbench.benchmarks.times.token_parts import PARTS
from workbench.config import EngineConfig
from workbench.engine.programs import WAYS
from workbench.report import plots
from workbench.traffic.bench import load_served

KEPT = wb.Toggles(graph_reuse="set_rows", sync="packed_implicit")
STEP = wb.Toggles(**KEPT.changed(), plans="ours", plan_scope="step")
ARMS = {
    "off": KEPT,
    "a split": STEP.switched("plan_scope", "split"),
    "a step": STEP,
    "direct": STEP.switched("results", "direct"),
}


@pytest.fixture(scope="module")
def path(tiny_model) -> str:
    return str(tiny_model("tiny-llama", "Q8_0"))


@pytest.fixture(scope="module")
def planning(path):
    with wb.Engine.load(path, device="embedded", n_kv_pad=16, toggles="baseline") as engine:
        yield engine


@pytest.fixture
def null(path):
    with wb.Engine.load(path, device="null", n_seqs=2, n_kv_pad=16, toggles=KEPT) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(path):
    config = EngineConfig("embedded", n_ctx=4096, n_seqs=8, n_ubatch=256)
    with wb.Engine.load(path, config=config, toggles="baseline") as opened:
        yield opened


# graph reuse and plans ----------------------------------------------------------------------------


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
    for arm, captured, updated in (
        ("ours with set_rows", 3, 0), ("ours with pointer_table", 3, 0),
        ("ours with patch_pointers", 3, 37), ("pr with set_rows", 1, 2),
    ):  # fmt: skip
        assert made.loc[arm, ["captured", "updated"]].tolist() == [captured, updated], arm
    assert made.loc["today with set_rows", "part by part"] == 3
    assert (made["replayed"] + made["part by part"] == 40).all()
    assert math.isnan(made.loc["ours with set_rows", "update us"])


def test_when_captures_are_repaid_follows_from_each_round():
    def of(token: list[float], ns: int | None) -> dict:
        plans = {"plans_captured": 1, "plans_capture_ns": ns, "plans_instantiate_ns": 0}
        return {"counters": plans if ns else {}, "calls": 1} | dict.fromkeys(PARTS, token)

    parts = {"off": of([100, 200, 300], None), "a split": of([90, 190, 290], 95_000),
             "a step": of([110, 210, 310], 9), "direct": of([90, 200, 310], 9)}  # fmt: skip
    gap = planned.gap_table(parts, ARMS).set_index("arm")
    assert gap["repaid after tokens"].tolist() == ["", "10", "never", "not known"]
    assert gap.loc["a split", "saved us"] == 10
    assert kept.speedup(100, 50) == 1.5 and kept.build_us(100, 1.5) == 50


# masked cells -------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_picture_shows_what_the_device_is_given(engine):
    """The slow twin: blocks counted while the step is taken, with an open gate."""
    frames = masked.mask_frames(engine)
    for scene, frame in zip(masked.scenes(), frames.values(), strict=True):
        assert (frame["seen"].isin(["all", "some", "none"])).all()
        for way in masked.WAYS:
            part = frame[frame["way"] == way]
            assert part["visited"][part["seen"] != "none"].all(), "nothing that is seen is skipped"
            arm = f"{scene.cache} skip_masked_kv={way} {masked.ALWAYS}"
            with engine.variant(masked.switched(engine.toggles, arm)) as side:
                masked._fill(side, scene.before)
                with wb.kv_visits(side) as counted:
                    masked._take(side, scene.work)
            n_layer = engine.model.n_layer
            assert counted.visited == n_layer * part["visited"].sum()
            assert counted.visited + counted.skipped == n_layer * len(part)
        off = frame[frame["way"] == "off"]
        n_kv = int((off["cell"] + off["n_cells"]).max())
        area = (off["n_tokens"] * off["n_cells"]).sum()
        assert area == n_kv * sum(n for _, n in scene.work), "blocks tile the mask"


@pytest.fixture(scope="module")
def visits(engine):
    return masked.visits_table(engine, 256)


@pytest.mark.long
def test_the_gate_is_closed_to_few_tokens_of_one_region(visits):
    table = visits.set_index(["step", "cache"])
    assert list(table["gate"]) == ["closed", "closed", "open", "closed", "open", "closed"]
    closed, opened = (table[table["gate"] == gate] for gate in ("closed", "open"))
    assert set(closed["tail"]) == set(closed["classes"]) == {"100%"}
    assert (opened["tail"] == opened["tail, gate open"]).all()


@pytest.fixture(scope="module")
def by_size(engine, tmp_path_factory):
    runs, background = str(tmp_path_factory.mktemp("runs")), skipped.served(engine)
    tests = skipped.tests_of("tg2", "1,2", 32)
    return (
        skipped.by_ubatch(engine, background, masked.PROMPTS, 32, 1, 0, runs),
        skipped.side_by_side(engine, background, masked.TOGETHER, tests, 1, 0, runs),
        skipped.parts(engine, background, ["tg2"], 1, 0, runs),
        runs,
    )


@pytest.mark.long
def test_prompts_are_computed_by_so_many_tokens(by_size):
    prompts, *_, runs = by_size
    assert list(prompts) == [2, 8, 32]
    for n, found in prompts.items():
        assert found.run["engine"]["config"]["n_ubatch"] == n
        assert [arm["name"] for arm in found.run["arms"][:-1]] == [*masked.PROMPTS.values()]
    (frame,) = skipped.ubatch_frames(prompts, masked.PROMPTS).values()
    assert set(frame["label"]) == {*[*masked.PROMPTS][1:]} and set(frame["x"]) == {2, 8, 32}
    folders = results.runs(runs)["folder"]
    assert len(folders) == 5 and all(AB.load(f).summary()["n"].eq(1).all() for f in folders)


def test_prompts_and_generated_tokens_are_told_apart(by_size):
    together = by_size[1]
    assert together.run["tests"] == ["pp4+tg2@b1", "pp4+tg2@b2", "pp1+tg2@b2", "pp8+tg2@b2"]
    phases = skipped.phase_summary(together, masked.TOGETHER)
    names = [arm["name"] for arm in together.run["arms"]]
    assert len(phases) == 4 * 2 * (len(names) - 1)
    samples = together.samples[together.samples["test"] == "pp4+tg2@b2"]
    sums = samples[samples["token"] > 0].groupby("arm")[["n_tokens", "ns"]].sum()
    before, after = (np.array([sums.loc[n, "n_tokens"] / sums.loc[n, "ns"]]) for n in names[:2])
    row = phases[(phases["test"] == "pp4+tg2@b2") & (phases["phase"] == "generated")].iloc[0]
    assert row["speedup"] == pytest.approx(speedup(before, after).value)
    by_slots, by_depth = skipped.scaling_frames(phases).values()
    assert set(by_slots["x"]) == {1, 2} and set(by_depth["x"]) == {1, 4, 8}


def test_requests_of_random_lengths_are_the_same_for_all(engine, tmp_path):
    found = skipped.ragged(engine, skipped.served(engine), 40, 3, 6, 2, 0, str(tmp_path))
    assert [*found] == [f"skip_masked_kv={way}" for way in masked.WAYS]
    table = skipped.ragged_table(found)
    assert (table["requests"] == 6).all() and table["tokens a prompt"].nunique() == 1
    for made in found.values():
        assert made.run["engine"]["toggles"]["kv_cache"] == "per_sequence"
    assert {results.load_run(f).run["kind"] for f in tmp_path.iterdir()} == {"serve"}


def test_what_skipping_saves_is_said(engine, by_size, visits):
    prompts, together, parts, _ = by_size
    compared = {f"a prompt by {n}": ab for n, ab in prompts.items()} | {"several": together}
    answers = skipped.answers_table(compared | {"parts": parts}, masked.PROMPTS, masked.TOGETHER)
    exact = answers[answers["answer"].str.startswith("exact")].set_index("comparison")
    ways = "in_loop; tail; classes; tail, gate open; classes, gate open"
    assert exact.loc["a prompt by 8", "arms"] == ways
    (frame,) = skipped.ubatch_frames(prompts, masked.PROMPTS).values()
    phases = skipped.phase_summary(together, masked.TOGETHER)
    frame, phases = (f.assign(verdict="no difference") for f in (frame, phases))
    phases.attrs["baseline"] = "per_sequence off"
    frame.loc[(frame["x"] == 32) & (frame["label"] == "tail"), ["verdict", "speedup"]] = "faster", 2
    ragged = {"way": ["off", "tail"], "tokens a prompt": [9, 9], "speedup": [1.0, 1.5]}
    text = str(conclusions.skipping(visits, frame, phases, pd.DataFrame(ragged), parts, answers))
    for said in ("faster 2.00 (tail)", "open to 3 prompts (per_sequence, 120 tokens)",
                 "once each: 1.50 times as fast with tail."):  # fmt: skip
        assert said in text
    assert skipped.possible(engine, "kv_parts") == "kv_parts=off,parallel_blocks,stream_k,auto"
    assert "mma" not in skipped.possible(engine, "attn_kernel")


# many requests ------------------------------------------------------------------------------------

NAMES = ("baseline", "serving", "serving sampling=host")


def test_settings_take_one_thing_away(engine):
    arms = loaded.settings(engine, *NAMES)
    assert arms["baseline"] == engine.toggles
    assert arms["serving"].kv_cache == "per_sequence" and arms["serving"].results == "behind"
    assert arms["serving"].switched("sampling", "host") == arms[NAMES[2]]
    config = loaded.config("embedded", "pp1024+tg128", "1,4")
    assert (config.n_seqs, config.n_ctx) == (4, 4 * 1280)


def test_batched_bench_s_table(engine, tmp_path):
    arms = loaded.settings(engine, "serving")
    table = loaded.together_table(engine, arms, "pp8+tg2", "1,2", 1, 0, str(tmp_path))
    assert table[["PP", "TG", "B", "N_KV"]].to_numpy().tolist() == [[8, 2, 1, 10], [8, 2, 2, 20]]
    assert table["S_PP t/s"][1] == pytest.approx(16 / table["T_PP s"][1])
    assert table["S_TG t/s"][1] == pytest.approx(4 / table["T_TG s"][1])


def test_a_mixed_step_has_tokens_and_a_part_of_a_prompt(engine):
    serving = loaded.settings(engine, "serving")["serving"]
    traces = loaded.step_traces(engine, serving, n_running=3, n_steps=2)
    sizes = {}
    for name, trace in traces.items():
        steps = [s for s in trace.timeline.spans if s.category == "step"]
        sizes[name] = {s.args["n_tokens"] for s in steps}
        assert "times an untraced one" in trace.note
    beside = "253 tokens of a prompt beside them"
    assert sizes == {"a token of each of 3 requests": {3}, beside: {256}}


@pytest.fixture(scope="module")
def served(engine, tmp_path_factory):
    runs = tmp_path_factory.mktemp("served")
    arms = loaded.settings(engine, *NAMES)
    return loaded.measured(engine, arms, "pp8+tg4", "1,2", 6, 0, str(runs)), runs


def test_each_setting_serves_the_same_load(served):
    found, runs = served
    table = loaded.latency_table(found)
    assert list(table["in flight"]) == [1, 2] * 3 and (table["failed"] == 0).all()
    for name, made in found.items():
        (folder,) = runs.glob(f"*-served-{loaded.slug(name)}")
        assert load_served(folder).rows[1].figures["completed"] == 6
        assert {row.figures["total_output_tokens"] for row in made.rows} == {6 * 4}
    assert [*loaded.curves(found)["curve"].unique()] == [*NAMES]
    assert plots.throughput_against_latency(loaded.curves(found, "mean_ttft_ms")).axes
    assert list(loaded.sampling_table(found)["sampling"]) == ["host", "device", "host"]
