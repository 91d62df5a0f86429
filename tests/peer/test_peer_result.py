"""`data/results/peer-cpu.json` and `peer-files.json`: are there, are about the models and files we
make now, and say that we are good.

`make peer` writes them (`tests/peer/compare.py`, `files.py`), which no test runs: it builds
llama.cpp. What can be made or computed again without it is; our side's process is tried.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import numpy as np
import pytest

from tests import reference
from tests.measure.made import is_ours
from tests.peer import compare, files
from tests.peer.compare import LLAMA, N_LOGITS_TOKENS, OURS, REFERENCE_TOLERANCE
from workbench.config import EXPAND
from workbench.model.gguf.file import model_hash
from workbench.model.gguf.walk import EXPANDED_TYPES

HINT = "run `make peer` on a quiet machine and commit the file"


RESULT: dict[str, Any] = json.loads(compare.RESULT.read_text())
ROWS: list[dict[str, Any]] = json.loads(files.RESULT.read_text())["files"]


def by_model(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["preset"], row["quant"]): row for row in rows}


def test_it_names_what_was_run_and_of_which_commit():
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", RESULT["date"])
    cpu, commit = RESULT["machine"]["cpu"], RESULT["commit"]["hash"]
    assert cpu["name"] != "unknown" and cpu["usable_cores"] >= compare.THREADS
    assert RESULT["versions"]["llama-cpp-python"] == compare.LLAMA_CPP_PYTHON
    assert RESULT["sides"][LLAMA]["version"].endswith(compare.LLAMA_CPP_PYTHON)
    assert re.fullmatch(r"[0-9a-f]{40}", commit)

    # a shallow clone and an unpacked archive lack the history
    assert is_ours(RESULT["commit"]), HINT


def test_logits_agree_and_the_reference_is_entitled():
    found = by_model(RESULT["logits"])
    assert set(found) == {*compare.LOGITS_MODELS, *compare.SPEED_MODELS}
    for (preset, quant), row in found.items():
        assert row["n_tokens"] == N_LOGITS_TOKENS
        # 0 exactly would mean that one side was compared with itself
        assert 0 < row["nmse"] <= compare.NMSE_TOLERANCE[quant], f"{preset} {quant}"
        assert row["decided_mismatches"] == [], f"{preset} {quant}"
    exact = [f"{preset}-{quant}.gguf" for preset, quant in compare.EXACT_MODELS]
    assert [row["model"] for row in RESULT["reference"]] == exact
    assert all(0 < row["nmse"] <= REFERENCE_TOLERANCE for row in RESULT["reference"])


def test_models_are_those_we_write_now(tiny_model):
    hashes = {of: row["hash"] for of, row in by_model(RESULT["logits"]).items()}
    for of in compare.LOGITS_MODELS:
        assert hashes[of] == model_hash(tiny_model(*of)), f"{of} has changed; {HINT}"
    for row in RESULT["reference"]:
        preset, quant = row["model"].removesuffix(".gguf").rsplit("-", 1)
        assert row["hash"] == hashes[preset, quant]
    for row in (row for timed in compare.TIMED for row in RESULT.get(timed.do, [])):
        assert row["hash"] == hashes[row["preset"], row["quant"]]


@pytest.mark.parametrize("timed", compare.TIMED, ids=lambda timed: timed.do)
def test_speed_is_fairly_measured(timed):
    found = by_model(RESULT[timed.do])
    assert set(found) == set(compare.SPEED_MODELS)
    for row in found.values():
        assert (row["threads"], row["test"]) == (compare.THREADS, timed.test)
        n_blocks, speeds = len(row["order"]) // 4, {OURS: list[float](), LLAMA: list[float]()}
        assert n_blocks >= compare.MIN_BLOCKS
        assert row["order"] == ("ABBABAAB" * n_blocks)[: 4 * n_blocks]
        for sample, letter in zip(row["samples"], row["order"], strict=True):
            assert sample["side"] == (OURS if letter == "A" else LLAMA)
            assert len(sample[timed.steps]) == timed.n_steps
            t_s = 1e9 * timed.n_tokens / sum(sample[timed.steps])
            assert sample["t_s"] == pytest.approx(t_s)
            speeds[sample["side"]].append(t_s)
        medians = {name: float(np.median(samples)) for name, samples in speeds.items()}
        assert row["median_t_s"] == pytest.approx(medians)
        assert row["ci95"][0] <= row["ratio"] <= row["ci95"][1]
        assert row["ratio"] == pytest.approx(medians[OURS] / medians[LLAMA], rel=1e-2)
        assert timed.do == "prefill" or row["ratio"] >= compare.RATIO_TOLERANCE


def test_every_type_that_is_expanded_is_in_a_file():
    """Of the quantiser's, or else in random blocks."""
    found = {t for row in ROWS if row["kind"] == "quantised" for t in row["types"]}
    assert {dtype.name for dtype in EXPANDED_TYPES.values()} - found == set(files.BLOCKS)
    for row in ROWS:
        if row["kind"] == "blocks":
            assert row["types"][row["name"].split()[1]] == 14  # the matrices of two layers
        both = row["kind"] in ("quantised", "blocks") or row["name"] == "by llama.cpp's quantiser"
        assert list(row["workbench"]) == list(EXPAND if both else EXPAND[:1])


def test_both_agree_with_float64_and_one_another():
    for row in ROWS:
        assert row["n_tokens"] == N_LOGITS_TOKENS
        plain, theirs = not set(row["types"]) - {"F32"}, row["llama.cpp"]
        assert 0 < theirs["nmse"] < (files.PLAIN_TOLERANCE if plain else files.TOLERANCE)
        assert ("nmse_exact" in theirs) == plain
        if plain:  # the reference is entitled
            assert 0 < theirs["nmse_exact"] < REFERENCE_TOLERANCE
        for expand, found in row["workbench"].items():
            said = f"{row['kind']} {row['name']} {expand}"
            exact = plain or (row["kind"] in files.EXACT_KINDS and expand == "f16")
            assert 0 < found["nmse"] < (files.PLAIN_TOLERANCE if exact else files.TOLERANCE), said
            bound = files.PLAIN_TOLERANCE if plain else files.BOTH_TOLERANCE
            assert 0 < found["nmse_llama.cpp"] < bound, said
            assert found["decided_mismatches"] == [], said


def test_files_are_those_we_make_now(tiny_model, tmp_path):
    recorded = {(row["kind"], row["name"]): row["hash"] for row in ROWS}
    for quant in ("F32", "Q8_0"):
        assert recorded["qwen2", quant] == model_hash(tiny_model("tiny-qwen2", quant)), HINT
    made = files.random_blocks(tiny_model("tiny-llama", "F32"), tmp_path, "IQ1_M")
    assert recorded["blocks", "llama IQ1_M"] == model_hash(made), HINT


@pytest.mark.long
def test_our_side_computes_times_and_survives_failures(tiny_model, tmp_path):
    path, other = tiny_model("tiny-llama", "F32"), tiny_model("tiny-qwen3", "Q8_0")
    with compare.Worker(OURS, sys.executable) as worker:
        for one_by_one in (False, True):
            logits, tokens = compare.computed(worker, path, tmp_path, 5, one_by_one=one_by_one)
            assert logits.shape == (5, 1024)
            assert reference.nmse(logits, reference.forward(path, tokens)) < 1e-6
        for timed in compare.TIMED:
            steps = worker.ask(timed.do, tokens=tokens)[timed.steps]
            assert len(steps) == (5 if timed.do == "decode" else 1) and min(steps) > 0
        with pytest.raises(RuntimeError, match="workbench, decode"):
            worker.ask("decode", tokens=[1 << 20])
        with pytest.raises(RuntimeError, match=r"missing\.gguf"):
            worker.load(tmp_path / "missing.gguf")
        assert worker.load(other, expand="q8_0")["sync"] == "implicit"
        assert len(worker.ask("decode", tokens=[1, 2])["token_ns"]) == 2
    found = compare.ratio([10.0, 11.0, 12.0, 11.5, 10.5], [20.0, 22.0, 24.0, 23.0, 21.0])
    assert found["ratio"] == pytest.approx(0.5)
    assert found["ci95"][0] <= 0.5 <= found["ci95"][1]
