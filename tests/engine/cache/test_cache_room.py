"""As many sequences as the work needs, and every question about room asked of the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import workbench as wb
from workbench.common.errors import UsageError
from workbench.config import KVCacheKind, KVGrowth, Toggles
from workbench.engine.cache.room import Room
from workbench.engine.engine import Engine


@pytest.fixture(scope="module")
def path(tiny_model) -> Path:
    return tiny_model("tiny-llama", "Q8_0")


def test_an_engine_has_one_sequence_unless_more_are_named(path):
    with wb.Engine.load(path, device="null", n_ctx=64) as engine:
        with pytest.raises(UsageError, match=r"has 0 alone \(n_seqs=1\); load it with n_seqs=4 or"):
            engine.submit([(3, [1], "last")])
        with pytest.raises(UsageError, match=r"load it with n_seqs=2 or more"):
            engine.cache.copy(0, 1)


@pytest.mark.parametrize("kind", KVCacheKind)
@pytest.mark.parametrize("growth", KVGrowth)
def test_generation_ends_where_its_room_does(path, kind, growth):
    """With its tokens kept, whatever the layout: of 160 cells a region of four has 40."""
    toggles = Toggles(kv_cache=kind, kv_growth=growth, graph_reuse="set_rows")
    with wb.Engine.load(
        path, device="embedded", n_ctx=160, n_seqs=4, n_kv_pad=16, threads=1, toggles=toggles
    ) as engine:
        room = 40 if kind == KVCacheKind.PER_SEQUENCE else 160
        for limit, beside in ((None, 0), (500, 30)):
            engine.reset()
            engine.prefill([1] * 30, sequence=1)
            engine.cache.remove(1, beside)
            left = room - (beside if room == 160 else 0)
            made = engine.generate(tokens=[5, 6, 7], max_tokens=limit)
            assert made.stopped == "n_ctx" and len(made.tokens) == left - 3 + 1
            assert engine.cache.length() == left


def test_room_in_words():
    Room(64).check(60, 4)
    with pytest.raises(UsageError, match=r"60 \+ 5 tokens do not fit the context of 64; use a lon"):
        Room(64).check(60, 5)
    Room(64, 3).check(0, 21)
    with pytest.raises(UsageError, match=r"0 \+ 22 tokens .* 21 that each of 3 .*--n-seqs"):
        Room(64, 3).check(0, 22)


ALONE = ("--device", "embedded", "--threads", 1, "--kv-cache", "per_sequence")
CUT = (*ALONE, "-c", 64, "--n-seqs", 4)  # 16 cells of each
NULL = ("--device", "null", *CUT[2:])
LONG = ("--tokens", ",".join(["1"] * 20))
AB = ("ab", "--toggle", "kv_cache=unified,per_sequence", "--test", "pp40,tg4@b3", "-c", 96)


def test_run_says_what_makes_more_room(call, path):
    given = ("run", "-m", path, "--tokens", "1,2", "-n", 20)
    status, out, err = call(*given, *ALONE)
    assert status == 0 and len(out.split(",")) == 20 and "context is full" not in err
    status, out, err = call(*given, *CUT)
    assert status == 0 and len(out.split(",")) == 15
    assert "stopped at 16 tokens: the context is full, since each of 4 sequences has" in err
    assert "give -c 128, or fewer sequences (--n-seqs), for more" in err


OF_16 = "tokens do not fit the context of 16 that each of 4 sequences has of n_ctx=64"
REFUSED = [
    (("run", *LONG, *CUT), f"0 + 20 {OF_16}"),
    (("logits", *LONG, "-o", "/dev/null", *CUT), f"0 + 20 {OF_16}"),
    (("check", "--n-tokens", 20, *NULL), OF_16),
    (("program", "--n-past", 20, *NULL), OF_16),
    ((*AB, "--device", "embedded"), "pp40 needs 40 KV cells of a sequence, but each of 3 (n_seqs) "
     "has 32 of n_ctx=96; load it with n_ctx=120 or more, or with fewer sequences"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=lambda v: str(v[0]))
def test_what_has_no_room_is_refused_before_loading(call, path, given, said):
    """Weights are not read for it, and the message names what would help."""
    command, *rest = given
    status, _, err = call(command, "-m", path, *rest)
    assert status == 2 and ("device:" not in err or "null" in given)
    assert said in " ".join(err.split())


@pytest.mark.parametrize(
    ("command", "given"),
    [("bench", ("-p", 8, "-n", 2, "-r", 1, "-npl", "1,3")),
     ("bench", ("-p", 64, "-n", 2, "-r", 1, "-npl", 40, "-pps")),
     ("perplexity", ("--tokens-from", "sample:40", "-c", 64, "--n-seqs", 4)),
     pytest.param("profile", ("--test", "pp64+tg8", "-r", 1), marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_test_has_the_sequences_that_it_names(call, path, tmp_path, command, given):
    out = ("-o", tmp_path / "run") if command == "perplexity" else ()
    status, out, err = call(command, "-m", path, *given, *out, *ALONE)
    assert status == 0, err
    assert command != "perplexity" or "40 in 3 windows of up to 16" in out


def test_an_engine_proves_steps_of_its_own_configuration(path):
    """As a variant for other numbers of sequences has it: 64 cells, or 4 times 16."""
    with wb.Engine.load(path, device="null", n_ctx=64, n_kv_pad=16) as engine:
        config = replace(engine.config, n_seqs=4)
        toggles = Toggles(kv_cache="per_sequence", graph_reuse="set_rows")
        with Engine(engine._open, config, toggles) as regions:
            assert {p.shape.n_kv for p in regions.programs(16)} == {16}
            with pytest.raises(UsageError, match=r"0 \+ 17 tokens .* 16 that each of 4"):
                regions.programs(17)
        assert engine.programs(17)
