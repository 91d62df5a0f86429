"""Recorded runs: README's numbers come from them, their order alternates, their commit is ours."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from data.measure import matrix, readme
from data.measure.sources import age, unmarked
from tests.gpu import sanitize
from tests.notebooks.record import MADE
from tests.profiles import share
from workbench.benchmarks.compare.arms import answer_between
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.runs.results import load_run
from workbench.benchmarks.scores.perplexity import TOKENS, Agreement
from workbench.benchmarks.times.gaps import Gaps
from workbench.common.devices import is_gpu
from workbench.common.errors import WorkbenchError
from workbench.config import EXACT, Toggles

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "data" / "results"
PAGES = (*readme.PAGES, Path("workbench/program/README.md"), Path("kernels/README.md"),
         Path("data/measure/README.md"))  # fmt: skip
RUNS = sorted(p.parent for p in RESULTS.glob("**/run.json"))


def name(folder: Path) -> str:
    return folder.name


@functools.cache
def history() -> frozenset[str] | None:
    """The commits behind HEAD; None where a shallow clone or an unpacked archive lacks them."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout

    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        return None
    return frozenset(git("rev-list", "HEAD").split())


def is_ancestor(commit: str) -> bool:
    return (known := history()) is None or commit in known


@pytest.mark.parametrize("page", share(readme.PAGES, every=2), ids=str)
def test_a_page_is_what_the_runs_say(page):
    text = (ROOT / page).read_text()
    said = unmarked(readme.fill(text, RESULTS))
    assert said == unmarked(text), f"{page} is out of date: run `make readme`"


def test_every_table_stands_on_one_page():
    texts = [(ROOT / page).read_text() for page in readme.PAGES]
    found = [name for text in texts for name in re.findall(r"<!-- begin (\S+) -->", text)]
    assert sorted(found) == sorted(readme.BLOCKS)


def test_readme_is_a_first_screen():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    prose = readme.BLOCK.sub("", text).splitlines()  # captions of tables are long
    assert max(len(line) for line in prose if not line.startswith("<img")) <= 125


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_of_the_pages_lead_somewhere(page):
    """Files, and headings of the pages among them."""
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", text) + [
        (source, "") for source in re.findall(r'<img src="([^"]+)"', text)
    ]
    assert links
    for target, heading in links:
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            assert heading in {
                re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings
            }


def test_an_unknown_block_is_refused():
    with pytest.raises(WorkbenchError, match="'speed' is not one of"):
        readme.fill("<!-- begin speed -->\n<!-- end speed -->", RESULTS)


@pytest.mark.parametrize("folder", RUNS, ids=name)
def test_a_run_is_whole_small_and_of_this_history(folder):
    run = load_run(folder).run
    assert run["status"] == "complete"
    assert not run["commit"]["dirty"]
    assert is_ancestor(run["commit"]["hash"])
    assert sum(p.stat().st_size for p in folder.iterdir()) < 2_000_000


@pytest.mark.parametrize("folder", share(RUNS, every=4), ids=name)
def test_a_comparison_is_interleaved_repeated_and_right(folder):
    found = load_run(folder)
    if found.run["kind"] != "ab":
        return
    ab = AB(found.run, found.samples)
    assert ab.interleaved
    assert found.run["repetitions"] >= 5
    summary = ab.summary()
    assert summary["is_control"].any()
    first, *others = found.run["arms"]
    for arm in others:
        answer = ab.answer(arm["name"])
        assert answer is not None and answer.holds, arm["name"]
        wanted = answer_between(Toggles(**first["toggles"]), Toggles(**arm["toggles"]))
        assert answer.kind == wanted and (wanted == EXACT or not arm["is_control"])


STREAMS = ("own", "compute")


@pytest.mark.parametrize("background", matrix.OFF_AND_ON)
@pytest.mark.parametrize("model", matrix.SYNCED)
def test_sync_modes_measured_on_a_gpu_are_safe_ones_each_once(model, background):
    """On both streams: gaps, and t/s in the thread's tests. A mode may be newer than the run."""
    wanted = [(mode, stream) for stream in STREAMS for mode in matrix.modes_on(stream)]
    for name in ("gaps", *(f"sync-{stream}" for stream in STREAMS)):
        folder = RESULTS / f"cuda-{name}-{background}-{model}"
        if folder in RUNS:
            arms = arms_of(load_run(folder).run, background)
            assert arms == [m for m in wanted if m in arms] != []


def arms_of(run: dict, background: str) -> list[tuple[str, str]]:
    """Mode and copy stream of each, all of them on the background."""
    toggles = [arm["toggles"] for arm in run["arms"] if not arm["is_control"]]
    for name, value in (("graph_reuse", "set_rows"), ("fuse_glu", background), ("pdl", background)):
        assert {t[name] for t in toggles} == {value}
    return [(t["sync"], t["copy_stream"]) for t in toggles]


def load(folder: Path) -> AB | Gaps:
    run = load_run(folder)
    return AB.load(folder) if run.run["kind"] == "ab" else Gaps(run.run, run.samples)


# what these show is made of runs in ways of their own: tests/notebooks/test_skipping_and_serving.py
APART = ("06_masked_kv", "07_batched_serving")


@pytest.mark.parametrize("notebook", MADE)
def test_notebooks_say_what_their_runs_say(notebook):
    """The sentences and tables committed with a notebook follow from its run folders."""
    cells = nbformat.read(ROOT / "notebooks" / f"{notebook}.ipynb", 4).cells
    outputs = [o for c in cells if c.cell_type == "code" for o in c.outputs]
    said = "".join(o.text for o in outputs if o.output_type == "stream")
    shown = "".join(o.data.get("text/html", "") for o in outputs if "data" in o)
    assert shown
    first = load_run(RESULTS / f"notebook-{MADE[notebook][0]}").run
    for line in said.splitlines():
        if "device spans from" in line and is_gpu(first["engine"]["device"]):  # of the traces
            assert "device spans from cupti" in line and " records, complete; clocks" in line
    for run in MADE[notebook] if notebook not in APART else ():
        for figure in figures(load(RESULTS / f"notebook-{run}")):
            assert figure in said + shown, (run, figure)


def figures(run: AB | Gaps) -> list[str]:
    """The figures of a run as its table and its sentences say them."""
    if isinstance(run, Gaps):
        (fit,) = run.fits.values()
        return [f"{us:.1f}" for us in run.table()["gap_us"]] + [f"{fit.wait_us:.2f} us"]
    rows = run.summary().to_dict("records")
    if run.run["result"]["toggle"].startswith("redo_"):  # several runs in one table
        rows = [row for row in rows if not row["is_control"]]
    return [f"{row['tps_toggled']:.2f}" for row in rows] + [
        figure
        for row in rows
        for figure in (f"{row['speedup']:.3f}", f"{row['low']:.3f}..{row['high']:.3f}")
        if not row["is_control"]
    ]


def bandwidths() -> list[Path]:
    """The runs whose shares are of what their own process measured."""
    prefixes = ("cuda-decode-", "cuda-depth-", "cuda-batches-", "cuda-together-", "cuda-kernels")
    return [folder for folder in RUNS if folder.name.startswith(prefixes)]


def test_shares_are_of_the_same_run():
    for folder in bandwidths():
        result = load_run(folder).run["result"]
        assert result["read_gbps"] == max(result["read_rates"].values()) > 0, folder.name
        assert len(result["read_rates"]) > 1


def test_recorded_loads_are_of_this_history():
    for path in RESULTS.glob("cuda-load-*.json"):
        found = json.loads(path.read_text())
        assert len(found["seconds"]) == 3 and min(found["seconds"]) > 0
        assert not found["commit"]["dirty"] and is_ancestor(found["commit"]["hash"])


def test_perplexity_is_what_its_tokens_say():
    """The figures of a run follow from the tokens stored with it."""
    for folder in RUNS:
        run = load_run(folder).run
        if run["kind"] != "perplexity":
            continue
        tokens, found = pd.read_parquet(folder / TOKENS), run["result"]["agreement"]
        assert len(tokens) == run["result"]["engine"]["n"] == 2048
        again = Agreement.of_tokens(tokens, found["n_broken"])._asdict()
        assert again == pytest.approx(found), folder.name


def test_readme_s_picture_says_what_it_shows():
    found = json.loads((RESULTS / "timelines.json").read_text())
    assert not found["commit"]["dirty"] and is_ancestor(found["commit"]["hash"])
    assert list(found["arms"]) == ["per_copy", "copy_boundary"]
    assert all("complete" in note for note in found["notes"].values())
    assert (RESULTS / "timelines.png").stat().st_size < 200_000


def recorded(name: str) -> dict:
    """What a file on the GPU tests says. There need be none: who has no GPU cannot make one."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"{name} was not recorded")
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", ["gpu-tests", "gpu-tests-two"])
def test_recorded_gpu_tests_passed(name):
    """Of which sources they are, the page of the results says."""
    found = recorded(name)
    assert (
        found["failed"] == 0
        and found["passed"] > 0
        and re.fullmatch(r"sources [0-9a-f]{8}, 20\d\d-\d\d-\d\d", unmarked(age(found)))
    )


def test_recorded_sanitizers_found_nothing():
    found = recorded("gpu-sanitizer")
    for name, run in found["runs"].items():
        assert (run["exit"], run["errors"]) == (0, 0) and run["tests"] > 0, name
    assert found["duration_s"] < sanitize.LIMIT_S == 480


MOST_US = {
    "test_bench_program.py::test_build_from_nothing": 20_000,
    "test_bench_program.py::test_reuse": 100,
    "test_bench_program.py::test_import": 500_000,
    "test_bench_gguf.py::test_open": 500_000,
    "test_bench_hazards.py::test_a_million_commands_of_one_program": 10_000_000,
    "test_bench_hazards.py::test_commands_all_different[1.0]": 10_000_000,
    "test_bench_hazards.py::test_all_of_a_thousand_decoded_tokens[False]": 20_000_000,
    "test_bench_hazards.py::test_all_of_a_thousand_decoded_tokens[True]": 20_000_000,
    "test_bench_hazards.py::test_nested_ranges": 2_000_000,
    **{
        f"test_bench_reuse.py::test_graph_work_of_a_token[{way}-{workers}]": 60
        for way in ("patch_pointers", "pointer_table", "set_rows")
        for workers in ("idle", "busy")
    },
    **{
        f"test_bench_forks.py::test_planning[{streams}-{fused}]": 80_000
        for streams in ("1-qkv", "3-qkv", "8-any")
        for fused in ("unfused", "fused")
    },
}


def test_every_exhaustive_test_has_passed():
    """The full product whole. Of the rest, properties and shares, whatever is recorded."""
    from data.measure.proofs import EXHAUSTIVE
    from tests.exhaustive import collected

    found = json.loads((RESULTS / "exhaustive.json").read_text())
    for about in found["commits"].values():
        assert not about["commit"]["dirty"] and is_ancestor(about["commit"]["hash"])
    assert not [test for test, row in found["tests"].items() if row["outcome"] == "failed"]
    product = [test for test in collected(["tests/program/check/test_mutations.py"])
               if test.partition("[")[0].rpartition("::")[2] in EXHAUSTIVE]  # fmt: skip
    assert len(product) > 30 and set(product) <= found["tests"].keys()


@pytest.mark.parametrize("benchmark_name", MOST_US)
def test_recorded_benchmarks_meet_their_requirements(benchmark_name):
    found = json.loads((RESULTS / "benchmarks.json").read_text())
    row = found["benchmarks"][benchmark_name]
    commit = row.get("of", found)["commit"]
    assert not commit["dirty"] and is_ancestor(commit["hash"])
    assert row["median_us"] <= MOST_US[benchmark_name]


def test_benchmarks_of_one_file_stand_beside_those_of_the_others():
    from tests.bench.record import merged

    def row(us: float) -> dict:
        return {"median_us": us}

    before = {
        "date": "then",
        "benchmarks": {"a.py::x": row(1), "a.py::gone": row(2), "b.py::x": row(3)},
    }
    after = merged(before, {"a.py::x": row(4)}, {"date": "now"})
    assert after["date"] == "then"
    assert after["benchmarks"] == {"b.py::x": row(3), "a.py::x": row(4) | {"of": {"date": "now"}}}


def test_checking_grows_with_the_commands_and_not_with_their_square():
    found = json.loads((RESULTS / "benchmarks.json").read_text())["benchmarks"]
    quarter, whole = (
        found[f"test_bench_hazards.py::test_commands_all_different[{share}]"]["median_us"]
        for share in ("0.25", "1.0")
    )
    assert whole < 8 * quarter
