"""`--until` and `--at-most` on the command line: what they end with, and what is refused."""

from __future__ import annotations

import json

import pytest

from workbench.benchmarks.runs.results import load_run


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("tiny-llama", "Q8_0")


DEVICE = ("--device", "embedded", "-t", 1)
AB = ("ab", "--toggle", "sync=per_copy,copy_boundary", "--test", "tg1", *DEVICE)


def test_ab_says_how_well_it_knows(call, model, tmp_path):
    out = tmp_path / "r"
    ask = (*AB, "-m", model, "-o", out)
    status, text, _ = call(*ask, "--until", "0.01%", "--at-most", "0.2s")
    asked = load_run(out).run["result"]["until"]
    ended = asked["tests"]["tg1"]
    assert status == 0 and (asked["half_width"], asked["at_most_s"]) == (0.0001, 0.2)
    assert ended["stopped"] == "time" and " ".join(text.split()).count("was not reached: ") == 1
    status, text, _ = call(*ask, "--until", "99%", "--resume", "--at-most", "20s")
    assert status == 0 and "the interval's half-width is " in " ".join(text.split())
    assert load_run(out).run["result"]["until"]["tests"]["tg1"]["rounds"] >= 10


def test_bench_says_how_well_it_knows(call, model):
    status, out, err = call("bench", "-m", model, "-p", 0, "-n", "1,2", "-r", 1, "-o", "jsonl",
                            "--until", "95 %", "--at-most", "1m", *DEVICE)  # fmt: skip
    rows = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and all(len(row["samples_ns"]) >= 10 for row in rows) and len(rows) == 2
    assert all(row["p50_us"] <= row["p90_us"] <= row["p99_us"] for row in rows)
    assert all(row["ttft_us"] > 0 for row in rows)
    assert err.count("the median's half-width is ") == 2


def test_percentiles_are_in_the_table(call, model):
    status, out, _ = call("bench", "-m", model, "-p", 4, "-n", 2, "-r", 2, *DEVICE)
    assert status == 0
    for heading in ("token p50 us", "p90 us", "p99 us", "first token us"):
        assert heading in out


@pytest.mark.parametrize("command", ["ab", "bench"])
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--until", "often"), "--until 'often' is no share between 0 and 1; write it as 1%"),
        (("--until", "100%"), "--until '100%' is no share"),
        (("--until", "1%", "--at-most", "10"), "--at-most '10' is no length of time; write it as"),
        (("--at-most", "10m"), "--at-most ends what --until repeats; add --until 1%"),
    ],
)
def test_what_is_refused_before_a_model_is_opened(call, command, flags, says):
    toggle = ("--toggle", "sync=per_copy,packed") if command == "ab" else ()
    status, out, err = call(command, "-m", "/no/such.gguf", *toggle, *flags)
    assert status == 2 and out == "" and err.startswith(f"error: {says}")
    assert len(err.splitlines()) == 1
