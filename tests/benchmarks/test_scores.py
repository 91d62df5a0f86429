"""Perplexity: windows, sources, what is kept and resumed, on a fake engine and on real ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.benchmarks.fake_engine import BOS, N_VOCAB, Clock, FakeEngine
from tests.benchmarks.test_scores_divergence import log_softmax
from workbench.benchmarks.kernels import bounds
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
from workbench.engine.engine import Engine


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
        self.calls.append(list(tokens))
        rows = []
        for token in tokens:
            self.live.append(token)
            rows.append(np.random.default_rng(self.live).standard_normal(N_VOCAB))
        logits = np.array(rows, np.float32)
        logits[:, 3] += np.float32(self.wrong.get(self.toggles.sync, 0))
        return logits if outputs == "all" else logits[-1:]


def fake(n_ctx: int = 40) -> RowEngine:
    return RowEngine(Clock(), n_ctx=n_ctx, wrong={"auto": 0.5})


@pytest.fixture
def engine() -> RowEngine:
    return fake()


# windows and sources -----------------------------------------------------------------------------


def test_every_token_is_scored_once_behind_bos_or_the_last():
    ids = list(range(100, 110))
    made = list(windows(ids, 4, BOS))
    assert made[0] == TokenWindow([BOS, 100, 101, 102], [100, 101, 102, 103])
    assert made[2] == TokenWindow([BOS, 108], [108, 109])
    assert [t for w in made for t in w.targets] == ids
    made = list(windows(ids, 4, None))  # without BOS the token before stands for it
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


def write(path: Path, content) -> Path:
    if isinstance(content, np.ndarray):
        np.save(path, content, allow_pickle=True)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def ids_of(folder: Path, n: int = 110, seed: int = 0) -> str:
    ids = np.random.default_rng(seed).integers(0, N_VOCAB, n)
    return str(write(folder / "ids", " ".join(map(str, ids))))


@pytest.mark.parametrize(("name", "content"), [
    ("a.npy", np.array([3, 1, 2], np.int32)), ("a.jsonl", '3\n[1]\n\n{"tokens": [2]}\n'),
    ("a.txt", "3, 1\n2"), ("ids", "3 1 2"), ("bos", f"{BOS} 3 1 2"),  # which is not doubled
])  # fmt: skip
def test_ids_are_read_from_every_format(engine, tmp_path, name, content):
    path = write(tmp_path / name, content)
    source = ask(None, str(path)).open(engine)
    assert (source.label, source.n_tokens) == (name, 3) and read_ids(path)[-3:] == [3, 1, 2]
    assert list(source.windows) == [TokenWindow([BOS, 3, 1], [3, 1, 2])]


BAD_FILES = {
    "text.npy": ("1 2 3", "cannot be read as .npy"), "empty.npy": (b"", "cannot be read as .npy"),
    "floats.npy": (np.zeros(3), "float64 of shape (3,)"),
    "square.npy": (np.zeros((3, 3), int), "int64 of shape (3, 3)"),
    "objects.npy": (np.array([None, {}]), "cannot be read as .npy"),
    "a.jsonl": ("[1]\n[1,", "line 2: no JSON"),
    "b.jsonl": ('[1]\n{"text": "x"}', "line 2: a line is an id"),
    "c.jsonl": ("[true]", "line 1: a line is an id"), "d.jsonl": ("[[1]]", "line 1: a line is"),
    "e.jsonl": ("1.5", "line 1: a line is an id"), "a.txt": ("1\n2 the", "line 2: 'the' is no"),
    "b.txt": (b"1 \xff", "no UTF-8 text: byte 2"), "c.txt": ("", "c.txt holds 0 tokens"),
    "d.txt": (str(BOS), "d.txt holds 0 tokens"), "f.txt": ("1 -1", "token id -1 at index 1"),
    "e.txt": (f"1 {N_VOCAB}", f"token id {N_VOCAB} at index 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_in_one_line(engine, tmp_path, name):
    content, says = BAD_FILES[name]
    with pytest.raises(UsageError) as caught:
        ask(None, str(write(tmp_path / name, content))).open(engine)
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
    asked = ids_of(tmp_path, 90)
    made = ppl.perplexity(engine, ask(None, asked).open(engine), out=tmp_path / "run")
    ids, nll, tokens = read_ids(Path(asked)), [], made.tokens
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


def test_sizes_share_one_reference_that_has_the_same_tokens(engine, tmp_path):
    """Each size is a run of its own; the reference computes every row once, n_ubatch at a time."""
    folders = ppl.folders_of(tmp_path / "run", [16, 5, 1])
    assert [f.name for f in folders.values()] == ["run-ub16", "run-ub5", "run-ub1"]
    fast = engine.variant(Toggles(sync="auto"))  # wrong by 0.5 in one logit
    source = ask(None, str(write(tmp_path / "ids", "1 2 " * 29))).open(fast)
    runs = ppl.perplexity_by_size(fast, source, folders, against=Toggles())
    calls = {v.toggles.sync: [] for v in engine.shared.variants}
    for v in engine.shared.variants:
        calls[v.toggles.sync] += [len(call) for call in v.calls]
    assert calls["per_copy"] == [16, 16, 8, 16, 2]  # windows of 40 and 18
    assert calls["auto"].count(1) == 58 + 3  # fives leave one of every 16
    for made, n in zip(runs, (16, 5, 1), strict=True):
        assert made.n_ubatch == n and made.reference.nll != made.engine.nll
        same = [one.tokens.drop(columns="run_id") for one in (made, runs[0])]
        pd.testing.assert_frame_equal(*same)
        found = made.agreement
        assert found.nmse == pytest.approx(58 * 0.25 / made.tokens["power"].sum(), rel=1e-5)
        assert 1e-4 < found.kl_mean < found.kl_p99 <= found.kl_max
        run, samples = load_run(folders[n])[1:]
        of = samples[samples["arm"] == "engine"]["n_tokens"]
        assert run["result"]["n_ubatch"] == n == of.max() and of.sum() == 58
        assert samples[samples["arm"] == "reference"]["n_tokens"].tolist() == calls["per_copy"]
        assert [(a["name"], a["program"]["pp40"]["n_tokens"]) for a in run["arms"]] == [
            ("engine", n), ("reference", 16),
        ]  # fmt: skip
    assert f"58 in 2 windows of up to 40, {n} at a time" in made.lines()[0]
    assert not fast.closed and [v.closed for v in engine.shared.variants[1:]] == [True] * 3


def test_run_json_has_no_nan(engine, tmp_path):
    source = ask(None, str(write(tmp_path / "ids", "3"))).open(engine)
    made = ppl.perplexity(engine, source, out=tmp_path / "run")
    assert math.isnan(made.engine.error)  # of a single token
    text = (tmp_path / "run" / "run.json").read_text()
    assert "NaN" not in text and json.loads(text)["result"]["engine"]["error"] is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_end_it(engine, tmp_path, value):
    engine.wrong = {"per_copy": value}
    with pytest.raises(WorkbenchError, match=r"logits behind token 0 are not finite"):
        ppl.perplexity(engine, ask(None, ids_of(tmp_path, 3)).open(engine), out=tmp_path / "run")


# resumed -----------------------------------------------------------------------------------------


def cut(engine: RowEngine, asked: str, out: Path, stop_at: int, **how) -> None:
    """A run that a Ctrl-C ends at that step of all engines."""
    engine.shared.stop_at, engine.shared.error = stop_at, KeyboardInterrupt()
    made = ppl.perplexity(engine, ask(None, asked).open(engine), out=out, **how)
    assert made.interrupted and load_run(out).run["status"] == "interrupted"
    engine.shared.stop_at, engine.shared.steps = None, 0


@pytest.mark.parametrize("against", [None, Toggles(sync="auto")])
def test_finished_windows_are_kept_and_the_rest_is_scored(engine, tmp_path, against):
    """Windows of 40, 40 and 30 tokens, in steps of 16: three of them, and two at the end."""
    asked, sides = ids_of(tmp_path), 1 if against is None else 2
    how = {"against": against, "out": tmp_path / "r", "resume": True}
    source = ask(None, asked).open(engine)
    whole = ppl.perplexity(engine, source, against=against, out=tmp_path / "whole")
    engine.shared.steps = 0
    cut(engine, asked, tmp_path / "r", 3 * sides * 2 + 1, against=against)
    before, kept = load_run(tmp_path / "r"), pd.read_parquet(tmp_path / "r" / ppl.TOKENS)
    assert len(kept) == 80 and (sides == 1 or engine.shared.variants[-1].closed)
    made = ppl.perplexity(engine, ask(None, asked).open(engine), **how)
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
    again = ppl.perplexity(engine, ask(None, asked).open(engine), **how)
    assert engine.shared.steps == 0 and again.engine == whole.engine


def test_a_failing_device_saves_and_raises(engine, tmp_path):
    engine.shared.stop_at, engine.shared.error = 3 * 2 + 1, DeviceError("the device fell off")
    with pytest.raises(DeviceError, match="fell off"):
        ppl.perplexity(engine, ask(None, ids_of(tmp_path)).open(engine), out=tmp_path / "run")
    assert len(pd.read_parquet(tmp_path / "run" / ppl.TOKENS)) == 80


@pytest.mark.parametrize("bos", [True, False])
def test_a_sample_that_goes_on_is_not_drawn_again(engine, tmp_path, bos):
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
    ],
)
def test_only_the_same_run_is_resumed(engine, tmp_path, change, says):
    cut(engine, "sample:110:0", tmp_path / "r", 2 * 43 + 5)
    before = {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()}
    other = fake(change.get("n_ctx", 40))
    source = ask(None, change.get("asked", "sample:110:0")).open(other)
    how = {"against": change.get("against"), "resume": True}
    with pytest.raises(UsageError, match=says):
        ppl.perplexity_by_size(other, source, {change.get("size", 16): tmp_path / "r"}, **how)
    assert {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()} == before


def test_a_file_whose_tokens_are_others_by_now_is_refused(engine, tmp_path):
    cut(engine, ids_of(tmp_path), tmp_path / "r", 3 * 2 + 1)
    for how in ({"seed": 1}, {"n": 70}):
        source = ask(None, ids_of(tmp_path, **how)).open(engine)
        with pytest.raises(UsageError, match="ids has other tokens than the run to resume"):
            ppl.perplexity(engine, source, out=tmp_path / "r", resume=True)


# real engines ------------------------------------------------------------------------------------


@pytest.fixture
def scored(call, tmp_path):
    return lambda *asked: call("perplexity", "-o", tmp_path / "run", *asked)


def softmax64(rows: np.ndarray) -> np.ndarray:
    e = np.exp(rows.astype(np.float64) - rows.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3"])  # with a BOS, and without
@pytest.mark.parametrize("device", ["host", "embedded"])
def test_a_text_is_scored_as_its_prefill_says(tiny_model, tmp_path, preset, device):
    text = tmp_path / "text"
    text.write_text("It was getting late, and the lamp had not been lit. " * 5)
    path = tiny_model(preset, "Q8_0")
    with Engine.load(path, device=device, n_ctx=64, n_ubatch=24, toggles=Toggles()) as engine:
        found = ppl.perplexity(engine, ask(text, None).open(engine), out=tmp_path / "run").tokens
        ids = engine.tokenizer.encode(text.read_text())
        assert found["token"].tolist() == ids[1:]  # encode puts BOS in front where there is one
        assert found["window"].nunique() == -(-(len(ids) - 1) // 64)
        engine.reset()
        p = softmax64(engine.prefill(ids[:64], outputs="all"))
    first = found[found["window"] == 0]
    np.testing.assert_allclose(first["nll"], -np.log(p[np.arange(64), first["token"]]), rtol=1e-10)


def test_a_sample_is_reproducible_and_foreseen(tiny_model, tmp_path):
    """Drawn from the model itself, tokens have the model's own entropy as their mean NLL."""
    path, asked = tiny_model("tiny-llama", "F16"), ask(None, "sample:120:4")
    with Engine.load(path, device="host", n_ctx=128, toggles=Toggles()) as engine:
        run = ppl.perplexity(engine, asked.open(engine), out=tmp_path / "run")
        entropies = []
        for window in ask(None, "sample:120:4").open(engine).windows:
            engine.reset()
            p = softmax64(engine.prefill(window.inputs, outputs="all"))
            entropies.append(-np.sum(p * np.log(p), axis=1))
            assert window.targets == run.tokens["token"].tolist()
    assert abs(run.engine.nll - np.concatenate(entropies).mean()) < 4 * run.engine.error
    assert run.run["seed"] == 4


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K", "F16"])
def test_eight_bit_activations_are_within_bounds_of_float(scored, tiny_model, tmp_path, quant):
    status, out, err = scored(
        "-m", tiny_model("tiny-llama", quant), "--tokens-from", "sample:80", "--n-ctx", 64,
        "--device", "host", "--against", "activations=float", "--check",
    )  # fmt: skip
    assert status == 0, err
    result = load_run(tmp_path / "run").run["result"]
    if quant == "F16":  # nothing to quantise
        assert result["agreement"]["nmse"] == 0
    else:
        assert 1e-6 < result["agreement"]["kl_mean"] < bounds.MANY_BOUNDS[quant].kl
    assert "80 in 2 windows of up to 64" in out and "run folder" in err


@pytest.mark.parametrize(("device", "quant"), [("embedded", "Q4_K"), ("host", "BF16")])
def test_sizes_are_runs_of_their_own(scored, tiny_model, tmp_path, device, quant):
    """Computed 24, 9 or 1 at once: one float path, and the same figures but for sums' order."""
    status, _, err = scored(
        "-m", tiny_model("tiny-llama", quant), "--tokens-from", "sample:70", "--n-ctx", 64,
        "--n-ubatch", 24, "--sizes", "24,9,1", "--device", device, "--fuse", "on",
        "--against", "activations=float", "--check",
    )  # fmt: skip
    assert status == 0, err
    folders = [tmp_path / f"run-ub{n}" for n in (24, 9, 1)]
    tables = [pd.read_parquet(folder / ppl.TOKENS) for folder in folders]
    for table in tables[1:]:
        assert (table["nll_reference"] == tables[0]["nll_reference"]).all()
        assert (table["token"] == tables[0]["token"]).all()
    kl = [load_run(folder).run["result"]["agreement"]["kl_mean"] for folder in folders]
    if quant == "BF16":  # a CPU rounds no activation of float weights
        assert max(kl) < 1e-9
    else:
        assert min(kl) > 1e-6 and max(kl) == pytest.approx(min(kl), rel=0.2)


def test_a_bound_that_does_not_hold_is_one_line_and_status_1(scored, tiny_model, monkeypatch):
    monkeypatch.setitem(bounds.MANY_BOUNDS, "Q8_0", bounds.Bound(-1.0, 1.0))
    ask = ("-m", tiny_model("tiny-llama", "Q8_0"), "--tokens-from", "sample:20", "--device", "host")
    status, out, err = scored(*ask, "--against", "base", "--check")
    assert status == 1 and "perplexity" in out
    assert err.splitlines()[-1].startswith("error: mean KL ")
    assert "above the bound for Q8_0 weights" in err.splitlines()[-1]
