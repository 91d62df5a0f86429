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
    branches,
    conclusions,
    fitted,
    launches,
    loaded,
    masked,
    skipped,
    together,
)
from workbench.answers.conclusions import effects
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.stats import speedup
from workbench.benchmarks.runs import provenance, results
from workbench.benchmarks.runs.draft import new_arm, new_run
from workbench.common.tables import NO_TERMINAL, markdown
from workbench.report import plots
from workbench.traffic.bench import ServedRow, load_served
from workbench.traffic.load import Arrivals

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
    assert list(visits["gate"]) == ["closed", "closed", "open", "closed", "open", "closed"]
    share = visits[["in_loop", "tail", "classes"]].map(lambda text: int(text.rstrip("%")))
    assert (share["in_loop"] < 100).all() and (share["in_loop"] <= share["classes"]).all()
    assert list(visits["cache"][visits["gate"] == "open"]) == ["per_sequence"] * 2
    assert visits.shape == (6, 6), "a lesson's table"


@pytest.fixture(scope="module")
def by_size(engine, tmp_path_factory):
    runs, background = str(tmp_path_factory.mktemp("runs")), skipped.served(engine)
    tests = skipped.tests_of("tg2", "1,2", 32)
    return (
        skipped.by_ubatch(engine, background, masked.PROMPTS, 32, 1, 0, runs),
        skipped.side_by_side(engine, background, masked.TOGETHER, tests, 1, 0, runs),
        skipped.by_kernel(engine, background, tests[:2], 1, 0, runs),
        runs,
    )


@pytest.mark.long
def test_prompts_are_computed_by_so_many_tokens(by_size):
    prompts, *_, runs = by_size
    assert list(prompts) == [8, 32]
    for n, found in prompts.items():
        assert found.run["engine"]["config"]["n_ubatch"] == n
        assert [arm["name"] for arm in found.run["arms"][:-1]] == [*masked.PROMPTS.values()]
    (frame,) = skipped.ubatch_frames(prompts, masked.PROMPTS).values()
    assert set(frame["label"]) == {*[*masked.PROMPTS][1:]} and set(frame["x"]) == {8, 32}
    folders = results.runs(runs)["folder"]
    assert len(folders) == 4 and all(AB.load(f).summary()["n"].eq(1).all() for f in folders)


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


@pytest.mark.long
def test_requests_of_random_lengths_are_the_same_for_all(engine, tmp_path):
    found = skipped.ragged(engine, skipped.served(engine), 40, 3, 6, 2, 0, str(tmp_path))
    assert [*found] == [*masked.WAYS, skipped.AGAIN] and {*found.values()} == {*tmp_path.iterdir()}
    served = [load_served(folder) for folder in found.values()]
    assert len({made.rows[0].figures["total_input_tokens"] for made in served}) == 1
    for made in served:
        assert made.run["engine"]["toggles"]["kv_cache"] == "per_sequence"
        assert made.rows[0].figures["completed"] == 6
    frame = skipped.ragged_frame(found)
    assert len(frame) == 2 * 4 and frame.attrs["requests"] == 6
    times = {
        name: run.samples[run.samples["token"] == 0].set_index("repetition")["ns"]
        for name in ("off", "tail")
        for run in [results.load_run(found[name])]
    }
    row = frame[(frame["phase"] == "prompts") & (frame["label"] == "tail")].iloc[0]
    assert row["speedup"] == pytest.approx((times["off"] / times["tail"]).median())
    table = skipped.ragged_table(frame)
    assert list(table["skip_masked_kv"]) == [*masked.WAYS[1:], skipped.AGAIN]
    assert table.attrs["constant"]["requests"] == "6"


def test_a_way_is_held_against_its_control_request_by_request(tmp_path):
    folders = {}
    ways = {"off": 1.0, "in_loop": 1.01, "tail": 0.5, "classes": 1.5, skipped.AGAIN: 1.02}
    shape = {"due_ns": 0, "sent_ns": 0, "end_ns": 1, "n_wanted": 3, "n_made": 3, "status": "ok"}
    facts = {"model": {}, "engine": {}} | provenance.collect()
    for number, (name, times) in enumerate(ways.items()):
        folder = folders[name] = tmp_path / str(number)
        run = new_run("serve", name, name, facts, [new_arm("c", {})], ["x"], 8, 0)
        samples = results.SampleTable(name)
        noise = np.random.default_rng(number)
        rows = []
        for request in range(8):
            # requests differ much more than ways do; a stall in one gap of each counts nothing
            ns = 1e6 * (1 + request) * times * noise.uniform(0.99, 1.01, 4)
            ns[0], ns[2] = ns[0] * 10, ns[2] * 50
            samples.add("c", False, "x", request, ns.astype(np.int64), np.array([9, 1, 1, 1]))
            rows.append(shape | {"run_id": name, "arm": "c", "request": request, "n_prompt": 9})
        requests = pd.DataFrame(rows).assign(finish="length", why="")
        results.write_run(folder, run, samples.frame(), {results.REQUESTS: requests})
    frame = skipped.ragged_frame(folders)
    verdicts = frame.pivot(index="label", columns="phase", values="verdict")
    for phase in skipped.PHASES:
        assert dict(verdicts[phase]) == {
            "in_loop": "no difference", "tail": "faster", "classes": "slower",
            skipped.AGAIN: "no difference",
        }  # fmt: skip
    table = skipped.ragged_table(frame).set_index("skip_masked_kv")
    assert table.loc["tail", "generated"].endswith(" faster")
    assert table.loc["in_loop", "prompts"].endswith(" =") and "tail" not in table.columns
    assert " " not in table.loc[skipped.AGAIN, "generated"], "a control has no verdict"


@pytest.mark.long
def test_what_skipping_saves_is_said(engine, by_size, visits):
    prompts, together, by_kernel, _ = by_size
    (frame,) = skipped.ubatch_frames(prompts, masked.PROMPTS).values()
    phases = skipped.phase_summary(together, masked.TOGETHER)
    kernels = skipped.phase_summary(by_kernel, skipped.kernels(engine))
    assert [*skipped.kernels(engine)] == ["vec", "auto", "tile"], "no matrix units here"
    shown = skipped.scaling_table(kernels)
    assert list(shown) == ["generated in", "t/s vec", "auto", "tile"]
    assert {arm["toggles"]["kv_cache"] for arm in by_kernel.run["arms"]} == {"per_sequence"}
    frame, phases = (f.assign(verdict="no difference") for f in (frame, phases))
    phases.attrs["baseline"] = kernels.attrs["baseline"] = "off"
    here = (frame["x"] == 32) & (frame["label"] == "tail")
    frame.loc[here, ["verdict", "speedup"]] = "faster", 2
    ragged = pd.DataFrame(
        [
            {"phase": phase, "label": "tail", "speedup": speedup, "verdict": verdict,
             "is_control": False}
            for phase, speedup, verdict in (
                ("prompts", 1.5, "faster"), ("generated", 1.0, "no difference"),
            )
        ]
    )  # fmt: skip
    compared = {**prompts, "together": together, "kernels": by_kernel}
    points = pd.DataFrame({"mean prompt": [9000.0, 1000.0], "s off": [3, 1], "s tail": [2, 1]})
    fit = fitted.Fitted(points, "32", "a model; a card (of many)", "fits.")
    text = str(conclusions.skipping(visits, frame, phases, ragged, kernels, compared, fit))
    first, *rest = text.splitlines()
    assert first == (
        "The thread of #14924 has up to 15 % (6x RTX 4090 at 1350 MHz, 32 slots); here with tail, "
        "recorded, a server with 32 slots and prompts of random lengths is 1.00 times as fast at "
        "1,000 tokens a prompt in the mean and 1.50 at 9,000 tokens a prompt (a card); in this "
        "run, with tail: 32 tokens of a prompt at once, 100.0% faster; tokens of several "
        "sequences, no difference; requests of random lengths, 50.0% faster to the first token and "
        "no difference between tokens."
    )
    for said in ("faster 2.000 (tail)", "open to 3 prompts (per_sequence)", "bit-equal in "):
        assert said in text
    assert rest[-1] == "Recorded: fits."
    rows = (phases["label"] == "tail") & (phases["phase"] == "generated")
    first_row, last_row = phases[rows].index[[0, -1]]
    phases.loc[first_row, ["verdict", "speedup"]] = "slower", 0.5
    phases.loc[last_row, "speedup"] = 7.0
    phases.loc[last_row, "verdict"] = "faster"
    text = str(conclusions.skipping(visits, frame, phases, ragged, kernels, compared, None))
    wanted = (
        r"in this run, .* sequences, 50.0% slower \(.+ cells\), 600.0% faster \(.+ cells\) and "
        r"no difference \(.+ cells\); requests"
    )
    assert re.search(wanted, text.splitlines()[0]), "every verdict, with its rows"


NAMES = ("start", "serving", "serving sampling=host")


def test_settings_take_one_thing_away(engine):
    arms = loaded.settings(engine, *NAMES)
    assert arms["start"] == engine.toggles
    assert arms["serving"].kv_cache == "per_sequence" and arms["serving"].results == "behind"
    assert arms["serving"].switched("sampling", "host") == arms[NAMES[2]]
    config = loaded.config("embedded", "pp1024+tg128", "1,4")
    assert (config.n_seqs, config.n_ctx) == (4, 4 * 1280)


def test_batched_bench_s_table(engine, tmp_path):
    arms = loaded.settings(engine, "serving")
    table = loaded.together_table(engine, arms, "pp8+tg2", "1,2", 1, 0, str(tmp_path))
    assert list(table) == ["B", "S_PP serving", "S_TG serving", "S_TG / B"]
    assert list(table["B"]) == [1, 2] and table.attrs["constant"]["PP"] == "8"
    assert table["S_TG / B"][1] == pytest.approx(table["S_TG serving"][1] / 2)


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
def test_each_setting_serves_the_same_steady_load(engine, tmp_path):
    arms = loaded.settings(engine, *NAMES[1:], loaded.CONTROL)
    assert arms[loaded.CONTROL] == arms["serving"]
    found = loaded.measured(engine, arms, "pp8+tg8", "1,2", 12, 0, str(tmp_path))
    for name, made in found.items():
        (folder,) = tmp_path.glob(f"*-served-{loaded.slug(name)}")
        again = loaded.load_steady(folder)
        assert np.array_equal(again.rates, made.rates) and len(made.rates) > 5
        assert [row.n_requests for row in again.served.rows] == [12, 24], "12 for each in flight"
        assert [row.figures["completed"] for row in made.served.rows] == [12, 24]
    assert [*loaded.curves(found)["curve"].unique()] == list(NAMES[1:]), "the control has no curve"
    assert plots.throughput_against_latency(loaded.curves(found, "mean_ttft_ms")).axes
    table = loaded.settings_table(found)
    assert list(table["setting"]) == [NAMES[2], loaded.CONTROL]
    assert table["verdict"].iloc[-1] == "A/A control"
    assert loaded.latency_table(found).shape == (3, 6)
    arrived = loaded.arriving(engine, arms["serving"], 12.0, "pp8+tg2", "1,2", 3, 0, str(tmp_path))
    arrivals = loaded.arrivals_table(found["serving"], arrived)
    assert list(arrivals["requests come"]) == ["2 in flight", loaded.ONE_BY_ONE, loaded.AT_ONCE]
    assert arrived[loaded.ONE_BY_ONE].rows[0].setting == Arrivals("poisson", 6)
    assert arrived[loaded.AT_ONCE].rows[0].figures["completed"] == 12, "two seconds"
    scaling = loaded.scaling(found)
    assert set(scaling["curve"]) == {loaded.LLAMA, loaded.VLLM, loaded.OURS, loaded.HERE}
    assert plots.scaling(scaling).axes[0].get_legend_handles_labels()[1][1:] == list(
        scaling["curve"].unique()
    )
    figures, speedups = loaded.figures_of(found), loaded.speedups(found)
    first, second, *rest = str(
        conclusions.serving(figures, speedups, arrivals, scaling)
    ).splitlines()
    assert first.startswith(
        "From 1 to 2 in flight, with 8 and 8 tokens a request, the tokens a secon"
    )
    assert second.startswith(
        "With 1024 and 128 tokens a request, 1 to 2 in flight, they grow 1.6 ti"
    )
    assert "1.6 times (llama.cpp (#14924)), 1.6 times (vLLM (#14924))" in second
    assert rest[-1].startswith("Until the first token of a request pass in the mean: ")
    control = speedups["setting"] == loaded.CONTROL
    speedups.loc[control, ["speedup", "low", "high"]] = 0.93, 0.93, 0.98
    text = str(conclusions.serving(figures, speedups, arrivals, scaling[scaling["x"] == 1]))
    assert "Measured twice, serving has 0.930 times the steady tokens a second of itself" in text
    assert "With 1024 and 128 tokens a request" not in text, "no two loads to hold side by side"


def test_a_steady_load_is_judged_by_its_control(engine):
    def of(tps: float) -> loaded.Steady:
        return loaded.Steady(None, tps * (1 + 0.01 * np.sin(np.arange(20))))

    found = {"serving": of(100), "slow": of(50), "alike": of(101), loaded.CONTROL: of(102)}
    frame = loaded.speedups(found).set_index("setting")
    assert list(frame["verdict"]) == ["slower", "no difference", "A/A control"]
    assert frame.loc["slow", "speedup"] == pytest.approx(0.5)
    none = loaded.speedups(found | {"slow": loaded.Steady(None, np.empty(0))})
    assert none["verdict"][0] == "too few repetitions"


def test_the_thread_s_table_stands_beside_ours(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(
        "<!-- begin over-http -->\n| Model | in flight | t/s in process |\n|---|---:|---:|\n"
        "| llama-3.2-1b Q4_K | 1 | 100 |\n| llama-3.2-1b Q4_K | 32 | 800 |\n\n"
        "a card; commit 1234\n\nmore\n<!-- end over-http -->\n"
    )
    total = ("total_input_tokens", "total_output_tokens", "completed")
    figures = dict.fromkeys((*loaded.FIGURES, *total), 5.0)
    row = ServedRow(Arrivals("concurrency", 1), 9, figures, {})
    served = {"serving": loaded.Steady(type("Made", (), {"rows": [row]}), np.empty(0))}
    frame = loaded.scaling(served, page)
    table = loaded.thread_table(frame).set_index("in flight")
    assert list(table.index) == list(loaded.SHOWN) and table.shape == (7, 5)
    assert table.loc[128, "llama.cpp s"] == 176.2 and table.loc[128, "vLLM s"] == 115.2
    assert table.loc[16, "vLLM, times"] == pytest.approx(1394.9 / 186.6)
    assert table.loc[32, "ours, times"] == 8 and math.isnan(table.loc[64, "ours, times"])
    assert "llama-3.2-1b Q4_K; a card; commit 1234" in str(table.attrs["constant"])
    assert set(frame["x"][frame["curve"] == loaded.VLLM]) >= {2, 3}, "the picture has all of them"
    bare = loaded.scaling(served, tmp_path / "none.md")
    assert loaded.OURS not in set(bare["curve"]) and len(loaded.thread_table(bare)) == 7


def test_the_recorded_fit_is_drawn(tmp_path):
    page = tmp_path / "README.md"
    rows = "".join(
        f"| 1b | 32 | {x} | 200 | {1 + x + 2 * x * x:.3f} | {1 + x + x * x:.3f} |\n"
        for x in (1, 2, 3, 4)
    )
    page.write_text(
        "<!-- begin random-lengths -->\n| Model | slots | mean prompt | requests | s off | s tail |"
        f"\n|---|---|---|---|---|---|\n{rows}\na card\n\nfits in words.\n"
        "<!-- end random-lengths -->\n"
    )
    found = fitted.recorded(page)
    assert fitted.quadratic(found.points, fitted.OFF) == pytest.approx([1, 1, 2])
    table = fitted.table(found)
    assert table["fit tail"].tolist() == pytest.approx([3, 7, 13, 21]) and table.shape == (4, 6)
    assert fitted.words(found) == "Recorded: fits in words." and found.about == "1b; a card"
    curves = fitted.curves(found)
    assert len(plots.fits(curves).axes[0].get_legend_handles_labels()[1]) == 2
    # where nothing is recorded a cell shows that, and does not fail
    none = fitted.recorded(tmp_path / "none.md")
    assert none is None and fitted.table(none).empty and fitted.words(none) == ""
    assert plots.fits(fitted.curves(none)).axes[0].texts[0].get_text() == "nothing is recorded"
    here = fitted.recorded()
    assert here is not None and "NVIDIA" in here.about and "for prompts without end" in here.said


def ab(name: str) -> AB:
    return AB.load(RUNS / f"notebook-{name}")


def said_of(*runs: AB) -> list[str]:
    return [sentence for run in runs for sentence in effects(run)]


def outputs(notebook: str) -> list[str]:
    """What cells of the committed notebook show as text; its answer is the last."""
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert "conclusions." in "".join(code[-1]["source"])
    if not code[-1]["outputs"]:
        pytest.skip(f"{notebook} is not recorded: tests/notebooks/test_notebooks.py says so")
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
        f"{where}no difference from sync=per_copy (A/A band 0.999..1.001): blocking_copies.",
    ]
    shown = conclusions.Conclusion("one `h s` < two\nthree")._repr_html_()
    assert shown == '<p class="wb-answer">one <code>h s</code> &lt; two<br>three</p>'


def test_launches_of_a_layer(tiny_model):
    """Of every fusion, and the nodes of a layer."""
    layers, fuse = {}, wb.Toggles().switched("fuse", "on")
    with tiny(tiny_model, "null") as engine:
        table = launches.launches_table(engine).set_index("toggle")
        assert [one.name for one in launches.weight_types(engine.program())] == ["Q8_0"]
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
    assert len(fused) == 7 and list(launches.shown_table(table.reset_index())["toggle"]) == [
        name
        for name in wb.Toggles.members("fuse")
        if name not in ("fuse_bias", "fuse_product_norm")
    ]
    runs = ab("fusion"), ab("defer")
    made = conclusions.launches(layers, *runs).splitlines()
    first, counts = made[0], "A layer takes 23 launches unfused, 7 fused and 6 with halved norms: "
    assert first.startswith(counts) and first.endswith(" with defer_norm after it.")
    assert made[1:] == said_of(*runs)


def test_launches_are_answered_by_the_runs_beside_them():
    runs, said = (ab("fusion"), ab("defer")), answer("10_fusion")
    assert said[1:] == said_of(*runs)
    gains = [conclusions.each_arm(run, run.run["tests"][0]) for run in runs]
    end = f"{gains[0]} with fuse and {gains[1]} with defer_norm after it."
    assert said[0].startswith("A layer takes ") and said[0].endswith(end)


@pytest.mark.long
def test_whether_streams_help(tiny_model):
    every = branches.arms(branches.kept())
    assert [*every] == ["streams=1", "streams=3", "streams=4 fork=any"]
    assert branches.arms(branches.planned())["streams=3"].plan_scope == "step"
    arms = {name: every[name] for name in ("streams=1", "streams=3")}
    with tiny(tiny_model, "embedded", unsafe=True) as engine:
        forks = branches.forks_table(engine, arms)
        victims = branches.victims_table(engine, arms["streams=3"], layer=0)
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
    assert (overlap["us a token"] > 0).all() and overlap.shape == (2, 6)
    # the picture names at the lost bytes who writes, and the table who may still read
    (row,) = lost["lifetimes=serial"]
    assert row == [(*row[0][:3], "Kcur_rope")]
    assert list(victims["lifetimes"]) == ["serial", "interleaved"]
    assert set(victims["victim"]) == {"attn_norm (w) (q8)"}
    assert set(victims["writer"]) == {"Kcur_rope (stream 0)"}
    assert set(victims["may still read it"]) == {"Qcur (stream 2), Vcur (stream 3)"}
    texts = [text.get_text() for ax in plots.lifetimes(frames).axes for text in ax.texts]
    assert texts.count("Kcur_rope writes over\nattn_norm (w) (q8)") == 2
    made = conclusions.streams(forks, lifetimes, ab("streams-on"), ab("streams-off")).splitlines()
    first = (
        "The thread of #16991 has 1 to 9 % (RTX 5090, RTX 4090); here side by side, with plans, "
    )
    assert made[0].startswith(f"{first}tg32: ")
    assert made[2] == "Side by side, memory races with lifetimes serial and interleaved."


def test_streams_are_answered_by_the_runs_beside_it():
    runs = ab("streams-on"), ab("streams-off"), ab("streams-fused")
    assert runs[0].run["tests"][1] == "pp512", "the thread's control"
    sentences, said = said_of(*runs), answer("05_streams")
    assert said[-len(sentences) :] == sentences
    assert f"pp512: {conclusions.each_arm(runs[0], 'pp512')}; memory may be shared" in said[0]


def test_a_table_of_two_tests_has_six_columns():
    """The rounds on a slow host do not count, so one test may have more than another."""
    compared = ab("streams-on")
    counted = compared.summary().groupby("test", sort=False)["n"].first()
    assert counted.nunique() == 2, "recorded with different numbers of rounds"
    table = branches.by_test(compared)
    said = ", ".join(f"{n} ({test})" for test, n in counted.items())
    text = markdown(table, NO_TERMINAL)
    lines = text.splitlines()
    assert f"n: {said}" in " ".join(lines[:2])
    header = next(line for line in lines if line.startswith("| Test"))
    assert [name.strip() for name in header.split("|")[1:-1]] == [
        "Test", "Toggled", "t/s toggled", "Speedup", "95% CI", "verdict",
    ]  # fmt: skip
    assert text in outputs("05_streams"), "the recorded table is that of its run folder"


def test_skipping_is_answered_by_the_runs_beside_it():
    said, text = answer("06_masked_kv"), " ".join(" ".join(outputs("06_masked_kv")).split())
    folders = {name: f"notebook-ragged-{name.replace('_', '-')}" for name in masked.WAYS}
    folders[skipped.AGAIN] = "notebook-ragged-off-again"
    ragged = skipped.ragged_frame({name: RUNS / of for name, of in folders.items()})
    every = [AB.load(path) for path in sorted(RUNS.glob("notebook-prompts-in-*"))]
    prompts = {one.run["engine"]["config"]["n_ubatch"]: one for one in every}
    (frame,) = skipped.ubatch_frames(prompts, masked.PROMPTS).values()
    phases = skipped.phase_summary(ab("side-by-side"), masked.TOGETHER)
    by_kernel = ab("attn-kernel")
    arms = {arm["name"].partition("=")[2]: arm["name"] for arm in by_kernel.run["arms"][:-1]}
    kernels = skipped.phase_summary(by_kernel, arms)
    assert next(iter(arms)) == "vec" and "mma" in arms
    none = pd.DataFrame(columns=["step", "cache", "gate"])
    compared = {**prompts, "together": ab("side-by-side"), "kernels": by_kernel}
    fit = fitted.recorded()
    made = conclusions.skipping(none, frame, phases, ragged, kernels, compared, fit).splitlines()
    assert [line for line in said if not line.startswith("The gate ")] == made
    tables = (
        skipped.ubatch_table(prompts, masked.PROMPTS), skipped.scaling_table(phases),
        skipped.scaling_table(kernels), skipped.ragged_table(ragged),
    )  # fmt: skip
    for table in tables:
        cells = [str(cell) for cell in table.to_numpy().ravel() if isinstance(cell, str)]
        assert len(cells) >= 4 and not [cell for cell in cells if cell not in text]


def test_serving_is_answered_by_the_runs_beside_it():
    names = (loaded.SERVING, *loaded.SUSPECTS, loaded.CONTROL)
    found = {
        name: loaded.load_steady(RUNS / f"notebook-served-{loaded.slug(name)}") for name in names
    }
    for made in found.values():
        for row in made.served.rows:
            assert row.n_requests == loaded.PER_SLOT * row.setting.in_flight, "a steady load"
    arrived = {
        name: load_served(RUNS / f"notebook-arriving-{loaded.slug(name)}")
        for name in (loaded.ONE_BY_ONE, loaded.AT_ONCE)
    }
    arrivals = loaded.arrivals_table(found["serving"], arrived)
    figures, speedups, scaling = (
        of(found) for of in (loaded.figures_of, loaded.speedups, loaded.scaling)
    )
    made = conclusions.serving(figures, speedups, arrivals, scaling)
    assert answer("07_batched_serving") == made.splitlines()


def test_waiting_and_gains_are_answered_by_the_runs_beside_them():
    sentences = said_of(ab("waiting"))
    assert answer("01_baseline_gaps")[-len(sentences) :] == sentences
    found = ab("together")
    alone = {name: changes for name, changes in together.MECHANISMS.items()
             if changes in {arm["name"] for arm in found.run["arms"]}}  # fmt: skip
    gains = together.gains(found, alone)
    assert answer("09_together") == conclusions.together(gains).splitlines()
