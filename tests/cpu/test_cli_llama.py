"""Habits from llama.cpp: what its flags do here, and what a run says of its context."""

from __future__ import annotations

import json
import re

import pytest

import workbench as wb
from workbench.cli import main
from workbench.config import Toggles


@pytest.fixture
def call(capsys):
    """Runs the command in this process; returns (stdout, stderr)."""

    def run(*arguments: object) -> tuple[str, str]:
        main([*map(str, arguments), "--device", "embedded"])
        return tuple(capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("tiny-llama", "Q8_0")


def test_a_run_says_with_what_it_was_made(call, model):
    _, err = call("run", "-m", model, "--tokens", "1,2", "-n", 1)
    assert (
        "toggles: best for one sequence on embedded: sync=auto (implicit), graph_reuse=set_rows\n"
        in err
    )
    _, err = call("run", "-m", model, "--tokens", "1,2", "-n", 1, "--preset", "baseline")
    assert "toggles: baseline on embedded: everything off\n" in err
    _, err = call("run", "-m", model, "--tokens", "1", "-n", 1, "--sync", "per_copy")
    assert "best for one sequence with sync=per_copy on embedded: graph_reuse=set_rows\n" in err
    _, err = call("program", "-m", model)
    assert "toggles: baseline on embedded: everything off\n" in err
    _, err = call("check", "-m", model)
    assert "toggles: baseline on embedded: everything off\n" in err


def test_experiments_can_start_from_best(call, model):
    out, err = call(
        "ab", "-m", model, "--toggle", "graph_reuse=rebuild", "--test", "tg2", "--rounds", 5,
        "--preset", "best",
    )  # fmt: skip
    assert "toggles: best for one sequence on embedded" in err
    assert "graph_reuse set_rows -> rebuild" in out


def test_a_run_that_fills_its_context_says_so(call, model):
    out, err = call("run", "-m", model, "--tokens", "1,2", "-c", 6, "-n", 100)
    assert len(out.split(",")) == 5  # the last needs no cell
    assert "stopped at n_ctx=6: the context is full; give -c 12 for more\n" in err
    _, err = call("run", "-m", model, "--tokens", "1,2", "-c", 6, "-n", 3)
    assert "stopped" not in err


@pytest.mark.parametrize("n", [-1, -2])
def test_without_a_number_of_tokens_the_context_ends_it(call, model, n):
    out, err = call("run", "-m", model, "--tokens", "1,2", "-c", 6, "-n", n)
    assert len(out.split(",")) == 5 and "stopped at n_ctx=6" in err


def test_a_context_beyond_the_model_s_own_is_said(call, model):
    _, err = call("run", "-m", model, "--tokens", "1,2", "-c", 2049, "-n", 1)
    (line,) = [line for line in err.splitlines() if line.startswith("note: n_ctx")]
    assert line.startswith("note: n_ctx=2049 is more than the 2048 tokens ")
    assert "note: n_ctx" not in call("run", "-m", model, "--tokens", "1,2", "-c", 2048, "-n", 1)[1]


def test_a_context_of_0_is_the_model_s_own(call, model):
    with wb.Engine.load(model, device="embedded", n_ctx=0, toggles=Toggles()) as engine:
        assert engine.config.n_ctx == engine.model.n_ctx_train == 2048
    found = json.loads(call("program", "-m", model, "-c", 0, "--n-past", 2047, "--json")[0])
    assert found["pattern"]
    with pytest.raises(SystemExit):
        call("program", "-m", model, "-c", 0, "--n-past", 2048)


def test_why_a_generation_ended_is_known(model):
    with wb.Engine.load(model, device="host", n_ctx=6) as engine:
        assert engine.generate(tokens=[1, 2], max_tokens=2).stopped == "max_tokens"
        engine.reset()
        made = engine.generate(tokens=[1, 2], max_tokens=None)
        assert made.stopped == "n_ctx" and len(made.tokens) == 5 and not made.interrupted


def test_bench_has_a_row_for_each_model_and_combination(call, model, tiny_model, tmp_path):
    other = tiny_model("tiny-llama", "F16")
    out, err = call(
        "bench", "-m", model, "-m", other, "-p", "4", "-n", 2, "-r", 1, "-ngl", "0,99",
        "--out", tmp_path / "run",
    )  # fmt: skip
    rows = [line for line in out.splitlines() if "±" in line]
    assert len(rows) == 2 * 2 * 2
    assert [row.split("|")[1].split()[-1] for row in rows] == ["Q8_0"] * 4 + ["F16"] * 4
    assert "| ngl " in out and re.search(r"toggles: best for one sequence on embedded", err)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"run-{i}" for i in range(1, 5)]
