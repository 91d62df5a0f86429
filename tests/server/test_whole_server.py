"""`workbench serve` with engine process and model: every way to ask has the engine's answer."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import psutil
import pytest

from tests.edited import edited
from tests.server.command import served
from tests.server.live import TEMPLATE, wait_for
from workbench.engine.engine import Engine
from workbench.server.chat import KEY
from workbench.server.text import TokenTexts

MODULE = ("workbench", "serve")
FLAGS = ("--device", "embedded", "--slots", 3, "-c", 3 * 512)
PROMPT = "The engine waits for"


class Served(NamedTuple):
    """A server, and the file it serves."""

    url: str
    model: Path

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def post(self, path: str, **body: Any) -> Any:
        answer = httpx.post(self.url + path, content=json.dumps(body), timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()


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
    body = {"ignore_eos": True} | given.pop("extra_body", {})
    return real.client().completions.create(extra_body=body, **given)


def pending(http: httpx.Client) -> float:
    (found,) = re.findall(r"requests_pending ([0-9.]+)", http.get("/metrics").text)
    return float(found)


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
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as streamed:
            lines = streamed.iter_lines()
            next(lines)
            # behind the stream, which has a slot
            asked = [pool.submit(http.post, "/v1/completions", json=body) for _ in range(18)]
            wait_for(lambda: pending(http) == 19, 30)
            children = psutil.Process(process.pid).children()
            (engine,) = [p for p in children if "spawn_main" in " ".join(p.cmdline())]
            engine.send_signal(signal.SIGKILL)
            last = [line for line in lines if line][-1]
        answers = [one.result() for one in asked]
        assert json.loads(last[6:])["error"]["code"] == "dead"
        assert {a.status_code for a in answers} <= {200, 503}
        assert [a.json()["error"]["code"] for a in answers if a.status_code == 503].count("dead")
        assert process.wait(20) == 1
        assert log.read_text().count("died") == 1
        assert log.read_text().splitlines()[-1].startswith("error: the engine process has died")


def test_every_way_to_ask_has_the_same_answer(real):
    ids = real.post("/tokenize", content=PROMPT, add_special=True)["tokens"]
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
    for found in (text[4:7], text[-2:]):  # before the engine ends, and at its last token
        stopped = ask(real, stop=[found]).choices[0]
        assert (stopped.text, stopped.finish_reason) == (text[: text.index(found)], "stop")
    # min_p of one draws the likeliest, whatever the temperature
    for min_p in (0, 1):
        drawn = ask(real, temperature=5, extra_body={"min_p": min_p, "top_k": 0})
        assert (drawn.choices[0].text == text) == min_p
    first, again, other = (ask(real, temperature=1, seed=s, n=2).choices for s in (7, 7, 9))
    assert [c.text for c in first] == [c.text for c in again] != [c.text for c in other]
    assert first[0].text != first[1].text
    # more requests than slots
    made = ask(real, prompt=[[i] * 20 for i in range(1, 13)], max_tokens=9)
    assert [c.index for c in made.choices] == list(range(12))
    assert made.usage.completion_tokens == 12 * 9 and all(c.text for c in made.choices)


def test_cells_are_kept_unless_a_request_wants_none(real):
    body = {"prompt": [7] * 40, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    text = real.post("/v1/completions", **body)["choices"][0]["text"]
    for kept in (True, False):
        answer = real.post("/v1/completions", **body, cache_prompt=kept)
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (39 if kept else 0)


def loglikelihoods(model: Path, pairs: list[tuple[list[int], int]]) -> list[float]:
    """Of the ids behind the first n, by an engine's own logits."""
    found = []
    with Engine.load(model, device="embedded", n_ctx=512) as engine:
        for ids, n in pairs:
            engine.reset()
            wide = engine.prefill(ids, outputs="all").astype(np.float64)
            known = wide - np.logaddexp.reduce(wide, axis=1, keepdims=True)
            found.append(sum(known[i - 1, ids[i]] for i in range(n, len(ids))))
    return found


def test_loglikelihoods_are_those_of_the_engines_logits(real):
    """What lm-eval 0.4.13 sends for `local-completions`, and how it reads the answer; also of a
    prompt whose cells the server has."""
    prompts = [[5, 6, 7, 8, 300, 301], [5, 6, 7, 9]]
    body = {"model": "", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    for _ in range(2):
        made = real.post("/v1/completions", prompt=prompts, echo=True, **body)
        choices = sorted(made["choices"], key=lambda c: c["index"])
        said = [sum(c["logprobs"]["token_logprobs"][2:-1]) for c in choices]
        wanted = loglikelihoods(real.model, [(ids, 2) for ids in prompts])
        assert said == pytest.approx(wanted, abs=0.05)
    # of what is made, too; that is the likeliest
    body = {"prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True, "n_predict": 12}
    native = real.post("/completion", **body, n_probs=3)
    known, tokens = native["completion_probabilities"], native["tokens"]
    assert [k["id"] for k in known] == tokens == [k["top_logprobs"][0]["id"] for k in known]
    wanted = loglikelihoods(real.model, [([5, 6, 7, *tokens[: n + 1]], 3 + n) for n in range(12)])
    assert [k["logprob"] for k in known] == pytest.approx(wanted, abs=0.02)
    cut = real.post("/completion", **body, stop_token_ids=[tokens[5]])
    assert cut["tokens"] == tokens[: tokens.index(tokens[5])] and cut["stop_type"] == "eos"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="no lm_eval")
def test_lm_evals_loglikelihoods_are_those_of_the_logits(real, texts: TokenTexts):
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    class Words:
        """A tokenizer as lm-eval wants one: that of the file."""

        bos_token_id = eos_token_id = texts.tokenizer.eos_id

        def encode(self, text: str, **_: object) -> list[int]:
            return texts.tokenizer.encode(text, False)

    client = LocalCompletionsAPI(
        base_url=f"{real.url}/v1/completions", model="chats", tokenizer_backend=None, batch_size=2,
        num_concurrent=2, max_length=512,
    )  # fmt: skip
    words = client.tokenizer = Words()
    client.tokenized_requests = True
    client.tok_encode = words.encode
    pairs = [("A stream is", " a queue"), ("A stream is", " a river"), (PROMPT, " a token")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    found = [said for said, _ in client.loglikelihood(asked)]
    encoded = [(words.encode(a + b), len(words.encode(a))) for a, b in pairs]
    assert found == pytest.approx(loglikelihoods(real.model, encoded), abs=0.1)


def test_a_chat_has_the_template_of_the_file(real):
    messages = [{"role": "user", "content": "What waits?"}]
    assert httpx.get(f"{real.url}/props").json()["chat_template"] == TEMPLATE
    prompt = real.post("/apply-template", messages=messages)["prompt"]
    assert prompt == "<user>What waits?\n<assistant>"
    alone = [{"role": "user", "content": "a\ud800"}]  # a surrogate without its other half
    assert real.post("/apply-template", messages=alone)["prompt"] == "<user>a?\n<assistant>"
    made = real.client().chat.completions.create(
        model="chats", messages=messages, max_completion_tokens=6, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert made.choices[0].message.content == ask(real, prompt=prompt, max_tokens=6).choices[0].text
