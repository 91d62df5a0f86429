"""`workbench serve` as a command: its flags, its signals, and the status it ends with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
BEGIN_S = 60.0


NO_ENGINE = ("tests.serve.command",)


@contextmanager
def served(
    tmp_path: Path, *arguments: object, module: Sequence[str] = NO_ENGINE
) -> Iterator[tuple[subprocess.Popen, str, Path]]:
    """The command, its address once it is ready, and where its stderr goes. module: what to run."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *module, "--port", "0", *map(str, arguments)],
            cwd=ROOT, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + BEGIN_S
        while not (found := re.search(r"ready: \S+ at (\S+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.02)
        yield process, found[1], log
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def model(tiny_model) -> Path:
    return tiny_model("tiny-llama", "F16")


def test_flags_reach_the_engine_and_a_signal_ends_it_gracefully(tmp_path, model):
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
        messages = [{"role": "user", "content": "a"}]
        assert http.post("/apply-template", json={"messages": messages}).json() == {"prompt": "a!"}
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
    assert (
        f"started {model.name} embedded 3 3 5 {{'streams': '2'}}" in text and "warning" not in text
    )
    assert text.splitlines()[-1].startswith("error: terminated")


@pytest.mark.parametrize(
    ("flags", "each"),
    [
        ([], 2048),  # what the model was trained on
        (["--device", "embedded", "--slots", 3], 2048),
        (["-c", 8192, "--slots", 4], 8192),  # of all slots: the engine divides it
    ],
)
def test_a_slot_holds_as_many_tokens_as_the_model_knows(tmp_path, model, flags, each):
    with served(tmp_path, "-m", model, *flags) as (_, url, log):
        n_slots = flags[-1] if "--slots" in flags else 8
        # the engine that is none has one room for all
        n_ctx = each if "-c" in flags else n_slots * each
        assert httpx.get(f"{url}/props").json()["default_generation_settings"]["n_ctx"] == n_ctx
        assert f"({n_slots} slots, {n_ctx} tokens each)" in log.read_text()


def test_a_file_without_a_template_gets_chatml_and_the_start_says_so(tmp_path, model):
    with served(tmp_path, "-m", model) as (_, url, log):
        assert "has no chat template" in log.read_text() and "ChatML" in log.read_text()
        messages = [{"role": "user", "content": "a"}]
        made = httpx.post(f"{url}/apply-template", json={"messages": messages}).json()
    assert made == {"prompt": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"}
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}")
    with served(tmp_path, "-m", model, "--chat-template-file", template) as (_, _, log):
        assert "ChatML" not in log.read_text()


def test_a_second_signal_ends_it_at_once(tmp_path, model):
    with (
        served(tmp_path, "-m", model, "-c", 4000) as (process, url, _),
        httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json={"prompt": [1], "max_tokens": 3000, "stream": True},
        ) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(2) == 130


def test_an_address_for_all_without_a_key_is_warned_of(tmp_path, model):
    with served(tmp_path, "-m", model, "--host", "0.0.0.0") as (process, _, log):
        assert "warning: http://0.0.0.0" in log.read_text()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(10) == 130


def test_an_engine_that_dies_while_it_loads_is_an_error(model):
    ended = subprocess.run(
        [sys.executable, "-m", "tests.serve.command", "-m", model, "--port", "0", "-c", "16"],
        cwd=ROOT, capture_output=True, text=True, timeout=BEGIN_S,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("error: the engine process ended before")


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
def test_wrong_flags_are_refused_before_anything_is_loaded(
    call, monkeypatch, model, tmp_path, flags, words
):
    broken = tmp_path / "t.jinja"
    broken.write_text("{{ bos_token }}\n{% for %}")
    flags = [str(broken) if flag == "BROKEN" else flag for flag in flags]
    monkeypatch.setattr("workbench.server.wire.worker.start", None)  # never called
    status, out, err = call("serve", "-m", model, *flags)
    assert status == 2 and not out and words in err and err.startswith("error: ")
