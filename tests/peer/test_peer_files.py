"""`data/results/peer-files.json`: every type that is expanded was compared, and the answers agree.

`make peer` writes it (`tests/peer/files.py`), which no test runs: it builds llama.cpp. What can be
made again without llama.cpp is, and has the recorded hash.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.peer import files
from tests.peer.compare import N_LOGITS_TOKENS, REFERENCE_TOLERANCE
from workbench.config import EXPAND
from workbench.model.gguf.file import model_hash
from workbench.model.gguf.walk import EXPANDED_TYPES

HINT = "run `make peer` and commit the file"
ARCHITECTURES = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    assert files.RESULT.is_file(), f"{files.RESULT} is missing; {HINT}"
    return json.loads(files.RESULT.read_text())


def test_every_type_that_is_expanded_is_in_a_file(result):
    """Of the quantiser's, or else in random blocks."""
    found = {t for row in result["files"] if row["kind"] == "quantised" for t in row["types"]}
    expanded = {dtype.name for dtype in EXPANDED_TYPES.values()}
    assert expanded - found == set(files.BLOCKS)
    for row in result["files"]:
        if row["kind"] == "blocks":
            assert row["types"][row["name"].split()[1]] == 14  # the matrices of two layers
        both = row["kind"] in ("quantised", "blocks") or row["name"] == "by llama.cpp's quantiser"
        assert list(row["workbench"]) == list(EXPAND if both else EXPAND[:1])


def test_both_agree_with_float64_and_with_one_another(result):
    for row in result["files"]:
        said = f"{row['kind']} {row['name']}"
        assert row["n_tokens"] == N_LOGITS_TOKENS
        plain = not set(row["types"]) - {"F32"}
        assert 0 < row["llama.cpp"]["nmse"] < (files.PLAIN_TOLERANCE if plain else files.TOLERANCE)
        assert ("nmse_exact" in row["llama.cpp"]) == plain
        if plain:  # the reference is entitled
            assert 0 < row["llama.cpp"]["nmse_exact"] < REFERENCE_TOLERANCE, said
        for expand, found in row["workbench"].items():
            exact = plain or (row["kind"] in files.EXACT_KINDS and expand == "f16")
            bound = files.PLAIN_TOLERANCE if exact else files.TOLERANCE
            assert 0 < found["nmse"] < bound, f"{said} {expand}"
            bound = files.PLAIN_TOLERANCE if plain else files.BOTH_TOLERANCE
            assert 0 < found["nmse_llama.cpp"] < bound, f"{said} {expand}"
            assert found["decided_mismatches"] == [], f"{said} {expand}"


def test_files_are_those_we_make_now(result, tiny_model, tmp_path):
    recorded = {(row["kind"], row["name"]): row["hash"] for row in result["files"]}
    for quant in ("F32", "Q8_0"):
        assert recorded["qwen2", quant] == model_hash(tiny_model("tiny-qwen2", quant)), HINT
    source = tiny_model("tiny-llama", "F32")
    made = files.random_blocks(source, tmp_path, "IQ1_M")
    assert recorded["blocks", "llama IQ1_M"] == model_hash(made), HINT
