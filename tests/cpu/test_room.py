"""As many sequences as the work needs, and every question about room asked of the cache."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

import workbench as wb
from workbench.benchmarks.runs import results
from workbench.common.errors import UsageError
from workbench.config import EngineConfig, KVCacheKind, KVGrowth, Toggles
from workbench.engine.cache.room import Room
from workbench.engine.engine import Engine


@pytest.fixture(scope="module")
def path(tiny_model) -> Path:
    return tiny_model("tiny-llama", "Q8_0")


def test_an_engine_has_one_sequence_unless_more_are_named(path):
    assert EngineConfig().n_seqs == 1
    with wb.Engine.load(path, device="null", n_ctx=64) as engine:
        with pytest.raises(UsageError, match=r"has 0 alone \(n_seqs=1\); load it with n_seqs=4 or"):
            engine.submit([(3, [1], "last")])
        with pytest.raises(UsageError, match=r"load it with n_seqs=2 or more"):
            engine.cache.copy(0, 1)


@pytest.mark.parametrize("device", ["embedded", "host"])
@pytest.mark.parametrize(
    ("kind", "growth"), [*itertools.product(KVCacheKind, KVGrowth)], ids=lambda value: str(value)
)
def test_generation_ends_where_the_room_of_its_sequence_does(path, device, kind, growth):
    """With its tokens kept, whatever the layout: of 160 cells a region of four has 40."""
    toggles = Toggles(kv_cache=kind, kv_growth=growth, graph_reuse="set_rows")
    with wb.Engine.load(
        path, device=device, n_ctx=160, n_seqs=4, n_kv_pad=16, threads=1, toggles=toggles
    ) as engine:
        room = 40 if kind == KVCacheKind.PER_SEQUENCE else 160
        for limit in (None, 500):
            engine.reset()
            made = engine.generate(tokens=[5, 6, 7], max_tokens=limit)
            assert made.stopped == "n_ctx" and len(made.tokens) == room - 3 + 1
            assert engine.cache.length() == room
        engine.reset()
        assert engine.generate(tokens=[5, 6, 7], max_tokens=20).tokens == made.tokens[:20]


def test_another_sequence_s_cells_leave_less_room(path):
    toggles = Toggles(graph_reuse="set_rows")
    with wb.Engine.load(path, device="embedded", n_ctx=64, n_seqs=2, toggles=toggles) as engine:
        engine.prefill([1] * 50, sequence=1)
        made = engine.generate(tokens=[5, 6, 7], max_tokens=None)
        assert made.stopped == "n_ctx" and len(made.tokens) == 12


ALONE = ("--device", "embedded", "--threads", 1, "--kv-cache", "per_sequence")


def test_run_has_the_whole_context(call, path):
    status, out, err = call("run", "-m", path, "--tokens", "1,2", "-n", 40, *ALONE)
    assert status == 0 and len(out.split(",")) == 40 and "context is full" not in err


def test_run_says_what_makes_more_room(call, path):
    given = ("run", "-m", path, "--tokens", "1,2", "-n", 40, *ALONE, "-c", 64, "--n-seqs", 4)
    status, out, err = call(*given)
    assert status == 0 and len(out.split(",")) == 15
    assert "stopped at 16 tokens: the context is full, since each of 4 sequences has" in err
    assert "give -c 128, or fewer sequences (--n-seqs), for more" in err


def test_a_prompt_is_refused_by_the_room_of_its_sequence(call, path):
    """Before weights are read, and the message names what would help."""
    ids = ",".join(["1"] * 20)
    for command in (("run",), ("logits", "-o", "/dev/null")):
        given = (*command, "-m", path, "--tokens", ids, *ALONE, "-c", 64, "--n-seqs", 4)
        status, _, err = call(*given)
        assert status == 2 and "0 + 20 tokens do not fit the context of 16 that each of 4" in err
        assert "fewer sequences (--n-seqs)" in err and "device:" not in err


TESTS = {
    "bench": ("bench", "-p", "64", "-n", "4", "-r", "1"),
    "bench together": ("bench", "-p", "8", "-n", "4", "-r", "1", "-npl", "1,3"),
    "bench with one prompt": ("bench", "-p", "64", "-n", "4", "-r", "1", "-npl", "40", "-pps"),
}


PROFILE = pytest.param(
    ("profile", "--test", "pp64+tg8", "-r", "1"), id="profile", marks=pytest.mark.slow
)


@pytest.mark.parametrize("given", [*(pytest.param(v, id=k) for k, v in TESTS.items()), PROFILE])
def test_a_test_has_the_sequences_that_it_names(call, path, given):
    command, *rest = given
    status, _, err = call(command, "-m", path, *rest, *ALONE)
    assert status == 0, err


@pytest.mark.parametrize(("test", "n_seqs"), [("tg2", 1), ("tg2@b3", 3)])
def test_ab_opens_as_many_sequences_as_its_tests_name(call, path, tmp_path, test, n_seqs):
    given = ("--toggle", "sync=per_copy,copy_boundary", "--test", test, "--rounds", 5)
    status, _, err = call("ab", "-m", path, *given, *ALONE, "--out", tmp_path / "run")
    assert status == 0, err
    found = results.load_run(tmp_path / "run").run["engine"]["config"]["n_seqs"]
    assert found == n_seqs


def test_an_arm_without_room_is_refused_before_weights_are_read(call, path):
    given = ("--toggle", "kv_cache=unified,per_sequence", "--test", "pp40,tg4@b3", "-c", 96)
    status, _, err = call("ab", "-m", path, "--device", "embedded", *given)
    assert status == 2 and "device:" not in err
    assert "pp40 needs 40 KV cells of a sequence, but each of 3 (n_seqs) has 32 of n_ctx=96" in err
    assert "load it with n_ctx=120 or more, or with fewer sequences" in err


def test_windows_of_perplexity_are_as_long_as_a_sequence(call, path, tmp_path):
    given = ("--tokens-from", "sample:40", "-c", 64, "--n-seqs", 4, "-o", tmp_path / "run")
    status, out, err = call("perplexity", "-m", path, *given, *ALONE)
    assert status == 0, err
    assert "40 in 3 windows of up to 16" in out


def test_a_proof_asks_the_room_of_a_sequence(call, path):
    given = (*ALONE[2:], "--device", "null", "-c", 64, "--n-seqs", 4)
    for command in (("check", "--n-tokens", 20), ("program", "--n-past", 20)):
        status, _, err = call(command[0], "-m", path, *command[1:], *given)
        assert status == 2 and "that each of 4 sequences has of n_ctx=64" in err


def test_room_in_words():
    Room(64).check(60, 4)
    with pytest.raises(UsageError, match=r"60 \+ 5 tokens do not fit the context of 64; use a lon"):
        Room(64).check(60, 5)
    Room(64, 3).check(0, 21)
    with pytest.raises(UsageError, match=r"0 \+ 22 tokens .* 21 that each of 3 .*--n-seqs"):
        Room(64, 3).check(0, 22)


def test_an_engine_of_its_own_configuration_proves_its_own_steps(path):
    """As a variant for other numbers of sequences has it: 64 cells, or 4 times 16."""
    with wb.Engine.load(path, device="null", n_ctx=64, n_kv_pad=16) as engine:
        config = replace(engine.config, n_seqs=4)
        toggles = Toggles(kv_cache="per_sequence", graph_reuse="set_rows")
        with Engine(engine._open, config, toggles) as regions:
            assert {p.shape.n_kv for p in regions.programs(16)} == {16}
            with pytest.raises(UsageError, match=r"0 \+ 17 tokens .* 16 that each of 4"):
                regions.programs(17)
        assert engine.programs(17)
