"""The command: what it prints, its exit status, and one line for every kind of bad input."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from workbench.graph.ir import I32, Input
from workbench.model import inputs


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("tiny-llama", "Q8_0")


def test_run_prints_text_on_stdout_and_the_rest_on_stderr(call, model):
    status, out, err = call("run", "-m", model, "-p", "The engine", "-n", 8, "--device", "embedded")
    assert status == 0
    assert out.endswith("\n") and len(out) > 1
    assert "device: embedded" in err and "t/s" in err


def test_run_says_what_was_reused_and_what_each_phase_took(call, model):
    ask = ("run", "-m", model, "--tokens", "1,2,3", "-n", 5, "--device", "embedded")
    *_, counts, phases = call(*ask)[2].splitlines()
    assert counts.endswith("; 2 programs built, 3 reused")
    assert phases.startswith("the host's us a step: batch ") and ", wait " in phases
    assert "fuse" in phases and "reuse" in phases, "of the prompt and the first token, and the rest"
    rebuilt = call(*ask, "--graph-reuse", "rebuild")[2].splitlines()
    assert rebuilt[-2].endswith("; 5 programs built, 0 reused") and "reuse " not in rebuilt[-1]


def test_run_names_an_input_that_refuses(call, model, monkeypatch):
    silent = Input(inputs.OUT_IDS, I32, (1,))
    monkeypatch.setitem(inputs.INPUTS, inputs.OUT_IDS, lambda step: silent)
    err = call("run", "-m", model, "--tokens", "1", "-n", 5, "--device", "embedded")[2]
    assert "; 5 programs built, 0 reused; inp_out_ids kept 4 from being reused\n" in err


def test_run_with_ids_prints_ids(call, model):
    ask = ("run", "-m", model, "--tokens", "1,2,3", "-n", 5, "--device", "embedded")
    status, out, _ = call(*ask)
    assert status == 0
    assert len(out.split(",")) == 5
    assert call(*ask, "--graph-reuse", "set_rows", "--sync", "copy_boundary")[1] == out


def test_logits_are_one_float32_row_per_token(call, model, tmp_path):
    out = tmp_path / "out.npy"
    ask = ("logits", "-m", model, "--tokens", "1,2,3", "-o", out, "--device")
    assert call(*ask, "embedded")[0] == 0
    rows = np.load(out)
    assert rows.dtype == np.float32 and rows.shape == (3, 1024)
    assert call(*ask, "host")[0] == 0
    assert np.abs(np.load(out) - rows).max() < 1e-4 * np.abs(rows).max()
    assert [p.name for p in tmp_path.iterdir()] == ["out.npy"]


def test_program_prints_pattern_and_counts(call, model):
    ask = ("program", "-m", model, "--device", "embedded", "--sync", "copy_boundary")
    status, out, _ = call(*ask)
    assert status == 0
    assert "folded    h saaaasg" in out
    for name, n in (("waits", 3), ("copies", 7)):
        assert [line for line in out.splitlines() if line.split() == [name, str(n)]]
    made = json.loads(call(*ask, "--json")[1])
    assert made["folded_pattern"] == "h saaaasg"
    assert made["counts"]["launches"] == sum(c["kind"] == "launch" for c in made["commands"])


def test_program_lists_what_is_in_a_plan(call, model):
    ask = ("program", "-m", model, "--device", "embedded", "--sync", "event_guarded")
    ask += ("--plans", "ours", "--plan-scope", "step")
    status, out, _ = call(*ask)
    assert status == 0
    assert "pattern   h sp" in out
    (line,) = [line for line in out.splitlines() if line.startswith("plan #")]
    assert " 7 copies, 1 record, 1 wait, " in line
    assert line.endswith(" launches on embedded:0, embedded:1")
    made = json.loads(call(*ask, "--json")[1])
    (replay,) = [c for c in made["commands"] if c["kind"] == "replay"]
    launches = [part for part in replay["parts"] if part["kind"] == "launch"]
    assert f" {len(launches)} launches " in line
    assert all(part["reads"] and part["writes"] and part["stream"] for part in launches)
    assert made["counts"]["replays"] == 1 and made["counts"]["launches"] == 1


def test_check_names_the_parts_of_plans(call, model):
    ask = ("check", "-m", model, "--device", "embedded", "--plans", "ours", "--plan-scope", "step")
    status, out, _ = call(*ask, "--sync", "event_guarded", "--copy-stream", "own")
    assert status == 0 and "races        none" in out
    (line,) = [line for line in out.splitlines() if " part " in line]
    assert re.fullmatch(r'  step 1 #8 part \d+ wait of embedded:0 for "inputs .*" in a plan', line)
    status, out, _ = call(*ask, "--sync", "implicit", "--copy-stream", "own", "--json")
    race = json.loads(out)["races"][0]
    assert status == 3 and race["first"]["part"] == 0 < race["second"]["part"]
    assert race["first"]["words"] == "copy inp_embd on embedded:1 in a plan"
    assert race["missing"].endswith(
        "record an event behind the copy in the plan, and let embedded:0 wait for it"
    )


def test_run_and_bench_say_what_became_of_plans(call, model):
    ask = ("-m", model, "--device", "embedded", "--plans", "ours")
    said = call("run", *ask, "--tokens", "1,2,3", "-n", 6)[2]
    assert re.search(r"^plans: 2 captured \(\d+\.\d ms\), 0 updated, 6 replayed$", said, re.M)
    said = call("bench", *ask, "-p", 0, "-n", 4, "-r", 1)[2]
    assert re.search(r"^plans: 1 captured \(\d+\.\d ms\), 0 updated, \d+ replayed$", said, re.M)
    assert "plans:" not in call("run", "-m", model, "--tokens", "1,2,3", "-n", 2)[2]


def test_inspect(call, model):
    assert "tiny-llama" in call("model", "inspect", model)[1]
    assert json.loads(call("model", "inspect", model, "--json")[1])["architecture"] == "llama"


def test_bench_speaks_llama_bench(call, model):
    ask = ("bench", "-m", model, "-p", 16, "-n", 4, "-r", 2, "--device", "embedded", "-o")
    rows = json.loads(call(*ask, "json")[1])
    assert [(r["n_prompt"], r["n_gen"]) for r in rows] == [(16, 0), (0, 4)]
    assert "tg4" in call(*ask, "md")[1]


BAD = {
    "a model that is not there": (["-m", "/no/such.gguf", "--tokens", "1"], 1, "no such file"),
    "an id that is no number": (["-m", "MODEL", "--tokens", "1,x"], 2, "no list of token ids"),
    "an id outside the vocabulary": (["-m", "MODEL", "--tokens", "1,99999"], 2, "token id 99999"),
    "a negative id": (["-m", "MODEL", "--tokens=-4"], 2, "token id -4"),
    "a prompt longer than the context": (
        ["-m", "MODEL", "--tokens", "1,2,3,4,5", "--n-ctx", "4"], 2, "do not fit the context of 4",
    ),
    "a toggle value that does not exist": (
        ["-m", "MODEL", "--tokens", "1", "--sync", "never"], 2, "sync='never' does not exist",
    ),
    "two toggles that clash": (
        ["-m", "MODEL", "--tokens", "1", "--sync", "event_guarded", "--copy-stream", "compute"], 2,
        "copy_stream=compute clash",
    ),
    "toggles that race": (
        ["-m", "MODEL", "--tokens", "1", "--device", "embedded", "--sync", "implicit",
         "--copy-stream", "own"], 2,
        "sync=implicit and copy_stream=own race on the embedded device: nothing orders a copy",
    ),
    "a device that does not exist": (
        ["-m", "MODEL", "--tokens", "1", "--device", "abacus"], 2, "device 'abacus' does not exist",
    ),
    "a mode the device cannot honour": (
        ["-m", "MODEL", "--tokens", "1", "--device", "host", "--sync", "copy_boundary"],
        1, "the host device cannot honour sync=copy_boundary",
    ),
    "a flag that does not exist": (["-m", "MODEL", "--speed", "11"], 2, "--speed"),
    "a missing model": (["--tokens", "1"], 2, "--model"),
    "neither prompt nor ids": (["-m", "MODEL"], 2, "either a prompt (-p) or token ids"),
    "a temperature below zero": (
        ["-m", "MODEL", "--tokens", "1", "--temp=-1"], 2, "temperature=-1.0 must be 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_gives_one_line(call, model, what):
    arguments, status, says = BAD[what]
    got, out, err = call("run", *[model if a == "MODEL" else a for a in arguments])
    errors = [line for line in err.splitlines() if not line.startswith("device:")]
    assert got == status
    assert out == ""
    assert len(errors) == 1 and errors[0].startswith("error: ") and says in errors[0], err


def test_a_gpu_that_is_not_there(call, model):
    from workbench.backend.base import choose_device

    if choose_device("auto")[0] == "cuda":
        pytest.skip("there is a GPU here")
    status, _, err = call("run", "-m", model, "--tokens", "1", "--device", "cuda")
    assert status == 1
    (line,) = err.splitlines()
    assert line.startswith("error: cuda needs ")


@pytest.mark.parametrize("damage", ["truncated", "magic", "version", "empty"])
def test_damaged_files_are_refused_with_an_offset(call, model, tmp_path, damage):
    data = bytearray(model.read_bytes())
    if damage == "truncated":
        data = data[: len(data) // 2]
    elif damage == "magic":
        data[:4] = b"JUNK"
    elif damage == "version":
        data[4:8] = (99).to_bytes(4, "little")
    else:
        data = bytearray()
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    out = tmp_path / "out.npy"
    status, _, err = call("logits", "-m", bad, "--tokens", "1", "-o", out, "--device", "embedded")
    (line,) = err.splitlines()
    assert status == 1 and line.startswith(f"error: {bad}")
    assert not list(tmp_path.glob("out*"))


def test_nothing_half_written_where_the_folder_is_missing(call, model, tmp_path):
    out = tmp_path / "nowhere" / "out.npy"
    status, _, err = call("logits", "-m", model, "--tokens", "1", "-o", out)
    assert status == 2 and "make it first" in err and not out.parent.exists()


def test_the_console_script_exits_with_the_status():
    done = subprocess.run(
        [sys.executable, "-m", "workbench.cli", "run", "-m", "/no/such.gguf", "--tokens", "1"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


def test_ctrl_c_keeps_the_tokens_made_so_far(model):
    ask = ["run", "-m", str(model), "--tokens", "1,2,3", "-n", "100000", "--n-ctx", "120000"]
    running = subprocess.Popen(
        [sys.executable, "-m", "workbench.cli", *ask, "--device", "embedded"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stderr is not None
    running.stderr.readline()  # the device is named: loaded, and about to generate
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert out.count(",") > 0
    assert err.splitlines()[-1] == "error: interrupted; what was finished is kept"


def test_tables_fit_the_terminal(call, model, tmp_path, monkeypatch):
    """On 80 columns and on 100: all that these commands print is tables and sentences."""
    where = ("-m", model, "--device", "embedded")
    commands = {
        "ab": ("ab", *where, "--toggle", "fuse=off,on", "--test", "tg2,pp8", "--rounds", 5),
        "bench": ("bench", *where, "-p", 8, "-n", 2, "-r", 2, "--fuse", "on", "--sync", "packed"),
        "inspect": ("model", "inspect", model),
        "perplexity": ("perplexity", *where, "--tokens-from", "sample:8", "--against", "fuse=on"),
    }
    monkeypatch.chdir(tmp_path)
    for width in (80, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        said = {name: call(*command) for name, command in commands.items()}
        assert [status for status, _, _ in said.values()] == [0] * 4
        printed = {name: out.splitlines() for name, (_, out, _) in said.items()}
        assert len([line for line in printed["ab"] if line.startswith("|")]) >= 6
        assert printed["ab"][0].startswith("Model: tiny-llama")
        for name in commands:
            assert max(map(len, printed[name])) <= width, name
        assert printed["bench"][0].startswith("toggles: sync=packed, ")
        assert "agreement   every logit is equal" in printed["perplexity"]


def test_a_message_names_no_flag_that_there_is_not(call, model):
    status, _, err = call("ab", "-m", model, "--toggle", "fuse=off,on", "--rounds", 3)
    assert status == 2 and "rounds=3 is too few" in err and "smoke" not in err
