"""The tables of the notebooks on masked cells and on batched serving."""

from __future__ import annotations

from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest

import workbench as wb
from workbench.answers import conclusions, loaded, masked, skipped
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.stats import speedup
from workbench.benchmarks.runs import results
from workbench.config import EngineConfig
from workbench.report import plots, sentences
from workbench.traffic.bench import load_served

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "data" / "results"
CONFIG = EngineConfig("embedded", n_ctx=4096, n_seqs=8, n_ubatch=256)


@pytest.fixture(scope="module")
def engine(tiny_model):
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(path, config=CONFIG, toggles="baseline") as opened:
        yield opened


@pytest.fixture(scope="module")
def path(tiny_model):
    return str(tiny_model("tiny-llama", "Q8_0"))


def test_what_a_picture_shows_is_what_the_device_is_given(engine):
    """The slow twin: blocks counted while the step is taken, with an open gate."""
    frames = masked.mask_frames(engine)
    assert len(frames) == len(masked.scenes()) == 5
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
        area = (off["n_tokens"] * off["n_cells"]).sum()
        n_kv = int((off["cell"] + off["n_cells"]).max())
        assert area == n_kv * sum(n for _, n in scene.work), "blocks tile the mask"


def test_the_gate_is_open_to_regions_and_closed_to_few_tokens_of_one(engine):
    table = masked.visits_table(engine, 256).set_index(["step", "cache"])
    gates = {(what, cache): row["gate"] for (what, cache), row in table.iterrows()}
    assert gates == {
        ("a prompt", "unified"): "closed", ("3 prompts", "unified"): "closed",
        ("3 prompts", "per_sequence"): "open", ("a token of 8", "unified"): "closed",
        ("a token of 8", "per_sequence"): "open", ("a prompt of 256", "unified"): "closed",
    }  # fmt: skip
    closed = table[table["gate"] == "closed"]
    assert set(closed["tail"]) == set(closed["classes"]) == {"100%"}
    opened = table[table["gate"] == "open"]
    assert (opened["tail"] == opened["tail, gate open"]).all()
    assert table.loc[("a token of 8", "per_sequence"), "regions"] == 8


def test_a_prompt_s_traces_have_the_look_at_the_mask_once(engine):
    ways = ("off", "tail", "classes")
    traces = masked.prompt_traces(engine, skipped.served(engine), 64, ways)
    looks = []
    for name, trace in traces.items():
        frame = trace.to_frame()
        steps = frame["step"].nunique()
        ops = frame[frame["category"] == "device"]["op"]
        looks.append({op: int((ops == op).sum()) // steps for op in ("kv_extents", "kv_classes")})
        assert steps == 3 and "untraced" in trace.note, name
    assert looks == [
        {"kv_extents": 0, "kv_classes": 0}, {"kv_extents": 1, "kv_classes": 0},
        {"kv_extents": 0, "kv_classes": 1},
    ]  # fmt: skip


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


def test_prompts_are_computed_by_so_many_tokens(by_size):
    prompts = by_size[0]
    assert list(prompts) == [2, 8, 32]
    for n, found in prompts.items():
        assert found.run["engine"]["config"]["n_ubatch"] == n
        assert [arm["name"] for arm in found.run["arms"][:-1]] == [*masked.PROMPTS.values()]
    table = skipped.ubatch_table(prompts, masked.PROMPTS)
    assert [*table.columns] == ["tokens at once", "t/s off", *[*masked.PROMPTS][1:]]
    (frame,) = skipped.ubatch_frames(prompts, masked.PROMPTS).values()
    assert set(frame["label"]) == set([*masked.PROMPTS][1:]) and set(frame["x"]) == {2, 8, 32}
    assert plots.speedup_by({"all": frame}).axes


def test_prompts_and_generated_tokens_are_told_apart(by_size):
    together = by_size[1]
    assert together.run["tests"] == ["pp4+tg2@b1", "pp4+tg2@b2", "pp1+tg2@b2", "pp8+tg2@b2"]
    phases = skipped.phase_summary(together, masked.TOGETHER)
    names = [arm["name"] for arm in together.run["arms"]]
    assert len(phases) == 4 * 2 * (len(names) - 1)
    assert phases.attrs["baseline"] == "per_sequence off"
    samples = together.samples[together.samples["test"] == "pp4+tg2@b2"]
    made = samples[samples["token"] > 0]
    rates = [
        made[made["arm"] == arm]["n_tokens"].sum() * 1e9 / made[made["arm"] == arm]["ns"].sum()
        for arm in names[:2]
    ]
    row = phases[(phases["test"] == "pp4+tg2@b2") & (phases["phase"] == "generated")].iloc[0]
    assert row["speedup"] == pytest.approx(speedup(np.array(rates[:1]), np.array(rates[1:])).value)
    by_slots, by_depth = skipped.scaling_frames(phases).values()
    assert set(by_slots["x"]) == {1, 2} and set(by_depth["x"]) == {1, 4, 8}
    table = skipped.scaling_table(phases)
    assert len(table) == 8 and [*masked.TOGETHER][1] in table.columns


def test_blocks_of_whole_tests(engine):
    table = masked.blocks_by_test(engine, ["pp64+tg2@b2"], masked.TOGETHER)
    assert list(table["phase"]) == ["prompts", "generated"]
    rows = table.set_index("phase")
    assert rows.loc["prompts", "per_sequence off"] == "100%"
    # 64 of 256 cells: the triangle of 16 x 8 blocks is 20 of 32, of 8 * 16 blocks in all
    assert rows.loc["prompts", "per_sequence in_loop"] == f"{20 / 128:.0%}"
    assert rows.loc["generated", "per_sequence in_loop"] == f"{5 / 16:.0%}"


def test_requests_of_random_lengths_are_the_same_for_all_ways(engine, tmp_path):
    background = skipped.served(engine)
    found = skipped.ragged(engine, background, 40, 3, 6, 2, 0, str(tmp_path))
    assert [*found] == [f"skip_masked_kv={way}" for way in masked.WAYS]
    table = skipped.ragged_table(found)
    assert (table["requests"] == 6).all() and table["tokens a prompt"].nunique() == 1
    assert table["speedup"].iloc[0] == 1
    for made, folder in zip(found.values(), sorted(tmp_path.iterdir()), strict=True):
        assert made.run["engine"]["toggles"]["kv_cache"] == "per_sequence"
        assert results.load_run(folder).run["kind"] == "serve"


def test_answers_and_sentences(engine, by_size, tmp_path):
    prompts, together, parts, _ = by_size
    compared = {f"a prompt by {n}": ab for n, ab in prompts.items()} | {"several": together}
    answers = skipped.answers_table(compared | {"parts": parts}, masked.PROMPTS, masked.TOGETHER)
    exact = answers[answers["answer"].str.startswith("exact")].set_index("comparison")
    ways = "in_loop; tail; classes"
    assert exact.loc["several", "arms"] == "; ".join(f"per_sequence {w}" for w in ways.split("; "))
    assert exact.loc["several", "baseline"] == "per_sequence off"
    assert exact.loc["a prompt by 8", "arms"] == f"{ways}; tail, gate open; classes, gate open"
    (frame,) = skipped.ubatch_frames(prompts, masked.PROMPTS).values()
    phases = skipped.phase_summary(together, masked.TOGETHER)
    frame, phases = (f.assign(verdict="no difference") for f in (frame, phases))
    phases.attrs["baseline"] = "per_sequence off"
    frame.loc[(frame["x"] == 32) & (frame["label"] == "tail"), ["verdict", "speedup"]] = "faster", 2
    ragged = pd.DataFrame(
        {"way": ["off", "tail"], "tokens a prompt": [9, 9], "speedup": [1.0, 1.5]}
    )
    visits = masked.visits_table(engine, 256)
    lines = conclusions.skipping(visits, frame, phases, ragged, parts, answers).splitlines()
    assert "pp32, 2 tokens at once, beside nothing skipped: no difference." in lines
    (mixed,) = (line for line in lines if line.startswith("pp32, 32 tokens"))
    assert "faster 2.00 (tail)" in mixed and "no difference: in_loop, classes" in mixed
    gates = [line for line in lines if line.startswith("The gate")]
    assert len(gates) == 2 and "open to 3 prompts (per_sequence, 120 tokens)" in gates[1]
    assert "once each: 1.50 times as fast with tail." in "\n".join(lines)
    (equal,) = (line for line in lines if line.startswith("Logits are bit-equal"))
    assert "5 of a prompt by 2, a prompt by 8 and a prompt by 32; 3 of several" in equal


def test_possible_values_are_those_that_the_device_takes(engine, monkeypatch):
    assert skipped.possible(engine, "kv_parts") == "kv_parts=off,parallel_blocks,stream_k,auto"
    kernels = skipped.possible(engine, "attn_kernel").partition("=")[2].split(",")
    assert "mma" not in kernels and {"auto", "vec"} <= set(kernels)


# many requests ------------------------------------------------------------------------------------

NAMES = ("baseline", "serving", "serving sampling=host")


def test_settings_take_one_thing_away(engine):
    arms = loaded.settings(engine, *NAMES)
    assert arms["baseline"] == engine.toggles
    assert arms["serving"].kv_cache == "per_sequence" and arms["serving"].results == "behind"
    assert arms["serving"].switched("sampling", "host") == arms[NAMES[2]]
    assert loaded.lengths("pp64+tg16") == (64, 16) and loaded.lengths("tg8") == (1, 8)
    assert loaded.ends("8,1,4") == "1,8" and loaded.ends("4") == "4"
    config = loaded.config("embedded", "pp1024+tg128", "1,4")
    assert (config.n_seqs, config.n_ctx) == (4, 4 * 1280)


def test_batched_bench_s_table(engine, tmp_path):
    arms = loaded.settings(engine, "serving")
    table = loaded.together_table(engine, arms, "pp8+tg2", "1,2", 1, 0, str(tmp_path))
    assert table[["PP", "TG", "B", "N_KV"]].to_numpy().tolist() == [[8, 2, 1, 10], [8, 2, 2, 20]]
    first = table.iloc[1]
    assert first["S_PP t/s"] == pytest.approx(16 / first["T_PP s"])
    assert first["S_TG t/s"] == pytest.approx(4 / first["T_TG s"])


def test_a_mixed_step_has_tokens_and_a_part_of_a_prompt(engine):
    arms = loaded.settings(engine, "serving")
    traces = loaded.step_traces(engine, arms["serving"], n_running=3, n_steps=2)
    assert [*traces] == [
        "a token of each of 3 requests", "253 tokens of a prompt beside them",
    ]  # fmt: skip
    sizes = []
    for trace in traces.values():
        steps = [s for s in trace.timeline.spans if s.category == "step"]
        sizes.append({s.args["n_tokens"] for s in steps})
        assert "times an untraced one" in trace.note
    assert sizes == [{3}, {256}]


@pytest.fixture(scope="module")
def served(engine, tmp_path_factory):
    runs = tmp_path_factory.mktemp("served")
    arms = loaded.settings(engine, *NAMES)
    return loaded.measured(engine, arms, "pp8+tg4", "1,2", 6, 0, str(runs)), runs


def test_each_setting_serves_the_same_load_into_a_folder_of_its_own(served):
    found, runs = served
    table = loaded.latency_table(found)
    assert list(table["in flight"]) == [1, 2] * 3 and (table["failed"] == 0).all()
    for name, made in found.items():
        (folder,) = runs.glob(f"*-served-{loaded.slug(name)}")
        assert load_served(folder).rows[1].figures["completed"] == 6
        assert {row.figures["total_output_tokens"] for row in made.rows} == {6 * 4}
    frame = loaded.curves(found)
    assert [*frame["curve"].unique()] == [*NAMES] and frame.attrs["latency"] == "Mean TPOT (ms)"
    assert plots.throughput_against_latency(loaded.curves(found, "mean_ttft_ms")).axes
    sampling = loaded.sampling_table(found)
    assert list(sampling["sampling"]) == ["host", "device", "host"]
    assert (sampling["sampling us a step"] > 0).all()


@pytest.mark.slow
def test_four_ways_to_an_engine(engine, path, served, tmp_path):
    config = EngineConfig("embedded", n_ctx=4 * 256, n_seqs=4, n_ubatch=64)
    with wb.Engine.load(path, config=config, toggles="baseline") as small:
        found = loaded.ways_in(small, path, "pp8+tg4", "1,2,4", 6, 0, str(tmp_path))
    table = loaded.ways_table(found)
    assert list(table["in flight"]) == [1, 4] * 4
    assert [*found] == [loaded.IN_PROCESS, loaded.PROCESS, loaded.WHOLE, loaded.STREAMED]
    for made in found.values():
        assert all(row.figures["completed"] == 6 for row in made.rows)
        assert all(row.figures["total_output_tokens"] == 24 for row in made.rows)
    assert list(table["of this process"][:2]) == ["100%", "100%"]
    assert len([*tmp_path.glob("*-ways-*")]) == 4
    figures, sampling = loaded.figures_of(served[0]), loaded.sampling_table(served[0])
    lines = conclusions.serving(figures, sampling, table).splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == [*NAMES]
    assert lines[3].startswith("At 1 in flight the most tokens a second has ")
    assert "(HTTP, whole answers)" in lines[-2] and lines[-1] == conclusions.ONCE


def test_a_comparison_of_the_notebook_is_read_back(by_size):
    *_, runs = by_size
    folders = sorted(results.runs(runs)["folder"])
    assert len(folders) == 5
    assert all(AB.load(folder).summary()["n"].eq(1).all() for folder in folders)


# what is committed ----------------------------------------------------------------------------


def answer(notebook: str) -> list[str]:
    cells = nbformat.read(ROOT / "notebooks" / f"{notebook}.ipynb", 4).cells
    return cells[-1].outputs[0].data["text/plain"].splitlines()


def test_the_committed_answer_on_skipping_is_of_the_runs_beside_it():
    said = answer("06_masked_kv")
    parts = AB.load(RUNS / "notebook-kv-parts")
    effects = [*sentences.effects(parts)]
    assert said[-len(effects) :] == effects
    made = {
        f"skip_masked_kv={way}": load_served(RUNS / f"notebook-ragged-{way.replace('_', '-')}")
        for way in masked.WAYS
    }
    table = skipped.ragged_table(made)
    (line,) = (line for line in said if line.startswith("Prompts of random lengths"))
    for row in table.iloc[1:].itertuples():
        assert f"{row.speedup:.2f} times as fast with {row.way}" in line


def shown(notebook: str) -> str:
    """All tables of a committed notebook, as text, in single spaces."""
    cells = nbformat.read(ROOT / "notebooks" / f"{notebook}.ipynb", 4).cells
    outputs = [o for cell in cells if cell.cell_type == "code" for o in cell.outputs]
    return " ".join("".join(o.get("data", {}).get("text/plain", "") for o in outputs).split())


def test_the_committed_tables_on_skipping_are_of_the_runs_beside_them():
    text = shown("06_masked_kv")
    every = [AB.load(path) for path in sorted(RUNS.glob("notebook-prompts-in-*"))]
    prompts = {ab.run["engine"]["config"]["n_ubatch"]: ab for ab in every}
    together = AB.load(RUNS / "notebook-side-by-side")
    phases = skipped.phase_summary(together, masked.TOGETHER)
    tables = (skipped.ubatch_table(prompts, masked.PROMPTS), skipped.scaling_table(phases))
    for table in tables:
        cells = [str(cell) for row in table.to_numpy().tolist() for cell in row]
        assert len(cells) > 10
        for cell in cells:
            assert f" {cell} " in text, cell


def test_the_committed_answer_on_serving_is_of_the_runs_beside_it():
    names = ["baseline", "serving"]
    names += [f"serving {one}" for one in ("skip_masked_kv=off", "sampling=host")]
    names += ["serving kv_cache=unified"]
    served = {name: load_served(RUNS / f"notebook-served-{loaded.slug(name)}") for name in names}
    folders = ("own", "process", "http-whole", "http-streamed")
    ways = (loaded.IN_PROCESS, loaded.PROCESS, loaded.WHOLE, loaded.STREAMED)
    reached = {
        way: load_served(RUNS / f"notebook-ways-{folder}")
        for way, folder in zip(ways, folders, strict=True)
    }
    made = conclusions.serving(
        loaded.figures_of(served), loaded.sampling_table(served), loaded.ways_table(reached)
    )
    assert answer("07_batched_serving") == made.splitlines()
