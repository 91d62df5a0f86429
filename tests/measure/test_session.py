"""What a call of `data.measure` takes, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.measure.__main__ import measure
from data.measure.session import Session
from workbench.errors import UsageError


def session(tmp_path: Path, **given) -> Session:
    return Session(tmp_path, tmp_path, "cuda", 10.0, False, **given)


def test_one_model_alone_is_taken_where_one_is_named(tmp_path: Path):
    every, one = session(tmp_path), session(tmp_path, only="llama-3-8b-q8_0")
    for quant, wanted in (("q8_0", True), ("q4_0", False)):
        assert every.takes(f"llama-3-8b-{quant}")
        assert one.takes(f"llama-3-8b-{quant}") == wanted


def test_models_above_the_limit_are_left_out_and_named(tmp_path: Path, capsys):
    assert not session(tmp_path).takes("llama-3-8b-f16")
    assert "llama-3-8b F16: left out, 16.1 GB is above the limit" in capsys.readouterr().out


def test_what_does_not_exist_is_refused_before_anything_runs(tmp_path: Path):
    with pytest.raises(UsageError, match="step 'decod' does not exist; choose from decode, "):
        measure("decod", out=tmp_path)
    with pytest.raises(UsageError, match="--only llama: no such model"):
        measure("decode", out=tmp_path, only="llama")
