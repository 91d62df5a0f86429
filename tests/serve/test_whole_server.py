"""`workbench serve` with engine process and model: every way to ask has the engine's answer."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import psutil
import pytest

from tests.edited import edited
from tests.serve.live import TEMPLATE
from tests.serve.test_command import served
from tests.serve.test_echo import parsed, payload
from tests.serve.test_hostile_clients import wait_for
from workbench.config import BEST, TogglePreset
from workbench.engine.engine import Engine
from workbench.server.chat import KEY
from workbench.server.serving import serving

MODULE = ("workbench", "serve")
FLAGS = ("--device", "embedded", "--slots", 3, "-c", 3 * 512)
PROMPT = "The engine waits for"


class Served(NamedTuple):
    """A server, and the file it serves."""

    url: str
    model: Path

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory) -> Path:
    """A tiny model with a chat template in its file."""
    out = tmp_path_factory.mktemp("served") / "chats.gguf"
    return edited(tiny_model("tiny-llama", "Q8_0"), out, keys={KEY: TEMPLATE})


@pytest.fixture(scope="module")
def real(model, tmp_path_factory) -> Iterator[Served]:
    flags = ("-m", model, *FLAGS)
    with served(tmp_path_factory.mktemp("log"), *flags, module=MODULE) as (_, url, _):
        yield Served(url, model)


def ask(real: Served, **more: Any) -> Any:
    given = {"model": "chats", "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | more
    return real.client().completions.create(extra_body={"ignore_eos": True}, **given)


def test_every_way_to_ask_has_the_same_answer(real):
    with real.http() as http:
        ids = http.post("/tokenize", json={"content": PROMPT, "add_special": True}).json()["tokens"]
    whole = ask(real)
    text = whole.choices[0].text
    assert text and whole.usage.completion_tokens == 12
    assert whole.usage.prompt_tokens == len(ids)
    assert ask(real, prompt=ids).choices[0].text == text
    assert ask(real, logprobs=1).choices[0].text == text  # drawn on the host
    parts = list(ask(real, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in parts if c.choices) == text
    assert len(parts) == 12 + 1 + 1 and parts[-1].usage.completion_tokens == 12
    assert parts[-1].timings["predicted_n"] == 12 and parts[-1].timings["predicted_ms"] > 0
    found = text[4:7]
    stopped = ask(real, stop=[found]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(found)], "stop")


def test_log_probabilities_are_those_of_the_engines_logits(real):
    made = ask(real, prompt=[5, 6, 7], logprobs=2).choices[0].logprobs
    with real.http() as http:
        body = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        native = http.post("/completion", json=body | {"n_predict": 12}).json()
    toggles = serving("embedded", TogglePreset(BEST))
    sizes = {"n_ctx": 3 * 512, "n_seqs": 3}
    with Engine.load(real.model, device="embedded", toggles=toggles, **sizes) as engine:
        logits = engine.step([5, 6, 7])[-1].astype(np.float64)
        for token, said in zip(native["tokens"], made.token_logprobs, strict=True):
            top = logits.max()
            known = logits - top - np.log(np.exp(logits - top).sum())
            assert said == pytest.approx(known[token], abs=0.02)
            assert known[token] > known.max() - 0.02  # the likeliest
            logits = engine.step([token])[-1].astype(np.float64)


def test_who_wants_no_kept_cells_has_the_same_answer_without_them(real):
    text = ask(real, prompt=[7] * 40).choices[0].text
    with real.http() as http:
        body = {"prompt": [7] * 40, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        for kept in (True, False):
            answer = http.post("/v1/completions", json=body | {"cache_prompt": kept}).json()
            assert answer["choices"][0]["text"] == text
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (39 if kept else 0)


def test_a_stop_text_at_the_end_of_the_budget_is_stop(real):
    text = ask(real).choices[0].text
    assert len(text) > 2
    made = ask(real, stop=[text[-2:]]).choices[0]  # the engine ends by itself with its last token
    assert (made.text, made.finish_reason) == (text.partition(text[-2:])[0], "stop")


def test_tokens_that_a_request_names_end_its_answer(real):
    with real.http() as http:
        body = {"prompt": PROMPT, "n_predict": 12, "temperature": 0, "ignore_eos": True}
        whole = http.post("/completion", json=body | {"n_probs": 3}).json()
        known = whole["completion_probabilities"]
        assert [k["id"] for k in known] == whole["tokens"] == [
            k["top_logprobs"][0]["id"] for k in known
        ]  # fmt: skip
        end = whole["tokens"][5]
        cut = http.post("/completion", json=body | {"stop_token_ids": [end]}).json()
    assert cut["tokens"] == whole["tokens"][: whole["tokens"].index(end)]
    assert (cut["stop_type"], whole["stop_type"]) == ("eos", "limit")


def test_loglikelihoods_are_those_of_the_engines_logits(real):
    """What lm-eval asks, also of a prompt whose cells the server has."""
    prompts = [[5, 6, 7, 8, 300, 301], [5, 6, 7, 9]]
    with Engine.load(real.model, device="embedded", n_ctx=512) as engine, real.http() as http:
        for _ in range(2):
            made = http.post("/v1/completions", json=payload(prompts)).json()
            for prompt, (found, _) in zip(prompts, parsed(made, [2, 2]), strict=True):
                engine.reset()
                wide = engine.prefill(prompt, outputs="all").astype(np.float64)
                known = wide - np.logaddexp.reduce(wide, axis=1, keepdims=True)
                wanted = sum(known[i - 1, prompt[i]] for i in range(2, len(prompt)))
                assert found == pytest.approx(wanted, abs=0.05)


def test_min_p_of_one_draws_the_likeliest(real):
    """On the device, whatever the temperature."""
    hot = {"temperature": 5, "extra_body": {"ignore_eos": True, "min_p": 1, "top_k": 0}}
    greedy, sure = ask(real), real.client().completions.create(
        model="chats", prompt=PROMPT, max_tokens=12, **hot
    )  # fmt: skip
    assert sure.choices[0].text == greedy.choices[0].text
    hot["extra_body"]["min_p"] = 0
    other = real.client().completions.create(model="chats", prompt=PROMPT, max_tokens=12, **hot)
    assert other.choices[0].text != greedy.choices[0].text


def test_a_seed_says_what_is_drawn(real):
    first, again, other = (
        ask(real, temperature=1, seed=seed, n=2).choices for seed in (7, 7, 9)
    )  # fmt: skip
    assert [c.text for c in first] == [c.text for c in again] != [c.text for c in other]
    assert first[0].text != first[1].text


def test_the_newer_name_of_max_tokens_counts(real):
    both = {"max_tokens": 4, "max_completion_tokens": 2, "ignore_eos": True}
    with real.http() as http:
        made = http.post("/v1/completions", json={"prompt": [1]} | both).json()
    assert made["usage"]["completion_tokens"] == 2


def test_a_chat_has_the_template_of_the_file(real):
    messages = [{"role": "user", "content": "What waits?"}]
    with real.http() as http:
        assert http.get("/props").json()["chat_template"] == TEMPLATE
        prompt = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
        alone = [{"role": "user", "content": "a\ud800"}]  # a surrogate without its other half
        broken = http.post("/apply-template", content=json.dumps({"messages": alone}))
    assert prompt == "<user>What waits?\n<assistant>"
    assert broken.json()["prompt"] == "<user>a?\n<assistant>"
    made = real.client().chat.completions.create(
        model="chats", messages=messages, max_completion_tokens=6, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert made.choices[0].message.content == ask(real, prompt=prompt, max_tokens=6).choices[0].text


def test_a_client_that_goes_away_frees_its_slot(real):
    body = {"prompt": [1], "max_tokens": 500, "stream": True, "ignore_eos": True}
    with real.http() as http:
        for _ in range(2):
            with http.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        wait_for(lambda: "workbench:requests_processing 0.0" in http.get("/metrics").text)
        assert "workbench:requests_pending 0.0" in http.get("/metrics").text
    assert ask(real).choices[0].text


def test_more_requests_than_slots_are_all_answered(real):
    prompts = [[i] * 20 for i in range(1, 13)]
    made = ask(real, prompt=prompts, max_tokens=9)
    assert [c.index for c in made.choices] == list(range(12))
    assert made.usage.completion_tokens == 12 * 9 and all(c.text for c in made.choices)


def engine_of(pid: int) -> psutil.Process:
    """The engine process of a server."""
    found = [p for p in psutil.Process(pid).children() if "spawn_main" in " ".join(p.cmdline())]
    assert len(found) == 1, found
    return found[0]


def pending(http: httpx.Client) -> float:
    found = re.search(r"requests_pending ([0-9.]+)", http.get("/metrics").text)
    assert found is not None
    return float(found[1])


def test_a_killed_engine_process_ends_the_server_behind_what_was_pending(model, tmp_path):
    with served(tmp_path, "-m", model, *FLAGS[:-1], 3 << 14, module=MODULE) as (process, url, log):
        # one client, which asks within milliseconds, while the stream is far from its end
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        http = httpx.Client(base_url=url, timeout=60, limits=limits)
        body = {"prompt": [1], "max_tokens": 16000, "ignore_eos": True}
        answers: list[httpx.Response] = []
        # six times the slots, so that most of them wait
        asking = [
            threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body)))
            for _ in range(18)
        ]
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as streamed:
            lines = streamed.iter_lines()
            next(lines)
            for thread in asking:  # behind the stream, which has a slot
                thread.start()
            until = time.monotonic() + 30
            while pending(http) < 19:
                assert time.monotonic() < until
            engine_of(process.pid).send_signal(signal.SIGKILL)
            last = [line for line in lines if line][-1]
        for thread in asking:
            thread.join(30)
        assert json.loads(last[6:])["error"]["code"] == "dead"
        assert len(answers) == 18 and {a.status_code for a in answers} <= {200, 503}
        assert [a.json()["error"]["code"] for a in answers if a.status_code == 503].count("dead")
        assert process.wait(20) == 1
        assert log.read_text().count("died") == 1
        assert log.read_text().splitlines()[-1].startswith("error: the engine process has died")
