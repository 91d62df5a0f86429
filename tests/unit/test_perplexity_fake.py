"""Perplexity without an engine: windows, sources, what is kept. The sums: test_divergence.py."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.unit.fake_engine import BOS, N_VOCAB, Clock, FakeEngine
from tests.unit.test_divergence import log_softmax
from workbench.benchmarks.runs.results import load_run
from workbench.benchmarks.scores import perplexity as ppl
from workbench.benchmarks.scores.token_source import (
    TokenWindow,
    ask,
    draw,
    read_ids,
    sample,
    windows,
)
from workbench.common.errors import DeviceError, UsageError, WorkbenchError
from workbench.config import Toggles


class RowEngine(FakeEngine):
    """A fake engine that gives a row of logits for every token asked for, from the cache alone."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.backend.synchronize = lambda: None

    def variant(self, toggles):
        made = RowEngine(
            self.clock, toggles, self.ns_of, self.wrong, self.config.n_ctx, self.shared
        )
        self.shared.variants.append(made)
        return made

    def step(self, tokens, outputs="last"):
        self.shared.steps += 1
        if self.shared.stop_at == self.shared.steps:
            raise self.shared.error
        assert len(self.live) + len(tokens) <= self.config.n_ctx
        rows = []
        for token in tokens:
            self.live.append(token)
            rows.append(np.random.default_rng(self.live).standard_normal(N_VOCAB))
        logits = np.array(rows, np.float32)
        logits[:, 3] += np.float32(self.wrong.get(self.toggles.sync, 0))
        return logits if outputs == "all" else logits[-1:]


@pytest.fixture
def engine() -> RowEngine:
    return RowEngine(Clock(), n_ctx=40, wrong={"auto": 0.5})


# windows and sources -----------------------------------------------------------------------------


def test_every_token_is_scored_once_behind_bos():
    ids = list(range(100, 110))
    made = list(windows(ids, 4, BOS))
    assert made[0] == TokenWindow([BOS, 100, 101, 102], [100, 101, 102, 103])
    assert made[2] == TokenWindow([BOS, 108], [108, 109])
    assert [t for w in made for t in w.targets] == ids


def test_without_bos_the_token_before_stands_for_it():
    ids = list(range(100, 110))
    made = list(windows(ids, 4, None))
    assert made[0] == TokenWindow([100, 101, 102, 103], [101, 102, 103, 104])
    assert made[1].inputs[0] == 104 and made[2] == TokenWindow([108], [109])
    assert [t for w in made for t in w.targets] == ids[1:]


@pytest.mark.parametrize("bos", [True, False])
def test_a_sample_follows_from_its_seed_alone(engine, bos):
    engine.model.file.metadata["tokenizer.ggml.add_bos_token"] = bos
    first, again, other = (list(sample(engine, 90, seed).windows) for seed in (5, 5, 6))
    assert first == again != other
    assert [len(w.targets) for w in first] == [40, 40, 10]
    for i, window in enumerate(first):
        assert window.inputs[1:] == window.targets[:-1]
        if bos:
            assert window.inputs[0] == BOS
        elif i:
            assert window.inputs[0] == first[i - 1].targets[-1]


def test_draws_have_the_probabilities_of_softmax():
    p = np.array([0.5, 0.0, 0.2, 0.3])
    with np.errstate(divide="ignore"):
        row = np.log(p).astype(np.float32)
    row[1] = -200
    drawn = [draw(row, u) for u in np.linspace(0, 1, 10_000, endpoint=False)]
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 10_000, p, atol=2e-4)
    assert draw(row, np.nextafter(1, 0)) == 3


FILES = {
    "a.npy": np.array([3, 1, 2], np.int32),
    "a.jsonl": '3\n[1]\n\n{"tokens": [2]}\n',
    "a.txt": "3, 1\n2",
    "ids": "3 1 2",
}


def write(path: Path, content) -> Path:
    if isinstance(content, np.ndarray):
        np.save(path, content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content)
    return path


@pytest.mark.parametrize("name", FILES)
def test_ids_are_read_from_every_format(engine, tmp_path, name):
    path = write(tmp_path / name, FILES[name])
    assert read_ids(path) == [3, 1, 2]
    source = ask(None, str(path)).open(engine)
    assert (source.label, source.n_tokens) == (name, 3)
    assert list(source.windows) == [TokenWindow([BOS, 3, 1], [3, 1, 2])]


def test_a_leading_bos_is_not_doubled(engine, tmp_path):
    path = write(tmp_path / "ids", f"{BOS} 3 {BOS} 2")
    assert next(ask(None, str(path)).open(engine).windows).inputs == [BOS, 3, BOS]


BAD_FILES = {
    "text.npy": ("1 2 3", "cannot be read as .npy"),
    "empty.npy": (b"", "cannot be read as .npy"),
    "floats.npy": (np.zeros(3), "float64 of shape (3,)"),
    "square.npy": (np.zeros((3, 3), int), "int64 of shape (3, 3)"),
    "objects.npy": (np.array([None, {}]), "cannot be read as .npy"),
    "a.jsonl": ("[1]\n[1,", "line 2: no JSON"),
    "b.jsonl": ('[1]\n{"text": "x"}', "line 2: a line is an id"),
    "c.jsonl": ("[true]", "line 1: a line is an id"),
    "d.jsonl": ("[[1]]", "line 1: a line is an id"),
    "e.jsonl": ("1.5", "line 1: a line is an id"),
    "a.txt": ("1\n2 the", "line 2: 'the' is no token id"),
    "b.txt": (b"1 \xff", "no UTF-8 text: byte 2"),
    "c.txt": ("", "c.txt holds 0 tokens"),
    "d.txt": (str(BOS), "d.txt holds 0 tokens"),
    "e.txt": (f"1 {N_VOCAB}", f"token id {N_VOCAB} at index 1"),
    "f.txt": ("1 -1", "token id -1 at index 1"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_in_one_line(engine, tmp_path, name):
    content, says = BAD_FILES[name]
    if isinstance(content, np.ndarray) and content.dtype == object:
        np.save(tmp_path / name, content, allow_pickle=True)
    else:
        write(tmp_path / name, content)
    with pytest.raises(UsageError) as caught:
        ask(None, str(tmp_path / name)).open(engine)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ((None, None), "either a text file"),
        ((Path("a"), "b"), "either a text file"),
        ((Path("/no/such"), None), "/no/such cannot be read: No such file"),
        ((None, "/no/such.npy"), "cannot be read as .npy"),
        ((None, "sample:0"), "draws nothing"),
        ((None, "sample:many"), "write sample:2048"),
    ],
)
def test_bad_requests_are_refused_in_one_line(engine, asked, says):
    with pytest.raises(UsageError) as caught:
        ask(*asked).open(engine)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_against_names_a_reference():
    assert ppl.parse_against("base") == ppl.parse_against("baseline") == Toggles()
    assert ppl.parse_against("llama.cpp@2025-09") == Toggles.preset("llama.cpp@2025-09")
    assert ppl.parse_against("activations=float").activations == "float"
    made = ppl.parse_against("fuse=on, sync=implicit,copy_stream=compute")
    assert made == Toggles(sync="implicit", copy_stream="compute").switched("fuse", "on")
    but_one = Toggles().switched("fuse", "on").switched("fuse_qkv", "off")
    for text in ("fuse=on,fuse_qkv=off", "fuse_qkv=off,fuse=on"):
        assert ppl.parse_against(text) == but_one
    clash = "sync=event_guarded,copy_stream=compute"
    for text in ("", "float", "speed=on", "activations=f16", clash):
        with pytest.raises(UsageError):
            ppl.parse_against(text)


# runs --------------------------------------------------------------------------------------------


def test_a_run_is_what_the_engine_s_rows_say(engine, tmp_path):
    ids = np.random.default_rng(0).integers(0, N_VOCAB, 90).tolist()
    source = ask(None, str(write(tmp_path / "ids", " ".join(map(str, ids))))).open(engine)
    made = ppl.perplexity(engine, source, out=tmp_path / "run")
    nll, tokens = [], made.tokens
    for begin in range(0, 90, 40):  # one token at a time, the slow way
        engine.reset()
        last = BOS
        for token in ids[begin : begin + 40]:
            nll.append(-log_softmax(engine.step([last])[0])[token])
            last = token
    np.testing.assert_allclose(tokens["nll"], nll, rtol=1e-12)
    assert made.engine.nll == pytest.approx(np.mean(nll)) and made.reference is None
    run, samples = load_run(tmp_path / "run")[1:]
    assert (run["kind"], run["status"], run["repetitions"]) == ("perplexity", "complete", 3)
    assert run["result"]["engine"]["nll"] == pytest.approx(np.mean(nll))
    assert run["result"]["agreement"] is None and run["result"]["n_ubatch"] == 16
    assert samples["n_tokens"].tolist() == [16, 16, 8, 16, 16, 8, 10]
    kept = pd.read_parquet(tmp_path / "run" / ppl.TOKENS)
    pd.testing.assert_frame_equal(kept, tokens)
    assert kept["token"].tolist() == ids and kept["window"].tolist()[-1] == 2
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "run.json", "samples.parquet", "tokens.parquet",
    ]  # fmt: skip


def test_two_engines_are_fed_the_same_tokens(engine, tmp_path):
    fast = engine.variant(Toggles(sync="auto"))  # wrong by 0.5 in one logit
    made = ppl.perplexity(fast, sample(fast, 60, 0), against=Toggles(), out=tmp_path / "run")
    assert made.agreement.kl_mean > 1e-4 and made.reference.nll != made.engine.nll
    assert made.agreement.nmse == pytest.approx(60 * 0.25 / made.tokens["power"].sum(), rel=1e-5)
    assert made.agreement.kl_mean < made.agreement.kl_p99 <= made.agreement.kl_max
    arms = load_run(tmp_path / "run").run["arms"]
    assert [(a["name"], a["toggles"]["sync"]) for a in arms] == [
        ("engine", "auto"), ("reference", "per_copy"),
    ]  # fmt: skip
    assert engine.shared.variants[-1].closed and not fast.closed
    text = "\n".join(made.lines())
    assert "60 in 2 windows of up to 40" in text and "reference" in text and "NMSE" in text


def test_sizes_share_one_reference(engine, tmp_path):
    """Each size is a run of its own; the reference computes every row once, n_ubatch at a time."""
    folders = ppl.folders_of(tmp_path / "run", [16, 5, 1])
    assert [f.name for f in folders.values()] == ["run-ub16", "run-ub5", "run-ub1"]
    fast = engine.variant(Toggles(sync="auto"))
    steps = []
    make = RowEngine.variant

    def variant(self, toggles):
        made = make(self, toggles)
        made.step = lambda tokens, outputs, step=made.step: (
            steps.append((made.toggles.sync, len(tokens))) or step(tokens, outputs)
        )
        return made

    fast.variant = variant.__get__(fast)
    source = ask(None, str(write(tmp_path / "ids", "1 2 " * 29))).open(fast)
    runs = ppl.perplexity_by_size(fast, source, folders, against=Toggles())
    assert [made.n_ubatch for made in runs] == [16, 5, 1]
    # windows of 40 and 18
    assert [n for sync, n in steps if sync == "per_copy"] == [16, 16, 8, 16, 2]
    ones = [n for sync, n in steps if sync == "auto" and n == 1]
    assert len(ones) == 58 + 3  # fives leave one of every 16
    for made, n in zip(runs, (16, 5, 1), strict=True):
        pd.testing.assert_frame_equal(
            made.tokens.drop(columns="run_id"), runs[0].tokens.drop(columns="run_id")
        )
        run, samples = load_run(folders[n])[1:]
        assert run["result"]["n_ubatch"] == n and made.agreement.kl_mean > 1e-4
        of = samples[samples["arm"] == "engine"]["n_tokens"]
        assert of.max() == n and of.sum() == 58
        assert samples[samples["arm"] == "reference"]["n_tokens"].tolist() == [16, 16, 8, 16, 2]
        assert [a["program"]["pp40"]["n_tokens"] for a in run["arms"]] == [n, 16]
    assert f"58 in 2 windows of up to 40, {n} at a time" in made.lines()[0]
    assert not fast.closed and [v.closed for v in engine.shared.variants[1:]] == [True] * 3


@pytest.mark.parametrize(("sizes", "says"), [((17,), "1 to n_ubatch (16)"), ((0,), "0 tokens"),
                                             ((), "no size is given")])  # fmt: skip
def test_impossible_sizes_are_refused(engine, tmp_path, sizes, says):
    folders = ppl.folders_of(tmp_path / "run", sizes)
    with pytest.raises(UsageError) as caught:
        ppl.perplexity_by_size(engine, sample(engine, 9, 0), folders)
    assert says in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DeviceError("the device fell off")])
def test_finished_windows_are_kept(engine, tmp_path, error):
    engine.shared.stop_at, engine.shared.error = 3 * 2 * 2 + 2, error  # in the third window
    source = ask(None, str(write(tmp_path / "ids", "1 " * 110))).open(engine)
    if isinstance(error, KeyboardInterrupt):
        made = ppl.perplexity(engine, source, against=Toggles(), out=tmp_path / "run")
        assert made.interrupted and made.engine.n == 80
    else:
        with pytest.raises(DeviceError, match="fell off"):
            ppl.perplexity(engine, source, against=Toggles(), out=tmp_path / "run")
    run, samples = load_run(tmp_path / "run")[1:]
    assert run["status"] == "interrupted" and run["result"]["agreement"]["kl_mean"] == 0
    assert samples.groupby("arm")["n_tokens"].sum().to_dict() == {"engine": 80, "reference": 80}
    assert len(pd.read_parquet(tmp_path / "run" / ppl.TOKENS)) == 80
    assert engine.shared.variants[-1].closed


def test_nothing_is_written_before_a_window_is_finished(engine, tmp_path):
    engine.shared.stop_at, engine.shared.error = 2, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        ppl.perplexity(engine, sample(engine, 90, 0), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_is_not_overwritten(engine, tmp_path):
    with pytest.raises(UsageError, match="exists already"):
        ppl.perplexity(engine, sample(engine, 9, 0), out=tmp_path)


def test_run_json_has_no_nan(engine, tmp_path):
    source = ask(None, str(write(tmp_path / "ids", "3"))).open(engine)
    made = ppl.perplexity(engine, source, out=tmp_path / "run")
    assert math.isnan(made.engine.error)  # of a single token
    assert "NaN" not in (tmp_path / "run" / "run.json").read_text()
    assert (
        json.loads((tmp_path / "run" / "run.json").read_text())["result"]["engine"]["error"] is None
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_end_it(engine, tmp_path, value):
    engine.wrong = {"per_copy": value}
    source = ask(None, str(write(tmp_path / "ids", "1 2 3"))).open(engine)
    with pytest.raises(WorkbenchError, match=r"logits behind token 0 are not finite"):
        ppl.perplexity(engine, source, out=tmp_path / "run")


# resumed -----------------------------------------------------------------------------------------


def ids_of(tmp_path: Path, n: int = 110, seed: int = 0) -> str:
    ids = np.random.default_rng(seed).integers(0, N_VOCAB, n)
    return str(write(tmp_path / "ids", " ".join(map(str, ids))))


def cut(engine: RowEngine, asked: str, out: Path, stop_at: int, **how) -> None:
    """A run that a Ctrl-C ends at that step of all engines."""
    engine.shared.stop_at, engine.shared.error = stop_at, KeyboardInterrupt()
    ppl.perplexity(engine, ask(None, asked).open(engine), out=out, **how)
    assert load_run(out).run["status"] == "interrupted"
    engine.shared.stop_at, engine.shared.steps = None, 0


@pytest.mark.parametrize("against", [None, Toggles(sync="auto")])
def test_finished_windows_are_kept_and_the_rest_is_scored(engine, tmp_path, against):
    """Windows of 40, 40 and 30 tokens, in steps of 16: three of them, and two at the end."""
    asked, sides = ids_of(tmp_path), 1 if against is None else 2
    source = ask(None, asked).open(engine)
    whole = ppl.perplexity(engine, source, against=against, out=tmp_path / "whole")
    engine.shared.steps = 0
    cut(engine, asked, tmp_path / "r", 3 * sides * 2 + 1, against=against)
    before, kept = load_run(tmp_path / "r"), pd.read_parquet(tmp_path / "r" / ppl.TOKENS)
    assert len(kept) == 80
    source = ask(None, asked).open(engine)
    made = ppl.perplexity(engine, source, against=against, out=tmp_path / "r", resume=True)
    assert engine.shared.steps == 2 * sides and not made.interrupted
    tokens = pd.read_parquet(tmp_path / "r" / ppl.TOKENS)
    pd.testing.assert_frame_equal(tokens[:80], kept)
    same = [tokens.drop(columns="run_id"), whole.tokens.drop(columns="run_id")]
    pd.testing.assert_frame_equal(*same)
    assert (made.engine, made.reference, made.agreement) == whole[3:]
    run, samples = load_run(tmp_path / "r")[1:]
    assert (run["status"], run["repetitions"]) == ("complete", 3)
    assert samples.iloc[: len(before.samples)].equals(before.samples)
    assert samples["repetition"].nunique() == 3 and samples["n_tokens"].sum() == 110 * sides
    assert run["started"] == before.run["started"] and len(run["result"]["sessions"]) == 2
    engine.shared.steps = 0
    source = ask(None, asked).open(engine)
    again = ppl.perplexity(engine, source, against=against, out=tmp_path / "r", resume=True)
    assert engine.shared.steps == 0 and again.engine == whole.engine


@pytest.mark.parametrize("bos", [True, False])
def test_a_sample_that_goes_on_is_the_same_and_is_not_drawn_again(engine, tmp_path, bos):
    engine.model.file.metadata["tokenizer.ggml.add_bos_token"] = bos
    whole = ppl.perplexity(engine, sample(engine, 110, 3), out=tmp_path / "whole")
    engine.shared.steps = 0
    cut(engine, "sample:110:3", tmp_path / "r", 2 * (40 + 3) + 5)  # while the third is drawn
    made = ppl.perplexity(engine, sample(engine, 110, 3), out=tmp_path / "r", resume=True)
    assert engine.shared.steps == 30 + 2
    assert made.tokens["token"].tolist() == whole.tokens["token"].tolist()
    assert made.tokens["nll"].tolist() == whole.tokens["nll"].tolist()


def test_each_size_goes_on_with_what_it_lacks(engine, tmp_path):
    """One folder is there whole, one has a window less, and one has none."""
    asked, folders = ids_of(tmp_path), ppl.folders_of(tmp_path / "run", [16, 8, 4])

    def score(sizes, **how):
        engine.shared.steps = 0
        source, of = ask(None, asked).open(engine), {n: folders[n] for n in sizes}
        return ppl.perplexity_by_size(engine, source, of, **how)

    score([16])
    engine.shared.stop_at, engine.shared.error = 5 * 2 + 1, KeyboardInterrupt()
    score([8])  # two of three windows
    engine.shared.stop_at = None
    runs = score([16, 8, 4], resume=True)
    assert engine.shared.steps == 4 + (10 + 10 + 8)
    assert [made.run["repetitions"] for made in runs] == [3, 3, 3]
    for made in runs[1:]:
        assert made.tokens["nll"].tolist() == runs[0].tokens["nll"].tolist()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"asked": "sample:110:1"}, "its seed is 0, and now it would be 1"),
        ({"asked": "sample:111:0"}, "its source is sample:110:0"),
        ({"against": Toggles()}, "its arms is"),
        ({"size": 8}, "its n_ubatch is 16, and now it would be 8"),
        ({"n_ctx": 41}, "its tests is"),
        ({"out": "none"}, "is no run folder"),
    ],
)
def test_only_the_same_run_is_resumed(engine, tmp_path, change, says):
    cut(engine, "sample:110:0", tmp_path / "r", 2 * 43 + 5)
    before = {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()}
    other = RowEngine(Clock(), n_ctx=change.get("n_ctx", 40), wrong={"auto": 0.5})
    source = ask(None, change.get("asked", "sample:110:0")).open(other)
    folders = {change.get("size", 16): tmp_path / change.get("out", "r")}
    with pytest.raises(UsageError, match=says):
        ppl.perplexity_by_size(
            other, source, folders, against=change.get("against"), resume=True
        )  # fmt: skip
    assert {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()} == before


def test_a_file_whose_tokens_are_others_by_now_is_refused(engine, tmp_path):
    cut(engine, ids_of(tmp_path), tmp_path / "r", 3 * 2 + 1)
    before = {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()}
    for asked in (lambda: ids_of(tmp_path, seed=1), lambda: ids_of(tmp_path, n=70)):
        with pytest.raises(UsageError, match="ids has other tokens than the run to resume"):
            source = ask(None, asked()).open(engine)
            ppl.perplexity(engine, source, out=tmp_path / "r", resume=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()} == before
    with pytest.raises(UsageError, match="give it as out"):
        ppl.perplexity(engine, ask(None, ids_of(tmp_path)).open(engine), resume=True)
