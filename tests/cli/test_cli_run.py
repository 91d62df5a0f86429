"""The command: what it prints, its exit status, and what becomes of llama.cpp's habits."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import workbench as wb
from workbench.benchmarks import workload
from workbench.benchmarks.runs.results import load_run
from workbench.common.errors import UsageError
from workbench.graph.ir import I32, Input
from workbench.model import inputs

IDS = ("--tokens", "1,2,3")


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("tiny-llama", "Q8_0")


@pytest.fixture
def on(call, model):
    """`on(command, ...)`: (exit status, stdout, stderr) of it on a tiny model, embedded."""
    return lambda command, *given: call(command, "-m", model, "--device", "embedded", *given)


def test_run_prints_text_or_ids_and_the_rest_on_stderr(on):
    status, out, err = on("run", "-p", "The engine", "-n", 8)
    assert status == 0 and out.endswith("\n") and len(out) > 1 and "t/s" in err
    status, out, err = on("run", *IDS, "-n", 5)
    assert status == 0 and len(out.split(",")) == 5
    assert "toggles: best for one sequence on embedded: sync=auto (implicit), graph_reuse=" in err
    *_, counts, phases = err.splitlines()
    assert counts.endswith("; 2 programs built, 3 reused")
    assert phases.startswith("the host's us a step: batch ") and ", wait " in phases
    _, same, err = on("run", *IDS, "-n", 5, "--graph-reuse", "rebuild")
    assert same == out and err.splitlines()[-2].endswith("; 5 programs built, 0 reused")
    assert "best for one sequence with graph_reuse=rebuild on embedded: " in err
    _, out, err = on("run", *IDS, "--preset", "baseline", "-n", 0)
    assert "toggles: baseline on embedded: everything off\n" in err and out.strip() == ""


@pytest.mark.long
def test_auto_is_a_model_wherever_a_model_is_named(call, tmp_path, monkeypatch):
    """As in Python: a tiny one where there is no GPU."""
    monkeypatch.chdir(tmp_path)
    on = ("-m", "auto", "--device", "embedded")
    status, out, err = call("run", *on, *IDS, "-n", 3)
    (written,) = tmp_path.rglob("*.gguf")
    assert status == 0 and written.name == "tiny-llama-Q8_0.gguf"
    assert f"model: {written.relative_to(tmp_path)} (auto)" in err
    assert out == call("run", "-m", written, *on[2:], *IDS, "-n", 3)[1]
    rows = json.loads(call("bench", *on, "-p", 4, "-n", 0, "-r", 1, "-o", "json")[1])
    assert [row["model_filename"].endswith(written.name) for row in rows] == [True]
    swept = call("sweep", *on, "--test", "tg2", "--dry-run", "-o", "csv")[1]
    assert "tiny-llama-Q8_0,tg2" in swept
    load = ("-p", 4, "-n", 2, "--concurrency", 1, "--n-requests", 1, "--warmup", 0)
    status, out, err = call("serve-bench", *on, *load, "-o", "json")
    assert status == 0 and json.loads(out)[0]["completed"] == 1 and written.name in err
    status, _, err = call("sweep", *on, "--device", "host")
    assert status == 2 and "--device" in err
    with pytest.raises(UsageError, match="and there are embedded, host; name a GGUF file"):
        wb.sweep("auto", device=["embedded", "host"])


def test_run_names_an_input_that_refuses_and_plans(on, monkeypatch):
    said = on("run", "--plans", "ours", *IDS, "-n", 6)[2]
    assert re.search(r"^plans: 2 captured \(\d+\.\d ms\), 0 updated, 6 replayed$", said, re.M)
    silent = Input(inputs.OUT_IDS, I32, (1,))
    monkeypatch.setitem(inputs.INPUTS, inputs.OUT_IDS, lambda step: silent)
    err = on("run", "--tokens", "1", "-n", 5)[2]
    assert "; 5 programs built, 0 reused; inp_out_ids kept 4 from being reused\n" in err


@pytest.mark.parametrize("n", [100, -1, -2])
def test_a_run_that_fills_its_context_says_so(on, n):
    _, out, err = on("run", "--tokens", "1,2", "-c", 6, "-n", n)
    assert len(out.split(",")) == 5  # the last needs no cell
    assert "stopped at n_ctx=6: the context is full; give -c 12 for more\n" in err
    if n == 100:
        assert "stopped" not in on("run", "--tokens", "1,2", "-c", 6, "-n", 3)[2]
        err = on("run", "--tokens", "1,2", "-c", 2049, "-n", 1)[2]
        assert "note: n_ctx=2049 is more than the 2048 tokens " in err
        assert on("program", "-c", 0, "--n-past", 2047)[0] == 0, "0 is the model's own"
        assert on("program", "-c", 0, "--n-past", 2048)[0] == 2


def test_logits_are_one_float32_row_per_token(on, tmp_path):
    assert on("logits", *IDS, "--out", tmp_path / "rows")[0] == 0
    found = np.load(tmp_path / "rows")
    assert (found.dtype, found.shape) == (np.float32, (3, 1024)) and np.isfinite(found).all()


def test_program_prints_pattern_counts_and_plans(on):
    status, out, err = on("program", "--sync", "copy_boundary")
    assert status == 0 and "folded    h saaaasg" in out
    assert "toggles: baseline with sync=copy_boundary on embedded: " in err
    words = " ".join(out.split())
    assert " s: the host waits; a: an asynchronous copy; g: a split that the device comp" in words
    assert " waits 3 (1 without a letter) copies 7 (1 without a letter) launches " in words
    assert " waits 13 (1 without a letter) copies 7 " in " ".join(on("program")[1].split())
    words = " ".join(on("program", "--streams", 3)[1].split())
    assert " records 7 (7 without a letter) stream_waits 8 (8 without a letter)" in words
    about = " ".join(on("program", "--help")[1].split())
    assert "and the records and stream waits that order the streams of a split." in about
    ask = ("program", "--sync", "event_guarded", "--plans", "ours", "--plan-scope", "step")
    out = on(*ask)[1]
    (line,) = [line for line in out.splitlines() if line.startswith("plan #")]
    assert "pattern   h sp" in out and " 7 copies, 1 record, 1 wait, " in line
    made = json.loads(on(*ask, "--json")[1])
    (replay,) = [c for c in made["commands"] if c["kind"] == "replay"]
    launches = [part for part in replay["parts"] if part["kind"] == "launch"]
    assert f" {len(launches)} launches on embedded:0, embedded:1" in line
    assert all(part["reads"] and part["writes"] and part["stream"] for part in launches)
    assert made["counts"]["replays"] == made["counts"]["launches"] == 1


@pytest.fixture
def check(call, model):
    return lambda *flags: call("check", "-m", model, "--device", "null", *flags)


def test_check_prints_what_is_proved_and_counts_races(check, on):
    status, out, _ = check()
    lines = out.splitlines()
    assert status == 0 and lines[0] == "folded       h scscg" and lines[3] == "races        none"
    assert lines[1].startswith(
        "letters      h: a split that the host computes; s: the host waits; c:"
    )
    assert "superfluous  11 of 13 waits: each can go alone" in lines
    assert "sufficient   2 of 13 waits: with these the others can go together" in lines
    status, out, _ = check("--sync", "implicit", "--copy-stream", "own")
    assert status == 3 and "races        20" in out
    assert "nothing orders copy inp_pos on null:1 before launch rope" in out
    ask = ("check", "--plans", "ours", "--plan-scope", "step", "--copy-stream", "own", "--sync")
    status, out, _ = on(*ask, "event_guarded")
    (line,) = [line for line in out.splitlines() if " part " in line]
    assert status == 0 and "races        none" in out
    assert re.fullmatch(r'  step 1 #8 part \d+ wait of embedded:0 for "inputs .*" in a plan', line)
    status, out, _ = on(*ask, "implicit", "--json")
    race = json.loads(out)["races"][0]
    assert status == 3 and race["first"]["part"] == 0 < race["second"]["part"]


def test_check_is_of_all_ubatches_of_a_prompt_and_its_tokens(check):
    ask = ("--sync", "implicit", "--copy-stream", "compute", "--step-wait", "outputs")
    assert check(*ask)[0] == 0
    status, out, _ = check(*ask, "--n-tokens", 20, "--n-ubatch", 8, "--json")
    made = json.loads(out)
    assert status == 3 and made["patterns"] == ["h aaaaag", "h aaaaag", "h aaaaaag"]
    assert [w["event"] for w in made["sufficient"]] == ["end of step on null"]
    said = [check(*ask, "--n-tokens", n, "--n-ubatch", 8)[1] for n in (16, 24)]
    two, three = (int(re.search(r"programs, 3 times: (\d+)", out)[1]) for out in said)
    assert three > two  # a program counts as often as it is issued
    # a train takes the ring's buffers in turn, and tokens after its wait the first
    ask = ("--sync", "write_read_boundary", "--copy-stream", "compute", "--n-tokens", 20)
    ask += ("--host-source", "pinned_ring_2", "--step-wait", "outputs", "--n-ubatch", 8, "--json")
    status, out, _ = check(*ask, "--n-decoded", 2)
    assert status == 0 and len(json.loads(out)["patterns"]) == 3 + 2
    assert check(*ask, "--n-decoded", 2040)[0] == 2
    # of a train as long as its rings the first step that takes them again is not among those
    ask = ("--sync", "write_read_boundary", "--copy-stream", "own", "--step-wait", "outputs")
    ask += ("--n-copies", 4, "--n-ubatch", 16, "--n-tokens")
    status, out, _ = check(*ask, 64)
    assert status == 0 and out.splitlines()[-1].endswith("ask for --n-tokens 65 or more")
    assert check(*ask, 65)[0] == 3


@pytest.mark.long
def test_tables_fit_the_terminal(on, call, model, tmp_path, monkeypatch):
    """All that these commands print is tables and sentences."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    said = {
        "ab": on("ab", "--toggle", "fuse=off,on", "--test", "tg2", "--rounds", 5),
        "bench": on("bench", "-p", 8, "-n", 2, "-r", 1, "--fuse", "on", "--sync", "packed"),
        "inspect": call("model", "inspect", model),
        "perplexity": on("perplexity", "--tokens-from", "sample:8", "--against", "fuse=on"),
    }
    assert [status for status, _, _ in said.values()] == [0] * 4
    printed = {name: out.splitlines() for name, (_, out, _) in said.items()}
    assert all(max(map(len, lines)) <= 80 for lines in printed.values())
    assert printed["ab"][0].startswith("Model: tiny-llama")
    assert printed["bench"][0].startswith("toggles: sync=packed, ")
    assert "agreement   every logit is equal" in printed["perplexity"]


def test_bench_has_a_row_for_each_model_and_combination(on, tiny_model, tmp_path):
    ask = ("-m", tiny_model("tiny-llama", "F16"), "-p", 4, "-n", 2, "-r", 1, "-t", "1,2")
    _, out, _ = on("bench", *ask, "-fa", "0,1", "-ub", 600, "--out", tmp_path / "run")
    rows = [line for line in out.splitlines() if "±" in line]
    assert [row.split("|")[1].split()[-1] for row in rows] == ["Q8_0"] * 4 + ["F16"] * 4
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"run-{i}" for i in range(1, 5)]
    config = load_run(tmp_path / "run-1").run["engine"]["config"]
    assert (config["n_ubatch"], config["threads"]) == (600, 1)


@pytest.mark.parametrize(("asked", "noted"), [
    (("-p", 32, "-n", 2, "-npl", "1,65"), ""),  # 2210 cells of 65 sequences
    (("-p", 2048, "-n", 2, "-npl", 1), "note: n_ctx=2050 is more than the 2048 tokens "),
    (("-p", 2048, "-n", 1, "-npl", "2", "-pps"), "note: a sequence of 2049 tokens is more than "),
])  # fmt: skip
def test_a_long_context_is_noted_of_a_sequence(on, asked, noted):
    _, _, err = on("bench", *asked, "-r", 1)
    assert noted in err if noted else "note: " not in err
    assert err.count(", since the tests need more than 2048\n") == 1, "a context made longer"


@pytest.mark.parametrize(("finished", "more", "said"), [
    (0, ("--out", "run"), "error: interrupted"), (2, (), "error: interrupted"),
    (2, ("--out", "run"), "error: interrupted; what was finished is kept"),
])  # fmt: skip
def test_an_interrupt_says_what_is_kept_where_something_is(
    on, tmp_path, monkeypatch, finished, more, said
):
    left, take = [finished + 1], workload.take_sample  # a warm-up is one, too

    def interrupted(*given, **named):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return take(*given, **named)

    monkeypatch.setattr(workload, "take_sample", interrupted)
    monkeypatch.setattr(workload, "WARM_MIN", 1)
    monkeypatch.setattr(workload, "WARM_MAX", 1)
    monkeypatch.chdir(tmp_path)
    status, _, err = on("bench", "-p", 4, "-n", 0, "-r", 5, *more)
    assert status == 130 and err.splitlines()[-1] == said
    assert (tmp_path / "run").exists() == (finished > 0 and bool(more))


def test_how_well_is_asked_in_words(on, tmp_path):
    ask = (
        "ab",
        "--toggle",
        "sync=per_copy,copy_boundary",
        "--test",
        "tg1",
        "--out",
        tmp_path / "r",
    )
    status, text, _ = on(*ask, "--until", "0.01%", "--at-most", "0.2s")
    asked = load_run(tmp_path / "r").run["result"]["until"]
    assert status == 0 and (asked["half_width"], asked["at_most_s"]) == (0.0001, 0.2)
    assert " ".join(text.split()).count("was not reached: ") == 1
    ask = ("bench", "-p", 0, "-n", "1,2", "-r", 1, "-o", "jsonl")
    status, out, err = on(*ask, "--until", "95 %", "--at-most", "1m")
    assert status == 0 and err.count("the median's half-width is ") == 2
    assert all(len(json.loads(line)["samples_ns"]) >= 10 for line in out.splitlines())


UNITS = re.compile(
    r"\b(us|ms|s|t/s|req/s|GB/s|MB|kB|bytes|%|F/B|count)\b|%|t/s|GB/s", re.ASCII
)  # in a heading


@pytest.mark.long
@pytest.mark.parametrize("collector", ["auto", "events"])
def test_kernels_without_names_are_refused_before_measuring(on, monkeypatch, collector):
    monkeypatch.setattr(workload, "take_sample", None)  # nothing is measured
    status, out, err = on("profile", "--by", "kernel", "--collector", collector)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: --by kernel takes CUPTI's names of kernels, and ")


@pytest.mark.long
def test_columns_of_times_and_rates_have_units(on, call, model, tmp_path, monkeypatch):
    """Every column whose cells have a decimal point says of what, but ratios and NLL."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    ask = ("--n-requests", 2, "--warmup", 0, "-p", 4, "-n", 2, "--concurrency", "1,2", "-o", "md")
    out = [
        on("ab", "--toggle", "fuse=off,on", "--test", "tg2", "--rounds", 5)[1],
        on("bench", "-p", 8, "-n", 2, "-r", 2, "--out", "run")[1],
        on("bench", "-p", 8, "-n", 2, "-r", 2, "-npl", "1,2")[1],
        on("profile", "--test", "tg2", "-r", 1)[1],
        on("serve-bench", *ask)[1],
        call("bench-kernels", "--quick", "--types", "Q8_0", "--shapes", "qwen3-30b-a3b.gate")[1],
        call("compare", "run", "run")[1],
        call("runs", "show", "run")[1],
        call("runs", "ls", ".")[1],
    ]
    ratios = {"Speedup", "Ratio", "95% CI"}
    seen = 0
    for text in out:
        lines = text.splitlines()
        for at, line in enumerate(lines):
            if not re.fullmatch(r"\|[-:| ]+\|", line):
                continue
            heads = [cell.strip() for cell in lines[at - 1].strip("|").split("|")]
            row = [cell.strip() for cell in lines[at + 1].strip("|").split("|")]
            for head, cell in zip(heads, row, strict=True):
                if re.fullmatch(r"[\d,.± ()-]*\d\.\d[\d,.± ()-]*", cell) and head not in ratios:
                    units = UNITS.search(head) or UNITS.search(lines[at - 1].split("|")[1])
                    assert units, f"{head}: {cell}"
                    seen += 1
    assert seen > 40
