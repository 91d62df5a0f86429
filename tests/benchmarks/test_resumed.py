"""Runs that a Ctrl-C cut: what is finished is kept, and the rest is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest

from tests.benchmarks.fake_engine import N_VOCAB, Clock, FakeEngine, interrupted, timed
from tests.benchmarks.test_compare_ab import SPEC
from workbench.benchmarks.compare.ab import ab
from workbench.benchmarks.llama.llama_bench import bench
from workbench.benchmarks.runs.results import Run, load_run
from workbench.benchmarks.scores import perplexity as ppl
from workbench.benchmarks.scores.token_source import ask, sample
from workbench.common.errors import UsageError
from workbench.config import Toggles


class Kind(NamedTuple):
    """at: the step of all engines that is cut, in the fifth repetition or the third window."""

    measure: Callable[..., Any]
    at: int
    n_kept: int
    changes: dict[str, dict[str, Any]]  # by what the refusal names


def _perplexity(engine, *, tokens="sample:110:0", size=16, out, resume=False, **how):
    source = ask(None, tokens).open(engine)
    return ppl.perplexity_by_size(engine, source, {size: out}, resume=resume, **how)


BENCH = {"n_prompt": [4], "n_gen": [2], "repetitions": 3}
KINDS = {
    "ab": Kind(
        lambda engine, **how: ab(engine, **({"toggle": SPEC, "tests": "tg2", "rounds": 5} | how)),
        3 * 14 + 3 * 2 * 2 + 9, 2 * 4,  # 13 forced steps for each arm, 2 warm-ups of 2 tokens
        {"arms": {"toggle": "sync=per_copy,auto"}, "tests": {"tests": "tg3"}, "seed": {"seed": 1}},
    ),
    "bench": Kind(
        lambda engine, **how: bench(engine, **(BENCH | how)), 9, 3,
        {"tests": {"n_gen": [3]}, "seed": {"seed": 1}, "engine": {"of": {"n_ctx": 300}},
         "arms": {"of": {"toggles": Toggles(sync="packed")}}},
    ),
    "perplexity": Kind(
        _perplexity, 2 * 43 + 5, 6,  # each token of a window is drawn, then scored in 3 steps
        {"seed": {"tokens": "sample:110:1"}, "source": {"tokens": "sample:111:0"},
         "arms": {"against": Toggles()}, "n_ubatch": {"size": 8}},
    ),
}  # fmt: skip


def engine_of(monkeypatch, kind: str, **changes) -> FakeEngine:
    return timed(monkeypatch, 1.5, **({"n_ctx": 40} if kind == "perplexity" else {}) | changes)


def cut(monkeypatch, kind: str, out: Path) -> Run:
    engine = interrupted(engine_of(monkeypatch, kind), KINDS[kind].at)
    try:
        KINDS[kind].measure(engine, out=out)
    except KeyboardInterrupt:
        assert kind == "bench"
    return load_run(out)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_finished_is_kept_and_the_rest_follows(monkeypatch, tmp_path, kind):
    measure, out = KINDS[kind].measure, tmp_path / "r"
    before = cut(monkeypatch, kind, out)
    assert before.run["status"] == "interrupted"
    assert len(before.samples) == KINDS[kind].n_kept
    engine, straight = engine_of(monkeypatch, kind), tmp_path / "straight"
    measure(engine, out=out, resume=True)
    whole = load_run(out)
    assert whole.run["status"] == "complete" and len(whole.run["result"]["sessions"]) == 2
    assert whole.run["started"] == before.run["started"]
    assert whole.samples.iloc[: len(before.samples)].equals(before.samples)
    assert not whole.samples.duplicated(["arm", "test", "repetition", "token"]).any()
    measure(engine_of(monkeypatch, kind), out=straight)
    same = ["arm", "test", "repetition", "order", "token", "n_tokens"]
    assert whole.samples[same].equals(load_run(straight).samples[same])
    steps = [[a["counters"]["steps"] for a in of.run["arms"]] for of in (before, whole)]
    if kind == "ab":  # what its repetitions did alone
        assert steps[1] == [10, 10, 10]
    else:
        assert steps[1] == [steps[0][0] + engine.counters["steps"]]
    if kind == "perplexity":
        tokens = [pd.read_parquet(f / ppl.TOKENS).drop(columns="run_id") for f in (out, straight)]
        pd.testing.assert_frame_equal(*tokens)
    again = engine_of(monkeypatch, kind)
    measure(again, out=out, resume=True)  # finished: nothing is measured
    assert load_run(out).samples.equals(whole.samples)
    assert kind == "ab" or again.shared.steps == 0


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, of in KINDS.items() for key in of.changes]
)
def test_only_the_same_run_is_resumed(monkeypatch, tmp_path, kind, key):
    cut(monkeypatch, kind, tmp_path / "r")
    before = {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()}
    change = dict(KINDS[kind].changes[key])
    engine = engine_of(monkeypatch, kind, **change.pop("of", {}))
    with pytest.raises(UsageError, match=f"its {key} is"):
        KINDS[kind].measure(engine, out=tmp_path / "r", resume=True, **change)
    assert {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()} == before


# perplexity --------------------------------------------------------------------------------------


def ids_of(folder: Path, seed: int = 0) -> str:
    ids = np.random.default_rng(seed).integers(0, N_VOCAB, 110)
    (folder / "ids").write_text(" ".join(map(str, ids)))
    return str(folder / "ids")


def test_each_size_goes_on_with_what_it_lacks(tmp_path):
    """One folder is there whole, one has a window less, and one has none."""
    engine = FakeEngine(Clock(), n_ctx=40)
    asked, folders = ids_of(tmp_path), ppl.folders_of(tmp_path / "run", [16, 8, 4])
    _perplexity(engine, tokens=asked, out=folders[16])
    interrupted(engine, 8 + 5 * 2 + 1)
    _perplexity(engine, tokens=asked, size=8, out=folders[8])  # two of three windows
    assert engine.shared.waits == [8 + 5 * 2 + 1], "nothing is freed that the device reads"
    engine.shared.stop_at, engine.shared.steps = None, 0
    runs = ppl.perplexity_by_size(engine, ask(None, asked).open(engine), folders, resume=True)
    assert engine.shared.steps == 4 + (10 + 10 + 8)
    for made in runs:
        assert made.run["repetitions"] == 3
        assert made.tokens["nll"].tolist() == runs[0].tokens["nll"].tolist()
    with pytest.raises(UsageError, match="ids has other tokens than the run to resume"):
        _perplexity(engine, tokens=ids_of(tmp_path, 1), out=folders[16], resume=True)


def test_a_sample_that_goes_on_is_not_drawn_again(tmp_path):
    engine = interrupted(FakeEngine(Clock(), n_ctx=40), 2 * 43 + 5)  # while the third is drawn
    ppl.perplexity(engine, sample(engine, 110, 3), out=tmp_path / "r")
    engine.shared.stop_at, engine.shared.steps = None, 0
    ppl.perplexity(engine, sample(engine, 110, 3), out=tmp_path / "r", resume=True)
    assert engine.shared.steps == 30 + 2
