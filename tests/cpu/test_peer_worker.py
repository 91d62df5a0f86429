"""Our side of `make peer`, as its own process: what the comparison relies on, without llama.cpp."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import reference
from tests.peer import compare


@pytest.fixture(scope="module")
def worker() -> Iterator[compare.Worker]:
    with compare.Worker(compare.OURS, Path(sys.executable)) as made:
        yield made


def test_logits_and_times(worker, tiny_model, tmp_path):
    path = tiny_model("tiny-llama", "F32")
    assert worker.load(path)["sync"] == "implicit"
    tokens = compare.random_tokens(5, 1024, seed=1)
    for one_by_one in (False, True):
        out = tmp_path / f"{one_by_one}.npy"
        worker.ask("logits", tokens=tokens, out=str(out), one_by_one=one_by_one)
        logits = np.load(out)
        assert logits.shape == (5, 1024) and logits.dtype == np.float32
        assert reference.nmse(logits, reference.forward(path, tokens)) < 1e-6
    token_ns = worker.ask("decode", tokens=tokens)["token_ns"]
    assert len(token_ns) == 5 and min(token_ns) > 0
    step_ns = worker.ask("prefill", tokens=tokens)["step_ns"]
    assert len(step_ns) == 1 and step_ns[0] > 0


def test_a_failing_request_is_an_error_and_not_the_end(worker, tiny_model, tmp_path):
    worker.load(tiny_model("tiny-qwen3", "Q8_0"))
    with pytest.raises(RuntimeError, match="workbench, decode"):
        worker.ask("decode", tokens=[1 << 20])
    with pytest.raises(RuntimeError, match=r"missing\.gguf"):
        worker.load(tmp_path / "missing.gguf")
    worker.load(tiny_model("tiny-qwen3", "Q8_0"), expand="q8_0")
    assert len(worker.ask("decode", tokens=[1, 2])["token_ns"]) == 2


def test_ratio_has_an_interval_around_it():
    found = compare.ratio([10.0, 11.0, 12.0, 11.5, 10.5], [20.0, 22.0, 24.0, 23.0, 21.0])
    assert found["ratio"] == pytest.approx(0.5)
    assert found["ci95"][0] <= 0.5 <= found["ci95"][1]
