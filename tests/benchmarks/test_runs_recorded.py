"""New runs have the keys of recorded ones, recorded ones are read, and cut ones go on."""

from __future__ import annotations

import copy
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from data.measure import first_requests, over_http, random_lengths
from data.measure.attention import AttentionRun
from data.measure.batched import BatchedRun
from tests.profiles import share
from workbench.backend.plan import gate
from workbench.backend.plan import life as plan
from workbench.benchmarks.compare.ab import ab
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.rounds import interleave
from workbench.benchmarks.kernels.kernel_bench import KernelMatrix, KernelRun, bench_kernels
from workbench.benchmarks.kernels.kernel_cases import parse_shapes, parse_types
from workbench.benchmarks.llama.llama_bench import bench
from workbench.benchmarks.runs import results
from workbench.benchmarks.runs.draft import Draft, kept, new_arm, new_run
from workbench.benchmarks.runs.results import ARM_KEYS, RUN_KEYS, load_run
from workbench.benchmarks.scores.perplexity import TOKENS, Agreement, perplexity
from workbench.benchmarks.scores.token_source import sample
from workbench.benchmarks.times import gaps
from workbench.benchmarks.times.gaps import host_gaps
from workbench.config import EngineConfig, Toggles
from workbench.engine.look.phases import PHASES
from workbench.traffic.bench import load_served

RESULTS = Path(__file__).resolve().parents[2] / "data" / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("**/run.json"))
# what the campaign adds to a folder once it was measured
ADDED = {
    "cache_bytes_per_token", "parts", "product_flops", "product_tflops", "read_gbps", "read_rates",
}  # fmt: skip


def _kernels(engine, out):
    matrix = KernelMatrix(parse_types("Q4_0"), parse_shapes("qwen3-30b-a3b.gate"), [1], quick=True)
    bench_kernels(engine.backend, matrix, out)


MEASURE = {
    "ab": lambda engine, out: ab(
        engine, "sync=per_copy,packed", None, "tg1", 1, out=out, smoke=True
    ),
    "bench": lambda engine, out: bench(engine, [2], [2], repetitions=1, out=out),
    "gaps": lambda engine, out: host_gaps(
        engine, {"per_copy": Toggles()}, n_tokens=3, rounds=1, out=out, name="run"
    ),
    "kernels": _kernels,
    "perplexity": lambda engine, out: perplexity(
        engine, sample(engine, 4, 0), against=Toggles(fuse_glu="on"), out=out
    ),
}


def issued(runs: list[dict[str, Any]]) -> set[str]:
    """The keys of what runs say of their programs."""
    programs = (p for run in runs for arm in run["arms"] for p in arm["program"].values())
    return {key for program in programs for key in program}


def strings(value: Any) -> Iterator[str]:
    """All text in what JSON can say."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from strings(one)


@pytest.mark.parametrize("kind", MEASURE)
def test_a_new_run_has_recorded_keys_and_no_places(engine, tmp_path, monkeypatch, kind):
    """Programs and files have their names, and no folders; nobody finds the machine or its user."""
    argv = ["/opt/bin/workbench", kind, "-m", str(engine.model.path), f"--out={tmp_path}/run"]
    monkeypatch.setattr("sys.argv", argv)
    MEASURE[kind](engine, tmp_path / "run")
    new, every = load_run(tmp_path / "run").run, map(run_of, sorted(RESULTS.glob("*/run.json")))
    old = [run for run in every if run["kind"] == kind]
    assert old and new["kind"] == kind and new["status"] == "complete" and new["duration_s"] > 0
    for run in old:
        assert list(run) == list(new) == list(RUN_KEYS)
        assert all(tuple(arm) == ARM_KEYS for arm in (*run["arms"], *new["arms"]))
        assert all(set(run[part]) <= set(new[part]) for part in ("commit", "engine"))
        assert set(run["model"]) == set(new["model"])
        assert set(run["result"]) - ADDED <= set(new["result"])
    more = {"until", "sessions", "sides"}
    assert set(new["result"]) <= set().union(*(run["result"] for run in old)) | more
    assert issued([new]) == issued(old)
    name = Path(engine.model.path).name
    assert new["command"] == ["workbench", kind, "-m", name, "--out=run"]
    places = [str(tmp_path), str(Path(engine.model.path).parent), str(Path.home())]
    places += [platform.node()] * (len(platform.node()) > 5)  # a shorter one may be a word
    for text in strings(new):
        assert not text.startswith(("/", "~")) and not any(place in text for place in places), text


# recorded ----------------------------------------------------------------------------------------

LATER = {  # older runs have layout_ns in lower_ns, and fuse_ns in graph_ns
    "layout_ns", *plan.COUNTS, *gate.COUNTS, "untraced_steps", "programs_refused", "reuse_ns",
    "fuse_ns", *(f"{phase}_n" for phase in PHASES), "programs_unforked",
}  # fmt: skip
EVER = {
    "steps", "programs_built", "programs_reused", "graph_ns", "split_ns", "lower_ns", "prepare_ns",
    "batch_ns", "issue_ns", "wait_ns",
}  # fmt: skip
COUNTS = {"waits", "copies", "launches", "records", "stream_waits", "copied_bytes"}
HTTP = (random_lengths.RUNS.name, over_http.RUNS.name, first_requests.RUNS.name)
# launches alone; or an engine of another process, of which a client knows what it asked for
OF_NO_ENGINE = ("kernels", "attention", "serve", *HTTP)
KINDS = (*OF_NO_ENGINE, *MEASURE, "batched", "fresh", "peer", "sweep")


def frame(run: results.Run) -> pd.DataFrame:
    """What a run's reader makes of it."""
    match run.run["kind"]:
        case "ab":
            return AB.load(run.folder).summary()
        case "gaps":
            return gaps.load(run.folder).table()
        case "kernels":
            return pd.DataFrame(KernelRun.load(run.folder).run["result"]["rows"])
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


@pytest.mark.parametrize("folder", share(FOLDERS, every=9), ids=lambda folder: folder.name)
def test_every_recorded_folder_is_read(folder: Path):
    """Toggles, settings and a frame can be made of each; no name in it is unknown today."""
    before = (folder / "run.json").read_bytes()
    run = results.load_run(folder)
    kind, engine = run.run["kind"], run.run["engine"]
    assert kind in KINDS and set(run.run) == set(RUN_KEYS)
    for arm in run.run["arms"]:
        assert set(arm) == set(ARM_KEYS)
        assert arm["toggles"].items() <= Toggles(**arm["toggles"]).to_dict().items()
        found = set(arm["counters"])
        assert not found or EVER <= found <= EVER | LATER
        for program in arm["program"].values():
            assert set(program["counts"]) - {"replays"} == COUNTS  # where there are plans
        if kind not in OF_NO_ENGINE and not arm["name"].startswith("llama.cpp"):
            assert set(arm["toggles"]) == set(Toggles.names())
    if kind not in OF_NO_ENGINE or (kind == "serve" and "config" in engine):
        config = engine["config"]
        EngineConfig(**config | {"override_tensor": tuple(config["override_tensor"])})
    assert len(results.rates(run.samples)) and len(frame(run))
    assert (folder / "run.json").read_bytes() == before


def run_of(path: Path) -> dict:
    return json.loads(path.read_text())


def test_what_a_run_leaves_unsaid_is_what_engines_did():
    folder = next(f for f in FOLDERS if f.name == "cuda-perplexity-llama-3.2-1b-q8_0")
    old = run_of(folder / "run.json")
    assert "step_wait" not in old["arms"][0]["toggles"] and "expand" not in old["engine"]["config"]
    del old["result"]["n_ubatch"]
    new = results.in_todays_words(copy.deepcopy(old))
    assert new["arms"][0]["toggles"]["step_wait"] == "every"
    assert new["arms"][0]["toggles"]["sync"] == old["arms"][0]["toggles"]["sync"] == "implicit"
    assert new["engine"]["config"]["expand"] == "f16"
    assert new["result"]["n_ubatch"] == old["engine"]["config"]["n_ubatch"] == 512
    assert results.in_todays_words(copy.deepcopy(new)) == new
    kernels = next(
        run for run in map(run_of, RESULTS.glob("*/run.json")) if run["kind"] == "kernels"
    )
    assert results.in_todays_words(copy.deepcopy(kernels)) == kernels, "it had no engine"


def test_a_devices_threads_are_workers_in_every_run():
    """Two runs of one device compare equal, whichever commit wrote its description."""
    folder = next(f for f in FOLDERS if f.name == "embedded-sync")
    said = run_of(folder / "run.json")["engine"]["device_description"]
    assert said.startswith("embedded device, 2 lanes, ")
    engine = results.load_run(folder).run["engine"]
    assert engine["device_description"].startswith("embedded device, 2 workers, ")
    assert "idle workers yield" in engine["waiting"]


# the loop, and what an interruption leaves -------------------------------------------------------


def test_each_arm_is_measured_once_a_round_if_not_known():
    seen, rounds = [], {}

    def measure(round_: int, arm: int) -> str | None:
        seen.append((round_, arm))
        return None if (round_, arm) == (0, 1) else f"{round_}{arm}"

    interleave([0, 1, 5], 3, measure, lambda round_, found: rounds.update({round_: found}))
    assert [arm for _, arm in seen] == [0, 1, 2, 2, 1, 0, 1, 0, 2]
    assert rounds[0] == {0: "00", 2: "02"} and list(rounds[1]) == [2, 1, 0]
    assert list(rounds) == [0, 1, 5]


def draft_of(out: Path | None, complete=dict) -> Draft:
    parts = ("commit", "versions", "machine", "model", "engine")
    found: dict[str, Any] = {"command": []} | {key: {} for key in parts}
    run = new_run("ab", "r", "r", found, [new_arm("a", {})], ["tg1"], 3, 0)
    return Draft(run, out, complete)


def measured(draft: Draft) -> Draft:
    draft.samples.add("a", False, "tg1", draft.samples.n_cells, np.array([5]), np.array([1]))
    return draft


@pytest.mark.parametrize(
    ("error", "raises", "is_raised"),
    [(KeyboardInterrupt, False, False), (KeyboardInterrupt, True, True), (OSError, False, True)],
)
def test_what_is_finished_is_saved_whatever_ends_it(tmp_path, error, raises, is_raised):
    completed = []
    draft = draft_of(tmp_path / "r", lambda: completed.append(1) or {})
    with pytest.raises(error) if is_raised else nullcontext(), kept(draft, raises=raises):
        measured(draft)
        raise error
    found = load_run(tmp_path / "r")
    assert found.run["status"] == "interrupted" and len(found.samples) == 1 and completed
    with pytest.raises(error), kept(draft_of(tmp_path / "none")):
        raise error
    assert not (tmp_path / "none").exists(), "nothing was measured, and nothing is written"


def test_samples_are_saved_on_the_way(tmp_path, monkeypatch):
    draft = measured(draft_of(tmp_path / "r"))
    draft.checkpoint()
    assert not (tmp_path / "r").exists(), "it is too soon"
    monkeypatch.setattr(results, "CHECKPOINT_SECONDS", -1.0)
    draft.checkpoint()
    assert len(load_run(tmp_path / "r").samples) == 1
    measured(draft_of(None)).checkpoint()


# every finished repetition or window is saved at once
RUN = (
    "import sys, workbench.benchmarks.runs.results as r; r.CHECKPOINT_SECONDS = -1.0; "
    "from workbench.cli import main; main(sys.argv[1:])"
)
COMMANDS = {
    "bench": ["bench", "-p", "64", "-n", "64", "-r", "40"],
    "perplexity": ["perplexity", "--tokens-from", "sample:6000:2", "--n-ctx", "64"],
    "ab": ["ab", "--toggle", "sync=per_copy,packed", "--test", "tg32", "--rounds", "20"],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", COMMANDS)
def test_a_killed_run_goes_on(tiny_model, tmp_path, what):
    out = tmp_path / "runs" / "r"
    command = [
        sys.executable, "-c", RUN, *COMMANDS[what], "-m", str(tiny_model("tiny-llama", "Q8_0")),
        "--device", "embedded", "--out", str(out),
    ]  # fmt: skip
    held = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while held < 5 and process.poll() is None:
            time.sleep(0.02)
            held = load_run(out).samples["order"].nunique() if out.exists() else 0
        process.kill()
    assert process.returncode == -9, "it ended too early to be killed"
    cut = load_run(out)
    assert cut.run["status"] == "interrupted"
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole = load_run(out)
    assert whole.run["status"] == "complete" and len(whole.run["result"]["sessions"]) == 2
    assert whole.samples.iloc[: len(cut.samples)].equals(cut.samples)
    assert not whole.samples.duplicated(["arm", "test", "repetition", "token"]).any()
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["r"], "nothing is left over"
