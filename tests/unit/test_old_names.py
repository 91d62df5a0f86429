"""Recorded runs are read in today's words, whatever their commit called things."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pandas as pd
import pytest

from data.measure import first_requests, over_http, random_lengths
from data.measure.attention import AttentionRun
from data.measure.batched import BatchedRun
from tests.profiles import share
from workbench.backend.plan import gate
from workbench.backend.plan import life as plan
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.kernels import kernel_bench
from workbench.benchmarks.runs import results
from workbench.benchmarks.scores.perplexity import TOKENS, Agreement
from workbench.benchmarks.times import gaps
from workbench.config import EngineConfig, Toggles
from workbench.engine.look.phases import PHASES
from workbench.traffic.bench import load_served

RESULTS = Path(__file__).resolve().parents[2] / "data" / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("**/run.json"))
PLAN_COUNTERS = {*plan.COUNTS, *gate.COUNTS}
PHASE_COUNTERS = {f"{phase}_n" for phase in PHASES}
COUNTERS = {
    "steps", "programs_built", "programs_reused", "graph_ns", "split_ns", "layout_ns", "lower_ns",
    "prepare_ns", "batch_ns", "issue_ns", "wait_ns", *PLAN_COUNTERS,
    "untraced_steps", "programs_refused", "reuse_ns", "fuse_ns", *PHASE_COUNTERS,
    "programs_unforked",
}  # fmt: skip
# older runs have layout_ns in lower_ns, and fuse_ns in graph_ns
LATER = {
    "layout_ns", *PLAN_COUNTERS, "untraced_steps", "programs_refused", "reuse_ns", "fuse_ns",
    *PHASE_COUNTERS, "programs_unforked",
}  # fmt: skip
COUNTS = {"waits", "copies", "launches", "records", "stream_waits", "copied_bytes"}
KINDS = (
    "ab", "attention", "batched", "bench", "fresh", "gaps", "kernels", "peer", "perplexity",
    "serve", "sweep", random_lengths.RUNS.name, over_http.RUNS.name, first_requests.RUNS.name,
)  # fmt: skip


# launches alone; or an engine of another process, of which a client knows what it asked for
OF_NO_ENGINE = ("kernels", "attention", "serve", random_lengths.RUNS.name, over_http.RUNS.name,
                first_requests.RUNS.name)  # fmt: skip


def frame(run: results.Run) -> pd.DataFrame:
    """What a run's reader makes of it."""
    match run.run["kind"]:
        case "ab":
            return AB.load(run.folder).summary()
        case "gaps":
            return gaps.load(run.folder).table()
        case "kernels":
            return pd.DataFrame(kernel_bench.KernelRun.load(run.folder).run["result"]["rows"])
        case "perplexity":
            tokens = pd.read_parquet(run.folder / TOKENS)
            return pd.DataFrame([Agreement.of_tokens(tokens, 0)._asdict()])
        case "serve":
            return pd.DataFrame([row.figures for row in load_served(run.folder).rows])
        case "attention":
            return pd.DataFrame([line.values for line in AttentionRun(run).lines()])
        case "batched":
            return pd.DataFrame([line.values for line in BatchedRun(run).lines()])
        case random_lengths.RUNS.name | over_http.RUNS.name:
            return pd.DataFrame(run.run["result"]["points"])
        case _:
            return results.percentiles(run.samples)


@pytest.mark.parametrize("folder", share(FOLDERS, every=3), ids=lambda folder: folder.name)
def test_every_folder_is_read(folder: Path):
    """Toggles, settings and a frame can be made of each; no name in it is unknown today."""
    before = (folder / "run.json").read_bytes()
    run = results.load_run(folder)
    assert run.run["kind"] in KINDS
    assert set(run.run) == set(results.RUN_KEYS)
    for arm in run.run["arms"]:
        assert set(arm) == set(results.ARM_KEYS)
        made = Toggles(**arm["toggles"])
        assert arm["toggles"].items() <= made.to_dict().items()
        found = set(arm["counters"])
        assert not found or COUNTERS - LATER <= found <= COUNTERS
        for program in arm["program"].values():
            assert set(program["counts"]) - {"replays"} == COUNTS  # where there are plans
    engine = run.run["engine"]
    if run.run["kind"] not in OF_NO_ENGINE:
        ours = (arm for arm in run.run["arms"] if not arm["name"].startswith("llama.cpp"))
        assert all(set(arm["toggles"]) == set(Toggles.names()) for arm in ours)
    if run.run["kind"] not in OF_NO_ENGINE or (run.run["kind"] == "serve" and "config" in engine):
        config = engine["config"]
        EngineConfig(**config | {"override_tensor": tuple(config["override_tensor"])})
    assert len(results.rates(run.samples)) and len(frame(run))
    assert (folder / "run.json").read_bytes() == before


def run_of(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


OLD = next(f for f in FOLDERS if f.name == "cuda-perplexity-llama-3.2-1b-q8_0")


def test_what_a_run_leaves_unsaid_is_what_engines_did():
    old = run_of(OLD)
    assert "step_wait" not in old["arms"][0]["toggles"] and "expand" not in old["engine"]["config"]
    del old["result"]["n_ubatch"]
    new = results.in_todays_words(copy.deepcopy(old))
    assert new["arms"][0]["toggles"]["step_wait"] == "every"
    assert new["arms"][0]["toggles"]["sync"] == old["arms"][0]["toggles"]["sync"] == "implicit"
    assert new["engine"]["config"]["expand"] == "f16"
    assert new["result"]["n_ubatch"] == old["engine"]["config"]["n_ubatch"] == 512
    assert results.in_todays_words(copy.deepcopy(new)) == new


def test_a_devices_threads_are_workers_in_every_run():
    """Two runs of one device compare equal, whichever commit wrote its description."""
    folder = next(f for f in FOLDERS if f.name == "embedded-sync")
    assert run_of(folder)["engine"]["device_description"].startswith("embedded device, 2 lanes, ")
    engine = results.load_run(folder).run["engine"]
    assert engine["device_description"].startswith("embedded device, 2 workers, ")
    assert "idle workers yield" in engine["waiting"]
