"""What is committed agrees: pages with runs, runs with their samples, their order and history."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from data.measure import best_table, energy_table, matrix, peer, readme
from data.measure.peer import PeerRun
from data.measure.proofs import EXHAUSTIVE
from data.measure.recorded import Recorded
from data.measure.skipping import SkipRun
from data.measure.sources import unmarked
from tests.exhaustive import collected
from tests.gpu import sanitize
from tests.measure.made import in_turn, is_ours, lines
from tests.notebooks.record import MADE
from tests.profiles import long
from workbench.benchmarks.compare.arms import answer_between
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.kernels.kernel_bench import KernelRun
from workbench.benchmarks.runs import results
from workbench.benchmarks.runs.results import load_run
from workbench.benchmarks.scores.perplexity import TOKENS, Agreement
from workbench.benchmarks.times.gaps import Gaps
from workbench.config import EXACT, EngineConfig, Toggles, parse_changes
from workbench.config.presets import best_set
from workbench.traffic.bench import load_served

pytestmark = pytest.mark.recorded
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "data" / "results"
RECORDED = Recorded(RESULTS)


@functools.cache
def runs() -> dict[str, list[results.Run]]:
    """Every recorded run, by kind."""
    found: dict[str, list[results.Run]] = {}
    for path in sorted(RESULTS.glob("**/run.json")):
        run = load_run(path.parent)
        found.setdefault(run.run["kind"], []).append(run)
    return found


@pytest.mark.parametrize(
    "page", [long(page) if page.parts[0] == "data" else page for page in readme.PAGES], ids=str
)
def test_a_page_is_what_the_runs_say(page):
    text = (ROOT / page).read_text()
    said = unmarked(readme.fill(text, RESULTS))
    assert said == unmarked(text), f"{page} is out of date: run `make readme`"


def test_every_table_stands_on_one_page():
    texts = [(ROOT / page).read_text() for page in readme.PAGES]
    found = [name for text in texts for name in re.findall(r"<!-- begin (\S+) -->", text)]
    assert sorted(found) == sorted(readme.BLOCKS)
    assert len(texts[0].splitlines()) <= 150, "README is a first screen"
    prose = readme.BLOCK.sub("", texts[0]).splitlines()  # captions of tables are long
    assert max(len(line) for line in prose if not line.startswith("<img")) <= 125


@pytest.mark.long
def test_the_first_table_fits_a_screen_and_each_line_has_one_answer():
    short, full = (lines(RESULTS, f"mechanisms{of}") for of in ("", "-in-full"))
    assert list(short[0]) == ["mechanism", "speedup", "verdict", "where"]
    text = readme.made("mechanisms", RECORDED)
    assert max(len(line) for line in text.splitlines() if line.startswith("|")) <= 100
    named = [(line["mechanism"], line["where"]) for line in short]
    assert len({*named}) == len(named) >= 15 and all(map(all, named))
    same = ("mechanism", "speedup", "verdict")
    assert [[line[name] for name in same] for line in short] == [
        [line[name] for name in same] for line in full
    ]
    for line in full:
        off, on = (line[side].strip("`").split()[0] for side in ("off", "on"))
        toggle, is_not = off.split("=")
        value = on.removeprefix(f"{toggle}=")
        assert {is_not, value} <= {*Toggles.values(toggle)} and is_not != value, "both are named"
        assert line["card"] and line["python -m"] and line["beside"]


@pytest.mark.long
def test_the_committed_best_is_what_the_runs_say():
    made = best_table.made(best_table.folders_in(RESULTS))
    assert best_table.TABLE.read_text() == best_table.text(made), (
        "python -m data.measure.best_table"
    )
    for kind, sets in made.items():
        for wanted, rows in sets.items():
            Toggles(**best_set(kind, wanted).values)  # legal together
            for name, row in rows.items():
                assert row["runs"] or best_table.SAFE[name] == row["value"], f"{name}: on nothing"
                assert all((RESULTS / run).is_dir() for run in row["runs"])


# runs --------------------------------------------------------------------------------------------

HTTP = ("random-lengths", "over-http", "first-requests")
# launches alone; or an engine of another process, of which a client knows what it asked for
OF_NO_ENGINE = ("kernels", "attention", "serve", *HTTP)
READERS = {
    "ab": lambda run: AB(run.run, run.samples).summary(),
    "gaps": lambda run: Gaps(run.run, run.samples).table(),
    "kernels": lambda run: KernelRun.load(run.folder).rows,
    "serve": lambda run: load_served(run.folder).rows,
    **dict.fromkeys(("attention", "batched"), lambda run: run.run["tests"]),
    "perplexity": lambda run: pd.read_parquet(run.folder / TOKENS),
    **dict.fromkeys(HTTP[:2], lambda run: run.run["result"]["points"]),
    **dict.fromkeys((HTTP[2], "bench", "fresh", "peer", "sweep"),
                    lambda run: results.percentiles(run.samples)),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [long(kind) if kind in ("ab", "gaps") else kind for kind in READERS]
)
def test_every_run_is_whole_and_can_be_read(kind):
    for found in runs()[kind]:
        run, folder = found.run, found.folder
        assert run["status"] == "complete" and is_ours(run["commit"]), folder
        assert sum(p.stat().st_size for p in folder.iterdir()) < 2_000_000
        for arm in run["arms"]:
            assert arm["toggles"].items() <= Toggles(**arm["toggles"]).to_dict().items()
        if kind not in OF_NO_ENGINE:
            config = run["engine"]["config"]
            EngineConfig(**config | {"override_tensor": tuple(config["override_tensor"])})
        assert len(results.rates(found.samples)) and len(READERS[kind](found)), folder
        answers = run["result"].get("answers", {}).values()
        assert all(answer["holds"] for answer in answers if answer is not None), folder
        points = run["result"].get("points", [])
        assert not any(point.get("failed") for point in points), folder


def test_all_kinds_and_rows_are_known():
    """Runs of notebooks apart: `tests.notebooks.record` makes them."""
    assert set(runs()) <= set(READERS)
    recorded = {path.parent.name for path in RESULTS.glob("*/run.json")}
    named = {f"{row.device}-{row.folder}" for row in matrix.MATRIX}
    assert {name for name in recorded - named if not name.startswith("notebook-")} == set()
    assert all(SkipRun(run).run["result"]["visits"] for run in runs()["ab"]
               if run.folder.parents[1].name == "skipping")  # fmt: skip


@pytest.mark.long
def test_comparisons_are_interleaved_repeated_and_right():
    for found in runs()["ab"]:
        if found.folder.parent != RESULTS:
            continue
        ab = AB(found.run, found.samples)
        assert ab.interleaved and found.run["repetitions"] >= 5, found.folder
        first, *others = found.run["arms"]
        assert others[-1]["is_control"]
        for arm in others:
            answer = ab.answer(arm["name"])
            wanted = answer_between(Toggles(**first["toggles"]), Toggles(**arm["toggles"]))
            assert answer is not None and answer.holds and answer.kind == wanted, arm["name"]
            assert wanted == EXACT or not arm["is_control"]


@pytest.mark.long
def test_llama_cpp_beside_us_is_what_the_samples_say():
    """Every arm of every model, from the parquet file alone; a row of each on README."""
    shown, every = (readme.made(f"peer-cuda{of}", RECORDED) for of in ("", "-arms"))
    for found in runs()["peer"]:
        if found.folder.parent.name != peer.FOLDER:
            continue
        run = PeerRun(found)
        assert in_turn(run) and found.run["repetitions"] >= 5 and f" {run.model} " in shown
        lines = [x.split("|") for x in every.splitlines() if x.startswith(f"| {run.model} ")]
        of = found.samples.groupby(["test", "arm", "repetition"])[["n_tokens", "ns"]].sum()
        tps = (1e9 * of["n_tokens"] / of["ns"]).groupby(["test", "arm"]).median()
        for (_, _, arm, tg, *_), one in zip(lines, found.run["arms"], strict=False):
            assert arm.strip() == one["name"] and f" {tps['tg128', one['name']]:.1f} (" in tg


def test_perplexity_is_what_its_tokens_say():
    for found in runs()["perplexity"]:
        tokens, said = pd.read_parquet(found.folder / TOKENS), found.run["result"]["agreement"]
        assert len(tokens) == found.run["result"]["engine"]["n"] == 2048
        assert Agreement.of_tokens(tokens, said["n_broken"])._asdict() == pytest.approx(said)


def test_shares_and_loads_are_of_the_same_run():
    prefixes = ("cuda-decode-", "cuda-depth-", "cuda-batches-", "cuda-together-", "cuda-kernels")
    for found in (run for of in runs().values() for run in of):
        if found.folder.name.startswith(prefixes):
            rates = found.run["result"]["read_rates"]
            assert found.run["result"]["read_gbps"] == max(rates.values()) > 0 < len(rates) - 1
    for path in RESULTS.glob("cuda-load-*.json"):
        load = json.loads(path.read_text())
        assert len(load["seconds"]) == 3 and is_ours(load["commit"])


# what these show is made of runs in ways of their own: tests/answers/test_answer_tables.py
APART = ("06_masked_kv", "07_batched_serving", "09_together")


@pytest.mark.parametrize("notebook", MADE)
def test_notebooks_say_what_their_runs_say(notebook):
    """The sentences and tables committed with a notebook follow from its run folders."""
    every = nbformat.read(ROOT / "notebooks" / f"{notebook}.ipynb", 4).cells
    outputs = [o for c in every if c.cell_type == "code" for o in c.outputs]
    said = "".join(o.text for o in outputs if o.output_type == "stream")
    said += "".join(o.data.get("text/html", "") for o in outputs if "data" in o)
    for name in MADE[notebook] if notebook not in APART else ():
        found = load_run(RESULTS / f"notebook-{name}")
        for figure in figures(READERS[found.run["kind"]](found), found):
            assert figure in said, (name, figure)


def figures(table: pd.DataFrame, found: results.Run) -> list[str]:
    """The figures of a run as its table and its sentences say them."""
    if found.run["kind"] == "gaps":
        (fit,) = Gaps(found.run, found.samples).fits.values()
        return [f"{us:.1f}" for us in table["gap_us"]] + [f"{fit.wait_us:.2f} us"]
    rows = table.to_dict("records")
    toggled = [row for row in rows if not row["is_control"]]
    spreads = [f"{row['low']:.3f}..{row['high']:.3f}" for row in toggled]
    if found.run["arms"][1]["name"] == "redo_build=on":  # in its table are no rates
        return [f"{row['speedup']:.3f}" for row in toggled] + spreads
    return [f"{row['tps_toggled']:.2f}" for row in rows] + spreads


def test_recorded_tests_passed_and_races_are_where_they_may_be():
    for found in map(RECORDED.alone, ("gpu-tests", "gpu-tests-two")):
        assert found["failed"] == 0 < found["passed"]
    tools = RECORDED.alone("gpu-sanitizer")
    for run in tools["runs"].values():
        assert (run["exit"], run["errors"]) == (0, 0) and run["tests"] > 0
    assert tools["duration_s"] < sanitize.LIMIT_S == 480
    raced = RECORDED.file(f"pipeline-races-{matrix.RACED}")["orderings"]
    assert not any(any(o["differing"]) for o in raced if not o["races"])
    pictured = RECORDED.alone("timelines")
    assert is_ours(pictured["commit"]) and all("complete" in n for n in pictured["notes"].values())


@pytest.mark.long
def test_every_exhaustive_test_has_passed():
    """The full products whole. Of the rest, properties and shares, whatever is recorded."""
    found = RECORDED.alone("exhaustive")
    assert all(is_ours(about["commit"]) for about in found["commits"].values())
    assert not [test for test, row in found["tests"].items() if row["outcome"] == "failed"]
    product = [test for test in collected(["tests/program/check/test_mutations.py"])
               if test.partition("[")[0].rpartition("::")[2] in EXHAUSTIVE]  # fmt: skip
    # a row keeps the path that its test had; base names are unique over all of tests/
    recorded = {re.sub(r"^[^:]*/", "", test) for test in found["tests"]}
    assert len(product) > 30 and {re.sub(r"^[^:]*/", "", test) for test in product} <= recorded


HAZARDS, REUSE = "test_bench_hazards.py::test_", "test_bench_reuse.py::test_graph_work_of_a_token"
MOST_US = {
    "test_bench_program.py::test_build_from_nothing": 20_000,
    "test_bench_program.py::test_reuse": 100, "test_bench_program.py::test_import": 500_000,
    "test_bench_gguf.py::test_open": 500_000, f"{HAZARDS}nested_ranges": 2_000_000,
    f"{HAZARDS}a_million_commands_of_one_program": 10_000_000,
    f"{HAZARDS}commands_all_different[1.0]": 10_000_000,
    **{f"{HAZARDS}all_of_a_thousand_decoded_tokens[{on}]": 20_000_000 for on in (True, False)},
    **{f"{REUSE}[{way}-{workers}]": 60 for way in ("patch_pointers", "pointer_table", "set_rows")
       for workers in ("idle", "busy")},
    **{f"test_bench_forks.py::test_planning[{streams}-{fused}]": 80_000
       for streams in ("1-qkv", "3-qkv", "8-any") for fused in ("unfused", "fused")},
}  # fmt: skip


def test_recorded_benchmarks_meet_their_requirements():
    found = RECORDED.alone("benchmarks")
    for name, most in MOST_US.items():
        row = found["benchmarks"][name]
        assert row["median_us"] <= most and is_ours(row.get("of", found)["commit"]), name
    quarter, whole = (f"{HAZARDS}commands_all_different[{share}]" for share in ("0.25", "1.0"))
    us = {name: found["benchmarks"][name]["median_us"] for name in (quarter, whole)}
    assert us[whole] < 8 * us[quarter], "checking grows with commands, and not with their square"


def test_a_row_of_energy_has_both_values_of_its_switch():
    rows = [line.values for line in energy_table.lines(RECORDED)]
    assert len(rows) == len(matrix.ENERGY) * len(matrix.ENERGY_MODELS)
    for row in rows:
        off, on = (parse_changes(row[side]) for side in ("off", "on"))
        assert off.keys() == on.keys() and off != on, row["switch"]
