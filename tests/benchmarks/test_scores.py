"""Perplexity and divergence: windows, sources, sums against the formulae, and their bounds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.benchmarks.fake_engine import BOS, N_VOCAB, Clock, FakeEngine
from tests.profiles import share
from workbench.backend.cuda.kernels import matvec
from workbench.benchmarks.runs.results import load_run
from workbench.benchmarks.scores import bounds, divergence
from workbench.benchmarks.scores import perplexity as ppl
from workbench.benchmarks.scores.token_source import TokenWindow, ask, draw, sample, windows
from workbench.common.errors import UsageError, WorkbenchError
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.graph.ir import WEIGHT_DTYPES


def logits(n: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (3 * rng.standard_normal((n, vocabulary))).astype(np.float32)


def log_softmax(row: np.ndarray) -> list[float]:
    values = [float(v) for v in row]
    total = math.log(math.fsum(math.exp(v) for v in values))
    return [v - total for v in values]


@pytest.mark.parametrize(("n", "vocabulary"), [(7, 33), (130, 9000)])
def test_nll_is_minus_log_softmax(n, vocabulary):
    """130 x 9000 is more than is reduced at once."""
    rows = logits(n, vocabulary)
    targets = np.random.default_rng(1).integers(0, vocabulary, n)
    found, some = divergence.score(rows, targets), range(0, n, max(1, n // 10))
    wanted = [-log_softmax(rows[i])[targets[i]] for i in some]
    np.testing.assert_allclose(found[some], wanted, rtol=1e-12)
    large = np.array([[1e4, 1e4 - 1, -1e4], [-1e4, -1e4, -1e4]], np.float32)
    nll = divergence.score(large, np.array([1, 2]))
    np.testing.assert_allclose(nll, [1 + math.log1p(math.exp(-1)), math.log(3)], rtol=1e-12)


@pytest.mark.parametrize("error", [0.0, 1e-3, 1.0])
def test_comparison_is_the_direct_formula(error):
    b, n = logits(9, 200), 9
    a = (b + error * logits(9, 200, 2)).astype(np.float32)
    targets = np.arange(n) * 5
    found = divergence.compare_rows(a, b, targets)
    for i in range(n):
        p, q = log_softmax(b[i]), log_softmax(a[i])
        kl = math.fsum(math.exp(x) * (x - y) for x, y in zip(p, q, strict=True))
        assert found["kl"][i] == pytest.approx(kl, abs=1e-13, rel=1e-9)
        nll = found["nll"][i], found["nll_reference"][i]
        assert nll == pytest.approx((-q[targets[i]], -p[targets[i]]), rel=1e-12)
        pairs = [(float(x), float(y)) for x, y in zip(a[i], b[i], strict=True)]
        assert found["error"][i] == pytest.approx(math.fsum((x - y) ** 2 for x, y in pairs))
        assert found["power"][i] == pytest.approx(math.fsum(y * y for _, y in pairs))
        assert found["same_argmax"][i] == (np.argmax(a[i]) == np.argmax(b[i]))
    assert (found["kl"] > 1e-15).all() if error else (np.abs(found["kl"]) < 1e-13).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_never_within_bounds(value, side):
    a, b = logits(3, 20), logits(3, 20)
    (a, b)[side][1, 4] = value
    columns = divergence.compare_rows(a, b, np.zeros(3, int))
    assert np.isnan(columns["kl"]).tolist() == [False, True, False]
    assert columns.pop("breaks_rule").sum() == 1
    found = ppl.Agreement.of_tokens(pd.DataFrame(columns), 1)
    assert "mean KL nan is above the bound for F32" in found.outside("F32", 512)
    assert np.isnan(divergence.score(a, np.zeros(3, int))[1]) == (side == 0)


def test_bounds_name_what_is_outside():
    """Up to FEW tokens no activation of a float weight is rounded; quantised ones always are."""
    within = ppl.Agreement(1e-9, 1e-9, 1e-9, 1e-9, 1e-9, 1.0, 0)
    for size, table in ((1, bounds.FEW_BOUNDS), (8, bounds.FEW_BOUNDS), (9, bounds.MANY_BOUNDS)):
        assert {d.name for d in WEIGHT_DTYPES} == set(table)
        for dtype, bound in table.items():
            assert within.outside(dtype, size) is None
            assert "mean KL" in within._replace(kl_mean=2 * bound.kl).outside(dtype, size)
            assert "NMSE" in within._replace(nmse=2 * bound.nmse).outside(dtype, size)
    assert bounds.FEW == matvec.MOST_TOKENS == 8
    for dtype, many in bounds.MANY_BOUNDS.items():
        few = bounds.FEW_BOUNDS[dtype]
        assert few.kl <= many.kl and few.nmse <= many.nmse
        assert (few == many) == (dtype not in ("F16", "BF16"))
    b = np.zeros((3, 50), np.float32)
    b[:, 7] = 10  # clear
    a = b.copy()
    a[1, 8] = 11  # an error the rule sees, but for one logit it would be noise
    assert divergence.compare_rows(a, b, np.zeros(3, int))["breaks_rule"].sum() == 1
    found = ppl.Estimate.of_nll(np.array([1.0, 2.0, 4.0]))
    assert found.nll == pytest.approx(7 / 3) and found.perplexity == pytest.approx(math.exp(7 / 3))
    assert found.error == pytest.approx(np.std([1.0, 2.0, 4.0], ddof=1) / math.sqrt(3))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(Clock(), n_ctx=40, wrong={"auto": 0.5})


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
    assert first == again != other and [len(w.targets) for w in first] == [40, 40, 10]
    for i, window in enumerate(first):
        assert window.inputs[1:] == window.targets[:-1]
        if bos or i:
            assert window.inputs[0] == (BOS if bos else first[i - 1].targets[-1])
    p = np.array([0.5, 0.0, 0.2, 0.3])
    row = np.where(p > 0, np.log(np.maximum(p, 1e-9)), -200).astype(np.float32)
    drawn = [draw(row, u) for u in np.linspace(0, 1, 10_000, endpoint=False)]
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 10_000, p, atol=2e-4)
    assert draw(row, np.nextafter(1, 0)) == 3


def write(path: Path, content) -> str:
    if isinstance(content, np.ndarray):
        np.save(path, content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize(("name", "content"), [
    ("a.npy", np.array([3, 1, 2], np.int32)), ("a.jsonl", '3\n[1]\n\n{"tokens": [2]}\n'),
    ("a.txt", "3, 1\n2"), ("ids", "3 1 2"), ("bos", f"{BOS} 3 1 2"),  # which is not doubled
])  # fmt: skip
def test_ids_are_read_from_every_format(engine, tmp_path, name, content):
    source = ask(None, write(tmp_path / name, content)).open(engine)
    assert (source.label, source.n_tokens) == (name, 3)
    assert list(source.windows) == [TokenWindow([BOS, 3, 1], [3, 1, 2])]


BAD_FILES = {
    "text.npy": ("1 2 3", "cannot be read as .npy"), "floats.npy": (np.zeros(3), "float64 of"),
    "square.npy": (np.zeros((3, 3), int), "int64 of shape (3, 3)"),
    "a.jsonl": ("[1]\n[1,", "line 2: no JSON"), "c.jsonl": ("[true]", "line 1: a line is an id"),
    "a.txt": ("1\n2 the", "line 2: 'the' is no"), "b.txt": (b"1 \xff", "no UTF-8 text: byte 2"),
    "d.txt": (str(BOS), "d.txt holds 0 tokens"), "f.txt": ("1 -1", "token id -1 at index 1"),
    "e.txt": (f"1 {N_VOCAB}", f"token id {N_VOCAB} at index 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_in_one_line(engine, tmp_path, name):
    content, says = BAD_FILES[name]
    with pytest.raises(UsageError) as caught:
        ask(None, write(tmp_path / name, content)).open(engine)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_sizes_share_one_reference(engine, tmp_path):
    """Each size is a run of its own, and its figures are those of one token at a time; the
    reference computes every row once, n_ubatch at a time."""
    folders = ppl.folders_of(tmp_path / "run", [16, 5, 1])
    fast = engine.variant(Toggles(sync="auto"))  # wrong by 0.5 in one logit
    asked = write(tmp_path / "ids", "1 2 " * 29)
    runs = ppl.perplexity_by_size(fast, ask(None, asked).open(fast), folders, against=Toggles())
    calls = {v.toggles.sync: [] for v in engine.shared.variants}
    for v in engine.shared.variants:
        calls[v.toggles.sync] += [len(call) for call in v.calls]
    assert calls["per_copy"] == [16, 16, 8, 16, 2]  # windows of 40 and 18
    assert calls["auto"].count(1) == 58 + 3  # fives leave one of every 16
    ids, nll = [1, 2] * 29, []
    for begin in range(0, 58, 40):  # one token at a time, the slow way
        fast.reset()
        for token, last in zip(ids[begin:], [BOS, *ids[begin : begin + 39]], strict=False):
            nll.append(-log_softmax(fast.step([last])[0])[token])
    for made, n in zip(runs, (16, 5, 1), strict=True):
        np.testing.assert_allclose(made.tokens["nll"], nll, rtol=1e-12)
        assert made.engine.nll == pytest.approx(np.mean(nll)) != made.reference.nll
        found = made.agreement
        assert found.nmse == pytest.approx(58 * 0.25 / made.tokens["power"].sum(), rel=1e-5)
        assert 1e-4 < found.kl_mean < found.kl_p99 <= found.kl_max
        run, samples = load_run(folders[n])[1:]
        of = samples[samples["arm"] == "engine"]["n_tokens"]
        assert run["result"]["n_ubatch"] == n == of.max() and of.sum() == 58
        assert samples[samples["arm"] == "reference"]["n_tokens"].tolist() == calls["per_copy"]
        kept = pd.read_parquet(folders[n] / ppl.TOKENS)
        assert kept["token"].tolist() == ids and kept["window"].tolist()[-1] == 1
    assert not fast.closed and [v.closed for v in engine.shared.variants[1:]] == [True] * 3


def test_figures_that_are_no_numbers(engine, tmp_path):
    asked = ask(None, write(tmp_path / "ids", "3"))
    made = ppl.perplexity(engine, asked.open(engine), out=tmp_path / "run")
    assert math.isnan(made.engine.error)  # of a single token
    text = (tmp_path / "run" / "run.json").read_text()
    assert "NaN" not in text and json.loads(text)["result"]["engine"]["error"] is None
    engine.wrong = {"per_copy": math.nan}
    with pytest.raises(WorkbenchError, match=r"logits after token 0 are not finite"):
        ppl.perplexity(engine, asked.open(engine), out=tmp_path / "other")


# with a BOS, and without
@pytest.mark.parametrize(("preset", "device"), [("tiny-llama", "host"), ("tiny-qwen3", "embedded")])
def test_a_text_is_scored_as_its_prefill_says(tiny_model, tmp_path, preset, device):
    (text := tmp_path / "text").write_text("It was late, and the lamp had not been lit. " * 7)
    path = tiny_model(preset, "Q8_0")
    with Engine.load(path, device=device, n_ctx=64, n_ubatch=24, toggles=Toggles()) as engine:
        found = ppl.perplexity(engine, ask(text, None).open(engine), out=tmp_path / "run").tokens
        ids = engine.tokenizer.encode(text.read_text())
        assert found["token"].tolist() == ids[1:]  # encode puts BOS before where there is one
        assert found["window"].nunique() == -(-(len(ids) - 1) // 64)
        engine.reset()
        rows = engine.prefill(ids[:64], outputs="all")
    first = found[found["window"] == 0]
    wanted = [-log_softmax(row)[token] for row, token in zip(rows, first["token"], strict=True)]
    np.testing.assert_allclose(first["nll"], wanted, rtol=1e-10)


@pytest.mark.parametrize(
    "quant", share(["Q8_0", "Q4_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K", "F16"], every=7)
)
def test_eight_bit_activations_are_within_bounds(call, tiny_model, tmp_path, monkeypatch, quant):
    """Computed 24 or 1 at once; a bound that does not hold is one line and status 1."""
    ask = (
        "perplexity", "--out", tmp_path / "run", "-m", tiny_model("tiny-llama", quant),
        "--tokens-from", "sample:70", "--n-ctx", 64, "--n-ubatch", 24, "--sizes", "24,1",
        "--device", "host", "--against", "activations=float", "--check",
    )  # fmt: skip
    status, _, err = call(*ask)
    assert status == 0, err
    found = [load_run(tmp_path / f"run-ub{n}").run["result"]["agreement"] for n in (24, 1)]
    kl = [one["kl_mean"] for one in found]
    if quant == "F16":  # nothing to quantise
        assert found[0]["nmse"] == 0
    else:
        assert min(kl) > 1e-6 and max(kl) < bounds.MANY_BOUNDS[quant].kl
        assert max(kl) == pytest.approx(min(kl), rel=0.2)
    if quant == "Q8_0":
        monkeypatch.setitem(bounds.MANY_BOUNDS, "Q8_0", bounds.Bound(-1.0, 1.0))
        status, out, err = call(*ask[:2], tmp_path / "again", *ask[3:])
        assert status == 1 and "perplexity" in out
        assert err.splitlines()[-1].startswith("error: mean KL ")
