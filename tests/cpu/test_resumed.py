"""`bench`, `perplexity` and `ab`, killed in the middle and typed again: what was saved is kept."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from workbench.benchmarks.runs.results import load_run

# every finished repetition or window is saved at once
RUN = (
    "import sys, workbench.benchmarks.runs.results as r; r.CHECKPOINT_SECONDS = -1.0; "
    "from workbench.cli import main; main(sys.argv[1:])"
)
COMMANDS = {
    "bench": ["bench", "-p", "64", "-n", "64", "-r", "40"],
    "perplexity": ["perplexity", "--tokens-from", "sample:6000:2", "--n-ctx", "64"],
    "ab": ["ab", "--toggle", "sync=per_copy,packed", "--test", "tg32", "--rounds", "20"],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", COMMANDS)
def test_a_killed_run_goes_on(tiny_model, tmp_path, what):
    out = tmp_path / "runs" / "r"
    command = [
        sys.executable, "-c", RUN, *COMMANDS[what], "-m", str(tiny_model("tiny-llama", "Q8_0")),
        "--device", "embedded", "--out", str(out),
    ]  # fmt: skip
    held = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while held < 5 and process.poll() is None:
            time.sleep(0.02)
            held = load_run(out).samples["order"].nunique() if out.exists() else 0
        process.kill()
    assert process.returncode == -9, "it ended too early to be killed"
    cut = load_run(out)
    assert cut.run["status"] == "interrupted"
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole = load_run(out)
    assert whole.run["status"] == "complete" and len(whole.run["result"]["sessions"]) == 2
    assert whole.samples.iloc[: len(cut.samples)].equals(cut.samples)
    assert not whole.samples.duplicated(["arm", "test", "repetition", "token"]).any()
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["r"], "nothing is left over"
    other = [*command, "--resume", "--fuse", "on"]
    refused = subprocess.run(other, capture_output=True, text=True)
    assert refused.returncode == 2 and "cannot be resumed: its arms is" in refused.stderr
    assert load_run(out).samples.equals(whole.samples)


@pytest.mark.slow
def test_of_several_engines_those_with_a_folder_go_on(call, tiny_model, tmp_path):
    ask = ["bench", "-m", tiny_model("tiny-llama", "Q8_0"), "-p", "2", "-n", "0", "-r", "2",
           "--device", "host", "-t", "1,2", "-o", "json", "--out", tmp_path / "r"]  # fmt: skip
    assert call(*ask)[0] == 0
    first, second = (tmp_path / f"r-{i}" for i in (1, 2))
    before = load_run(first).samples
    second.rename(tmp_path / "gone")
    status, out, _ = call(*ask, "--resume")
    assert status == 0 and [len(row["samples_ns"]) for row in json.loads(out)] == [2, 2]
    assert load_run(first).samples.equals(before) and load_run(second).run["status"] == "complete"
