"""`workbench serve-bench`, against the fake server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.traffic import fake_server as fake
from tests.traffic.fake_server import Delays, serving
from workbench.common.errors import UsageError, WorkbenchError
from workbench.model.gguf.file import open_gguf
from workbench.traffic import served
from workbench.traffic.bench import load_served
from workbench.traffic.load import id_range, normal_ids
from workbench.traffic.served import ServeCommand, is_healthy, model_facts, reached

SHORT = ("-p", "uniform:2-9", "-n", "3", "--n-requests", 6)


@pytest.mark.long
def test_each_rate_and_concurrency_has_a_row(call, tmp_path):
    (tmp_path / "key").write_text("sesame\n")
    with serving(key="sesame") as server:
        status, out, err = call(
            "serve-bench", "--url", server.url, *SHORT, "--concurrency", "3", "--rate", "inf",
            "-o", "json", "--out", tmp_path / "run", "--slo", "e2e:10s", "--slots", 4,
            "--shared-prefix", 2, "--api-key-file", tmp_path / "key",
        )  # fmt: skip
    assert status == 0, err
    rows, names = json.loads(out), ["rate=inf", "concurrency=3"]
    assert [row["setting"] for row in rows] == names
    assert all(row["completed"] == 6 and row["failed"] == 0 for row in rows)
    for row in rows:  # what client processes took is that of one setting
        assert row["request_goodput"] == row["request_throughput"]
        assert row["client"]["processes"] == 1 and "n_steps" not in row
    assert [line.split(":")[0] for line in err.splitlines() if " requests in " in line] == names
    run = load_served(tmp_path / "run").run
    assert run["model"]["name"] == "fake" and run["engine"]["url"] == server.url
    assert run["command"][0] and run["status"] == "complete" and run["result"]["client"]
    assert "sesame" not in (tmp_path / "run" / "run.json").read_text()
    assert len(server.seen) == 2 * (1 + 6)
    assert all(i < 800 for body in server.seen for i in body["prompt"])  # its vocabulary


X = ["--url", "http://x"]
AT_X = [*X, "--model-id", "m"]
REFUSED = [
    ([], "name a server: --url http://127.0.0.1:8000, -m auto, or -m and a GGUF file"),
    (["--url", "localhost:8000"], "is no address; write it as http://127.0.0.1:8000"),
    ([*X, "-m", "y.gguf"], "--url and -m each name a server; leave one of them out"),
    ([*X, "--n-ctx", "512"], "--n-ctx is the server's"),
    ([*X, "--fuse", "on"], "--fuse is the server's"),
    ([*AT_X, "--slo", "ttft:200"], "--slo 'ttft:200' is no objective; write them as ttft:200ms"),
    ([*AT_X, "--timeout", "0"], "--timeout 0.0 is no length of"),
    ([*X, "--whole", "--slo", "tpot:9ms"], "whole answers show no TTFT"),
    (["-m", "none.gguf", "--ids", "9-3"], "--ids '9-3' is no range"),
    ([*X, "--api-key-file", "/none"], "/none cannot be read"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_makes_no_sense_is_refused_in_one_line(call, given, said):
    status, out, err = call("serve-bench", *given)
    (line,) = err.strip().splitlines()
    assert status == 2 and out == "" and said in line


def test_a_server_that_serves_nobody_is_one_line(call):
    """Where nobody is there, or it refuses every request of the warm-up."""
    with serving() as server:
        ids = ("--model-id", "fake", "--ids", f"{fake.REFUSE}-{fake.REFUSE}")
        status, out, err = call("serve-bench", "--url", server.url, *SHORT, *ids)
    assert (status, out) == (1, "")
    assert "no warm-up request ended well (refused: all slots are taken); mend that first" in err
    status, out, err = call("serve-bench", "--url", server.url, *SHORT)
    assert (status, out) == (1, "") and err.count("\n") == 1
    assert err.startswith(f"error: {server.url} names no models: ")


@pytest.mark.long
def test_ctrl_c_prints_and_saves_what_has_ended(tmp_path):
    ask = ["--n-requests", "2000", "--concurrency", "2", "--warmup", "0", "-o", "json"]
    with serving(Delays(0.01, 0.02)) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "workbench", "serve-bench", "--url", server.url, *SHORT[:4],
             *ask, "--out", str(tmp_path / "run")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        until = time.monotonic() + 60
        while len(server.seen) < 16 and time.monotonic() < until:  # records come by then
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "error: interrupted; what was finished is kept" in err
    (row,) = json.loads(out)
    found = load_served(tmp_path / "run")
    assert found.interrupted and 0 < found.rows[0].figures["completed"] == row["completed"] < 2000


def test_a_server_that_does_not_begin_says_why(tiny_model):
    command = ServeCommand(tiny_model("tiny-llama", "Q8_0"), 1, "host", ("--no-such-flag",))
    with pytest.raises(WorkbenchError, match=r"the server did not begin: \w"), reached(command):
        pass


@pytest.mark.long
def test_a_server_is_begun_as_typed_and_stopped(call, monkeypatch, tiny_model):
    """The command itself is tested with the server; here a fake one stands for it. A server ends
    with the process that began it, too."""
    children, path = [], tiny_model("tiny-llama", "Q8_0")
    given = ("--n-ctx", "512", "--unsafe", "--override-tensor", "a=host", "--fuse", "on")

    def begin(arguments, log):
        assert arguments[:4] == ["-m", str(path), "--slots", "3"] and arguments[-2] == "--port"
        assert arguments[4:-2][-len(given) :] == [*given]
        begun = [sys.executable, "-m", "tests.traffic.fake_server", arguments[-1]]
        children.append(subprocess.Popen(begun, stdout=log, stderr=log, start_new_session=True))
        return children[-1]

    monkeypatch.setattr(served, "begin_server", begin)
    status, out, err = call(
        "serve-bench", "-m", path, "--slots", 3, *SHORT, "--ids", "100-200", *given, "-o", "json"
    )
    assert status == 0 and json.loads(out)[0]["completed"] == 6, err
    assert f"{path} is loaded by a server with 3 slots" in err
    assert children[0].poll() is not None
    assert not is_healthy(f"http://127.0.0.1:{children[0].args[-1]}")
    code = f"{served.ENDS_WITH_US}; import time; print(flush=True); time.sleep(60)"
    begun = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert begun.stdout.readline() and begun.poll() is None
    begun.communicate(timeout=10)
    assert begun.returncode == -signal.SIGTERM


def test_prompts_are_of_normal_tokens(tiny_model):
    path = tiny_model("tiny-llama", "Q8_0")
    with open_gguf(path) as file:
        types = file.get("tokenizer.ggml.token_type", list)
    ids = normal_ids(path)
    assert ids.tolist() == [i for i, kind in enumerate(types) if kind == 1] and len(ids) > 100
    facts = model_facts(path)
    assert facts["file"] == path.name and facts["quant"] == "Q8_0" and facts["n_params"] > 0
    for given, n_vocab, ends in ((None, None, [100, 10000]), (None, 800, [100, 799]),
                                 ("7-9", 800, [7, 9])):  # fmt: skip
        assert id_range(given, n_vocab)[[0, -1]].tolist() == ends
    with pytest.raises(UsageError, match="--ids 7-800 goes beyond the vocabulary of 800 tokens"):
        id_range("7-800", 800)
