"""The notebooks' tables, and the answers they end with; the committed answers are the runs' own."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import workbench as wb
from tests.benchmarks.made_runs import comparison
from workbench.answers import (
    annotated,
    branches,
    conclusions,
    kept,
    launches,
    loaded,
    masked,
    planned,
    proofs,
    skipped,
)
from workbench.answers.conclusions import effects
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.stats import speedup
from workbench.benchmarks.runs import results
from workbench.benchmarks.runs.results import load_run
from workbench.benchmarks.times.gaps import Gaps
from workbench.benchmarks.times.token_parts import PARTS
from workbench.engine.programs import WAYS
from workbench.report import plots
from workbench.trace.profile import Timeline
from workbench.trace.spans import HOST_LANE, Span
from workbench.traffic.bench import load_served

KEPT = wb.Toggles(graph_reuse="set_rows", sync="packed_implicit")
STEP = wb.Toggles(**KEPT.changed(), plans="ours", plan_scope="step")
ARMS = {
    "off": KEPT,
    "a split": STEP.switched("plan_scope", "split"),
    "a step": STEP,
    "direct": STEP.switched("results", "direct"),
}


ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "data" / "results"


def tiny(tiny_model, device: str, toggles: object = "baseline", **options) -> wb.Engine:
    path = tiny_model("tiny-llama", "Q8_0")
    return wb.Engine.load(path, device=device, toggles=toggles, **options)


@pytest.fixture(scope="module")
def planning(tiny_model):
    with tiny(tiny_model, "embedded", n_kv_pad=16) as engine:
        yield engine


@pytest.fixture
def null(tiny_model):
    with tiny(tiny_model, "null", KEPT, n_seqs=2, n_kv_pad=16) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(tiny_model):
    with tiny(tiny_model, "embedded", n_ctx=4096, n_seqs=8, n_ubatch=256) as opened:
        yield opened


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


@pytest.mark.long
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


@pytest.mark.long
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
    sizes = {
        name: {s.args["n_tokens"] for s in trace.timeline.spans if s.category == "step"}
        for name, trace in traces.items()
    }
    beside = "253 tokens of a prompt beside them"
    assert sizes == {"a token of each of 3 requests": {3}, beside: {256}}


@pytest.mark.long
def test_each_setting_serves_the_same_load(engine, tmp_path):
    arms = loaded.settings(engine, *NAMES)
    found = loaded.measured(engine, arms, "pp8+tg4", "1,2", 6, 0, str(tmp_path))
    table = loaded.latency_table(found)
    assert list(table["in flight"]) == [1, 2] * 3 and (table["failed"] == 0).all()
    for name, made in found.items():
        (folder,) = tmp_path.glob(f"*-served-{loaded.slug(name)}")
        assert load_served(folder).rows[1].figures["completed"] == 6
        assert {row.figures["total_output_tokens"] for row in made.rows} == {6 * 4}
    assert [*loaded.curves(found)["curve"].unique()] == [*NAMES]
    assert plots.throughput_against_latency(loaded.curves(found, "mean_ttft_ms")).axes
    assert list(loaded.sampling_table(found)["sampling"]) == ["host", "device", "host"]


def ab(name: str) -> AB:
    return AB.load(RUNS / f"notebook-{name}")


def said_of(*runs: AB) -> list[str]:
    return [sentence for run in runs for sentence in effects(run)]


def outputs(notebook: str) -> list[str]:
    """What cells of the committed notebook show as text; its answer is the last."""
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    assert "conclusions." in "".join(cells[-1]["source"])
    shown = [o for cell in cells for o in cell.get("outputs", ())]
    return ["".join(o.get("data", {}).get("text/plain", "")) for o in shown]


def answer(notebook: str) -> list[str]:
    return outputs(notebook)[-1].splitlines()


def test_effects_are_said_of_all_arms_but_the_control():
    where = "In tg32 (beside copy_stream=own, all else off), "
    sentences = [re.sub(r"[\d.]+ times.*as fast", "N as fast", one.partition(" (95")[0])
                 for one in effects(comparison(tests=("tg32",)))]  # fmt: skip
    assert sentences == [
        f"{where}sync=copy_boundary is N as fast as sync=per_copy",
        f"{where}sync=write_read_boundary is N as fast as sync=per_copy",
        f"{where}no difference from sync=per_copy: blocking_copies.",
    ]
    shown = conclusions.Conclusion("one `h s` < two\nthree")._repr_html_()
    assert shown == '<p class="wb-answer">one <code>h s</code> &lt; two<br>three</p>'


def test_a_token():
    found = ab("tour")
    steps = pd.DataFrame({
        "launches": [53], "copies": [7], "waits": [13], "step_us": [3100.0], "build_us": [1780.0],
        "host_us": [444.0], "wait_us": [52.7], "device_us": [746.0], "idle_us": [float("nan")],
    })  # fmt: skip
    made, committed = conclusions.token(steps, found).splitlines(), answer("00_tour")
    assert "takes the host 3.10 ms: 1.78 ms to build the program, 444 us to issue it" in made[1]
    assert "The device works 746 us of that. It stands still unknown" in made[2]
    assert committed[0].partition("; ")[2] == made[0].partition("; ")[2]
    assert committed[3:] == made[3:] == said_of(found)


def test_launches_of_a_layer(tiny_model):
    """Of every fusion, and the nodes of a layer."""
    layers, fuse = {}, wb.Toggles().switched("fuse", "on")
    with tiny(tiny_model, "null") as engine:
        table = launches.launches_table(engine).set_index("toggle")
        assert list(table.index) == [*wb.Toggles.members("fuse"), "fuse"]
        none = engine.program().counts()["launches"]
        assert (table["alone"] + table["removes"] == none).all() and (table["removes"] >= 0).all()
        assert table.loc["fuse", "without it"] == none
        assert table.loc["fuse_bias", "removes"] == 0, "the model has no biases"
        for name, toggles in (
            ("unfused", wb.Toggles()),
            ("fused", fuse),
            ("with halved norms", fuse.switched("defer_norm", "on")),
        ):
            with engine.variant(toggles) as side:
                layers[name] = launches.nodes_table(side.program())
        counts = launches.counts_table({"rebuild": engine.program()})
        assert counts.loc[0, "launches"] == none
    fused, halved = layers["fused"], layers["with halved norms"]
    glu = "mul_mat + mul_mat + swiglu + quantize"
    assert fused.loc[fused["op"] == "glu", "parts"].item() == glu
    assert list(halved["node"])[::5] == ["attn_norm-0", "ffn_out-0"], "the first norm is whole"
    runs, committed = (ab("fusion"), ab("defer")), answer("10_fusion")
    made = conclusions.launches(layers, *runs).splitlines()
    first = "A layer takes 23 launches unfused, 7 fused and 6 with halved norms."
    assert made == [first, *committed[1:]] and committed[1:] == said_of(*runs)
    assert re.sub(r"\d+", "N", committed[0]) == re.sub(r"\d+", "N", first)


@pytest.mark.long
def test_which_waits(tiny_model):
    with tiny(tiny_model, "null", n_ubatch=16, unsafe=True) as prover:
        decode = proofs.proof_table(proofs.cycles(prover))
        train = proofs.proof_table(proofs.cycles(prover, 48, "train"))
    run, runs = load_run(RUNS / "notebook-gaps"), (ab("sync-off"), ab("sync-on"))
    made = conclusions.waits(decode, train, Gaps(run.run, run.samples), *runs).splitlines()
    assert answer("02_sync_modes") == made


def test_what_building_costs(null):
    off, on, steps = ab("reuse-off"), ab("reuse-on"), kept.reuse_table(null)
    names, worth = wb.Toggles.members("redo"), kept.worth_table(on)
    layers = kept.layers_table({name: ab(name.replace("_", "-")) for name in names})
    tables = {"phases": kept.phases_table(off), "steps": steps, "layers": layers, "worth": worth}
    quoted = "Verdict on #8366, at llama.cpp's build time: 1.01."
    made = conclusions.reuse(tables, quoted, off, on).splitlines()
    own = worth.set_index("whose").loc[kept.OWN, "a build costs, us"]
    phases = kept.phases_us(on.run["arms"][0]["counters"])
    wanted = ("graph", "fuse", "split", "layout", "lower", "prepare")
    assert own == pytest.approx(sum(phases[phase] for phase in wanted))
    committed = [line for line in answer("03_graph_reuse") if not line.startswith("Verdict")]
    assert made[:6] + made[7:] == committed and made[6] == quoted


def test_when_plans_repay_themselves():
    """Of tables made up, of two tokens of 100 us; and of the runs."""
    found, arms, nan = ab("plans-on"), ["off", "a split", "a step"], float("nan")
    made = {"arm": "ours", "tokens": 24, "captured": 2, "twinned": 0, "updated": 0,
            "capture us": 40.0, "instantiate us": 60.0, "update us": 17.25}  # fmt: skip
    some = pd.DataFrame([made])
    for us, verdict, after in ((4.0, "faster", "50"), (-4.0, "slower", "never"),
                               (4.0, "no difference", "not known")):  # fmt: skip
        ours = {"arm": "ours", "is_control": False, "tps_baseline": 1e4, "verdict": verdict,
                "tps_toggled": 1e6 / (100 - us)}  # fmt: skip
        found.summary = lambda ours=ours: pd.DataFrame([ours])
        repaid = planned.repaid_table(some, found)
        row = repaid[["us for captures", "repaid after tokens"]]
        assert row.to_numpy().tolist() == [[200.0, after]]
    gap = {"arm": arms, "gap us": [40.31, 35.0, 29.0], "saved us": [nan, 1.0, 10.0],
           "95% CI": ["", "-1.0..2.0", "9.0..11.0"], "captures us": [nan, 99.0, 200.0],
           "repaid after tokens": ["", "not known", "20"]}  # fmt: skip
    tables = {
        "calls": pd.DataFrame({"arm": arms[::2], "nodes": [54, 54], "calls": [54, 1]}),
        "made": some, "repaid": repaid, "gap": pd.DataFrame(gap),
        "forced": pd.DataFrame([made, made | {"arm": "patch_pointers", "updated": 23}]),
        "proof": pd.DataFrame({"ordering": arms, "races": ["none", "none", 3], "because": ""}),
    }  # fmt: skip
    assert (
        conclusions.plans(tables)
        == """\
By the device's clock captures are repaid after so many tokens: 20 (a step).
The device is given 54 kernels and copies a token; calls of the host for them: 54 (off) and 1 \
(a step).
plans=ours captures 2 in 24 tokens, which takes 200 us in all. The comparison does not tell when \
that is repaid, as it shows no difference.
patch_pointers updates its plan for 23 of 24 tokens, 17.2 us each.
Plans where n_kv grows: 2 captured and 0 updated (ours).
Between the kernels of two tokens are 40.3 us (off), 35.0 us (a split) and 29.0 us (a step).
By the device's clock a token is no shorter for sure with a split (95% CI -1.0..2.0).
By the device's clock a token is 10.0 us shorter with a step (95% CI 9.0..11.0); its captures took \
200 us, repaid after 20 tokens.
These race: a step."""
    )
    sentences = said_of(ab("plans-off"), ab("plans-on"))
    assert answer("04_plans")[-len(sentences) :] == sentences


def test_whether_streams_help(tiny_model):
    one = wb.Toggles(graph_reuse="set_rows", sync="packed_implicit")
    arms = {"streams=1": one, "streams=3": one.switched("streams", "3")}
    with tiny(tiny_model, "embedded", unsafe=True) as engine:
        forks = branches.forks_table(engine, arms)
        lifetimes = branches.lifetimes_table(engine, arms["streams=3"])
        frames = branches.layer_frames(engine, arms["streams=3"], layer=0)
        overlap = branches.overlap_table(engine, arms, n_tokens=3)
    assert forks["streams"].tolist() == [1, 3] and forks["waits of streams"].tolist() == [0, 8]
    races = lifetimes["races"].tolist()
    assert races[2] == "none" and "none" not in races[:2]
    assert lifetimes["all finds it"].tolist() == ["yes", "yes", "nothing to find"]
    lost = {name: [row for row in frame["lost"] if row] for name, frame in frames.items()}
    assert lost["lifetimes=serial"] and not lost["lifetimes=visibility"]
    assert overlap["arm"].tolist() == list(arms) and overlap["overlap"][0] == "0.0%"
    assert overlap["us a branch"][0] == branches.NONE and " to " in overlap["us a branch"][1]
    assert overlap["branches unresolved"].tolist() == ["0 of 0", "0 of 6"]
    assert (overlap[["us a token", "with noting", "times as long"]] > 0).all(axis=None)
    runs = ab("streams-off"), ab("streams-on"), ab("streams-fused")
    made = conclusions.streams(forks, lifetimes, *runs).splitlines()
    end = -len(said_of(*runs))
    assert made[1] == "Side by side, memory races with lifetimes serial and interleaved."
    assert made[end:] == answer("05_streams")[end:] == said_of(*runs)


def test_skipping_is_answered_by_the_runs_beside_it():
    said, text = answer("06_masked_kv"), " ".join(" ".join(outputs("06_masked_kv")).split())
    sentences = said_of(ab("kv-parts"))
    assert said[-len(sentences) :] == sentences
    folders = {way: f"notebook-ragged-{way.replace('_', '-')}" for way in masked.WAYS}
    ragged = skipped.ragged_table(
        {f"skip_masked_kv={way}": load_served(RUNS / name) for way, name in folders.items()}
    )
    (line,) = (line for line in said if line.startswith("Prompts of random lengths"))
    for row in ragged.iloc[1:].itertuples():
        assert f"{row.speedup:.2f} times as fast with {row.way}" in line
    every = [AB.load(path) for path in sorted(RUNS.glob("notebook-prompts-in-*"))]
    prompts = {one.run["engine"]["config"]["n_ubatch"]: one for one in every}
    phases = skipped.phase_summary(ab("side-by-side"), masked.TOGETHER)
    tables = (skipped.ubatch_table(prompts, masked.PROMPTS), skipped.scaling_table(phases))
    for table in tables:
        cells = [str(cell) for row in table.to_numpy().tolist() for cell in row]
        assert len(cells) > 10 and not [cell for cell in cells if f" {cell} " not in text]


def test_serving_is_answered_by_the_runs_beside_it():
    changes = ("", " skip_masked_kv=off", " sampling=host", " kv_cache=unified")
    names = ["baseline", *(f"serving{change}" for change in changes)]
    served = {name: load_served(RUNS / f"notebook-served-{loaded.slug(name)}") for name in names}
    folders = ("own", "process", "http-whole", "http-streamed")
    ways = (loaded.IN_PROCESS, loaded.PROCESS, loaded.WHOLE, loaded.STREAMED)
    reached = {way: load_served(RUNS / f"notebook-ways-{folder}")
               for way, folder in zip(ways, folders, strict=True)}  # fmt: skip
    tables = loaded.figures_of(served), loaded.sampling_table(served), loaded.ways_table(reached)
    assert answer("07_batched_serving") == conclusions.serving(*tables).splitlines()


def test_phases_of_a_token():
    def host(category: str, start: int, end: int, **more: object) -> Span:
        return Span(category, category, HOST_LANE, start * 1000, end * 1000, {"step": 8, **more})

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
