"""`workbench check`: what it prints of a proof, and how it ends."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def call(call, tiny_model):
    """Runs `workbench check` on a tiny model; returns (exit status, stdout, stderr)."""
    path = tiny_model("tiny-llama", "Q8_0")
    return lambda *flags: call("check", "-m", path, "--device", "null", *flags)


def test_check_prints_what_is_proved(call):
    status, out, _ = call()
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "pattern      h scscg"
    assert lines[2] == "races        none"
    assert "superfluous  11 of 13 waits: each can go alone" in lines
    assert "sufficient   2 of 13 waits: with these the others can go together" in lines
    assert lines[-1].endswith('sync of "end of step on null"')


def test_check_ends_with_3_where_commands_race_and_runs_what_an_engine_refuses(call):
    status, out, _ = call("--sync", "implicit", "--copy-stream", "own")
    assert status == 3
    assert "races        20" in out
    assert "nothing orders copy inp_pos on null:1 before launch rope" in out
    assert "sufficient   1 of 1 wait: with these alone nothing else races" in out.splitlines()


def test_check_of_a_prompt_is_of_all_its_ubatches(call):
    ask = ("--sync", "implicit", "--copy-stream", "compute", "--step-wait", "outputs")
    assert call(*ask)[0] == 0
    status, out, _ = call(*ask, "--n-tokens", 20, "--n-ubatch", 8, "--json")
    made = json.loads(out)
    assert status == 3 and made["patterns"] == ["h aaaaag", "h aaaaag", "h aaaaaag"]
    assert {r["kind"] for r in made["races"]} >= {"read-write"}
    assert all(r["first"]["kind"] == "copy" for r in made["races"])
    assert [w["event"] for w in made["sufficient"]] == ["end of step on null"]


def test_check_of_tokens_behind_a_prompt_is_of_both_shapes(call):
    """A train takes the ring's buffers in turn, and tokens behind its wait the first."""
    ask = ("--sync", "write_read_boundary", "--copy-stream", "compute", "--n-tokens", 20)
    ask += ("--host-source", "pinned_ring_2", "--step-wait", "outputs", "--n-ubatch", 8, "--json")
    status, out, _ = call(*ask, "--n-decoded", 2)
    made = json.loads(out)
    assert status == 0 and len(made["patterns"]) == 3 + 2
    assert call(*ask, "--n-decoded", 2040)[0] == 2


def test_check_of_a_train_as_long_as_its_rings_says_what_it_does_not_show(call):
    ask = ("--sync", "write_read_boundary", "--copy-stream", "own", "--step-wait", "outputs")
    ask += ("--n-copies", 4, "--n-ubatch", 16, "--n-tokens")
    status, out, _ = call(*ask, 64)
    assert status == 0 and out.splitlines()[-1].endswith("ask for --n-tokens 65 or more")
    status, out, _ = call(*ask, 65)
    assert status == 3 and "note" not in out


def test_check_of_a_prompt_beyond_the_context_is_refused_before_a_model_is_read(call):
    status, _, err = call("--n-tokens", 3000)
    assert status == 2 and "3000 tokens do not fit the context" in err
