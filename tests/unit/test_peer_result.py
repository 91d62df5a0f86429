"""`data/results/peer-cpu.json`: is there, is about the models we write now, and says we are good.

The file is written by `make peer` (`tests/peer/compare.py`), which no test runs: it builds
llama.cpp. Every figure that can be computed again from what the file holds is.
"""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import numpy as np
import pytest

from tests.peer import compare
from tests.peer.compare import LLAMA, OURS
from workbench.model.gguf.file import model_hash

HINT = "run `make peer` on a quiet machine and commit the file"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    assert compare.RESULT.is_file(), f"{compare.RESULT} is missing; {HINT}"
    return json.loads(compare.RESULT.read_text())


def _by_model(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["preset"], row["quant"]): row for row in rows}


def test_names_what_was_run(result):
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", result["date"])
    assert result["machine"]["cpu"]["name"] != "unknown"
    assert result["machine"]["cpu"]["usable_cores"] >= compare.THREADS
    assert result["versions"]["llama-cpp-python"] == compare.LLAMA_CPP_PYTHON
    assert result["sides"][LLAMA]["version"].endswith(compare.LLAMA_CPP_PYTHON)


def test_commit_is_an_ancestor(result):
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", *arguments], cwd=compare.ROOT, capture_output=True, text=True, timeout=30
        )

    commit = result["commit"]["hash"]
    assert re.fullmatch(r"[0-9a-f]{40}", commit)
    try:
        whole = git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"
    except FileNotFoundError:  # no git here: then there is no history to ask
        return
    if whole:  # a shallow clone and an unpacked archive lack the history
        assert git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0, (
            f"commit {commit} is no ancestor of HEAD; {HINT}"
        )


def test_logits_of_every_type_agree(result):
    rows = _by_model(result["logits"])
    assert set(rows) == {*compare.LOGITS_MODELS, *compare.SPEED_MODELS}
    for (preset, quant), row in rows.items():
        assert row["n_tokens"] == compare.N_LOGITS_TOKENS
        # 0 exactly would mean that one side was compared with itself
        assert 0 < row["nmse"] <= compare.NMSE_TOLERANCE[quant], f"{preset} {quant}"
        assert row["decided_mismatches"] == [], f"{preset} {quant}"


def test_the_reference_is_entitled(result):
    assert [r["model"] for r in result["reference"]] == [
        f"{preset}-{quant}.gguf" for preset, quant in compare.EXACT_MODELS
    ]
    for row in result["reference"]:
        assert 0 < row["nmse"] <= compare.REFERENCE_TOLERANCE


def test_models_are_those_we_write_now(result, tiny_model):
    recorded = _by_model(result["logits"])
    for preset, quant in compare.LOGITS_MODELS:
        now = model_hash(tiny_model(preset, quant))
        assert recorded[preset, quant]["hash"] == now, f"{preset} {quant} has changed; {HINT}"
    for row in result["reference"]:
        preset, quant = row["model"].removesuffix(".gguf").rsplit("-", 1)
        assert row["hash"] == recorded[preset, quant]["hash"]
    for row in (row for timed in compare.TIMED for row in result.get(timed.do, [])):
        assert row["hash"] == recorded[row["preset"], row["quant"]]["hash"]


@pytest.mark.parametrize("timed", compare.TIMED, ids=lambda timed: timed.do)
def test_speed_is_fairly_measured(result, timed):
    if timed.do == "prefill" and "prefill" not in result:
        pytest.skip("recorded before prefill was compared")
    rows = _by_model(result[timed.do])
    assert set(rows) == set(compare.SPEED_MODELS)
    for row in rows.values():
        assert row["threads"] == compare.THREADS
        assert row["test"] == timed.test
        n_blocks = len(row["order"]) // 4
        assert (
            n_blocks >= compare.MIN_BLOCKS
            and row["order"] == ("ABBABAAB" * n_blocks)[: 4 * n_blocks]
        )
        speeds: dict[str, list[float]] = {OURS: [], LLAMA: []}
        for sample, letter in zip(row["samples"], row["order"], strict=True):
            assert sample["side"] == (OURS if letter == "A" else LLAMA)
            assert len(sample[timed.steps]) == timed.n_steps
            t_s = 1e9 * timed.n_tokens / sum(sample[timed.steps])
            assert sample["t_s"] == pytest.approx(t_s)
            speeds[sample["side"]].append(t_s)
        medians = {name: float(np.median(samples)) for name, samples in speeds.items()}
        assert row["median_t_s"] == pytest.approx(medians)
        low, high = row["ci95"]
        assert low <= row["ratio"] <= high
        assert row["ratio"] == pytest.approx(medians[OURS] / medians[LLAMA], rel=1e-2)


def test_decode_is_fast_enough(result):
    for row in result["decode"]:
        assert row["ratio"] >= compare.RATIO_TOLERANCE, f"{row['model']}: {row['ratio']:.2f}"
