"""`workbench serve` as a command: its flags, signals, and the status it ends with; and with engine
process and model: every way to ask has the engine's answer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest

from tests.edited import edited
from tests.server.command import served
from tests.server.live import TEMPLATE, USER, wait_for
from workbench.engine.engine import Engine
from workbench.server.chat import KEY

MODULE = ("workbench", "serve")
FLAGS = ("--device", "embedded", "--slots", 3, "-c", 3 * 512)
PROMPT, URL = "The engine waits for", "/v1/completions"


@pytest.fixture(scope="module")
def plain(tiny_model) -> Path:
    """Of no chat template."""
    return tiny_model("tiny-llama", "F16")


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory) -> Path:
    """A tiny model with a chat template in its file."""
    out = tmp_path_factory.mktemp("served") / "chats.gguf"
    return edited(tiny_model("tiny-llama", "Q8_0"), out, keys={KEY: TEMPLATE})


@pytest.fixture(scope="module")
def real(model, tmp_path_factory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("log")
    with served(folder, "-m", model, *FLAGS, module=MODULE) as (_, url, _):
        yield httpx.Client(base_url=url, timeout=60)


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, content=json.dumps(body))
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.long
def test_flags_reach_the_engine_and_a_signal_ends_it(tmp_path, plain):
    template, keys = tmp_path / "t.jinja", tmp_path / "keys"
    template.write_text("{{ messages[0].content }}!")
    keys.write_text("# of the first team\none\n\n  # of the second\ntwo\n")
    flags = ["-m", plain, "--slots", 3, "--max-waiting", 5, "-c", 256, "--alias", "mine"]
    flags += ["--chat-template-file", template, "--api-key-file", keys, "--temp", 0]
    flags += ["--device", "embedded", "--streams", 2]
    with served(tmp_path, *flags) as (process, url, log):
        http = httpx.Client(base_url=url, headers={"authorization": "Bearer two"})
        assert http.get("/v1/models").json()["data"][0]["id"] == "mine"
        assert http.get("/props").json()["total_slots"] == 3
        assert post(http, "/apply-template", messages=USER) == {"prompt": "a!"}
        for wrong in ("", "#", "# of the first team"):
            refused = httpx.get(f"{url}/v1/models", headers={"x-api-key": wrong})
            assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        with http.stream("POST", URL, json={"prompt": [1], "max_tokens": 50, "stream": True}) as s:
            lines = s.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and len(rest) == 49 + 1 + 1
        assert process.wait(10) == 143
        text = log.read_text()
    assert f"started {plain.name} embedded 3 3 5 {{'streams': '2'}}" in text
    assert "warning" not in text and "ChatML" not in text
    under_way, last = text.splitlines()[-2:]
    assert last == "ended by SIGTERM; every answer was finished"
    assert under_way == (
        "SIGTERM: 1 answer under way, at most 60 s more; a second signal ends all at once"
    )
    assert "error" not in text


@pytest.mark.long
def test_what_no_flag_says_is_said_at_the_start(tmp_path, plain):
    """Of a file without a template, and of an address for all without a key; a second signal ends
    it at once."""
    with served(tmp_path, "-m", plain, "--host", "0.0.0.0") as (process, url, log):
        http, n_ctx, said = httpx.Client(base_url=url), 8 * 2048, log.read_text()
        # slots have as much as the model was trained on; the engine that is none has one room
        assert http.get("/props").json()["default_generation_settings"]["n_ctx"] == n_ctx
        assert f"(8 slots, {n_ctx} tokens each)" in said and "warning: http://0.0.0.0" in said
        assert "has no chat template" in said and "ChatML" in said
        made = post(http, "/apply-template", messages=USER)["prompt"]
        assert made == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        body = {"prompt": [1], "max_tokens": 3000, "stream": True}
        with http.stream("POST", URL, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            for _ in range(40):  # it goes on
                next(lines)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(2) == 130


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], "65535"),
        (["--slots", "0"], "--slots"),
        (["--min-p", "2"], "min_p"),
        (["--timeout", "-1"], "--timeout"),
        (["--api-key-file", "/no/such"], "cannot read /no/such"),
        (["--api-key-file", os.devnull], "no API key"),
        (["--chat-template-file", "BROKEN"], "line 2 is no chat template: Expected an expression"),
        (["--n-seqs", "5"], "--slots"),
        (["--device", "null"], "computes nothing"),
        (["--cors-origin", "https://chat.example/a"], "is no origin"),
        (["--cors-origin", "chat.example"], "'chat.example' is no origin"),
        (["--temp", "-1"], "temperature"),
        (["--chat-template-file", "/no/such"], "cannot read"),
        (["-c", "15"], "8 slots cannot be used together: the cache has 15 cells"),
        (["-c", "5", "--slots", "3", "--kv-cache", "unified"], "each needs 2 at least"),
        (["--host", "no.such.host.invalid", "--port", "0"], "cannot listen"),
    ],
)
def test_wrong_flags_are_refused_before_a_model_is_loaded(
    call, monkeypatch, plain, tmp_path, flags, words
):
    broken = tmp_path / "t.jinja"
    broken.write_text("{{ bos_token }}\n{% for %}")
    flags = [str(broken) if flag == "BROKEN" else flag for flag in flags]
    monkeypatch.setattr("workbench.server.wire.worker.start", None)  # never called
    status, out, err = call("serve", "-m", plain, *flags)
    assert status == 2 and not out and words in err and err.startswith("error: ")


@pytest.mark.long
def test_a_killed_engine_process_ends_the_server(model, tmp_path):
    """Behind what was pending: six times the slots, so that most of them wait."""
    flags = ("-m", model, *FLAGS[:-1], 3 << 14)
    # one client, which asks within milliseconds, while the stream is far from its end
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    with (
        served(tmp_path, *flags, module=MODULE) as (process, url, log),
        httpx.Client(base_url=url, timeout=60, limits=limits) as http,
        ThreadPoolExecutor(18) as pool,
    ):
        body = {"prompt": [1], "max_tokens": 16000, "ignore_eos": True}
        with http.stream("POST", URL, json=body | {"stream": True}) as streamed:
            lines = streamed.iter_lines()
            next(lines)
            # behind the stream, which has a slot
            asked = [pool.submit(http.post, URL, json=body) for _ in range(18)]
            wait_for(lambda: "requests_pending 19." in http.get("/metrics").text, 30)
            children = psutil.Process(process.pid).children()
            (engine,) = [p for p in children if "spawn_main" in " ".join(p.cmdline())]
            engine.send_signal(signal.SIGKILL)
            last = [line for line in lines if line][-1]
        answers = [one.result() for one in asked]
        assert json.loads(last[6:])["error"]["code"] == "dead"
        assert {a.status_code for a in answers} <= {200, 503}
        assert [a.json()["error"]["code"] for a in answers if a.status_code == 503].count("dead")
        assert process.wait(20) == 1 and log.read_text().count("died") == 1
        assert log.read_text().splitlines()[-1].startswith("error: the engine process has died")


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_lets_answers_end(model, tmp_path, sent):
    """As a supervisor ends a service, and a terminal its command."""
    with served(tmp_path, "-m", model, *FLAGS, module=MODULE) as (process, url, log):
        body = {"prompt": [1], "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}{URL}", json=body, timeout=60) as streamed:
            lines = streamed.iter_lines()
            next(lines)
            os.killpg(process.pid, sent)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and process.wait(20) == 128 + sent
    assert log.read_text().splitlines()[-1] == f"ended by {sent.name}; every answer was finished"


@pytest.mark.long
def test_every_way_to_ask_has_the_same_answer(real):
    client = openai.OpenAI(base_url=f"{real.base_url}/v1", api_key="none", max_retries=0)

    def ask(**more: Any) -> Any:
        given = {"model": "chats", "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | more
        body = {"ignore_eos": True} | given.pop("extra_body", {})
        return client.completions.create(extra_body=body, **given)

    ids = post(real, "/tokenize", content=PROMPT, add_special=True)["tokens"]
    whole = ask()
    text = whole.choices[0].text
    assert text and whole.usage.completion_tokens == 12 and whole.usage.prompt_tokens == len(ids)
    assert ask(prompt=ids).choices[0].text == text
    assert ask(logprobs=1).choices[0].text == text  # drawn on the host
    parts = list(ask(stream=True))
    assert "".join(c.choices[0].text for c in parts) == text
    assert len(parts) == 12 + 1 and parts[-1].timings["predicted_ms"] > 0
    for found in (text[4:7], text[-2:]):  # before the engine ends, and at its last token
        stopped = ask(stop=[found]).choices[0]
        assert (stopped.text, stopped.finish_reason) == (text[: text.index(found)], "stop")
    # min_p of one draws the likeliest, whatever the temperature
    for min_p in (0, 1):
        drawn = ask(temperature=5, extra_body={"min_p": min_p, "top_k": 0})
        assert (drawn.choices[0].text == text) == min_p
    first, again, other = (ask(temperature=1, seed=s, n=2).choices for s in (7, 7, 9))
    assert [c.text for c in first] == [c.text for c in again] != [c.text for c in other]
    assert first[0].text != first[1].text
    for kept in (True, False):  # of its prompt, which the slot has; unless it wants no cells
        usage = ask(extra_body={"cache_prompt": kept}).usage
        assert usage.prompt_tokens_details.cached_tokens == (len(ids) - 1 if kept else 0)
    # more requests than slots
    made = ask(prompt=[[i] * 20 for i in range(1, 13)], max_tokens=9)
    assert [c.index for c in made.choices] == list(range(12))
    assert made.usage.completion_tokens == 12 * 9 and all(c.text for c in made.choices)
    # a chat has the template of the file; here of a surrogate without its other half
    asked = {"messages": [{"role": "user", "content": "a\ud800"}]}
    prompt = post(real, "/apply-template", **asked)["prompt"]
    assert prompt == "<user>a?\n<assistant>"
    asked |= {"max_completion_tokens": 12, "temperature": 0, "ignore_eos": True}
    (chat,) = post(real, "/v1/chat/completions", **asked)["choices"]
    assert chat["message"]["content"] == ask(prompt=prompt).choices[0].text


@pytest.mark.long
def test_loglikelihoods_are_those_of_the_engines_logits(real, model):
    """What lm-eval 0.4.13 sends for `local-completions`, and how it reads the answer; also of a
    prompt whose cells the server has."""

    def wanted(ids: list[int]) -> np.ndarray:
        """Of each of the ids after the first, by an engine's own logits."""
        with Engine.load(model, device="embedded", n_ctx=512) as engine:
            wide = engine.prefill(ids, outputs="all").astype(np.float64)
        known = wide - np.logaddexp.reduce(wide, axis=1, keepdims=True)
        return known[np.arange(len(ids) - 1), ids[1:]]

    prompts = [[5, 6, 7, 8, 300, 301], [5, 6, 7, 9]]
    body = {"model": "", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    for _ in range(2):
        made = post(real, URL, prompt=prompts, echo=True, **body)
        choices = sorted(made["choices"], key=lambda c: c["index"])
        said = [sum(c["logprobs"]["token_logprobs"][2:-1]) for c in choices]
        assert said == pytest.approx([wanted(ids)[1:].sum() for ids in prompts], abs=0.05)
    # of what is made, too; that is the likeliest
    body = {"prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True, "n_predict": 12}
    native = post(real, "/completion", **body, n_probs=3)
    known, tokens = native["completion_probabilities"], native["tokens"]
    assert [k["id"] for k in known] == tokens == [k["top_logprobs"][0]["id"] for k in known]
    told = wanted([5, 6, 7, *tokens])[2:]
    assert [k["logprob"] for k in known] == pytest.approx(told, abs=0.02)
    cut = post(real, "/completion", **body, stop_token_ids=[tokens[5]])
    assert cut["tokens"] == tokens[: tokens.index(tokens[5])] and cut["stop_type"] == "eos"
