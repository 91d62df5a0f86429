"""As many sequences as the work needs, and every question about room asked of the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import workbench as wb
from workbench.common.errors import UsageError
from workbench.config import KVCacheKind, KVGrowth, Toggles
from workbench.engine.engine import Engine


@pytest.fixture(scope="module")
def path(tiny_model) -> Path:
    return tiny_model("tiny-llama", "Q8_0")


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


def test_an_engine_says_what_makes_room_for_sequences(path):
    """Steps that it proves are of a variant's own configuration: 64 cells, or 4 times 16."""
    with wb.Engine.load(path, device="null", n_ctx=64, n_kv_pad=16) as engine:
        with pytest.raises(UsageError, match=r"has 0 alone \(n_seqs=1\); load it with n_seqs=4 or"):
            engine.submit([(3, [1], "last")])
        with pytest.raises(UsageError, match=r"load it with n_seqs=2 or more"):
            engine.cache.copy(0, 1)
        toggles = Toggles(kv_cache="per_sequence", graph_reuse="set_rows")
        with Engine(engine._open, replace(engine.config, n_seqs=4), toggles) as regions:
            assert {p.shape.n_kv for p in regions.programs(16)} == {16}
            with pytest.raises(UsageError, match=r"0 \+ 17 tokens .* 16 that each of 4"):
                regions.programs(17)
        assert engine.programs(17)


ALONE = ("--device", "embedded", "--threads", 1, "--kv-cache", "per_sequence")
CUT = (*ALONE, "-c", 64, "--n-seqs", 4)  # 16 cells of each
NULL = ("--device", "null", *CUT[2:])
LONG = ("--tokens", ",".join(["1"] * 20))
AB = ("ab", "--toggle", "kv_cache=unified,per_sequence", "--test", "pp40,tg4@b3", "-c", 96)
OF_16 = "tokens do not fit the context of 16 that each of 4 sequences has of n_ctx=64"
ASKED = [  # the command, its exit status, what it says
    (("run", "--tokens", "1,2", "-n", 20, *ALONE), 0, ""),
    (("run", "--tokens", "1,2", "-n", 20, *CUT), 0, "stopped at 16 tokens: the context is full, "),
    (("run", *LONG, *CUT), 2, f"0 + 20 {OF_16}"),
    (("logits", *LONG, "-o", "/dev/null", *CUT), 2, f"0 + 20 {OF_16}"),
    (("check", "--n-tokens", 20, *NULL), 2, OF_16),
    (("program", "--n-past", 20, *NULL), 2, OF_16),
    ((*AB, "--device", "embedded"), 2, "pp40 needs 40 KV cells of a sequence, but each of 3 "
     "(n_seqs) has 32 of n_ctx=96; load it with n_ctx=120 or more, or with fewer sequences"),
    (("bench", "-p", 8, "-n", 2, "-r", 1, "-npl", "1,3", *ALONE), 0, ""),
    (("bench", "-p", 64, "-n", 2, "-r", 1, "-npl", 40, "-pps", *ALONE), 0, ""),
]  # fmt: skip


@pytest.mark.parametrize(("given", "wanted", "said"), ASKED, ids=lambda v: str(v)[:30])
def test_a_command_has_room_or_says_what_would_help(call, path, given, wanted, said):
    """What has no room is refused before weights are read."""
    command, *rest = given
    status, _, err = call(command, "-m", path, *rest)
    words = " ".join(err.split())
    assert status == wanted and said in words and ("context is full" in words) <= bool(said), err
    assert wanted == 0 or "device:" not in err or "null" in given
