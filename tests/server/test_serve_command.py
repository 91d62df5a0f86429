"""`workbench serve` as a command: its flags, its signals, and the status it ends with."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.server.command import served
from tests.server.live import USER


@pytest.fixture
def model(tiny_model) -> Path:
    return tiny_model("tiny-llama", "F16")


def test_flags_reach_the_engine_and_a_signal_ends_it(tmp_path, model):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}!")
    keys = tmp_path / "keys"
    keys.write_text("# of the first team\none\n\n  # of the second\ntwo\n")
    flags = ["-m", model, "--slots", 3, "--max-waiting", 5, "-c", 256, "--alias", "mine"]
    flags += ["--chat-template-file", template, "--api-key-file", keys, "--temp", 0]
    flags += ["--device", "embedded", "--streams", 2]
    with served(tmp_path, *flags) as (process, url, log):
        http = httpx.Client(base_url=url, headers={"authorization": "Bearer two"})
        assert http.get("/v1/models").json()["data"][0]["id"] == "mine"
        assert http.get("/props").json()["total_slots"] == 3
        assert http.post("/apply-template", json={"messages": USER}).json() == {"prompt": "a!"}
        for wrong in ("", "#", "# of the first team"):
            refused = httpx.get(f"{url}/v1/models", headers={"x-api-key": wrong})
            assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        body = {"prompt": [1], "max_tokens": 50, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and len(rest) == 49 + 1 + 1
        assert process.wait(10) == 143
        text = log.read_text()
    said = f"started {model.name} embedded 3 3 5 {{'streams': '2'}}"
    assert said in text and "warning" not in text and "ChatML" not in text
    assert text.splitlines()[-1].startswith("error: terminated")


@pytest.mark.parametrize(
    ("flags", "n_slots", "n_ctx"),
    [
        (["--host", "0.0.0.0"], 8, 8 * 2048),  # each as many as the model was trained on
        (["-c", 8192, "--slots", 4], 4, 8192),  # of all slots: the engine divides it
    ],
)
def test_what_no_flag_says_is_said_at_the_start(tmp_path, model, flags, n_slots, n_ctx):
    """Of a file without a template, and of an address for all without a key; a second signal ends
    it at once."""
    with served(tmp_path, "-m", model, *flags) as (process, url, log):
        # the engine that is none has one room for all
        assert httpx.get(f"{url}/props").json()["default_generation_settings"]["n_ctx"] == n_ctx
        assert f"({n_slots} slots, {n_ctx} tokens each)" in log.read_text()
        assert "has no chat template" in log.read_text() and "ChatML" in log.read_text()
        assert ("warning: http://0.0.0.0" in log.read_text()) == ("--host" in flags)
        made = httpx.post(f"{url}/apply-template", json={"messages": USER}).json()
        assert made == {"prompt": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"}
        body = {"prompt": [1], "max_tokens": 3000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(2) == 130


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], "65535"),
        (["--slots", "0"], "--slots"),
        (["--temp", "-1"], "temperature"),
        (["--min-p", "2"], "min_p"),
        (["--timeout", "-1"], "--timeout"),
        (["--api-key-file", "/no/such"], "cannot read /no/such"),
        (["--api-key-file", os.devnull], "no API key"),
        (["--chat-template-file", "/no/such"], "cannot read"),
        (["--chat-template-file", "BROKEN"], "line 2 is no chat template: Expected an expression"),
        (["--n-seqs", "5"], "--slots"),
        (["--device", "null"], "computes nothing"),
        (["--cors-origin", "chat.example"], "'chat.example' is no origin"),
        (["--cors-origin", "https://chat.example/a"], "is no origin"),
        (["-c", "15"], "8 slots cannot be used together: the cache has 15 cells"),
        (["-c", "5", "--slots", "3", "--kv-cache", "unified"], "each needs 2 at least"),
        (["--host", "no.such.host.invalid", "--port", "0"], "cannot listen"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_wrong_flags_are_refused_before_a_model_is_loaded(
    call, monkeypatch, model, tmp_path, flags, words
):
    broken = tmp_path / "t.jinja"
    broken.write_text("{{ bos_token }}\n{% for %}")
    flags = [str(broken) if flag == "BROKEN" else flag for flag in flags]
    monkeypatch.setattr("workbench.server.wire.worker.start", None)  # never called
    status, out, err = call("serve", "-m", model, *flags)
    assert status == 2 and not out and words in err and err.startswith("error: ")
