"""`workbench perplexity` on the tiny models: real engines, real files, exit statuses."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest

from workbench.benchmarks.kernels import bounds
from workbench.benchmarks.runs.results import load_run
from workbench.benchmarks.scores import perplexity as ppl
from workbench.benchmarks.scores.token_source import ask
from workbench.cli import main
from workbench.config import Toggles
from workbench.engine.engine import Engine


@pytest.fixture
def call(capsys):
    """Runs the command in this process; returns (exit status, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = 0
        try:
            main(["perplexity", *map(str, arguments)])
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return run


def softmax64(rows: np.ndarray) -> np.ndarray:
    e = np.exp(rows.astype(np.float64) - rows.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3"])  # with a BOS, and without
@pytest.mark.parametrize("device", ["host", "embedded"])
def test_a_text_is_scored_as_its_prefill_says(tiny_model, tmp_path, preset, device):
    path = tiny_model(preset, "Q8_0")
    text = tmp_path / "text"
    text.write_text("It was getting late, and the lamp had not been lit. " * 8)
    with Engine.load(path, device=device, n_ctx=64, n_ubatch=24, toggles=Toggles()) as engine:
        made = ppl.perplexity(engine, ask(text, None).open(engine), out=tmp_path / "run")
        ids = engine.tokenizer.encode(text.read_text())
        found = made.tokens
        assert found["token"].tolist() == ids[1:]  # encode puts BOS in front where there is one
        assert found["window"].nunique() == -(-(len(ids) - 1) // 64)
        first = found[found["window"] == 0]
        engine.reset()
        p = softmax64(engine.prefill(ids[:64], outputs="all"))
        np.testing.assert_allclose(
            first["nll"], -np.log(p[np.arange(64), first["token"]]), rtol=1e-10
        )
    assert load_run(tmp_path / "run").run["status"] == "complete"


def test_a_sample_is_reproducible_and_foreseen(tiny_model, tmp_path):
    """Drawn from the model itself, tokens have the model's own entropy as their mean NLL."""
    with Engine.load(
        tiny_model("tiny-llama", "F16"), device="host", n_ctx=128, toggles=Toggles()
    ) as engine:
        runs = [
            ppl.perplexity(engine, ask(None, spec).open(engine), out=tmp_path / f"run{i}")
            for i, spec in enumerate(["sample:300:4", "sample:300:4", "sample:300"])
        ]
        pd.testing.assert_series_equal(runs[0].tokens["token"], runs[1].tokens["token"])
        pd.testing.assert_series_equal(runs[0].tokens["nll"], runs[1].tokens["nll"])
        assert runs[0].tokens["token"].tolist() != runs[2].tokens["token"].tolist()
        entropies = []
        for window in ask(None, "sample:300:4").open(engine).windows:
            engine.reset()
            p = softmax64(engine.prefill(window.inputs, outputs="all"))
            entropies.append(-np.sum(p * np.log(p), axis=1))
    found = runs[0].engine
    assert abs(found.nll - np.concatenate(entropies).mean()) < 4 * found.error
    assert runs[0].run["seed"] == 4


def test_an_exact_toggle_has_no_divergence(tiny_model, tmp_path):
    with Engine.load(
        tiny_model("tiny-llama", "Q4_0"), device="embedded", n_ctx=64, toggles=Toggles()
    ) as engine:
        source = ask(None, "sample:80").open(engine)
        with engine.variant(Toggles(sync="copy_boundary", graph_reuse="set_rows")) as fast:
            made = ppl.perplexity(fast, source, against=Toggles(), out=tmp_path / "run")
    assert made.agreement.kl_max < 1e-12 and made.agreement.nmse == 0
    assert made.agreement.same_argmax == 1 and made.agreement.n_broken == 0
    assert (made.tokens["nll"] == made.tokens["nll_reference"]).all()


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K", "F16"])
def test_eight_bit_activations_are_within_bounds_of_the_float_path(
    call, tiny_model, tmp_path, quant
):
    status, out, err = call(
        "-m", tiny_model("tiny-llama", quant), "--tokens-from", "sample:120", "--n-ctx", 64,
        "--device", "host", "--against", "activations=float", "--check", "-o", tmp_path / "run",
    )  # fmt: skip
    assert status == 0, err
    result = load_run(tmp_path / "run").run["result"]
    if quant == "F16":  # nothing to quantise
        assert result["agreement"]["nmse"] == 0
    else:
        assert 1e-6 < result["agreement"]["kl_mean"] < bounds.MANY_BOUNDS[quant].kl
    assert "120 in 2 windows of up to 64" in out and "run folder" in err


@pytest.mark.parametrize(("device", "quant"), [("embedded", "Q4_K"), ("host", "BF16")])
def test_sizes_are_runs_of_their_own(call, tiny_model, tmp_path, device, quant):
    """Computed 24, 9 or 1 at once: one float path, and the same figures but for sums' order."""
    status, out, err = call(
        "-m", tiny_model("tiny-llama", quant), "--tokens-from", "sample:100", "--n-ctx", 64,
        "--n-ubatch", 24, "--sizes", "24,9,1", "--device", device, "--fuse", "on",
        "--against", "activations=float", "--check", "-o", tmp_path / "run",
    )  # fmt: skip
    assert status == 0, err
    runs = [load_run(tmp_path / f"run-ub{n}").run for n in (24, 9, 1)]
    assert [run["result"]["n_ubatch"] for run in runs] == [24, 9, 1]
    assert "64, 24 at a time" in out and "64, 9 at a time" in out and "64, 1 at a time" in out
    tables = [pd.read_parquet(tmp_path / f"run-ub{n}" / ppl.TOKENS) for n in (24, 9, 1)]
    for table in tables[1:]:
        assert (table["nll_reference"] == tables[0]["nll_reference"]).all()
        assert (table["token"] == tables[0]["token"]).all()
    kl = [run["result"]["agreement"]["kl_mean"] for run in runs]
    if quant == "BF16":  # a CPU rounds no activation of float weights
        assert max(kl) < 1e-9
    else:
        assert min(kl) > 1e-6 and max(kl) == pytest.approx(min(kl), rel=0.2)


def test_a_bound_that_does_not_hold_is_one_line_and_status_1(
    call, tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setitem(bounds.MANY_BOUNDS, "Q8_0", bounds.Bound(-1.0, 1.0))
    ask = ("-m", tiny_model("tiny-llama", "Q8_0"), "--tokens-from", "sample:20", "--device", "host")
    status, out, err = call(*ask, "--against", "base", "--check", "-o", tmp_path / "run")
    assert status == 1 and "perplexity" in out
    assert err.splitlines()[-1].startswith("error: mean KL ")
    assert "above the bound for Q8_0 weights" in err.splitlines()[-1]
    assert load_run(tmp_path / "run").run["status"] == "complete"


BAD = {
    "no tokens": ([], "either a text file (-f) or token ids"),
    "two kinds of tokens": (["-f", "x", "--tokens-from", "sample:3"], "either a text file"),
    "a file that is not there": (["-f", "/no/such"], "/no/such cannot be read"),
    "a check of nothing": (["--tokens-from", "sample:3", "--check"], "--check needs a reference"),
    "an unknown reference": (
        ["--tokens-from", "sample:3", "--against", "speed=11"], "toggle 'speed' does not exist",
    ),
    "a size above n_ubatch": (
        ["--tokens-from", "sample:3", "--sizes", "1,513"], "513 tokens cannot be computed at once",
    ),
    "sizes that are no numbers": (["--tokens-from", "sample:3", "--sizes", "one"], "--sizes 'one'"),
    "a folder that exists": (["--tokens-from", "sample:3", "-o", "/tmp"], "/tmp exists already"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_gives_one_line(call, tiny_model, what):
    arguments, says = BAD[what]
    model = tiny_model("tiny-llama", "Q8_0")
    status, out, err = call("-m", model, "--device", "host", *arguments)
    errors = [line for line in err.splitlines() if not line.startswith("device:")]
    assert (status, out) == (2, "")
    assert len(errors) == 1 and errors[0].startswith("error: ") and says in errors[0]


def test_ctrl_c_keeps_finished_windows(tiny_model, tmp_path):
    command = [
        sys.executable, "-m", "workbench.cli", "perplexity", "-m",
        str(tiny_model("tiny-llama", "Q8_0")), "--tokens-from", "sample:1000000", "--n-ctx", "64",
        "--device", "host", "-o", str(tmp_path / "run"),
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr:
            if " of 1,000,000 tokens" in line:
                break
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "windows of up to 64" in out and "perplexity" in out
    assert err.splitlines()[-1] == "error: interrupted; what was finished is kept"
    run = load_run(tmp_path / "run").run
    tokens = pd.read_parquet(tmp_path / "run" / ppl.TOKENS)
    assert run["status"] == "interrupted" and len(tokens) >= 128 and len(tokens) % 64 == 0
    assert run["result"]["engine"]["n"] == len(tokens)
