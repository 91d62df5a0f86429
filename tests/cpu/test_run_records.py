"""Every kind of run has the run.json that recorded folders of its kind have, and keeps what it has
when it is interrupted."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from workbench.benchmarks.compare.ab import ab
from workbench.benchmarks.compare.rounds import interleave
from workbench.benchmarks.kernels.kernel_bench import KernelMatrix, bench_kernels
from workbench.benchmarks.kernels.kernel_cases import parse_shapes, parse_types
from workbench.benchmarks.llama.llama_bench import bench
from workbench.benchmarks.runs.draft import Draft, kept, new_arm, new_run
from workbench.benchmarks.runs.results import ARM_KEYS, RUN_KEYS, load_run
from workbench.benchmarks.scores.perplexity import perplexity
from workbench.benchmarks.scores.token_source import sample
from workbench.benchmarks.times import gaps
from workbench.benchmarks.times.gaps import host_gaps
from workbench.config import Toggles

RESULTS = Path(__file__).resolve().parents[2] / "data" / "results"
# what the campaign adds to a folder once it was measured
ADDED = {
    "cache_bytes_per_token", "parts", "product_flops", "product_tflops", "read_gbps", "read_rates",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tiny_model):
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(path, device="embedded", n_ctx=64, toggles=wb.Toggles()) as made:
        yield made


def recorded(kind: str) -> list[dict[str, Any]]:
    every = (json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/run.json")))
    return [run for run in every if run["kind"] == kind]


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
}  # fmt: skip


def issued(runs: list[dict[str, Any]]) -> set[str]:
    """The keys of what runs say of their programs."""
    programs = (p for run in runs for arm in run["arms"] for p in arm["program"].values())
    return {key for program in programs for key in program}


@pytest.mark.parametrize("kind", MEASURE)
def test_the_keys_of_a_new_run_are_those_of_recorded_ones(engine, tmp_path, kind):
    MEASURE[kind](engine, tmp_path / "run")
    new, old = load_run(tmp_path / "run").run, recorded(kind)
    assert old and new["kind"] == kind and new["status"] == "complete" and new["duration_s"] > 0
    for run in old:
        assert list(run) == list(new) == list(RUN_KEYS)
        assert all(tuple(arm) == ARM_KEYS for arm in (*run["arms"], *new["arms"]))
        for part in ("commit", "engine"):
            assert set(run[part]) <= set(new[part]), part
        assert set(run["model"]) == set(new["model"])
        assert set(run["result"]) - ADDED <= set(new["result"])
    more = {"until", "sessions", "sides"}
    assert set(new["result"]) <= set().union(*(run["result"] for run in old)) | more
    assert issued([new]) == issued(old)


def strings(value: Any) -> Iterator[str]:
    """All text in what JSON can say."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for one in value.values() for text in strings(one))
    elif isinstance(value, list):
        yield from (text for one in value for text in strings(one))


@pytest.mark.parametrize("kind", MEASURE)
def test_a_run_says_nothing_of_where_it_was_made(engine, tmp_path, monkeypatch, kind):
    """Programs and files have their names, and no folders; nobody finds the machine or its user."""
    argv = ["/opt/bin/workbench", kind, "-m", str(engine.model.path), f"--out={tmp_path}/run"]
    monkeypatch.setattr("sys.argv", argv)
    MEASURE[kind](engine, tmp_path / "run")
    run = load_run(tmp_path / "run").run
    name = Path(engine.model.path).name
    assert run["command"] == ["workbench", kind, "-m", name, "--out=run"]
    places = [str(tmp_path), str(Path(engine.model.path).parent), str(Path.home())]
    places += [platform.node()] * (len(platform.node()) > 5)  # a shorter one may be a word
    for text in strings(run):
        assert not text.startswith(("/", "~")) and not any(place in text for place in places), text


# the loop, and what an interruption leaves -------------------------------------------------------


def test_every_arm_is_measured_once_a_round_and_what_is_known_is_passed_over():
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
    monkeypatch.setattr("workbench.benchmarks.runs.results.CHECKPOINT_SECONDS", -1.0)
    draft.checkpoint()
    assert len(load_run(tmp_path / "r").samples) == 1
    measured(draft_of(None)).checkpoint()


def test_gaps_that_are_interrupted_keep_whole_rounds(engine, tmp_path, monkeypatch):
    arms = {sync: Toggles(sync=sync) for sync in ("per_copy", "copy_boundary")}
    measure, left = gaps._gaps_of, iter(range(3 + 3 * 2 + 1))  # once before, two rounds, one more

    def cut(side, tokens):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return measure(side, tokens)

    monkeypatch.setattr(gaps, "_gaps_of", cut)
    found = host_gaps(engine, arms, n_tokens=3, rounds=5, out=tmp_path / "r", name="r")
    assert found.run["status"] == "interrupted" and found.run["repetitions"] == 5
    assert found.samples.groupby("arm")["repetition"].nunique().eq(2).all()
    assert "n=2)" in found.verdict
    assert "interrupted: not every one of 5 rounds was run" in found.verdict
    assert load_run(tmp_path / "r").samples.equals(found.samples)
    with pytest.raises(KeyboardInterrupt):
        host_gaps(engine, arms, n_tokens=3, rounds=5, out=tmp_path / "none")
    assert not (tmp_path / "none").exists()
